"""Choose the trained weights of a pipeline, by names of its networks or patterns of parameter names."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

from torch import nn

from lightning_aigc.diffusion.families import Components
from lightning_aigc.errors import ModelError

KEY = "model.init_args.trained_parts"


def check_patterns(patterns: Sequence[str]) -> None:
    """Raise ModelError for patterns of a wrong type, before weights are read."""
    if isinstance(patterns, str) or not patterns or not all(isinstance(p, str) and p.strip() for p in patterns):
        raise ModelError(f"{KEY} must be a list such as [unet], [transformer] or ['unet.*attn2*'], got {patterns!r}")


def train_parts(components: Components, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Let the parameters that a pattern covers take gradients; returns the networks that hold some, by name.

    A pattern covers a parameter if it matches its name (`unet.down_blocks.0.attentions.0...weight`) or the name of a
    module above it; `*` matches dots too. What can take no gradient stays frozen.

    Raises: ModelError for a pattern that covers nothing, or nothing that takes a gradient.
    """
    named = {
        f"{network}.{name}": parameter
        for network, module in components.named_networks().items()
        for name, parameter in module.named_parameters()
    }
    unread = components.family.unread_names(components)
    for pattern in patterns:
        covered = [name for name in named if covers(pattern, name)]
        if not covered:
            raise ModelError(f"{KEY}: {pattern!r} covers no weight of {components.source}{_hint(pattern, named)}")
        taken = [name for name in covered if name not in unread]
        if not taken:
            raise ModelError(
                f"{KEY}: {pattern!r} covers only weights whose output nothing reads, such as {covered[0]}, so they take"
                " no gradient; choose others"
            )
        for name in taken:
            named[name].requires_grad_(True)
    return {n: m for n, m in components.named_networks().items() if any(p.requires_grad for p in m.parameters())}


def covers(pattern: str, name: str) -> bool:
    """Whether a pattern matches a parameter's name, or that of a module above it."""
    pieces = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(pieces[:end]), pattern) for end in range(1, len(pieces) + 1))


def _hint(pattern: str, names: Sequence[str] | dict[str, nn.Parameter]) -> str:
    above = {".".join(name.split(".")[:end]) for name in names for end in (1, 2, 3, 4)}
    near = difflib.get_close_matches(pattern.strip("*"), sorted(above), n=2, cutoff=0.5)
    parts = ", ".join(sorted({name.partition(".")[0] for name in names}))
    return f"; close names: {', '.join(near)}" if near else f"; use {parts}, or a pattern such as *attn*"
