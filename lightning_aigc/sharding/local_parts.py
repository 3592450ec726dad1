"""Local parts of sharded tensors, norms over all of them with one collective, and classes of sharded modules.

Every operation on a DTensor may be a collective, which hangs if one rank alone calls it. Readers of parameters and
gradients therefore use local parts, and sum over the ranks at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, in shared memory; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [local_part(tensor) for tensor in tensors]


def sharded(
    part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """Return a sharded tensor whose part on this rank is `part`, on the device where it is.

    `DTensor.from_local` would move the part of an offloaded tensor to the mesh's device.
    """
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, part.dtype))
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def shards_of(tensors: Sequence[Tensor]) -> int:
    """Return into how many parts these tensors are cut, 1 where none is sharded."""
    return next((tensor.device_mesh.size() for tensor in tensors if isinstance(tensor, DTensor)), 1)


def total_squares(squares: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Add up numbers of this rank's parts over the ranks that hold the other parts of the same tensors.

    Collective where a tensor is sharded: one all_reduce, whatever the numbers are of. A number of a tensor that is not
    sharded is every rank's own, and stays.
    Args: squares: one number for each tensor, on one device.
    """
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if not sharded:
        return squares
    is_sharded = torch.tensor([isinstance(tensor, DTensor) for tensor in tensors], device=squares.device)
    sums = torch.where(is_sharded, squares, 0).to(sharded[0].device_mesh.device_type)
    dist.all_reduce(sums, group=sharded[0].device_mesh.get_group())
    return torch.where(is_sharded, sums.to(squares.device), squares)


@torch.no_grad()
def gradient_norm(gradients: Sequence[Tensor], loss: Tensor | None = None) -> Tensor:
    """Return the L2 norm of all gradients together, float32, the same on every rank. Collective: one number travels.

    It is not finite on any rank if a value on one rank is not, or one rank's `loss`.
    """
    parts = [part for part in local_parts(gradients) if part.numel()]
    device = gradients[0].device
    square = torch.zeros((), device=device)
    if parts:
        square = torch.stack(norms_of_parts(parts)).square().sum()
    sharded = next((tensor for tensor in gradients if isinstance(tensor, DTensor)), None)
    if loss is not None:
        square = square + 0 * loss.detach().reshape(()).to(device)
    if sharded is not None:
        square = square.to(sharded.device_mesh.device_type)  # offloaded gradients lie in host memory
        dist.all_reduce(square, group=sharded.device_mesh.get_group())
    return square.sqrt()


def norms_of_parts(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each tensor, float32, in any order."""
    real = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    wide = [part for part in real if part.dtype == torch.float64]  # their norm is never computed in float32
    narrow = [part for part in real if part.dtype != torch.float64]
    norms = torch._foreach_norm(narrow, 2, torch.float32) if narrow else ()
    return [*norms, *(torch.linalg.vector_norm(part).float() for part in wide)]


def is_finite(norm: Tensor) -> bool:
    return math.isfinite(float(norm))


GENERATED = "torch.distributed.fsdp"


def original_class(module: object) -> type:
    """Return the object's class without the subclass that `fully_shard` generated.

    `fully_shard(ResnetBlock2D(...))` is a `FSDPResnetBlock2D`, a subclass of FSDPModule and ResnetBlock2D.
    """
    return next(cls for cls in type(module).__mro__ if not cls.__module__.startswith(GENERATED))
