"""Frozen weights of a network's blocks wait in host memory, and are copied to the device when their block runs.

A block has one flat buffer of bytes on the host, pinned, and there are `slots` such buffers on the device. The next
block's bytes travel on a stream of their own while a block computes. Forward saves a block's inputs alone; backward
brings the weights again and runs the block again, so that no tensor that autograd keeps points into a slot. Trained and
small weights stay on the device, and nothing is copied back. Packed weights travel as their packed bytes.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_aigc.errors import ConfigError
from lightning_aigc.precision.context import first_run
from lightning_aigc_kernels.packed_weight import PackedWeight

ALIGNMENT = 256
"""Bytes at which each weight begins in a buffer."""
FEWEST_NUMBERS = 4096
"""Numbers of a weight below which it stays on the device."""
SLOTS = 2
EDGES = 4
"""Gradients of an input that a block hands over one by one; the sum of the others is the last."""
CALL = "_compiled_call_impl"
"""Attribute of a module that torch calls instead of its own call, where it is set; hooks and `forward` stay."""


class HostBlock:
    """A block's frozen weights in one buffer of host memory, and where each of them lies in it."""

    def __init__(self, block: nn.Module, *, pinned: bool) -> None:
        self.nbytes, pieces = 0, []
        found: list[tuple[nn.Module, str, nn.Parameter, list[tuple[int, Tensor]]]] = []
        for module in block.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.requires_grad or parameter.numel() < FEWEST_NUMBERS:
                    continue
                weight: Tensor = parameter
                parts = [weight.packed, weight.scales] if isinstance(weight, PackedWeight) else [weight.data]
                where = []
                for part in parts:
                    where.append((self.nbytes, part))
                    pieces.append((self.nbytes, part.contiguous().view(torch.uint8).flatten()))
                    self.nbytes += math.ceil(part.nbytes / ALIGNMENT) * ALIGNMENT
                found.append((module, name, parameter, where))
        self.host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
        for start, piece in pieces:
            self.host[start : start + piece.numel()] = piece
        self.places = [
            (module, name, parameter, [(start, part.shape, part.dtype) for start, part in where])
            for module, name, parameter, where in found
        ]
        self.waiting = [weight for _, _, weight in self._weights(self.host)]
        """The weights as the modules have them while the block does not run: views of host memory."""
        self.leave()
        for module in {module for module, *_ in self.places}:
            module._apply = functools.partial(_apply_to_others, module)  # type: ignore[method-assign]

    def enter(self, buffer: Tensor) -> None:
        """Let the modules read their weights in this buffer."""
        for module, name, weight in self._weights(buffer):
            module._parameters[name] = weight

    def leave(self) -> None:
        """Let the modules have their weights in host memory."""
        for (module, name, *_), weight in zip(self.places, self.waiting, strict=True):
            module._parameters[name] = weight

    def _weights(self, buffer: Tensor) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        for module, name, like, where in self.places:
            views = [
                buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
                for start, shape, dtype in where
            ]
            weight: Tensor = like
            made = weight.with_bytes(views[0], views[1]) if isinstance(weight, PackedWeight) else views[0]
            yield module, name, nn.Parameter(made, requires_grad=False)


def _apply_to_others(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`module._apply` without the weights that stream, which `to` leaves where they are."""
    streamed = {
        name: p for name, p in module._parameters.items()
        if p is not None and not p.requires_grad and p.numel() >= FEWEST_NUMBERS
    }  # fmt: skip
    for name in streamed:
        del module._parameters[name]
    try:
        result: nn.Module = type(module)._apply(module, function, recurse)
        return result
    finally:
        for name, parameter in streamed.items():
            module._parameters[name] = parameter


class Link:
    """Copies to a device on a stream of their own; copies to the CPU are done at once."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.sent_bytes = device, 0
        self.backend: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.stream = None if self.backend is None else self.backend.Stream(device)

    def send(self, slot: Tensor, host: Tensor) -> None:
        """Begin to copy once what runs now has read the slot's former bytes."""
        self.sent_bytes += host.numel()
        with contextlib.nullcontext() if self.backend is None else self.backend.stream(self.stream):
            if self.stream is not None:
                self.stream.wait_stream(self._current)
            # Not by the slot itself, whose version autograd compares.
            slot.data[: host.numel()].copy_(host, non_blocking=True)

    def wait(self) -> None:
        """Let what is computed next wait for all copies that were begun; the host does not wait."""
        if self.stream is not None:
            self._current.wait_stream(self.stream)

    def before_send(self) -> None:
        """Remember the stream that computes, for `send`."""
        if self.backend is not None:
            self._current = self.backend.current_stream(self.device)


class StreamedBlocks:
    """Streams some of a network's blocks.

    Args:
        blocks: The blocks in the order in which they run.
        device_share: Share of the blocks that stays on the device, evenly between those that stream, so that each copy
            has resident blocks to hide behind.
        device: Device that computes.
        has_skips: Whether other modules read a block's inputs too, as in a U-Net; backward then adds the gradient of
            each use of an input in the order of a resident block.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], device_share: float, device: torch.device, *, has_skips: bool = False
    ) -> None:
        self.has_skips = has_skips
        count = len(blocks) - round(device_share * len(blocks))
        self.chosen = [blocks[(2 * number + 1) * len(blocks) // (2 * count)] for number in range(count)]
        self.hosts = [HostBlock(block, pinned=device.type != "cpu") for block in self.chosen]
        self.link = Link(device)
        largest = max((host.nbytes for host in self.hosts), default=0)
        self.free = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(min(SLOTS, count))]
        self.slots = len(self.free)
        self.coming: dict[int, Tensor] = {}
        """Slots by number of the block whose bytes they hold, or are about to."""
        for number, block in enumerate(self.chosen):
            setattr(block, CALL, functools.partial(self._call, number, block))

    @property
    def host_bytes(self) -> int:
        """Bytes of all streamed blocks."""
        return sum(host.nbytes for host in self.hosts)

    @property
    def step_bytes(self) -> int:
        """Bytes that a training step copies: two passes, without the blocks that stay from forward to backward."""
        return 2 * self.host_bytes - sum(host.nbytes for host in self.hosts[len(self.hosts) - self.slots :])

    def summary(self) -> str:
        """One line with the blocks, their bytes and the bytes of a step."""
        gib = 2**30
        return (
            f"{len(self.chosen)} blocks with {self.host_bytes / gib:.2f} GiB wait in host memory, {self.slots} at a"
            f" time on the device; a step copies {self.step_bytes / gib:.2f} GiB"
        )

    def hold(self, number: int, towards: int) -> None:
        """Bring a block's weights to the device, and begin with the next one's in this direction."""
        self.link.before_send()
        self._begin(number)
        while number not in self.coming:  # the slots hold blocks that nobody asked for
            self.free.append(self.coming.pop(max(self.coming, key=lambda other: abs(other - number))))
            self._begin(number)
        self.link.wait()
        self._begin(number + towards)
        self.hosts[number].enter(self.coming[number])

    def release(self, number: int, *, keep: bool) -> None:
        """Give the block's slot away, or keep its bytes for backward."""
        self.hosts[number].leave()
        if not keep:
            self.free.append(self.coming.pop(number))

    def _begin(self, number: int) -> None:
        if 0 <= number < len(self.hosts) and number not in self.coming and self.free:
            slot = self.free.pop()
            self.coming[number] = slot
            self.link.send(slot, self.hosts[number].host)

    def _call(self, number: int, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        trained = [p for p in block.parameters() if p.requires_grad]
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (*leaves, *trained)):
            run = _BlockRun(self, number, block, tree, len(leaves))
            outputs = _Streamed.apply(run, *leaves, *trained, *((EDGES - 1) * leaves if self.has_skips else ()))
            return tree_unflatten(list(outputs), run.output_tree)
        self.hold(number, +1)
        try:
            return block._call_impl(*args, **kwargs)
        finally:
            self.release(number, keep=False)


class _BlockRun:
    """One call of a streamed block."""

    def __init__(self, streamed: StreamedBlocks, number: int, block: nn.Module, tree: Any, inputs: int) -> None:
        self.streamed, self.number, self.block, self.tree, self.inputs = streamed, number, block, tree, inputs
        self.output_tree: Any = None
        self.others: list[Any] = []
        """The arguments that are no tensors, and None for the others."""
        device = streamed.link.device.type
        self.autocast: AbstractContextManager[object] = contextlib.nullcontext()
        if torch.is_autocast_enabled(device):
            caches = torch.is_autocast_cache_enabled()
            self.autocast = torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=caches)

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        args, kwargs = tree_unflatten(list(inputs), self.tree)
        outputs, self.output_tree = tree_flatten(self.block._call_impl(*args, **kwargs))
        return list(outputs)


class _Streamed(torch.autograd.Function):
    """Runs a block without a graph, and in backward once more with one."""

    @staticmethod
    def forward(ctx: Any, run: _BlockRun, *given: Any) -> tuple[Any, ...]:
        streamed, number = run.streamed, run.number
        own = given[: len(given) - (EDGES - 1) * run.inputs] if streamed.has_skips else given
        run.others = [None if isinstance(x, Tensor) else x for x in own]
        ctx.run, ctx.is_tensor = run, [isinstance(x, Tensor) for x in own]
        ctx.save_for_backward(*(x for x in own if isinstance(x, Tensor)))
        streamed.hold(number, +1)
        try:
            with first_run():
                return tuple(run(given[: run.inputs]))
        finally:
            # The last blocks of forward are the first of backward.
            streamed.release(number, keep=number >= len(streamed.hosts) - streamed.slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        run, saved = ctx.run, iter(ctx.saved_tensors)
        given = [next(saved) if is_one else other for is_one, other in zip(ctx.is_tensor, run.others, strict=True)]
        inputs = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in given]
        inputs[run.inputs :] = given[run.inputs :]  # the module computes with its own trained weights
        uses = _Uses(inputs[: run.inputs]) if run.streamed.has_skips else None
        run.streamed.hold(run.number, -1)
        try:
            with torch.enable_grad(), run.autocast, uses or contextlib.nullcontext():
                outputs = run(inputs[: run.inputs])
            pairs = [
                (output, gradient)
                for output, gradient in zip(outputs, gradients, strict=True)
                if isinstance(output, Tensor) and output.requires_grad and gradient is not None
            ]
            wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
            aliases = [] if uses is None else [alias for _, alias in uses.made]
            found = torch.autograd.grad(
                [o for o, _ in pairs], [*wanted, *aliases], [g for _, g in pairs], allow_unused=True
            )
            del outputs, pairs
        finally:
            run.streamed.release(run.number, keep=False)
        whole = iter(found)
        results = [next(whole) if isinstance(x, Tensor) and x.requires_grad else None for x in inputs]
        if uses is None:
            return None, *results
        first, *others = uses.edges(results[: run.inputs], found[len(wanted) :])
        return None, *first, *results[run.inputs :], *itertools.chain.from_iterable(others)


class _Uses(TorchFunctionMode):
    """Gives each use of a block's inputs a tensor of its own, and so a gradient of its own."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self.inputs = inputs
        self.places = {id(x): place for place, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad}
        self.made: list[tuple[int, Tensor]] = []
        """The place of the input and the tensor of each use, in the order in which a resident block's backward comes to
        them: the last call first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of_call: list[tuple[int, Tensor]] = []

        def alias(x: Any) -> Any:
            if type(x) in (list, tuple):
                return type(x)(map(alias, x))
            place = self.places.get(id(x))
            if place is None:
                return x
            of_call.append((place, x.detach().requires_grad_()))
            return of_call[-1][1]

        args, kwargs = alias(tuple(args)), {name: alias(x) for name, x in (kwargs or {}).items()}
        result = func(*args, **kwargs)
        for place, made in of_call:
            if result is made:  # a cast to the same dtype: what it is used for is a use of the input
                return self.inputs[place]
        self.made[:0] = of_call
        return result

    def edges(self, rest: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
        """The gradients of the inputs by edge, the last use first, and at the end the uses that torch does not show."""
        of_uses: list[list[Tensor]] = [[] for _ in rest]
        for (place, _), gradient in zip(self.made, found, strict=True):
            if gradient is not None:
                of_uses[place].append(gradient)
        for gradients, other in zip(of_uses, rest, strict=True):
            if other is not None:
                gradients.append(other)
            if len(gradients) > EDGES:
                gradients[EDGES - 1 :] = [sum(gradients[EDGES:], start=gradients[EDGES - 1])]
        return [[each[edge] if edge < len(each) else None for each in of_uses] for edge in range(EDGES)]


def has_skips(network: nn.Module) -> bool:
    """Whether a network is a U-Net, where other modules read a block's inputs too."""
    return hasattr(network, "down_blocks")


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The blocks of a diffusion transformer or a U-Net in the order in which they run.

    Raises: ConfigError for a network without a list of blocks.
    """
    if has_skips(network):
        return [block for block in _blocks_of_unet(network) if sum(p.numel() for p in block.parameters())]
    lists = [child for _, child in network.named_children() if isinstance(child, nn.ModuleList)]
    found = [block for each in lists for block in each if sum(p.numel() for p in block.parameters()) >= FEWEST_NUMBERS]
    if len(found) < 2:
        raise ConfigError(
            f"model.init_args.base_location: {type(network).__name__} has no list of blocks to stream; leave it unset"
        )
    return found


def _blocks_of_unet(unet: Any) -> Iterator[nn.Module]:
    """Yield ResNet blocks, and transformers by block; one of a single block is a unit, as the levels recompute it."""
    middle = [] if unet.mid_block is None else [unet.mid_block]
    for part in (*unet.down_blocks, *middle, *unet.up_blocks):
        resnets, attentions = list(part.resnets), list(getattr(part, "attentions", ()))
        if part in middle:
            yield resnets.pop(0)
            pairs = itertools.zip_longest(attentions, resnets)
        else:
            pairs = itertools.zip_longest(resnets, attentions)
        for module in itertools.chain.from_iterable(pairs):
            inner = getattr(module, "transformer_blocks", ())
            if module is not None:
                yield from inner if len(inner) > 1 else [module]


def fitting_share(blocks: Sequence[nn.Module], free_bytes: float, other_bytes: float) -> float:
    """The share of the blocks that fits into a device's free memory, with the slots, next to `other_bytes`."""
    sizes = [sum(_stored_bytes(p) for p in block.parameters() if not p.requires_grad) for block in blocks]
    room = free_bytes - other_bytes
    return 1.0 if room >= sum(sizes) else max(0.0, (room - SLOTS * max(sizes)) / sum(sizes))


def _stored_bytes(weight: Tensor) -> int:
    return weight.stored_bytes if isinstance(weight, PackedWeight) else weight.nbytes
