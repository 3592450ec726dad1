"""Healthy trainings of many kinds, none of them ours: what a health monitor must keep quiet about."""

from fakes.healthy.trainings import KINDS, Kind, fit_healthy

__all__ = ["KINDS", "Kind", "fit_healthy"]
