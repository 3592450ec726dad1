"""Help pages: the keys that people set on one screen, and no page waits for torch."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_aigc.cli import OWN_VERBS, TRAINER_VERBS
from lightning_aigc.cli.class_source import REQUIRED, arguments_of
from lightning_aigc.cli.fit.short_help import GROUPS, OPTIONS, known_arguments, short_help
from lightning_aigc.cli.init.base import SHORT
from lightning_aigc.cli.init.command import short_names
from lightning_aigc.data import ImageCaptionData

Command = Callable[..., Any]
REAL = Path(__file__).parents[2] / "configs" / "sd_lora.yaml"
HEAVY = ("torch", "lightning", "diffusers", "transformers")


@pytest.mark.parametrize("verb", TRAINER_VERBS)
def test_the_help_of_a_training_is_one_screen_in_groups(command: Command, verb: str) -> None:
    said = command(verb, "--help")
    assert said.code == 0
    lines = said.out.splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 140
    assert f"lightning {verb} --help_all" in said.out and "--model.help DiffusionLoRA" in said.out
    if verb in ("fit", "demo"):
        for key in ("model.init_args.rank", "model.init_args.learning_rate", "data.init_args.train_data_dir"):
            assert f"--{key} " in said.out
        assert all(f"\n{group}\n" in said.out for group in GROUPS)


def test_each_listed_key_has_a_text_and_parses(command: Command) -> None:
    listed = re.findall(r"^  --(\S+)", short_help("fit"), re.MULTILINE)
    keys = [(prefix, key) for group in GROUPS.values() for prefix, key in group]
    assert listed == [*(f"{prefix}.{key}" for prefix, key in keys), *(option.removeprefix("--") for option in OPTIONS)]
    given = []
    for prefix, key in keys:
        argument = known_arguments(prefix)[key]
        assert len(argument.text) > 10, key
        default = None if argument.default is REQUIRED else argument.default
        given.append(f"--{prefix}.{key}={default if isinstance(default, str) else json.dumps(default)}")
    base = "--model.init_args.pretrained_model_name_or_path=embedded:sd"
    said = command("fit", "-c", REAL, *given, base, "--threads=1", "--resume", "--dry_run", "--print_config")
    assert said.code == 0, said.err
    config = yaml.safe_load(said.out)
    assert config["data"]["init_args"]["missing_captions"] == "error"
    assert config["trainer"]["plugins"]["init_args"]["memory"] == "lean"


def test_every_key_is_one_option_away(command: Command) -> None:
    said = command("fit", "--help_all")
    assert said.code == 0
    assert "--trainer.gradient_clip_algorithm" in said.out and "--model.help" in said.out


def test_its_page_says_what_the_signature_says() -> None:
    found = arguments_of("lightning_aigc.data.image_caption_data.ImageCaptionData")
    signature = {name: each.default for name, each in inspect.signature(ImageCaptionData).parameters.items()}
    assert {name: each.default for name, each in found.items()} == signature


def test_names_of_bases_are_those_of_the_families() -> None:
    assert sorted(short_names()) == sorted(SHORT)


@pytest.mark.parametrize("verb", ["", *TRAINER_VERBS, *OWN_VERBS])
def test_no_help_page_imports_a_large_package(verb: str) -> None:
    code = (
        "import sys\nfrom lightning_aigc.cli import main\n"
        f"try:\n    main({[*verb.split(), '--help']!r})\nexcept SystemExit as stop:\n    assert not stop.code\n"
        f"print('imported:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("imported: []\n")
