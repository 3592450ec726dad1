"""The options that fit, validate, test and predict have next to Lightning's own."""

from __future__ import annotations

from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "--threads": {"type": int | None, "default": None, "help": "CPU threads for torch; unset keeps torch's default."},
    "--dry_run": {
        "action": "store_true",
        "help": "Report data, buckets, parameters and memory, run one real step, write nothing but the caches.",
    },
    "--resume": {
        "action": "store_true",
        "help": "Resume from the newest complete snapshot in trainer.default_root_dir; start anew if there is none.",
    },
    "--overwrite": {
        "action": "store_true",
        "help": "Train anew in the folder of an earlier run, and replace its results.",
    },
}
"""Arguments of `add_argument` by option."""
