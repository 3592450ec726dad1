"""Run a function in a forked process, which shares imports and loaded data, and return its result through a pipe."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch

_IMPORTED_ONCE = (
    "lightning_aigc.cli.fit.aigc_cli",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "open_clip",
    "peft",
)
"""Modules that every child would otherwise import again."""


def import_once() -> None:
    """Import them before the first fork."""
    for name in _IMPORTED_ONCE:
        importlib.import_module(name)


def be_quiet() -> None:
    """Silence logs and warnings, and use one thread."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def _in_child(connection: Connection, work: Any, arguments: tuple[Any, ...]) -> None:
    be_quiet()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        connection.send((True, work(*arguments)))
    except BaseException:
        connection.send((False, traceback.format_exc()))
    finally:
        connection.close()


class Child:
    """A forked process that inherits imports and loaded data; its result comes through a pipe."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        self.started = time.monotonic()
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_in_child, args=(theirs, work, arguments))
        self.process.start()
        theirs.close()

    def result(self) -> Any:
        """Wait for the result. Raises: RuntimeError with the child's traceback."""
        try:
            is_fine, found = self.connection.recv()
        except EOFError:
            is_fine, found = False, "the process ended without a result"
        self.process.join()
        if not is_fine:
            raise RuntimeError(found)
        return found

    def end(self) -> None:
        self.process.terminate()
        self.process.join()
