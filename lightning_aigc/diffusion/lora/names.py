"""Convert LoRA layer names between diffusers' dotted module names and sd-scripts' underscored names.

sd-scripts, A1111 and ComfyUI use three naming schemes:
    text encoders   lora_te_text_model_encoder_layers_0_self_attn_q_proj       (SDXL: lora_te1_, lora_te2_)
    SD 1.x, 2.x     lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q
    SDXL            lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q (the original U-Net's block names)
Underscores are ambiguous, so the inverse splits by the known segment names of these models.
Source: kohya-ss/sd-scripts networks/lora.py and library/sdxl_model_util.py.
"""

from __future__ import annotations

import re

from lightning_aigc.errors import ModelError

UNET, TRANSFORMER, TEXT_ENCODER, TEXT_ENCODER_2 = "unet", "transformer", "text_encoder", "text_encoder_2"
DENOISERS = (UNET, TRANSFORMER)
COMPONENTS = (*DENOISERS, TEXT_ENCODER, TEXT_ENCODER_2)
SDXL_LAYERS_PER_BLOCK = 2

_TEXT_ENCODER_SEGMENTS = """
    text_model self_attn q_proj k_proj v_proj out_proj text_projection token_embedding position_embedding
"""
_UNET_SEGMENTS = """
    down_blocks mid_block up_blocks transformer_blocks proj_in proj_out to_q to_k to_v to_out conv_in conv_out
    conv_shortcut time_emb_proj time_embedding add_embedding class_embedding encoder_hid_proj linear_1 linear_2
    add_k_proj add_q_proj add_v_proj to_add_out
"""
_ORIGINAL_UNET_SEGMENTS = """
    input_blocks middle_block output_blocks in_layers out_layers emb_layers skip_connection time_embed label_emb
"""
_SEGMENTS = frozenset((_TEXT_ENCODER_SEGMENTS + _UNET_SEGMENTS + _ORIGINAL_UNET_SEGMENTS).split())
_LONGEST_SEGMENT = max(segment.count("_") + 1 for segment in _SEGMENTS)

# In a residual block: diffusers' name -> original name.
_RESNET_LAYERS = {
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_OUTSIDE_BLOCKS = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_RESNET_LAYERS_BACK = {original: name for name, original in _RESNET_LAYERS.items()}
_UNET_MODULE = re.compile(
    r"(?:(?:down|up)_blocks\.\d+|mid_block)\."
    r"(?:attentions\.\d+\.(?:proj_in|proj_out|transformer_blocks\.\d+\."
    r"(?:attn[12]\.(?:to_[qkv]|to_out\.0|(?:add_[qkv]_proj)|to_add_out)|ff\.net\.(?:0\.proj|2)))"
    r"|resnets\.\d+\.(?:conv1|conv2|time_emb_proj|conv_shortcut)|(?:down|up)samplers\.\d+\.conv)"
    r"|(?:class_embedding|encoder_hid_proj)(?:\.linear_[12])?"
)
_TEXT_MODULE = re.compile(
    r"text_model\.(?:encoder\.layers\.\d+\.(?:self_attn\.(?:q|k|v|out)_proj|mlp\.fc[12])"
    r"|embeddings\.(?:token|position)_embedding)|text_projection"
)
_OUTSIDE_BLOCKS_BACK = {original: name for name, original in _OUTSIDE_BLOCKS.items()}


def to_kohya_name(component: str, module: str, *, sdxl: bool, layers_per_block: int = SDXL_LAYERS_PER_BLOCK) -> str:
    """The sd-scripts name of a module, without a suffix such as `.lora_down.weight`."""
    if component == UNET:
        return "lora_unet_" + (to_original_unet(module, layers_per_block) if sdxl else module).replace(".", "_")
    # transformers 5 dropped CLIPTextModel's inner `text_model`; files and readers still use it.
    if not module.startswith(("text_model.", "text_projection")):
        module = f"text_model.{module}"
    prefix = {TEXT_ENCODER: "lora_te1_" if sdxl else "lora_te_", TEXT_ENCODER_2: "lora_te2_"}[component]
    return prefix + module.replace(".", "_")


def from_kohya_name(name: str, *, layers_per_block: int = SDXL_LAYERS_PER_BLOCK) -> tuple[str, str]:
    """The component and diffusers' dotted module name of an sd-scripts name of a U-Net or text encoder.

    Raises: ModelError for a prefix other than lora_unet_, lora_te_, lora_te1_ and lora_te2_.
    """
    for prefix, component in (
        ("lora_unet_", UNET),
        ("lora_te1_", TEXT_ENCODER),
        ("lora_te2_", TEXT_ENCODER_2),
        ("lora_te_", TEXT_ENCODER),
    ):
        if name.startswith(prefix):
            module = with_dots(name.removeprefix(prefix))
            return component, from_original_unet(module, layers_per_block) if component == UNET else module
    raise ModelError(f"got a LoRA layer named {name!r}; wanted lora_unet_, lora_te_, lora_te1_ or lora_te2_ in front")


def is_unet_module(module: str) -> bool:
    """Whether a dotted name is that of a layer in diffusers' U-Net."""
    return module in _OUTSIDE_BLOCKS or _UNET_MODULE.fullmatch(module) is not None


def is_text_module(module: str) -> bool:
    """Whether a dotted name is that of a layer in CLIP's text encoder."""
    return _TEXT_MODULE.fullmatch(module) is not None


def to_original_unet(module: str, layers_per_block: int = SDXL_LAYERS_PER_BLOCK) -> str:
    """The original U-Net's name of a module in diffusers' U-Net.

    Upsamplers are placed after an attention, as in both of SDXL's upsampling blocks.
    """
    if module in _OUTSIDE_BLOCKS:
        return _OUTSIDE_BLOCKS[module]
    if match := re.fullmatch(r"down_blocks\.(\d+)\.(resnets|attentions|downsamplers)\.(\d+)\.(.+)", module):
        block, kind, layer, rest = int(match[1]), match[2], int(match[3]), match[4]
        first = 1 + block * (layers_per_block + 1)
        if kind == "downsamplers":
            return f"input_blocks.{first + layers_per_block}.0.op"
        return f"input_blocks.{first + layer}.{_within_block(kind, rest)}"
    if match := re.fullmatch(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)", module):
        kind, layer, rest = match[1], int(match[2]), match[3]
        position = 2 * layer if kind == "resnets" else 2 * layer + 1
        return f"middle_block.{position}.{_RESNET_LAYERS.get(rest, rest) if kind == 'resnets' else rest}"
    if match := re.fullmatch(r"up_blocks\.(\d+)\.(resnets|attentions|upsamplers)\.(\d+)\.(.+)", module):
        block, kind, layer, rest = int(match[1]), match[2], int(match[3]), match[4]
        first = block * (layers_per_block + 1)
        if kind == "upsamplers":
            return f"output_blocks.{first + layers_per_block}.2.conv"
        return f"output_blocks.{first + layer}.{_within_block(kind, rest)}"
    raise ModelError(f"got a LoRA on the U-Net module {module!r}, which has no name in sd-scripts' SDXL layout")


def from_original_unet(module: str, layers_per_block: int = SDXL_LAYERS_PER_BLOCK) -> str:
    """The inverse of `to_original_unet`; a name in diffusers' scheme is returned unchanged."""
    if module in _OUTSIDE_BLOCKS_BACK:
        return _OUTSIDE_BLOCKS_BACK[module]
    match = re.fullmatch(r"(input_blocks|middle_block|output_blocks)\.(\d+)\.(.+)", module)
    if match is None:
        return module
    part, index, rest = match[1], int(match[2]), match[3]
    if part == "middle_block":
        kind = "attentions" if index % 2 else "resnets"
        return f"mid_block.{kind}.{index // 2}.{_RESNET_LAYERS_BACK.get(rest, rest)}"
    position, _, rest = rest.partition(".")
    if part == "input_blocks":
        block, layer = divmod(index - 1, layers_per_block + 1)
        if rest == "op":
            return f"down_blocks.{block}.downsamplers.0.conv"
        side = "down_blocks"
    else:
        block, layer = divmod(index, layers_per_block + 1)
        if rest == "conv":
            return f"up_blocks.{block}.upsamplers.0.conv"
        side = "up_blocks"
    kind = "resnets" if position == "0" else "attentions"
    return f"{side}.{block}.{kind}.{layer}.{_RESNET_LAYERS_BACK.get(rest, rest)}"


def _within_block(kind: str, rest: str) -> str:
    return f"0.{_RESNET_LAYERS.get(rest, rest)}" if kind == "resnets" else f"1.{rest}"


def with_dots(name: str) -> str:
    """Restore the dots between segments; the longest known segment wins. A name with dots is returned unchanged."""
    if "." in name:
        return name
    underscored = name
    words, segments = underscored.split("_"), []
    while words:
        for length in range(min(_LONGEST_SEGMENT, len(words)), 0, -1):
            segment = "_".join(words[:length])
            if length == 1 or segment in _SEGMENTS:
                segments.append(segment)
                del words[:length]
                break
    return ".".join(segments)
