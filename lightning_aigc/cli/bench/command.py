"""`lightning bench`: measure the rows that other projects publish, and print them next to the published figures."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_aigc.cli.bench.published import SETS, PublishedRow
from lightning_aigc.errors import ConfigError, UserError

if TYPE_CHECKING:
    from lightning_aigc.cli.bench.measure import Machine

LEVELS = ("off", "balanced", "lean", "max")
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun sets for its ranks."""
IN_SMALL = "in small: tiny models of the same families and random weights; not comparable with any published figure"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.description = (
        "Measure training steps at the size, batch and precision of published rows, with random weights and synthetic"
        " data, and print samples a second next to the published figures. Nothing is downloaded."
    )
    parser.add_argument(
        "--as", dest="set", choices=tuple(SETS), default="mindspeed-mm",
        help="whose rows: those of MindSpeed-MM, with mindone's for the same models",
    )  # fmt: skip
    names = ", ".join(row.name for row in SETS["mindspeed-mm"])
    parser.add_argument("--rows", nargs="+", metavar="NAME", help=f"of {names} (default: all)")
    parser.add_argument("--list", action="store_true", help="print the published rows and the memory of each, and stop")
    parser.add_argument("--device", default="auto", help="auto (default), npu, cuda or cpu")
    parser.add_argument("--devices", type=int, help="cards to train on (default: all of this machine, at most 8)")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the command; a CPU always takes them")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of a row (default: 20)")
    parser.add_argument("--warm_up", type=int, default=5, help="steps before them (default: 5)")
    parser.add_argument("--memory", choices=LEVELS, help="memory level of FusedBackwardPrecision (default: the row's)")
    parser.add_argument("-o", "--output", type=Path, help="a .jsonl file to append the rows to")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # file for the row of a process of its own


def run(args: argparse.Namespace) -> int:
    """Measure the rows and print the table; returns 1 if no row, or not every named row, was measured.

    Raises: UserError with what to change.
    """
    rows = choose(SETS[args.set], args.rows)
    for name in ("steps", "warm_up", "devices"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.list:
        print(published_table(rows))
        return 0
    if TORCHRUN in os.environ and args.worker is None:
        raise ConfigError("bench starts its ranks itself; run it without torchrun: lightning bench --devices 8")
    from lightning_aigc.cli.bench.measure import Machine

    machine = Machine.of(args.device, args.devices, small=args.small)
    if args.worker is not None:
        _work(rows[0], machine, args)
        return 0
    print(announcement(rows, machine), flush=True)
    measured = [found for row in rows if (found := _measured(row, machine, args, alone=len(rows) == 1)) is not None]
    if measured:
        print(result_table(measured))
    return 0 if len(measured) == len(rows) or (measured and args.rows is None) else 1


def choose(rows: Sequence[PublishedRow], names: Sequence[str] | None) -> list[PublishedRow]:
    """The rows of these names, or all. Raises: ConfigError for an unknown name."""
    by_name = {row.name: row for row in rows}
    unknown = [name for name in names or () if name not in by_name]
    if unknown:
        raise ConfigError(f"--rows: there is no row {unknown[0]}; known are {', '.join(by_name)}")
    return list(rows) if names is None else [by_name[name] for name in names]


def announcement(rows: Sequence[PublishedRow], machine: Machine) -> str:
    """The machine and the memory that each row needs."""
    lines = [f"{machine.cards} x {machine.kind}"]  # its name would take memory of the card in this process
    if machine.small:
        return f"{lines[0]}, {IN_SMALL}"
    for row in rows:
        host = 4 * row.architecture.parameters / 1e9 if row.method == "full" else 2 * row.architecture.parameters / 1e9
        lines.append(
            f"  {row.name}: about {row.needed_gib(machine.cards):.0f} GiB on each card (estimated), and"
            f" {host * machine.cards:.0f} GB of host memory while the weights are made"
        )
    return "\n".join(lines)


def _measured(row: PublishedRow, machine: Machine, args: argparse.Namespace, *, alone: bool) -> dict[str, Any] | None:
    """The row's figures, appended to the output; None, with a line that says why, where there are none."""
    try:
        found = _in_this_process(row, machine, args) if alone and machine.cards == 1 else _in_a_process(row, args)
    except UserError as error:
        if alone:
            raise
        print(f"left out: {error}", file=sys.stderr, flush=True)
        return None
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with args.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    return found


def _in_this_process(row: PublishedRow, machine: Machine, args: argparse.Namespace) -> dict[str, Any]:
    from lightning_aigc.cli.bench.measure import measure

    found = measure(row, machine, steps=args.steps, warm_up=args.warm_up, memory=args.memory)
    return found | {"date": date.today().isoformat()}


def _in_a_process(row: PublishedRow, args: argparse.Namespace) -> dict[str, Any]:
    """Measure in a fresh process: it leaves no memory on the card, and an error ends this row alone.

    Raises: ConfigError if it ended without a row.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "row.json")
        words = ["--as", args.set, "--rows", row.name, "--device", args.device, "--steps", args.steps]
        words += ["--warm_up", args.warm_up, "--worker", file]
        words += [] if args.devices is None else ["--devices", args.devices]
        words += [] if args.memory is None else ["--memory", args.memory]
        words += ["--small"] if args.small else []
        command = [sys.executable, "-m", "lightning_aigc", "bench", *map(str, words)]
        ended = subprocess.run(command, check=False, stdin=subprocess.DEVNULL)
        if not file.is_file():
            raise ConfigError(f"{row.name} ended with exit status {ended.returncode}; its message is above")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _work(row: PublishedRow, machine: Machine, args: argparse.Namespace) -> None:
    """Measure one row and let rank 0 write it to the file that the parent process reads."""
    found = _in_this_process(row, machine, args)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        args.worker.write_text(json.dumps(found), encoding="utf-8")


def published_table(rows: Sequence[PublishedRow]) -> str:
    """The published rows, with the estimated memory of a card."""
    lines = ["| row | published by | task | batch | precision | cards | samples/s | a card | GiB on 1, 8 cards |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    lines += [
        f"| {row.name} | {row.source.publisher} | {row.model}, {row.task}, {row.pixels} px | {row.batch} |"
        f" {row.precision} | {row.cards} | {row.samples_s:g} | {row.samples_s / row.cards:.3g} |"
        f" {row.needed_gib(1):.0f}, {row.needed_gib(8):.0f} |"
        for row in rows
    ]
    return "\n".join([*lines, "", *(f"{row.name}: {row.source.address}; {row.differs}" for row in rows)])


def result_table(measured: Sequence[Mapping[str, Any]]) -> str:
    """Measured figures next to the published ones."""
    lines = ["| row | here: samples/s | a card | published: a card | ratio | step | peak |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for found in measured:
        published, is_small = found["published"], found["in_small"]
        theirs = f"{published['samples_s_a_card']:.3g} ({published['cards']} x {published['chip']})"
        ratio = "in small" if is_small else f"{found['ratio_a_card']:.2f}"
        lines.append(
            f"| {found['row']} | {found['samples_s']:.3g} ({found['devices']} x {found['device']}) |"
            f" {found['samples_s_a_card']:.3g} | {theirs} | {ratio} | {found['step_s']:.4g} s |"
            f" {found['peak_mib'] / 1024:.2f} GiB |"
        )
    notes = [IN_SMALL] if any(found["in_small"] for found in measured) else [
        f"{found['row']}: {found['published']['differs']}" for found in measured if found["published"]["differs"]
    ]  # fmt: skip
    return "\n".join([*lines, "", *notes])
