"""The verbs fit (demo too), validate, test and predict: run AIGCCLI and report each error in one line."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

from lightning_aigc._third_party_imports import delay_torchmetrics
from lightning_aigc.cli.fit.config_errors import first_sentence
from lightning_aigc.cli.fit.console import quiet_known_warnings, tidy_console
from lightning_aigc.errors import UserError
from lightning_aigc.secrets import redact_text

UNWRITABLE = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST)


def run_trainer_verb(arguments: list[str]) -> int:
    """Parse, build and run. Returns the exit status: 1 after a UserError, 2 after a wrong config."""
    _set_threads_before_torch_starts(arguments)
    # C++ frames of each call to a store that has ended; the error says it in a sentence
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    quiet_known_warnings()
    if (foreign := _foreign_config(arguments)) is not None:
        print(f"error: {foreign}", file=sys.stderr)
        return 2
    try:
        with _garbage_left_alone():
            import torch  # noqa: F401
    except Exception as error:  # torch loads torch_npu, which may raise anything without CANN
        print(f"error: torch does not start ({error.__cause__ or error}); ask `lightning doctor`", file=sys.stderr)
        return 1
    delay_torchmetrics()
    with _garbage_left_alone():
        from lightning_aigc._lightning import MisconfigurationException, _destroy_dist_connection
        from lightning_aigc.cli.fit.aigc_cli import AIGCCLI
        from lightning_aigc.gradient_sync.transport.process_groups import error_sentence, was_said
        from lightning_aigc.strategies.rendezvous import tell_others

    tidy_console()
    atexit.register(_destroy_dist_connection)  # gloo's threads may abort a process that ends first (pytorch#179291)
    sys.argv = [sys.argv[0], *arguments]  # Lightning relaunches ranks with it
    try:
        AIGCCLI()
    except UserError as error:
        return _refused(str(error_sentence(error)), is_said=was_said(error))
    except MisconfigurationException as error:
        return _refused(first_sentence(str(error)))
    except (pickle.UnpicklingError, EOFError) as error:
        return _refused(f"the checkpoint of ckpt_path cannot be read ({type(error).__name__}); give another")
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        return _refused(
            f"cannot write {error.filename or 'a file of this run'}: {error.strerror}; look at the folders of"
            " trainer.default_root_dir and data.init_args.cache_dir: free some space there, or set others"
        )
    except RuntimeError as error:
        sentence = error_sentence(error)
        if sentence is None:
            raise
        return _refused(sentence, is_said=was_said(error))
    except SystemExit as stop:
        status = _status(stop)
        if status:
            tell_others("its command line or config was refused; its log says why")
        return status
    return 0


@contextlib.contextmanager
def _garbage_left_alone() -> Iterator[None]:
    """Import in this block without garbage collection, which would look at a million new objects over and over."""
    was_imported = "lightning_aigc.cli.fit.aigc_cli" in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if not was_imported:
            gc.freeze()  # modules stay until the end; no later collection looks at them
        gc.enable()


def _refused(sentence: str, *, is_said: bool = False) -> int:
    """Print an error once a node, tell it to ranks that wait for this one, and return the exit status."""
    from lightning_aigc.gradient_sync.transport.process_groups import is_first_of_node, is_said_by_first_rank
    from lightning_aigc.strategies.rendezvous import tell_others

    line = f"error: {redact_text(sentence)}"
    is_first = is_first_of_node()
    if is_first and not is_said:
        is_said_by_first_rank(sentence)  # tells it to the others
        print(line, file=sys.stderr, flush=True)
    is_said_there = tell_others(sentence)
    if not (is_first or is_said or is_said_there or is_said_by_first_rank(sentence)):
        print(line, file=sys.stderr, flush=True)
    return 1


def _status(stop: SystemExit) -> int:
    return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _foreign_config(arguments: list[str]) -> str | None:
    """The sentence for a config of another trainer among the arguments; None where there is none."""
    from lightning_aigc.cli.import_config.command import foreign_program

    for option, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, value = option.partition("=")
        if name not in ("-c", "--config"):
            continue
        path = Path(value or following)
        program = foreign_program(path) if path.is_file() else None
        if program is not None:
            return (
                f"{path} is a config of {program}; import it first: lightning import-config {path} -o"
                f" {path.with_name('imported.yaml').name}"
            )
    return None


def _set_threads_before_torch_starts(arguments: list[str]) -> None:
    """Set OMP_NUM_THREADS from `--threads N` before torch starts, because OpenMP reads it only once."""
    for i, argument in enumerate(arguments):
        value = argument.partition("=")[2] if argument.startswith("--threads=") else None
        if argument == "--threads" and i + 1 < len(arguments):
            value = arguments[i + 1]
        if value and value.isdigit():
            os.environ.setdefault("OMP_NUM_THREADS", value)
