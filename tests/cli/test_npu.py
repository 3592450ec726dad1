"""The Ascend config on a machine without an NPU: the command says how to get one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

ASCEND = Path(__file__).parents[2] / "configs" / "sd_lora_ascend.yaml"


def test_fit_on_an_npu_that_is_not_there_prints_three_commands(command: Callable[..., Any], photos: Path) -> None:
    given = ["--data.init_args.trigger_word=zorp", "--model.init_args.output_name=mine"]
    given += ["--model.init_args.validation_prompts=[a zorp mug]", f"--data.init_args.train_data_dir={photos}"]
    said = command("fit", "-c", ASCEND, *given)
    assert said.code == 1
    (error,) = said.errors
    assert error.startswith("error: accelerator='npu' needs torch_npu, CANN and an Ascend NPU, got no torch_npu")
    after = said.err[said.err.index(error) :].splitlines()[1:4]
    assert [line.split()[0] for line in after] == ["pip", "source", "npu-smi"]
