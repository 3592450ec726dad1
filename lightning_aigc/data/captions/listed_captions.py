"""ListedCaptions: captions from metadata.jsonl and captions.csv."""

from __future__ import annotations

import csv
import json
import os
from io import StringIO
from pathlib import Path
from typing import Any

from lightning_aigc.data.captions.captions import clean_caption, decode_text
from lightning_aigc.data.index.filenames import comparable, printable

CONDITION_KEY = "conditioning_image"
"""diffusers' name of the condition's column."""


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

    def read_jsonl(self, path: Path) -> None:
        for number, line in enumerate(self._text(path).split("\n"), start=1):
            if not line.strip():
                continue
            where = f"{path.relative_to(self.folder).as_posix()} line {number}"
            try:
                row: Any = json.loads(line)
            except (ValueError, RecursionError) as error:
                self.problems.append(f"{where} is not valid JSON: {error}")
                continue
            if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
                self.problems.append(f'{where}: wanted an object with "file_name" as text, got {line.strip()[:80]!r}')
                continue
            caption = row.get(self.caption_key, "")
            if self.caption_key not in row and len(row) > 1:
                self.problems.append(
                    f"{where}: no key {self.caption_key!r}, got {sorted(row)}; "
                    "set data.init_args.caption_column to the key that holds the caption"
                )
                caption = "?"  # the image is listed; the problem above stops the training
            if not isinstance(caption, str):
                self.problems.append(f"{where}: {self.caption_key!r} must be text, got {type(caption).__name__}")
                caption = "?"
            self._add(0, path, row["file_name"], caption, where)
            if isinstance(row.get(CONDITION_KEY), str):
                self.conditions[self._name(path, row["file_name"])] = path.parent / row[CONDITION_KEY]

    def read_csv(self, path: Path) -> None:
        limit = csv.field_size_limit(2**31 - 1)
        try:
            rows = [row for row in csv.reader(StringIO(self._text(path), newline="")) if any(row)]
        except csv.Error as error:
            self.problems.append(f"{path.relative_to(self.folder).as_posix()} is not a valid CSV file: {error}")
            return
        finally:
            csv.field_size_limit(limit)
        if not rows:
            return
        header = [cell.strip() for cell in rows[0]]
        if "file_name" in header and self.caption_key in header:
            columns = (header.index("file_name"), header.index(self.caption_key))
            rows, first = rows[1:], 2
        elif "file_name" in header:
            self.problems.append(
                f"{path.relative_to(self.folder).as_posix()} has no column {self.caption_key!r}, its columns are"
                f" {header}; set data.init_args.caption_column to the one that holds the caption"
            )
            return
        else:
            columns, first = (0, 1), 1
        for number, row in enumerate(rows, start=first):
            where = f"{path.relative_to(self.folder).as_posix()} row {number}"
            if len(row) <= max(columns) or (first == 1 and len(row) != 2):
                self.problems.append(
                    f"{where}: wanted file_name,{self.caption_key} as header or two columns, got {len(row)} in"
                    f' {row!r:.80}; put captions with commas in "quotes"'
                )
                continue
            self._add(1, path, row[columns[0]].strip(), row[columns[1]], where)

    def _text(self, path: Path) -> str:
        try:
            text, note = decode_text(path.read_bytes())
        except OSError as error:
            self.problems.append(
                f"{path.relative_to(self.folder).as_posix()} cannot be read: {error.strerror or error}"
            )
            return ""
        if note:
            self.notes.append(f"{printable(path.relative_to(self.folder).as_posix())}: {note}")
        return text

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
