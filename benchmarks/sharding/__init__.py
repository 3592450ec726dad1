"""Benchmarks of ZeRO."""
