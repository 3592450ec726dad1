"""CaptionFiles: text of a folder's caption files, with one note on those that are not UTF-8."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lightning_aigc.data.captions.encodings import decode_text, guess_encoding
from lightning_aigc.data.index.filenames import printable

SHOWN_LETTERS = 30


class CaptionFiles:
    """Text of caption files and tables by path.

    Args:
        encoding: Encoding of files that are not UTF-8; None guesses it from all of them.
        notes: Gets a sentence on each encoding that was used.
        problems: Gets a sentence on each file that cannot be read.
    """

    def __init__(
        self, folder: Path, paths: Iterable[Path], encoding: str | None, notes: list[str], problems: list[str]
    ) -> None:
        contents: dict[Path, bytes] = {}
        for path in paths:
            try:
                contents[path] = path.read_bytes()
            except OSError as error:
                name = printable(path.relative_to(folder).as_posix())
                problems.append(f"{name} cannot be read: {error.strerror or error}")
        self.encoding = encoding or guess_encoding(contents.values())
        """Encoding of the files that are not UTF-8; None where all are."""
        self._texts: dict[Path, str] = {}
        by_title: dict[str, list[Path]] = {}
        for path, content in contents.items():
            self._texts[path], title = decode_text(content, self.encoding)
            if title is not None:
                by_title.setdefault(title, []).append(path)
        for title, found in by_title.items():
            notes.append(self._note(folder, title, found))

    def text(self, path: Path) -> str | None:
        """The text of a file; None for one that cannot be read."""
        return self._texts.get(path)

    def _note(self, folder: Path, title: str, found: list[Path]) -> str:
        shown = printable(" ".join(self._texts[found[0]].split())[:SHOWN_LETTERS])
        name = printable(found[0].relative_to(folder).as_posix())
        files = "1 caption file is" if len(found) == 1 else f"{len(found)} caption files are"
        return (
            f"{files} not UTF-8, read as {title}, such as {name}: {shown!r}; if that is not your text, set"
            " data.init_args.caption_encoding, or save them as UTF-8"
        )
