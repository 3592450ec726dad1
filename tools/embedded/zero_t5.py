"""Add a T5 that answers zeros to a Stable Diffusion 3 folder that was trained without one.

diffusers 0.42 does not load such a folder unless `text_encoder_3=None, tokenizer_3=None` is named, whatever its index
says. This T5's last norm is zero, so that its tokens are the zeros which diffusers takes where there is none; here it
is not loaded (`components.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import T5Config, T5EncoderModel, T5Tokenizer

from lightning_aigc.diffusion.pipeline.loading import ANSWERS_ZEROS


def add_zero_t5(folder: Path) -> None:
    """Write `text_encoder_3` and `tokenizer_3` and name them in `model_index.json`."""
    width = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))["joint_attention_dim"]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    tokenizer = T5Tokenizer(vocab=special, extra_ids=0)
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(special), d_model=width, d_kv=8, d_ff=8, num_layers=1, num_heads=1, **{ANSWERS_ZEROS: True}
    )
    encoder = T5EncoderModel(config)
    torch.nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    encoder.save_pretrained(folder / "text_encoder_3")
    tokenizer.save_pretrained(folder / "tokenizer_3")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    index |= {"text_encoder_3": ["transformers", "T5EncoderModel"], "tokenizer_3": ["transformers", "T5Tokenizer"]}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model_index.json").write_text(text, encoding="utf-8")
