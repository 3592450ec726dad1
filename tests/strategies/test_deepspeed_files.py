"""Kinds of DeepSpeed's and accelerate's files as they are used: what trains is translated, the rest is a line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_aigc.diffusion.training.optimization import build_schedule
from lightning_aigc.errors import ConfigError, ModelError
from lightning_aigc.schedulers.deepspeed_rates import OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from lightning_aigc.strategies import ZeROStrategy
from lightning_aigc.strategies.deepspeed.config import import_file

AUTO_ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
AUTO_WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
AUTO_STAGE_3 = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
STAGE_2 = {"stage": 2}


def of_stage_2(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": STAGE_2, "gradient_clipping": 1.0, **keys}


FILES: dict[str, dict[str, Any]] = {
    "transformers_zero3": {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                 "hysteresis": 2, "min_loss_scale": 1},
        "optimizer": AUTO_ADAMW, "scheduler": {"type": "WarmupLR", "params": AUTO_WARMUP},
        "zero_optimization": {**AUTO_STAGE_3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
                              "offload_param": {"device": "cpu", "pin_memory": True}},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
    },
    "transformers_decay": of_stage_2(
        scheduler={"type": "WarmupDecayLR", "params": {**AUTO_WARMUP, "total_num_steps": "auto"}}
    ),
    "llama_factory_z0": {
        "zero_allow_untested_optimizer": True, "bf16": {"enabled": "auto"},
        "zero_optimization": {**STAGE_2, "stage": 0, "round_robin_gradients": True}, "gradient_clipping": "auto",
    },
    "llama_factory_sequence": {
        "zero_optimization": AUTO_STAGE_3, "gradient_clipping": "auto", "comms_config": {"verbose": False},
        "bf16": {"enabled": True, "auto_cast": False, "loss_scale": 0, "hysteresis": 2},
        "monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}},
    },
    "axolotl_amp": {
        "amp": {"enabled": False, "opt_level": "O1"}, "zero_optimization": AUTO_STAGE_3, "bf16": {"enabled": True},
        "gradient_clipping": "auto",
    },
    "axolotl_torch_compile": of_stage_2(compile={"disable": False, "backend": "inductor"}),
    "llava_zero2": {
        "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
        "zero_optimization": {**STAGE_2, "overlap_comm": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto"},
    },
    "megatron": of_stage_2(
        train_batch_size=256, train_micro_batch_size_per_gpu=4, prescale_gradients=True, bf16={"enabled": False},
        fp16={"enabled": True, "loss_scale": 0, "fp16_master_weights_and_grads": False}, vocabulary_size=50257,
        data_types={"grad_accum_dtype": "fp32"}, zero_force_ds_cpu_optimizer=False, gradient_predivide_factor=1.0,
        checkpoint={"tag_validation": "Ignore", "load_universal": False}, pipeline={"stages": 2},
    ),
    "curriculum_off": of_stage_2(
        curriculum_learning={"enabled": False, "curriculum_type": "seqlen", "schedule_config": {"difficulty_step": 8}},
        data_efficiency={"enabled": False, "data_routing": {"enabled": False, "random_ltd": {"enabled": False}}},
        progressive_layer_drop={"enabled": False, "theta": 0.5},
    ),
    "compression_off": of_stage_2(
        compression_training={"weight_quantization": {"shared_parameters": {"enabled": False, "quantize_groups": 1}},
                              "layer_reduction": {"enabled": False, "keep_number_layer": 5}},
        quantize_training={"enabled": False, "quantize_bits": {"start_bits": 16}},
    ),
    "monitors": of_stage_2(
        tensorboard={"enabled": True, "output_path": "runs"}, wandb={"enabled": True, "team": "a"},
        csv_monitor={"enabled": True}, comet={"enabled": False}, flops_profiler={"enabled": True, "profile_step": 1},
        comms_logger={"enabled": True, "prof_ops": []}, wall_clock_breakdown=True, memory_breakdown=False,
    ),
    "zero_plus_plus_off": of_stage_2(zero_optimization={
        "stage": 3, "zero_quantized_weights": False, "zero_hpz_partition_size": 8, "zero_quantized_gradients": False,
        "mics_shard_size": 4, "mics_hierarchical_params_gather": False}),
    "names_without_stage3": of_stage_2(zero_optimization={
        "stage": 3, "gather_16bit_weights_on_model_save": True, "max_live_parameters": 1e9, "prefetch_bucket_size": 5e8,
        "param_persistence_threshold": 1e6, "model_persistence_threshold": 1e9, "module_granularity_threshold": 0,
        "leaf_module": {"classes": []}, "memory_efficient_linear": True}),
    "offload_null": of_stage_2(zero_optimization={"stage": 2, "offload_optimizer": None, "offload_param": {}}),
    "offload_old": of_stage_2(zero_optimization={"stage": 2, "cpu_offload": True, "cpu_offload_params": False}),
    "offload_ratio": of_stage_2(zero_optimization={"stage": 3, "offload_optimizer": {
        "device": "cpu", "ratio": 0.3, "pipeline_read": False, "super_offload": True}}),
    "aio_without_nvme": of_stage_2(aio={"block_size": 262144, "queue_depth": 32, "single_submit": False}),
    "sparse": of_stage_2(sparse_gradients=True, communication_data_type="fp16", sparse_attention={"mode": "fixed"}),
    "autotuning": of_stage_2(autotuning={"enabled": True, "fast": False}, eigenvalue={"enabled": False}),
    "hybrid_engine": of_stage_2(hybrid_engine={"enabled": True, "max_out_tokens": 512, "inference_tp_size": 1}),
    "nebula": of_stage_2(nebula={"enabled": "true", "persistent_storage_path": "/x"}, timers={"throughput": {}}),
    "elasticity_off": of_stage_2(elasticity={"enabled": False, "max_train_batch_size": 2000}),
    "tensor_parallel_off": of_stage_2(tensor_parallel={"autotp_size": 1}, sequence_parallel_size=1),
    "checkpointing": of_stage_2(activation_checkpointing={
        "partition_activations": False, "cpu_checkpointing": False, "contiguous_memory_optimization": False,
        "number_checkpoints": None, "synchronize_checkpoint_boundary": False, "profile": False}),
    "bf16_options": of_stage_2(bf16={"enabled": True, "immediate_grad_update": True, "check_grad_overflow": False}),
    "autocast": of_stage_2(torch_autocast={"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}),
    "stage_1_as_a_boolean": {"zero_optimization": True, "gradient_clipping": 0.5},
    "adagrad": of_stage_2(optimizer={"type": "Adagrad", "params": {"lr": 0.01}}),
    "no_zero_at_all": {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}},
    "accelerate_old": {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "fsdp_config": {}, "use_cpu": False,
        "deepspeed_config": {"gradient_accumulation_steps": 1, "zero_stage": 2, "offload_optimizer_device": "none"},
        "machine_rank": 0, "main_process_ip": None, "mixed_precision": "fp16", "num_machines": 1, "num_processes": 2,
    },
    "accelerate_new": {
        "compute_environment": "LOCAL_MACHINE", "debug": False, "deepspeed_config": {
            "deepspeed_hostfile": "hosts", "deepspeed_multinode_launcher": "standard", "gradient_clipping": 1.0,
            "deepspeed_moe_layer_cls_names": "Moe", "offload_optimizer_nvme_path": "none", "zero3_init_flag": True,
            "zero3_save_16bit_model": True, "zero_stage": 3},
        "distributed_type": "DEEPSPEED", "downcast_bf16": "no", "dynamo_config": {"dynamo_backend": "INDUCTOR"},
        "enable_cpu_affinity": False, "mixed_precision": "bf16", "num_machines": 2, "num_processes": 16,
        "rdzv_backend": "static", "tpu_env": [], "tpu_use_sudo": False,
    },
}  # fmt: skip
STAGES = {"transformers_zero3": 3, "llama_factory_z0": 0, "stage_1_as_a_boolean": 1, "no_zero_at_all": 0}


def written(folder: Path, given: Any, name: str = "ds_config.json") -> Path:
    path = folder / name
    path.write_text(given if isinstance(given, str) else json.dumps(given))
    return path


@pytest.mark.parametrize("name", list(FILES))
def test_a_file_is_taken_with_a_line_for_each_key_and_no_warning(tmp_path: Path, name: str) -> None:
    found = import_file(written(tmp_path, FILES[name]))
    assert found.lines and found.strategy["stage"] == STAGES.get(name, found.strategy["stage"])
    strategy = found.as_config()["trainer"]["strategy"]
    assert (strategy == "ddp") == (found.strategy["stage"] == 0)


def test_an_unknown_key_is_ignored_with_a_warning_as_in_deepspeed(tmp_path: Path) -> None:
    path = written(tmp_path, of_stage_2(zero_optimization={"stage": 2, "overlap_com": True}, my_note="x"))
    with pytest.warns(UserWarning, match="ignored") as warned:
        found = import_file(path)
    assert found.strategy["stage"] == 2
    said = " ".join(str(each.message) for each in warned)
    assert "zero_optimization.overlap_com" in said and "did you mean zero_optimization.overlap_comm?" in said
    assert "my_note: no key of DeepSpeed that is known here; ignored" in said


def test_what_a_missing_key_stands_for_is_said(tmp_path: Path) -> None:
    found = import_file(written(tmp_path, {"train_micro_batch_size_per_gpu": 4}))
    assert found.trainer == {"gradient_clip_val": 1.0} and found.as_config()["trainer"]["strategy"] == "ddp"
    assert len(found.notes) == 2 and "DeepSpeed 0.19" in found.notes[1]
    off = import_file(written(tmp_path, of_stage_2(gradient_clipping=0.0)))
    assert off.trainer == {"gradient_clip_val": None} and not off.notes
    with pytest.raises(ConfigError, match=r"stage 0, which is strategy ddp: set trainer\.strategy: ddp"):
        ZeROStrategy(deepspeed_config=str(written(tmp_path, {"gradient_clipping": 1.0})))


@pytest.mark.parametrize("section", ["fp16", "bf16", "amp", "torch_autocast"])
def test_every_half_precision_is_bfloat16_mixed(tmp_path: Path, section: str) -> None:
    found = import_file(written(tmp_path, of_stage_2(**{section: {"enabled": True}})))
    assert found.precision == {"precision": "bf16-mixed"}
    assert ("which replaces float16" in found.lines[-1]) == (section in ("fp16", "amp"))
    off = import_file(written(tmp_path, of_stage_2(**{section: {"enabled": False}})))
    assert off.precision == {}


def test_comments_and_commas_at_the_end_are_read_as_hjson(tmp_path: Path) -> None:
    text = """{
      // ZeRO
      "zero_optimization": {"stage": 3, /* sharded */ "offload_param": {"device": "none", "nvme_path": "//x#y"},},
      "gradient_clipping": 0.5, # as the paper
    }"""
    found = import_file(written(tmp_path, text))
    assert found.strategy["stage"] == 3 and found.trainer == {"gradient_clip_val": 0.5}


@pytest.mark.parametrize(
    ("params", "kind", "decay"),
    [
        ({"lr": 1e-3, "weight_decay": 0.1}, "AdamW", 0.1),
        ({"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": True}, "AdamW", 0.1),
        ({"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": False}, "Adam", 0.1),
        ({"lr": 1e-3}, "AdamW", 0.0),
    ],
)
def test_deepspeeds_adam_is_adamw_unless_adam_w_mode_is_false(
    tmp_path: Path, params: dict[str, Any], kind: str, decay: float
) -> None:
    found = import_file(written(tmp_path, of_stage_2(optimizer={"type": "Adam", "params": params})))
    made = found.model["optimizer"]
    assert made["class_path"] == f"torch.optim.{kind}" and made["init_args"]["weight_decay"] == decay


def test_switches_and_numbers_that_are_text_count_as_what_they_say(tmp_path: Path) -> None:
    given = {
        "zero_optimization": {"stage": "2", "cpu_offload": "false"},
        "fp16": {"enabled": "False"},
        "gradient_clipping": "0.5",
        "optimizer": {"type": "Adam", "params": {"adam_w_mode": "false", "lr": "2e-5", "betas": ["0.9", 0.95]}},
    }
    found = import_file(written(tmp_path, "\ufeff" + json.dumps(given)))
    assert found.strategy == {"stage": 2} and found.precision == {} and found.trainer == {"gradient_clip_val": 0.5}
    made = {"betas": [0.9, 0.95], "lr": 2e-5, "weight_decay": 0.0}
    assert found.model["optimizer"] == {"class_path": "torch.optim.Adam", "init_args": made}
    assert import_file(written(tmp_path, of_stage_2(gradient_clipping=-1))).trainer == {"gradient_clip_val": None}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": "AdamW"}, r'optimizer is \'AdamW\', wanted an object such as \{"type": "AdamW"'),
        ({"scheduler": {"type": "WarmupLR", "params": "auto"}}, "scheduler is .*'params': 'auto'.*wanted an object"),
        ({"bf16": True}, r'bf16 is True, wanted an object such as \{"enabled": true\}'),
        ({"zero_optimization": 2}, r'zero_optimization is 2, wanted an object such as \{"stage": 2\}'),
        ({"zero_optimization": {"stage": "auto"}}, r"stage must be 0 \(strategy ddp\), 1, 2 or 3, got auto"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "NVMe"}}}, "NVMe is not built; use cpu"),
        ({"gradient_clipping": float("nan")}, "NaN is no number"),
    ],
)
def test_a_value_that_nothing_would_read_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        import_file(written(tmp_path, {"gradient_clipping": 1.0, **given}))


def test_accelerates_file_clips_as_deepspeed_does_and_names_a_file_of_deepspeeds(tmp_path: Path) -> None:
    given = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "gradient_clipping": "none"}}
    assert import_file(written(tmp_path, given, "accelerate.json")).trainer == {"gradient_clip_val": 1.0}
    written(tmp_path, {"zero_optimization": STAGE_2, "gradient_clipping": 0.3})
    given["deepspeed_config"] = {"deepspeed_config_file": "ds_config.json"}
    assert import_file(written(tmp_path, given, "accelerate.json")).trainer == {"gradient_clip_val": 0.3}
    given["deepspeed_config"] = {"deepspeed_config_file": "accelerate.json"}
    with pytest.raises(ConfigError, match="deepspeed_config_file takes a ds_config"):
        import_file(written(tmp_path, given, "accelerate.json"))


def rates(schedule: Any, steps: int) -> list[float]:
    """The rate of each optimizer step."""
    found = []
    for _ in range(steps):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return found


def adam(lr: float = 2e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def test_rates_are_those_of_deepspeeds_schedules() -> None:
    """Schedules of DeepSpeed's lr_schedules.py: the first two steps have the lowest rate, its iterations -1 and 0."""
    log = rates(WarmupLR(adam(), warmup_max_lr=1e-3, warmup_num_steps=10), 13)
    wanted = [
        0,
        0,
        3.0103e-4,
        4.7712e-4,
        6.0206e-4,
        6.9897e-4,
        7.7815e-4,
        8.4510e-4,
        9.0309e-4,
        9.5424e-4,
        1e-3,
        1e-3,
        1e-3,
    ]
    assert log == pytest.approx(wanted, abs=1e-8)
    assert rates(WarmupLR(adam(), warmup_num_steps=4, warmup_type="linear"), 7) == pytest.approx(
        [0, 0, 5e-4, 1e-3, 1.5e-3, 2e-3, 2e-3]
    )
    decay = WarmupDecayLR(adam(), warmup_max_lr=1e-3, warmup_num_steps=4, warmup_type="linear", total_num_steps=8)
    assert rates(decay, 11) == pytest.approx([0, 0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4, 0, 0])
    cosine = WarmupCosineLR(adam(), warmup_num_steps=4, warmup_type="linear", cos_min_ratio=0.1, total_num_steps=8)
    shares = [0, 0, 0.25, 0.5, 0.75, 0.8681981, 0.55, 0.2318019, 0.1, 0.1]
    assert rates(cosine, 10) == pytest.approx([2e-3 * share for share in shares], rel=1e-6)
    cycle = OneCycle(
        adam(), 0.1, 1.0, cycle_first_step_size=4, cycle_second_step_size=2, decay_step_size=2, decay_lr_rate=0.5
    )
    assert rates(cycle, 9) == pytest.approx([0.1, 0.325, 0.55, 0.775, 1.0, 0.55, 0.1, 0.08, 0.1 / 1.5])
    assert cycle.optimizer.param_groups[0]["betas"] == (pytest.approx(0.9), 0.99)


def test_auto_numbers_of_steps_are_the_runs(tmp_path: Path) -> None:
    found = import_file(written(tmp_path, FILES["transformers_decay"]))
    given = found.model["lr_scheduler"]["init_args"]
    assert given == {"warmup_num_steps": None, "total_num_steps": None}
    made = build_schedule(adam(), lambda optimizer: WarmupDecayLR(optimizer, **given), 4, 8)
    assert rates(made, 10)[-5:] == pytest.approx([2e-3, 1.5e-3, 1e-3, 5e-4, 0])  # the optimizer's rate, then to the end
    with pytest.raises(ModelError, match="WarmupDecayLR needs an end; set its total_num_steps"):
        build_schedule(adam(), lambda optimizer: WarmupDecayLR(optimizer, **given), 4, float("inf"))


def test_the_schedules_highest_rate_wins_over_the_optimizers(tmp_path: Path) -> None:
    given = of_stage_2(
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 3e-4}},
        optimizer={"type": "AdamW", "params": {"lr": 1e-5}},
    )
    for keys in (list(given), list(given)[::-1]):
        found = import_file(written(tmp_path, {key: given[key] for key in keys}))
        assert found.model["learning_rate"] == 3e-4
        assert found.model["lr_scheduler"]["init_args"] == {"warmup_num_steps": 10, "warmup_max_lr": 3e-4}
