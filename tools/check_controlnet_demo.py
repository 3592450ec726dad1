"""Check a ControlNet demo against its bars: `python -m tools.check_controlnet_demo runs/demo_controlnet`.

    python -m tools.check_controlnet_demo runs/demo_controlnet --output benchmarks/results/controlnet/demo.jsonl

The second command keeps the figures as a row.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.common.rows import keep_row

NORMALISED_MUST_REACH = 0.5
KEPT = (
    "steps", "seconds", "final_loss", "edge_f1", "edge_f1_floor", "edge_f1_ceiling", "edge_f1_normalised", "edge_ssim",
    "control_appeared_at_step", "control_gap",
)  # fmt: skip


def failures(summary: dict[str, Any]) -> list[str]:
    """One sentence per missed bar; empty if the run passed."""
    found = []
    if not summary["edge_f1_normalised"] >= NORMALISED_MUST_REACH:
        found.append(f"normalised edge F1 is {summary['edge_f1_normalised']}, wanted {NORMALISED_MUST_REACH}")
    if summary["control_appeared_at_step"] is None:
        found.append("ControlGuard saw no control")
    for key in ("controlnet_folder", "controlnet_file", "edge_sheet", "report"):
        if not Path(str(summary[key])).exists():
            found.append(f"{key} {summary[key]} does not exist")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, help="a .jsonl file to add a row to")
    given = parser.parse_args()
    summary = json.loads((given.run / "summary.json").read_text())
    keep_row({"benchmark": "controlnet_demo"} | {name: summary.get(name) for name in KEPT}, given.output)
    found = failures(summary)
    print("\n".join(found) if found else "controlnet demo: all bars held")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
