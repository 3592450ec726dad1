"""ListedCaptions: captions from metadata.jsonl and captions.csv."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from lightning_aigc.data.captions.captions import clean_caption
from lightning_aigc.data.images.image_file import PICTURE_SUFFIXES
from lightning_aigc.data.index.filenames import comparable, printable

FILE_KEY, FILE_KEYS = "file_name", ("filename", "file", "image", "image_path", "path")
CAPTION_KEY, CAPTION_KEYS = "text", ("caption", "prompt", "description")
"""Names of the two columns, and others that are taken for them."""
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
UNREAD = "?"
"""Caption of an image that is listed, with a problem that stops the training."""
CONDITION_KEY = "conditioning_image"
"""diffusers' name of the condition's column."""


SOURCE_KEY = re.compile(r"(source|control_path|edit_image|kontext_image)s?(?:_(\d+))?")
"""Columns with the images that an edit starts from, as in this project and others, with a number or without."""


TARGET_KEYS = ("target_caption", "edited_prompt", "output_caption")
"""Columns with a description of the image after an edit, as in this project and others."""


class ListedCaptions:
    """Captions by image name; metadata.jsonl takes precedence over captions.csv.

    What cannot be read goes to `problems`, a sentence each, so that one report has all of it.
    """

    def __init__(self, folder: Path, caption_key: str, notes: list[str], problems: list[str]) -> None:
        self.folder = folder
        self.caption_key = caption_key
        self.notes = notes
        self.problems = problems
        self._from: list[dict[str, tuple[str, str]]] = [{}, {}]  # jsonl, csv: name -> (caption, where)
        self._taken: set[str] = set()
        self.conditions: dict[str, Path] = {}
        """Files by image name, of the key `conditioning_image` in metadata.jsonl."""

        self.descriptions: dict[str, str] = {}
        """By image name, what an edit's target shows."""
        self.sources: dict[str, tuple[Path, ...]] = {}
        """By image name, the images that its edit starts from."""

    def lists(self, name: str) -> bool:
        """Whether an image has a row of its own."""
        return any(comparable(name) in entries for entries in self._from) or comparable(name) in self.sources

    def take(self, name: str) -> tuple[str, str] | None:
        """The caption listed for an image and where it stands, or None; marks the entry as used."""
        found = [entries[key] for entries in self._from if (key := comparable(name)) in entries]
        if not found:
            return None
        self._taken.add(comparable(name))
        return found[0]

    def unused(self) -> list[str]:
        """Entries that match no image, each with its file and line."""
        left = {
            name: where for entries in self._from for name, (_, where) in entries.items() if name not in self._taken
        }
        return [f"{name} ({where})" for name, where in sorted(left.items())]

    def read_jsonl(self, path: Path, text: str) -> None:
        """Take the rows of a metadata.jsonl."""
        shown = self._shown(path)
        other_keys: tuple[str, str] | None = None
        for where, row in self._rows_of_json(shown, text):
            name_key = _first_of(row, (FILE_KEY, *FILE_KEYS)) if isinstance(row, dict) else None
            if not isinstance(row, dict) or name_key is None or not isinstance(row[name_key], str):
                self.problems.append(f'{where}: wanted an object with "file_name" as text, got {str(row)[:80]}')
                continue
            key = self._caption_key_of(row)
            sources = self._sources_of(path, row, where)
            if sources:
                self.sources[self._name(path, row[name_key])] = sources
                self._describe(path, row[name_key], row, where)
                if key is None:
                    continue
            if key is None and len(row) > 1:
                self.problems.append(
                    f"{where}: no key {self.caption_key!r}, got {sorted(row)}; "
                    "set data.init_args.caption_column to the key that holds the caption"
                )
            caption = row[key] if key is not None else "" if len(row) == 1 else UNREAD
            if not isinstance(caption, str):
                self.problems.append(f"{where}: {key!r} must be text, got {type(caption).__name__}")
                caption = UNREAD
            if (name_key, key or self.caption_key) != (FILE_KEY, self.caption_key):
                other_keys = other_keys or (name_key, str(key))
            self._add(0, path, row[name_key], caption, where)
            if condition := self._text_of(row, CONDITION_KEY, where):
                self.conditions[self._name(path, row[name_key])] = path.parent / condition
        if other_keys is not None:
            self._note_keys(shown, "keys", *other_keys)

    def _rows_of_json(self, shown: str, text: str) -> Iterator[tuple[str, Any]]:
        """Each row and where it stands: a line each, or the entries of one list, which some programs write."""
        if text.lstrip().startswith("["):
            with contextlib.suppress(ValueError, RecursionError):
                rows: Any = json.loads(text)
                if all(isinstance(row, dict) for row in rows):
                    self.notes.append(f"{shown} is one JSON list, and is read as its {len(rows)} entries")
                    yield from ((f"{shown} entry {number}", row) for number, row in enumerate(rows, start=1))
                    return
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                where = f"{shown} line {number}"
                try:
                    yield where, json.loads(line)
                except (ValueError, RecursionError) as error:
                    self.problems.append(f"{where} is not valid JSON: {error}, in {line.strip()[:60]!r}")

    def read_csv(self, path: Path, text: str) -> None:
        """Take the rows of a captions.csv: with a head, or two columns of name and caption."""
        shown = self._shown(path)
        limit = csv.field_size_limit(2**31 - 1)
        try:
            separator, rows = _rows_of_csv(text)
        except csv.Error as error:
            self.problems.append(f"{shown} is not a valid CSV file: {error}")
            return
        finally:
            csv.field_size_limit(limit)
        if not rows:
            return
        if separator != ",":
            self.notes.append(f"{shown}: its columns are separated by {SEPARATORS[separator]}")
        header = [cell.strip() for cell in rows[0]]
        name_key = None if _names_picture(header[0]) else _first_of(header, (FILE_KEY, *FILE_KEYS))
        key = self._caption_key_of(header)
        if name_key is not None and key is not None:
            columns = (header.index(name_key), header.index(key))
            rows, first = rows[1:], 2
            if (name_key, key) != (FILE_KEY, self.caption_key):
                self._note_keys(shown, "columns", name_key, key)
        elif name_key is not None:
            self.problems.append(
                f"{shown} has no column {self.caption_key!r}, its columns are"
                f" {header}; set data.init_args.caption_column to the one that holds the caption"
            )
            return
        else:
            columns, first = (0, 1), 1
        for number, row in enumerate(rows, start=first):
            where = f"{shown} row {number}"
            if len(row) <= max(columns) or (first == 1 and len(row) != 2):
                self.problems.append(
                    f"{where}: wanted file_name,{self.caption_key} as header or two columns, got {len(row)} in"
                    f' {row!r:.80}; put captions with commas in "quotes"'
                )
                continue
            self._add(1, path, row[columns[0]].strip(), row[columns[1]], where)
            named = dict(zip(header, row, strict=False))
            if first == 2 and (sources := self._sources_of(path, named, where)):
                self.sources[self._name(path, row[columns[0]].strip())] = sources
                self._describe(path, row[columns[0]].strip(), named, where)

    def _describe(self, path: Path, file_name: str, row: Mapping[str, Any], where: str) -> None:
        """Keep the description of a row's target, where it has one."""
        found = next(filter(None, (self._text_of(row, key, where) for key in TARGET_KEYS)), "")
        if found.strip():
            self.descriptions[self._name(path, file_name)] = clean_caption(found)

    def _text_of(self, row: Mapping[str, Any], key: str, where: str) -> str:
        """The text under a key, empty without one; another kind of value is a problem."""
        value = row.get(key)
        if value is None or isinstance(value, str):
            return value or ""
        self.problems.append(f"{where}: {key!r} must be text, got {value!r:.80}")
        return ""

    def _sources_of(self, path: Path, row: Mapping[str, Any], where: str) -> tuple[Path, ...]:
        """The files of a row's source columns, by their numbers."""
        found: list[tuple[int, Path]] = []
        for key, value in row.items():
            match = SOURCE_KEY.fullmatch(key)
            values = value if isinstance(value, list) else [value]
            if match is None or value in ("", None, []):
                continue
            if not all(isinstance(each, str) for each in values):
                self.problems.append(f"{where}: {key!r} must be the name of a file or a list of names, got {value!r}")
                continue
            found += [(int(match[2] or 0), path.parent / each.strip().replace("\\", "/")) for each in values]
        return tuple(file for _, file in sorted(found, key=lambda each: each[0]))

    def _caption_key_of(self, row: Collection[str]) -> str | None:
        """The row's key of the caption: the one that was set, or where none was, a usual one."""
        return _first_of(row, (self.caption_key, *(CAPTION_KEYS if self.caption_key == CAPTION_KEY else ())))

    def _note_keys(self, shown: str, kind: str, name_key: str, key: str) -> None:
        self.notes.append(f"{shown}: its {kind} {name_key!r} and {key!r} are read as file name and caption")

    def _shown(self, path: Path) -> str:
        return printable(path.relative_to(self.folder).as_posix())

    def _add(self, source: int, path: Path, file_name: str, caption: str, where: str) -> None:
        name = self._name(path, file_name)
        caption = clean_caption(caption)
        known = self._from[source].get(name)
        if known is not None and known[0] != caption:
            self.problems.append(f"{name} has two different captions, in {known[1]} and {where}; keep one")
        self._from[source][name] = (caption, where)

    def _name(self, path: Path, file_name: str) -> str:
        """The image's name relative to the folder, as entries of the listing `path` are compared."""
        prefix = path.parent.relative_to(self.folder).as_posix()
        return comparable(os.path.normpath(f"{prefix}/{file_name}".replace("\\", "/")))


def _first_of(row: Collection[str], keys: Iterable[str]) -> str | None:
    return next((key for key in keys if key in row), None)


def _rows_of_csv(text: str) -> tuple[str, list[list[str]]]:
    """The separator and the rows. It is the one that gives the first row a head or an image's name, else a comma.

    Raises: csv.Error.
    """
    first = next((line for line in text.splitlines() if line.strip()), "")
    for separator in SEPARATORS:
        cells = [cell.strip() for cell in next(csv.reader([first], delimiter=separator), [])]
        if len(cells) > 1 and (_names_picture(cells[0]) or _first_of(cells, (FILE_KEY, *FILE_KEYS))):
            break
    else:
        separator = ","
    return separator, [row for row in csv.reader(StringIO(text, newline=""), delimiter=separator) if any(row)]


def _names_picture(cell: str) -> bool:
    return Path(cell).suffix.lower() in PICTURE_SUFFIXES
