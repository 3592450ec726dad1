"""Tables of DeepSpeed's and accelerate's keys: imported, without effect, and refused, with the reason.

A dotted key stands for all that lies below it; `*` stands for the rest of a name.
Source: deepspeed.ai/docs/config-json, deepspeed/runtime/{constants,config}.py and zero/config.py, and accelerate's
`config/config_args.py`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

AUTO = "auto"
TAKEN = (
    "gradient_clipping", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size",
    "bf16.enabled", "fp16.enabled", "amp.enabled", "torch_autocast.enabled", "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device",
    "activation_checkpointing.partition_activations", "activation_checkpointing.cpu_checkpointing", "optimizer.type",
    "scheduler.type", "gradient_allreduce_op",
)  # fmt: skip
ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")
NO_LOSS_SCALE = "bfloat16 needs no loss scale"
NO_EFFECT = {
    "zero_optimization.contiguous_gradients": "gradients of a block are one tensor already",
    "zero_optimization.overlap_comm": "blocks are gathered and reduced while accelerators compute",
    "zero_optimization.reduce_scatter": "always so",
    "zero_optimization.reduce_bucket_size": "a bucket is a block",
    "zero_optimization.allgather_bucket_size": "a bucket is a block",
    "zero_optimization.use_multi_rank_bucket_allreduce": "a bucket is a block",
    "zero_optimization.allgather_partitions": "always so",
    "zero_optimization.*max_live_parameters": "at most two blocks and what holds them are gathered at a time",
    "zero_optimization.*max_reuse_*": "a block is freed after its forward",
    "zero_optimization.*prefetch_bucket_size": "the next block is gathered during backward",
    "zero_optimization.*persistence_threshold": "every trained parameter is cut",
    "zero_optimization.*weights_on_model_save": "files hold full weights",
    "zero_optimization.*module_granularity_threshold": "a block is gathered at once",
    "zero_optimization.*use_all_reduce_for_fetch_params": "blocks are gathered by one collective",
    "zero_optimization.*allgather_sequential": "blocks are gathered by one collective",
    "zero_optimization.stage3_*": "blocks decide what is gathered",
    "zero_optimization.sub_group_size": "states lie in memory",
    "zero_optimization.round_robin_gradients": "each rank has its own rows",
    "zero_optimization.load_from_fp32_weights": "weights are float32",
    "zero_optimization.elastic_checkpoint": "checkpoints load on any number of ranks",
    "zero_optimization.legacy_stage1": "stage 1 cuts the optimizer's states",
    "zero_optimization.ignore_unused_parameters": "parameters that the loss does not use are an error",
    "zero_optimization.cpu_offload_use_pin_memory": "host memory is pinned where there is an accelerator",
    "zero_optimization.zero_hpz_partition_size": "blocks are gathered from all ranks; between_nodes shards in nodes",
    "zero_optimization.mics_*": "shard inside nodes with between_nodes",
    "zero_optimization.memory_efficient_linear": "FusedBackwardPrecision.memory",
    "zero_optimization.override_module_apply": "weights are full when they are made",
    "zero_optimization.pipeline_loading_checkpoint": "weights are full when they are loaded",
    "zero_optimization.log_trace_cache_warnings": "there is no trace",
    "zero_optimization.enable_sanity_checks": "ranks are compared always",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "states lie in memory",
    "zero_optimization.leaf_module": "a block is gathered at once",
    "zero_optimization.zeropp_loco_param": "belongs to quantized gradients",
    "zero_optimization.allgather_size": "a bucket is a block",
    "steps_per_print": "trainer.log_every_n_steps",
    "wall_clock_breakdown": "trainer.profiler",
    "dump_state": "runs write config.yaml",
    "prescale_gradients": "means are taken in float32",
    "gradient_predivide_factor": "means are taken in float32",
    "sparse_gradients": "gradients are dense; the result is the same",
    "disable_allgather": "blocks are gathered by one collective",
    "zero_allow_untested_optimizer": "every optimizer that works value by value is served",
    "zero_force_ds_cpu_optimizer": "the configured optimizer steps on the host",
    "communication_data_type": "gradients are reduced in float32",
    "seq_parallel_comm*": "gradients are reduced in float32",
    "data_types": "gradients are accumulated in float32",
    "dataloader_drop_last": "the loader is the data module's",
    "memory_breakdown": "lightning plan prints bytes",
    "flops_profiler": "trainer.profiler",
    "tensorboard": "trainer.logger",
    "wandb": "trainer.logger",
    "comet": "trainer.logger",
    "csv_monitor": "trainer.logger",
    "monitor_config": "trainer.logger",
    "timers": "trainer.profiler",
    "comms_logger": "npu_sparse and between_nodes log what they send",
    "comms_config": "npu_sparse and between_nodes log what they send",
    "checkpoint": "ExactSnapshot",
    "nebula": "ExactSnapshot",
    "datastates*": "ExactSnapshot",
    "autotuning": "MemoryBudget plans memory",
    "aio": "belongs to NVMe offload",
    "compile": "torch.compile changes speed alone",
    "graph_harvesting": "CUDA graphs change speed alone",
    "hybrid_engine": "belongs to generation in RLHF",
    "pipeline": "belongs to models that are a PipelineModule",
    "eigenvalue": "belongs to quantized training",
    "sparse_attention": "belongs to models that read it; see FusedBackwardPrecision.attention_grad_density",
    "vocabulary_size": "belongs to models that read it",
    "use_data_before_expert_parallel*": "there are no experts",
    "bf16.*": NO_LOSS_SCALE,
    "bfloat16.*": NO_LOSS_SCALE,
    "fp16.auto_cast": "inputs are cast by autocast",
    "fp16.fp16_master_weights_and_grads": "weights and gradients stay float32",
    "fp16.*": NO_LOSS_SCALE,
    "torch_autocast.*": "autocast's dtype is bfloat16, for torch's own list of operations",
    "amp.*": "bfloat16 needs none of apex's levels",
    "activation_checkpointing.contiguous_memory_optimization": "kept tensors are few",
    "activation_checkpointing.number_checkpoints": "every block",
    "activation_checkpointing.synchronize_checkpoint_boundary": "nothing to wait for",
    "activation_checkpointing.profile": "trainer.profiler",
    "activation_checkpointing.*": "FusedBackwardPrecision.memory recomputes",
    "optimizer.legacy_fusion": "torch's optimizer is used",
}
REFUSED = {
    "elasticity": "a stopped run resumes on another number of ranks with --resume",
    "curriculum_learning": "lengths of sequences are not changed on the way",
    "data_efficiency": "curriculum and random token drops are not built",
    "progressive_layer_drop": "layers are not dropped",
    "quantize_training": "see quantization for frozen bases",
    "weight_quantization": "see quantization for frozen bases",
    "compression_training": "see quantization for frozen bases",
    "expert_parallel": "there are no experts",
    "zero_optimization.zenflow": "it delays updates of most gradients",
    "zero_optimization.zero_quantized_weights": "CUDA alone; gradients between nodes: between_nodes",
    "zero_optimization.zero_quantized_nontrainable_weights": "use model.init_args.base_quantization",
    "zero_optimization.zero_quantized_gradients": "CUDA alone; gradients between nodes: between_nodes",
}
"""Refused keys; a key is off if it or its `enabled` is false."""
SIZES = {"tensor_parallel.autotp_size", "tensor_parallel.tp_size", "sequence_parallel_size"}
"""Numbers of ranks that share one batch; 0 and 1 are off."""
ACCELERATE_NO_EFFECT = (
    "compute_environment", "distributed_type", "debug", "downcast_bf16", "enable_cpu_affinity", "machine_rank",
    "main_process_ip", "main_process_port", "main_training_function", "rdzv_*", "same_network", "use_cpu", "gpu_ids",
    "tpu_*", "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher", "deepspeed_hostfile",
    "deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "deepspeed_moe_layer_cls_names", "command_file",
    "commands", "dynamo_*", "ipex_config", "mpirun_config", "use_mps_device", "use_xpu", "max_restarts",
    "offload_optimizer_nvme_path", "offload_param_nvme_path", "num_cpu_threads_per_process", "ec2_instance_type",
    "image_uri", "additional_args", "fsdp_config", "megatron_lm_config", "fp8_config", "parallelism_config",
    "monitor_interval",
)  # fmt: skip
SECTIONS = {
    "optimizer": '{"type": "AdamW", "params": {"lr": 1e-4}}',
    "scheduler": '{"type": "WarmupLR", "params": {"warmup_num_steps": 100}}',
    "zero_optimization": '{"stage": 2}',
    "activation_checkpointing": '{"partition_activations": true}',
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "amp", "torch_autocast"), '{"enabled": true}'),
}
"""Keys whose value is an object that changes the training, each with an example."""


def no_object(given: Mapping[str, Any]) -> str | None:
    """Return a sentence on a section that is not an object; None if all are objects."""
    for name, example in SECTIONS.items():
        value = given.get(name)
        if value in (None, AUTO) or (name == "zero_optimization" and isinstance(value, bool)):
            continue
        if not isinstance(value, dict) or not isinstance(value.get("params") or {}, dict):
            return f"{name} is {value!r}, wanted an object such as {example}; write one"
    return None


def found_in(key: str, table: Mapping[str, str]) -> str | None:
    """Return a table's entry for a dotted key or its parents; names without `*` have precedence."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:end])) in table:
            return table[prefix]
    return next((reason for name, reason in table.items() if "*" in name and fnmatch.fnmatchcase(key, name)), None)
