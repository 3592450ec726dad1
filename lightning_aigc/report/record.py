"""RunRecord: what a run measured, as its report.json keeps it; pages and comparisons are made of nothing else."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning_aigc.atomic_file import write_text
from lightning_aigc.errors import DataError
from lightning_aigc.report.paired_scores import Check

RECORD_FILE, SUMMARY_FILE = "report.json", "summary.json"
FORMAT = 1
MOST = 2**63 - 1
"""The largest whole number that a record holds."""
T = TypeVar("T")


@dataclass(frozen=True)
class Curve:
    """One number by optimizer step."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Paired:
    """The scores of the same prompts and seeds before and after training; `after` is empty while it runs."""

    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Picture:
    """One prompt and seed before and after training, as data URIs; an empty string where there is no image."""

    prompt: str
    seed: int
    is_other: bool = False
    """Whether the prompt is one of the unrelated ones that show what was forgotten."""
    before: str = ""
    after: str = ""
    source: str = ""
    """The image that an edit started from."""


@dataclass(frozen=True)
class Looks:
    """Facts about the images of before and after that need no score, and whether the judge knew those of before."""

    recognition: float = math.nan
    """Score of the base's own images above that of shuffled prompts; NaN where it was not measured."""
    recognition_stderr: float = math.nan
    changed: float = math.nan
    """Pixel distance between before and after, over that between two images of before; of the trained prompts."""
    others_changed: float = math.nan
    """The same for the unrelated prompts."""
    images: int = 0
    """Images of each time."""
    ruined_before: list[str] = field(default_factory=list)
    """Noise, flat, saturated, black ...: one word for each such image."""
    ruined_after: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class GuardResult:
    """Scores and decision of CLIPConvergenceGuard."""

    metric: Literal["clip_t", "clip_i", "mean", "edit", "direction", "kept"]
    checks: list[Check] = field(default_factory=list)
    best_step: int | None = None
    best_file: str | None = None
    has_stopped: bool = False
    memorising: str | None = None
    """Its warning, if it gave one."""


@dataclass(frozen=True)
class RateChange:
    """A decision of AdaptiveLR: from `step` on the rate is `factor` times the schedule's."""

    step: int
    factor: float
    reason: str


@dataclass(frozen=True)
class HealthAlert:
    """An alert of GradientHealthMonitor."""

    step: int
    check: str
    layer: str
    level: Literal["info", "warning", "error"]
    message: str
    cause: str
    remedy: str
    since: int = 0
    rank: int = 0


@dataclass(frozen=True)
class Health:
    """Alerts and gradient norms; a norm of NaN is a gradient that is None, an infinite one is not finite."""

    alerts: list[HealthAlert] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    norms: dict[str, list[float]] = field(default_factory=dict)
    """By layer or block, one for each of `steps`."""
    rows_are: Literal["layer", "block"] = "layer"


@dataclass(frozen=True)
class FineTuneFinding:
    """One thing that FineTuneCheck found wrong with a fine-tune."""

    check: str
    message: str
    remedy: str
    """A config line."""

    def line(self) -> str:
        """The console's line."""
        return f"fine-tune: {self.check}: {self.message}. Remedy: {self.remedy}"


@dataclass(frozen=True)
class FineTuneResult:
    """Measurements of FineTuneCheck on the last weights."""

    summary: str
    findings: list[FineTuneFinding] = field(default_factory=list)


@dataclass(frozen=True)
class SyncResult:
    """Traffic of gradients between the ranks."""

    mode: str
    world_size: int
    skipped_steps: int = 0


@dataclass(frozen=True)
class Snapshots:
    """The snapshots of a run, those before a resume too."""

    taken: int = 0
    blocked_ms: list[float] = field(default_factory=list)
    """Blocking time per snapshot; unknown for the snapshot that a resumed run started from."""
    newest: str | None = None
    newest_step: int | None = None
    newest_bytes: int | None = None


@dataclass(frozen=True)
class LoRAFile:
    """The trained file, and what one has to know to use it."""

    file: str
    trigger_word: str | None = None
    base_model: str | None = None
    kohya_layout: bool = True
    """Whether ComfyUI and A1111 can read it."""
    edits: bool = False
    """Whether it was trained on edits of source images."""
    base_pipeline: str | None = None
    """diffusers' class that draws with the base; None where it is not known."""
    edit_pipeline: str | None = None
    """diffusers' class that edits with the base; None where there is none."""
    lokr_of: str | None = None
    """Part of the pipeline that a LoKr adapts, `unet` or `transformer`; None for a LoRA."""


@dataclass
class RunRecord:
    """One run from its first step to its last, across resumes."""

    name: str
    folder: str = ""
    is_finished: bool = False
    steps: int = 0
    seconds: float = 0.0
    """Training, without the sampling before and after it."""
    peak_memory_mib: float = 0.0
    device: str = "cpu"
    world_size: int = 1
    precision: str = ""
    date: str = ""
    scores: dict[str, Paired] = field(default_factory=dict)
    """`clip_t` and `clip_i`, and `prior_clip_t` and `prior_clip_i` of the unrelated prompts; of edits `direction` and
    `kept`."""
    pictures: list[Picture] = field(default_factory=list)
    grids: list[Check] = field(default_factory=list)
    """The scores of the sample grids."""
    looks: Looks | None = None
    curves: dict[str, Curve] = field(default_factory=dict)
    """`loss`, `lr`, `val_loss`, `sync_mb`, `sync_ratio`; those that were there."""
    guard: GuardResult | None = None
    rate_changes: list[RateChange] = field(default_factory=list)
    health: Health | None = None
    fine_tune: FineTuneResult | None = None
    sync: SyncResult | None = None
    snapshots: Snapshots | None = None
    lora: LoRAFile | None = None
    figures: dict[str, float] = field(default_factory=dict)
    """Further numbers of summary.json, by name; NaN for one that was not found."""
    result_files: dict[str, str] = field(default_factory=dict)
    """Further files and folders of summary.json, by name."""
    sheets: dict[str, str] = field(default_factory=dict)
    """Sheets of images by title, each a data URI."""
    config: str = ""
    """The run's YAML."""
    notes: list[str] = field(default_factory=list)
    stopped_by: str = ""
    """The error, or `a signal`, that ended the run before its end."""
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write report.json into a run's folder, atomically. Raises: OSError."""
        text = json.dumps(_plain(dataclasses.asdict(self)), ensure_ascii=False, separators=(",", ":"))
        write_text(folder / RECORD_FILE, text + "\n")


def read_run(folder: Path) -> RunRecord:
    """The record that a run left in its folder.

    Raises: DataError with what is wrong with the folder, and what to do.
    """
    file = folder / RECORD_FILE
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; give a run's trainer.default_root_dir")
    if not file.is_file():
        if (folder / SUMMARY_FILE).is_file():
            raise DataError(
                f"{folder} has a {SUMMARY_FILE} and no {RECORD_FILE}: an older version wrote it; run it again"
            )
        raise DataError(f"{folder} is no run: it has no {RECORD_FILE}, which RunReport writes; give a run's folder")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise DataError(
                f"{file} is of format {str(values['format'])[:80]}; this version reads {FORMAT}: install a newer one"
            )
        record: RunRecord = _built(RunRecord, values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{file} cannot be read ({type(error).__name__}: {str(error).splitlines()[0]}): it is torn or was edited;"
            " leave this run out, or run it again"
        ) from error
    record.folder = str(folder)
    return record


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: null and a string."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _built(wanted: Any, value: Any) -> Any:
    """The value of a field's type from JSON."""
    arguments = typing.get_args(wanted)
    if wanted is float:
        return math.nan if value is None else float(value)
    if dataclasses.is_dataclass(wanted) and isinstance(wanted, type):
        hints = typing.get_type_hints(wanted)
        return wanted(**{name: _built(hints[name], item) for name, item in value.items() if name in hints})
    if isinstance(wanted, types.UnionType):
        return None if value is None else _built(arguments[0], value)
    if typing.get_origin(wanted) is Literal:
        if value not in arguments:
            raise TypeError(f"got {value!r}, wanted one of {', '.join(arguments)}")
        return value
    if typing.get_origin(wanted) is list:
        return [_built(arguments[0], item) for item in value]
    if typing.get_origin(wanted) is dict:
        return {str(key): _built(arguments[1], item) for key, item in value.items()}
    if not isinstance(value, wanted) or (wanted is int and (isinstance(value, bool) or abs(value) > MOST)):
        raise TypeError(f"got {str(value)[:80]!r}, wanted {wanted.__name__}")
    return value.encode(errors="replace").decode() if wanted is str else value  # half a surrogate pair
