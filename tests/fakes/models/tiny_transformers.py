"""The transformers of diffusers' families, small, with inputs of two pictures each; random weights and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

WIDTH, TEXT, SIDE = 64, 24, 8
"""Channels, tokens of a text, and tokens to a side of a picture."""
Given = dict[str, Any]


def sd3() -> tuple[nn.Module, Given]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=2 * SIDE, patch_size=2, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=32,
        num_attention_heads=2, joint_attention_dim=WIDTH, caption_projection_dim=WIDTH, pooled_projection_dim=16,
        pos_embed_max_size=16, qk_norm="rms_norm", dual_attention_layers=(0,),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 4, 2 * SIDE, 2 * SIDE), "encoder_hidden_states": torch.randn(2, TEXT, WIDTH),
        "pooled_projections": torch.randn(2, 16), "timestep": torch.tensor([300.0, 700.0]),
    }  # fmt: skip


def sd3_without_norms() -> tuple[nn.Module, Given]:
    _, given = sd3()
    model = diffusers.SD3Transformer2DModel(
        sample_size=2 * SIDE, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=32,
        num_attention_heads=2, joint_attention_dim=WIDTH, caption_projection_dim=WIDTH, pooled_projection_dim=16,
        pos_embed_max_size=16,
    )  # fmt: skip
    return model, given


def ids(rows: int, axes: int) -> Tensor:
    found = torch.zeros(rows, axes)
    found[:, 1] = torch.arange(rows) // SIDE
    found[:, 2] = torch.arange(rows) % SIDE
    return found


def flux() -> tuple[nn.Module, Given]:
    model = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=WIDTH, pooled_projection_dim=16, axes_dims_rope=(8, 12, 12), guidance_embeds=False,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, SIDE**2, 16), "encoder_hidden_states": torch.randn(2, TEXT, WIDTH),
        "pooled_projections": torch.randn(2, 16), "timestep": torch.tensor([0.3, 0.8]), "img_ids": ids(SIDE**2, 3),
        "txt_ids": torch.zeros(TEXT, 3),
    }  # fmt: skip


def flux2() -> tuple[nn.Module, Given]:
    model = diffusers.Flux2Transformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=WIDTH, axes_dims_rope=(8, 8, 8, 8), guidance_embeds=False,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, SIDE**2, 16), "encoder_hidden_states": torch.randn(2, TEXT, WIDTH),
        "timestep": torch.tensor([0.3, 0.8]), "img_ids": ids(SIDE**2, 4).expand(2, -1, -1),
        "txt_ids": torch.zeros(2, TEXT, 4), "guidance": None,
    }  # fmt: skip


def qwen() -> tuple[nn.Module, Given]:
    model = diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=WIDTH, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, SIDE**2, 16), "encoder_hidden_states": torch.randn(2, TEXT, WIDTH),
        "encoder_hidden_states_mask": None, "timestep": torch.tensor([0.3, 0.8]),
        "img_shapes": [[(1, SIDE, SIDE)]] * 2,
    }  # fmt: skip


def z_image(text: Sequence[int] = (9, 9)) -> tuple[nn.Module, Given]:
    """With so many tokens of each picture's text."""
    model = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=4, dim=WIDTH, n_layers=2, n_refiner_layers=1,
        n_heads=2, n_kv_heads=2, cap_feat_dim=32, axes_dims=[8, 12, 12], axes_lens=[256, 64, 64],
    )  # fmt: skip
    pictures = [torch.randn(4, 1, 2 * SIDE, 2 * SIDE) for _ in range(2)]
    return model, {"x": pictures, "t": torch.tensor([0.3, 0.8]), "cap_feats": [torch.randn(n, 32) for n in text]}


def qwen_edit() -> tuple[nn.Module, Given]:
    """2511's: a source of another size, whose tokens have a timestep of 0, and texts of unequal length."""
    model, given = qwen()
    model = diffusers.QwenImageTransformer2DModel.from_config(model.config, zero_cond_t=True)
    mask = (torch.arange(TEXT) < torch.tensor([[TEXT], [5]])).long()
    shapes = {"img_shapes": [[(1, SIDE, SIDE), (1, SIDE // 2, SIDE)]] * 2}
    tokens = {"hidden_states": torch.randn(2, SIDE**2 * 3 // 2, 16), "encoder_hidden_states_mask": mask}
    return model, given | tokens | shapes


def chroma() -> tuple[nn.Module, Given]:
    model = diffusers.ChromaTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=WIDTH, axes_dims_rope=(8, 12, 12), approximator_num_channels=16,
        approximator_hidden_dim=32, approximator_layers=1,
    )  # fmt: skip
    mask = (torch.arange(TEXT + SIDE**2) <= torch.tensor([[9], [5]])) | (torch.arange(TEXT + SIDE**2) >= TEXT)
    return model, {
        "hidden_states": torch.randn(2, SIDE**2, 16), "encoder_hidden_states": torch.randn(2, TEXT, WIDTH),
        "timestep": torch.tensor([0.3, 0.8]), "img_ids": ids(SIDE**2, 3), "txt_ids": torch.zeros(TEXT, 3),
        "attention_mask": mask.float(),
    }  # fmt: skip


def krea2() -> tuple[nn.Module, Given]:
    """With texts of unequal length."""
    model = diffusers.Krea2Transformer2DModel(
        in_channels=16, num_layers=2, attention_head_dim=32, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=96, timestep_embed_dim=32, text_hidden_dim=32, num_text_layers=3, text_num_attention_heads=2,
        text_num_key_value_heads=2, text_intermediate_size=48, num_layerwise_text_blocks=1, num_refiner_text_blocks=1,
        axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        if "scale_shift_table" in name:  # zeros, by which no block would change anything
            nn.init.normal_(parameter, std=0.5)
    return model, {
        "hidden_states": torch.randn(2, SIDE**2, 16), "encoder_hidden_states": torch.randn(2, TEXT, 3, 32),
        "timestep": torch.tensor([0.3, 0.8]), "position_ids": torch.cat([torch.zeros(TEXT, 3), ids(SIDE**2, 3)]),
        "encoder_attention_mask": torch.arange(TEXT) < torch.tensor([[TEXT], [5]]),
    }  # fmt: skip
