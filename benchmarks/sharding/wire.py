"""Bytes of a ZeRO step on a network interface, counted by the kernel, and as `lightning plan` predicts them.

Two network namespaces joined by a link simulate two hosts; both are removed at the end. Counted are the bytes that the
first host's interface sends from one step's start to the next, mean of the steps after warm-up, per rank of the host.
With one rank per host all traffic of DDP and the stages crosses the link. With two, `between_nodes` shards inside a
host and sends gradients across in few bits; with every parameter protected it sends them in float32. Needs root and
iproute2.

    OMP_NUM_THREADS=1 python -m benchmarks.sharding.wire [--rate 10gbit] [--steps 6] [--output FILE]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.common.rows import keep_row
from benchmarks.sharding.zero import STAGES, Noise, loss_of, unet
from fakes.processes.network import DEVICE, bytes_sent, enter, two_hosts
from lightning_aigc.gradient_sync.transport import process_groups
from lightning_aigc.sharding.local_parts import local_part
from lightning_aigc.sharding.stored_bytes import sent_bytes
from lightning_aigc.strategies import ZeROStrategy

WARM_UP = 2
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (1, {}),
    "zero_1": (1, {"stage": 1}),
    "zero_2": (1, {"stage": 2}),
    "zero_3": (1, {"stage": 3}),
    "between_nodes float32": (2, {"stage": 3, "between_nodes": "int3", "protect": ["*"]}),
    "between_nodes int8": (2, {"stage": 3, "between_nodes": "int8"}),
    "between_nodes int3": (2, {"stage": 3, "between_nodes": "int3"}),
    "between_nodes int3, middle protected": (
        2,
        {"stage": 3, "between_nodes": "int3", "protect": ["*mid_block.attentions*"]},
    ),
}
"""By name: ranks per host, and the strategy's arguments; `protect: ["*"]` sends every gradient in float32."""


class Counted(LightningModule):
    """The small U-Net, with the bytes that this host had sent at the start of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = unet()
        self.sent: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        dist.barrier()  # all traffic of the previous step has been sent
        self.sent.append(bytes_sent())
        return loss_of(self.unet, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def work(case: str, steps: int, output: str) -> None:
    """Run one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    host = os.environ["HOST"]
    enter(host)
    per_host, arguments = CASES[case]
    vars(process_groups)["node_key"] = lambda: host
    make: Any = ZeROStrategy  # creates an object of the stage's class
    strategy: Any = make(**arguments) if arguments else "ddp"
    module = Counted()
    shapes = [tuple(p.shape) for p in module.parameters()]
    trainer = Trainer(
        accelerator="cpu", devices=2 * per_host, strategy=strategy, max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Noise(), batch_size=4))
    parts = [local_part(p.detach()).clone() for p in module.parameters()]
    counted = sum(strategy.sync.sent_bytes.values()) if "between_nodes" in arguments else None
    torch.save({"sent": module.sent, "shapes": shapes, "parts": parts, "counted": counted}, output)


def run_case(case: str, steps: int, hosts: tuple[str, str], address: str) -> list[dict[str, Any]]:
    """Run the ranks of a case, the first half of them on the first host."""
    ranks = 2 * CASES[case][0]
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w", encoding="utf-8") as quiet:
        where = {"MASTER_ADDR": address, "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
        processes = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "NODE_RANK": "0"}
            environment = {**os.environ, **where, **own, "HOST": hosts[rank // (ranks // 2)]}
            command = [
                sys.executable,
                "-m",
                "benchmarks.sharding.wire",
                "--rank",
                case,
                "--steps",
                str(steps),
                "--output",
                f"{folder}/{rank}",
            ]
            processes.append(subprocess.Popen(command, env=environment, stdout=quiet))
        codes = [process.wait() for process in processes]
        assert not any(codes), f"a rank of {case} failed"
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(ranks)]


def predicted(case: str, shapes: list[tuple[int, ...]]) -> float | None:
    """Bytes that `lightning plan` predicts for a rank on a CPU; None if it models traffic between nodes by mode."""
    return sent_bytes(shapes, STAGES[case], 2).total if case in STAGES else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="10gbit")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        work(options.rank, options.steps, str(options.output))
        return
    dense: float | None = None
    with two_hosts(options.rate) as link:
        for case in options.cases:
            of_ranks = run_case(case, options.steps, link.hosts, link.addresses[0])
            sent, per_host = of_ranks[0]["sent"][WARM_UP:], CASES[case][0]
            a_rank = (sent[-1] - sent[0]) / (len(sent) - 1) / per_host
            dense = a_rank if case == "between_nodes float32" else dense
            shapes = of_ranks[0]["shapes"]
            values = sum(torch.Size(shape).numel() for shape in shapes)
            model, counted = predicted(case, shapes), of_ranks[0]["counted"]
            pairs = zip(of_ranks[0]["parts"], of_ranks[per_host]["parts"], strict=True)
            row = {
                "section": "wire", "case": case, "torch": torch.__version__,
                "device": "cpu, two network namespaces", "rate": options.rate, "ranks": 2 * per_host, "values": values,
                "steps_counted": len(sent) - 1, "interface_bytes": round(a_rank),
                "bytes_a_value": round(a_rank / values, 4),
                "plan_bytes": None if model is None else round(model),
                "interface_to_plan": None if model is None else round(a_rank / model, 4),
                "counted_bytes": counted,
                "ratio_to_float32": round(a_rank / dense, 4) if dense and counted is not None else None,
                "hosts_equal_to_the_bit": all(torch.equal(*pair) for pair in pairs) if counted is not None else None,
            }  # fmt: skip
            keep_row(row, options.output)


if __name__ == "__main__":
    main()
