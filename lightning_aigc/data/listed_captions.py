"""ListedCaptions: captions from metadata.jsonl and captions.csv."""

from __future__ import annotations

import csv
import json
import os
from io import StringIO
from pathlib import Path
from typing import Any

from lightning_aigc.data.captions import clean_caption, decode_text
from lightning_aigc.data.names import comparable, printable
from lightning_aigc.errors import DataError


class ListedCaptions:
    """Captions by picture name; metadata.jsonl takes precedence over captions.csv."""

    def __init__(self, folder: Path, caption_key: str, notes: list[str]) -> None:
        self.folder = folder
        self.caption_key = caption_key
        self.notes = notes
        self._from: list[dict[str, tuple[str, str]]] = [{}, {}]  # jsonl, csv: name -> (caption, where)
        self._taken: set[str] = set()

    def take(self, name: str) -> str | None:
        """The caption listed for a picture, or None; marks the entry as used."""
        found = [entries[key] for entries in self._from if (key := comparable(name)) in entries]
        if not found:
            return None
        self._taken.add(comparable(name))
        return found[0][0]

    def unused(self) -> list[str]:
        """Entries that match no picture, each with its file and line."""
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
                raise DataError(f"{printable(where)} in {printable(self.folder)} is not valid JSON: {error}") from error
            if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
                raise DataError(
                    f'{printable(where)}: wanted an object with "file_name" as text, got {line.strip()[:80]!r}'
                )
            caption = row.get(self.caption_key, "")
            if self.caption_key not in row and len(row) > 1:
                raise DataError(
                    f"{printable(where)}: no key {self.caption_key!r}, got {sorted(row)}; "
                    "set data.init_args.caption_column to the key that holds the caption"
                )
            if not isinstance(caption, str):
                raise DataError(f"{printable(where)}: {self.caption_key!r} must be text, got {type(caption).__name__}")
            self._add(0, path, row["file_name"], caption, where)

    def read_csv(self, path: Path) -> None:
        limit = csv.field_size_limit(2**31 - 1)
        try:
            rows = [row for row in csv.reader(StringIO(self._text(path), newline="")) if any(row)]
        except csv.Error as error:
            raise DataError(f"{printable(path)} is not a valid CSV file: {error}") from error
        finally:
            csv.field_size_limit(limit)
        if not rows:
            return
        header = [cell.strip() for cell in rows[0]]
        if "file_name" in header and self.caption_key in header:
            columns = (header.index("file_name"), header.index(self.caption_key))
            rows, first = rows[1:], 2
        elif "file_name" in header:
            raise DataError(
                f"{printable(path)} has no column {self.caption_key!r}, its columns are {header}; "
                "set data.init_args.caption_column to the one that holds the caption"
            )
        else:
            columns, first = (0, 1), 1
        for number, row in enumerate(rows, start=first):
            where = f"{path.relative_to(self.folder).as_posix()} row {number}"
            if len(row) <= max(columns) or (first == 1 and len(row) != 2):
                raise DataError(
                    f"{printable(where)} in {printable(self.folder)}: wanted file_name,{self.caption_key} as header "
                    f'or two columns, got {len(row)} in {row!r:.80}; put captions with commas in "quotes"'
                )
            self._add(1, path, row[columns[0]].strip(), row[columns[1]], where)

    def _text(self, path: Path) -> str:
        try:
            text, note = decode_text(path.read_bytes())
        except OSError as error:
            raise DataError(f"cannot read {printable(path)}: {error.strerror or error}") from error
        if note:
            self.notes.append(f"{printable(path.relative_to(self.folder).as_posix())}: {note}")
        return text

    def _add(self, source: int, path: Path, file_name: str, caption: str, where: str) -> None:
        prefix = path.parent.relative_to(self.folder).as_posix()
        name = comparable(os.path.normpath(f"{prefix}/{file_name}".replace("\\", "/")))
        caption = clean_caption(caption)
        known = self._from[source].get(name)
        if known is not None and known[0] != caption:
            raise DataError(
                f"{printable(name)} has two different captions, in {known[1]} and {where} "
                f"(folder {printable(self.folder)}); keep one"
            )
        self._from[source][name] = (caption, where)
