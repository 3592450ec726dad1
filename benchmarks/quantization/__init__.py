"""Benchmarks of quantized frozen weights."""
