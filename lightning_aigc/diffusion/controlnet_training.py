"""ControlNetTraining: a LightningModule that trains a ControlNet of Stable Diffusion 1.x, 2.x or SDXL.

Legend: B batch, C channels, H and W pixels or latent pixels, T tokens, D width, N pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import ControlNetModel
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_aigc.devices import weights_dtype
from lightning_aigc.diffusion.arguments import check_controlnet
from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.conditions import FOLDER, find_maker, from_bytes, to_bytes
from lightning_aigc.diffusion.controlnet_lora import add_lora, merged_controlnet, save_control_lora
from lightning_aigc.diffusion.controlnet_model import EDGE_PATH, make_controlnet, save_controlnet
from lightning_aigc.diffusion.edge_reward import edge_losses, predict_latents
from lightning_aigc.diffusion.evaluation import SeededNoise, example_seeds
from lightning_aigc.diffusion.objectives import example_losses
from lightning_aigc.diffusion.sampling import Control
from lightning_aigc.diffusion.unet_training import UNetTraining
from lightning_aigc.diffusion.whole_model_training import WholeModelTraining
from lightning_aigc.errors import ModelError
from lightning_aigc.protocols import HasHeldOutBatches

SHOWN_CONDITIONS = 16
"""Held-out pictures whose conditions the sample pictures follow."""


class ControlNetTraining(WholeModelTraining, UNetTraining):
    """Trains a ControlNet beside a frozen U-Net, and saves a diffusers folder and a single file for ComfyUI.

    Args:
        pretrained_model_name_or_path: A diffusers pipeline folder, a hub id, a single `.safetensors` checkpoint, or
            `embedded:sd`, the tiny model that comes with the package.
        controlnet_model_name_or_path: A ControlNet to go on from, a folder or hub id; unset copies the U-Net's encoder.
        rank: Rank of a LoRA on the copied encoder, which then stays frozen: for small data. The hint embedding, the
            first and the zero convolutions are trained whole. The result is merged; beside it lies a small file for
            ComfyUI. Unset trains the whole ControlNet.
        conditions: canny, lineart, tile, inpaint, which are computed from the pictures; folder, for files in
            `data.init_args.conditioning_data_dir`; or a class path that makes conditions of pictures.
        canny_thresholds: Lower and upper threshold of canny.
        protect_edges: Keep the gradients of the modules that read the condition, and of those that write the residuals,
            dense and in full precision under every lossy option: input_grad_density, attention_grad_density, float16
            products in backward, npu_sparse and a quantized base.
        reward_weight: Weight of a loss between the edges of the picture that is predicted in one step and the training
            picture's, decoded with gradients (ControlNet++); 0 turns it off.
        reward_max_timestep: Timestep up to which the reward counts; above it one step predicts a blur.
        reward_start_step: Optimizer step at which the reward begins, after control has appeared.
        kwargs: Arguments of `WholeModelTraining`, `UNetTraining` and `DiffusionModule`.
    """

    saved_kind = "controlnet"
    same_weights_advice = "use the pretrained_model_name_or_path and rank that it was trained with"

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        controlnet_model_name_or_path: str | None = None,
        rank: int | None = None,
        conditions: str = "canny",
        canny_thresholds: Sequence[float] = (0.1, 0.2),
        protect_edges: bool = True,
        reward_weight: float = 0.0,
        reward_max_timestep: int = 200,
        reward_start_step: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(pretrained_model_name_or_path=pretrained_model_name_or_path, **kwargs)
        self.controlnet: ControlNetModel | None = None
        self.protected_gradients: Sequence[str] = EDGE_PATH if protect_edges else ()
        """protocols.ProtectsGradients: the one list that every lossy path reads."""
        check_controlnet(self.args)
        self.make = find_maker(conditions, canny_thresholds)
        self._shown: Tensor | None = None

    def adapt(self, parts: Components) -> None:
        super().adapt(parts)
        self.controlnet = make_controlnet(parts, self.args.controlnet_model_name_or_path, self.args.revision)
        if self.args.rank is None:
            self.controlnet.requires_grad_(True)
        else:
            add_lora(self.controlnet, self.args.rank)
        if self.args.gradient_checkpointing:
            self.controlnet.enable_gradient_checkpointing()
        for frozen in (parts.denoiser, *parts.text_encoders):
            if frozen.dtype != self.frozen_dtype():
                frozen.to(self.frozen_dtype())

    # Conditions ------------------------------------------------------------------------------------------------------

    def encoder_identity(self) -> dict[str, str]:
        args = self.args
        made = {} if self.make is None else {"condition": f"{args.conditions} {list(args.canny_thresholds)}"}
        return super().encoder_identity() | made

    def make_conditions(self, pixels_B3HW: Tensor) -> Tensor | None:
        """Conditions of pixels in -1..1, uint8 [B, 1, 3 or 4, H, W]; None where they are files."""
        if self.make is None:
            return None
        with torch.no_grad():
            made = self.make((pixels_B3HW.float() / 2 + 0.5).clamp(0, 1))
        return to_bytes(made, pixels_B3HW.shape, str(self.args.conditions))

    def conditioning(self, batch: dict[str, Any]) -> Tensor:
        """The batch's conditions as the ControlNet takes them, float32 [B, C, H, W] on the module's device.

        Raises: ModelError if the batch has neither conditions nor pictures to make them of.
        """
        conditions = batch.get("conditioning")
        if conditions is None and self.make is not None and "pixel_values" in batch:
            conditions = self.make_conditions(batch["pixel_values"].to(self.device))
        if conditions is None:
            raise ModelError(
                f"model.init_args.conditions: {self.args.conditions}, and the batch has no conditions; set"
                " data.init_args.conditioning_data_dir, or conditions: canny"
            )
        assert self.controlnet is not None
        channels = int(self.controlnet.config.conditioning_channels)
        return from_bytes(conditions.to(self.device), channels, batch.get("names", ()))

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage != "fit":
            return
        has_files = getattr(self.trainer.datamodule, "has_condition_files", None)  # type: ignore[attr-defined]
        if has_files and self.args.conditions != FOLDER:
            raise ModelError(
                f"the data has condition files and model.init_args.conditions is {self.args.conditions}; set"
                " conditions: folder, or data.init_args.conditioning_data_dir: null"
            )
        if has_files is False and self.args.conditions == FOLDER:
            raise ModelError(
                "model.init_args.conditions: folder needs data.init_args.conditioning_data_dir, or conditioning_image"
                " in metadata.jsonl"
            )
        if self.protected_gradients:
            rank_zero_info(
                f"protect_edges: {', '.join(self.protected_gradients)} stay dense and in full precision in"
                " input_grad_density, attention_grad_density, float16 backward, npu_sparse and base_quantization"
            )

    # Loss ------------------------------------------------------------------------------------------------------------

    def residuals(
        self,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        embeddings_BTD: Tensor,
        added: dict[str, Tensor] | None,
        batch: dict[str, Any],
    ) -> dict[str, Any]:
        """The ControlNet's residuals, in the U-Net's dtype."""
        assert self.controlnet is not None and self.unet is not None
        dtype, unet_dtype = weights_dtype(self.controlnet), weights_dtype(self.unet)
        down, middle = self.controlnet(
            noisy_BCHW.to(dtype),
            timesteps_B,
            embeddings_BTD.to(dtype),
            controlnet_cond=self.conditioning(batch).to(dtype),
            added_cond_kwargs=None if added is None else {name: value.to(dtype) for name, value in added.items()},
            return_dict=False,
        )
        return {
            "down_block_additional_residuals": [each.to(unet_dtype) for each in down],
            "mid_block_additional_residual": middle.to(unet_dtype),
        }

    def rewarded(
        self, loss_B: Tensor, latents_BCHW: Tensor, noisy_BCHW: Tensor, predicted_BCHW: Tensor, timesteps_B: Tensor
    ) -> Tensor:
        args = self.args
        if not args.reward_weight or (self._trainer is not None and self.global_step < args.reward_start_step):
            return loss_B
        assert self.schedule is not None
        drawn_BCHW = predict_latents(self.schedule, noisy_BCHW, predicted_BCHW, timesteps_B)
        vae = self.loaded().vae.to(self.device)
        edges_B = edge_losses(vae, latents_BCHW, drawn_BCHW, timesteps_B, args.reward_max_timestep)
        return loss_B + float(args.reward_weight) * edges_B

    def control_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with latents, embeddings and conditions, for `control_losses`."""
        self.loaded()
        conditions = batch.get("conditioning")
        made = self.make_conditions(batch["pixel_values"].to(self.device)) if conditions is None else conditions
        encoded = {"latent_moments": self.encode_pixels(batch["pixel_values"]), "conditioning": made}
        return batch | encoded | self.encode_captions(batch["captions"])

    @torch.no_grad()
    def control_losses(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The losses [B] with the right condition and with the next picture's, at equal noise and timesteps."""
        noise, encoders = SeededNoise(example_seeds(batch)), self.encoders
        latents_BCHW = encoders.latents(batch, noise.normal_like)
        noisy_BCHW, timesteps_B, target_BCHW = self.noised(latents_BCHW, noise, 0, 1)
        condition = encoders.condition(batch, with_gradients=False)
        losses = []
        for conditions in (batch["conditioning"], batch["conditioning"].roll(1, 0)):
            shown = batch | {"conditioning": conditions}
            losses.append(example_losses(self.predict(noisy_BCHW, timesteps_B, condition, shown), target_BCHW))
        return losses[0], losses[1]

    # Pictures and files ----------------------------------------------------------------------------------------------

    def sample(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        batch_size: int | None = None,
        control: Control | None = None,
        conditions: Tensor | None = None,
    ) -> Tensor:
        """Generate one picture per prompt, float32 [N, 3, H, W] in 0..1 on the CPU, as `UNetTraining.sample` does.

        `conditions` [N, C, H, W] in 0..1; unset takes those of held-out pictures, one for each prompt and seed.
        """
        self.loaded()
        assert self.controlnet is not None
        if control is None:
            if conditions is None:
                known = self._held_out_conditions()
                rows = [
                    (self._number(prompt) + seed) % len(known) for prompt, seed in zip(prompts, seeds, strict=False)
                ]
                conditions = known[torch.tensor(rows)]
            control = Control(self.controlnet, conditions)
        return super().sample(prompts, seeds, num_inference_steps, guidance_scale, batch_size, control)

    @torch.no_grad()
    def round_trip(self, pixels_B3HW: Tensor) -> Tensor:
        """Pixels in -1..1 as the autoencoder gives them back, float32 [B, 3, H, W] in 0..1 on the CPU."""
        return self.encoders.round_trip(pixels_B3HW)

    def save_model(self, path: str | Path) -> list[Path]:
        """Write `path`, a single file for ComfyUI, and beside it a diffusers folder; averaged weights if any.

        A LoRA is merged in both; `<name>_lora.safetensors` holds it with the parts trained whole, if it began from the
        U-Net.
        """
        path, folder = Path(path), Path(path).with_suffix("")
        self.loaded()
        assert self.controlnet is not None
        written = [folder, path]
        with self.averaged_weights():
            save_controlnet(folder, path, merged_controlnet(self.controlnet), self.save_dtype)
            if self.args.rank is not None and self.args.controlnet_model_name_or_path is None:
                written.append(path.with_name(f"{path.stem}_lora.safetensors"))
                save_control_lora(written[-1], self.controlnet, self.save_dtype)
        return written

    def _number(self, prompt: str) -> int:
        return self.validation_prompts.index(prompt) if prompt in self.validation_prompts else 0

    def _held_out_conditions(self) -> Tensor:
        if self._shown is None:
            data: Any = self._trainer.datamodule if self._trainer is not None else None  # type: ignore[attr-defined]
            if not isinstance(data, HasHeldOutBatches):
                raise ModelError(
                    "a ControlNet draws what it is shown; give `sample` the conditions, [N, 3, H, W] in 0..1"
                )
            batch = next(iter(data.held_out_loader(SHOWN_CONDITIONS)))
            self._shown = self.conditioning(batch).cpu()
        return self._shown
