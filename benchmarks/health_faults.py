"""How soon GradientHealthMonitor catches each fault that the tests inject.

    OMP_NUM_THREADS=1 python benchmarks/health_faults.py

Runs the faults of tests/callbacks/health/test_faults.py, prints one JSON row a check and appends it to
benchmarks/results/DATE-health_faults.jsonl: faults, how many were caught within 20 optimizer steps with the right layer
named, and the most steps that one of them took. Needs no network; about a minute.
"""

from __future__ import annotations

import lightning_aigc  # noqa: F401 - first: it mends torchvision's import

# isort: split
import argparse
import collections
import importlib.util
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch

TESTS = Path(__file__).parents[1] / "tests"


def load_tests() -> Any:
    """The tests' own module, which is no package."""
    sys.path.insert(0, str(TESTS))
    spec = importlib.util.spec_from_file_location("test_faults", TESTS / "callbacks" / "health" / "test_faults.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["test_faults"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    tests = load_tests()
    rows: dict[str, dict[str, Any]] = collections.defaultdict(
        lambda: {"faults": 0, "caught": 0, "most_steps": 0, "missed": [], "runs": set()}
    )
    for fault in tests.FAULTS:
        row = rows[fault.check]
        with tempfile.TemporaryDirectory() as folder:
            alerts = tests.alerts_of(fault, Path(folder), max(fault.at, 1) + tests.WITHIN)
        caught = [a for a in alerts if a.check == fault.check and a.layer.startswith(fault.layer) and a.level != "info"]
        row["faults"] += 1
        row["runs"].add(f"{fault.model} {fault.kind} {fault.precision}")
        if caught:
            row["caught"] += 1
            row["most_steps"] = max(row["most_steps"], caught[0].step - fault.at)
        else:
            row["missed"].append(str(fault))
    given.results.mkdir(parents=True, exist_ok=True)
    versions = {m.__name__: m.__version__ for m in (torch, lightning.pytorch)}
    path = given.results / f"{time.strftime('%Y-%m-%d')}-health_faults.jsonl"
    with path.open("a", encoding="utf-8") as file:
        for check, row in rows.items():
            row["runs"] = sorted(row["runs"])
            line = json.dumps({"check": check} | row | {"versions": versions, "date": time.strftime("%Y-%m-%d")})
            print(line, flush=True)
            file.write(line + "\n")


if __name__ == "__main__":
    main()
