"""The console of a run: one line a fact. Messages of Lightning, diffusers and transformers that tell a user nothing are
left out, and a warning is its text, without the file and line that raised it."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path

from lightning_aigc._registration import when_imported

IGNORED_WARNINGS = (
    ".*does not have many workers.*",  # ImageCaptionData set them from the machine
    ".*GPU available but not used.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ".*Found .* module\\(s\\) in eval mode at the start of training.*",  # the frozen parts, on purpose
    ".*You have set `max_epochs`.*",
    ".*is smaller than the logging interval.*",  # an epoch of few images; the steps go on through epochs
    "(?s).*Unable to serialize instance.*",  # a scheduler given by name
    ".*Consider setting `persistent_workers.*",
    ".*local_dir_use_symlinks.*",  # diffusers' own use of the hub's client
    ".*torch.distributed.nn.functional.all_gather is deprecated.*",  # Lightning's own use
    ".*`FluxPosEmbed` is deprecated.*",  # diffusers' own use, in Chroma
)
LEFT_OUT = re.compile(
    "Tip: |litlogger|TPU available: False|`Trainer.fit` stopped: `max_(steps|epochs)|Initializing distributed: "
    "|Running in `fast_dev_run` mode|Loading `train_dataloader` to estimate"
    "|^\\[rank: [1-9]\\d*\\] Seed set to"
    "|part of your input was truncated|Token indices sequence length is longer"  # the data report counts tokens
    "|No LoRA keys associated to \\w+ found"  # of a text encoder that was not trained
    "|should be kept in float32: \\[\\]"  # diffusers lists the modules, and there is none
)
"""Log messages of other packages that are not printed."""
_PROCESSES = re.compile(r"distributed_backend=(\w+)\s.*Starting with (\d+) processes", re.DOTALL)
LIGHTNING = ("lightning", "lightning.pytorch", "lightning.fabric")


def quiet_known_warnings() -> None:
    """Ignore warnings that are no news; before torch and Lightning are imported."""
    for message in IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def tidy_console() -> None:
    """Leave known messages out, and print warnings as one line; after Lightning is imported, which sets its own."""
    _filter_handlers(*LIGHTNING)
    when_imported("diffusers", _filter_diffusers)
    when_imported("transformers", _filter_transformers)
    warnings.formatwarning = format_warning


def _filter_diffusers() -> None:
    from diffusers.utils.logging import get_logger

    get_logger("diffusers")  # makes its handler
    _filter_handlers("diffusers")


def _filter_transformers() -> None:
    from transformers.utils.logging import get_logger

    get_logger("transformers")
    _filter_handlers("transformers")


def _filter_handlers(*loggers: str) -> None:
    for handler in (handler for name in loggers for handler in logging.getLogger(name).handlers):
        if _is_printed not in handler.filters:
            handler.addFilter(_is_printed)


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """One line: the text, and for a warning of another package its name."""
    package = _package_of(filename)
    shown = " ".join(str(message).split())
    return f"warning: {shown}\n" if package == "lightning_aigc" else f"warning of {package}: {shown}\n"


def _is_printed(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if found := _PROCESSES.search(text):
        record.msg, record.args = f"{found[2]} processes, joined by {found[1]}", ()
    return LEFT_OUT.search(text) is None


def _package_of(filename: str) -> str:
    """The package of a source file, by its folder below site-packages; our own where a warning passed through."""
    parts = Path(filename).parts
    if "lightning_aigc" in parts:
        return "lightning_aigc"
    after = parts.index("site-packages") + 1 if "site-packages" in parts[:-1] else len(parts) - 1
    return parts[after].removesuffix(".py")
