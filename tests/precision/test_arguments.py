"""Wrong arguments are refused with what was got, what is wanted and what to do."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Trainer

from fakes.runs.trainings import make_trainer
from lightning_aigc.errors import ConfigError
from lightning_aigc.precision import FusedBackwardPrecision

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"precision": "bf16"}, "precision must be one of 32-true, .*, got 'bf16'; did you mean 'bf16-mixed'"),
    ({"precision": 16}, "got 16; did you mean '16-mixed'"),
    ({"precision": "64-true"}, "precision must be one of .*, got '64-true'"),
    ({"precision": None}, "precision must be one of .*, got None"),
    ({"memory": "leen"}, "memory must be one of off, balanced, lean, max, fit, .* got 'leen'; did you mean 'lean'"),
    ({"memory": True}, "memory must be one of .*, got True"),
    ({"memory": None}, "memory must be one of .*, got None"),
    ({"memory": {"kept": 1.5}}, "memory.kept is a share of what native autograd saves, at most 1, got 1.5; for 1.5 %"),
    ({"memory": {"kept": 0}}, "memory.kept must be a number above 0, got 0"),
    ({"memory": {"kept": float("nan")}}, "memory.kept must be a number above 0, got nan"),
    ({"memory": {"kept": "0.2"}}, "memory.kept must be a number above 0, got '0.2'"),
    ({"memory": {"keep": 0.2}}, "memory as a budget is {kept: 0.18} or {peak_gb: 6}, one of them, got {'keep': 0.2}"),
    ({"memory": {"kept": 0.2, "peak_gb": 6}}, "memory as a budget is .*, one of them, got"),
    ({"memory": {"peak_gb": -1}}, "memory.peak_gb must be a number above 0, got -1"),
    ({"memory": {}}, "memory as a budget is .* got {}"),
    ({"protect": "vae.decoder"}, r"protect must be a list of .*, got 'vae.decoder'; write \['vae.decoder'\]"),
    ({"protect": [3]}, "protect must hold module-name patterns .*, got 3"),
    ({"protect": [""]}, "protect must hold module-name patterns .*, got ''"),
    ({"strict": "yes"}, "strict must be true or false, got 'yes'"),
    ({"strict": True, "memory": "off"}, "with memory: off all do; use memory: balanced, or strict: false"),
    ({"input_grad_density": 0.0}, r"input_grad_density must be in \(0, 1\], got 0.0"),
    ({"input_grad_density": float("nan")}, r"input_grad_density must be in \(0, 1\], got nan"),
    ({"attention_grad_density": 1.5}, r"attention_grad_density must be in \(0, 1\], got 1.5"),
    ({"attention_grad_density": True}, r"attention_grad_density must be in \(0, 1\], got True"),
    ({"attention_grad_density": "1"}, r"attention_grad_density must be in \(0, 1\], got '1'"),
    ({"memory": "off", "input_grad_density": 0.5}, "input_grad_density: 0.5 needs .* memory: off has none; use"),
    ({"precision": "bf16-forward-fp16-backward", "memory": "off"}, "memory: off has none; use memory: balanced"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=str)
def test_a_wrong_argument_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FusedBackwardPrecision(**arguments)


def test_a_precision_given_twice_is_answered_with_both_in_words() -> None:
    with pytest.raises(ValueError, match=r"precision=bf16-mixed.*FusedBackwardPrecision\(precision='16-mixed', mem"):
        Trainer(precision="bf16-mixed", plugins=[FusedBackwardPrecision("16-mixed")])


def test_the_trainer_reports_the_plugins_precision() -> None:
    assert make_trainer(FusedBackwardPrecision("bf16-forward-fp16-backward")).precision == "bf16-forward-fp16-backward"


def test_a_context_without_module_or_trainer_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match=r"call convert_module\(model\) first"):
        FusedBackwardPrecision("bf16-mixed").forward_context()
