"""Captioning models of transformers with random weights, true in shape and small, with their processors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    BertTokenizer,
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessor,
    BlipProcessor,
    CLIPImageProcessor,
    Florence2Config,
    Florence2ForConditionalGeneration,
    Florence2Processor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    RobertaTokenizer,
)

SIDE = 28
WORDS = ["a", "red", "mug", "on", "the", "table", "photo", "of", "cup", "blue", "shoe", "white"]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5-VL's, without tools and videos."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]


def stirred(model: Any) -> Any:
    """The model with larger weights, so that its text depends on the image."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model


def make_blip(folder: Path) -> Path:
    """A ViT that a BERT-like decoder reads; its prompt is the beginning of the caption."""
    torch.manual_seed(0)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]", *WORDS]
    tokenizer = BertTokenizer(vocab={word: place for place, word in enumerate(vocabulary)}, bos_token="[DEC]")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = shape | {"vocab_size": len(vocabulary), "bos_token_id": 5, "pad_token_id": 0, "sep_token_id": 3}
    config = BlipConfig(
        text_config=text | {"eos_token_id": 3, "encoder_hidden_size": 32},
        vision_config=shape | {"image_size": SIDE, "patch_size": 14},
        projection_dim=32,
    )
    stirred(BlipForConditionalGeneration(config)).save_pretrained(folder)
    BlipProcessor(BlipImageProcessor(size={"height": SIDE, "width": SIDE}), tokenizer).save_pretrained(folder)
    return folder


def make_qwen(folder: Path) -> Path:
    """A model that chats about images: a prompt in a template, a token a byte, and an answer after the prompt."""
    torch.manual_seed(0)
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(vocab={text: place for place, text in enumerate([*letters, *SPECIAL])}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    place = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    ends = {"pad_token_id": place["<|endoftext|>"], "eos_token_id": place["<|im_end|>"], "bos_token_id": None}
    text = ends | {
        "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision,
        image_token_id=place["<|image_pad|>"], vision_start_token_id=place["<|vision_start|>"],
        vision_end_token_id=place["<|vision_end|>"], **ends,
    )  # fmt: skip
    stirred(Qwen2_5_VLForConditionalGeneration(config)).save_pretrained(folder)
    images = Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 56 * 56})
    processor: Any = Qwen2_5_VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(), chat_template=CHAT)
    processor.save_pretrained(folder)
    return folder


def make_florence(folder: Path) -> Path:
    """An encoder of image and task, and a decoder; the prompt is a task such as `<CAPTION>`."""
    torch.manual_seed(0)
    letters = sorted(ByteLevel.alphabet())
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocabulary = {text: place for place, text in enumerate([*special, *letters])}
    tokenizer = RobertaTokenizer(vocab=vocabulary, merges=[], extra_special_tokens={"image_token": "<image>"})
    text = {
        "model_type": "bart", "vocab_size": 300, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "max_position_embeddings": 512, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2, "forced_eos_token_id": 2,
    }  # fmt: skip
    vision = {
        "depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1],
        "patch_prenorm": [False, True], "embed_dim": [16, 32], "num_heads": [2, 2], "num_groups": [2, 2],
        "window_size": 4, "projection_dim": 32,
    }  # fmt: skip
    config = Florence2Config(text_config=text, vision_config=vision, image_token_id=tokenizer.image_token_id)
    stirred(Florence2ForConditionalGeneration(config)).save_pretrained(folder)
    images = CLIPImageProcessor(
        size={"height": 32, "width": 32}, do_center_crop=False, crop_size={"height": 32, "width": 32}
    )
    images.image_seq_length = 17
    Florence2Processor(images, tokenizer).save_pretrained(folder)
    return folder


MAKE: dict[str, Callable[[Path], Path]] = {"blip": make_blip, "qwen": make_qwen, "florence": make_florence}
