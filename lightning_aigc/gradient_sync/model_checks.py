"""Trained parameters of a DDP model, and checks of them before any gradient is computed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_aigc.errors import ConfigError


def trained_parameters(ddp: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that DDP syncs, by their names in the module it wraps."""
    ignored = ddp.parameters_to_ignore
    return [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored]


def refuse_complex(mode: str, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Check that a mode that computes with gradients as real numbers gets no complex one.

    Raises: ConfigError with the first parameter that is complex.
    """
    name = next((name for name, parameter in parameters if parameter.is_complex()), None)
    if name is not None and mode != "dense":
        raise ConfigError(
            f"{name} has complex values, and mode {mode} computes with real ones; use mode: dense, or keep the "
            "parameter as torch.view_as_real and make it complex in the forward"
        )


def refuse_sparse_gradients(ddp: DistributedDataParallel) -> None:
    """Check that no gradient is sparse.

    Raises: ConfigError for an embedding whose gradient is a sparse tensor: DDP hands those to no hook.
    """
    for name, module in ddp.module.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"{name or 'the model'}, an {type(module).__name__} with sparse=True, has a gradient that cannot be "
                "synced here; make it with sparse=False, or freeze it"
            )
