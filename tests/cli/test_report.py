"""`lightning report` on two real short runs, and on what is no run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401 - here, so that its log does not end with the first test's captured output
import pytest
import yaml

from fakes.processes.ranks import run_ranks
from lightning_aigc.report.record import Paired, RunRecord, read_run

Command = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says about loggers and folders


def test_two_runs_become_a_table_a_page_and_a_picture(
    command: Command, quick_config: dict[str, Any], tmp_path: Path
) -> None:
    quick_config["trainer"]["callbacks"][0]["init_args"] |= {"clip_model": "embedded:clip", "num_images": 2}
    (tmp_path / "quick.yaml").write_text(yaml.safe_dump(quick_config))
    for name, rank in (("small", 2), ("large", 4)):
        root = f"--trainer.default_root_dir={tmp_path / name}"
        assert command("fit", "-c", tmp_path / "quick.yaml", root, f"--model.init_args.rank={rank}").code == 0
    files = [tmp_path / f"new/both.{ending}" for ending in ("html", "md", "png")]
    options = ("-o", files[0], "--markdown", files[1], "--picture", files[2])
    said = command("report", tmp_path / "small", tmp_path / "large", *options)
    assert said.code == 0, said.err
    assert files[1].read_text() == said.out
    lines = said.out.splitlines()
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("small", "large")]
    for row, name, summary in zip(lines[2:4], ("small", "large"), summaries, strict=True):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[0] == name and cells[2] == "2" and cells[5].endswith("GiB")
        scores = read_run(tmp_path / name).scores["clip_t"]  # the summary's are rounded once already
        before, after = (sum(values) / len(values) for values in (scores.before, scores.after))
        assert [round(before, 4), round(after, 4)] == [summary["clip_t_before"], summary["clip_t_after"]]
        assert f"{before:.2f} → {after:.2f} ± " in cells[6]
        assert f"- {name}: {summary['verdict']}" in lines
    assert "| `model.init_args.rank` | 2 | 4 |" in lines
    assert not [line for line in lines if "default_root_dir" in line]
    page = files[0].read_text().replace("<wbr>", "")  # where a key may break
    assert "small" in page and "model.init_args.rank" in page and page.count("data:image/") >= 3
    assert files[2].read_bytes().startswith(b"\x89PNG")
    single = command("report", tmp_path / "small", "-o", tmp_path / "again.html")
    assert single.code == 0
    assert (tmp_path / "again.html").read_text() == (tmp_path / "small" / "report.html").read_text()


def test_what_is_no_run_is_one_line_and_writes_nothing(command: Command, tmp_path: Path) -> None:
    RunRecord("fine", is_finished=True).write(tmp_path / "fine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "report.json").write_text('{"format": 1, "na')
    for name, words in (("empty", "is no run"), ("torn", "is torn"), ("nowhere", "there is no folder")):
        said = command("report", tmp_path / "fine", tmp_path / name, "-o", tmp_path / "page.html")
        assert said.code == 1 and len(said.errors) == 1 and words in said.errors[0] and name in said.errors[0]
    assert not (tmp_path / "page.html").exists()


def test_an_output_that_cannot_be_written_is_one_line(command: Command, tmp_path: Path) -> None:
    RunRecord("fine", is_finished=True).write(tmp_path / "fine")
    said = command("report", tmp_path / "fine", "--picture", tmp_path / "curves.bmp")
    assert said.code == 1 and "curves.bmp" in said.errors[0] and ".png or .svg" in said.errors[0]
    said = command("report", tmp_path / "fine", "--picture", tmp_path / "curves.png")
    assert said.code == 1 and "nothing to draw" in said.errors[0]
    (tmp_path / "taken").write_text("")
    said = command("report", tmp_path / "fine", "-o", tmp_path / "taken" / "page.html")
    assert said.code == 1 and "cannot write" in said.errors[0]
    assert command("report").code == 2


@pytest.mark.parametrize("option", ["-o", "--markdown"])
def test_a_run_is_not_replaced_by_its_report(command: Command, tmp_path: Path, option: str) -> None:
    RunRecord("fine", is_finished=True).write(tmp_path / "fine")
    before = (tmp_path / "fine" / "report.json").read_bytes()
    said = command("report", tmp_path / "fine", option, tmp_path / "fine" / "report.json")
    assert said.code == 1 and "must end in ." in said.errors[0]
    assert (tmp_path / "fine" / "report.json").read_bytes() == before


def test_runs_of_edits_have_columns_of_their_scores(command: Command, tmp_path: Path) -> None:
    scores = {"direction": Paired([0.1, 0.2], [0.6, 0.7]), "kept": Paired([0.5, 0.5], [0.9, 0.9])}
    RunRecord("edit", is_finished=True, scores=scores).write(tmp_path / "edit")
    RunRecord("plain", is_finished=True, scores={"clip_t": Paired([0.3], [0.8])}).write(tmp_path / "plain")
    edits = command("report", tmp_path / "edit", tmp_path / "edit" / ".").out.splitlines()
    assert "| edit, direction | edit, kept | best step |" in edits[0] and "CLIP-T" not in edits[0]
    assert "0.15 → 0.65" in edits[2] and "0.50 → 0.90" in edits[2]
    both = command("report", tmp_path / "edit", tmp_path / "plain").out.splitlines()
    assert "| CLIP-T | CLIP-I | other prompts | edit, direction | edit, kept | best step |" in both[0]
    assert "0.30 → 0.80" in both[3] and "edit, direction" not in command("report", tmp_path / "plain").out


def test_the_verb_starts_without_torch(tmp_path: Path) -> None:
    RunRecord("fine", is_finished=True).write(tmp_path / "fine")
    code = (
        "import sys; from lightning_aigc.cli import main\n"
        f"try: main(['report', {str(tmp_path / 'fine')!r}])\n"
        "finally: assert not {'torch', 'altair', 'vl_convert'} & set(sys.modules), 'imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def imported(rank: int) -> set[str]:
    return set(sys.modules)


def test_importing_the_callbacks_does_not_import_what_draws_charts(tmp_path: Path) -> None:
    (names,) = run_ranks(imported, 1, tmp_path, gloo=False)
    assert "lightning_aigc.callbacks" in names and not {"altair", "vl_convert"} & names
