"""Run `python -m MODULE WORDS` in forked processes, without the seconds that the imports of a new interpreter take."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fakes.processes.ranks import run_ranks

OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")
"""Variables that `run_ranks` sets, and a command starts without."""
OF_A_MEETING = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


class Ended(NamedTuple):
    """End of a command."""

    code: int
    out: str
    err: str


def run_modules(
    module: str,
    commands: Sequence[Sequence[object]],
    folder: Path,
    environment: Mapping[str, str],
    *,
    meet: bool = False,
) -> list[Ended]:
    """Run a module as `__main__` with each of these words, all at once, with `folder` as their working directory.

    Args: meet: leave each the address of a store that this process keeps open, for the ranks that it starts.
    Raises: AssertionError with the traceback of one that ended by another exception than SystemExit.
    """
    words = [[str(word) for word in command] for command in commands]
    logs = folder.with_name(f"{folder.name}_said")  # beside the folder, so that it holds what a command left alone
    codes = run_ranks(
        _run,
        len(words),
        logs,
        module,
        words,
        str(folder),
        str(logs),
        dict(environment),
        meet,
        gloo=False,
        timeout_s=400,
    )
    return [
        Ended(code, (logs / f"{number}.out").read_text(), (logs / f"{number}.err").read_text())
        for number, code in enumerate(codes)
    ]


def _run(
    number: int,
    module: str,
    words: list[list[str]],
    folder: str,
    logs: str,
    environment: dict[str, str],
    meet: bool,
) -> int:
    warnings.simplefilter("ignore")
    for name in OF_A_RANK + (() if meet else OF_A_MEETING):
        del os.environ[name]
    os.environ |= environment
    os.chdir(folder)
    for stream, name in ((1, "out"), (2, "err")):  # loggers hold the streams of the server that this is a fork of
        with Path(logs, f"{number}.{name}").open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), stream)
    sys.argv = [module, *words[number]]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0
