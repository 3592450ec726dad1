"""Write a safetensors file tensor by tensor, so that a model larger than the host's free memory can be saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from lightning_aigc.atomic_file import atomic_file
from lightning_aigc.checkpoint.files.safetensors_file import Layout
from lightning_aigc.errors import ModelError


@dataclass(frozen=True)
class DeferredTensor:
    """A tensor of a file that is computed when its turn comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype | None = None) -> DeferredTensor:
        """The tensor itself; floating-point values in `dtype`, if that is given."""
        kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return cls(tuple(tensor.shape), kept, lambda: tensor)


def write_tensors(
    path: Path, tensors: Mapping[str, DeferredTensor], metadata: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write a safetensors file atomically; host memory holds one tensor at a time, in addition to the model.

    metadata: entries of the header.
    Raises: ModelError if the disk is full or the folder cannot be written.
    """
    described = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
    layout = Layout.of(described)
    try:
        with atomic_file(path, durable=False) as file:
            file.write(layout.header(metadata))
            for name in layout.entries:  # in the order of their offsets
                wanted = tensors[name]
                # A copy: numpy fixes the size of a storage that it reads, which FSDP frees later.
                tensor = wanted.make().detach().to("cpu", wanted.dtype, copy=True).contiguous()
                assert tuple(tensor.shape) == wanted.shape, name
                file.write(tensor.view(-1).view(torch.uint8).numpy().data)
                del tensor
    except OSError as error:
        raise ModelError(
            f"cannot write {path}: {error.strerror or error}; free some space, or choose another default_root_dir"
        ) from error
