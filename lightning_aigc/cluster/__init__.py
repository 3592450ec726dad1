"""What a cluster looks like, and what gradient sync costs on it.

Nothing here imports torch: `lightning doctor` runs on hosts where torch does not start.
"""
