"""Whether a training is healthy: GradientHealthMonitor for the Trainer, `check` for a plain loop."""

from lightning_aigc.callbacks.health.alerts.alerts import Alert
from lightning_aigc.callbacks.health.monitor import GradientHealthMonitor
from lightning_aigc.callbacks.health.standalone import check
from lightning_aigc.callbacks.health.thresholds import HealthThresholds

__all__ = ["Alert", "GradientHealthMonitor", "HealthThresholds", "check"]
