"""TwoStreamFamily: families whose transformers, and ControlNets, begin with text and picture in two streams.

Such a ControlNet takes the transformer's own arguments and the condition's tokens, and gives a list for each kind of
block.

Legend: B batch, C channels, H and W latent height and width, N picture tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from lightning_aigc.devices import weights_dtype
from lightning_aigc.diffusion.families.controlled_family import ControlledFamily


class TwoStreamFamily(ControlledFamily):
    """One family of diffusion transformers with blocks of two streams."""

    new_control: ClassVar[Mapping[str, Any]] = {}
    """What the config of a new ControlNet says that the transformer's does not."""
    control_path: ClassVar[tuple[str, ...]]
    """The ControlNet's modules that read the condition and those that write what is added to the transformer."""
    last_text: ClassVar[tuple[str, ...]] = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "ff_context")
    """Layers of a block of two streams that only the text of the next block reads: what text asks, and what it gets."""

    @abstractmethod
    def inputs(
        self,
        network: nn.Module,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        guidance: float,
    ) -> dict[str, Any]:
        """The arguments that the transformer and its ControlNet both take."""

    def tokens(self, latents_BCHW: Tensor) -> Tensor:
        """Latents as the transformer reads them."""
        return latents_BCHW

    def latents_of(self, answer: Tensor, height: int, width: int) -> Tensor:
        """Latents [B, C, H, W] of the transformer's answer; H and W are given."""
        return answer

    def predict(
        self,
        denoiser: nn.Module,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        guidance: float = 1.0,
        residuals: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """The velocity, as `TransformerFamily.predict`; `residuals` are those of a ControlNet."""
        given = self.inputs(denoiser, noisy_BCHW, timesteps_B, condition, guidance)
        answer: Tensor = denoiser(**given, **(residuals or {}), return_dict=False)[0]
        return self.latents_of(answer, *noisy_BCHW.shape[-2:])

    def residuals(
        self,
        controlnet: nn.Module,
        noisy_BCHW: Tensor,
        timesteps_B: Tensor,
        condition: Mapping[str, Tensor],
        shown_BCHW: Tensor,
        guidance: float = 1.0,
    ) -> dict[str, Any]:
        """What a ControlNet that is shown these latents adds, as the transformer's arguments."""
        given = self.inputs(controlnet, noisy_BCHW, timesteps_B, condition, guidance)
        shown = self.tokens(shown_BCHW).to(weights_dtype(controlnet))
        return dict(controlnet(**given, controlnet_cond=shown, return_dict=True))

    def unread_layers(self, network: Any) -> tuple[str, ...]:
        if getattr(network.config, "num_single_layers", 0):
            return ()  # blocks of one stream follow, and read the text
        last = int(network.config.num_layers) - 1
        return tuple(f"transformer_blocks.{last}.{name}" for name in self.last_text)

    def edge_path(self, controlnet: nn.Module) -> tuple[str, ...]:
        return self.control_path

    # A new ControlNet -----------------------------------------------------------------------------------------------

    def control_config(self, transformer: Any, counts: Mapping[str, int]) -> dict[str, Any]:
        return {**self.new_control, **counts}

    def control_counts(self, blocks: int) -> list[int]:
        """How many blocks a ControlNet may have, so that a transformer of so many reads each of them."""
        return [count for count in range(1, blocks + 1) if (blocks - 1) // -(-blocks // count) == count - 1]
