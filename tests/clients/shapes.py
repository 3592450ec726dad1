"""Small denoisers of every family, and their tensors under the names of the published files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from diffusers import (
    ChromaTransformer2DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    Krea2Transformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    ZImageTransformer2DModel,
)
from diffusers.loaders import single_file_utils
from torch import Tensor, nn

from fakes.models.lora_models import make_unet
from lightning_aigc.diffusion.families import TRANSFORMERS
from lightning_aigc.diffusion.pipeline.single_file_names import original_tensors
from lightning_aigc.diffusion.pipeline.tensor_stream import DeferredTensor


def make_denoiser(family: str) -> nn.Module:
    """A denoiser with random weights."""
    torch.manual_seed(0)
    if family in ("sd", "sdxl"):
        config = make_unet(sdxl=family == "sdxl").config
        widths = [32, 64, 64][: len(config.block_out_channels)]
        return UNet2DConditionModel.from_config(config, block_out_channels=widths, norm_num_groups=32)
    heads = {"attention_head_dim": 16, "num_attention_heads": 4}
    if family == "sd3":
        return SD3Transformer2DModel(
            sample_size=8, in_channels=16, out_channels=16, num_layers=2, attention_head_dim=64, num_attention_heads=2,
            joint_attention_dim=48, caption_projection_dim=128, pooled_projection_dim=32, pos_embed_max_size=16,
            qk_norm="rms_norm", dual_attention_layers=(0,),
        )  # fmt: skip
    if family in ("flux", "flux_kontext"):
        return FluxTransformer2DModel(
            in_channels=64, num_layers=1, num_single_layers=2, **heads, joint_attention_dim=32,
            pooled_projection_dim=16, axes_dims_rope=(4, 6, 6), guidance_embeds=True,
        )  # fmt: skip
    if family == "chroma":
        return ChromaTransformer2DModel(
            in_channels=64, num_layers=1, num_single_layers=2, **heads, joint_attention_dim=32,
            axes_dims_rope=(4, 6, 6), approximator_num_channels=16, approximator_hidden_dim=32, approximator_layers=2,
        )  # fmt: skip
    if family in ("flux2", "flux2_dev"):
        return Flux2Transformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=2, **heads, joint_attention_dim=96,
            axes_dims_rope=(4, 4, 4, 4), guidance_embeds=family == "flux2_dev",
        )  # fmt: skip
    if family == "krea2":
        return Krea2Transformer2DModel(
            in_channels=16, num_layers=2, **heads, num_key_value_heads=2, intermediate_size=96, timestep_embed_dim=32,
            text_hidden_dim=32, num_text_layers=3, text_num_attention_heads=2, text_num_key_value_heads=2,
            text_intermediate_size=48, num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 6, 6),
        )  # fmt: skip
    if family == "z_image":
        return ZImageTransformer2DModel(
            in_channels=4, dim=1152, n_layers=1, n_refiner_layers=2, n_heads=4, n_kv_heads=4, cap_feat_dim=32,
            axes_dims=[96, 96, 96], axes_lens=[600, 64, 64],
        )  # fmt: skip
    return QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, **heads, joint_attention_dim=32, axes_dims_rope=(4, 6, 6),
        zero_cond_t=family == "qwen_image_edit_plus",
    )  # fmt: skip


def original(family: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of FLUX.2 or Z-Image under the names of the published file; diffusers reads them back to the bit."""
    deferred = {name: DeferredTensor.of(tensor) for name, tensor in tensors.items()}
    renamed = {name: tensor.make() for name, tensor in original_tensors(deferred, TRANSFORMERS[family]).items()}
    convert = getattr(single_file_utils, f"convert_{family.removesuffix('_dev')}_transformer_checkpoint_to_diffusers")
    back = convert(dict(renamed))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    return renamed
