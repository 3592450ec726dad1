"""TrainingSettings: the options that all methods and families share, with their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_aigc.callbacks.saving.save_result import check_output_name
from lightning_aigc.diffusion.objectives import ObjectiveSettings
from lightning_aigc.diffusion.pipeline.quantized_base import check_base_quantization
from lightning_aigc.errors import ModelError
from lightning_aigc.quantization import BaseQuantization
from lightning_aigc.setting_checks import (
    Readers,
    check_at_least_one,
    check_fields,
    check_not_negative,
    check_positive,
    check_share,
)

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
IGNORED_ON_RESUME = frozenset(
    (
        "max_train_steps", "output_name", "validation_prompts", "validation_sources", "validation_steps",
        "num_validation_images", "validation_seed", "num_inference_steps", "guidance_scale", "sample_time_limit_s",
        "checkpointing_steps", "checkpoints_total_limit", "step_files_total_limit", "gradient_checkpointing",
    )
)  # fmt: skip
"""Settings that do not change the bits of a training."""
READERS: Readers = {
    "huber_c": ("loss_type", ("l2",), "huber"),
    "logit_mean": ("timestep_sampling", ("uniform", "mode"), "logit_normal"),
    "logit_std": ("timestep_sampling", ("uniform", "mode"), "logit_normal"),
    "mode_scale": ("timestep_sampling", ("uniform", "logit_normal"), "mode"),
    "ema_decay": ("use_ema", (False,), "true"),
}


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(ObjectiveSettings):
    """Options of a training run, as flat keys of `model.init_args`.

    Args:
        pretrained_model_name_or_path: A diffusers pipeline folder, a hub id, a short name such as sd15, a single
            `.safetensors` checkpoint, `embedded:sd` or `embedded:sd3`, the tiny models that come with the package.
        denoiser_file: A safetensors file with the transformer's weights, instead of the pipeline's own: a file as
            ComfyUI reads it, in bf16, float8 or scaled float8, or owner/name/file.safetensors of the hub. The folder
            or hub id of `pretrained_model_name_or_path` has the other components, and the transformer's config.
        learning_rate: Replaces the optimizer's rate; unset keeps it.
        lr_warmup_steps: Optimizer steps of warm-up for a scheduler given by name.
        max_train_steps: Optimizer steps to train; `trainer.max_steps`, if given, overrides it, and `trainer.max_epochs`
            ends the run if it comes first.
        prior_loss_weight: Weight of the class images (`data.init_args.class_data_dir`) in the loss.
        use_ema: Average the trainable weights; samples and files then use the average.
        ema_decay: Decay of that average.
        gradient_checkpointing: Recompute the denoiser's activations in backward: less memory, slower steps.
        base_dtype: Dtype of the frozen denoiser and text encoders; auto follows the trainer's precision.
        base_quantization: Store the frozen denoiser and text encoders in few bits: int8 (begin here), fp8 (for
            bases whose files are float8, which keep their values), nf4 (the
            denoiser's linears NF4, all else int8) or nf4-all (half the memory of int8, and the LoRA loses most
            on the full-precision base; docs/quantized_base.md). `{target_mib: 1500}` chooses the bits of each weight so
            that all fit and the denoiser's output on the training images changes least. Unset keeps full precision.
        base_quantization_skip: Name patterns of layers to keep in full precision; unset is the first and last
            convolution and the embeddings.
        vae_dtype: Dtype of the autoencoder, float32 or bfloat16; half precision makes black images and is refused.
        revision: Branch or commit of a hub id.
        variant: Weight variant in the folder, such as fp16.
        validation_prompts: Prompts of the sample images and of the final score.
        validation_sources: For a model that edits, image files that the samples start from, one for each of
            `validation_prompts`, or fewer in turn; unset are sources of the data.
        validation_steps: Optimizer steps between sample grids, and between values of `val_loss`.
        num_validation_images: Sample images per prompt.
        validation_seed: Seed of the first sample image; the next images count up from it.
        checkpointing_steps: Optimizer steps between checkpoints.
        checkpoints_total_limit: Checkpoints to keep; -1 keeps all, 0 writes none.
        step_files_total_limit: Files of the result by step to keep; -1 keeps all, 0 writes only that of Ctrl-C.
        num_inference_steps: Denoising steps of a sample image.
        guidance_scale: Classifier-free guidance of a sample image.
        sample_resolution: Pixels per side of a sample image; unset is the pipeline's own, mostly 1024.
        sample_time_limit_s: Skip sample images, with a warning, if sampling would take longer than this.
        output_name: Name of the result's file, without folder and suffix; it lies in `trainer.default_root_dir`.
    """

    pretrained_model_name_or_path: str
    denoiser_file: str | None = None
    learning_rate: float | None = None
    lr_warmup_steps: int = 0
    max_train_steps: int | None = None
    prior_loss_weight: float = 1.0
    use_ema: bool = False
    ema_decay: float = 0.995
    gradient_checkpointing: bool = False
    base_dtype: DtypeName = "auto"
    base_quantization: BaseQuantization | None = None
    base_quantization_skip: list[str] | None = None
    vae_dtype: Literal["float32", "bfloat16"] = "float32"
    revision: str | None = None
    variant: str | None = None
    validation_prompts: Sequence[str] = field(default_factory=list)
    validation_sources: Sequence[str] = field(default_factory=list)
    validation_steps: int = 100
    num_validation_images: int = 4
    validation_seed: int = 0
    checkpointing_steps: int = 500
    checkpoints_total_limit: int = 3
    step_files_total_limit: int = -1
    num_inference_steps: int = 25
    guidance_scale: float = 7.5
    sample_resolution: int | None = None
    sample_time_limit_s: float = 900
    output_name: str = "lora"

    def __post_init__(self) -> None:
        """Check the values. Raises: ModelError or ConfigError with the name of the first wrong one."""
        check_fields(self)
        super().__post_init__()
        check_at_least_one(
            self, "validation_steps", "num_validation_images", "checkpointing_steps", "num_inference_steps"
        )
        check_positive(self, "learning_rate", "max_train_steps")
        check_not_negative(self, "prior_loss_weight", "lr_warmup_steps", "guidance_scale")
        check_share(self, "ema_decay")
        for name in ("checkpoints_total_limit", "step_files_total_limit"):
            if getattr(self, name) < -1:
                raise ModelError(f"model.init_args.{name} must be at least -1 (all), got {getattr(self, name)}")
        check_output_name(self.output_name, "model.init_args.output_name")
        if self.vae_dtype not in ("float32", "bfloat16"):
            raise ModelError(f"model.init_args.vae_dtype must be float32 or bfloat16, got {self.vae_dtype}")
        check_base_quantization(self.base_quantization, self.base_quantization_skip)
