"""Observers of gradient sync: step reports, the stall watchdog, and the comparison of ranks."""
