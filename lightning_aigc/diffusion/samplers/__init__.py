"""samplers."""
