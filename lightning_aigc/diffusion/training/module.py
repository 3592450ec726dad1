"""DiffusionTraining: the LightningModule that trains any family with any method.

Legend: B batch, C channels, H and W latent height and width, N images.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from typing import Any, Self

import torch
from PIL.Image import Image
from torch import Tensor, nn

from lightning_aigc._lightning import (
    Callback,
    LightningModule,
    LRSchedulerCallable,
    OptimizerCallable,
    TrainerFn,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_aigc.devices import autocast_dtype, dtype_named
from lightning_aigc.diffusion.families import Components, Family, full_name
from lightning_aigc.diffusion.objectives import DDPM, Objective, SeededNoise, draw_noise
from lightning_aigc.diffusion.objectives.ddpm import warn_of_prediction_type
from lightning_aigc.diffusion.objectives.losses import example_losses, with_prior
from lightning_aigc.diffusion.objectives.noise import example_seeds
from lightning_aigc.diffusion.pipeline.caption_tokens import count_tokens
from lightning_aigc.diffusion.pipeline.denoiser_file import KEY as DENOISER_FILE
from lightning_aigc.diffusion.pipeline.denoiser_file import check_denoiser_file
from lightning_aigc.diffusion.pipeline.edits import Edit, read_sources
from lightning_aigc.diffusion.pipeline.encoders import FrozenEncoders
from lightning_aigc.diffusion.pipeline.generate import IMAGE_REMEDIES, Control, TimeLimit, generate
from lightning_aigc.diffusion.pipeline.image_sizes import check_image_sizes, check_sample_size, check_sample_steps
from lightning_aigc.diffusion.pipeline.loading import (
    PipelineHalf,
    check_not_distilled,
    check_source,
    find_family,
    load_components,
)
from lightning_aigc.diffusion.pipeline.quantized_base import (
    CHECKPOINT_KEY,
    OWN_STEPS,
    calibration_outputs,
    check_same_base,
    checkpoint_entry,
    pack_base,
    pack_text_encoders,
    with_full_precision,
)
from lightning_aigc.diffusion.pipeline.text_encoder_offload import load_without_text_encoders
from lightning_aigc.diffusion.training import optimization
from lightning_aigc.diffusion.training.averaging import averaged, follow_shards, is_schedule_free, loaded_averages
from lightning_aigc.diffusion.training.default_callbacks import default_callbacks, has_default_snapshots
from lightning_aigc.diffusion.training.method import Method
from lightning_aigc.diffusion.training.named_optimizers import named_optimizer
from lightning_aigc.diffusion.training.native_attention import avoid_misread_gradients
from lightning_aigc.diffusion.training.settings import IGNORED_ON_RESUME, TrainingSettings
from lightning_aigc.diffusion.training.trained_weights import check_trained_weights, check_trainer, computed_in_half
from lightning_aigc.diffusion.training.validation import (
    VALIDATION_TIMESTEPS,
    ValidationSchedule,
    counted_mean,
    prompt_loader,
    write_prompt_sheet,
)
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ModelError
from lightning_aigc.evaluation_mode import evaluating
from lightning_aigc.protocols import CachesCaptions, HasEditSources
from lightning_aigc.quantization import PackedBase
from lightning_aigc.quantization.frozen import ignore_in_ddp
from lightning_aigc.rng import isolate_rng
from lightning_aigc.setting_checks import check_fields, unknown_argument

ADAPTER_KEY = "training_adapter"
"""Checkpoint entry with the hash of the training adapter's file."""


class DiffusionTraining(LightningModule):
    """Trains a diffusion pipeline: loss, optimizer, averages, checkpoints, samples and callbacks.

    Args:
        method: The choice of the trained weights: `LoRA`, `FullFineTuning` or `ControlNet`.
        pretrained_model_name_or_path: A diffusers pipeline folder, a hub id, a short name such as sd15, a single
            `.safetensors` checkpoint, `embedded:sd` or `embedded:sd3`, the tiny models that come with the package.
        optimizer: adamw, adamw8bit, sgd, lion, came, adafactor, muon, prodigy, schedulefree or sgdschedulefree, each
            with its usual rate unless `learning_rate` is set; or any optimizer by class path. AdamW by default.
        lr_scheduler: A scheduler by class path, or one of diffusers' names: constant, constant_with_warmup, linear,
            cosine, cosine_with_restarts, polynomial. A ReduceLROnPlateau reads its `monitor` (loss, if it has none)
            every `validation_steps`.
        kwargs: Fields of `TrainingSettings`.

    Raises: ModelError or ConfigError with the name of the wrong argument, before weights are read.
    """

    deferred_snapshot_keys = ("ema",)  # written only in `optimizer_step`
    image_remedies = IMAGE_REMEDIES

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show the settings in the signature, as `--help` does."""
        super().__init_subclass__(**kwargs)
        shown: dict[str, inspect.Parameter] = {}
        for signature in (inspect.signature(cls.__init__), inspect.signature(DiffusionTraining.__init__)):
            for p in list(signature.parameters.values())[1:]:
                if p.kind is not p.VAR_KEYWORD and p.name != "method":
                    shown.setdefault(p.name, p.replace(kind=p.KEYWORD_ONLY) if shown else p)
        for p in inspect.signature(TrainingSettings).parameters.values():
            shown.setdefault(p.name, p.replace(kind=p.KEYWORD_ONLY))
        cls.__signature__ = inspect.Signature(list(shown.values()))  # type: ignore[attr-defined]

    def __init__(
        self,
        method: Method,
        pretrained_model_name_or_path: str,
        optimizer: OptimizerCallable | str = "adamw",
        lr_scheduler: str | LRSchedulerCallable = "constant",
        **kwargs: Any,
    ) -> None:
        super().__init__()
        check_fields(method)
        known = {each.name for each in fields(TrainingSettings)}
        if unknown := [name for name in kwargs if name not in known]:
            raise unknown_argument(type(self).__name__, unknown[0], inspect.signature(type(self)).parameters)
        self.method = method
        source = full_name(pretrained_model_name_or_path)
        self.settings = TrainingSettings(pretrained_model_name_or_path=source, **kwargs)
        self.save_hyperparameters(method.options | asdict(self.settings))
        self.build_optimizer = named_optimizer(optimizer) if isinstance(optimizer, str) else optimizer
        self.snapshot_ignored_arguments = IGNORED_ON_RESUME | method.ignored_on_resume
        self.validation_prompts, self.output_name = list(self.settings.validation_prompts), self.settings.output_name
        self.text_encoders = nn.ModuleList()  # filled if they are trained, so that DDP and checkpoints see them
        self.components: Components | None = None
        """The pipeline's components, not an nn.Module, so that frozen networks stay out of the module tree and DDP."""
        self.objective: Objective | None = None
        self.packed_base: PackedBase | None = None
        """The weights that `base_quantization` packed."""
        self.ema: Any = None  # diffusers' EMAModel, which takes a second to import
        self.last_example_losses: Tensor | None = None
        """The last batch's weighted losses [B], detached; GradientHealthMonitor groups them by timestep."""
        self.last_timesteps: Tensor | None = None
        """The timesteps of these losses, int64 [B]."""
        self.sampling_limit = TimeLimit(self.settings.sample_time_limit_s)
        self._validation = ValidationSchedule(self.settings.validation_steps)
        self._loaded_optimizers: list[Any] = []
        self._held_share: float | None = None
        family = check_source(source, method.families, method.hint, takes_distilled=method.takes_distilled)
        self.build_lr_scheduler = optimization.read_scheduler(lr_scheduler)  # before weights are read
        method.check(self.settings, family)
        self._found_family = family
        if family is not None:
            self._check_settings(family)
        for no_images in ("You defined a `validation_step` but have no `val_dataloader`", "Total length of `list`"):
            warnings.filterwarnings("ignore", no_images)  # holding none out is a choice, and the default

    # Training --------------------------------------------------------------------------------------------------------

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The loss of a batch; logs `loss`, and `prior_loss` where the batch has class images."""
        settings, objective = self.settings, self.loaded_objective()
        with self.half_precision():
            latents_BCHW = self.encoders.latents(batch)
            noise_BCHW = draw_noise(latents_BCHW, settings.noise_offset)
            timesteps_B = objective.draw_timesteps(latents_BCHW)
            noisy_BCHW = objective.add_noise(latents_BCHW, noise_BCHW, timesteps_B)
            condition = self.encoders.condition(batch, with_gradients=bool(self.text_encoders))
            preservation, held = self.method.preservation, None
            if preservation is None:
                predicted_BCHW = self.predict(noisy_BCHW, timesteps_B, condition, batch)
            else:
                predicted_BCHW, held = preservation.predict(self, noisy_BCHW, timesteps_B, condition, batch)
            target_BCHW = objective.target(latents_BCHW, noise_BCHW, timesteps_B)
            mask_B1HW = batch.get("mask")
            loss_B = example_losses(predicted_BCHW, target_BCHW, settings.loss_type, settings.huber_c, mask_B1HW)
            weights_B = objective.weights(timesteps_B)
            loss_B = loss_B * weights_B
            preserved_loss = None if held is None else held.loss(settings.loss_type, settings.huber_c, weights_B)
        self.last_example_losses, self.last_timesteps = loss_B.detach(), timesteps_B.long()
        loss, user_loss, prior_loss = with_prior(loss_B, batch.get("is_prior"), settings.prior_loss_weight)
        if prior_loss is not None:
            self.log("prior_loss", prior_loss.detach())
        self.log("loss", user_loss.detach(), prog_bar=True, batch_size=len(loss_B))
        if preserved_loss is None:
            return loss
        assert held is not None
        self._held_share = len(held.rows) / len(loss_B)
        self.log("preserved_loss", preserved_loss.detach())
        return loss + preserved_loss

    def predict(
        self, noisy_BCHW: Tensor, timesteps_B: Tensor, condition: dict[str, Tensor], batch: dict[str, Any]
    ) -> Tensor:
        """The model's output [B, C, H, W] for these noisy latents."""
        guidance, is_training = self.settings.training_guidance, self.training
        return self.method.predict(
            self.encoders, noisy_BCHW, timesteps_B, condition, batch, guidance, is_training=is_training
        )

    def half_precision(self) -> AbstractContextManager[None]:
        """Autocast for bf16-true, where the trained weights are float32."""
        return computed_in_half(self._trainer, self.device, keeps_half=self.method.trains_half_weights)

    def caption_maker(self, trigger_word: str | None, drops_captions: bool) -> Callable[[str], str] | None:
        """protocols.PreservesCaptions: the function from a caption to the one that preservation holds."""
        preservation = self.method.preservation
        return None if preservation is None else preservation.caption_maker(trigger_word, drops_captions)

    def report_entries(self) -> dict[str, Any]:
        """The share, weight and cost of the preservation, for the run's page."""
        preservation = self.method.preservation
        return {} if preservation is None else {"figures": preservation.figures(self._held_share)}

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        if batch_idx == 0:
            self.encoders.offload(batch)
            if self.global_step == 0 and isinstance(self.objective, DDPM):
                self._warn_of_prediction_type(batch)

    def _warn_of_prediction_type(self, batch: dict[str, Any]) -> None:
        forward_context = self.trainer.precision_plugin.forward_context()
        with isolate_rng(self.device), evaluating(self), forward_context, self.half_precision(), torch.no_grad():
            latents_BCHW = self.encoders.latents(batch)
            condition = self.encoders.condition(batch, with_gradients=False)
            schedule = self.loaded_objective().schedule
            warn_of_prediction_type(schedule, latents_BCHW, lambda n, t: self.predict(n, t, condition, batch))

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups: the denoiser's weights, and the text encoders' at `text_encoder_lr`."""
        text = {id(p) for p in self.text_encoders.parameters()}
        groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for parameter in self.trainable_parameters():
            groups[id(parameter) in text].append(parameter)
        rate = self.settings.learning_rate
        return optimization.parameter_groups(groups, (rate, self.method.text_encoder_lr or rate))

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that take gradients, in the module's order."""
        return [p for p in self.parameters() if p.requires_grad]

    def configure_optimizers(self) -> Any:
        settings = self.settings
        optimizer = self.method.make_optimizer(self.build_optimizer, self.parameter_groups(), self._trainer)
        optimization.check_rates(optimizer)
        optimization.step_by_one_kernel_(optimizer)
        steps = optimization.steps_to_train(self.trainer) if self._trainer is not None else math.inf
        schedule = optimization.build_schedule(optimizer, self.build_lr_scheduler, settings.lr_warmup_steps, steps)
        if schedule is None:
            return optimizer
        return optimization.lightning_config(optimizer, schedule, settings.validation_steps)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        # Not in on_train_batch_end: callbacks run before the module and would see the average of the step before.
        if self.ema is not None:
            trained = self.trainable_parameters()
            follow_shards(self.ema, trained).to(device=trained[0].device)
            self.ema.step(trained)

    # Loading ---------------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the components, add the trained layers, pack the base and start the average."""
        if self.components is not None:
            return
        settings = self.settings
        data: Any = self._trainer.datamodule if self._trainer is not None else None  # type: ignore[attr-defined]
        is_file = resolve(settings.pretrained_model_name_or_path).is_file()  # a U-Net's, slow to tell its family
        if isinstance(data, HasEditSources) and self.trainer.state.fn != TrainerFn.PREDICTING:
            count = data.sources_per_image
            if count or not is_file:
                known = self._family()
                self.method.check_sources(known, settings, count)
                data.check_source_sides(known.smallest_source, known.title)
                if known.text_sees_sources:
                    data.check_seen_sources(known.title)
        components = self._load()
        family = components.family
        self._check_settings(family)
        if settings.validation_sources and not family.max_sources:
            raise ModelError(
                f"model.init_args.validation_sources: {family.title} draws from text alone; remove it, or train a model"
                " that edits"
            )
        self.method.check(settings, family)
        if self._trainer is not None and self._trainer.state.fn != TrainerFn.PREDICTING:
            check_image_sizes(components, self._trainer.datamodule)  # type: ignore[attr-defined]
        check_sample_size(components, settings.sample_resolution, "model.init_args.sample_resolution")
        check_sample_steps(components, settings.num_inference_steps, "model.init_args.num_inference_steps")
        self.objective = family.objective(components, settings)
        setattr(self, family.denoiser_name, components.denoiser)
        if settings.gradient_checkpointing:
            components.denoiser.enable_gradient_checkpointing()
        for name, module in self.method.prepare(components, settings, self.frozen_dtype()).items():
            setattr(self, name, module)
        self.components = components
        for parameter in self.trainable_parameters():
            parameter.data = parameter.data.float()  # float32 trained weights on a half-precision base
        if settings.base_quantization is not None:
            skip, trainer = settings.base_quantization_skip, self._trainer
            self.packed_base = pack_base(
                self, components, settings.base_quantization, skip, self._calibration_outputs, trainer
            )
            self.method.base_was_packed()
            ignore_in_ddp(self)
            rank_zero_info(f"base: {self.packed_base.summary()}; trained weights are not quantized")
        self.method.place_base(self, components, settings)
        if settings.use_ema:
            from diffusers.training_utils import EMAModel

            self.ema = EMAModel(self.trainable_parameters(), decay=settings.ema_decay, use_ema_warmup=True, power=3 / 4)

    def _check_settings(self, family: Family) -> None:
        """Raise ModelError for a setting that this family has no use for, or that would train another function."""
        self.settings.check_objective(family.title, is_flow=family.is_flow)
        check_denoiser_file(self.settings.denoiser_file, family)
        if self.settings.denoiser_file is not None and not self.method.takes_distilled:
            check_not_distilled(family, self.settings.denoiser_file, key=DENOISER_FILE)
        if self.settings.gradient_checkpointing and family.checkpointing_fault is not None:
            raise ModelError(
                f"model.init_args.gradient_checkpointing is wrong for {family.title} in diffusers:"
                f" {family.checkpointing_fault}; set gradient_checkpointing: false, and memory: lean or max of"
                " FusedBackwardPrecision, which recompute the same function"
            )

    def _load(self) -> Components:
        data: Any = self._trainer.datamodule if self._trainer is not None else None  # type: ignore[attr-defined]
        if not (isinstance(data, CachesCaptions) and data.caches_captions and self._family().encodes_text_first):
            return self.load_half(None)
        loaded: Components = load_without_text_encoders(
            self._load_text_encoders,
            lambda: self.load_half("without_text_encoders"),
            self.trainer,
            data,
            self.validation_prompts,
        )
        return loaded

    def load_half(self, only: PipelineHalf | None) -> Components:
        """The pipeline's components as they are on disk; `only` as in `load_components`."""
        settings, family, frozen = self.settings, self._family(), self.frozen_dtype()
        return load_components(
            settings.pretrained_model_name_or_path,
            families=self.method.families,
            denoiser_dtype=self.method.denoiser_dtype(family, frozen),
            vae_dtype=dtype_named(settings.vae_dtype),
            text_encoder_dtype=self.method.text_encoder_dtype(family, frozen),
            revision=settings.revision,
            variant=settings.variant,
            only=only,
            takes_distilled=self.method.takes_distilled,
            denoiser_file=settings.denoiser_file,
        )

    def _load_text_encoders(self) -> Components:
        text = self.load_half("text_encoders")
        if self.settings.base_quantization is not None:
            pack_text_encoders(text, self.settings.base_quantization_skip)
        return text

    def _family(self) -> Family:
        """The base's family, read once: a single file is slow to tell it, and a hub id asks the hub."""
        if self._found_family is None:
            settings, method = self.settings, self.method
            source, takes = settings.pretrained_model_name_or_path, method.takes_distilled
            self._found_family = find_family(
                source, method.families, settings.revision, method.hint, takes_distilled=takes
            )
        return self._found_family

    def frozen_dtype(self) -> torch.dtype:
        """Dtype of the frozen denoiser and text encoders, from `base_dtype`."""
        precision = str(self._trainer.precision) if self._trainer is not None else "32-true"
        name = self.settings.base_dtype
        return autocast_dtype(precision) if name == "auto" else dtype_named(name)

    def full_precision_base(self) -> AbstractContextManager[None]:
        """Compute with the base in full precision, read from its source, until the block ends."""
        components = self.loaded()
        if self.method.streams_base:  # it would not fit in full precision
            return contextlib.nullcontext()
        half: PipelineHalf | None = None if components.stored_texts is None else "without_text_encoders"
        return with_full_precision(components, self.load_half(half))

    def loaded(self) -> Components:
        """The pipeline's components, loaded on first use."""
        if self.components is None:
            self.configure_model()
        assert self.components is not None
        return self.components

    def loaded_objective(self) -> Objective:
        """The training objective; loads the components on first use."""
        self.loaded()
        assert self.objective is not None
        return self.objective

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move to a device; dtypes stay as `configure_model` chose them."""
        if self.method.trains_half_weights:
            return super().to(*args, **kwargs)
        device, _, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is None:
            return self
        return super().to(device=device, non_blocking=non_blocking, memory_format=memory_format)

    def _calibration_outputs(self, device: torch.device) -> Any:
        def draw(prompts: Sequence[str], seeds: Sequence[int]) -> Tensor:
            return generate(
                self.loaded(), self.sampling_config(), list(prompts), list(seeds), device=device,
                num_inference_steps=OWN_STEPS, guidance_scale=1.0, time_limit=TimeLimit(math.inf),
                resolution=self.settings.sample_resolution,
            )  # fmt: skip

        data = getattr(self._trainer, "datamodule", None)
        dtype = self.frozen_dtype()
        encoders = FrozenEncoders(self.loaded(), device)
        return calibration_outputs(self, encoders, data, draw, self.noised, self.predict, dtype)

    # Encoding for ImageCaptionData's caches --------------------------------------------------------------------------

    @property
    def encoders(self) -> FrozenEncoders:
        """The autoencoder and text encoders."""
        return FrozenEncoders(self.loaded(), self.device)

    def encoder_identity(self) -> dict[str, str]:
        """The entries of the cache key for the weights and dtypes."""
        return self.encoders.encoder_identity()

    def encode_pixels(self, pixels_B3HW: Tensor) -> Tensor:
        """Encode pixels in -1..1 to the latents' mean and log-variance, float32 [B, 2C, H, W], unscaled."""
        return self.encoders.encode_pixels(pixels_B3HW)

    def encode_captions(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Encode captions to `prompt_embeds` [B, T, D], and the denoiser's other inputs."""
        return self.encoders.encode_captions(captions)

    def encode_instructions(self, captions: Sequence[str], sources: Sequence[Sequence[Image]]) -> dict[str, Tensor]:
        """data.cache.encoder.EncodesInstructions: encode captions together with the sources of their edits."""
        return self.encoders.encode_captions(captions, sources)

    def can_cache_captions(self) -> bool:
        """False if the text encoders are trained."""
        return not self.text_encoders

    def count_tokens(self, captions: Sequence[str]) -> tuple[Sequence[int], int] | None:
        """protocols.CountsTokens: each caption's tokens, and the most that the text encoder reads."""
        return count_tokens(self.settings.pretrained_model_name_or_path, self.settings.revision, captions)

    # Run -------------------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        check_trainer(self.trainer)
        if stage == "fit":
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            for sentence in self.method.unread(self.settings, data, type(self).__name__):
                rank_zero_warn(sentence)
            self._validation.begin(self.trainer)
            optimization.limit_steps(self.trainer, self.settings.max_train_steps)

    def configure_callbacks(self) -> list[Callback]:
        return default_callbacks(self.trainer, self.settings, self.method.saver(self.settings))

    def brings_snapshots(self, trainer: Any) -> bool:
        """Whether `configure_callbacks` adds ExactSnapshot."""
        return has_default_snapshots(trainer, self.settings)

    def on_train_start(self) -> None:
        if self.trainer.world_size > 1:
            # All ranks start with one seed, for equal initial weights; from here noise and timesteps differ per rank.
            torch.manual_seed(torch.initial_seed() + self.global_rank)
        avoid_misread_gradients(self.loaded().denoiser, self.device)
        for optimizer in filter(is_schedule_free, self.trainer.optimizers):
            optimizer.train()  # type: ignore[attr-defined]
        self._validation.validate_untrained(self.trainer)
        optimization.follow_new_end(self.trainer)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._validation.after_batch(self.trainer)

    # Validation and samples ------------------------------------------------------------------------------------------

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log `val_loss`: the mean over all held-out images, equal for every batch size and number of ranks."""
        self._log_held_out("val_loss", batch)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log `test_loss`, which is `val_loss` of the test loader's images."""
        self._log_held_out("test_loss", batch)

    def _log_held_out(self, name: str, batch: dict[str, Any]) -> None:
        with self.averaged_weights(), self.half_precision():
            loss_B = self.validation_losses(batch, SeededNoise(example_seeds(batch)))
        mean, count = counted_mean(loss_B, batch)
        # Lightning divides the summed counts by the number of ranks, as integers.
        weight = count * self.trainer.world_size
        self.log(name, mean, on_step=False, on_epoch=True, batch_size=weight, sync_dist=True, prog_bar=True)

    def validation_losses(self, batch: dict[str, Any], noise: SeededNoise) -> Tensor:
        """The mean squared error of the prediction, float32 [B], over one timestep in each part of the schedule.

        It is neither weighted by SNR nor Huber, and its noise has no offset, so that runs which differ in these can be
        compared; where the batch has masks, only the masked region counts.
        """
        latents_BCHW = self.encoders.latents(batch, noise.normal_like)
        condition = self.encoders.condition(batch, with_gradients=False)
        losses = []
        for part in range(VALIDATION_TIMESTEPS):
            noisy_BCHW, timesteps_B, target_BCHW = self.noised(latents_BCHW, noise, part, VALIDATION_TIMESTEPS)
            predicted_BCHW = self.predict(noisy_BCHW, timesteps_B, condition, batch)
            losses.append(example_losses(predicted_BCHW, target_BCHW, mask_B1HW=batch.get("mask")))
        return torch.stack(losses).mean(0)

    def noised(self, latents_BCHW: Tensor, noise: SeededNoise, part: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Noisy latents [B, C, H, W], their timesteps [B] in this part of the schedule, and the model's target.

        Draws the timesteps first, then the noise.
        """
        objective = self.loaded_objective()
        timesteps_B = objective.timesteps_in_part(noise, part, parts, latents_BCHW)
        noise_BCHW = noise.normal_like(latents_BCHW)
        noisy_BCHW = objective.add_noise(latents_BCHW, noise_BCHW, timesteps_B)
        return noisy_BCHW, timesteps_B, objective.target(latents_BCHW, noise_BCHW, timesteps_B)

    def sampling_config(self) -> Mapping[str, Any]:
        """The scheduler config for sampling."""
        config: Mapping[str, Any] = self.loaded_objective().schedule.config
        return config

    @property
    def num_train_timesteps(self) -> int:
        """Timesteps of the noise schedule."""
        return self.loaded_objective().num_train_timesteps

    def sample(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        batch_size: int | None = None,
        control: Control | None = None,
        sources: Sequence[Sequence[Image]] | None = None,
    ) -> Tensor:
        """Generate one image per prompt, float32 [N, 3, H, W] in 0..1 on the CPU; equal seeds give equal images.

        Args:
            batch_size: Images generated at once; unset means the pixels of four images of 512 px.
            control: A ControlNet with a condition for each image.
            sources: For a family that edits, the images that each image starts from; its size is that of the first.
                Unset are `validation_sources`, or else sources of the data, held-out ones where there are any.

        Raises: ModelError if the numbers of seeds and prompts differ; SamplingTooSlow past `sample_time_limit_s`.
        """
        if isinstance(prompts, str):
            raise ModelError(f"sample takes a list of prompts, got the text {prompts!r}; give [{prompts!r}]")
        if len(prompts) != len(seeds):
            raise ModelError(f"sample needs one seed per prompt, got {len(prompts)} prompts and {len(seeds)} seeds")
        components, settings = self.loaded(), self.settings
        steps, scale = self.method.sampling_choices(settings, components.family)
        edit = None if control is not None else self._edit(prompts, seeds, sources)
        with self.averaged_weights(), self.method.sampling_base():
            return generate(
                components,
                self.sampling_config(),
                list(prompts),
                list(seeds),
                device=self.device,
                num_inference_steps=num_inference_steps or steps,
                guidance_scale=scale if guidance_scale is None else guidance_scale,
                batch_size=batch_size,
                time_limit=self.sampling_limit,
                control=control,
                edit=edit,
                resolution=settings.sample_resolution,
            )

    @property
    def has_own_sources(self) -> bool:
        """protocols.SamplesEdits: whether samples start from `validation_sources`."""
        return bool(self.settings.validation_sources)

    @property
    def base_pipeline(self) -> str:
        """protocols.SamplesEdits: diffusers' class that draws with this family from text."""
        return self._family().pipeline

    @property
    def edit_pipeline(self) -> str | None:
        """protocols.SamplesEdits: diffusers' class that edits with this family; None where there is none."""
        return self._family().edit_pipeline  # a check by isinstance reads this, before there are weights

    def sources_of_samples(self, prompts: Sequence[str], seeds: Sequence[int]) -> Sequence[Sequence[Image]] | None:
        """The sources that samples of these prompts and seeds start from; None where they start from text alone."""
        edit = self._edit(prompts, seeds, None)
        return None if edit is None else edit.sources

    def _edit(
        self, prompts: Sequence[str], seeds: Sequence[int], sources: Sequence[Sequence[Image]] | None
    ) -> Edit | None:
        """The sources of these images; None where the model draws from text alone."""
        components, settings = self.loaded(), self.settings
        data: Any = self._trainer.datamodule if self._trainer is not None else None  # type: ignore[attr-defined]
        if sources is None and settings.validation_sources:
            step = components.family.size_step(components.denoiser, components.vae)
            files, key = settings.validation_sources, "model.init_args.validation_sources"
            images = read_sources(files, step, settings.sample_resolution, key)
            numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(self.validation_prompts))}
            sources = [
                [images[numbers.get(prompt, seed) % len(images)]] for prompt, seed in zip(prompts, seeds, strict=True)
            ]
        if sources is not None:
            return Edit(sources, [images[0].size for images in sources])
        if not isinstance(data, HasEditSources) or not data.sources_per_image:
            return None
        found = [data.edit_sources(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        return Edit([images for images, _ in found], [size for _, size in found])

    def predict_dataloader(self) -> Any:
        return prompt_loader(self.validation_prompts, self.trainer.world_size)

    def predict_step(self, prompts: list[str], batch_idx: int) -> Tensor:
        """Sample every prompt with every seed, [N, 3, H, W]; rank 0 writes `<default_root_dir>/predict.png`."""
        if not isinstance(prompts, (list, tuple)) or not all(isinstance(prompt, str) for prompt in prompts):
            raise ModelError(
                f"predict draws prompts, got a batch of type {type(prompts).__name__}; give a DataLoader of"
                " prompts, which are texts, or none for validation_prompts"
            )
        first, count = self.settings.validation_seed, self.settings.num_validation_images
        return write_prompt_sheet(self.trainer, self, prompts, range(first, first + count))

    # Checkpoints: trained and averaged weights -----------------------------------------------------------------------

    @property
    def strict_loading(self) -> bool:
        """False: checkpoints hold only trained weights, and `on_load_checkpoint` checks that they are complete."""
        return False

    @strict_loading.setter
    def strict_loading(self, value: bool) -> None:
        raise ModelError(f"{type(self).__name__} checks its own checkpoints; strict_loading cannot be set")

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Swap in averaged weights, from an EMA or a schedule-free optimizer, until the block ends."""
        optimizers = self._trainer.optimizers if self._trainer is not None else []
        return averaged(self.trainable_parameters(), self.ema, optimizers or self._loaded_optimizers)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        names = {name for name, p in self.named_parameters() if p.requires_grad}
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in names}
        if self.ema is not None:
            checkpoint["ema"] = self.ema.state_dict()
        if self.packed_base is not None:
            checkpoint[CHECKPOINT_KEY] = checkpoint_entry(self.packed_base)
        if self.method.base_digest is not None:
            checkpoint[ADAPTER_KEY] = self.method.base_digest

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded()
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        check_trained_weights(checkpoint["state_dict"], trained, self.method.same_weights_advice)
        if checkpoint.get(ADAPTER_KEY) != self.method.base_digest:
            raise ModelError(
                "the checkpoint was trained with another training adapter, or without one; give the"
                " model.init_args.training_adapter that it was trained with"
            )
        check_same_base(checkpoint, self.packed_base)
        if self.ema is not None and "ema" in checkpoint:
            self.ema.load_state_dict(checkpoint["ema"])
            follow_shards(self.ema, self.trainable_parameters())
        if self._trainer is not None and not self._trainer.optimizers:  # not in fit, which builds its own
            self._loaded_optimizers = loaded_averages(self.build_optimizer(self.parameter_groups()), checkpoint)
