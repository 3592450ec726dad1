"""The help of fit, validate, test, predict and demo: the keys that people set, on one screen, without importing torch.

Texts and defaults are those of the classes; this module has the choice of keys and their groups.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

from lightning_aigc.cli.class_source import REQUIRED, Argument, arguments_of

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
"""Options next to Lightning's own: arguments of `add_argument` by name."""
DATA, MODEL, TRAINER = "data.init_args", "model.init_args", "trainer"
CLASSES: dict[str, Sequence[str]] = {
    DATA: ["lightning_aigc.data.image_caption_data.ImageCaptionData"],
    MODEL: [
        "lightning_aigc.diffusion.training.settings.TrainingSettings",
        "lightning_aigc.diffusion.training.module.DiffusionTraining",
        "lightning_aigc.diffusion.lora.training.LoRA",
        "lightning_aigc.diffusion.lora.training.DiffusionLoRA",
    ],
    TRAINER: ["lightning.pytorch.trainer.trainer.Trainer"],
    "trainer.plugins.init_args": ["lightning_aigc.precision.plugin.FusedBackwardPrecision"],
}
"""Classes whose arguments have this prefix; later ones take precedence."""
IMAGES = [
    *("train_data_dir", "trigger_word", "caption_extension", "missing_captions", "resolution", "train_batch_size"),
    *("random_flip", "class_data_dir", "validation_split", "cache_latents"),
]
LEARNING = [
    *("pretrained_model_name_or_path", "rank", "lora_targets", "learning_rate", "lr_scheduler", "lr_warmup_steps"),
    *("max_train_steps", "optimizer", "use_ema"),
]
MEMORY = ["base_quantization", "gradient_checkpointing"]
LOOKING = [
    *("validation_prompts", "validation_steps", "num_validation_images", "num_inference_steps", "guidance_scale"),
    *("checkpointing_steps", "output_name"),
]
GROUPS: dict[str, list[tuple[str, str]]] = {
    "images": [(DATA, key) for key in IMAGES],
    "learning": [*((MODEL, key) for key in LEARNING), (TRAINER, "accumulate_grad_batches")],
    "memory": [
        *((("trainer.plugins.init_args"), key) for key in ("memory", "precision")),
        *((MODEL, key) for key in MEMORY),
    ],
    "looking": [(MODEL, key) for key in LOOKING],
    "machine": [(TRAINER, key) for key in ("accelerator", "devices", "num_nodes", "strategy", "default_root_dir")],
}
OF_EVALUATION = ("looking", "machine")
"""Groups of validate, test and predict."""
VERBS = {
    "fit": "train",
    "demo": "fit with the models and images in this package",
    "validate": "print val_loss of the held-out images, with the run's newest snapshot",
    "test": "the same as validate",
    "predict": "draw the run's validation_prompts with its newest snapshot",
}
KEY_WIDTH, LEAST_WIDTH, MOST_WIDTH = 48, 100, 140


def short_help(verb: str) -> str:
    """The help page of a verb of the Trainer, at most 60 lines."""
    width = min(max(shutil.get_terminal_size((120, 60)).columns, LEAST_WIDTH), MOST_WIDTH)
    config = "" if verb == "demo" else " -c my.yaml"
    lines = [f"usage: lightning {verb}{config} [--KEY VALUE ...]     {VERBS[verb]}"]
    for group in GROUPS if verb in ("fit", "demo") else OF_EVALUATION:
        lines += ["", group]
        for prefix, key in GROUPS[group]:
            lines.append(_line(f"--{prefix}.{key}", known_arguments(prefix)[key], width))
    lines += ["", "run"]
    lines += [_line(option, Argument(given["help"], None), width) for option, given in OPTIONS.items()]
    return "\n".join([
        *lines,
        "",
        "Each key may stand in the config too; `lightning init photos/ -o my.yaml` writes one with a reason for each.",
        f"All keys: lightning {verb} --help_all; of a class: --model.help DiffusionLoRA, --data.help ImageCaptionData;",
        f"the config with every default: lightning {verb}{config} --print_config",
    ])  # fmt: skip


def known_arguments(prefix: str) -> dict[str, Argument]:
    """All documented arguments below a prefix of the config."""
    return {key: found for name in CLASSES[prefix] for key, found in arguments_of(name).items()}


def _line(option: str, argument: Argument, width: int) -> str:
    default = argument.default
    shown = "" if default in (None, REQUIRED, "") else f" [{_text(default)}]"
    text = argument.text.partition(". ")[0].removesuffix(".")
    room = width - KEY_WIDTH - len(shown) - 2
    if len(text) > room:
        text = text[: room - 3].rsplit(" ", 1)[0].rstrip(",;:") + "..."
    return f"  {option:<{KEY_WIDTH}}{text}{shown}".rstrip()


def _text(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return ", ".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
