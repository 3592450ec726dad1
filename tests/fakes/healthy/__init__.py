"""Healthy trainings of many kinds, on which a health monitor must raise no alert."""

from fakes.healthy.trainings import KINDS, Kind, fit_healthy

__all__ = ["KINDS", "Kind", "fit_healthy"]
