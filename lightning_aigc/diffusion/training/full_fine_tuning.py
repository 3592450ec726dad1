"""DiffusionFineTuning: a LightningModule that trains a diffusion model's own weights."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_aigc._lightning import Callback, Trainer, rank_zero_warn
from lightning_aigc.callbacks import SaveModel
from lightning_aigc.devices import dtype_named
from lightning_aigc.diffusion.families import Components, Family
from lightning_aigc.diffusion.pipeline.saving import save_folder, save_single_file, save_transformer
from lightning_aigc.diffusion.training.method import Method, recompute_text_encoders
from lightning_aigc.diffusion.training.module import DiffusionTraining
from lightning_aigc.diffusion.training.optimizer_in_backward import OptimizerInBackward, check_trainer
from lightning_aigc.diffusion.training.settings import TrainingSettings
from lightning_aigc.errors import ModelError
from lightning_aigc.setting_checks import check_positive

SaveDtype = Literal["float32", "float16", "bfloat16"]


@dataclass
class FullWeights(Method):
    """Base of the methods that train a network's own weights and save all of them."""

    ignored_on_resume: ClassVar[frozenset[str]] = frozenset(("save_dtype", "save_every_n_steps"))
    optimizer_in_backward: bool = False
    save_dtype: SaveDtype | None = None
    save_every_n_steps: int = 0

    @property
    def trains_half_weights(self) -> bool:
        return self.optimizer_in_backward

    @property
    def saved_dtype(self) -> torch.dtype | None:
        """Dtype of saved weights; None keeps the weights' own."""
        return None if self.save_dtype is None else dtype_named(self.save_dtype)

    def denoiser_dtype(self, family: Family, frozen: torch.dtype) -> torch.dtype:
        return torch.float32  # the trained weights start from every bit of the pretrained weights

    def make_optimizer(
        self, build: Callable[[Any], Optimizer], groups: list[dict[str, Any]], trainer: Trainer | None
    ) -> Optimizer:
        if not self.optimizer_in_backward:
            return build(groups)
        if trainer is not None:
            check_trainer(trainer)
        return OptimizerInBackward(build, groups)

    def saver(self, settings: TrainingSettings) -> Callback:
        return SaveModel(self.save_every_n_steps, keep_last=settings.step_files_total_limit)


@dataclass
class FullFineTuning(FullWeights):
    """Full or partial training of the denoiser and, for U-Nets, the text encoders."""

    same_weights_advice: ClassVar[str] = (
        "use the trained_parts and the pretrained_model_name_or_path that it was trained with"
    )
    trained_parts: Sequence[str] | None = None
    text_encoder_lr: float | None = None  # type: ignore[misc]  # a field here, a constant of other methods
    networks: dict[str, nn.Module] = field(default_factory=dict, init=False)
    """The networks with trained weights, by the pipeline's names."""

    def check(self, settings: TrainingSettings, family: Family | None) -> None:
        if self.trained_parts is not None:
            check_patterns(self.trained_parts)
        check_positive(self, "text_encoder_lr")
        if settings.base_quantization is not None:
            raise ModelError(
                f"model.init_args.base_quantization: {settings.base_quantization} packs weights that"
                " DiffusionFineTuning trains or saves in full precision; leave it unset, or train a LoRA on a packed"
                " base with DiffusionLoRA"
            )
        if family is not None and not family.trains_text_encoders and self.text_encoder_lr is not None:
            raise ModelError(
                f"model.init_args.text_encoder_lr: the text encoders of {family.title} are not trained; remove it"
            )

    def text_encoder_dtype(self, family: Family, frozen: torch.dtype) -> torch.dtype:
        return torch.float32 if family.trains_text_encoders else frozen

    def prepare(self, components: Components, settings: TrainingSettings, frozen: torch.dtype) -> dict[str, nn.Module]:
        denoiser = components.family.denoiser_name
        self.networks = train_parts(components, self.trained_parts or (denoiser,))
        encoders = []
        for name, network in components.named_networks().items():
            if name not in self.networks and network.dtype != frozen:
                network.to(frozen)
            elif name in self.networks and name != denoiser:
                encoders.append(network)
        if self.text_encoder_lr is not None and not encoders:
            rank_zero_warn(
                f"model.init_args.text_encoder_lr: {self.text_encoder_lr} is not read, because text encoders are not"
                " trained; add text_encoder to model.init_args.trained_parts, or remove it"
            )
        if settings.gradient_checkpointing:
            recompute_text_encoders(encoders)
        return {"text_encoders": nn.ModuleList(encoders)}


class DiffusionFineTuning(DiffusionTraining):
    """Trains the weights of a diffusion model, all or some of them, and saves the pipeline.

    The family is read from the pipeline (docs/full_fine_tuning.md).

    Args:
        pretrained_model_name_or_path: A diffusers pipeline folder, a hub id, a single `.safetensors` checkpoint of
            Stable Diffusion 1.x, 2.x or SDXL, `embedded:sd` or `embedded:sd3`, the tiny models in the package.
        trained_parts: Networks to train: unet or transformer, for U-Nets text_encoder and text_encoder_2, or patterns
            of parameter names such as `unet.*attn2*`. Unset is the denoiser. A network with any trained weight is kept
            in float32, the others in `base_dtype`.
        text_encoder_lr: Rate of the text encoders; unset means `learning_rate`.
        optimizer_in_backward: Step each weight as soon as its gradient is complete and free the gradient; on one card
            this saves the memory of all gradients. With precision bf16-true the weights are rounded stochastically.
            Excludes several ranks, accumulation, clipping and a loss scale.
        save_dtype: Dtype of the saved files: float32, float16 or bfloat16; unset keeps the weights' own.
        save_every_n_steps: Optimizer steps between saved models on the way; 0 saves the last only.
        kwargs: Arguments of `DiffusionTraining`.

    Example:
        >>> module = DiffusionFineTuning("embedded:sd", trained_parts=["unet.*attn2*"], max_train_steps=10)
        >>> bool(module.loaded().denoiser.conv_in.weight.requires_grad)
        False
    """

    method: FullFineTuning
    saved_kind = "pipeline"

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        trained_parts: Sequence[str] | None = None,
        text_encoder_lr: float | None = None,
        optimizer_in_backward: bool = False,
        save_dtype: SaveDtype | None = None,
        save_every_n_steps: int = 0,
        **kwargs: Any,
    ) -> None:
        method = FullFineTuning(
            trained_parts=trained_parts,
            text_encoder_lr=text_encoder_lr,
            optimizer_in_backward=optimizer_in_backward,
            save_dtype=save_dtype,
            save_every_n_steps=save_every_n_steps,
        )
        super().__init__(method, pretrained_model_name_or_path=pretrained_model_name_or_path, **kwargs)

    def save_model(self, path: str | Path) -> list[Path]:
        """Write a diffusers folder and, next to it, `path`: averaged weights if any.

        `path` is a single-file checkpoint of a U-Net's pipeline, or the transformer, as ComfyUI reads them.

        Returns: the folder and the file.
        """
        path, components = Path(path), self.loaded()
        folder, dtype, config = path.with_suffix(""), self.method.saved_dtype, self.sampling_config()
        with self.averaged_weights():
            save_folder(folder, components, self.method.networks, dtype, config)
            if components.family.is_flow:
                save_transformer(path, components, dtype, config)
            else:
                save_single_file(path, components, self.method.networks, dtype, config)
        return [folder, path]


class StableDiffusionFineTuning(DiffusionFineTuning):
    """`DiffusionFineTuning` under its earlier name for U-Nets."""


KEY = "model.init_args.trained_parts"


def check_patterns(patterns: Sequence[str]) -> None:
    """Raise ModelError for patterns of a wrong type, before weights are read."""
    if isinstance(patterns, str) or not patterns or not all(isinstance(p, str) and p.strip() for p in patterns):
        raise ModelError(f"{KEY} must be a list such as [unet], [transformer] or ['unet.*attn2*'], got {patterns!r}")


def train_parts(components: Components, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Let the parameters that a pattern covers take gradients; returns the networks that hold some, by name.

    A pattern covers a parameter if it matches its name (`unet.down_blocks.0.attentions.0...weight`) or the name of a
    module above it; `*` matches dots too. What can take no gradient stays frozen.

    Raises: ModelError for a pattern that covers nothing, or nothing that takes a gradient.
    """
    named = {
        f"{network}.{name}": parameter
        for network, module in components.named_networks().items()
        for name, parameter in module.named_parameters()
    }
    unread = components.family.unread_names(components)
    for pattern in patterns:
        covered = [name for name in named if covers(pattern, name)]
        if not covered:
            raise ModelError(f"{KEY}: {pattern!r} covers no weight of {components.source}{_hint(pattern, named)}")
        taken = [name for name in covered if name not in unread]
        if not taken:
            raise ModelError(
                f"{KEY}: {pattern!r} covers only weights whose output nothing reads, such as {covered[0]}, so they take"
                " no gradient; choose others"
            )
        for name in taken:
            named[name].requires_grad_(True)
    return {n: m for n, m in components.named_networks().items() if any(p.requires_grad for p in m.parameters())}


def covers(pattern: str, name: str) -> bool:
    """Whether a pattern matches a parameter's name, or that of a module above it."""
    pieces = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(pieces[:end]), pattern) for end in range(1, len(pieces) + 1))


def _hint(pattern: str, names: Sequence[str] | dict[str, nn.Parameter]) -> str:
    above = {".".join(name.split(".")[:end]) for name in names for end in (1, 2, 3, 4)}
    near = difflib.get_close_matches(pattern.strip("*"), sorted(above), n=2, cutoff=0.5)
    parts = ", ".join(sorted({name.partition(".")[0] for name in names}))
    return f"; close names: {', '.join(near)}" if near else f"; use {parts}, or a pattern such as *attn*"
