"""docs/first_hour.md: its table is what the script prints, and the rows are what the script counts."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.end_to_end.expectations import RUNS, rows, table

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks" / "results" / "end_to_end" / "expectations.jsonl"


def test_the_rows_are_what_the_script_counts_today_from_configs_results_and_architectures() -> None:
    assert list(rows()) == [json.loads(line) for line in ROWS.read_text().splitlines()]


def test_the_table_of_the_page_is_printed_from_the_rows_and_marks_every_figure() -> None:
    page = (ROOT / "docs" / "first_hour.md").read_text()
    printed = table([json.loads(line) for line in ROWS.read_text().splitlines()])
    assert (
        re.search(r"<!-- expectations: begin.*-->\n\n(.*)\n\n<!-- expectations: end -->", page, re.DOTALL)[1] == printed
    )  # type: ignore[index]
    for line in printed.splitlines()[2:]:
        config, download, disk, memory, minutes = (cell.strip() for cell in line.strip("|").split("|")[2:])
        assert "counted" in download and "counted" in disk
        assert ("counted" if config.endswith(("int8", "nf4")) else "measured on an H100") in memory
        assert "modelled" in minutes or minutes == "not known"


def test_the_memory_levels_are_those_that_init_writes() -> None:
    from lightning_aigc.diffusion.families import FAMILIES

    for (model, card), (config, level) in RUNS.items():
        if card != "6 GB":
            key = ("sdxl" if model == "sdxl" else "sd", card.replace(" ", "").casefold())
            row = FAMILIES[key[0]].cards[key[1]]
            assert (row.config, row.memory) == (config, level)
