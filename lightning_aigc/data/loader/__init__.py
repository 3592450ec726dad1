"""Datasets, buckets, samplers and the held-out images."""
