"""DiffusionLoRA: a LightningModule that fine-tunes a diffusion transformer with a LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from peft import LoraConfig

from lightning_aigc.diffusion.arguments import check_rank
from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.families import FAMILIES
from lightning_aigc.diffusion.lora_file import LoRAMetadata, save_lora
from lightning_aigc.diffusion.transformer_training import TransformerTraining
from lightning_aigc.errors import ModelError

TransformerLoRATarget = Literal["attention", "feed_forward"]


class DiffusionLoRA(TransformerTraining):
    """Fine-tunes a diffusion transformer on a set of pictures by training a LoRA through peft.

    The family is read from the pipeline's `model_index.json`: Stable Diffusion 3 and 3.5. `StableDiffusionLoRA` is the
    same for U-Nets.

    Args:
        pretrained_model_name_or_path: A diffusers pipeline folder or a hub id.
        rank: Rank of the LoRA matrices; 4 to 64 is usual.
        lora_alpha: Scale of the LoRA's output is `lora_alpha / rank`; unset means equal to the rank.
        lora_dropout: Share of a LoRA layer's inputs that are dropped while training.
        lora_targets: Which of the transformer's layers to adapt: attention, feed_forward.
        use_rslora: Scale by `alpha / sqrt(rank)`, steadier at high ranks (rsLoRA).
        kwargs: Arguments of `TransformerTraining`, `DenoiserTraining` and `DiffusionModule`.
    """

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
        args, table = self.args, FAMILIES[parts.family].lora_layers
        unknown = [target for target in args.lora_targets if target not in table]
        if unknown or not args.lora_targets:
            raise ModelError(
                f"model.init_args.lora_targets must name some of {', '.join(table)}; got {list(args.lora_targets)}"
            )
        suffixes = [layer for target in args.lora_targets for layer in table[target]]
        names = {name for name, _ in parts.denoiser.named_modules()}
        there = [suffix for suffix in suffixes if any(name.endswith(f".{suffix}") for name in names)]
        return LoraConfig(
            r=args.rank,
            lora_alpha=self.lora_alpha,
            target_modules=there,
            lora_dropout=args.lora_dropout,
            use_rslora=args.use_rslora,
            init_lora_weights="gaussian",
        )

    def save_lora(self, path: Any, **metadata: Any) -> None:
        """Write the LoRA as one `.safetensors` that diffusers and ComfyUI load; averaged weights if any."""
        args = self.args
        facts = {
            "base_model_name": args.pretrained_model_name_or_path,
            "base_model_hash": self.base_model_hash(),
            "prediction_type": None,
            "learning_rate": args.learning_rate,
            "noise_offset": args.noise_offset,
        }
        described = LoRAMetadata(**(facts | metadata))
        with self.averaged_weights():
            save_lora(path, transformer=self.loaded().denoiser, metadata=described, layout="diffusers")
