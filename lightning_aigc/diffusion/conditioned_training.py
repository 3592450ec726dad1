"""ConditionedTraining: what every ControlNet's training has: conditions, how they are shown, and whether they control.

Legend: B batch, C channels, H and W pixels or latent pixels, N pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_aigc.diffusion.conditions import FOLDER, find_maker, from_bytes, to_bytes
from lightning_aigc.diffusion.evaluation import SeededNoise, example_seeds
from lightning_aigc.diffusion.half_precision import computed_in_half
from lightning_aigc.diffusion.objectives import example_losses
from lightning_aigc.diffusion.sampling import Control
from lightning_aigc.diffusion.whole_model_training import WholeModelTraining
from lightning_aigc.errors import ModelError
from lightning_aigc.protocols import HasHeldOutBatches

SHOWN_CONDITIONS = 16
"""Held-out pictures whose conditions the sample pictures follow."""


class ConditionedTraining(WholeModelTraining):
    """Base class of the ControlNets' trainings; stands before `UNetTraining` or `TransformerTraining`.

    A family says `condition_channels`, and which modules `protect_edges` covers.

    Args:
        controlnet_model_name_or_path: A ControlNet to go on from, a folder or hub id; unset begins with a copy of the
            denoiser's layers.
        conditions: canny, lineart, tile, inpaint, which are computed from the pictures; folder, for files in
            `data.init_args.conditioning_data_dir`; or a class path that makes conditions of pictures.
        canny_thresholds: Lower and upper threshold of canny.
        protect_edges: Keep the gradients of the modules that read the condition, and of those that write the residuals,
            dense and in full precision under every lossy option: input_grad_density, attention_grad_density, float16
            products in backward, npu_sparse and a quantized base.
        kwargs: Arguments of `WholeModelTraining` and the base that follows.
    """

    saved_kind = "controlnet"

    def __init__(
        self,
        controlnet_model_name_or_path: str | None = None,
        conditions: str = "canny",
        canny_thresholds: Sequence[float] = (0.1, 0.2),
        protect_edges: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.controlnet: Any = None
        self.protected_gradients: Sequence[str] = ()
        """protocols.ProtectsGradients: the one list that every lossy path reads."""
        self.make = find_maker(conditions, canny_thresholds)
        self._shown: Tensor | None = None

    def condition_channels(self) -> int:
        """Channels of a condition as the ControlNet takes it."""
        raise NotImplementedError

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
        return from_bytes(conditions.to(self.device), self.condition_channels(), batch.get("names", ()))

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage != "fit":
            return
        if getattr(self.trainer.datamodule, "has_images", True) is False:  # type: ignore[attr-defined]
            raise ModelError(
                f"{type(self).__name__} makes or reads a condition for each image, and the shards of"
                f" {type(self.trainer.datamodule).__name__} hold latents alone; train with ImageCaptionData"  # type: ignore[attr-defined]
            )
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

    # Whether they control -------------------------------------------------------------------------------------------

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
        with computed_in_half(self):
            for conditions in (batch["conditioning"], batch["conditioning"].roll(1, 0)):
                shown = batch | {"conditioning": conditions}
                losses.append(example_losses(self.predict(noisy_BCHW, timesteps_B, condition, shown), target_BCHW))
        return losses[0], losses[1]

    # Pictures --------------------------------------------------------------------------------------------------------

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
        """Generate one picture per prompt, float32 [N, 3, H, W] in 0..1 on the CPU, as `DenoiserTraining.sample` does.

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
