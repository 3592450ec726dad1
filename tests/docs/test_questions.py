"""docs/questions: the command lines and settings of each page are accepted, and its figures are the code's."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from PIL import Image

from lightning_aigc.cli import OWN_VERBS, TRAINER_VERBS, VERBS_IN_FOLDERS, main
from lightning_aigc.cli.init.cards import CARDS
from lightning_aigc.cli.init.choices import FEWEST_STEPS, LOOKS_PER_PICTURE, MOST_STEPS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "questions"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.stem != "index")
EACH = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OTHERS = [ROOT / "docs" / f"{name}.md" for name in ("first_hour", "data", "sample", "resume", "other_trainers")]
"""Pages of another form whose blocks of commands are checked too."""
CODE = re.compile(r"`([^`]+)`")
VARIABLE = re.compile(r"^[A-Z_]+=\S+$")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `photos`, and the `my.yaml` that init writes for them."""
    root = tmp_path_factory.mktemp("questions")
    (root / "photos").mkdir()
    for number in range(3):
        Image.new("RGB", (512, 512), (60 * number, 90, 120)).save(root / "photos" / f"{number}.png")
        (root / "photos" / f"{number}.txt").write_text(f"a zorp mug, number {number}", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("HOME", str(root))
        with pytest.raises(SystemExit) as stop:
            main(["init", "photos/", "-o", "my.yaml", "--card", "8gb"])
    assert stop.value.code == 0
    (root / "runs" / "x").mkdir(parents=True)
    shutil.copyfile(root / "my.yaml", root / "runs" / "x" / "config.yaml")
    return root


def commands(page: Path) -> Iterator[list[str]]:
    """Each `lightning` command of a page, and each setting between backticks as one of `fit`, without the program."""
    text = page.read_text(encoding="utf-8")
    lines = [line for kind, block in BLOCK.findall(text) if kind in ("", "bash") for line in block.splitlines()]
    codes = [] if page in OTHERS else CODE.findall(BLOCK.sub("", text))
    for line in [*lines, *(" ".join(code.split()) for code in codes)]:
        words = shlex.split(line, comments=True)
        while words and VARIABLE.match(words[0]):
            words = words[1:]
        if words[:1] == ["lightning"] and len(words) > 2:
            yield words[1:]
        elif line.startswith("--") and "." in words[0]:
            yield ["fit", "-c", "my.yaml", *words]


def check_fit(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*words, "--print_config"])
    assert stop.value.code == 0, words


def check_own_verb(verb: str, arguments: list[str]) -> None:
    name = verb.replace("-", "_")
    own = importlib.import_module(f"lightning_aigc.cli.{name}{'.command' if verb in VERBS_IN_FOLDERS else ''}")
    parser = argparse.ArgumentParser(prog=verb)
    own.add_arguments(parser)
    parser.parse_args(arguments)


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: page.stem)
def test_every_command_and_setting_is_accepted(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    found = list(commands(page))
    assert found
    for words in found:
        if words[0] in TRAINER_VERBS:
            check_fit(words)
        else:
            assert words[0] in OWN_VERBS, words
            check_own_verb(words[0], words[1:])


@pytest.mark.parametrize("line", ["lightning fit -c my.yaml --model.init_args.network_dim 4", "lightning sample -o a"])
def test_a_command_that_is_not_accepted_is_seen(
    line: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.md").write_text(f"# Page\n\n```\n{line}\n```\n", encoding="utf-8")
    with pytest.raises((AssertionError, SystemExit)):
        test_every_command_and_setting_is_accepted(tmp_path / "page.md", folder, monkeypatch)


@EACH
def test_every_yaml_of_a_page_is_accepted(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for kind, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "yaml":
            Path("more.yaml").write_text(block, encoding="utf-8")
            check_fit(["fit", "-c", "my.yaml", "-c", "more.yaml"])


def test_the_index_lists_each_page_once() -> None:
    linked = re.findall(r"^\| \[[^\]]+\]\((\w+\.md)\)", (FOLDER / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(linked) == [page.name for page in PAGES]


def test_the_steps_of_the_table_are_those_that_init_writes() -> None:
    text = (FOLDER / "images_and_steps.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+)\b", text, re.MULTILINE)
    assert len(rows) == 4
    for images, steps in rows:
        assert int(steps) == min(max(LOOKS_PER_PICTURE * int(images) // 4, FEWEST_STEPS), MOST_STEPS)


def test_the_cards_are_those_of_init() -> None:
    text = (FOLDER / "which_card.md").read_text(encoding="utf-8")
    assert tuple(card for card in CODE.findall(BLOCK.sub("", text)) if re.fullmatch(r"\d+gb|910b", card)) == CARDS


def test_the_lines_of_the_log_are_lines_of_the_code() -> None:
    text = (FOLDER / "stopped_early.md").read_text(encoding="utf-8")
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "lightning_aigc").rglob("*.py"))
    for words in ("stopped at step", " is finished", "a snapshot follows this batch"):
        assert words in text and words in code


@EACH
def test_a_page_is_short_and_begins_with_the_answer(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ") and lines[1] == "" and lines[2] and len(lines) <= 50


def test_the_names_of_pages_match_their_questions() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    for question, name in re.findall(r"^\| \[([^\]]+)\]\((\w+\.md)\)", index, re.MULTILINE):
        assert (FOLDER / name).read_text(encoding="utf-8").startswith(f"# {question}\n"), name


def test_settings_of_the_pages_are_yaml() -> None:
    blocks = [block for page in PAGES for kind, block in BLOCK.findall(page.read_text("utf-8")) if kind == "yaml"]
    assert blocks and all(isinstance(yaml.safe_load(block), dict) for block in blocks)
