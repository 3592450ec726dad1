"""The README of the benchmarks, `make bench-cuda`, `make wheels` and repeated FLOPs, without a card or a network."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.common import unet_variants
from benchmarks.cuda.bars import Bar
from benchmarks.cuda.bench_cuda import run
from benchmarks.cuda.sections import Section, sections
from benchmarks.precision.repeated_flops import flops_of_a_step
from tools.offline_wheels import installed_names, needed_here

ROOT = Path(__file__).parents[1]


def test_repeated_arithmetic_grows_with_what_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "block_out_channels": (320, 640), "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }  # fmt: skip
    # Tracing the full U-Net takes a quarter of a minute.
    monkeypatch.setattr(unet_variants, "SD15", unet_variants.SD15 | small)
    given = argparse.Namespace(model="sd15", batch=1, lora=4, pixels=64, width=0.1)
    count = {name: sum(flops_of_a_step(name, given).values()) for name in ("native", "lean", "max")}
    assert 0 < count["native"] < count["lean"] < count["max"] < 3 * count["native"]
    trained = argparse.Namespace(**vars(given) | {"lora": 0})
    assert sum(flops_of_a_step("native", trained).values()) > 1.2 * count["native"]  # weights want gradients too


def test_installed_packages_are_read_from_any_list_that_pip_prints(tmp_path: Path) -> None:
    path = tmp_path / "installed.txt"
    path.write_text("torch==2.11.0+cu130\nPyYAML\n# a comment\nopen-clip-torch @ file:///x\n\nlightning>=2\n")
    assert installed_names(path) == {"torch", "pyyaml", "open-clip-torch", "lightning"}


@pytest.mark.parametrize(
    ("requirement", "extras", "needed"),
    [
        ("numpy", set(), True),
        ('typing-extensions; python_version < "3.12"', set(), False),
        ('docstring-parser; extra == "signatures"', set(), False),
        ('docstring-parser; extra == "signatures"', {"signatures"}, True),
        ('pywin32; sys_platform == "win32"', set(), False),
    ],
)
def test_only_what_the_other_machine_needs_is_packed(requirement: str, extras: set[str], needed: bool) -> None:
    assert needed_here(Requirement(requirement), "3.12", extras) == needed


def test_a_bar_says_what_was_got_and_what_is_wanted() -> None:
    assert str(Bar("x", 0.9, 0.8, at_least=True)) == "held   x: 0.9, wanted at least 0.8"
    assert str(Bar("x", 1.2, 1.08)) == "MISSED x: 1.2, wanted at most 1.08"


def test_every_command_of_bench_cuda_names_files_that_exist() -> None:
    every = sections()
    assert {section.part for section in every} == {1, 2}
    for part in (1, 2):
        assert sum(section.limit_s for section in every if section.part == part) <= 20 * 60  # limits, not times
    for section in every:
        for command in (*section.commands, *section.short):
            files = [p for p in command if p.startswith("tests/") or p.endswith((".py", ".yaml"))]
            files += [f"{p.replace('.', '/')}.py" for p in command if p.startswith("benchmarks.")]
            assert all((ROOT / name).exists() for name in files if name != sys.executable), command


def test_a_section_that_fails_or_hangs_leaves_its_rows_and_a_reason(tmp_path: Path) -> None:
    given = argparse.Namespace(logs=tmp_path, short=False, device="cpu")
    row = "import json, time; print(json.dumps(dict(row=%d)), flush=True); %s"
    fails = [sys.executable, "-c", row % (1, "raise SystemExit(3)")]
    hangs = [sys.executable, "-c", row % (2, "time.sleep(600)")]
    rows, wrong = run(Section("two", 1, 15, [fails, hangs], []), given, tmp_path, until=float("inf"))
    assert rows == [{"row": 1}, {"row": 2}]
    assert wrong.startswith("command 2 was ended after")
    assert "SystemExit" not in wrong and (tmp_path / "two.log").read_text().count("$ ") == 2


BENCHMARKS = ROOT / "benchmarks"
COMMANDS = [path for path in BENCHMARKS.rglob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
README = (BENCHMARKS / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_every_benchmark_has_a_row_in_the_readme(path: Path) -> None:
    command = f"python -m {'.'.join(path.relative_to(ROOT).with_suffix('').parts)}"
    rows = [line for line in README.splitlines() if re.search(rf"`{re.escape(command)}[` ]", line)]
    assert len(rows) == (path.stem != "edge_run")  # a part of others


def test_the_readme_names_every_rows_file_and_links_to_files_that_exist() -> None:
    links = {(BENCHMARKS / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", README)}
    assert [str(path) for path in links if not path.exists()] == []
    assert {path.resolve() for path in (BENCHMARKS / "results").rglob("*.jsonl")} <= links
    commands = {BENCHMARKS / f"{name.replace('.', '/')}.py" for name in re.findall(r"-m benchmarks\.([\w.]+)", README)}
    assert [str(path) for path in commands if not path.exists()] == []


def test_the_page_that_a_row_names_cites_the_benchmark() -> None:
    for line in README.splitlines():
        page = re.search(r"\(\.\./(docs/[\w/]+\.md)\)", line)
        for name in re.findall(r"-m (?:benchmarks|tools)[.\w]*\.(\w+)", line) if page else []:
            assert re.search(rf"[./]{name}\b", (ROOT / page[1]).read_text(encoding="utf-8")), line  # type: ignore[index]


def test_no_folder_of_benchmarks_has_more_than_twenty_entries() -> None:
    folders = [BENCHMARKS, *(path for path in BENCHMARKS.rglob("*") if path.is_dir() and path.name != "__pycache__")]
    counts = {folder: sum(path.name != "__pycache__" for path in folder.iterdir()) for folder in folders}
    assert {str(folder): count for folder, count in counts.items() if count > 20} == {}
