"""StableDiffusionLoRA: the LightningModule that adapts Stable Diffusion 1.x, 2.x or SDXL with a LoRA.

Legend: B batch, C channels, H and W latent height and width, N pictures.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import EMAModel
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from lightning_aigc.devices import autocast_dtype, dtype_named, float32_region
from lightning_aigc.diffusion.arguments import check_arguments, check_trained_weights
from lightning_aigc.diffusion.averaging import averaged, is_schedule_free
from lightning_aigc.diffusion.components import Components, check_source, fingerprint, load_components
from lightning_aigc.diffusion.lora_file import LoRAMetadata, save_lora
from lightning_aigc.diffusion.lora_metadata import hash_base_model
from lightning_aigc.diffusion.lora_targets import LoRATarget, lora_config
from lightning_aigc.diffusion.objectives import (
    LossType,
    PredictionType,
    draw_noise,
    example_losses,
    loss_weights,
    training_target,
)
from lightning_aigc.diffusion.optimization import build_schedule, check_schedule_name, parameter_groups
from lightning_aigc.diffusion.sampling import TimeLimit, generate
from lightning_aigc.diffusion.text import encode_prompts
from lightning_aigc.errors import ModelError
from lightning_aigc.tiny.embedded import resolve

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
PIXELS_ENCODED_AT_ONCE = 512 * 512


class StableDiffusionLoRA(LightningModule):
    """Adapt Stable Diffusion to a set of pictures by training a LoRA through peft.

    Args:
        pretrained_model_name_or_path: A diffusers pipeline folder, a hub id, a single `.safetensors` checkpoint, or
            `embedded:sd`, the tiny model that comes with the package.
        rank: Rank of the LoRA matrices; 4 to 64 is usual.
        lora_alpha: Scale of the LoRA's output is `lora_alpha / rank`; unset means equal to the rank.
        lora_dropout: Share of a LoRA layer's inputs that are dropped while training.
        lora_targets: Which of the U-Net's layers to adapt: attention, feed_forward, convolutions.
        use_dora: Learn magnitudes apart from directions (DoRA).
        use_rslora: Scale by `alpha / sqrt(rank)`, steadier at high ranks (rsLoRA).
        train_text_encoder: Adapt the text encoders too.
        learning_rate: Replaces the optimizer's own rate; unset keeps it.
        text_encoder_lr: Rate of the text encoders' LoRA; unset means `learning_rate`.
        optimizer: Any optimizer by class path; AdamW by default.
        lr_scheduler: A scheduler by class path, or one of diffusers' names: constant, constant_with_warmup, linear,
            cosine, cosine_with_restarts, polynomial.
        lr_warmup_steps: Optimizer steps of warm-up for a scheduler given by name.
        max_train_steps: Optimizer steps to train; `trainer.max_steps`, where given, goes first.
        prediction_type: epsilon, v_prediction or sample; unset means what the pipeline's scheduler says.
        zero_terminal_snr: Rescale the schedule so that its last step is pure noise; wants v_prediction.
        snr_gamma: Min-SNR weighting; 5 is the paper's value, unset turns it off.
        debiased_estimation: Weight by 1 / sqrt(SNR) instead of min-SNR.
        loss_type: l2, huber or smooth_l1.
        huber_c: Where huber and smooth_l1 turn from square to linear.
        noise_offset: Share of noise common to a whole channel; 0.05 to 0.1 lets pictures get darker and brighter.
        prior_loss_weight: Weight of the class pictures (`data.init_args.class_data_dir`) beside the user's own.
        use_ema: Average the trainable weights; pictures and files then use the average.
        ema_decay: Decay of that average.
        gradient_checkpointing: Recompute the U-Net's activations in backward: less memory, slower steps.
        base_dtype: Dtype of the frozen U-Net and text encoders; auto follows the trainer's precision.
        vae_dtype: Dtype of the autoencoder, float32 or bfloat16; half precision makes black pictures and is refused.
        revision: Branch or commit of a hub id.
        variant: Weight variant in the folder, such as fp16.
        validation_prompts: Prompts of the sample pictures and of the final score.
        validation_steps: Optimizer steps between sample grids.
        num_validation_images: Pictures a prompt.
        validation_seed: Seed of the first picture; the others count on from it.
        checkpointing_steps: Optimizer steps between checkpoints.
        checkpoints_total_limit: Checkpoints to keep.
        num_inference_steps: Denoising steps of a sample picture.
        guidance_scale: Classifier-free guidance of a sample picture.
        sample_time_limit_s: Skip sample pictures, with a warning, where making them would take longer than this.
        output_name: Name of the LoRA file, without its ending.
    """

    deferred_snapshot_keys = ("ema",)
    snapshot_ignored_arguments = frozenset(
        (
            "max_train_steps", "output_name", "validation_prompts", "validation_steps", "num_validation_images",
            "validation_seed", "num_inference_steps", "guidance_scale", "sample_time_limit_s", "checkpointing_steps",
            "checkpoints_total_limit", "gradient_checkpointing",
        )
    )  # fmt: skip
    """Keys of the checkpoint that `optimizer_step` alone writes: ExactSnapshot copies them beside the next batch."""

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        rank: int = 16,
        lora_alpha: float | None = None,
        lora_dropout: float = 0.0,
        lora_targets: Sequence[LoRATarget] = ("attention",),
        use_dora: bool = False,
        use_rslora: bool = False,
        train_text_encoder: bool = False,
        learning_rate: float | None = None,
        text_encoder_lr: float | None = None,
        optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=1e-2),
        lr_scheduler: str | LRSchedulerCallable = "constant",
        lr_warmup_steps: int = 0,
        max_train_steps: int | None = None,
        prediction_type: PredictionType | None = None,
        zero_terminal_snr: bool = False,
        snr_gamma: float | None = None,
        debiased_estimation: bool = False,
        loss_type: LossType = "l2",
        huber_c: float = 0.1,
        noise_offset: float = 0.0,
        prior_loss_weight: float = 1.0,
        use_ema: bool = False,
        ema_decay: float = 0.995,
        gradient_checkpointing: bool = False,
        base_dtype: DtypeName = "auto",
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
        self.validation_prompts = list(validation_prompts)
        self.output_name = output_name
        self.unet: UNet2DConditionModel | None = None
        self.text_encoders = nn.ModuleList()  # only when they are trained, so that DDP and checkpoints see them
        self.components: Components | None = None
        self.schedule: DDPMScheduler | None = None
        self.ema: EMAModel | None = None
        self.last_example_losses: Tensor | None = None
        """The last batch's weighted losses, [B], detached: GradientHealthMonitor judges them by timestep."""
        self.last_timesteps: Tensor | None = None
        """The timesteps that they were taken at, int64 [B]."""
        self.sampling_limit = TimeLimit(sample_time_limit_s)
        check_source(pretrained_model_name_or_path)
        check_arguments(self.args, self.lora_alpha)
        if isinstance(lr_scheduler, str):
            check_schedule_name(lr_scheduler)  # before gigabytes are read

    @property
    def args(self) -> Any:
        """The arguments of `__init__` by name."""
        return self.hparams

    @property
    def strict_loading(self) -> bool:
        """False: checkpoints hold only what was trained; `on_load_checkpoint` checks that all of it is there."""
        return False

    @strict_loading.setter
    def strict_loading(self, value: bool) -> None:
        raise ModelError("StableDiffusionLoRA checks its own checkpoints; strict_loading cannot be set")

    @property
    def lora_alpha(self) -> float:
        alpha = self.args.lora_alpha
        return float(self.args.rank if alpha is None else alpha)

    # Loading ---------------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        if self.unet is not None:
            return
        args = self.args
        trainer = self._trainer
        precision = str(trainer.precision) if trainer is not None else "32-true"
        base_dtype = autocast_dtype(precision) if args.base_dtype == "auto" else dtype_named(args.base_dtype)
        parts = load_components(
            args.pretrained_model_name_or_path,
            unet_dtype=base_dtype,
            vae_dtype=dtype_named(args.vae_dtype),
            revision=args.revision,
            variant=args.variant,
        )
        self.schedule = self._build_schedule(parts)
        options = {"dropout": args.lora_dropout, "use_dora": args.use_dora, "use_rslora": args.use_rslora}
        parts.unet.add_adapter(lora_config(args.lora_targets, args.rank, self.lora_alpha, **options))
        if args.train_text_encoder:
            targets = [t for t in args.lora_targets if t != "convolutions"] or ["attention"]
            for encoder in parts.text_encoders:
                encoder.add_adapter(lora_config(targets, args.rank, self.lora_alpha, is_text_encoder=True, **options))  # type: ignore[operator]
            self.text_encoders.extend(parts.text_encoders)
        if args.gradient_checkpointing:
            parts.unet.enable_gradient_checkpointing()
            for encoder in self.text_encoders:
                # transformers 5 renamed it, and recomputes in train mode only; CLIP has no dropout of its own.
                enable = (
                    getattr(encoder, "activation_checkpointing_enable", None) or encoder.gradient_checkpointing_enable
                )
                enable()  # type: ignore[operator]
                encoder.train()
        # `components` is a plain object: what it holds beside the U-Net stays out of the module tree, of DDP
        # and of checkpoints.
        self.components, self.unet = parts, parts.unet
        for parameter in self.trainable_parameters():
            parameter.data = parameter.data.float()  # fp32 LoRA on a half-precision base
        if args.use_ema:
            self.ema = EMAModel(self.trainable_parameters(), decay=args.ema_decay, use_ema_warmup=True, power=3 / 4)

    def _build_schedule(self, parts: Components) -> DDPMScheduler:
        overrides: dict[str, Any] = {}
        if self.args.prediction_type is not None:
            overrides["prediction_type"] = self.args.prediction_type
        if self.args.zero_terminal_snr:
            overrides |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
        schedule = DDPMScheduler.from_config(parts.scheduler_config, **overrides)
        if self.args.zero_terminal_snr and schedule.config.prediction_type == "epsilon":
            raise ModelError(
                "model.init_args.zero_terminal_snr leaves no signal at the last step, where epsilon says nothing;"
                " set model.init_args.prediction_type: v_prediction"
            )
        return schedule

    def _loaded(self) -> Components:
        if self.components is None:
            self.configure_model()
        assert self.components is not None
        return self.components

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    @property
    def num_train_timesteps(self) -> int:
        """Timesteps of the noise schedule."""
        self._loaded()
        assert self.schedule is not None
        return int(self.schedule.config.num_train_timesteps)

    # What ImageCaptionData asks for its caches ----------------------------------------------------------------------

    def encoder_identity(self) -> dict[str, str]:
        """What a cached latent or text embedding depends on, beside the picture and the caption."""
        parts = self._loaded()
        text = "+".join(fingerprint(e) for e in parts.text_encoders)
        return {"vae": f"{fingerprint(parts.vae)}-{parts.vae.dtype}", "text": f"{text}-{parts.text_encoders[0].dtype}"}

    @torch.no_grad()
    def encode_pixels(self, pixels_B3HW: Tensor) -> Tensor:
        """Mean and log-variance of the latents, float32 [B, 2C, H, W], unscaled; pixels are in -1..1.

        As many pictures at once as hold PIXELS_ENCODED_AT_ONCE: a float32 autoencoder's activations of four pictures of
        512 pixels would be the most memory that the whole step takes.
        """
        vae = self._loaded().vae.to(self.device)
        pixels = pixels_B3HW.to(self.device, vae.dtype)
        at_once = max(1, PIXELS_ENCODED_AT_ONCE // (pixels.shape[-2] * pixels.shape[-1]))
        with float32_region(self.device):
            encoded = [vae.encode(some).latent_dist.parameters.float() for some in torch.split(pixels, at_once)]
        return torch.cat(encoded)

    @torch.no_grad()
    def encode_captions(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """`prompt_embeds` [B, T, D], and for SDXL `pooled_prompt_embeds` [B, P]."""
        return encode_prompts(self._loaded(), list(captions), self.device)

    def can_cache_captions(self) -> bool:
        """Whether a caption's embedding stays the same while training."""
        return not self.args.train_text_encoder

    # Training --------------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        if stage != "fit" or self.args.max_train_steps is None:
            return
        loop = self.trainer.fit_loop
        if loop.max_steps == -1:
            loop.epoch_loop.max_steps = self.args.max_train_steps
            loop.max_epochs = -1

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss_B = self.example_losses(batch)
        is_prior_B = batch.get("is_prior")
        if is_prior_B is not None and is_prior_B.any():
            own, prior = loss_B[~is_prior_B].mean(), loss_B[is_prior_B].mean()
            loss: Tensor = own + self.args.prior_loss_weight * prior
            self.log("prior_loss", prior.detach())
        else:
            loss = own = loss_B.mean()
        self.log("loss", own.detach(), prog_bar=True, batch_size=len(loss_B))
        return loss

    def example_losses(self, batch: dict[str, Any]) -> Tensor:
        """The weighted diffusion loss of each example, float32 [B]."""
        assert self.schedule is not None and self.unet is not None
        args, parts = self.args, self._loaded()
        moments = batch["latent_moments"] if "latent_moments" in batch else self._finite_moments(batch)
        mean, log_variance = moments.to(self.device).chunk(2, dim=1)
        latents = mean + torch.exp(0.5 * log_variance.clamp(-30, 20)) * torch.randn_like(mean)
        shift = getattr(parts.vae.config, "shift_factor", None) or 0.0
        latents_BCHW = (latents - shift) * parts.vae.config.scaling_factor
        noise_BCHW = draw_noise(latents_BCHW, args.noise_offset)
        timesteps_B = torch.randint(
            0, self.schedule.config.num_train_timesteps, (len(latents_BCHW),), device=latents_BCHW.device
        )
        noisy_BCHW = self.schedule.add_noise(latents_BCHW, noise_BCHW, timesteps_B)
        predicted_BCHW = self.predict(noisy_BCHW, timesteps_B, self._condition(batch), batch)
        target_BCHW = training_target(self.schedule, latents_BCHW, noise_BCHW, timesteps_B)
        loss_B = example_losses(predicted_BCHW, target_BCHW, args.loss_type, args.huber_c, batch.get("mask"))
        loss_B = loss_B * loss_weights(self.schedule, timesteps_B, args.snr_gamma, is_debiased=args.debiased_estimation)
        self.last_example_losses, self.last_timesteps = loss_B.detach(), timesteps_B
        return loss_B

    def _finite_moments(self, batch: dict[str, Any]) -> Tensor:
        """Latent moments of pictures that no cache has checked."""
        moments = self.encode_pixels(batch["pixel_values"])
        is_finite_B = moments.isfinite().flatten(1).all(dim=1)
        if not is_finite_B.all():
            bad = is_finite_B.logical_not().nonzero().flatten().tolist()
            names = [str(batch["names"][i]) if "names" in batch else f"number {i} of its batch" for i in bad]
            raise ModelError(
                f"the latents of {', '.join(names[:3])} are not finite and would ruin the training;"
                " look at the picture, or set model.init_args.vae_dtype: float32"
            )
        return moments

    def _condition(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        if "prompt_embeds" in batch:
            keys = ("prompt_embeds", "pooled_prompt_embeds")
            return {k: batch[k].to(self.device) for k in keys if k in batch}
        with torch.set_grad_enabled(self.args.train_text_encoder and torch.is_grad_enabled()):
            return encode_prompts(self._loaded(), batch["captions"], self.device)

    def predict(
        self, noisy_BCHW: Tensor, timesteps_B: Tensor, condition: dict[str, Tensor], batch: dict[str, Any]
    ) -> Tensor:
        """The U-Net's output [B, C, H, W] for these noisy latents."""
        assert self.unet is not None
        added = None
        if self._loaded().family == "sdxl":
            sizes = [batch[k].to(self.device) for k in ("original_size", "crop_top_left", "target_size")]
            added = {
                "text_embeds": condition["pooled_prompt_embeds"].to(self.unet.dtype),
                "time_ids": torch.cat(sizes, dim=1).to(self.unet.dtype),
            }
        predicted_BCHW: Tensor = self.unet(
            noisy_BCHW.to(self.unet.dtype),
            timesteps_B,
            condition["prompt_embeds"].to(self.unet.dtype),
            added_cond_kwargs=added,
        ).sample
        return predicted_BCHW

    def configure_optimizers(self) -> Any:
        text = [p for p in self.text_encoders.parameters() if p.requires_grad]
        others = [p for p in self.trainable_parameters() if all(p is not q for q in text)]
        rates = (self.args.learning_rate, self.args.text_encoder_lr or self.args.learning_rate)
        optimizer = self.build_optimizer(parameter_groups([others, text], rates))
        steps = self.trainer.estimated_stepping_batches if self._trainer is not None else math.inf
        schedule = build_schedule(optimizer, self.build_lr_scheduler, self.args.lr_warmup_steps, steps)
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def brings_snapshots(self, trainer: Any) -> bool:
        """Whether `configure_callbacks` adds ExactSnapshot: not with enable_checkpointing: false."""
        saves = any(isinstance(callback, ModelCheckpoint) for callback in trainer.callbacks)
        return bool(saves and self.args.checkpoints_total_limit)

    def configure_callbacks(self) -> list[Callback]:
        from lightning_aigc.diffusion.default_callbacks import default_callbacks

        return default_callbacks(self, self.trainer)

    def on_train_start(self) -> None:
        if self.trainer.world_size > 1:
            # Every rank was seeded alike, for equal LoRA weights; from here each draws noise and timesteps of its own.
            torch.manual_seed(torch.initial_seed() + self.global_rank)
        for optimizer in filter(is_schedule_free, self.trainer.optimizers):
            optimizer.train()  # type: ignore[attr-defined]

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> None:
        if batch_idx == 0:
            self._park_frozen_parts(batch)

    def _park_frozen_parts(self, batch: dict[str, Any]) -> None:
        """Leave what the caches made superfluous in host memory; sampling fetches it and brings it back."""
        parts = self._loaded()
        if "latent_moments" in batch:
            parts.vae.to("cpu")
        if "prompt_embeds" in batch:
            for encoder in parts.text_encoders:
                encoder.to("cpu")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        # Here and not at the end of the batch, where callbacks come first and would see an average one step old.
        if self.ema is not None:
            self.ema.to(device=self.device)
            self.ema.step(self.trainable_parameters())

    # Generating ------------------------------------------------------------------------------------------------------

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Within: the weights to look at and to keep (the EMA's, or a schedule-free optimizer's average)."""
        optimizers = self._trainer.optimizers if self._trainer is not None else []
        return averaged(self.trainable_parameters(), self.ema, optimizers)

    def sample(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """One picture a prompt, float32 [N, 3, H, W] in 0..1 on the CPU; equal seeds give equal pictures.

        `batch_size` pictures are made at once; unset means as many as four of 512 px.

        Raises: ModelError if there are not as many seeds as prompts; SamplingTooSlow past `sample_time_limit_s`.
        """
        if len(prompts) != len(seeds):
            raise ModelError(f"sample needs one seed a prompt, got {len(prompts)} prompts and {len(seeds)} seeds")
        parts, args = self._loaded(), self.args
        assert self.schedule is not None
        with self.averaged_weights():
            return generate(
                parts,
                self.schedule.config,
                list(prompts),
                list(seeds),
                device=self.device,
                num_inference_steps=num_inference_steps or args.num_inference_steps,
                guidance_scale=args.guidance_scale if guidance_scale is None else guidance_scale,
                batch_size=batch_size,
                time_limit=self.sampling_limit,
            )

    # Saving ----------------------------------------------------------------------------------------------------------

    def save_lora(self, path: Any, **metadata: Any) -> None:
        """Write the LoRA as one `.safetensors` that diffusers, ComfyUI and A1111 load; averaged weights if any."""
        args, parts = self.args, self._loaded()
        assert self.schedule is not None
        kind = self.schedule.config.prediction_type
        facts = {
            "base_model_name": args.pretrained_model_name_or_path,
            "base_model_hash": self.base_model_hash(),
            "prediction_type": "v_prediction" if kind == "v_prediction" else "epsilon",
            "learning_rate": args.learning_rate,
            "text_encoder_lr": args.text_encoder_lr,
            "snr_gamma": args.snr_gamma,
            "noise_offset": args.noise_offset,
        }
        described = LoRAMetadata(**(facts | metadata))
        with self.averaged_weights(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*DoRA.*", category=UserWarning)  # answered by the second file
            save_lora(path, unet=parts.unet, text_encoders=tuple(self.text_encoders), metadata=described)
            if args.use_dora:  # ComfyUI's and A1111's readers round DoRA; diffusers' own layout is exact
                exact = Path(path).with_suffix(".diffusers.safetensors")
                save_lora(
                    exact,
                    unet=parts.unet,
                    text_encoders=tuple(self.text_encoders),
                    metadata=described,
                    layout="diffusers",
                )

    @functools.cache  # noqa: B019  one hash of gigabytes a module, and a module lives as long as its run
    def base_model_hash(self) -> str | None:
        """sha256 of the base model's file or U-Net weights; None for a hub id."""
        path = resolve(self.args.pretrained_model_name_or_path)
        return hash_base_model(path) if path.exists() else None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        names = {name for name, p in self.named_parameters() if p.requires_grad}
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in names}
        if self.ema is not None:
            checkpoint["ema"] = self.ema.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._loaded()
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        check_trained_weights(checkpoint["state_dict"], trained)
        if self.ema is not None and "ema" in checkpoint:
            self.ema.load_state_dict(checkpoint["ema"])
