"""Faults for a health monitor: what is done to a training, and what the first alert must say."""

from fakes.faults.injection import Fault, alerts_of, first_alert, is_right
from fakes.faults.table import FAULTS, QUICK

__all__ = ["FAULTS", "QUICK", "Fault", "alerts_of", "first_alert", "is_right"]
