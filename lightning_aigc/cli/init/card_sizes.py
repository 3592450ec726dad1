"""Cards that `lightning init` writes configs for: their memory in GiB, and speeds that it assumes for them."""

CARD_GIB = {"4gb": 4, "6gb": 6, "8gb": 8, "12gb": 12, "24gb": 24, "910b": 32}
"""Memory by `--card`; a 910B has this or twice as much."""
CARDS = tuple(CARD_GIB)
CARD_SPEEDS = {"8gb": (20, 11), "12gb": (25, 22), "24gb": (140, 22)}
"""Sustained TFLOP/s of training in 16 bits and GB/s from host memory, by card: assumed from data sheets (PCIe 4 with 8
lanes for 8 GB, 16 for the others), not measured."""
