"""ControlNetTraining: a LightningModule that trains a ControlNet of Stable Diffusion 1.x, 2.x or SDXL.

Legend: B batch, C channels, H and W latent height and width, T tokens, D width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import ControlNetModel
from torch import Tensor

from lightning_aigc.devices import weights_dtype
from lightning_aigc.diffusion.arguments import check_controlnet
from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.conditioned_training import ConditionedTraining
from lightning_aigc.diffusion.controlnet_lora import add_lora, merged_controlnet, save_control_lora
from lightning_aigc.diffusion.controlnet_model import EDGE_PATH, make_controlnet, save_controlnet
from lightning_aigc.diffusion.edge_reward import edge_losses, predict_latents
from lightning_aigc.diffusion.unet_training import UNetTraining


class ControlNetTraining(ConditionedTraining, UNetTraining):
    """Trains a ControlNet beside a frozen U-Net, and saves a diffusers folder and a single file for ComfyUI.

    Args:
        pretrained_model_name_or_path: A diffusers pipeline folder, a hub id, a single `.safetensors` checkpoint, or
            `embedded:sd`, the tiny model that comes with the package.
        rank: Rank of a LoRA on the copied encoder, which then stays frozen: for small data. The hint embedding, the
            first and the zero convolutions are trained whole. The result is merged; beside it lies a small file for
            ComfyUI. Unset trains the whole ControlNet.
        reward_weight: Weight of a loss between the edges of the picture that is predicted in one step and the training
            picture's, decoded with gradients (ControlNet++); 0 turns it off.
        reward_max_timestep: Timestep up to which the reward counts; above it one step predicts a blur.
        reward_start_step: Optimizer step at which the reward begins, after control has appeared.
        kwargs: Arguments of `ConditionedTraining`, `WholeModelTraining`, `UNetTraining` and `DiffusionModule`.
    """

    others = "DiffusionControlNet trains one of Stable Diffusion 3, FLUX.1 and Qwen-Image"
    same_weights_advice = "use the pretrained_model_name_or_path and rank that it was trained with"

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        rank: int | None = None,
        reward_weight: float = 0.0,
        reward_max_timestep: int = 200,
        reward_start_step: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(pretrained_model_name_or_path=pretrained_model_name_or_path, **kwargs)
        self.controlnet: ControlNetModel | None = None
        self.protected_gradients = EDGE_PATH if self.args.protect_edges else ()
        check_controlnet(self.args)

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

    def condition_channels(self) -> int:
        assert self.controlnet is not None
        return int(self.controlnet.config.conditioning_channels)

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

    # Files -----------------------------------------------------------------------------------------------------------

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
