"""Check whether GradientHealthMonitor's first alert is correct for each fault of the tests, on both models.

    OMP_NUM_THREADS=1 python -m benchmarks.health.faults
    OMP_NUM_THREADS=1 python -m benchmarks.health.faults --model net --seed 1

Runs the faults of tests/fakes/faults, prints one JSON row per check and model, and appends it to its file: the number
of faults past the threshold, of those with the correct first alert (check and layer, within 20 optimizer steps), the
largest delay in steps, the number of faults just below the threshold, and of those without an alert. Needs no network;
about fifteen minutes on one core, most of it on the embedded Stable Diffusion.
"""

from __future__ import annotations

import argparse
import collections
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch

from benchmarks import RESULTS
from benchmarks.common.rows import keep_row
from fakes.faults import FAULTS, alerts_of, first_alert, is_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("net", "sd"), help="unset: both")
    parser.add_argument("--checks", nargs="*", help="checks whose faults are run; unset: all")
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="of weights and data; the thresholds were chosen on seed 0",
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "health" / "faults.jsonl")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.CRITICAL)
    rows: dict[tuple[str, str], dict[str, Any]] = collections.defaultdict(
        lambda: {"past": 0, "right": 0, "most_steps": 0, "short": 0, "quiet": 0, "wrong": [], "runs": set()}
    )
    for fault in FAULTS:
        if given.model not in (None, fault.model) or (given.checks and fault.check not in given.checks):
            continue
        fault.seed = given.seed
        row = rows[fault.check, fault.model]
        with tempfile.TemporaryDirectory() as folder:
            alerts = alerts_of(fault, Path(folder))
        first, right = first_alert(alerts), is_right(fault, alerts)
        row["runs"].add(f"{fault.kind} {fault.precision}")
        row["past" if fault.says else "short"] += 1
        row["right" if fault.says else "quiet"] += right
        if not right:
            row["wrong"].append(f"{fault}: {first.line() if first else 'nothing'}")
            print(row["wrong"][-1], flush=True)
        elif first is not None:
            row["most_steps"] = max(row["most_steps"], first.step - fault.at)
    versions = {m.__name__: m.__version__ for m in (torch, lightning.pytorch)}
    for (check, model), row in rows.items():
        row["runs"] = sorted(row["runs"])
        about = {"seed": given.seed, "versions": versions}
        keep_row({"check": check, "model": model} | row | about, given.output)


if __name__ == "__main__":
    main()
