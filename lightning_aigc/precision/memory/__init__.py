"""Activation memory: what a block saves for backward, what it recomputes, and plans for a budget of bytes."""
