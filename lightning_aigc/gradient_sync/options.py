"""SyncOptions: the options of gradient sync, with their checks and their help; checks of a DDP model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.cluster.modes import (
    AVERAGE_BITS,
    AVERAGE_HOPS,
    DEFAULT_MODE,
    SPARSE_MODES,
    TOP_K_CHUNK,
    Average,
    Mode,
    average_bytes,
)
from lightning_aigc.errors import ConfigError
from lightning_aigc.setting_checks import as_yaml
from lightning_aigc_kernels.protection import GradientProtection

READ_BY_MODES: dict[str, tuple[str, ...]] = {
    "sparsity": SPARSE_MODES,
    "layer_wise_adaptive": SPARSE_MODES,
    "local_steps": ("local",),
    "average": ("local",),
    "top_k": ("local",),
    "error_feedback_decay": ("local",),
    "overlap_average": ("local",),
    "outer_learning_rate": ("local",),
    "outer_momentum": ("local",),
}
"""Modes that read an option; all modes read the others."""
DEFAULT_PROTECT = ("vae.decoder*", "*mid_block.attentions*")
LORA = ".lora_"
"""Part of the parameter names of a LoRA in peft and diffusers."""


@dataclass(frozen=True)
class SyncOptions:
    """Options of gradient sync.

    Args:
        mode: What is sent of a gradient; docs/gradient_sync.md has bytes, loss and time of each mode. auto measures the
            link first and may choose dense.
        sparsity: sparse modes: share of the gradient that waits for a later step, in [0, 1).
        layer_wise_adaptive: sparse modes: divide the sent values among layers by the size of their gradients; otherwise
            each layer sends the same share.
        protect: Name patterns of parameters that are sent uncompressed in float32, as in FusedBackwardPrecision; a
            pattern that covers nothing is an error. null protects vae.decoder and mid_block.attentions where the model
            has them, and nothing of a LoRA, where they would be nearly half of the bytes; [] protects nothing.
        warmup_steps: Dense steps at the beginning of a run; one that resumes has had them.
        error_feedback: Add the part that was not sent to the next gradient; without it the loss suffers visibly.
        hierarchical: Whether ranks of one node first reduce among themselves, dense; auto does so where nodes have
            equally many ranks.
        bucket_mb: MB of float32 gradient that are reduced together; DDP's buckets are as large.
        overlap: Whether gradients travel while backward runs.
        local_steps: local: optimizer steps between two averages of the parameters.
        average: local: format of the averages on the wire: float32, or with error feedback int8, int4, int3, or top_k,
            the largest values alone.
        top_k: local: values of each 4,096 that an average in top_k sends, a multiple of 8; 64 is SparseLoCo's, and 1712
            at 15 steps sends 0.003 of dense's bytes. Above 341 a bitmap and signs replace positions and two sizes.
        error_feedback_decay: local: factor of what an average left unsent, when it is added to the next; 1 keeps all.
        overlap_average: local: continue stepping while an average travels, and apply it two steps later; hides a slow
            link. At 4 steps of int3 a small denoiser's loss is 6 % above dense's, and 4 % without.
        outer_learning_rate: local: step from the old average towards the new one; 1 is the full step.
        outer_momentum: local: Nesterov momentum over averages.
        checksum_every_n_steps: Steps between two comparisons of the ranks' parameters; 0 never compares.

    Raises: ConfigError for a value outside its field's range.

    Example:
        >>> SyncOptions(mode="int3", warmup_steps=40).mode
        'int3'
    """

    mode: Mode = DEFAULT_MODE
    sparsity: float = 0.75
    layer_wise_adaptive: bool = True
    protect: Sequence[str] | None = None
    warmup_steps: int = 0
    error_feedback: bool = True
    hierarchical: bool | Literal["auto"] = "auto"
    bucket_mb: float = 25.0
    overlap: bool = True
    local_steps: int = 8
    average: Average = "float32"
    top_k: int = 64
    error_feedback_decay: float = 1.0
    overlap_average: bool = False
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0
    checksum_every_n_steps: int = 100

    @property
    def average_bytes(self) -> float:
        """Bytes of a value in an average of mode local, with its share of scales and positions."""
        return average_bytes(self.average, self.top_k)

    @property
    def exchanges_rows(self) -> bool:
        """Whether ranks exchange quantized rows, and not sums alone."""
        return self.average != "float32" if self.mode == "local" else self.mode not in ("dense", "bf16")

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
        if self.top_k % 8 or not 8 <= self.top_k <= TOP_K_CHUNK:
            raise ConfigError(f"top_k must be a multiple of 8 from 8 to {TOP_K_CHUNK}, got {self.top_k}")
        if not 0 <= self.error_feedback_decay <= 1:
            raise ConfigError(f"error_feedback_decay must be in [0, 1], got {self.error_feedback_decay}")
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(f"outer_momentum must be in [0, 1), got {self.outer_momentum}")
        self.protection()

    def protection(self, names: Iterable[str] = ()) -> GradientProtection:
        """Return the patterns that protect parameters of these names, in the form that FusedBackwardPrecision uses."""
        default = () if any(LORA in name for name in names) else DEFAULT_PROTECT
        try:
            return GradientProtection(default if self.protect is None else self.protect)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def protecting(self, patterns: Sequence[str], names: Iterable[str]) -> SyncOptions:
        """Return these options with more patterns, in addition to those that cover one of these names."""
        names = list(names)
        used = [p for p in self.protection(names).patterns if any(GradientProtection((p,)).covers(n) for n in names)]
        return replace(self, protect=(*used, *patterns)) if patterns else self


FIELDS = SyncOptions.__dataclass_fields__
C = TypeVar("C")


def take_options(mode: Mode, arguments: dict[str, Any]) -> SyncOptions:
    """Make SyncOptions of the arguments that are fields of it, and remove these from `arguments`."""
    return SyncOptions(mode, **{name: arguments.pop(name) for name in FIELDS if name in arguments})


def shows_options(cls: type[C]) -> type[C]:
    """Class decorator for an `__init__(self, mode, *, ..., **arguments)` that calls `take_options(mode, arguments)`.

    The fields of SyncOptions become keyword arguments in the class's signature, and their help a part of its docstring,
    where jsonargparse and `help()` read both.
    """
    init: Any = cls.__init__
    own = inspect.signature(init)
    types = get_type_hints(SyncOptions)
    fields = [
        parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=types[name])
        for name, parameter in inspect.signature(SyncOptions).parameters.items()
        if name not in own.parameters
    ]
    itself, mode, *others = own.parameters.values()
    init.__signature__ = own.replace(parameters=[itself, mode, *fields, *others])
    init.__annotations__ |= types
    if cls.__doc__ and SyncOptions.__doc__:  # python -OO has none
        fields_help = inspect.cleandoc(SyncOptions.__doc__).partition("Args:\n")[2].partition("\n\n")[0]
        cls.__doc__ = inspect.cleandoc(cls.__doc__).replace("Args:\n", f"Args:\n{fields_help}\n", 1)
    return cls


def resolve_mode(mode: Mode | None, written: Mapping[str, str]) -> tuple[Mode, list[str]]:
    """Return the mode, and a note where it is sparse because of an option of sparse modes.

    Args: written: the options of sparse modes that the user gave, as the user wrote them.
    """
    if mode is not None or not written:
        return mode or DEFAULT_MODE, []
    return "sparse", [
        f"mode sparse, because {' and '.join(written.values())} asks for it: what is not sent waits for a later step, "
        f"which costs loss. mode: {DEFAULT_MODE}, the default without it, costs almost none; mode: sparse keeps this "
        "without the warning"
    ]


def unused_options(options: SyncOptions, written: Mapping[str, str] = {}) -> list[str]:
    """Return a sentence for each option that the user gave and that the mode does not read.

    Args: written: fields that the user gave, as the user wrote them; a value other than the default counts too.
    """
    sentences = []
    for name, modes in READ_BY_MODES.items():
        value = getattr(options, name)
        is_given = name in written or value != FIELDS[name].default
        if options.mode not in modes and is_given:
            option = written.get(name, f"{name}: {as_yaml(value)}")
            sentences.append(
                f"{option} changes nothing in mode {options.mode}: write mode: {' or mode: '.join(modes)} to "
                "have it, or leave it out"
            )
    if options.warmup_steps and options.mode in ("dense", "local"):
        sentences.append(
            f"warmup_steps: {options.warmup_steps} changes nothing in mode {options.mode}, which compresses no"
            " gradients: leave it out, or write another mode"
        )
    if options.mode == "local":
        sentences += _unused_by_average(options)
    return sentences


def _unused_by_average(options: SyncOptions) -> list[str]:
    """Return a sentence for each option that the format of the averages does not read."""
    reads = {
        "top_k": ("top_k",),
        "error_feedback_decay": tuple(name for name in AVERAGE_BITS if name != "float32"),
    }
    return [
        f"{name}: {as_yaml(getattr(options, name))} changes nothing with average: {options.average}: write "
        f"average: {' or average: '.join(formats)} to have it, or leave it out"
        for name, formats in reads.items()
        if options.average not in formats and getattr(options, name) != FIELDS[name].default
    ]


def check_protect(options: SyncOptions, names: Sequence[str]) -> None:
    """Check the patterns of `protect` against the parameters' names.

    Raises: ConfigError for a pattern that covers none of them.
    """
    if options.protect is None:
        return
    try:
        options.protection().check(names)
    except ValueError as error:
        raise ConfigError(f"{error}; leave protect out for the default, or give [] to protect nothing") from None


def trained_parameters(ddp: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that DDP syncs, by their names in the module it wraps."""
    ignored = ddp.parameters_to_ignore
    return [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored]


def refuse_complex(mode: str, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Check that a mode that computes with gradients as real numbers gets no complex one.

    Raises: ConfigError with the first parameter that is complex.
    """
    name = next((name for name, parameter in parameters if parameter.is_complex()), None)
    if name is not None and mode != "dense":
        raise ConfigError(
            f"{name} has complex values, and mode {mode} computes with real ones; use mode: dense, or keep the "
            "parameter as torch.view_as_real and make it complex in the forward"
        )


def refuse_sparse_gradients(ddp: DistributedDataParallel) -> None:
    """Check that no gradient is sparse.

    Raises: ConfigError for an embedding whose gradient is a sparse tensor: DDP hands those to no hook.
    """
    for name, module in ddp.module.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"{name or 'the model'}, an {type(module).__name__} with sparse=True, has a gradient that cannot be "
                "synced here; make it with sparse=False, or freeze it"
            )
