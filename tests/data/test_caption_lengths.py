"""Captions that a tokenizer cuts off are noted, by tokens where a tokenizer is known."""

from __future__ import annotations

import pytest
from lightning.pytorch import Trainer
from transformers import AutoTokenizer

from lightning_aigc.data.captions.caption_lengths import is_long, note_on_lengths
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.diffusion.pipeline.caption_tokens import count_tokens
from lightning_aigc.embedded import resolve


@pytest.mark.parametrize(
    ("part", "fits", "cut"),
    [
        ("word ", 60, 61),
        ("red,", 60, 61),
        ("long_hair,", 30, 31),
        ("一", 40, 41),  # Chinese
        ("あ", 40, 41),  # Japanese
        ("ก", 40, 41),  # Thai
        ("красная ", 17, 18),
        ("x" * 6, 60, 62),  # no space and no comma at all
    ],
)
def test_length_is_told_without_spaces_too(part: str, fits: int, cut: int) -> None:
    assert not is_long(part * fits) and is_long(part * cut)


def test_a_note_counts_the_long_captions_alone(tools, make, folder) -> None:
    tools.save(folder / "a.png", caption="一个红色的杯子" * 20)
    tools.save(folder / "b.png", caption=",".join(f"tag{number}" for number in range(99)))
    tools.save(folder / "c.png", caption="a red cup")
    assert "2 captions have more than 60 words" in make().report()
    assert note_on_lengths(["a red cup", "一个红色的杯子"]) is None


def test_a_model_on_this_machine_counts_by_its_own_tokenizer(tools, make, folder, tmp_path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded:sd") / "tokenizer")
    captions = ["a red cup", "一个红色的杯子和帽子", "zorp " * 30]
    tokens = [len(tokenizer(caption, add_special_tokens=False)["input_ids"]) for caption in captions]
    counted = count_tokens("embedded:sd", None, captions)
    assert counted == ([0, *tokens[1:]], 22), "it has 24 positions, and two are of its marks"
    assert tokens[1] > 22 > tokens[0]
    for number, caption in enumerate(captions):
        tools.save(folder / f"{number}.png", caption=caption)
    data = make()
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    trainer.strategy.connect(StableDiffusionLoRA("embedded:sd", rank=2))
    data.trainer = trainer
    assert "2 captions have more than 22 tokens; the rest of each is cut off" in data.report()
    assert note_on_lengths(captions[:1], trainer.lightning_module) is None


def test_what_is_not_on_this_machine_is_counted_by_words(tmp_path) -> None:
    (tmp_path / "file.safetensors").write_bytes(b"")
    for source in ("nobody/nothing", str(tmp_path / "file.safetensors"), str(tmp_path)):
        assert count_tokens(source, None, ["a"]) is None
