"""Fused and checkpointed forwards of model blocks, and the rules that say which class gets which."""
