"""Names of the files that a training writes: one file name, on any system, that takes no other file's place."""

from __future__ import annotations

import re

from lightning_aigc.errors import ModelError

ENDINGS = re.compile(r"(\.(safetensors|ckpt|pt|pth|bin))+$", re.IGNORECASE)
FORBIDDEN = re.compile(r'[\x00-\x1f<>:"/\\|?*]')
"""Characters that divide folders, or that a file system does not take."""
MOST_BYTES = 200
"""File systems take 255, and the name gets endings such as `_step_000100.safetensors`."""
TAKEN = frozenset(("snapshots", "samples", "guard", "checkpoints", "lightning_logs"))
"""Folders that a run writes next to its result; a ControlNet or pipeline folder of this name would replace one."""


def check_output_name(name: str, argument: str) -> None:
    """Check a result's name, which `argument` set. Raises: ModelError with a name that can be."""
    plain = ENDINGS.sub("", name)
    wrong = [
        said
        for said, is_so in (
            ("a folder or a character that file systems do not take", FORBIDDEN.search(name) is not None),
            ("an ending, which is added", plain != name),
            ("no name", not name.strip(". ")),
            ("a dot or space at its start or end", bool(name.strip(". ")) and name.strip(". ") != name),
            (f"more than {MOST_BYTES} bytes", len(name.encode("utf-8", errors="replace")) > MOST_BYTES),
            ("the name of a folder that the run writes itself", name.lower() in TAKEN),
        )
        if is_so
    ]
    if wrong:
        last = re.split(r"[/\\]", plain)[-1]
        possible = FORBIDDEN.sub("_", last).strip(". ").encode()[:MOST_BYTES].decode("utf-8", errors="ignore")
        possible = f"{possible}_result" if possible.lower() in TAKEN else possible
        raise ModelError(
            f"{argument} must be the name of a file without folder and ending, got {name!r}, which has"
            f" {wrong[0]}; set {argument}: {possible or 'result'}, and the folder by"
            " trainer.default_root_dir"
        )
