"""Imported before any test: `lightning_aigc` first, because it mends torchvision's import for everything after it."""

import lightning_aigc  # noqa: F401
