"""controlnet."""
