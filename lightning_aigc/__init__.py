"""Fine-tune image-generation models with PyTorch Lightning on Ascend NPUs, CUDA GPUs and CPUs.

Importing this package registers "npu" and "npu_sparse" with Lightning once Lightning is imported: `lightning` or
`pytorch_lightning`, the first that the program imports.
"""

from importlib.util import find_spec

from lightning_aigc._real_rotary import QWEN_IMAGE, Z_IMAGE, real_rotary_of
from lightning_aigc._registration import when_imported
from lightning_aigc._third_party_imports import declare_missing_operators

when_imported(
    "torch", declare_missing_operators
)  # deferred: `lightning doctor` must run where torch cannot be imported


def _register_with_lightning() -> None:
    _register("lightning.pytorch")


def _register_with_pytorch_lightning() -> None:
    _register("pytorch_lightning")


def _register(package: str) -> None:
    from lightning_aigc import _lightning

    if _lightning.package() == package:
        import lightning_aigc.accelerators  # noqa: F401
        import lightning_aigc.strategies  # noqa: F401
    else:
        from lightning_aigc._second_lightning import register_refusals

        register_refusals(package)


def _expand_masks() -> None:
    from lightning_aigc._attention_masks import expand_masks

    expand_masks()


when_imported("torch", _expand_masks)
if find_spec("torch_npu") is not None:
    for _module_name in (*Z_IMAGE, QWEN_IMAGE):
        when_imported(_module_name, real_rotary_of(_module_name))
when_imported("lightning.pytorch", _register_with_lightning)
when_imported("pytorch_lightning", _register_with_pytorch_lightning)

__version__ = "0.1.0"
