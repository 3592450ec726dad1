"""GradientProtection: name patterns of modules whose gradients are exempt from lossy options."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

COMPILED = "_orig_mod"
"""The name that torch.compile inserts into module names."""


class GradientProtection:
    """Decides by dotted name whether the gradient of a module or parameter stays dense and in full precision.

    A pattern is a glob over any run of a name's parts, and covers everything below: `vae.decoder` covers
    `model.vae.decoder.conv_in.weight`, `mid_block.attentions` covers `unet.mid_block.attentions.0.norm`, and so do
    `vae.decoder*` and `*mid_block.attentions*`. torch.compile's `_orig_mod` counts neither in names nor in patterns.

    Example:
        >>> GradientProtection(["vae.decoder"]).covers("model.vae.decoder.conv_in.weight")
        True
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        """Raises: ValueError for a bare string or an empty pattern."""
        if isinstance(patterns, str):
            raise ValueError(
                f"protect wants a list of name patterns, got the string {patterns!r}; write [{patterns!r}]"
            )
        if not all(isinstance(pattern, str) and pattern.strip() for pattern in patterns):
            raise ValueError(f"protect wants name patterns such as 'vae.decoder', got {list(patterns)}")
        self.patterns = tuple(patterns)

    def covers(self, name: str) -> bool:
        """Whether the module or parameter of this dotted name is protected."""
        return any(_matches(name, pattern) for pattern in self.patterns)

    def check(self, names: Iterable[str]) -> None:
        """Raise ValueError for a pattern that covers none of these names, probably a misspelling."""
        names = list(names)
        for pattern in self.patterns:
            if not any(_matches(name, pattern) for name in names):
                close = difflib.get_close_matches(
                    pattern, {".".join(n.split(".")[-2:]) for n in names}, n=3, cutoff=0.5
                )
                hint = f"; close names: {', '.join(close)}" if close else ""
                raise ValueError(f"protect pattern {pattern!r} covers no module{hint}")


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield as `model.named_modules()`, without the name `module` that a data-parallel wrapper inserts."""
    plain: dict[str, str] = {}
    wrappers: set[str] = set()
    for name, module in model.named_modules():
        outer, _, last = name.rpartition(".")
        above = plain.get(outer, "")
        plain[name] = above if outer in wrappers and name else f"{above}.{last}".removeprefix(".")
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            wrappers.add(name)
        yield plain[name], module


def _matches(name: str, pattern: str) -> bool:
    parts = [part for part in name.split(".") if part != COMPILED] or [""]
    pattern = pattern.replace(f"{COMPILED}.", "")
    starts = range(len(parts))
    return any(
        fnmatch.fnmatchcase(".".join(parts[start:end]), pattern)
        for start in starts
        for end in range(start + 1, len(parts) + 1)
    )
