"""Fine-tune image-generation models with PyTorch Lightning on Ascend NPUs, CUDA GPUs and CPUs.

Importing this package registers "npu" and "npu_sparse" with Lightning once Lightning is imported.
"""

from lightning_aigc._pytorch_lightning import register_refusals
from lightning_aigc._registration import when_imported
from lightning_aigc._third_party_imports import declare_missing_operators

when_imported(
    "torch", declare_missing_operators
)  # deferred: `lightning doctor` must run where torch cannot be imported


def _register() -> None:
    import lightning_aigc.accelerators
    import lightning_aigc.strategies  # noqa: F401


def _expand_masks() -> None:
    from lightning_aigc._attention_masks import expand_masks

    expand_masks()


when_imported("torch", _expand_masks)
when_imported("lightning.pytorch", _register)
when_imported("pytorch_lightning", register_refusals)

__version__ = "0.1.0"
