"""Original class of a module: torch's `fully_shard` replaces it by a generated subclass."""

from __future__ import annotations

GENERATED = "torch.distributed.fsdp"


def original_class(module: object) -> type:
    """Return the object's class without the subclass that `fully_shard` generated.

    `fully_shard(ResnetBlock2D(...))` is a `FSDPResnetBlock2D`, a subclass of FSDPModule and ResnetBlock2D.
    """
    return next(cls for cls in type(module).__mro__ if not cls.__module__.startswith(GENERATED))
