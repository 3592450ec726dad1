"""Description of a cluster, and a model of the cost of gradient sync on it.

Nothing here imports torch: `lightning doctor` runs on hosts where torch does not start.
"""
