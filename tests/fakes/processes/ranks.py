"""Run a function on several ranks on one machine, as processes that return its results.

They are forked from a server that has imported torch, so that a start takes a tenth of a second instead of five.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import runpy
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from fakes.processes.network import DEVICE, enter

ROOT = Path(__file__).parents[3]
TIMEOUT = timedelta(seconds=20)
"""Longest wait of a rank for the others."""


def run_ranks(
    work: Callable[..., Any],
    ranks: int,
    folder: Path,
    *arguments: Any,
    gloo: bool = True,
    timeout_s: float = 120,
    may_die: Collection[int] = (),
    environment: dict[str, str] | None = None,
    hosts: Sequence[str] = (),
) -> list[Any]:
    """Run `work(rank, *arguments)` on each rank, a function of a module's top level.

    Args: gloo: make the default process group; else it is left to `work`, with the variables that Lightning reads.
        may_die: ranks whose end is part of the test.
        hosts: the network namespace of each rank, as `fakes.processes.network.two_hosts` makes them.
    Returns: what each rank returned, None for one that died.
    Raises: AssertionError with the traceback of a rank that failed, or the ranks that had not ended in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = forking_context()
    # A function of a test module has no name that a new process could import.
    place = (str(Path(sys.modules[work.__module__].__file__ or "").resolve()), work.__name__)
    with meeting_point() as where:
        shared = where | ({"GLOO_SOCKET_IFNAME": DEVICE} if hosts else {}) | (environment or {})
        given = [
            (rank, ranks, str(folder), gloo, shared, hosts[rank] if hosts else None, place, arguments)
            for rank in range(ranks)
        ]
        processes = [context.Process(target=_rank, args=one, daemon=True) for one in given]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for rank in stuck:
            processes[rank].kill()
    errors = [path.read_text() for path in sorted(folder.glob("rank*.error"))]
    assert not errors, "\n".join(errors)
    assert not stuck, f"ranks {stuck} had not ended after {timeout_s} s"
    return [_result(folder / f"rank{rank}.pt", may_be_missing=rank in may_die) for rank in range(ranks)]


def run_script(script: Path, ranks: int, folder: Path, *argv: object) -> list[str]:
    """Run a script on each rank as `python script argv` does, and without the seconds that its imports take.

    Returns: what each rank wrote to its stderr.
    Raises: AssertionError as run_ranks.
    """
    run_ranks(_script, ranks, folder, str(script), [str(word) for word in argv], str(folder), gloo=False)
    return [(folder / f"rank{rank}.said").read_text() for rank in range(ranks)]


def forking_context(*more: str) -> Any:
    """Start the server that processes are forked from, if none runs, and return the context that makes them.

    The server skips a module that it cannot find, and Python 3.11 does not hand it this process's path: it gets the
    folders that `fakes` and the packages lie in.

    Args: more: modules that the server imports in addition to the usual ones, if this call starts it.
    """
    forkserver.set_forkserver_preload(["fakes.processes.preloaded", *more])
    before = os.environ.get("PYTHONPATH", "")
    folders = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests"), *filter(None, [before])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(folders), "PYTHONPATH_OF_TESTS": before}
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH_OF_TESTS"], os.environ["PYTHONPATH"]
        if before:
            os.environ["PYTHONPATH"] = before
    return multiprocessing.get_context("forkserver")


def _script(rank: int, script: str, argv: list[str], folder: str) -> None:
    warnings.simplefilter("ignore")
    sys.argv = [script, *argv]
    with Path(folder, f"rank{rank}.said").open("w", encoding="utf-8") as said:
        os.dup2(said.fileno(), 2)  # loggers hold the stream of the server that this process is a fork of
    runpy.run_path(script, run_name="__main__")


def _result(path: Path, *, may_be_missing: bool) -> Any:
    import torch

    if may_be_missing and not path.exists():
        return None
    return torch.load(path, weights_only=False)


def _rank(
    rank: int,
    ranks: int,
    folder: str,
    gloo: bool,
    environment: dict[str, str],
    host: str | None,
    place: tuple[str, str],
    arguments: Sequence[Any],
) -> None:
    import lightning_aigc  # noqa: F401  # first: a process that was not forked has nothing imported

    # isort: split
    import torch
    import torch.distributed as dist

    if host is not None:
        enter(host)
    torch.set_num_threads(1)
    where = {"NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
    where |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= where | environment
    try:
        if gloo:
            store = f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
        spec = importlib.util.spec_from_file_location("work_of_a_rank", place[0])
        assert spec is not None and spec.loader is not None
        module = sys.modules["work_of_a_rank"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        result = getattr(module, place[1])(rank, *arguments)
        torch.save(result, Path(folder, f"rank{rank}.pt"))
    except BaseException:
        Path(folder, f"rank{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}", encoding="utf-8")
        raise


@contextlib.contextmanager
def meeting_point() -> Iterator[dict[str, str]]:
    """The variables by which ranks find one another: a store that this process keeps open.

    The system gives it a port of its own. A port that is looked up first and bound by rank 0 seconds later may be
    another session's by then.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    # As under torchrun: no rank opens a store of its own.
    yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    del store
