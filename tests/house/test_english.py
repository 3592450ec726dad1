"""Docstrings, comments and messages are in plain technical English: words and openings that are not used here."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("lightning_aigc", "kernels/lightning_aigc_kernels", "benchmarks", "tools")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
ALL_FILES = sorted({*FILES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")})
HEADLESS = re.compile(r"(What|Which|Of|Those|That|How|Where|Whose|Whatever)\b")
BANNED = {
    "mend": "fix",
    "mends": "fixes",
    "bring along": "include",
    "brings along": "includes",
    "in place of": "instead of",
    "so many": "`count`, or the number's name",
    "one after the other": "in turn",
    "goes on": "continues",
    "beside": "next to, with or during",
    "besides": "in addition to, or other than",
    "to the bit": "bit-identical, or exactly",
    "of ours": "our",
    "picture": "image",
    "pictures": "images",
}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PATTERN = re.compile(rf"(?<![\w`.-])({'|'.join(BANNED)})(?![\w`(=-]|\.\w)", re.IGNORECASE)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each string that stands alone as a statement."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for statement in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else ():
            text = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield statement.lineno, text.value.strip()


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each comment, and of each string with a space in it."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string.strip()):
            yield token.start[0], re.sub(r"`[^`]*`|\{[^{}]*\}|https?://\S+", " ", token.string)


def headless(path: Path) -> list[str]:
    return [f"{path}:{line}: {text[:60]}" for line, text in docstrings(path) if HEADLESS.match(text)]


# One test for all files: a test for each took 4 ms of pytest's own.
def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    assert [line for path in ALL_FILES for line in headless(path)] == []


def test_words_with_a_plainer_one_are_not_used() -> None:
    found = [(path, line, match[1]) for path in FILES for line, text in prose(path) for match in PATTERN.finditer(text)]
    assert [f"{path}:{line}: {word!r}; write {BANNED[word.lower()]}" for path, line, word in found] == []


def test_notebooks_use_the_same_words() -> None:
    cells = [(path, cell) for path in NOTEBOOKS for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    found = [(path.name, match[0]) for path, cell in cells for match in PATTERN.finditer("".join(cell["source"]))]
    assert (len(NOTEBOOKS), found) == (4, [])


@pytest.mark.parametrize("text", ['"""Of each image."""\n', '"""How far it moved."""\n'])
def test_a_headless_docstring_is_seen(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    assert len(headless(tmp_path / "bad.py")) == 1


def test_a_banned_word_is_seen_in_comments_and_messages_and_not_in_names(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text('picture = 1  # beside it\nraise ValueError(f"a picture of {picture}")\n')
    found = [(line, match[1]) for line, text in prose(tmp_path / "bad.py") for match in PATTERN.finditer(text)]
    assert found == [(1, "beside"), (2, "picture")]
