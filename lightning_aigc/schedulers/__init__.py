"""Learning rates that follow the gradients, for plain torch loops; callbacks.AdaptiveLR is the Lightning form."""

from lightning_aigc.schedulers.aigc_lr_scheduler import AIGCLRScheduler

__all__ = ["AIGCLRScheduler"]
