"""Benchmarks of complete trainings and commands, compared with other stacks."""
