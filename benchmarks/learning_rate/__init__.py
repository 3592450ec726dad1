"""Benchmark of AdaptiveLR."""
