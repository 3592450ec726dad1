"""A state goes through JSON and tensors and comes back as it was."""

from __future__ import annotations

import json
import struct
from collections import OrderedDict, namedtuple
from enum import IntEnum
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fakes.runs.snapshot_states import same, small_state
from lightning_aigc.checkpoint import pack, unpack
from lightning_aigc.checkpoint.files.safetensors_file import DTYPES
from lightning_aigc.errors import SnapshotError


def through_json(state: Any) -> Any:
    tensors, skeleton = pack(state)
    return unpack(tensors, json.loads(json.dumps(skeleton)))


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text()
KEYS = st.text() | st.integers() | st.sampled_from(["$tensor", "$items", "__metadata__", "a.b"])
STATES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(STATES)
def test_whatever_json_cannot_say_comes_back_too(state: Any) -> None:
    assert same(through_json(state), state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 4)], ids=str)
def test_tensors_keep_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(24)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    assert same(through_json({"t": tensor}), {"t": tensor})


def test_numbers_keep_every_bit() -> None:
    strange = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]  # a NaN with a sign and a payload
    state = [2**53 + 1, -(2**64), 10**5000, -0.0, 5e-324, strange, float("-inf"), True, 1, 1.0]
    assert same(through_json(state), state)


def test_names_that_collide_stay_apart() -> None:
    one, two, three = torch.tensor(1), torch.tensor(2), torch.tensor(3)
    state = {"a.b": one, "a": {"b": two, 1: three, "1": one}, "__metadata__": two, "\ud800": three, "": one}
    assert same(through_json(state), state)


def test_a_state_may_be_one_tensor() -> None:
    assert same(through_json(torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(3, 5).T,
        torch.randn(3, 5)[:, ::2].T,
        torch.randn(4, 6).permute(1, 0)[1:],
    ],
    ids=["channels_last", "transposed", "strided", "part"],
)
def test_tensors_come_back_as_they_lay(tensor: torch.Tensor) -> None:
    (back,) = through_json([tensor])
    assert torch.equal(back, tensor) and back.stride() == torch.empty_like(tensor).stride()


def test_tensors_that_share_memory_come_back_equal() -> None:
    whole = torch.arange(6.0)
    back = through_json({"whole": whole, "tied": whole, "part": whole[2:4], "expanded": torch.ones(1).expand(3)})
    assert torch.equal(back["tied"], whole) and torch.equal(back["part"], whole[2:4])
    assert torch.equal(back["expanded"], torch.ones(3))


def test_parameters_and_ordered_dicts_come_back_plain() -> None:
    back = through_json(nn.Linear(2, 3).state_dict() | OrderedDict(p=nn.Parameter(torch.ones(2))))
    assert type(back) is dict and type(back["p"]) is torch.Tensor and not back["p"].requires_grad


class Stage(IntEnum):
    FIRST = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": [1, {"b": {1, 2}}]}, "a.1.b is a builtins.set"),
        ({"path": PurePosixPath("x")}, "path is a pathlib.PurePosixPath"),
        ({"loss": np.float64(1.0)}, "loss is a numpy.float64"),
        ({"size": torch.Size([1])}, "size is a torch.Size"),
        ({"point": Point(1, 2)}, "point is a test_tree.Point"),
        ({"stage": Stage.FIRST}, "stage is a test_tree.Stage"),
        ({"a": {None: 1}}, "a has the key None of type NoneType"),
        ({"a": {True: 1}}, "a has the key True of type bool"),
        (object(), "the state is a builtins.object"),
        ({"s": torch.ones(2).to_sparse()}, "s is a tensor of torch.float32, torch.sparse_coo"),
        ({"m": torch.ones(2, device="meta")}, "m is a tensor of torch.float32, torch.strided, on meta"),
        ({"z": torch.ones(2, dtype=torch.complex128)}, "z is a tensor of torch.complex128"),
    ],
)
def test_what_cannot_be_held_is_named_with_its_path(state: Any, words: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        pack(state)
    assert words.replace("test_tree", __name__) in str(caught.value)


@pytest.mark.parametrize(
    "skeleton", [{"$tensor": "gone"}, {"$other": 1}, {"$int": "x"}, {"$float": "00"}, {"$items": [1]}]
)
def test_a_skeleton_that_does_not_fit_is_refused(skeleton: Any) -> None:
    with pytest.raises(SnapshotError, match="the tree does not fit its tensors"):
        unpack({}, skeleton)


def test_packing_copies_nothing() -> None:
    state = small_state()
    tensors, _ = pack(state)
    assert tensors["weights.down.lora_A"].data_ptr() == state["weights"]["down.lora_A"].data_ptr()
