"""Names of single-file checkpoints, of Stable Diffusion and of transformers, from those of diffusers and transformers.

Source: CompVis/stable-diffusion and Stability-AI/generative-models for the names; diffusers'
`scripts/convert_diffusers_to_original_stable_diffusion.py` and `_sdxl.py` go the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_aigc.diffusion.families import TransformerFamily
from lightning_aigc.diffusion.pipeline.tensor_stream import DeferredTensor

UNET, VAE = "model.diffusion_model.", "first_stage_model."
UNET_ENDS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
OPEN_CLIP = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm": "ln_final",
    "encoder.layers": "transformer.resblocks",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
QKV = re.compile(r"(.*\.)self_attn\.q_proj\.(weight|bias)$")


def unet_name(name: str, layers_per_block: int) -> str:
    """The name of a U-Net's or ControlNet's parameter, without a prefix.

    >>> unet_name("down_blocks.1.resnets.0.conv1.weight", 2), unet_name("mid_block.resnets.1.norm1.bias", 2)
    ('input_blocks.4.0.in_layers.2.weight', 'middle_block.2.in_layers.0.bias')
    """
    for ours, theirs in UNET_ENDS.items():
        if name.startswith(f"{ours}."):
            return theirs + name.removeprefix(ours)
    found = re.match(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.*)$", name)
    step = layers_per_block + 1
    if found:
        way, block, kind, layer, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
        if kind == "downsamplers":
            return f"input_blocks.{(block + 1) * step}.0.op.{rest.removeprefix('conv.')}"
        if kind == "upsamplers":
            return f"output_blocks.{block * step + layers_per_block}.UPSAMPLER.{rest}"
        at = f"input_blocks.{1 + block * step + layer}" if way == "down" else f"output_blocks.{block * step + layer}"
        return f"{at}.{_layer(kind, rest)}"
    found = re.match(r"mid_block\.(\w+)\.(\d+)\.(.*)$", name)
    if not found:
        raise KeyError(name)
    place = 1 if found[1] == "attentions" else 2 * int(found[2])
    return f"middle_block.{place}.{_layer(found[1], found[3])[2:]}"


def unet_names(names: Mapping[str, object], layers_per_block: int) -> dict[str, str]:
    """Single-file name of each parameter; an upsampler's place depends on whether its block has attention."""
    found = {name: unet_name(name, layers_per_block) for name in names}
    with_attention = {new.split(".")[1] for new in found.values() if re.match(r"output_blocks\.\d+\.1\.", new)}
    return {
        name: new.replace("UPSAMPLER", "2" if new.split(".")[1] in with_attention else "1")
        for name, new in found.items()
    }


def vae_name(name: str, up_blocks: int) -> str:
    """The name of an autoencoder's parameter, without its prefix."""
    name = re.sub(r"encoder\.down_blocks\.(\d+)\.resnets", r"encoder.down.\1.block", name)
    name = re.sub(r"encoder\.down_blocks\.(\d+)\.downsamplers\.0", r"encoder.down.\1.downsample", name)
    name = re.sub(
        r"decoder\.up_blocks\.(\d+)\.(resnets|upsamplers\.0)",
        lambda m: f"decoder.up.{up_blocks - 1 - int(m[1])}.{'block' if m[2] == 'resnets' else 'upsample'}",
        name,
    )
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
    if ".mid_block.attentions.0." in name:
        head, _, rest = name.partition(".mid_block.attentions.0.")
        ours = next(key for key in VAE_ATTENTION if rest.startswith(key))
        return f"{head}.mid.attn_1.{VAE_ATTENTION[ours]}{rest.removeprefix(ours)}"
    return name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")


def vae_tensor(name: str, tensor: DeferredTensor) -> DeferredTensor:
    """An attention's linear weight as the 1 x 1 convolution that single files hold."""
    if ".mid_block.attentions." in name and len(tensor.shape) == 2:
        make, shape = tensor.make, (*tensor.shape, 1, 1)
        return DeferredTensor(shape, tensor.dtype, lambda: make().reshape(shape))
    return tensor


def clip_name(name: str) -> str:
    """The name of a CLIP text encoder's parameter; transformers 5 has no inner `text_model`."""
    return name if name.startswith(("text_model.", "text_projection")) else f"text_model.{name}"


def open_clip_tensors(tensors: Mapping[str, DeferredTensor]) -> Iterator[tuple[str, DeferredTensor]]:
    """OpenCLIP's names and shapes: query, key and value in one, the projection transposed."""
    for name, tensor in tensors.items():
        plain = name.removeprefix("text_model.")
        found = QKV.match(plain)
        if found:
            three = [tensors[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            new = f"{found[1].replace('encoder.layers', 'transformer.resblocks')}attn.in_proj_{found[2]}"
            yield new, _concatenated(three)
        elif "self_attn.k_proj" in plain or "self_attn.v_proj" in plain:
            continue
        elif plain == "text_projection.weight":
            yield "text_projection", DeferredTensor(tensor.shape[::-1], tensor.dtype, _transposed(tensor))
        else:
            for ours, theirs in OPEN_CLIP.items():
                plain = plain.replace(ours, theirs)
            yield plain, tensor


def _layer(kind: str, rest: str) -> str:
    """A resnet's or transformer's parameter within its block."""
    if kind == "attentions":
        return f"1.{rest}"
    ours = next(key for key in RESNET if rest.startswith(f"{key}."))
    return f"0.{RESNET[ours]}{rest.removeprefix(ours)}"


def _transposed(tensor: DeferredTensor) -> Callable[[], Tensor]:
    def make() -> Tensor:
        return tensor.make().T

    return make


NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def original_tensors(tensors: Mapping[str, DeferredTensor], family: TransformerFamily) -> Mapping[str, DeferredTensor]:
    """The tensors as ComfyUI and diffusers' `from_single_file` read them; diffusers' names where both read those.

    Source: diffusers, `loaders/single_file_utils.py`, which converts the other way.
    """
    if not family.original_names:
        return tensors
    renamed: dict[str, DeferredTensor] = {}
    joined: dict[str, dict[int, DeferredTensor]] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if module in family.swapped_halves:
            tensor = _swapped(tensor)
        number = NUMBER.search(name)
        template = NUMBER.sub("{}", name, count=1).rpartition(".")[0]
        original, part, parts = _original_layer(template, family)
        if original is None:
            new = _other_name(name, number, family)
        else:
            new = f"{original.format(number[0] if number else '')}.{kind}"
        if parts > 1:
            joined.setdefault(new, {})[part] = tensor
        else:
            renamed[new] = tensor
    return renamed | {name: _concatenated([found[i] for i in sorted(found)]) for name, found in joined.items()}


def _original_layer(template: str, family: TransformerFamily) -> tuple[str | None, int, int]:
    """A layer's original, its place among the layers that this one joins, and their number."""
    for original, parts in family.original_layers.items():
        if template in parts:
            return original, parts.index(template), len(parts)
    return None, 0, 1


def _other_name(name: str, number: re.Match[str] | None, family: TransformerFamily) -> str:
    for ours, original in family.original_names.items():
        at = number[0] if number else ""
        if name == ours.format(at) or name.startswith(f"{ours.format(at)}."):
            return original.format(at) + name.removeprefix(ours.format(at))
    return name


def _concatenated(parts: Sequence[DeferredTensor]) -> DeferredTensor:
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return DeferredTensor(shape, parts[0].dtype, lambda: torch.cat([part.make() for part in parts]))


def _swapped(tensor: DeferredTensor) -> DeferredTensor:
    def make() -> Tensor:
        first, second = tensor.make().chunk(2)
        return torch.cat([second, first])

    return DeferredTensor(tensor.shape, tensor.dtype, make)
