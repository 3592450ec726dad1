"""DiffusionLoRA: a LightningModule that fine-tunes a diffusion transformer with a LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from peft import LoraConfig

from lightning_aigc.diffusion.arguments import check_rank
from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.lora_file import LoRAMetadata, save_lora
from lightning_aigc.diffusion.saved_schedule import scheduler_json
from lightning_aigc.diffusion.transformer_training import TransformerTraining

TransformerLoRATarget = Literal["attention", "feed_forward"]


class DiffusionLoRA(TransformerTraining):
    """Fine-tunes a diffusion transformer on a set of pictures by training a LoRA through peft.

    The family is read from the pipeline's `model_index.json`: Stable Diffusion 3 and 3.5, FLUX.1, FLUX.2 klein, Z-Image
    and Qwen-Image (docs/diffusion_transformers.md). `StableDiffusionLoRA` is the same for U-Nets.

    Args:
        pretrained_model_name_or_path: A diffusers pipeline folder or a hub id.
        rank: Rank of the LoRA matrices; 4 to 64 is usual.
        lora_alpha: Scale of the LoRA's output is `lora_alpha / rank`; unset means equal to the rank.
        lora_dropout: Share of a LoRA layer's inputs that are dropped while training.
        lora_targets: Which of the transformer's layers to adapt: attention, feed_forward.
        use_rslora: Scale by `alpha / sqrt(rank)`, steadier at high ranks (rsLoRA).
        kwargs: Arguments of `TransformerTraining`, `DenoiserTraining` and `DiffusionModule`.
    """

    same_weights_advice = "use the rank and lora_targets that it was trained with"

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        rank: int = 16,
        lora_alpha: float | None = None,
        lora_dropout: float = 0.0,
        lora_targets: Sequence[TransformerLoRATarget] = ("attention",),
        use_rslora: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(pretrained_model_name_or_path=pretrained_model_name_or_path, **kwargs)
        check_rank(self.args)

    @property
    def lora_alpha(self) -> float:
        alpha = self.args.lora_alpha
        return float(self.args.rank if alpha is None else alpha)

    def adapt(self, parts: Components) -> None:
        super().adapt(parts)
        parts.denoiser.add_adapter(self._lora_config(parts))

    def _lora_config(self, parts: Components) -> LoraConfig:
        args, family = self.args, TRANSFORMERS[parts.family]
        adapted = family.adapted_layers(parts.denoiser, args.lora_targets)
        return LoraConfig(
            r=args.rank,
            lora_alpha=self.lora_alpha,
            target_modules=adapted,
            lora_dropout=args.lora_dropout,
            use_rslora=args.use_rslora,
            init_lora_weights="gaussian",
        )

    def save_lora(self, path: Any, **metadata: Any) -> None:
        """Write the LoRA as a `.safetensors` in diffusers' layout; averaged weights if any.

        Beside it stands `.comfyui.safetensors`, under the model's own names, where these differ from diffusers'.
        """
        args, parts = self.args, self.loaded()
        facts = {
            "base_model": parts.family,
            "base_model_name": args.pretrained_model_name_or_path,
            "base_model_hash": self.base_model_hash(),
            "prediction_type": None,
            "scheduler": scheduler_json(parts.family, self.sampling_config()),
            "learning_rate": args.learning_rate,
            "noise_offset": args.noise_offset,
        }
        described = LoRAMetadata(**(facts | metadata))
        with self.averaged_weights():
            save_lora(path, transformer=parts.denoiser, metadata=described, layout="diffusers")
            if TRANSFORMERS[parts.family].original_layers:
                own = Path(path).with_suffix(".comfyui.safetensors")
                save_lora(own, transformer=parts.denoiser, metadata=described, layout="kohya")
