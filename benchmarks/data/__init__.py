"""Benchmarks of the data loaders."""
