"""Benchmarks of gradient sync: time, bytes and loss of each mode."""
