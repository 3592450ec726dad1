"""`lightning plan`: model the cost of each gradient sync mode on a cluster before renting it."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning_aigc.cli.plan.model import (
    DRY_RUN_LIMIT,
    count_parameters,
    read_configs,
    sync_options,
    time_one_step,
)
from lightning_aigc.cli.plan.zero import STAGES, Sharing, zero_strategy
from lightning_aigc.cli.quantities import as_time, bytes_a_second, count, latency, seconds, with_scale
from lightning_aigc.cluster import cost_model
from lightning_aigc.cluster.modes import AUTO_MODES, DEFAULT_MODE, MODES, worthwhile_mode
from lightning_aigc.cluster.workload import (
    BF16_BYTES,
    CARD_SPREAD,
    COMPRESSION_BPS,
    LINK_SPREAD,
    Job,
    Links,
    Shape,
    slowest_of,
)
from lightning_aigc.errors import ConfigError

LARGER_BUCKETS_MB = (50, 100, 200)
WORTH_SAYING = 0.01
"""Gain of efficiency that is worth a line on larger buckets."""
DEVICES = {"npu": "npu", "gpu": "cuda", "cuda": "cuda", "cpu": "cpu"}


@dataclass(frozen=True)
class Plan:
    """The inputs of the comparison, and the source of each."""

    job: Job
    shape: Shape
    links: Links
    step_time_from: str
    trainable_from: str
    chosen_mode: str | None
    """The mode of the config's strategy; where that is auto, what it would choose by the modelled times."""
    is_auto: bool = False
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the trained parameters, where they were counted."""
    strategy: str | None = None
    """zero_1 to zero_3 where the config has it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.description = "Model bytes, step time, scaling efficiency and memory of each gradient sync mode."
    parser.add_argument("-c", "--config", type=Path, action="append", default=[], metavar="FILE", help="as for fit")
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes")
    parser.add_argument("--devices", type=int, required=True, help="cards per node")
    parser.add_argument(
        "--link", type=bytes_a_second, help="bandwidth of a node to other nodes: 25Gb; 8 x 200Gb is 1600Gb"
    )
    parser.add_argument(
        "--local_link", type=bytes_a_second, default=200e9, help="bandwidth of a card in its node (default: 200GB)"
    )
    parser.add_argument("--latency", type=latency, default=30e-6, help="between nodes (default: 30us)")
    parser.add_argument("--local_latency", type=latency, default=5e-6, help="inside a node (default: 5us)")
    parser.add_argument("--step_time", type=seconds, help="step time on one card; else timed here for a small model")
    parser.add_argument(
        "--measured",
        type=measured_run,
        metavar="NODESxDEVICES:BATCH:SECONDS",
        help="a run that was timed, such as 1x8:64:0.508; the step at --batch is predicted from it",
    )
    parser.add_argument("--batch", type=float, help="samples of a card in a step, with --measured (default: its own)")
    parser.add_argument("--fixed", type=seconds, default=0.0, help="part of a step that no batch changes (optimizer)")
    parser.add_argument(
        "--spread", type=float, default=CARD_SPREAD, help=f"standard deviation of a card's step ({CARD_SPREAD:g} of it)"
    )
    parser.add_argument(
        "--link_spread", type=float, default=LINK_SPREAD, help=f"of a node's bandwidth ({LINK_SPREAD:g} of it)"
    )
    parser.add_argument("--trainable", type=count, help="trained parameters, such as 859.5M; else counted")
    parser.add_argument("--protected", type=count, help="trained parameters that are sent uncompressed in float32")
    parser.add_argument("--frozen", type=count, help="frozen parameters, for the memory only")
    parser.add_argument("--bucket_mb", type=float, help="MB of gradient that travel together (default: the config's)")
    parser.add_argument("--sparsity", type=float, help="of the sparse modes (default: the config's, else 0.75)")
    parser.add_argument("--device", choices=("npu", "cuda", "cpu"), help="kind of card (default: the config's)")
    parser.add_argument("--target", type=float, metavar="EFFICIENCY", help="also say what reaches it, such as 0.927")
    parser.add_argument(
        "--strategy", choices=tuple(STAGES), help="also print what a rank stores and sends when the model is shared out"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Model every mode and print the table; returns the exit status.

    Raises: UserError with what to change.
    """
    plan = make_plan(args)
    strategy = args.strategy or plan.strategy
    sharing = None if strategy is None else Sharing.of(strategy, plan.job, plan.shape, plan.shapes)
    rows = [row_of(mode, plan, args.target) for mode in MODES]
    if args.json:
        about = {"modelled": True, "plan": asdict(plan), "constants": constants(plan), "modes": rows}
        if sharing is not None:
            about |= sharing.as_json()
        print(json.dumps(about, indent=1))
    else:
        print(as_text(plan, rows, args.target))
        if sharing is not None:
            print(sharing.as_text())
    return 0


def make_plan(args: argparse.Namespace) -> Plan:
    """The plan from arguments and configs; values they do not give are counted or timed.

    Raises: ConfigError for a missing value.
    """
    shape = Shape(args.nodes, args.devices)
    if args.link is None and shape.nodes > 1:
        raise ConfigError("--link is missing: the bandwidth of one node to others, such as --link 25Gb or --link 200GB")
    config = read_configs(args.config)
    options, is_npu_sparse = sync_options(config)
    counted = None
    if args.trainable is None:
        if not config:
            raise ConfigError("got neither --trainable nor a config to count; pass --trainable 859.5M or -c FILE")
        counted = count_parameters(config, options)
    links = Links(args.local_link, args.link or args.local_link, args.local_latency, args.latency, args.link_spread)
    step_time, step_time_from = _step_time(args, counted)
    if args.fixed >= step_time:
        raise ConfigError(f"--fixed is part of a step, got {args.fixed:g} s of {step_time:g} s; give less")
    job = Job(
        trainable=args.trainable if counted is None else counted.trainable,
        protected=(counted.protected if counted else 0) if args.protected is None else args.protected,
        small=counted.small if counted else 0,
        frozen=(counted.frozen if counted else 0) if args.frozen is None else args.frozen,
        frozen_bytes=counted.frozen_bytes if counted else BF16_BYTES,
        forward_s=(step_time - args.fixed) * (1 - cost_model.BACKWARD_SHARE),
        backward_s=(step_time - args.fixed) * cost_model.BACKWARD_SHARE,
        fixed_s=args.fixed,
        spread=args.spread,
        sparsity=options.sparsity if args.sparsity is None else args.sparsity,
        local_steps=options.local_steps,
        average_bytes=options.average_bytes,
        packing=cost_model.average_packing(options.average, options.top_k),
        overlap_average=options.overlap_average,
        bucket_bytes=(options.bucket_mb if args.bucket_mb is None else args.bucket_mb) * 1e6,
        device=args.device or DEVICES.get(str((config.get("trainer") or {}).get("accelerator")), "npu"),
    )
    source = "given" if counted is None else "counted"
    chosen, is_auto = options.mode if is_npu_sparse else None, options.mode == "auto"
    if is_auto:
        costs = {mode: cost_model.predict(mode, job, shape, links) for mode in AUTO_MODES}
        chosen = worthwhile_mode({mode: cost.wire_s + cost.compression_s for mode, cost in costs.items()})
    if args.measured is not None:
        mode = chosen or "dense"
        job = cost_model.job_of(args.measured, mode, job, links, args.batch or args.measured.batch)
        step_time_from = f"from {args.measured.step_s:g} s measured on {args.measured.shape.ranks} cards in {mode}"
    shapes = () if counted is None else counted.shapes
    return Plan(job, shape, links, step_time_from, source, chosen, is_auto, shapes, zero_strategy(config))


def row_of(mode: str, plan: Plan, efficiency: float | None) -> dict[str, Any]:
    """The modelled cost of one mode by name, in bytes and seconds."""
    job, shape, links = plan.job, plan.shape, plan.links
    row = asdict(cost_model.predict(mode, job, shape, links))
    row["memory_bytes"] = cost_model.memory_bytes(mode, job, shape)
    if efficiency is not None:
        row["link_for_efficiency_Bps"] = cost_model.link_for_efficiency(mode, job, shape, links, efficiency)
        row["step_time_for_efficiency_s"] = cost_model.step_time_for_efficiency(mode, job, shape, links, efficiency)
    return row


def constants(plan: Plan) -> dict[str, float]:
    """The cost model's assumptions that no argument sets."""
    return {
        "backward_share": cost_model.BACKWARD_SHARE,
        "overlap_share": plan.job.overlap_share,
        "bucket_bytes": plan.job.bucket_bytes,
        "compression_Bps": COMPRESSION_BPS[plan.job.device],
        "launch_s": cost_model.LAUNCH_S[plan.job.device],
    }


def what_reaches(target: float, plan: Plan, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences on what to change for an efficiency: of the mode in use, and by the others."""
    job, shape = plan.job, plan.shape
    mode = plan.chosen_mode or DEFAULT_MODE
    row = next(row for row in rows if row["mode"] == mode)
    enough = [f"{other['mode']} ({other['efficiency']:.1%})" for other in rows if other["efficiency"] >= target]
    most = 1 / (1 + job.spread * slowest_of(shape.ranks))
    if row["efficiency"] >= target:
        return [f"{target:.1%} is reached by {', '.join(enough)}."]
    if most < target:
        needed = (1 / target - 1) / slowest_of(shape.ranks)
        return [
            f"{target:.1%} is out of reach on {shape.ranks} cards whose steps spread by {job.spread:.1%}: waiting for"
            f" the slowest leaves {most:.1%}",
            f"without any traffic. First bring the spread to {needed:.1%} or less: equal clocks, no other jobs.",
        ]
    lines = [f"{target:.1%} is not reached in {mode}: {row['efficiency']:.1%}. Each of these alone would:"]
    if enough:
        lines.append(f"  mode: {', '.join(enough)}")
    if (link := row["link_for_efficiency_Bps"]) is not None:
        lines.append(f"  a link of {with_scale(8 * link, 'b/s')} a node")
    if (step_s := row["step_time_for_efficiency_s"]) is not None:
        times = math.ceil(step_s / job.compute_s)
        lines.append(f"  accumulate_grad_batches: {times}, as a step has to take {as_time(step_s)}")
    for megabytes in LARGER_BUCKETS_MB:
        larger = replace(job, bucket_bytes=megabytes * 1e6)
        if cost_model.predict(mode, larger, shape, plan.links).efficiency >= target:
            return [*lines, f"  bucket_mb: {megabytes}"]
    return lines


def as_text(plan: Plan, rows: Sequence[dict[str, Any]], efficiency: float | None) -> str:
    """The assumptions, then the modes as a table."""
    lines = [*_assumptions(plan), _memory(rows[0]["memory_bytes"]), ""]
    head = ["mode", "in node", "between", "wire", "exposed", "step", "efficiency", "residuals"]
    if efficiency is not None:
        head += [f"link for {efficiency:.1%}", f"step for {efficiency:.1%}"]
    table = [head]
    for row in rows:
        cells = [
            row["mode"] + (" *" if row["mode"] == plan.chosen_mode else ""),
            with_scale(row["local_bytes"], "B"),
            with_scale(row["between_bytes"], "B"),
            as_time(row["wire_s"]),
            as_time(row["exposed_s"]),
            as_time(row["step_s"]),
            f"{row['efficiency']:.1%}",
            with_scale(row["memory_bytes"]["residuals"], "B"),
        ]
        if efficiency is not None:
            link, step = row["link_for_efficiency_Bps"], row["step_time_for_efficiency_s"]
            cells += [
                "none" if link is None else with_scale(8 * link, "b/s"),
                "none" if step is None else as_time(step),
            ]
        table.append(cells)
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    if plan.is_auto:
        lines.append("* what the config's mode auto would choose by these times; it measures the real link")
    elif plan.chosen_mode:
        lines.append("* the mode of the config's strategy")
    lines += _larger_buckets(plan) if efficiency is None else what_reaches(efficiency, plan, rows)
    return "\n".join(lines)


def _larger_buckets(plan: Plan) -> list[str]:
    """A line on larger buckets, where they bring the mode in use visibly closer to linear: fewer hops and launches."""
    mode = plan.chosen_mode or DEFAULT_MODE

    def efficiency(megabytes: float) -> float:
        job = replace(plan.job, bucket_bytes=megabytes * 1e6)
        return cost_model.predict(mode, job, plan.shape, plan.links).efficiency

    now = efficiency(plan.job.bucket_bytes / 1e6)
    best = max((size for size in LARGER_BUCKETS_MB if size * 1e6 > plan.job.bucket_bytes), key=efficiency, default=None)
    if best is None or efficiency(best) < now + WORTH_SAYING:
        return []
    return [
        f"Latency and launches count once a bucket: with bucket_mb: {best}, {mode} is modelled at "
        f"{efficiency(best):.1%} instead of {now:.1%}."
    ]


def _assumptions(plan: Plan) -> list[str]:
    job, shape, links = plan.job, plan.shape, plan.links
    inside = f"{with_scale(links.local_Bps, 'B/s')} a card in its node, latency {as_time(links.latency_local_s)}"
    between = (
        f"{with_scale(8 * links.between_Bps, 'b/s')} a node outside of it, latency {as_time(links.latency_between_s)}"
    )
    launch_s, launches = cost_model.LAUNCH_S[job.device], ""
    if launch_s:
        launches = f"\nand launches a kernel in {as_time(launch_s)}: {cost_model.LAUNCHES['int3']} a bucket in int3"
    protected, small = with_scale(job.protected), with_scale(job.small)
    return [
        f"{shape.nodes} x {shape.devices} = {shape.ranks} ranks: {inside}"
        + (f"; {between}" if shape.nodes > 1 else ""),
        f"{with_scale(job.trainable)} parameters trained ({plan.trainable_from}), {protected} protected, {small} small",
        f"a step alone takes {as_time(job.compute_s)} ({plan.step_time_from})",
        f"All of this is modelled, as rings over cards whose steps spread by {job.spread:.1%} and links that spread by"
        f" {links.spread:.0%}:",
        f"a step waits for the slowest of {shape.ranks}, {slowest_of(shape.ranks):.1f} deviations above the mean. It"
        f" assumes: backward is {cost_model.BACKWARD_SHARE:.0%}",
        f"of a step, {job.overlap_share:.0%} of it hides traffic, buckets hold {with_scale(job.bucket_bytes, 'B')},"
        f" {job.device} compresses {with_scale(COMPRESSION_BPS[job.device], 'B/s')}{launches}.",
    ]


def _memory(of: dict[str, float]) -> str:
    weights, gradients, optimizer = (with_scale(of[kind], "B") for kind in ("weights", "gradients", "optimizer"))
    return (
        f"Memory per card, without activations: weights {weights}, gradients {gradients}, AdamW {optimizer}, and the"
        " residuals of gradient sync."
    )


def measured_run(text: str) -> cost_model.Measured:
    """Parse 1x8:64:0.508 as one node of eight cards, 64 samples a card, 0.508 s a step. Raises: ArgumentTypeError."""
    match = re.fullmatch(r"(\d+)x(\d+):([\d.]+):(.+)", text.strip())
    if match is None or float(match[3]) <= 0 or seconds(match[4]) <= 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted NODESxDEVICES:BATCH:SECONDS, such as 1x8:64:0.508")
    return cost_model.Measured(Shape(int(match[1]), int(match[2])), float(match[3]), seconds(match[4]))


def _step_time(args: argparse.Namespace, counted: Any) -> tuple[float, str]:
    if args.measured is not None:
        if args.step_time is not None:
            raise ConfigError("--measured and --step_time both give the time of a step; leave one of them out")
        if args.batch is not None and not 0 < args.batch < math.inf:
            raise ConfigError(f"--batch must be above 0, got {args.batch:g}; leave it out for the measured run's")
        return args.measured.step_s, "measured"
    if args.batch is not None:
        raise ConfigError("--batch needs a run to scale from; add --measured, such as --measured 1x8:64:0.508")
    if args.step_time is not None:
        if args.step_time <= 0:
            raise ConfigError(f"--step_time must be above 0, got {args.step_time}")
        return args.step_time, "given"
    if counted is None or counted.trainable + counted.frozen > DRY_RUN_LIMIT:
        why = "nothing was built to time" if counted is None else "this model is too large for a quick dry run"
        raise ConfigError(
            f"--step_time is missing, and {why}; pass the seconds of one step on one card: --step_time 1.2"
        )
    return time_one_step(args.config), "one dry-run step here, its warm-up included"
