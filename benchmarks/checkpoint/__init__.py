"""Benchmarks of snapshots: cost, throughput, and runs that are killed and resumed."""
