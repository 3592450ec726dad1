"""DataReport: counts of images, captions and batches, printed as text before training."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lightning_aigc.data.report.findings import Finding, listed


@dataclass(frozen=True)
class BucketRow:
    """One bucket: its shape, and its number of user images, items with repeats, class images and batches."""

    width: int
    height: int
    images: int
    items: int
    class_images: int
    batches: int
    cropped_percent: float


@dataclass
class DataReport:
    """Counts and lists collected before training. `rejected` holds (name, reason), `findings` what each check found."""

    folder: str
    images_found: int = 0
    captions_matched: int = 0
    captions_filled: int = 0
    images_used: int = 0
    class_images_found: int = 0
    class_images_used: int = 0
    images_held_out: int = 0
    """Images for `val_loss`, which are not trained on."""
    items_per_epoch: int = 0
    batches_per_epoch: int = 0
    masks: int | None = None
    images_for_masks: int = 0
    """Images that may have a mask: those for training, whether or not validation_split holds them out."""
    other_files: int = 0
    repeats: dict[int, int] = field(default_factory=dict)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    buckets: list[BucketRow] = field(default_factory=list)
    cache: list[str] = field(default_factory=list)
    loader: str = ""
    written_files: int = 0
    """Files that this process wrote for this run, all of them below the cache folder."""
    written_bytes: int = 0

    def count_batches(self, batches: int, items_per_batch: int) -> None:
        """Fill in the number of batches per epoch and per bucket."""
        self.batches_per_epoch = batches
        self.buckets = [replace(row, batches=-(-row.items // items_per_batch)) for row in self.buckets]

    def count_written(self, files: int, size_bytes: int) -> None:
        """Count files that were written to the cache folder."""
        self.written_files += files
        self.written_bytes += size_bytes

    def __str__(self) -> str:
        lines = [
            f"data: {self.folder}",
            f"  images    {self.images_found} found, {self.images_used} used, {len(self.rejected)} rejected"
            + (f", {self.images_held_out} held out for val_loss" if self.images_held_out else ""),
            f"  captions  {self.captions_matched} matched"
            + (f", {self.captions_filled} filled in by missing_captions" if self.captions_filled else ""),
        ]
        if self.class_images_found:
            lines.append(f"  class     {self.class_images_found} found, {self.class_images_used} used")
        if self.masks is not None:
            of = f"{self.masks} of {self.images_for_masks}"
            lines.append(f"  masks     {of}; an image without one is learned everywhere")
        if set(self.repeats) - {1}:
            lines.append("  repeats   " + ", ".join(f"{n} images x {r}" for r, n in sorted(self.repeats.items())))
        if self.buckets:
            lines.append(f"  epoch     {self.items_per_epoch} items in {self.batches_per_epoch} batches")
        if self.other_files:
            lines.append(f"  ignored   {self.other_files} other files")
        if self.buckets:
            lines += self._bucket_table()
        for finding in sorted(self.findings, key=lambda f: not f.stops):
            lines += finding.lines()
        if self.notes:
            lines += ["  notes", *listed(self.notes)]
        if self.advice:
            lines += ["  advice", *listed(self.advice)]
        lines += [f"  cache     {line}" for line in self.cache]
        if self.loader:
            lines.append(f"  loader    {self.loader}")
        return "\n".join(lines)

    def _bucket_table(self) -> list[str]:
        lines = [f"  {'bucket':>11} {'images':>7} {'items':>7} {'class':>7} {'batches':>8} {'cropped':>8}"]
        for row in self.buckets:
            shape = f"{row.width} x {row.height}"
            lines.append(
                f"  {shape:>11} {row.images:>7} {row.items:>7} {row.class_images:>7} {row.batches:>8} "
                f"{row.cropped_percent:>7.1f}%"
            )
        return lines
