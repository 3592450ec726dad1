"""Tables of DeepSpeed's and accelerate's keys: what is taken, what has no effect here, what is refused, and why.

Source: deepspeed.ai/docs/config-json, and accelerate's `config/config_args.py`.
"""

from __future__ import annotations

AUTO = "auto"
OPTIMIZERS = {"adam": "torch.optim.Adam", "adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}
TAKEN = (
    "gradient_clipping", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size",
    "bf16.enabled", "fp16.enabled", "zero_optimization.stage", "zero_optimization.offload_optimizer.device",
    "activation_checkpointing.partition_activations", "activation_checkpointing.cpu_checkpointing", "optimizer.type",
    "scheduler.type",
)  # fmt: skip
ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")
NO_EFFECT = {
    "zero_optimization.contiguous_gradients": "gradients of a block are one tensor already",
    "zero_optimization.overlap_comm": "blocks are gathered and reduced beside computing on accelerators",
    "zero_optimization.reduce_scatter": "always so",
    "zero_optimization.reduce_bucket_size": "a bucket is a block",
    "zero_optimization.allgather_bucket_size": "a bucket is a block",
    "zero_optimization.allgather_partitions": "always so",
    "zero_optimization.stage3_max_live_parameters": "at most two blocks and what holds them are gathered at a time",
    "zero_optimization.stage3_max_reuse_distance": "a block is freed after its forward",
    "zero_optimization.stage3_prefetch_bucket_size": "the next block is gathered beside backward",
    "zero_optimization.stage3_param_persistence_threshold": "every trained parameter is cut",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "files hold whole weights",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "files hold whole weights",
    "zero_optimization.sub_group_size": "states lie in memory",
    "zero_optimization.round_robin_gradients": "each rank has its own rows",
    "zero_optimization.load_from_fp32_weights": "weights are float32",
    "zero_optimization.elastic_checkpoint": "checkpoints load on any number of ranks",
    "zero_optimization.ignore_unused_parameters": "parameters that the loss does not use are an error",
    "steps_per_print": "trainer.log_every_n_steps",
    "wall_clock_breakdown": "trainer.profiler",
    "dump_state": "runs write config.yaml",
    "prescale_gradients": "means are taken in float32",
    "zero_allow_untested_optimizer": "every optimizer that works value by value is served",
    "zero_force_ds_cpu_optimizer": "the configured optimizer steps on the host",
    "communication_data_type": "gradients are reduced in float32",
    "memory_breakdown": "lightning plan prints bytes",
    "flops_profiler": "trainer.profiler",
    "tensorboard": "trainer.logger",
    "wandb": "trainer.logger",
    "csv_monitor": "trainer.logger",
    "comms_logger": "npu_sparse and between_nodes log what they send",
    "checkpoint": "ExactSnapshot",
    "autotuning": "MemoryBudget plans memory",
    "fp16.loss_scale": "bfloat16 needs no loss scale",
    "fp16.initial_scale_power": "bfloat16 needs no loss scale",
    "fp16.loss_scale_window": "bfloat16 needs no loss scale",
    "fp16.hysteresis": "bfloat16 needs no loss scale",
    "fp16.consecutive_hysteresis": "bfloat16 needs no loss scale",
    "fp16.min_loss_scale": "bfloat16 needs no loss scale",
    "fp16.auto_cast": "inputs are cast by autocast",
    "activation_checkpointing.contiguous_memory_optimization": "kept tensors are few",
    "activation_checkpointing.number_checkpoints": "every block",
    "activation_checkpointing.synchronize_checkpoint_boundary": "nothing to wait for",
    "activation_checkpointing.profile": "trainer.profiler",
}
REFUSED = {
    "amp": "NVIDIA apex; use bf16",
    "sparse_attention": "set FusedBackwardPrecision.attention_grad_density for sparse gradients",
    "elasticity": "a stopped run resumes on another number of ranks with --resume",
    "data_efficiency": "curriculum and random token drops are not built",
    "compression_training": "see quantization for frozen bases",
    "zero_optimization.zero_quantized_weights": "CUDA alone; gradients between nodes: between_nodes",
    "zero_optimization.zero_quantized_gradients": "CUDA alone; gradients between nodes: between_nodes",
    "zero_optimization.zero_hpz_partition_size": "shard inside nodes with between_nodes",
    "zero_optimization.mics_shard_size": "shard inside nodes with between_nodes",
    "aio": "NVMe offload is not built",
}
ACCELERATE_NO_EFFECT = (
    "compute_environment", "distributed_type", "debug", "downcast_bf16", "enable_cpu_affinity", "machine_rank",
    "main_process_ip", "main_process_port", "main_training_function", "rdzv_backend", "same_network", "use_cpu",
    "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "zero3_init_flag", "zero3_save_16bit_model",
    "deepspeed_multinode_launcher",
)  # fmt: skip
