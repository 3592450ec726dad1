"""Fine-tune image-generation models with PyTorch Lightning on Ascend NPUs, CUDA GPUs and CPUs."""

from lightning_aigc._torchvision_import import declare_missing_operators

declare_missing_operators()

__version__ = "0.1.0"
