"""A ds_config.json or accelerate's file becomes a config of ours: each key in one line, or one sentence of refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_aigc.cli import main
from lightning_aigc.errors import ConfigError
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.strategies import ZeROStrategy
from lightning_aigc.strategies.deepspeed.config import import_file

ARTICLE: dict[str, Any] = json.loads(Path(__file__).with_name("ds_config.json").read_text(encoding="utf-8"))
"""The second article's config."""


def written(folder: Path, config: Any, name: str = "ds_config.json") -> Path:
    path = folder / name
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def leaves(value: Any) -> int:
    return sum(leaves(item) for item in value.values()) if isinstance(value, dict) else 1


def test_the_articles_file_is_taken_with_a_line_for_each_key(tmp_path: Path) -> None:
    found = import_file(written(tmp_path, ARTICLE))
    assert found.strategy == {"stage": 2, "offload_optimizer": True}
    assert found.precision == {"precision": "bf16-mixed", "memory": "max", "offload": True}
    assert found.trainer == {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0}
    assert found.model["optimizer"]["init_args"]["lr"] == 1e-5
    assert len(found.lines) == leaves(ARTICLE) - leaves(ARTICLE["optimizer"]["params"])


def test_the_strategy_takes_stage_and_offload_from_the_file_unless_they_are_given(tmp_path: Path) -> None:
    path = str(written(tmp_path, ARTICLE))
    strategy = ZeROStrategy(deepspeed_config=path)
    assert (strategy.stage, strategy.offload_optimizer) == (2, True)
    assert ZeROStrategy(stage=3, deepspeed_config=path).stage == 3


def test_auto_leaves_a_value_to_the_yaml(tmp_path: Path) -> None:
    found = import_file(written(tmp_path, {"gradient_clipping": "auto", "zero_optimization": {"stage": 3}}))
    assert found.trainer == {} and found.lines[0] == "gradient_clipping: auto, the YAML's value"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme is not built"),
        ({"optimizer": {"type": "OneBitAdam"}}, "OneBitAdam is not built"),
        ({"zero_optimization": {"stage": 4}}, r"stage must be 0 \(strategy ddp\), 1, 2 or 3"),
        ({"learning_rate": 1e-4, "datasets": []}, "holds 0 of DeepSpeed's keys, .* and 2 others"),
        ({"optimizer": {"type": "Lamb"}}, "Lamb is not known here"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "bias_correction: false is not built"),
        ({"scheduler": {"type": "LRRangeTest"}}, "LRRangeTest is not built; use one of WarmupLR"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size 2 is not built"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.enabled is not built"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.05}}}, "delays updates"),
        ({"gradient_allreduce_op": "sum"}, "gradients are averaged"),
        ('{"gradient_clipping": 1, "gradient_clipping": 2}', "stands twice"),
        ({"gradient_cliping": 1.0}, "did you mean gradient_clipping"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "CUDA alone"),
        ({"gradient_accumulation_steps": [4]}, "a value of another kind"),
        ("{", "is no JSON"),
        ("[1]", "holds list"),
    ],
)
def test_what_is_not_built_is_refused_in_one_sentence(tmp_path: Path, config: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted) as refusal:
        import_file(written(tmp_path, config))
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        import_file(tmp_path / "none.json")


def test_accelerates_file_says_the_same(tmp_path: Path) -> None:
    text = """
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 2
num_processes: 16
deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 4, offload_optimizer_device: cpu, zero3_init_flag: true}
"""
    found = import_file(written(tmp_path, text, "accelerate.yaml"))
    assert found.strategy == {"stage": 3, "offload_optimizer": True}
    assert found.trainer == {"devices": 8, "num_nodes": 2, "accumulate_grad_batches": 4, "gradient_clip_val": 1.0}


def test_the_command_prints_a_yaml_and_the_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["import-deepspeed", str(written(tmp_path, ARTICLE))])
    out, err = capsys.readouterr()
    assert "class_path: ZeROStrategy" in out and "stage: 2" in out
    assert "zero_optimization.overlap_comm: no effect here" in err


def test_a_file_without_checkpointing_leaves_memory_to_the_yaml(tmp_path: Path) -> None:
    off = {"activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False}}
    found = import_file(written(tmp_path, off))
    assert found.precision == {}
    assert found.lines == [f"activation_checkpointing.{name}: off" for name in off["activation_checkpointing"]]


def test_the_yamls_precision_wins_over_the_files_with_a_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy: Any = ZeROStrategy(deepspeed_config=str(written(tmp_path, ARTICLE)))
    own = strategy.precision_plugin = FusedBackwardPrecision("32-true", memory="lean")
    with caplog.at_level("INFO"):
        strategy.settings.apply_to_strategy(strategy)
    assert strategy.precision_plugin is own
    said = " ".join(record.getMessage() for record in caplog.records)
    for name, here, there in (("precision", "32-true", "bf16-mixed"), ("memory", "lean", "max")):
        assert f"the YAML's FusedBackwardPrecision.{name} {here} wins over {there}" in said
