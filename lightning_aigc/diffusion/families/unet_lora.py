"""LoRA targets of U-Nets and CLIP text encoders: their layers and the peft configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from lightning_aigc.errors import ModelError

if TYPE_CHECKING:
    from peft import LoraConfig

LoRATarget = Literal["attention", "feed_forward", "convolutions"]

UNET_LAYERS: dict[str, tuple[str, ...]] = {
    "attention": ("to_q", "to_k", "to_v", "to_out.0"),
    "feed_forward": ("ff.net.0.proj", "ff.net.2"),
    "convolutions": (
        "conv1", "conv2", "conv_shortcut", "downsamplers.0.conv", "upsamplers.0.conv", "time_emb_proj",
        "proj_in", "proj_out",
    ),
}  # fmt: skip
TEXT_ENCODER_LAYERS: dict[str, tuple[str, ...]] = {
    "attention": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "feed_forward": ("fc1", "fc2"),
    "convolutions": (),
}


def unet_lora_config(
    targets: Sequence[str],
    rank: int,
    alpha: float,
    *,
    is_text_encoder: bool = False,
    dropout: float = 0.0,
    use_dora: bool = False,
    use_rslora: bool = False,
    unread: Sequence[str] = (),
) -> LoraConfig:
    """The peft configuration for these layer groups.

    Args: unread: modules to leave out, because the loss does not depend on them and DDP would wait for their gradients.
    Raises: ModelError for an unknown group, or a rank below 1.
    """
    table = TEXT_ENCODER_LAYERS if is_text_encoder else UNET_LAYERS
    unknown = [t for t in targets if t not in table]
    if unknown or not targets:
        raise ModelError(f"model.init_args.lora_targets must name some of {', '.join(table)}; got {list(targets)}")
    if rank < 1:
        raise ModelError(f"model.init_args.rank must be at least 1, got {rank}; 4 to 64 is usual")
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        exclude_modules=list(unread) or None,
        target_modules=[layer for target in targets for layer in table[target]],
        lora_dropout=dropout,
        use_dora=use_dora,
        use_rslora=use_rslora,
        init_lora_weights="gaussian",
    )
