"""DataReport: counts of pictures, captions and batches, printed as text before training."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

LISTED = 20


@dataclass(frozen=True)
class BucketRow:
    """One bucket: its shape, and its number of user pictures, items with repeats, class pictures and batches."""

    width: int
    height: int
    images: int
    items: int
    class_images: int
    batches: int
    cropped_percent: float


@dataclass
class DataReport:
    """Counts and lists collected before training. `rejected` holds (name, reason)."""

    folder: str
    images_found: int = 0
    captions_matched: int = 0
    captions_filled: int = 0
    images_used: int = 0
    class_images_found: int = 0
    class_images_used: int = 0
    items_per_epoch: int = 0
    batches_per_epoch: int = 0
    masks: int | None = None
    other_files: int = 0
    repeats: dict[int, int] = field(default_factory=dict)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    buckets: list[BucketRow] = field(default_factory=list)
    cache: list[str] = field(default_factory=list)
    loader: str = ""

    def count_batches(self, batches: int, items_per_batch: int) -> None:
        """Fill in the number of batches per epoch and per bucket."""
        self.batches_per_epoch = batches
        self.buckets = [replace(row, batches=-(-row.items // items_per_batch)) for row in self.buckets]

    def __str__(self) -> str:
        lines = [
            f"data: {self.folder}",
            f"  images    {self.images_found} found, {self.images_used} used, {len(self.rejected)} rejected",
            f"  captions  {self.captions_matched} matched"
            + (f", {self.captions_filled} filled in by missing_captions" if self.captions_filled else ""),
        ]
        if self.class_images_found:
            lines.append(f"  class     {self.class_images_found} found, {self.class_images_used} used")
        if self.masks is not None:
            lines.append(f"  masks     {self.masks} of {self.images_used}; an image without one is learned everywhere")
        if set(self.repeats) - {1}:
            lines.append("  repeats   " + ", ".join(f"{n} images x {r}" for r, n in sorted(self.repeats.items())))
        lines.append(f"  epoch     {self.items_per_epoch} items in {self.batches_per_epoch} batches")
        if self.other_files:
            lines.append(f"  ignored   {self.other_files} other files")
        lines += self._bucket_table()
        lines += _listed("rejected", [f"{name}: {reason}" for name, reason in self.rejected])
        lines += _listed("notes", self.notes)
        lines += _listed("advice", self.advice)
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


def _listed(title: str, entries: list[str]) -> list[str]:
    if not entries:
        return []
    more = [f"    and {len(entries) - LISTED} more"] if len(entries) > LISTED else []
    return [f"  {title}", *(f"    {entry}" for entry in entries[:LISTED]), *more]
