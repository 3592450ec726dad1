"""Shard a model over a mesh: torch's `fully_shard` on each group, without frozen and packed parameters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from lightning_aigc.errors import ConfigError
from lightning_aigc.sharding.full_parameters import free_without_backward, fsdp_groups
from lightning_aigc.sharding.gloo_reduce_scatter import GlooReduceScatter
from lightning_aigc.sharding.groups import (
    Group,
    block_count,
    called_parts,
    make_groups,
    modules_to_join,
    split_by_dtype,
)
from lightning_aigc.sharding.local_parts import original_class

CALLED = {"AutoencoderKL": ("encode", "decode")}
"""Methods other than forward that call a model of another library, by class."""
JOINED_BYTES = 25 * 2**20
"""Limit up to which stage 2 gathers and reduces blocks together, the size of a DDP bucket. Stage 2 keeps their weights
for backward anyway, and each collective of a small block costs its latency."""


def shard_model(
    root: nn.Module,
    mesh: DeviceMesh,
    *,
    stage: int,
    compute_dtype: torch.dtype | None,
    offload: bool,
    called: Sequence[str],
) -> list[Group]:
    """Shard the trained parameters of a model over a 1-d mesh; frozen and packed ones are not sharded.

    Args:
        stage: 3 frees gathered weights after each block's forward; 2 keeps them until its backward, and has larger
            groups where blocks are small.
        compute_dtype: dtype of gathered weights, None for their own; gradients are reduced in float32.
        offload: keep shards and optimizer states in host memory.
        called: methods of the root that a step calls.
    Returns: the groups, innermost first.
    Raises: ConfigError for a model that cannot be sharded.
    """
    _prepare_parameters(root, stage)
    groups = make_groups(root)
    blocks = block_count(root, groups)
    if not groups:
        raise ConfigError(
            f"{original_class(root).__name__} has no trainable parameter to shard; set requires_grad on what is to be "
            "trained"
        )
    if mesh.size() > blocks:
        raise ConfigError(
            f"stage {stage} wants at least as many blocks as ranks, got {blocks} block(s) in "
            f"{original_class(root).__name__} and {mesh.size()} ranks; use fewer devices, or strategy zero_1 or ddp "
            "for so small a model"
        )
    if stage == 2:
        groups = make_groups(root, modules_to_join(root, groups, JOINED_BYTES))
    ignored = {parameter for parameter in root.parameters() if not parameter.requires_grad}
    offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    # Autocast casts inputs per operation; a cast of the batch would round its targets too.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None, cast_forward_inputs=False
    )
    settings: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": stage == 3,
        "mp_policy": policy,
        "offload_policy": offload_policy,
        "ignored_params": ignored,
    }
    for group in groups:
        for owners, _ in split_by_dtype(group):
            fully_shard(owners, **settings)
        fully_shard(group.module, **settings)
        for name in CALLED.get(original_class(group.module).__name__, ()):
            register_fsdp_forward_method(group.module, name)
    if not isinstance(root, FSDPModule):  # all of its parameters are in groups
        fully_shard(root, **settings)
    _keep_hidden_states(root)
    for part in root.modules():
        if isinstance(part, FSDPModule):  # each has its own settings
            if mesh.device_type == "npu":
                part.set_force_sum_reduction_for_comms(True)  # HCCL has no mean
            if mesh.device_type == "cpu":
                part.set_custom_reduce_scatter(GlooReduceScatter())  # type: ignore[arg-type]  # its base has no public name
                # Gathering the next block early holds one more block and hides nothing, because collectives block here.
                part.set_modules_to_backward_prefetch([part])
    for name in called:
        register_fsdp_forward_method(root, name)
    # Sampling may come before the first step, and the module that is called first would become the root.
    root._get_fsdp_state()._lazy_init()  # type: ignore[operator]
    if stage == 2:
        for part in called_parts(root):
            part.register_forward_hook(free_without_backward)
    return groups


def _keep_hidden_states(root: nn.Module) -> None:
    """Let sharded models of transformers go on to return their hidden states.

    transformers 5 looks up by the class's name what a model records. `fully_shard` gives a model a class with another
    name, and a text encoder would return `hidden_states=None`.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")  # absent where no such model can be
    for part in root.modules() if capturing is not None else ():
        if isinstance(part, FSDPModule) and hasattr(part, "_can_record_outputs"):
            dict.__setitem__(capturing._CAN_RECORD_REGISTRY, str(type(part)), part._can_record_outputs)  # type: ignore[union-attr]


def _prepare_parameters(root: nn.Module, stage: int) -> None:
    """Check that each trained parameter has rows, and make it contiguous."""
    for name, parameter in root.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = "no dimension" if parameter.dim() == 0 else "no value" if parameter.numel() == 0 else None
        kind = "complex values" if parameter.is_complex() else kind
        if kind is not None:
            raise ConfigError(
                f"stage {stage} cuts parameters by rows, and {name} has {kind}; give it shape [1] or real values, "
                "freeze it with requires_grad_(False), or use strategy zero_1, which keeps full weights on each rank"
            )
        parameter.data = parameter.data.contiguous()  # torch refuses another layout, such as channels_last


def sharded_parts(root: nn.Module) -> list[tuple[FSDPModule, list[tuple[str, Any]]]]:
    """Return each sharded module with own parameters, with their names and torch's FSDPParams, in order."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    parts: list[tuple[FSDPModule, list[tuple[str, Any]]]] = []
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_groups(module):
                parts.append((module, [(names[id(of.sharded_param)], of) for of in group.fsdp_params]))
    return parts


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to this module or one inside."""
    return any(isinstance(part, FSDPModule) for part in module.modules())
