"""Benchmarks of GradientHealthMonitor."""
