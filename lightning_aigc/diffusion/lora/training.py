"""DiffusionLoRA: a LightningModule that fine-tunes a diffusion model with a LoRA."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from lightning_aigc._lightning import Callback, LightningModule, rank_zero_warn
from lightning_aigc.callbacks import SaveLoRA
from lightning_aigc.diffusion.families import Components, Family, TransformerFamily
from lightning_aigc.diffusion.families.unet_lora import LoRATarget, unet_lora_config
from lightning_aigc.diffusion.lora.continued import continue_from
from lightning_aigc.diffusion.lora.file import LoRAMetadata, save_lokr, save_lora
from lightning_aigc.diffusion.lora.layers import warn_of_rank
from lightning_aigc.diffusion.lora.metadata import hash_base_model
from lightning_aigc.diffusion.lora.training_adapter import TrainingAdapter
from lightning_aigc.diffusion.pipeline.saved_schedule import scheduler_json
from lightning_aigc.diffusion.pipeline.streamed_base import BaseLocation, check_base_location, check_run, stream_base
from lightning_aigc.diffusion.training.method import Method, recompute_text_encoders
from lightning_aigc.diffusion.training.module import DiffusionTraining
from lightning_aigc.diffusion.training.preservation import Preservation, Preserve
from lightning_aigc.diffusion.training.settings import TrainingSettings
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ConfigError, ModelError
from lightning_aigc.precision.memory.streamed_blocks import StreamedBlocks
from lightning_aigc.setting_checks import Readers, check_at_least_one, check_positive, check_share

LoRAType = Literal["lora", "lokr"]


@dataclass
class LoRA(Method):
    """A LoRA on the denoiser, and for U-Nets on the text encoders; the fields are `DiffusionLoRA`'s arguments."""

    same_weights_advice: ClassVar[str] = (
        "use the rank, lora_targets, use_dora and train_text_encoder that it was trained with"
    )
    ignored_on_resume: ClassVar[frozenset[str]] = frozenset(("base_location",))
    readers: ClassVar[Readers] = {
        "lokr_factor": ("lora_type", ("lora",), "lokr"),
        **dict.fromkeys(("preserve_weight", "preserve_share"), ("preserve", (None,), "own")),
    }
    rank: int = 16
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    lora_targets: Sequence[LoRATarget] = ("attention",)
    lora_type: LoRAType = "lora"
    lokr_factor: int = 8
    lora_from: str | None = None
    training_adapter: str | None = None
    base_location: BaseLocation | None = None
    use_dora: bool = False
    use_rslora: bool = False
    train_text_encoder: bool = False
    text_encoder_lr: float | None = None  # type: ignore[misc]  # a field here, a constant of other methods
    preserve: Preserve | None = None
    class_word: str | None = None
    preserve_weight: float = 1.0
    preserve_share: float = 1.0

    adapter: TrainingAdapter | None = field(default=None, init=False)
    """The training adapter in the base's weights."""
    streamed: StreamedBlocks | None = field(default=None, init=False)
    """The blocks that wait in host memory."""

    @property
    def takes_distilled(self) -> bool:
        return self.training_adapter is not None

    @property
    def streams_base(self) -> bool:
        return self.streamed is not None

    @property
    def base_digest(self) -> str | None:
        return None if self.adapter is None else self.adapter.digest

    def base_was_packed(self) -> None:
        if self.adapter is not None:
            self.adapter.pack()

    def place_base(self, module: LightningModule, components: Components, settings: TrainingSettings) -> None:
        trainer = module._trainer
        if self.base_location is None or trainer is None:
            return
        options = {"gradient_checkpointing": settings.gradient_checkpointing, "dropout": bool(self.lora_dropout)}
        check_run(trainer, self.base_location, **options)
        self.streamed = stream_base(module, components, self.base_location, trainer)

    def sampling_base(self) -> AbstractContextManager[None]:
        return super().sampling_base() if self.adapter is None else self.adapter.removed()

    def sampling_choices(self, settings: TrainingSettings, family: Family) -> tuple[int, float]:
        """A few-step base draws with its own steps and guidance, unless the settings have others than the defaults."""
        steps, scale = super().sampling_choices(settings, family)
        if self.training_adapter is None:
            return steps, scale
        unset = {each.name: each.default for each in fields(TrainingSettings)}
        return (
            family.few_steps if steps == unset["num_inference_steps"] else steps,
            family.few_step_guidance if scale == unset["guidance_scale"] else scale,
        )

    @property
    def preservation(self) -> Preservation | None:
        if self.preserve is None:
            return None
        return Preservation(self.preserve, self.class_word, self.preserve_weight, self.preserve_share)

    @property
    def alpha(self) -> float:
        """Scale of the LoRA's output, times the rank."""
        return float(self.rank if self.lora_alpha is None else self.lora_alpha)

    def check(self, settings: TrainingSettings, family: Family | None) -> None:
        check_at_least_one(self, "rank")
        check_positive(self, "lora_alpha", "text_encoder_lr")
        check_share(self, "lora_dropout")
        self._check_preservation()
        self._check_type()
        check_base_location(self.base_location)
        if self.base_location is not None and self.training_adapter is not None:
            raise ConfigError(
                "model.init_args.base_location streams weights that training_adapter exchanges for samples; leave one"
                " unset, or set model.init_args.base_quantization: int8 for less memory"
            )
        unet_lora_config(self.lora_targets, self.rank, self.alpha)
        if self.use_dora and settings.base_quantization is not None:
            raise ConfigError(
                "model.init_args.use_dora reads the base's weights at every step, which base_quantization packs; set"
                " model.init_args.use_dora: false for plain LoRA, or model.init_args.base_quantization: null"
            )
        if family is not None and not family.trains_text_encoders:
            for name in ("train_text_encoder", "text_encoder_lr", "use_dora"):
                if getattr(self, name):
                    raise ModelError(
                        f"model.init_args.{name}: {getattr(self, name)} is for Stable Diffusion 1.x, 2.x and SDXL, and"
                        f" this is {family.title}; remove it"
                    )

    def check_sources(self, family: Family, settings: TrainingSettings, count: int) -> None:
        super().check_sources(family, settings, count)
        if count and self.preserve is not None:
            raise ModelError(
                f"model.init_args.preserve: {self.preserve} holds predictions for images from text, and the data has"
                " edits of source images; set model.init_args.preserve: null"
            )

    def _check_type(self) -> None:
        if self.lora_from is not None and not Path(self.lora_from).expanduser().is_file():
            raise ModelError(f"model.init_args.lora_from: there is no file {self.lora_from}; give a LoRA .safetensors")
        if self.lora_from is not None and self.use_dora:
            raise ModelError("model.init_args.lora_from continues a plain LoRA or a LoKr; set use_dora: false")
        if self.lora_type == "lora":
            return
        if self.lokr_factor < 2:
            raise ModelError(
                f"model.init_args.lokr_factor must be at least 2, got {self.lokr_factor}; 4 to 16 is usual"
            )
        for name in ("use_dora", "use_rslora", "lora_dropout", "train_text_encoder"):
            value = getattr(self, name)
            if value:
                raise ModelError(
                    f"model.init_args.{name}: {value} is an option of LoRA, and lora_type is lokr; remove it, or set"
                    " model.init_args.lora_type: lora"
                )

    def _check_preservation(self) -> None:
        check_positive(self, "preserve_weight", "preserve_share")
        if self.preserve_share > 1:
            raise ModelError(f"model.init_args.preserve_share must be above 0 and at most 1, got {self.preserve_share}")
        if self.preserve == "class" and self.class_word is None:
            raise ModelError(
                "model.init_args.preserve: class puts a class word where the trigger word was, and there is none; set"
                " model.init_args.class_word, such as mug, or '' to leave the trigger word out"
            )
        if self.class_word is not None and self.preserve != "class":
            raise ModelError(
                f"model.init_args.class_word: {self.class_word!r} is read by preserve: class alone; set"
                " model.init_args.preserve: class, or remove it"
            )
        if self.preserve is not None and self.train_text_encoder:
            raise ModelError(
                "model.init_args.preserve holds the base's predictions for the base's own texts, and"
                " train_text_encoder changes these; set model.init_args.train_text_encoder: false"
            )

    def prepare(self, components: Components, settings: TrainingSettings, frozen: torch.dtype) -> dict[str, nn.Module]:
        options: dict[str, Any] = {
            "rank": self.rank, "alpha": self.alpha, "dropout": self.lora_dropout, "use_dora": self.use_dora,
            "use_rslora": self.use_rslora,
        }  # fmt: skip
        family, denoiser = components.family, components.denoiser
        if self.training_adapter is not None:
            names = (settings.pretrained_model_name_or_path, settings.denoiser_file)
            if not any(name and family.distilled_reason(Path(name).name, ()) for name in names):
                rank_zero_warn(
                    f"model.init_args.training_adapter is for few-step models, and {components.source} is none by its"
                    " name; remove it unless the adapter was made for this model"
                )
            self.adapter = TrainingAdapter(self.training_adapter, components)
        if self.lora_from is not None:
            continue_from(
                Path(self.lora_from).expanduser(), components, lora_type=self.lora_type, dropout=self.lora_dropout,
                trains_text_encoder=self.train_text_encoder,
            )  # fmt: skip
        else:
            config = family.lora_config(components, self.lora_targets, **options)
            if self.lora_type == "lokr":
                from lightning_aigc.diffusion.lora.lokr_layers import add_lokr, target_modules

                add_lokr(denoiser, target_modules(denoiser, config), self.rank, self.alpha, self.lokr_factor)
            else:
                denoiser.add_adapter(config)
                warn_of_rank(denoiser, self.rank)
        if not self.train_text_encoder:
            if self.text_encoder_lr is not None:
                rank_zero_warn(
                    f"model.init_args.text_encoder_lr: {self.text_encoder_lr} is not read, because text encoders are"
                    " not trained; set model.init_args.train_text_encoder: true, or remove it"
                )
            return {}
        targets = [t for t in self.lora_targets if t != "convolutions"] or ["attention"]
        unread_names = family.unread_names(components)
        for name, encoder in components.named_networks().items():
            if name == family.denoiser_name or "default" in getattr(encoder, "peft_config", {}):
                continue
            unread = [module for module, _ in encoder.named_modules() if f"{name}.{module}.weight" in unread_names]
            config = unet_lora_config(targets, is_text_encoder=True, unread=unread, **options)
            encoder.add_adapter(config)  # type: ignore[operator]
        if settings.gradient_checkpointing:
            recompute_text_encoders(components.text_encoders)
        return {"text_encoders": nn.ModuleList(components.text_encoders)}

    def saver(self, settings: TrainingSettings) -> Callback:
        return SaveLoRA(settings.checkpointing_steps, keep_last=settings.step_files_total_limit)


class DiffusionLoRA(DiffusionTraining):
    """Fine-tunes a diffusion model on a set of images by training a LoRA through peft.

    The family is read from the pipeline: Stable Diffusion 1.x, 2.x and SDXL, Stable Diffusion 3 and 3.5, FLUX.1,
    FLUX.2, Z-Image, Qwen-Image, Chroma and Krea 2 (docs/diffusion_transformers.md, docs/edit.md).

    Args:
        pretrained_model_name_or_path: A diffusers pipeline folder, a hub id, a single `.safetensors` checkpoint of
            Stable Diffusion 1.x, 2.x or SDXL, `embedded:sd` or `embedded:sd3`, the tiny models in the package.
        rank: Rank of the LoRA matrices; 4 to 64 is usual.
        lora_alpha: Scale of the LoRA's output is `lora_alpha / rank`; unset means equal to the rank.
        lora_dropout: Share of a LoRA layer's inputs that are dropped while training.
        lora_targets: The denoiser's layers to adapt: attention, feed_forward, for U-Nets convolutions.
        lora_type: lora, or lokr, a Kronecker product of a small matrix and one that `rank` makes low-rank where it is
            less than half of that matrix's longer side (docs/diffusion_transformers.md).
        lokr_factor: Side of the small matrix of a LoKr; it divides the sides of all layers.
        lora_from: A LoRA or LoKr file to begin with, in any layout that `lightning export` reads; its ranks, scales and
            layers replace `rank`, `lora_alpha`, `lokr_factor` and `lora_targets`.
        base_location: Frozen blocks of the denoiser wait in host memory and are copied when they run: `{device: 0.6}`
            keeps this share of them on the device, fit as many as fit.
        training_adapter: A LoRA file, or owner/name/file.safetensors of the hub, that is part of the base in training
            and absent in samples and files, for few-step bases such as Z-Image-Turbo and FLUX.1 schnell.
        use_dora: Learn magnitudes separately from directions (DoRA); U-Nets only.
        use_rslora: Scale by `alpha / sqrt(rank)`, steadier at high ranks (rsLoRA).
        train_text_encoder: Adapt the text encoders too; U-Nets only.
        text_encoder_lr: Rate of the text encoders' LoRA; unset means `learning_rate`.
        preserve: Hold what the base predicts, without class images: class, for the captions with `class_word` in place
            of the trigger word; blank, for the empty caption; own, for the captions outside the masks.
        class_word: Word for `preserve: class`, such as mug; an empty one leaves the trigger word out.
        preserve_weight: Weight of the distance to the base's predictions in the loss.
        preserve_share: Share of each batch that is held; 1 takes 2.5 times a plain step's operations, 0.25 takes 1.4.
        kwargs: Arguments of `DiffusionTraining`.

    Example:
        >>> module = DiffusionLoRA("embedded:sd", rank=4, max_train_steps=10)
        >>> module.loaded().family.title, sum(p.numel() for p in module.trainable_parameters())
        ('SD 1.5', 26368)
    """

    method: LoRA

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        rank: int = 16,
        lora_alpha: float | None = None,
        lora_dropout: float = 0.0,
        lora_targets: Sequence[LoRATarget] = ("attention",),
        lora_type: LoRAType = "lora",
        lokr_factor: int = 8,
        lora_from: str | None = None,
        training_adapter: str | None = None,
        base_location: BaseLocation | None = None,
        use_dora: bool = False,
        use_rslora: bool = False,
        train_text_encoder: bool = False,
        text_encoder_lr: float | None = None,
        preserve: Preserve | None = None,
        class_word: str | None = None,
        preserve_weight: float = 1.0,
        preserve_share: float = 1.0,
        **kwargs: Any,
    ) -> None:
        method = LoRA(
            rank=rank,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            lora_targets=lora_targets,
            lora_type=lora_type,
            lokr_factor=lokr_factor,
            lora_from=lora_from,
            training_adapter=training_adapter,
            base_location=base_location,
            use_dora=use_dora,
            use_rslora=use_rslora,
            train_text_encoder=train_text_encoder,
            text_encoder_lr=text_encoder_lr,
            preserve=preserve,
            class_word=class_word,
            preserve_weight=preserve_weight,
            preserve_share=preserve_share,
        )
        super().__init__(method, pretrained_model_name_or_path=pretrained_model_name_or_path, **kwargs)

    def save_lora(self, path: Any, **metadata: Any) -> None:
        """Write the LoRA as `.safetensors`, with averaged weights if any.

        For U-Nets it is one file that diffusers, ComfyUI and A1111 load. With DoRA this file is for ComfyUI only, and
        `.diffusers.safetensors` next to it for diffusers and merging. For transformers it has diffusers' layout, and
        `.comfyui.safetensors` next to it the original model's names, where these differ. A LoKr of a U-Net has kohya's
        layout, for ComfyUI; `lightning export --to diffusers` converts it.

        Args:
            path: Of the file.
            metadata: Fields of `LoRAMetadata`, or `ss_*` and `modelspec.*` entries of the header.
        """
        components, path = self.loaded(), Path(path)
        family = components.family
        described = LoRAMetadata(**(self._facts(components) | metadata))
        with self.averaged_weights():
            if self.method.lora_type == "lokr":
                self._save_lokr(path, described)
                return
            if isinstance(family, TransformerFamily):
                save_lora(path, transformer=components.denoiser, metadata=described, layout="diffusers")
                if family.original_layers:
                    original = path.with_suffix(".comfyui.safetensors")
                    save_lora(original, transformer=components.denoiser, metadata=described, layout="kohya")
                return
            networks: dict[str, Any] = {
                "unet": components.denoiser, "text_encoders": tuple(self.text_encoders),
            }  # fmt: skip
            save_lora(path, **networks, metadata=described)
            if self.method.use_dora:  # the first file is for ComfyUI only
                exact = path.with_suffix(".diffusers.safetensors")
                save_lora(exact, **networks, metadata=described, layout="diffusers")

    def _save_lokr(self, path: Path, described: LoRAMetadata) -> None:
        family, denoiser = self.loaded().family, self.loaded().denoiser
        if not isinstance(family, TransformerFamily):
            save_lokr(path, family.denoiser_name, denoiser, described)
            return
        save_lokr(path, family.denoiser_name, denoiser, described, layout="diffusers")
        if family.original_layers:
            original = path.with_suffix(".comfyui.safetensors")
            save_lokr(original, family.denoiser_name, denoiser, described, layout="kohya")

    def _facts(self, components: Components) -> dict[str, Any]:
        settings, config = self.settings, self.sampling_config()
        facts: dict[str, Any] = {
            "base_model_name": settings.denoiser_file or settings.pretrained_model_name_or_path,
            "base_model_hash": self.base_model_hash(),
            "scheduler": scheduler_json(components.family, config),
            "learning_rate": settings.learning_rate,
            "noise_offset": settings.noise_offset,
        }
        if components.family.is_flow:
            return facts | {"base_model": components.family.name, "prediction_type": None}
        kind = "v_prediction" if config["prediction_type"] == "v_prediction" else "epsilon"
        of_u_nets = {"text_encoder_lr": self.method.text_encoder_lr, "snr_gamma": settings.snr_gamma}
        return facts | of_u_nets | {"prediction_type": kind}

    @functools.cache  # noqa: B019  hashes gigabytes, and the module lives as long as its run
    def base_model_hash(self) -> str | None:
        """sha256 of the base model's file or denoiser weights; None for a hub id."""
        path = resolve(self.settings.pretrained_model_name_or_path)
        return hash_base_model(path) if path.exists() else None


class StableDiffusionLoRA(DiffusionLoRA):
    """`DiffusionLoRA` under its earlier name for U-Nets."""
