"""`python -m tools.ascend`: lower every kernel for every chip; exit code 1 if one fails the gate."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tools.ascend.chips import GATE_TARGETS
from tools.ascend.errors import AscendError, AscendLowerError
from tools.ascend.gate import complaints, kernel_cases
from tools.ascend.lower import Lowered, lower
from tools.ascend.toolchain import require_toolchain

ROW = "{:17} {:16} {:46} {:>9} {:>6} {:>5} {:>6} {:>7}  {}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table.

    Returns: 0 if every kernel passes on every chip, 1 if one fails, 2 without the compilers.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.ascend", description=__doc__)
    default = ", ".join(GATE_TARGETS)
    parser.add_argument("--target", action="append", help=f"a chip; may be repeated (default: {default})")
    parser.add_argument("--kernel", default="", help="only kernels whose op or name contains this")
    parser.add_argument("--output", type=Path, help="a .jsonl file to append a row to for each kernel and chip")
    options = parser.parse_args(arguments)
    try:
        require_toolchain()
    except AscendError as error:
        print(error, file=sys.stderr)
        return 2
    print(ROW.format("chip", "op", "kernel", "UB bytes", "share", "notes", "scalar", "seconds", "verdict"))
    failures = 0
    for target in options.target or GATE_TARGETS:
        for op, case in kernel_cases():
            if options.kernel not in f"{op} {case.name}":
                continue
            try:
                lowered = lower(case.function, case.signature, case.constants, target)
            except AscendLowerError as error:
                numbers, wrong = ("-",) * 5, [str(error)]
            else:
                numbers = (
                    f"{lowered.ub_peak_bytes:,}",
                    f"{lowered.ub_share:.0%}",
                    str(len(lowered.notes)),
                    str(len(lowered.scalar_loops)),
                    f"{sum(lowered.seconds.values()):.2f}",
                )
                wrong = complaints(lowered)
                if options.output:
                    _append(options.output, target, op, case.name, lowered, wrong)
            failures += bool(wrong)
            print(ROW.format(target, op, case.name, *numbers, "; ".join(wrong) or "ok"))
    print(f"{failures} failed" if failures else "all pass")
    return 1 if failures else 0


def _append(path: Path, target: str, op: str, name: str, lowered: Lowered, wrong: Sequence[str]) -> None:
    row = {
        "benchmark": "ascend_gate",
        "date": datetime.date.today().isoformat(),
        "compilers": {package: version(package) for package in ("triton-ascend", "ascendnpu-ir")},
        "chip": target,
        "op": op,
        "kernel": name,
        "ub_peak_bytes": lowered.ub_peak_bytes,
        "ub_share": round(lowered.ub_share, 3),
        "notes": len(lowered.notes),
        "scalar_loops": len(lowered.scalar_loops),
        "wrong": list(wrong),
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(main())
