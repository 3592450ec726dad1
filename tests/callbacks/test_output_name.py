"""A result's name that leaves its folder, doubles its ending or replaces another is refused before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_aigc.callbacks import SaveLoRA, SaveModel
from lightning_aigc.callbacks.saving.save_result import check_output_name
from lightning_aigc.diffusion import ControlNetTraining, DiffusionLoRA, StableDiffusionFineTuning, StableDiffusionLoRA
from lightning_aigc.errors import ModelError


@pytest.mark.parametrize(
    ("name", "possible"),
    [
        ("../zorp", "zorp"),
        ("out/zorp", "zorp"),
        ("/tmp/zorp", "zorp"),
        ("C:\\out\\zorp", "zorp"),
        ("C:zorp", "C_zorp"),
        ("zorp.safetensors", "zorp"),
        ("zorp.SafeTensors", "zorp"),
        ("zorp.ckpt", "zorp"),
        ("", "result"),
        ("..", "result"),
        ("a/..", "result"),
        (".zorp", "zorp"),
        ("zorp ", "zorp"),
        ("zorp?", "zorp_"),
        ("zorp\n", "zorp_"),
        ("z" * 300, "z" * 200),
        ("鞋" * 100, "鞋" * 66),
        ("snapshots", "snapshots_result"),
        ("Samples", "Samples_result"),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_one_that_can(name: str, possible: str) -> None:
    with pytest.raises(ModelError, match="must be the name of a file without folder and ending, got ") as refused:
        check_output_name(name, "output_name")
    assert f"; set output_name: {possible}, and the folder by trainer.default_root_dir" in str(refused.value)
    assert "\n" not in str(refused.value)
    check_output_name(possible, "output_name")


@pytest.mark.parametrize("name", ["lora", "my lora v1.2", "zorp-mug_03", "鞋子", "a.b.c", "snapshots_2"])
def test_an_ordinary_name_is_taken(name: str) -> None:
    check_output_name(name, "output_name")


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (StableDiffusionLoRA, "embedded:sd"),
        (StableDiffusionFineTuning, "embedded:sd"),
        (ControlNetTraining, "embedded:sd"),
        (DiffusionLoRA, "embedded:sd3"),
    ],
)
def test_every_module_refuses_it_at_once(kind: Any, source: str) -> None:
    with pytest.raises(ModelError, match=r"^model\.init_args\.output_name must .*output_name: zorp,"):
        kind(source, output_name="../zorp.safetensors")


@pytest.mark.parametrize("kind", [SaveLoRA, SaveModel])
def test_a_callbacks_name_and_that_of_any_module_are_looked_at_before_the_first_step(kind: Any) -> None:
    trainer, module = SimpleNamespace(fast_dev_run=False), SimpleNamespace(output_name="a/b")
    with pytest.raises(ModelError, match=r"got 'a/b'.* set model\.init_args\.output_name: b,"):
        kind().setup(trainer, module, "fit")
    with pytest.raises(ModelError, match=r"got '\.\./c'.* set output_name: c,"):
        kind(output_name="../c").setup(trainer, module, "fit")
