"""Names of Lightning, from the one of its two packages that the program imported: `lightning` or `pytorch_lightning`.

Both hold the same code with separate classes, and the Trainer of either refuses the other's strategies and
accelerators. All modules of this package import Lightning's names from here, so that only one of the two is loaded: the
one that the program has imported when the first name is asked for, else `lightning`, where it is installed. A type
checker reads `lightning`.
"""

# ruff: noqa: F401
from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
    from lightning.fabric.strategies.model_parallel import _materialize_distributed_module  # type: ignore[attr-defined]
    from lightning.fabric.utilities.cloud_io import _load, get_filesystem
    from lightning.fabric.utilities.distributed import _destroy_dist_connection, _init_dist_connection
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.fabric.utilities.optimizer import _optimizers_to_device
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.fabric.utilities.types import _Stateful
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, cli
    from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        Checkpoint,
        ModelCheckpoint,
        OnExceptionCheckpoint,
        ProgressBar,
        RichProgressBar,
        StochasticWeightAveraging,
        Timer,
        TQDMProgressBar,
        WeightAveraging,
    )
    from lightning.pytorch.cli import (
        LightningArgumentParser,
        LightningCLI,
        LRSchedulerCallable,
        OptimizerCallable,
        SaveConfigCallback,
    )
    from lightning.pytorch.core.optimizer import _MockOptimizer
    from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
    from lightning.pytorch.loops.fetchers import _DataFetcherWrapper, _DataLoaderIterDataFetcher
    from lightning.pytorch.loops.loop import _Loop
    from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
    from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.strategies import (
        DDPStrategy,
        ModelParallelStrategy,
        ParallelStrategy,
        SingleDeviceStrategy,
        Strategy,
        StrategyRegistry,
    )
    from lightning.pytorch.trainer.connectors import accelerator_connector
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
    from lightning.pytorch.trainer.connectors.logger_connector.result import (
        _Metadata,
        _ResultCollection,
        _ResultMetric,
        _Sync,
    )
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_info, rank_zero_warn
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

LIGHTNING, PYTORCH_LIGHTNING = "lightning.pytorch", "pytorch_lightning"
FABRIC = {LIGHTNING: "lightning.fabric", PYTORCH_LIGHTNING: "lightning_fabric"}
"""Package of the modules that both Lightning and Fabric use, by the package with the Trainer."""
NAMES = {
    "fabric.plugins": "CheckpointIO",
    "fabric.plugins.environments.lightning": "LightningEnvironment",
    "fabric.plugins.environments.slurm": "SLURMEnvironment",
    "fabric.plugins.environments.torchelastic": "TorchElasticEnvironment",
    "fabric.plugins.precision.amp": "_optimizer_handles_unscaling",
    "fabric.strategies.model_parallel": "_materialize_distributed_module",
    "fabric.utilities.cloud_io": "_load get_filesystem",
    "fabric.utilities.distributed": "_destroy_dist_connection _init_dist_connection",
    "fabric.utilities.exceptions": "MisconfigurationException",
    "fabric.utilities.optimizer": "_optimizers_to_device",
    "fabric.utilities.seed": "reset_seed",
    "fabric.utilities.types": "_Stateful",
    "pytorch": "Callback LightningDataModule LightningModule Trainer cli",
    "pytorch.accelerators": "Accelerator AcceleratorRegistry",
    "pytorch.callbacks": (
        "BaseFinetuning Checkpoint ModelCheckpoint OnExceptionCheckpoint ProgressBar RichProgressBar "
        "StochasticWeightAveraging TQDMProgressBar Timer WeightAveraging"
    ),
    "pytorch.cli": "LRSchedulerCallable LightningArgumentParser LightningCLI OptimizerCallable SaveConfigCallback",
    "pytorch.core.optimizer": "_MockOptimizer",
    "pytorch.loggers": "Logger TensorBoardLogger WandbLogger",
    "pytorch.loops.fetchers": "_DataFetcherWrapper _DataLoaderIterDataFetcher",
    "pytorch.loops.loop": "_Loop",
    "pytorch.loops.optimization.automatic": "Closure ClosureResult",
    "pytorch.plugins.precision": "HalfPrecision MixedPrecision Precision",
    "pytorch.strategies": (
        "DDPStrategy ModelParallelStrategy ParallelStrategy SingleDeviceStrategy Strategy StrategyRegistry"
    ),
    "pytorch.trainer.connectors": "accelerator_connector",
    "pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch.trainer.connectors.checkpoint_connector": "_CheckpointConnector",
    "pytorch.trainer.connectors.logger_connector.result": "_Metadata _ResultCollection _ResultMetric _Sync",
    "pytorch.trainer.states": "TrainerFn",
    "pytorch.utilities": "GradClipAlgorithmType rank_zero_info rank_zero_warn",
    "pytorch.utilities.exceptions": "SIGTERMException",
    "pytorch.utilities.migration.utils": "_pl_migrate_checkpoint",
    "pytorch.utilities.model_helpers": "is_overridden",
    "pytorch.utilities.signature_utils": "is_param_in_hook_signature",
}
"""Names by module, as in the imports above; `tests/house` compares them."""
MODULE_OF = {name: module for module, names in NAMES.items() for name in names.split()}


@functools.cache
def package() -> str:
    """The package that this process uses, `LIGHTNING` or `PYTORCH_LIGHTNING`, decided at the first call."""
    loaded = [name for name in (LIGHTNING, PYTORCH_LIGHTNING) if sys.modules.get(name) is not None]
    if loaded:
        return loaded[0]
    return LIGHTNING if importlib.util.find_spec("lightning") is not None else PYTORCH_LIGHTNING


def version() -> str:
    """Version of that package."""
    return str(importlib.import_module(package()).__version__)


def rank_zero_logger() -> str:
    """Name of the logger that `rank_zero_info` writes to."""
    return f"{package()}.utilities.rank_zero"


def __getattr__(name: str) -> Any:
    """Import a name of `MODULE_OF`."""
    if name not in MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; add it to NAMES if it is Lightning's")
    part, _, inner = MODULE_OF[name].partition(".")
    root = package() if part == "pytorch" else FABRIC[package()]
    module = f"{root}.{inner}" if inner else root
    owner = importlib.import_module(module)
    value = getattr(owner, name) if hasattr(owner, name) else importlib.import_module(f"{module}.{name}")
    globals()[name] = value
    return value
