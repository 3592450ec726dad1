"""The table of torch.npu's names: our sources use no other, and the fake npu serves them all."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest

from fakes.npu.npu_api import CALLS, EVENT_CALLS, STREAM_CALLS
from fakes.npu.npu_module import NpuModule
from fakes.npu.npu_streams import NpuEvent, NpuStream

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for top in ("lightning_aigc", "kernels/lightning_aigc_kernels") for path in sorted((ROOT / top).rglob("*.py"))
]
MAKES_A_MODULE = ("torch.npu", "find_npu", "accelerator_module", "get_device_module", "getattr(torch, 'npu'")
"""An assignment of one of these gives a variable that is `torch.npu`, or a part of it."""


def names_used(source: str) -> Iterator[str]:
    """Dotted names behind `torch.npu` in Python source, also by way of a variable; their first part at least."""
    tree = ast.parse(source)
    modules = {"torch.npu", "torch_npu.npu"}
    for node in ast.walk(tree):
        value = ast.unparse(node.value) if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value else ""
        if any(text in value for text in MAKES_A_MODULE):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            modules |= {ast.unparse(target) for target in targets if isinstance(target, (ast.Name, ast.Attribute))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (ast.unparse(node.value) in modules or is_a_module(node.value)):
            yield node.attr


def is_a_module(node: ast.AST) -> bool:
    """Whether this is a call that returns `torch.npu`."""
    return isinstance(node, ast.Call) and any(text in ast.unparse(node) for text in MAKES_A_MODULE)


def test_our_sources_use_no_name_of_torch_npu_that_the_table_lacks() -> None:
    used = {name: path.name for path in SOURCES for name in names_used(path.read_text(encoding="utf-8"))}
    in_table = {name.partition(".")[0] for name in CALLS} | {"GradScaler"} | STREAM_CALLS.keys() | EVENT_CALLS.keys()
    assert {name: file for name, file in used.items() if name not in in_table} == {}
    assert {"set_device", "memory_stats", "max_memory_allocated", "get_rng_state"} <= used.keys()
    assert {"Stream", "stream", "current_stream", "synchronize"} <= used.keys()  # of gradient sync's runners and probe


def test_a_name_is_seen_however_the_module_was_reached() -> None:
    source = "torch.npu.a()\nm = accelerator_module(d)\nm.b(d)\nn: Any = find_npu()\nprint(n.c)\nother.d()\n"
    source += "self.m: Any = torch.get_device_module(d)\nself.m.e(d)\nself.o.f()\ntorch.get_device_module(d.x).g()\n"
    assert sorted(names_used(source)) == ["a", "b", "c", "e", "g"]


@pytest.mark.parametrize("name", CALLS)
def test_the_fake_npu_takes_the_same_arguments(name: str) -> None:
    inspect.signature(attrgetter(name)(NpuModule("torch.npu"))).bind(*CALLS[name])


@pytest.mark.parametrize(("kind", "calls"), [(NpuStream, STREAM_CALLS), (NpuEvent, EVENT_CALLS)])
def test_the_fakes_streams_and_events_take_the_same_arguments(kind: type, calls: dict[str, tuple[str, ...]]) -> None:
    for name, arguments in calls.items():
        inspect.signature(getattr(kind, name)).bind("self", *arguments)
