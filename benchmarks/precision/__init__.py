"""Benchmarks of lightning_aigc.precision: time, memory and accuracy of a training step."""
