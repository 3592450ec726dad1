"""Benchmarks of ControlNet training."""
