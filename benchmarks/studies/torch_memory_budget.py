"""torch.compile's `activation_memory_budget` on the U-Net of memory_budget.py: kept bytes and FLOPs of its two graphs.

    python -m benchmarks.studies.torch_memory_budget [--pixels 256] [--width 0.5] [--budgets 0 0.05 ... 1]
        [--output FILE]

AOTAutograd traces forward and backward once, on fake tensors; its partitioner then splits that graph at each budget, as
it does for inductor. Kept bytes are the tensors that the forward graph passes to the backward graph, without
parameters, inputs and views of them. FLOPs are counted in both graphs as in memory_budget.py. Prints one JSON object
per line.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx import Graph, GraphModule, Node
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common.rows import keep_row
from benchmarks.common.unet_variants import build
from benchmarks.precision.memory_budget import counted, with_fakes
from benchmarks.precision.repeated_flops import OF_THE_CPU

VIEWS = (
    "t",
    "transpose",
    "view",
    "_unsafe_view",
    "permute",
    "expand",
    "slice",
    "select",
    "unsqueeze",
    "detach",
    "alias",
)


def is_view_of_an_input(node: Node) -> bool:
    """Whether a saved tensor takes no memory: a parameter, an input, or a view of one."""
    while node.op == "call_function" and getattr(node.target, "_opname", "") in VIEWS:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def saved_bytes(forward: GraphModule, outputs: int) -> int:
    """Bytes that the forward graph passes to the backward graph."""
    returned: Any = forward.graph.output_node().args[0]
    saved = {node for node in returned[outputs:] if isinstance(node, Node)}
    values = [node.meta["val"] for node in saved if not is_view_of_an_input(node)]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def operations(graph: GraphModule) -> int:
    """FLOPs of a graph, run on the fake tensors of its placeholders."""
    given = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with FlopCounterMode(display=False, custom_mapping=OF_THE_CPU) as counter:
        graph(*given)
    return int(counter.get_total_flops())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["sd15", "sdxl"], default="sd15")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--lora", type=int, default=64)
    parser.add_argument("--pixels", type=int, default=256)
    parser.add_argument("--width", type=float, default=0.5)
    parser.add_argument(
        "--budgets", type=float, nargs="+", default=[0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1]
    )
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()

    def report(budget: float, kept: float, flops: float, native: tuple[float, float], seconds: float) -> None:
        row = {
            "benchmark": "memory_budget",
            "torch": torch.__version__,
            **{name: getattr(given, name) for name in ("model", "batch", "lora", "pixels", "width")},
            "variant": "torch",
            "kept_mib": round(kept, 2),
            "kept_ratio": round(kept / native[0], 4),
            "tflops": round(flops / 1e12, 5),
            "flops_ratio": round(flops / native[1], 4),
            "budget": budget,
            "planned_s": round(seconds, 1),
        }
        keep_row(row, given.output)

    unet = build(given.model, given.lora, torch.bfloat16, device="meta", width=given.width)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with fakes:
        unet, inputs = with_fakes(unet, given)
        native = counted(unet, inputs)

    def partition(joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        for budget in given.budgets:
            started = time.perf_counter()
            graph: Graph = copy.deepcopy(joint.graph)
            with config.patch(activation_memory_budget=budget):
                split = min_cut_rematerialization_partition(
                    GraphModule(joint, graph), joint_inputs, num_fwd_outputs=num_fwd_outputs, **options
                )
            seconds = time.perf_counter() - started
            with fakes:
                flops = sum(operations(part) for part in split)
            report(budget, saved_bytes(split[0], num_fwd_outputs) / 2**20, flops, native, seconds)
        return split

    def loss(parameters: list[Tensor], tensors: list[Tensor]) -> Tensor:
        named = dict(zip(names, parameters, strict=True))
        output = functional_call(unet, named, (), dict(zip(inputs, tensors, strict=True)))
        return output.sample.float().square().mean()  # type: ignore[no-any-return]

    names = [name for name, _ in unet.named_parameters()]
    compiled = aot_function(loss, fw_compiler=lambda graph, _: graph, partition_fn=partition)
    with fakes:
        compiled(list(unet.parameters()), list(inputs.values()))


if __name__ == "__main__":
    main()
