"""Cards that `lightning init` writes configs for, by their memory in GiB."""

CARD_GIB = {"4gb": 4, "6gb": 6, "8gb": 8, "12gb": 12, "24gb": 24, "910b": 32}
"""Memory by `--card`; a 910B has this or twice as much."""
CARDS = tuple(CARD_GIB)
