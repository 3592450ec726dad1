"""GradientProtection: which names a pattern covers, and the patterns that it refuses."""

from __future__ import annotations

import re

import pytest
from torch import nn

from lightning_aigc_kernels.protection import GradientProtection, named_modules

NAMES = ["vae.decoder.conv_in", "vae.encoder.conv_in", "unet.mid_block.attentions.0.norm", "unet.down_blocks.0"]


@pytest.mark.parametrize(
    ("pattern", "name", "covered"),
    [
        ("vae.decoder", "vae.decoder", True),
        ("vae.decoder", "model.vae.decoder.conv_in.weight", True),
        ("vae.decoder", "vae.decoder_2.conv_in", False),
        ("vae.decoder", "vae", False),
        ("decoder", "vae.decoder.conv_in", True),
        ("vae.decoder*", "vae.decoder_2.conv_in", True),
        ("mid_block.attentions", "unet.mid_block.attentions.0.norm", True),
        ("mid_block.attentions", "unet.mid_block.resnets.0", False),
        ("*mid_block.attentions*", "unet.mid_block.attentions.0.norm", True),
        ("attentions.*.norm?", "unet.mid_block.attentions.0.norm2.weight", True),
        ("attn[12].to_q", "block.attn2.to_q.lora_A", True),
        ("attn[12].to_q", "block.attn3.to_q.lora_A", False),
        ("VAE.decoder", "vae.decoder", False),
        ("*", "anything.at.all", True),
        ("unet.mid_block", "model.unet._orig_mod.mid_block.attentions.0", True),
        ("unet._orig_mod.mid_block", "unet._orig_mod.mid_block", True),
        ("unet._orig_mod.mid_block", "unet.mid_block", True),
        ("unet.mid_block", "unet.other.mid_block", False),
        ("*", "_orig_mod", True),
    ],
)
def test_a_pattern_covers_a_run_of_parts_and_all_below(pattern: str, name: str, covered: bool) -> None:
    assert GradientProtection([pattern]).covers(name) is covered


def test_no_pattern_covers_nothing() -> None:
    protection = GradientProtection()
    assert not protection.covers("vae.decoder")
    protection.check(NAMES)


def test_any_of_several_patterns_will_do() -> None:
    protection = GradientProtection(["vae.decoder", "down_blocks.0"])
    assert [protection.covers(name) for name in NAMES] == [True, False, False, True]
    protection.check(NAMES)


def test_a_pattern_that_covers_nothing_is_named_with_close_names() -> None:
    with pytest.raises(ValueError, match=r"protect pattern 'vae.decodr' covers no module; close names: .*vae\.decoder"):
        GradientProtection(["vae.encoder", "vae.decodr"]).check(["vae.decoder", "vae.encoder", "unet.mid_block"])
    with pytest.raises(ValueError, match=r"protect pattern 'zzz' covers no module$"):
        GradientProtection(["zzz"]).check(NAMES)


def test_names_leave_out_a_data_parallel_wrapper_and_no_other_module_of_that_name() -> None:
    model = nn.ModuleDict({"unet": nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))})
    model["own"] = nn.ModuleDict({"module": nn.ModuleDict({"module": nn.Linear(2, 2)})})
    names = [name for name, _ in named_modules(model)]
    assert names == ["", "unet", "unet", "unet.0", "own", "own.module", "own.module.module"]
    assert [name for name, _ in named_modules(nn.DataParallel(nn.Sequential(nn.SiLU())))] == ["", "", "0"]


def test_a_string_and_an_empty_pattern_are_refused() -> None:
    wanted = "protect wants a list of name patterns, got the string 'vae.decoder'; write ['vae.decoder']"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        GradientProtection("vae.decoder")
    for patterns in ([""], ["vae", " "], [3]):
        with pytest.raises(ValueError, match=r"protect wants name patterns such as 'vae\.decoder', got"):
            GradientProtection(patterns)  # type: ignore[arg-type]
