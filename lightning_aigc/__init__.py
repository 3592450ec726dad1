"""Fine-tune image-generation models with PyTorch Lightning on Ascend NPUs, CUDA GPUs and CPUs.

Importing it registers "npu" and "npu_sparse" with Lightning, as soon as something imports Lightning.
"""

from lightning_aigc._pytorch_lightning import refuse_our_names
from lightning_aigc._registration import when_imported
from lightning_aigc._torchvision_import import declare_missing_operators

when_imported("torch", declare_missing_operators)  # not at once: `lightning doctor` starts where torch does not


def _register() -> None:
    import lightning_aigc.accelerators
    import lightning_aigc.strategies  # noqa: F401


when_imported("lightning.pytorch", _register)
when_imported("pytorch_lightning", refuse_our_names)

__version__ = "0.1.0"
