"""StableDiffusionLoRA: a LightningModule that fine-tunes Stable Diffusion 1.x, 2.x or SDXL with a LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_aigc.diffusion.arguments import check_lora
from lightning_aigc.diffusion.components import Components
from lightning_aigc.diffusion.lora_file import LoRAMetadata, save_lora
from lightning_aigc.diffusion.lora_targets import LoRATarget, lora_config
from lightning_aigc.diffusion.saved_schedule import scheduler_json
from lightning_aigc.diffusion.trained_parts import named_parts, unread_names
from lightning_aigc.diffusion.unet_training import UNetTraining


class StableDiffusionLoRA(UNetTraining):
    """Fine-tunes Stable Diffusion on a set of pictures by training a LoRA through peft.

    Args:
        pretrained_model_name_or_path: A diffusers pipeline folder, a hub id, a single `.safetensors` checkpoint, or
            `embedded:sd`, the tiny model that comes with the package.
        rank: Rank of the LoRA matrices; 4 to 64 is usual.
        lora_alpha: Scale of the LoRA's output is `lora_alpha / rank`; unset means equal to the rank.
        lora_dropout: Share of a LoRA layer's inputs that are dropped while training.
        lora_targets: Which of the U-Net's layers to adapt: attention, feed_forward, convolutions.
        use_dora: Learn magnitudes separately from directions (DoRA).
        use_rslora: Scale by `alpha / sqrt(rank)`, steadier at high ranks (rsLoRA).
        train_text_encoder: Adapt the text encoders too.
        text_encoder_lr: Rate of the text encoders' LoRA; unset means `learning_rate`.
        kwargs: Arguments of `UNetTraining` and `DiffusionModule`.
    """

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
        text_encoder_lr: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(pretrained_model_name_or_path=pretrained_model_name_or_path, **kwargs)
        check_lora(self.args, self.lora_alpha)

    @property
    def lora_alpha(self) -> float:
        alpha = self.args.lora_alpha
        return float(self.args.rank if alpha is None else alpha)

    def adapt(self, parts: Components) -> None:
        super().adapt(parts)
        args = self.args
        options = {"dropout": args.lora_dropout, "use_dora": args.use_dora, "use_rslora": args.use_rslora}
        parts.denoiser.add_adapter(lora_config(args.lora_targets, args.rank, self.lora_alpha, **options))
        if args.train_text_encoder:
            targets = [t for t in args.lora_targets if t != "convolutions"] or ["attention"]
            names = unread_names(parts)
            for part, encoder in named_parts(parts).items():
                if part == "unet":
                    continue
                unread = [name for name, _ in encoder.named_modules() if f"{part}.{name}.weight" in names]
                config = lora_config(
                    targets, args.rank, self.lora_alpha, is_text_encoder=True, unread=unread, **options
                )
                encoder.add_adapter(config)  # type: ignore[operator]
            self.text_encoders.extend(parts.text_encoders)
        self.recompute_text_encoders()

    def save_lora(self, path: Any, **metadata: Any) -> None:
        """Write the LoRA as one `.safetensors` that diffusers, ComfyUI and A1111 load; averaged weights if any.

        With DoRA this file is for ComfyUI alone, and `.diffusers.safetensors` beside it for diffusers and merging.
        """
        args, parts = self.args, self.loaded()
        assert self.schedule is not None
        kind = self.schedule.config.prediction_type
        facts = {
            "base_model_name": args.pretrained_model_name_or_path,
            "base_model_hash": self.base_model_hash(),
            "prediction_type": "v_prediction" if kind == "v_prediction" else "epsilon",
            "scheduler": scheduler_json(parts.family, self.sampling_config()),
            "learning_rate": args.learning_rate,
            "text_encoder_lr": args.text_encoder_lr,
            "snr_gamma": args.snr_gamma,
            "noise_offset": args.noise_offset,
        }
        described = LoRAMetadata(**(facts | metadata))
        encoders = tuple(self.text_encoders)
        with self.averaged_weights():
            save_lora(path, unet=parts.denoiser, text_encoders=encoders, metadata=described)
            if args.use_dora:  # the first is for ComfyUI alone
                exact = Path(path).with_suffix(".diffusers.safetensors")
                save_lora(exact, unet=parts.denoiser, text_encoders=encoders, metadata=described, layout="diffusers")
