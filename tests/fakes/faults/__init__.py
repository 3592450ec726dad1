"""Faults for testing a health monitor: changes to a training, and the expected first alert."""

from fakes.faults.injection import Fault, alerts_of, first_alert, is_right
from fakes.faults.table import FAULTS, QUICK

__all__ = ["FAULTS", "QUICK", "Fault", "alerts_of", "first_alert", "is_right"]
