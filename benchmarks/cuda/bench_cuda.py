"""Run all benchmarks that need a CUDA card, in two parts of at most ten minutes: `make bench-cuda PART=1`, then 2.

    python -m benchmarks.cuda.bench_cuda --part 1 [--minutes 9.5] [--output FILE.jsonl] [--logs DIR] [--only NAME ...]
    python -m benchmarks.cuda.bench_cuda --short --device cpu --minutes 8      # run by CI

Each command is a separate process. If a section fails or exceeds its time, this is recorded and the next section runs.
Rows are appended to `--output` when a section ends, with the section's name; its output is in `--logs`. The bars are
listed last, missed bars first. Needs no network; tools/offline_wheels.py packs missing packages. Exit status 1
means that a section failed, not that a bar was missed, because figures differ between machines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks import RESULTS, ROOT
from benchmarks.cuda.bars import Bar, Row
from benchmarks.cuda.sections import Section, sections


def environment(device: str) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    given = {
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        given["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return {**os.environ, **given}


def run(section: Section, given: argparse.Namespace, work: Path, until: float) -> tuple[list[Row], str]:
    """Run a section's commands and log their output. Returns: its rows, and the error in one line or ""."""
    rows: list[Row] = []
    wrong = ""
    section_end = min(until, time.monotonic() + section.limit_s)
    log = given.logs / f"{section.name.replace(' ', '_').replace(chr(39), '')}.log"
    for number, command in enumerate(section.short if given.short else section.commands):
        filled = [part.format(work=work, device=given.device, n=number) for part in command]
        left = section_end - time.monotonic()
        if left < 5:
            return rows, wrong or "no time was left"
        with log.open("a") as file:
            file.write(f"$ {' '.join(filled)}\n")
            file.flush()
            process = subprocess.Popen(
                filled,
                cwd=ROOT,
                env=environment(given.device),
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,  # so that its child processes end with it
            )
            try:
                printed, _ = process.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                printed, _ = process.communicate()
                wrong = f"command {number + 1} was ended after {left:.0f} s"
            else:
                if process.returncode:
                    wrong = f"command {number + 1} ended with {process.returncode}"
            file.write(printed)
        rows += [json.loads(line) for line in printed.splitlines() if line.startswith("{") and line.endswith("}")]
    return rows + section.read(work), wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=(1, 2), help="unset: both")
    parser.add_argument("--minutes", type=float, default=9.5, help="time limit; no section runs longer")
    parser.add_argument("--short", action="store_true", help="small sizes: check only that every command runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", help="names of sections")
    parser.add_argument("--output", type=Path, help="unset: its file in results/cuda, or none with --short")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "bench-cuda")
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    output = given.output or (None if given.short else RESULTS / "cuda" / "bench_cuda.jsonl")
    given.logs.mkdir(parents=True, exist_ok=True)
    bars: list[Bar] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bench-cuda-") as folder:
        for section in sections():
            chosen = section.name in given.only if given.only else given.part in (None, section.part)
            if not chosen or (given.short and not section.short):
                continue
            started = time.monotonic()
            rows, wrong = run(section, given, Path(folder), until)
            header = {"section": section.name, "date": time.strftime("%Y-%m-%d"), **versions(given.device)}
            if output:
                with output.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(header | row) + "\n" for row in rows)
            bars += section.bars(rows)
            seconds = time.monotonic() - started
            print(f"{section.name}: {len(rows)} rows in {seconds:.0f} s{': ' + wrong if wrong else ''}", flush=True)
            if wrong or not rows:
                failed.append(f"{section.name}: {wrong or 'no rows'}; see {given.logs}")
    if not given.short:  # ratios of small sizes on a CPU mean nothing
        print("\n".join(map(str, sorted(bars, key=lambda bar: bar.held))))
    print("\n".join(f"FAILED {line}" for line in failed) or "every section ran")
    raise SystemExit(bool(failed))


def versions(device: str) -> Row:
    """Versions and the device."""
    import torch

    row: Row = {"torch": torch.__version__, "python": platform.python_version()}
    if device == "cuda" and torch.cuda.is_available():
        row |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return row


if __name__ == "__main__":
    main()
