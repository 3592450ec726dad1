"""Check a demo run against its bars: `python -m tools.check_demo runs/demo/summary.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

CLIP_T_MUST_RISE_BY = 0.4
OTHER_PROMPTS_MUST_KEEP = 0.9  # of their score before


def failures(summary: dict[str, object]) -> list[str]:
    """One sentence per missed bar; empty if the run passed."""
    found = []
    rise = float(summary["clip_t_after"]) - float(summary["clip_t_before"])  # type: ignore[arg-type]
    if rise < CLIP_T_MUST_RISE_BY:
        found.append(f"CLIP-T rose by {rise:.3f} on held-out prompts, wanted {CLIP_T_MUST_RISE_BY}")
    before, after = float(summary["prior_clip_t_before"]), float(summary["prior_clip_t_after"])  # type: ignore[arg-type]
    if after < OTHER_PROMPTS_MUST_KEEP * before:
        found.append(f"the other prompts fell from {before:.3f} to {after:.3f}, more than 10 %")
    for key in ("lora_file", "report"):
        if not Path(str(summary[key])).is_file():
            found.append(f"{key} {summary[key]} does not exist")
    best = Path(str(summary["lora_file"])).with_suffix("").as_posix() + "_best.safetensors"
    page = Path(str(summary["report"])).with_name("health.html")
    for path, who in ((Path(best), "the guard kept no best weights"), (page, "the monitor wrote no page")):
        if not path.is_file():
            found.append(f"{who}: {path} does not exist")
    return found


def main() -> None:
    summary = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = failures(summary)
    print("\n".join(found) if found else f"demo: all bars held: {json.dumps(summary)}")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
