"""Ways to reduce a vector over the ranks, one file a mode."""
