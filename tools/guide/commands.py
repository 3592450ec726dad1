"""Reproduce, detect and cure the pitfalls of docs/guide.md on the tiny model.

python -m tools.guide data --output runs/guide/data          # the folders with mistakes
python -m tools.guide run rate_too_high                      # or: all; draws docs/images/guide/<pitfall>.png
python -m tools.guide run all --short                        # what the test runs: detection only
python -m tools.guide seeds 1 2 3                            # other seeds: detections and false alarms
python -m tools.guide page                                   # writes lines and figures of the rows into the page
python -m tools.guide text --vae embedded:sd                 # letters that survive the autoencoder
python -m tools.guide faces --vae embedded:sd                # faces that survive it
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from tools.guide import data as guide_data
from tools.guide import page as guide_page
from tools.guide import vae as guide_vae
from tools.guide.pitfalls import BY_NAME, PITFALLS, SHORT, Pitfall
from tools.guide.run import Run, command, run
from tools.guide.strips import draw_strip

ROWS = RESULTS / "end_to_end" / "guide.jsonl"
SEED_ROWS = ROWS.with_name("guide_seeds.jsonl")
IMAGES = ROOT / "docs" / "images" / "guide"


def run_pitfall(
    pitfall: Pitfall, root: Path, *, is_short: bool, is_cured: bool, more: Mapping[str, str] | None = None
) -> Run:
    """Run a pitfall's command, with or without its cure."""
    data = root / "data"
    for name in pitfall.folders:
        guide_data.make(name, data)
    arguments = {"data.init_args.cache_dir": str(root / "cache"), **(more or {})}
    arguments |= {key: str(data / folder) for key, folder in _bad_folders(pitfall).items()}
    if is_short:
        arguments |= {key: value.replace("{data}", str(data)) for key, value in {**SHORT, **pitfall.short}.items()}
    if is_cured:
        arguments |= {key: value.replace("{data}", str(data)) for key, value in pitfall.cure.items()}
    flags = ("--dry_run",) if pitfall.is_dry_run or (is_short and pitfall.is_seen_at_start) else ()
    target = root / f"{pitfall.name}{'_cured' * is_cured}"
    return run(command(pitfall.name, arguments, target, flags), target)


_CURED: dict[tuple[Path, str], Run] = {}


def cured_run(pitfall: Pitfall, root: Path) -> Run:
    """The cured run: the healthy run, made once, if the demo's values are the cure; otherwise one run per cure."""
    key = (root, "healthy" if pitfall.cured_by_default else str(sorted(pitfall.cure.items())))
    if key not in _CURED:
        if pitfall.cured_by_default:
            target = root / "healthy"
            _CURED[key] = run(command(None, {"data.init_args.cache_dir": str(root / "cache")}, target), target)
        else:
            _CURED[key] = run_pitfall(pitfall, root, is_short=False, is_cured=True)
    return _CURED[key]


def _bad_folders(pitfall: Pitfall) -> dict[str, str]:
    """The overlay's folders by key, moved from runs/guide/data to the runner's folder."""
    if not pitfall.folders:
        return {}
    name = pitfall.folders[0]
    if pitfall.name == "fp16_vae":
        return {"model.init_args.pretrained_model_name_or_path": name}
    masks = {"data.init_args.mask_dir": f"{name}_masks"} if pitfall.name == "small_faces" else {}
    return {"data.init_args.train_data_dir": name, **masks}


def row_of(pitfall: Pitfall, bad: Run, cured: Run | None, seconds: float) -> dict[str, Any]:
    """Row of a pitfall for benchmarks/results/end_to_end/guide.jsonl."""
    row: dict[str, Any] = {
        "benchmark": "guide",
        "date": date.today().isoformat(),
        "pitfall": pitfall.name,
        "part": pitfall.part,
        "detected": bad.line(pitfall.detects),
        "bad": bad.figures,
        "loss": bad.summary().get("final_loss"),
        "seconds": round(seconds, 1),
    }
    if cured is not None:
        row |= {"quiet_when_cured": cured.line(pitfall.detects) is None, "cured": cured.figures}
        row["cured_loss"] = cured.summary().get("final_loss")
    return row


def run_command(given: argparse.Namespace) -> int:
    failed = 0
    for pitfall in PITFALLS if "all" in given.pitfalls else [BY_NAME[name] for name in given.pitfalls]:
        started = time.perf_counter()
        bad = run_pitfall(pitfall, given.root, is_short=given.short, is_cured=False)
        cured = None if given.short else cured_run(pitfall, given.root)
        row = row_of(pitfall, bad, cured, time.perf_counter() - started)
        print(json.dumps(row, indent=1), flush=True)
        is_fine = bool(row["detected"]) and row.get("quiet_when_cured", True)
        failed += not is_fine
        if not is_fine:
            print(f"MISSED {pitfall.name}: see {bad.root}/terminal.log", flush=True)
        if cured is not None:
            draw(pitfall, bad, cured)
            keep_row(row)
    return 1 if failed else 0


def page_command(given: argparse.Namespace) -> int:
    rows = {row["pitfall"]: row for row in map(json.loads, ROWS.read_text(encoding="utf-8").splitlines())}
    text = guide_page.PAGE.read_text(encoding="utf-8")
    guide_page.PAGE.write_text(guide_page.fill(text, PITFALLS, rows), encoding="utf-8")
    return 0


def seeds_command(given: argparse.Namespace) -> int:
    """Run the pitfalls that FineTuneCheck detects, and a healthy run, with new seeds; one row per run."""
    for seed in given.seeds:
        for pitfall in (None, *(p for p in PITFALLS if p.part == "FineTuneCheck")):
            name = pitfall.name if pitfall is not None else "healthy"
            arguments = {"seed_everything": str(seed)}
            root = given.root / f"seed{seed}"
            if pitfall is None:
                arguments["data.init_args.cache_dir"] = str(root / "cache")
                made = run(command(None, arguments, root / name), root / name)
            else:
                made = run_pitfall(pitfall, root, is_short=False, is_cured=False, more=arguments)
            found = json.loads((made.root / "fine_tune.json").read_text())["findings"]
            row = {"benchmark": "guide_seeds", "date": date.today().isoformat(), "pitfall": name, "seed": seed}
            row |= {"wanted": None if pitfall is None else pitfall.detects.split(": ")[1]}
            row |= {"found": [finding["check"] for finding in found], "figures": made.figures}
            print(json.dumps(row), flush=True)
            with SEED_ROWS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return 0


def draw(pitfall: Pitfall, bad: Run, cured: Run) -> None:
    """Draw the strip of a pitfall into docs/images/guide."""
    target = IMAGES / f"{pitfall.name}.png"
    if pitfall.name == "fp16_vae":
        guide_vae.draw_float16(guide_vae.load_vae(str(bad.root.parent / "data" / "fp16_vae")), target)
    else:
        draw_strip(bad.root, cured.root, target)


def keep_row(row: dict[str, Any]) -> None:
    """Replace the row of this pitfall."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.is_file() else []
    rows = [old for old in rows if old["pitfall"] != row["pitfall"]] + [row]
    ROWS.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")


def data_command(given: argparse.Namespace) -> int:
    for name in guide_data.names() if given.folder == "all" else [given.folder]:
        print(guide_data.make(name, given.output))
    return 0


def vae_command(given: argparse.Namespace) -> int:
    vae = guide_vae.load_vae(given.vae)
    measure, draw = (
        (guide_vae.text_rows, guide_vae.draw_text)
        if given.verb == "text"
        else (guide_vae.face_rows, guide_vae.draw_faces)
    )
    for row in measure(vae, given.vae, given.side):
        if given.keep:
            keep_row(row)
    if given.keep:
        draw(vae, IMAGES / f"{given.verb}.png")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    data = verbs.add_parser("data", help="write the folders with mistakes")
    data.add_argument("folder", nargs="?", default="all", choices=["all", *guide_data.names()])
    data.add_argument("--output", type=Path, default=Path("runs/guide/data"))
    data.set_defaults(run=data_command)
    runs = verbs.add_parser("run", help="make, detect and cure a pitfall")
    runs.add_argument("pitfalls", nargs="+", choices=["all", *BY_NAME])
    runs.add_argument("--short", action="store_true", help="few steps; only detect")
    runs.add_argument("--root", type=Path, default=Path("runs/guide"))
    runs.set_defaults(run=run_command)
    page = verbs.add_parser("page", help="write the rows into docs/guide.md")
    page.set_defaults(run=page_command)
    seeds = verbs.add_parser("seeds", help="detect with other seeds, and look for false alarms")
    seeds.add_argument("seeds", nargs="+", type=int)
    seeds.add_argument("--root", type=Path, default=Path("runs/guide"))
    seeds.set_defaults(run=seeds_command)
    for verb in ("text", "faces"):
        measured = verbs.add_parser(verb, help=f"what an autoencoder keeps of {verb}")
        guide_vae.add_arguments(measured)
        measured.add_argument("--keep", action="store_true", help="keep the row, and draw the image of docs/guide.md")
        measured.set_defaults(run=vae_command)
    given = parser.parse_args()
    status: int = given.run(given)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
