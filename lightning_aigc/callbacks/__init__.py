"""Lightning callbacks, one file each."""

from lightning_aigc.callbacks.adaptive_lr import AdaptiveLR
from lightning_aigc.callbacks.clip_convergence_guard import CLIPConvergenceGuard
from lightning_aigc.callbacks.control_guard import ControlGuard
from lightning_aigc.callbacks.edge_report import EdgeReport
from lightning_aigc.callbacks.exact_snapshot import ExactSnapshot
from lightning_aigc.callbacks.fine_tune import FineTuneCheck
from lightning_aigc.callbacks.health import GradientHealthMonitor
from lightning_aigc.callbacks.partial_window_scaling import PartialWindowScaling
from lightning_aigc.callbacks.run_progress import RunProgress
from lightning_aigc.callbacks.run_report.run_report import RunReport
from lightning_aigc.callbacks.sample_grid import SampleGrid
from lightning_aigc.callbacks.saving.save_result import SaveLoRA, SaveModel
from lightning_aigc.callbacks.stall_watch import StallWatch

__all__ = [
    "AdaptiveLR",
    "CLIPConvergenceGuard",
    "ControlGuard",
    "EdgeReport",
    "ExactSnapshot",
    "FineTuneCheck",
    "GradientHealthMonitor",
    "PartialWindowScaling",
    "RunProgress",
    "RunReport",
    "SampleGrid",
    "SaveLoRA",
    "SaveModel",
    "StallWatch",
]
