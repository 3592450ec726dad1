"""Sharded training without Lightning: groups of parameters, stored bytes, local parts, and their norms."""
