"""DiffusionModule: the arguments and hooks that every model family shares.

A family inherits the arguments, because YAML keys are flat and jsonargparse finds arguments through
`super().__init__(**kwargs)`. The behaviour is composed from `encoders`, `trained_weights`, `objectives`, `averaging`,
`optimization`, `sampling` and `default_callbacks`.

Legend: B batch, N pictures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, ClassVar, Literal, Self

import torch
from diffusers.training_utils import EMAModel
from lightning.pytorch import Callback
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_aigc.callbacks import SaveLoRA
from lightning_aigc.devices import autocast_dtype, dtype_named
from lightning_aigc.diffusion import optimization
from lightning_aigc.diffusion.arguments import check_shared_arguments
from lightning_aigc.diffusion.averaging import follow_shards, is_schedule_free
from lightning_aigc.diffusion.caption_tokens import count_tokens
from lightning_aigc.diffusion.components import Components, Part, check_source, load_components
from lightning_aigc.diffusion.default_callbacks import RunSettings, default_callbacks, has_default_snapshots
from lightning_aigc.diffusion.encoders import EncodesCaches
from lightning_aigc.diffusion.evaluation import EvaluatedModule
from lightning_aigc.diffusion.families import U_NETS
from lightning_aigc.diffusion.half_precision import check_precision, computed_in_half, trains_half_weights
from lightning_aigc.diffusion.inherited_arguments import merged_signature
from lightning_aigc.diffusion.objectives import with_prior
from lightning_aigc.diffusion.packed_base import check_base_quantization, pack_base, with_full_precision
from lightning_aigc.diffusion.picture_sizes import check_picture_sizes
from lightning_aigc.diffusion.sampling import IMAGE_REMEDIES, TimeLimit
from lightning_aigc.diffusion.trained_weights import KeepsTrainedWeights
from lightning_aigc.quantization import BaseQuantization, PackedBase

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


class DiffusionModule(EncodesCaches, KeepsTrainedWeights, EvaluatedModule):
    """Base class of the model families: loss, optimizer, averages, checkpoints, sample pictures and callbacks.

    A family defines `adapt`, `example_losses`, `validation_losses`, `sample`, and how to save its result.

    Args:
        pretrained_model_name_or_path: A diffusers pipeline folder, a hub id, a single `.safetensors` checkpoint, or
            `embedded:sd`, the tiny model that comes with the package.
        learning_rate: Replaces the optimizer's rate; unset keeps it.
        optimizer: Any optimizer by class path; AdamW by default.
        lr_scheduler: A scheduler by class path, or one of diffusers' names: constant, constant_with_warmup, linear,
            cosine, cosine_with_restarts, polynomial. A ReduceLROnPlateau looks at its `monitor` (loss, if it has none)
            every `validation_steps`.
        lr_warmup_steps: Optimizer steps of warm-up for a scheduler given by name.
        max_train_steps: Optimizer steps to train; `trainer.max_steps`, if given, overrides it, and `trainer.max_epochs`
            ends the run if it comes first.
        prior_loss_weight: Weight of the class pictures (`data.init_args.class_data_dir`) beside the user's.
        use_ema: Average the trainable weights; pictures and files then use the average.
        ema_decay: Decay of that average.
        gradient_checkpointing: Recompute the denoiser's activations in backward: less memory, slower steps.
        base_dtype: Dtype of the frozen denoiser and text encoders; auto follows the trainer's precision.
        base_quantization: Store the frozen denoiser and text encoders in few bits: int8 (begin here), nf4 (the
            denoiser's linears NF4, all else int8) or nf4-all (half the memory of int8, and the LoRA loses most
            on the full-precision base; docs/quantized_base.md). `{target_mib: 1500}` gives each weight its bits, so
            that all fit and the denoiser's output on the training pictures moves least. Unset keeps them whole.
        base_quantization_skip: Name patterns of layers that stay whole; unset leaves the first and last convolution
            and the embeddings.
        vae_dtype: Dtype of the autoencoder, float32 or bfloat16; half precision makes black pictures and is refused.
        revision: Branch or commit of a hub id.
        variant: Weight variant in the folder, such as fp16.
        validation_prompts: Prompts of the sample pictures and of the final score.
        validation_steps: Optimizer steps between sample grids, and between values of `val_loss`.
        num_validation_images: Pictures per prompt.
        validation_seed: Seed of the first picture; the next pictures count up from it.
        checkpointing_steps: Optimizer steps between checkpoints.
        checkpoints_total_limit: Checkpoints to keep.
        num_inference_steps: Denoising steps of a sample picture.
        guidance_scale: Classifier-free guidance of a sample picture.
        sample_time_limit_s: Skip sample pictures, with a warning, if sampling would take longer than this.
        output_name: Name of the result's file, without folder and suffix; it lies in `trainer.default_root_dir`.
    """

    snapshot_ignored_arguments = frozenset(
        (
            "max_train_steps", "output_name", "validation_prompts", "validation_steps", "num_validation_images",
            "validation_seed", "num_inference_steps", "guidance_scale", "sample_time_limit_s", "checkpointing_steps",
            "checkpoints_total_limit", "gradient_checkpointing",
        )
    )  # fmt: skip
    """Arguments that do not change the bits of a training."""
    image_remedies = IMAGE_REMEDIES
    families: ClassVar[tuple[str, ...]] = tuple(U_NETS)
    """The pipelines' families that this class trains."""
    others: ClassVar[str | None] = None
    """A clause that says what does the same for other families; None names a class that trains a LoRA."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show inherited arguments in the signature, as `--help` does."""
        super().__init_subclass__(**kwargs)
        cls.__signature__ = merged_signature(cls, DiffusionModule)  # type: ignore[attr-defined]

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        learning_rate: float | None = None,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=1e-2),
        lr_scheduler: str | LRSchedulerCallable = "constant",
        lr_warmup_steps: int = 0,
        max_train_steps: int | None = None,
        prior_loss_weight: float = 1.0,
        use_ema: bool = False,
        ema_decay: float = 0.995,
        gradient_checkpointing: bool = False,
        base_dtype: DtypeName = "auto",
        base_quantization: BaseQuantization | None = None,
        base_quantization_skip: list[str] | None = None,
        vae_dtype: Literal["float32", "bfloat16"] = "float32",
        revision: str | None = None,
        variant: str | None = None,
        validation_prompts: Sequence[str] = (),
        validation_steps: int = 100,
        num_validation_images: int = 4,
        validation_seed: int = 0,
        checkpointing_steps: int = 500,
        checkpoints_total_limit: int = 3,
        num_inference_steps: int = 25,
        guidance_scale: float = 7.5,
        sample_time_limit_s: float = 900,
        output_name: str = "lora",
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])
        self.build_optimizer, self.build_lr_scheduler = optimizer, lr_scheduler
        self.validation_prompts, self.output_name = list(validation_prompts), output_name
        self.text_encoders = nn.ModuleList()  # filled if they are trained, so that DDP and checkpoints see them
        self.components: Components | None = None
        """The pipeline's components, not an nn.Module, so that frozen parts stay out of the module tree and DDP."""
        self.packed_base: PackedBase | None = None
        """What `base_quantization` packed."""
        self.ema: EMAModel | None = None
        self.last_example_losses: Tensor | None = None
        """The last batch's weighted losses [B], detached; GradientHealthMonitor groups them by timestep."""
        self.last_timesteps: Tensor | None = None
        """The timesteps of these losses, int64 [B]."""
        self._loaded_optimizers: list[Any] = []
        self.sampling_limit = TimeLimit(sample_time_limit_s)
        check_source(pretrained_model_name_or_path, self.families, self.others)
        check_shared_arguments(self.args)
        check_base_quantization(self.args)
        if isinstance(lr_scheduler, str):
            optimization.check_schedule_name(lr_scheduler)  # before weights are read

    # Loading ---------------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        if self.components is not None:
            return
        args, parts = self.args, self.load_components()
        if self._trainer is not None and self._trainer.state.fn != TrainerFn.PREDICTING:
            check_picture_sizes(parts, self._trainer.datamodule)  # type: ignore[attr-defined]
        self.adapt(parts)
        self.components = parts
        for parameter in self.trainable_parameters():
            parameter.data = parameter.data.float()  # float32 trained weights on a half-precision base
        if args.base_quantization is not None:
            self.packed_base = pack_base(self, parts, args.base_quantization, args.base_quantization_skip)
            rank_zero_info(f"base: {self.packed_base.summary()}; what is trained is not packed")
        if args.use_ema:
            self.ema = EMAModel(self.trainable_parameters(), decay=args.ema_decay, use_ema_warmup=True, power=3 / 4)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move to a device; dtypes stay as `configure_model` chose them."""
        if trains_half_weights(self):
            return super().to(*args, **kwargs)
        device, _, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is None:
            return self
        return super().to(device=device, non_blocking=non_blocking, memory_format=memory_format)

    def load_components(self) -> Components:
        """The pipeline's components, to be adapted."""
        return self.load_parts()

    def load_parts(self, only: Part | None = None) -> Components:
        """The pipeline's components as they are on disk; `only` as in `components.load_components`."""
        args = self.args
        return load_components(
            args.pretrained_model_name_or_path,
            families=self.families,
            denoiser_dtype=self.loading_dtype(),
            vae_dtype=dtype_named(args.vae_dtype),
            text_encoder_dtype=self.text_encoder_dtype(),
            revision=args.revision,
            variant=args.variant,
            only=only,
        )

    def frozen_dtype(self) -> torch.dtype:
        """The dtype of the frozen denoiser and text encoders, by `base_dtype`."""
        precision = str(self._trainer.precision) if self._trainer is not None else "32-true"
        return autocast_dtype(precision) if self.args.base_dtype == "auto" else dtype_named(self.args.base_dtype)

    def loading_dtype(self) -> torch.dtype:
        """The dtype that the denoiser and the text encoders are read in."""
        return self.frozen_dtype()

    def text_encoder_dtype(self) -> torch.dtype | None:
        """The dtype that the text encoders are read in; None for that of the denoiser."""
        return None

    def full_precision_base(self) -> AbstractContextManager[None]:
        """Compute with the base as it is used after training, read from its source, until the block ends."""
        parts = self.loaded()
        return with_full_precision(parts, self.load_parts(None if parts.stored_texts is None else "pictures"))

    def adapt(self, parts: Components) -> None:
        """Add the trained layers to freshly loaded, frozen components, and register the trained modules on `self`."""
        raise NotImplementedError

    def loaded(self) -> Components:
        """The pipeline's components, loaded on first use."""
        if self.components is None:
            self.configure_model()
        assert self.components is not None
        return self.components

    def count_tokens(self, captions: Sequence[str]) -> tuple[Sequence[int], int] | None:
        """protocols.CountsTokens: each caption's tokens, and how many the text encoder keeps."""
        return count_tokens(self.args.pretrained_model_name_or_path, self.args.revision, captions)

    # Training --------------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        check_precision(self.trainer)
        if stage != "fit":
            return
        self.schedule_validation()
        optimization.limit_steps(self.trainer, self.args.max_train_steps)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        with computed_in_half(self):
            loss_B = self.example_losses(batch)
        loss, user_loss, prior_loss = with_prior(loss_B, batch.get("is_prior"), self.args.prior_loss_weight)
        if prior_loss is not None:
            self.log("prior_loss", prior_loss.detach())
        self.log("loss", user_loss.detach(), prog_bar=True, batch_size=len(loss_B))
        return loss

    def example_losses(self, batch: dict[str, Any]) -> Tensor:
        """The weighted loss of each example, float32 [B]."""
        raise NotImplementedError

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return optimization.parameter_groups([self.trainable_parameters()], [self.args.learning_rate])

    def make_optimizer(self) -> Optimizer:
        """The optimizer of the trained weights."""
        built: Optimizer = self.build_optimizer(self.parameter_groups())
        return built

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer()
        optimization.warn_of_rate(optimizer)
        steps = optimization.steps_to_train(self.trainer) if self._trainer is not None else math.inf
        schedule = optimization.build_schedule(optimizer, self.build_lr_scheduler, self.args.lr_warmup_steps, steps)
        return (
            optimizer
            if schedule is None
            else optimization.lightning_config(optimizer, schedule, self.args.validation_steps)
        )

    def configure_callbacks(self) -> list[Callback]:
        return default_callbacks(self.trainer, self._run_settings(), self.result_saver())

    def result_saver(self) -> Callback:
        """The callback that saves the result, unless the Trainer has one of its class."""
        return SaveLoRA(every_n_steps=self.args.checkpointing_steps)

    def brings_snapshots(self, trainer: Any) -> bool:
        """Whether `configure_callbacks` adds ExactSnapshot."""
        return has_default_snapshots(trainer, self._run_settings())

    def _run_settings(self) -> RunSettings:
        args = self.args
        return RunSettings(
            draws_samples=bool(self.validation_prompts),
            **{f.name: args[f.name] for f in fields(RunSettings) if f.name in args},
        )

    def on_train_start(self) -> None:
        if self.trainer.world_size > 1:
            # All ranks start with one seed, for equal initial weights; from here noise and timesteps differ per rank.
            torch.manual_seed(torch.initial_seed() + self.global_rank)
        for optimizer in filter(is_schedule_free, self.trainer.optimizers):
            optimizer.train()  # type: ignore[attr-defined]
        self.validate_untrained()
        optimization.follow_new_end(self.trainer)

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        if batch_idx == 0:
            self.encoders.park(batch)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        # Not in on_train_batch_end: callbacks run before the module and would see the average of the step before.
        if self.ema is not None:
            trained = self.trainable_parameters()
            follow_shards(self.ema, trained).to(device=trained[0].device)
            self.ema.step(trained)
