"""Cached latents and text embeddings."""
