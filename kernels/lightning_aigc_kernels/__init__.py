"""Fused backward kernels, usable with torch alone. The first ops land with FusedBackwardPrecision."""
