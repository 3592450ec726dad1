"""Groups of parameters that are gathered together: one for each block, and one for the rest of the modules above.

Source of the block classes: diffusers and transformers name them in `_no_split_modules`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lightning_aigc.errors import ConfigError
from lightning_aigc.sharding.local_parts import original_class

BLOCKS = frozenset({"ResnetBlock2D", "BasicTransformerBlock"})
"""Block classes of a model that does not name any."""
READ_INSIDE = frozenset(
    (
        "ResnetBlock2D", "Transformer2DModel", "BasicTransformerBlock", "Attention", "FeedForward",
        "MultiheadAttention", "TransformerEncoderLayer",
    )
)  # fmt: skip
"""Classes whose forward, fused or torch's own, reads the parameters of the modules inside; these get no group."""
LARGE = 1_000_000
"""Trained values of a module that gets its own group."""
SMALLEST_SHARE = 64
"""Divisor of a small model's trained values, for the size that gets a group; other values stay gathered in a step."""


@dataclass(frozen=True)
class Group:
    """Module whose trained parameters, without those of groups inside it, are gathered together."""

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]
    """Parameters with their names from the root."""
    is_block: bool

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for _, parameter in self.parameters)


def make_groups(root: nn.Module, joined: Collection[nn.Module] = ()) -> list[Group]:
    """Divide the trained parameters of a model into groups, innermost modules first, the root's last.

    Args: joined: modules that become one group each, with all modules inside.
    Raises: ConfigError where a parameter is used by modules of two groups.
    """
    names = {module: name for name, module in root.named_modules()}
    large = min(LARGE, sum(p.numel() for p in root.parameters() if p.requires_grad) // SMALLEST_SHARE)
    blocks = _innermost_blocks(root)
    inside_readers = {
        part
        for module in names
        if module in blocks or original_class(module).__name__ in READ_INSIDE
        for part in set(module.modules()) - {module}
    }
    parts = set(called_parts(root))
    inside_joined = {part for module in joined for part in module.modules()} - set(joined)
    taken: dict[nn.Parameter, str] = {}
    groups = []
    for module, name in reversed(names.items()):  # what is inside a module comes before it
        if module in inside_joined:
            continue
        parameters = [
            (f"{names[part]}.{key}".lstrip("."), parameter)
            for part in module.modules()
            for key, parameter in part._parameters.items()
            if parameter is not None and parameter.requires_grad and taken.get(parameter) is None
        ]
        parameters = list({parameter: (key, parameter) for key, parameter in reversed(parameters)}.values())[::-1]
        is_block = module in blocks
        is_large = module not in inside_readers and sum(p.numel() for _, p in parameters) >= large
        is_group = is_block or is_large or module in parts or module in joined
        if parameters and (module is root or (_has_forward(module) and is_group)):
            groups.append(Group(name, module, tuple(parameters), is_block))
            taken |= {parameter: key for key, parameter in parameters}
    _refuse_shared(names, groups)
    return groups


def modules_to_join(root: nn.Module, groups: Collection[Group], most_bytes: int) -> list[nn.Module]:
    """Return the outermost modules with several groups whose trained parameters have at most `most_bytes`."""
    of_groups = {group.module for group in groups}
    joined: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in root.modules():  # what is inside a module comes after it
        if module is root or module in inside or not _has_forward(module):
            continue
        size = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        if size <= most_bytes and sum(part in of_groups for part in module.modules()) > 1:
            joined.append(module)
            inside.update(module.modules())
    return joined


def called_parts(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are called from outside, by a step or by sampling; for a container its children."""
    for child in root.children():
        if _has_forward(child):
            yield child
        else:
            yield from called_parts(child)


def block_count(root: nn.Module, groups: Collection[Group]) -> int:
    """Return the number of blocks of the known classes, else of modules with trained parameters of their own."""
    blocks = sum(group.is_block for group in groups)
    return blocks or sum(
        any(p is not None and p.requires_grad for p in module._parameters.values()) for module in root.modules()
    )


def split_by_dtype(group: Group) -> list[tuple[list[nn.Module], torch.dtype]]:
    """Return the modules that need their own group because a group has one dtype, such as float32 LoRA layers in a
    bfloat16 block. Empty if all parameters of the group have one dtype."""
    sizes: dict[torch.dtype, int] = {}
    for _, parameter in group.parameters:
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    most = max(sizes, key=lambda dtype: sizes[dtype])
    inside = {parameter for _, parameter in group.parameters}
    apart = []
    for dtype in sizes.keys() - {most}:
        owners = [
            module
            for module in group.module.modules()
            if any(p in inside and p.dtype == dtype for p in module._parameters.values() if p is not None)
        ]
        for owner in owners:
            if {p.dtype for p in owner._parameters.values() if p in inside} != {dtype}:
                raise ConfigError(
                    f"{group.name or 'the model'} has a {original_class(owner).__name__} whose own parameters are of "
                    "several dtypes, and torch shards a module in one: give it one dtype, or use strategy zero_1"
                )
        apart.append((owners, dtype))
    return apart


def _innermost_blocks(root: nn.Module) -> set[nn.Module]:
    """Return the modules of the classes that the models inside name as blocks, or of the known classes.

    Outer blocks are excluded: their own parameters would stay gathered while every inner block runs.
    """
    named = [own for module in root.modules() if (own := getattr(module, "_no_split_modules", None))]
    classes = frozenset(name for names in named for name in names) or BLOCKS
    of_classes = {module for module in root.modules() if original_class(module).__name__ in classes}
    return {module for module in of_classes if not (set(module.modules()) - {module}) & of_classes}


def _has_forward(module: nn.Module) -> bool:
    """Whether the module has a forward; a ModuleList has none."""
    return original_class(module).forward is not nn.Module.forward  # type: ignore[attr-defined]


def _refuse_shared(names: dict[nn.Module, str], groups: list[Group]) -> None:
    group_of: dict[nn.Module, str] = {}
    for group in groups:  # innermost first
        for module in group.module.modules():
            group_of.setdefault(module, group.name)
    users: dict[nn.Parameter, tuple[str, str | None]] = {}
    for module, name in names.items():
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            here = (f"{name}.{key}".lstrip("."), group_of.get(module))
            first = users.setdefault(parameter, here)
            if first[1] != here[1]:
                raise ConfigError(
                    f"{first[0]} and {here[0]} are one weight in two blocks, and stages 2 and 3 gather blocks one by "
                    "one; use strategy zero_1, which keeps full weights on each rank, or give each its own weight"
                )
