"""DiffusionControlNet: a LightningModule that trains a ControlNet.

Legend: B batch, C channels, H and W latent height and width, N images, S pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL.Image import Image
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_aigc._lightning import rank_zero_info
from lightning_aigc.devices import weights_dtype
from lightning_aigc.diffusion.controlnet import transformer, unet
from lightning_aigc.diffusion.controlnet.conditions import FOLDER, Maker, find_maker, from_bytes, to_bytes
from lightning_aigc.diffusion.controlnet.lora import add_lora, merged_controlnet, save_control_lora
from lightning_aigc.diffusion.families import FAMILIES, Components, Family, TransformerControl, TransformerFamily
from lightning_aigc.diffusion.families.transformer_control import to_pixels
from lightning_aigc.diffusion.objectives import SeededNoise
from lightning_aigc.diffusion.objectives.losses import example_losses
from lightning_aigc.diffusion.objectives.noise import example_seeds
from lightning_aigc.diffusion.pipeline.encoders import FrozenEncoders
from lightning_aigc.diffusion.pipeline.generate import Control
from lightning_aigc.diffusion.training.full_fine_tuning import FullWeights, SaveDtype
from lightning_aigc.diffusion.training.module import DiffusionTraining
from lightning_aigc.diffusion.training.settings import TrainingSettings
from lightning_aigc.errors import ModelError
from lightning_aigc.protocols import HasHeldOutBatches
from lightning_aigc.setting_checks import Readers

SHOWN_CONDITIONS = 16
"""Held-out images whose conditions the samples follow."""
MOMENTS = "conditioning_moments"
"""Batch key of encoded conditions: mean and log-variance, as `latent_moments`."""
OF_TRANSFORMERS, OF_U_NETS = ("num_layers", "num_single_layers"), ("rank",)


@dataclass
class ControlNet(FullWeights):
    """A ControlNet next to a frozen denoiser; the fields are `DiffusionControlNet`'s arguments."""

    families: ClassVar[Mapping[str, Family]] = {n: f for n, f in FAMILIES.items() if f.control is not None}
    hint: ClassVar[str] = "diffusers has no ControlNet for yours"
    same_weights_advice: ClassVar[str] = (
        "use the pretrained_model_name_or_path, controlnet_model_name_or_path, rank, num_layers and num_single_layers"
        " that it was trained with"
    )
    reads_conditions: ClassVar[bool] = True
    readers: ClassVar[Readers] = {
        "canny_thresholds": ("conditions", ("folder", "lineart", "tile", "inpaint"), ""),
    }
    controlnet_model_name_or_path: str | None = None
    rank: int | None = None
    num_layers: int | None = None
    num_single_layers: int | None = None
    conditions: str = "canny"
    canny_thresholds: Sequence[float] = (0.1, 0.2)
    protect_edges: bool = True
    maker: Maker | None = field(default=None, init=False)
    """Makes conditions from images; None where they are files."""
    network: Any = field(default=None, init=False)
    """diffusers' ControlNet."""
    protected: tuple[str, ...] = field(default=(), init=False)
    """Names of the modules that `protect_edges` covers."""

    def __post_init__(self) -> None:
        self.maker = find_maker(self.conditions, self.canny_thresholds)

    def check_sources(self, family: Family, settings: TrainingSettings, count: int) -> None:
        if count:
            raise ModelError(
                "the data has source images, which a ControlNet does not read; set data.init_args.source_data_dir: null"
                " and give its conditions by data.init_args.conditioning_data_dir, or train a DiffusionLoRA"
            )
        super().check_sources(family, settings, count)

    def check(self, settings: TrainingSettings, family: Family | None) -> None:
        if self.rank is not None and self.rank < 1:
            raise ModelError(
                f"model.init_args.rank must be at least 1, got {self.rank}; 16 to 64 is usual, and null trains the full"
                " ControlNet"
            )
        if family is None:
            return
        for name in OF_U_NETS if family.is_flow else OF_TRANSFORMERS:
            if getattr(self, name) is not None:
                others = "U-Nets" if family.is_flow else "transformers"
                raise ModelError(
                    f"model.init_args.{name}: {getattr(self, name)} is for ControlNets of {others}, and this is"
                    f" {family.title}; remove it"
                )

    def denoiser_dtype(self, family: Family, frozen: torch.dtype) -> torch.dtype:
        # A U-Net's copy starts from every bit. A transformer is too large to be loaded in float32 for its copy.
        return frozen if family.is_flow else torch.float32

    def text_encoder_dtype(self, family: Family, frozen: torch.dtype) -> torch.dtype:
        return frozen

    def prepare(self, components: Components, settings: TrainingSettings, frozen: torch.dtype) -> dict[str, nn.Module]:
        family, source, revision = components.family, self.controlnet_model_name_or_path, settings.revision
        if isinstance(family, TransformerFamily):
            counts = {"num_layers": self.num_layers, "num_single_layers": self.num_single_layers}
            self.network = transformer.make_controlnet(components, source, revision, **counts)
            transformer.train_all(self.network, family)
        else:
            self.network = unet.make_controlnet(components, source, revision)
            if self.rank is None:
                self.network.requires_grad_(True)
            else:
                add_lora(self.network, self.rank)
            components.denoiser.to(frozen)
        if settings.gradient_checkpointing:
            self.network.enable_gradient_checkpointing()
        if self.protect_edges:
            assert family.control is not None
            self.protected = tuple(f"controlnet.{name}" for name in family.control.edge_path(self.network))
        return {"controlnet": self.network}

    def predict(
        self,
        encoders: FrozenEncoders,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: dict[str, Tensor],
        batch: dict[str, Any],
        guidance: float,
        *,
        is_training: bool,
    ) -> Tensor:
        components = encoders.components
        family, control = components.family, components.family.control
        assert control is not None
        family.check_size(components.denoiser, components.vae, *noisy_BCHW.shape[-2:])
        if isinstance(control, TransformerControl):
            hint = self.condition_latents(encoders, batch, is_training=is_training)
            control.lend(self.network, components.denoiser)
        else:
            hint = self.conditioning(batch, encoders.device)
        residuals = control.residuals(
            components, self.network, noisy_BCHW, timesteps_B, condition, hint, batch, guidance
        )
        dtype = weights_dtype(components.denoiser)
        residuals = tree_map_only(Tensor, lambda each: each.to(dtype), residuals)
        return family.predict(components, noisy_BCHW, timesteps_B, condition, batch, guidance, residuals)

    # Conditions ------------------------------------------------------------------------------------------------------

    def conditioning(self, batch: Mapping[str, Any], device: torch.device) -> Tensor:
        """The batch's conditions as the ControlNet reads them, float32 [B, C, S, S] on `device`.

        Raises: ModelError if the batch has neither conditions nor images to make them from.
        """
        conditions = batch.get("conditioning")
        if conditions is None and self.maker is not None and "pixel_values" in batch:
            conditions = self.make_conditions(batch["pixel_values"].to(device))
        if conditions is None:
            raise ModelError(
                f"model.init_args.conditions: {self.conditions}, and the batch has no conditions; set"
                " data.init_args.conditioning_data_dir, or conditions: canny"
            )
        channels = getattr(self.network.config, "conditioning_channels", transformer.CHANNELS)
        return from_bytes(conditions.to(device), int(channels), batch.get("names", ()))

    def make_conditions(self, pixels_B3SS: Tensor) -> Tensor | None:
        """Conditions of pixels in -1..1, uint8 [B, 1, 3 or 4, S, S]; None where they are files."""
        if self.maker is None:
            return None
        with torch.no_grad():
            made = self.maker((pixels_B3SS.float() / 2 + 0.5).clamp(0, 1))
        return to_bytes(made, pixels_B3SS.shape, self.conditions)

    def condition_latents(self, encoders: FrozenEncoders, batch: Mapping[str, Any], *, is_training: bool) -> Tensor:
        """The batch's conditions as latents [B, C, H, W]; the mean of their distribution outside training."""
        moments = batch[MOMENTS] if MOMENTS in batch else self.condition_moments(encoders, batch)
        draw = torch.randn_like if is_training else torch.zeros_like
        control: Any = encoders.family.control
        latents_BCHW: Tensor = control.condition_latents(encoders.components, self.network, moments, draw)
        return latents_BCHW

    def condition_moments(self, encoders: FrozenEncoders, batch: Mapping[str, Any]) -> Tensor:
        """Mean and log-variance of the conditions' latents, float32 [B, 2C, H, W]."""
        return encoders.encode_pixels(to_pixels(self.conditioning(batch, encoders.device)))


class DiffusionControlNet(DiffusionTraining):
    """Trains a ControlNet next to a frozen diffusion model, and saves a diffusers folder and a single file.

    The family is read from the pipeline: Stable Diffusion 1.x, 2.x and SDXL, Stable Diffusion 3 and 3.5, FLUX.1,
    Z-Image and Qwen-Image (docs/controlnet.md).

    Args:
        pretrained_model_name_or_path: A diffusers pipeline folder, a hub id, a single `.safetensors` checkpoint of
            Stable Diffusion 1.x, 2.x or SDXL, `embedded:sd` or `embedded:sd3`, the tiny models in the package.
        controlnet_model_name_or_path: A ControlNet to continue from, a folder or hub id; unset starts with a copy of
            the denoiser's layers.
        rank: U-Nets: rank of a LoRA on the copied encoder, which then stays frozen: for small data. The hint embedding,
            the first and the zero convolutions are trained in full. The result is merged, and a small file for ComfyUI
            is written next to it. Unset trains the full ControlNet.
        num_layers: Transformers: blocks of a new ControlNet, copies of the transformer's first ones (for FLUX.1 the
            two-stream ones, for Z-Image at equal distances); unset is the value of diffusers' script: 12 for Stable
            Diffusion 3, 4 for FLUX.1, 5 for Qwen-Image; 6 for Z-Image, which has no script.
        num_single_layers: FLUX.1's single-stream blocks; unset is 4, and 0 is none.
        conditions: canny, lineart, tile, inpaint, which are computed from the images; folder, for files in
            `data.init_args.conditioning_data_dir`; or a class path that makes conditions from images.
        canny_thresholds: Lower and upper threshold of canny.
        protect_edges: Keep the gradients of the modules that read the condition, and of those that write the residuals,
            dense and in full precision under every lossy option: input_grad_density, attention_grad_density, float16
            products in backward, npu_sparse and a quantized base.
        optimizer_in_backward: Step each weight as soon as its gradient is complete and free the gradient.
        save_dtype: Dtype of the saved files: float32, float16 or bfloat16; unset keeps the weights' own.
        save_every_n_steps: Optimizer steps between saved models on the way; 0 saves the last only.
        kwargs: Arguments of `DiffusionTraining`.

    Example:
        >>> module = DiffusionControlNet("embedded:sd", conditions="canny", max_train_steps=10)
        >>> module.loaded().family.title, type(module.controlnet).__name__
        ('SD 1.5', 'ControlNetModel')
    """

    method: ControlNet
    saved_kind = "controlnet"

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        controlnet_model_name_or_path: str | None = None,
        rank: int | None = None,
        num_layers: int | None = None,
        num_single_layers: int | None = None,
        conditions: str = "canny",
        canny_thresholds: Sequence[float] = (0.1, 0.2),
        protect_edges: bool = True,
        optimizer_in_backward: bool = False,
        save_dtype: SaveDtype | None = None,
        save_every_n_steps: int = 0,
        **kwargs: Any,
    ) -> None:
        method = ControlNet(
            controlnet_model_name_or_path=controlnet_model_name_or_path,
            rank=rank,
            num_layers=num_layers,
            num_single_layers=num_single_layers,
            conditions=conditions,
            canny_thresholds=canny_thresholds,
            protect_edges=protect_edges,
            optimizer_in_backward=optimizer_in_backward,
            save_dtype=save_dtype,
            save_every_n_steps=save_every_n_steps,
        )
        super().__init__(method, pretrained_model_name_or_path=pretrained_model_name_or_path, **kwargs)
        self.controlnet: Any = None
        self.protected_gradients: Sequence[str] = ()
        """protocols.ProtectsGradients: the one list that every lossy path reads."""
        self._shown: Tensor | None = None

    def configure_model(self) -> None:
        if self.components is not None:
            return
        super().configure_model()
        self.protected_gradients = self.method.protected
        if self.protected_gradients:
            rank_zero_info(
                f"protect_edges: {', '.join(self.protected_gradients)} stay dense and in full precision in"
                " input_grad_density, attention_grad_density, float16 backward, npu_sparse and base_quantization"
            )

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage != "fit":
            return
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        conditions, has_files = self.method.conditions, getattr(data, "has_condition_files", None)
        if getattr(data, "has_images", True) is False:
            raise ModelError(
                f"{type(self).__name__} makes or reads a condition for each image, and the shards of"
                f" {type(data).__name__} hold latents only; train with ImageCaptionData"
            )
        if has_files and conditions != FOLDER:
            raise ModelError(
                f"the data has condition files and model.init_args.conditions is {conditions}; set"
                " conditions: folder, or data.init_args.conditioning_data_dir: null"
            )
        if has_files is False and conditions == FOLDER:
            raise ModelError(
                "model.init_args.conditions: folder needs data.init_args.conditioning_data_dir, or conditioning_image"
                " in metadata.jsonl"
            )

    # Conditions ------------------------------------------------------------------------------------------------------

    def encoder_identity(self) -> dict[str, str]:
        method = self.method
        made = {"condition": f"{method.conditions} {list(method.canny_thresholds)}"} if method.maker else {}
        return super().encoder_identity() | made

    def make_conditions(self, pixels_B3SS: Tensor) -> Tensor | None:
        """Conditions of pixels in -1..1, uint8 [B, 1, 3 or 4, S, S]; None where they are files."""
        return self.method.make_conditions(pixels_B3SS)

    def conditioning(self, batch: dict[str, Any]) -> Tensor:
        """The batch's conditions as the ControlNet reads them, float32 [B, C, S, S] on the module's device."""
        self.loaded()
        return self.method.conditioning(batch, self.device)

    @torch.no_grad()
    def round_trip(self, pixels_B3SS: Tensor) -> Tensor:
        """Pixels in -1..1 after a round trip through the autoencoder, float32 [B, 3, S, S] in 0..1 on the CPU."""
        return self.encoders.round_trip(pixels_B3SS)

    # Control check ---------------------------------------------------------------------------------------------------

    def validation_losses(self, batch: dict[str, Any], noise: SeededNoise) -> Tensor:
        if self.loaded().family.is_flow:  # encoded once for all timesteps
            batch = batch | {MOMENTS: self.method.condition_moments(self.encoders, batch)}
        return super().validation_losses(batch, noise)

    def control_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with latents, embeddings and conditions, for `control_losses`."""
        self.loaded()
        conditions = batch.get("conditioning")
        made = self.make_conditions(batch["pixel_values"].to(self.device)) if conditions is None else conditions
        encoded = {"latent_moments": self.encode_pixels(batch["pixel_values"]), "conditioning": made}
        return batch | encoded | self.encode_captions(batch["captions"])

    @torch.no_grad()
    def control_losses(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The losses [B] with the right condition and with the next image's, at equal noise and timesteps."""
        noise, encoders = SeededNoise(example_seeds(batch)), self.encoders
        latents_BCHW = encoders.latents(batch, noise.normal_like)
        noisy_BCHW, timesteps_B, target_BCHW = self.noised(latents_BCHW, noise, 0, 1)
        condition = encoders.condition(batch, with_gradients=False)
        losses = []
        with self.half_precision():
            for conditions in (batch["conditioning"], batch["conditioning"].roll(1, 0)):
                shown = batch | {"conditioning": conditions}
                losses.append(example_losses(self.predict(noisy_BCHW, timesteps_B, condition, shown), target_BCHW))
        return losses[0], losses[1]

    # Samples and files -----------------------------------------------------------------------------------------------

    def sample(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        batch_size: int | None = None,
        control: Control | None = None,
        sources: Sequence[Sequence[Image]] | None = None,
        conditions: Tensor | None = None,
    ) -> Tensor:
        """Generate one image per prompt, float32 [N, 3, S, S] in 0..1 on the CPU, as `DiffusionTraining.sample` does.

        Args:
            conditions: [N, C, S, S] in 0..1; unset takes those of held-out images, one for each prompt and seed.
        """
        self.loaded()
        if control is None:
            if conditions is None:
                known = self._held_out_conditions()
                rows = [
                    (self._number(prompt) + seed) % len(known) for prompt, seed in zip(prompts, seeds, strict=False)
                ]
                conditions = known[torch.tensor(rows)]
            control = Control(self.controlnet, conditions)
        return super().sample(prompts, seeds, num_inference_steps, guidance_scale, batch_size, control)

    def _number(self, prompt: str) -> int:
        return self.validation_prompts.index(prompt) if prompt in self.validation_prompts else 0

    def _held_out_conditions(self) -> Tensor:
        if self._shown is None:
            data: Any = self._trainer.datamodule if self._trainer is not None else None  # type: ignore[attr-defined]
            if not isinstance(data, HasHeldOutBatches):
                raise ModelError(
                    "sampling from a ControlNet needs condition images; pass `conditions` [N, C, H, W] in 0..1"
                )
            batch = next(iter(data.held_out_loader(SHOWN_CONDITIONS)))
            self._shown = self.conditioning(batch).cpu()
        return self._shown

    def save_model(self, path: str | Path) -> list[Path]:
        """Write a diffusers folder and, next to it, `path`, a single file; averaged weights if any.

        The file of a U-Net's ControlNet is for ComfyUI. A LoRA is merged in both; if it started from the U-Net, it is
        also saved as `<name>_lora.safetensors`, with the fully trained modules.

        Returns: the folder and the files.
        """
        path, folder, method = Path(path), Path(path).with_suffix(""), self.method
        dtype, written = method.saved_dtype, [folder, path]
        is_flow = self.loaded().family.is_flow
        with self.averaged_weights():
            if is_flow:
                transformer.save_controlnet(folder, path, self.controlnet, dtype)
                return written
            unet.save_controlnet(folder, path, merged_controlnet(self.controlnet), dtype)
            if method.rank is not None and method.controlnet_model_name_or_path is None:
                written.append(path.with_name(f"{path.stem}_lora.safetensors"))
                save_control_lora(written[-1], self.controlnet, dtype)
        return written


class ControlNetTraining(DiffusionControlNet):
    """`DiffusionControlNet` under its earlier name for U-Nets."""
