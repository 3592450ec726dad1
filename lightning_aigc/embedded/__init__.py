"""The tiny models and example images that ship with the package, as folders: `resolve("embedded:sd")`."""

from lightning_aigc.embedded.folders import PREFIX, embedded_names, resolve

__all__ = ["PREFIX", "embedded_names", "resolve"]
