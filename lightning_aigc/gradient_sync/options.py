"""What a user chooses about gradient sync, checked where it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lightning_aigc.cluster.modes import AVERAGE_BITS, DEFAULT_MODE, SPARSE_MODES, Average, Mode
from lightning_aigc.errors import ConfigError
from lightning_aigc_kernels.protection import GradientProtection

READ_BY_MODES: dict[str, tuple[str, ...]] = {
    "sparsity": SPARSE_MODES,
    "layer_wise_adaptive": SPARSE_MODES,
    "local_steps": ("local",),
    "average": ("local",),
    "overlap_average": ("local",),
    "outer_learning_rate": ("local",),
    "outer_momentum": ("local",),
}
"""Options that only some modes read."""
DEFAULT_PROTECT = ("vae.decoder*", "*mid_block.attentions*")
AVERAGE_HOPS = 2
"""local: collectives of an average at the most, the shards and their sums; overlapped, one a step."""
LORA = ".lora_"
"""A part of the names that peft and diffusers give to a LoRA's parameters."""


@dataclass(frozen=True)
class SyncOptions:
    """How gradients are reduced over the ranks.

    Raises: ConfigError for a value outside what its field says.
    """

    mode: Mode = DEFAULT_MODE
    """What is sent of a gradient; `auto` measures the link first and may choose `dense`."""
    sparsity: float = 0.75
    """Sparse modes: share of the gradient that waits for a later step, in [0, 1)."""
    layer_wise_adaptive: bool = True
    """Sparse modes: layers share what is sent by the size of their gradients; else each sends the same share."""
    protect: Sequence[str] | None = None
    """Name patterns of parameters that are sent whole in float32, as in FusedBackwardPrecision; a pattern that covers
    nothing is an error. None protects `vae.decoder` and `mid_block.attentions` where a model has them, and nothing of a
    LoRA: there they would be nearly half of the bytes."""
    warmup_steps: int = 0
    """Dense steps before compression begins."""
    error_feedback: bool = True
    """Whether what was not sent is added to the next gradient; without it the loss suffers visibly."""
    hierarchical: bool | Literal["auto"] = "auto"
    """Whether ranks of one node first add up among themselves, dense; auto does where nodes have equally many ranks."""
    bucket_mb: float = 25.0
    """MB of float32 gradient that are reduced together; DDP's buckets are as large."""
    overlap: bool = True
    """Whether gradients travel while backward runs on."""
    local_steps: int = 8
    """local: optimizer steps between two averages of the parameters."""
    average: Average = "float32"
    """local: how averages travel; what integers round off is added to the next average."""
    overlap_average: bool = False
    """local: step on while an average travels, and take it two steps later; hides a slow link. At 4 steps of int3 it
    raised a small denoiser's loss by 6 %, where waiting for the average raises it by 4 %."""
    outer_learning_rate: float = 1.0
    """local: how far the parameters go to the average; 1 is all the way."""
    outer_momentum: float = 0.0
    """local: Nesterov momentum over averages."""
    checksum_every_n_steps: int = 100
    """Steps between two comparisons of the ranks' parameters; 0 never compares."""

    @property
    def exchanges_rows(self) -> bool:
        """Whether ranks send one another quantized rows, not only sums."""
        quantized_averages = AVERAGE_BITS[self.average] is not None
        return quantized_averages if self.mode == "local" else self.mode not in ("dense", "bf16")

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f"mode must be one of {', '.join(get_args(Mode))}; got {self.mode!r}")
        if not 0 <= self.sparsity < 1:
            raise ConfigError(
                f"sparsity must be in [0, 1), got {self.sparsity}: 0.75 sends a quarter of the gradient a step, and a "
                "sparsity of 1 would send nothing"
            )
        if self.average not in AVERAGE_BITS:
            raise ConfigError(f"average must be one of {', '.join(AVERAGE_BITS)}; got {self.average!r}")
        if self.mode == "local" and self.overlap_average and self.local_steps <= AVERAGE_HOPS:
            raise ConfigError(
                f"overlap_average takes an average {AVERAGE_HOPS} steps after it left, so local_steps must be at least "
                f"{AVERAGE_HOPS + 1}; got {self.local_steps}"
            )
        if self.hierarchical not in (True, False, "auto"):
            raise ConfigError(f"hierarchical must be true, false or auto; got {self.hierarchical!r}")
        for name in ("warmup_steps", "checksum_every_n_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("bucket_mb", "local_steps", "outer_learning_rate"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(f"outer_momentum must be in [0, 1), got {self.outer_momentum}")
        self.protection()

    def protection(self, names: Iterable[str] = ()) -> GradientProtection:
        """Return the patterns for parameters of these names, as the mechanism that FusedBackwardPrecision uses too."""
        default = () if any(LORA in name for name in names) else DEFAULT_PROTECT
        try:
            return GradientProtection(default if self.protect is None else self.protect)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def protecting(self, patterns: Sequence[str], names: Iterable[str]) -> SyncOptions:
        """Return these options with more patterns, beside those that protect parameters of these names."""
        names = list(names)
        own = [p for p in self.protection(names).patterns if any(GradientProtection((p,)).covers(n) for n in names)]
        return replace(self, protect=(*own, *patterns)) if patterns else self


def resolve_mode(mode: Mode | None, written: Mapping[str, str]) -> tuple[Mode, list[str]]:
    """Return the mode that these words ask for, and a sentence where they name an option of sparse modes and no mode.

    Args: written: the options of sparse modes that the user gave, and how.
    """
    if mode is not None or not written:
        return mode or DEFAULT_MODE, []
    return "sparse", [
        f"mode sparse, because {' and '.join(written.values())} asks for it: what is not sent waits for a later step, "
        f"which costs loss. mode={DEFAULT_MODE!r}, the default without it, costs almost none; mode='sparse' keeps this "
        "without the warning"
    ]


def unused_options(options: SyncOptions, written: Mapping[str, str] = {}) -> list[str]:
    """Return a sentence for each option that was given and that its mode does not read.

    Args: written: fields that the user gave, and how; without it those that have another value than the default.
    """
    sentences = []
    for name, modes in READ_BY_MODES.items():
        value = getattr(options, name)
        is_given = name in written or value != SyncOptions.__dataclass_fields__[name].default
        if options.mode not in modes and is_given:
            given = written.get(name, f"{name}={value!r}")
            sentences.append(
                f"{given} changes nothing in mode {options.mode}: write mode={' or mode='.join(map(repr, modes))} to "
                "have it, or leave it out"
            )
    return sentences


def check_protect(options: SyncOptions, names: Sequence[str]) -> None:
    """Check the user's patterns against the parameters' names.

    Raises: ConfigError for a pattern that covers none of them.
    """
    if options.protect is None:
        return
    try:
        options.protection().check(names)
    except ValueError as error:
        raise ConfigError(f"{error}; leave protect out for the default, or give [] to protect nothing") from None
