"""Remedies in errors of a config: each is typed as the error shows it, and the error is gone."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_aigc.cli.fit.aigc_cli import AIGCCLI
from lightning_aigc.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")

Command = Callable[..., Any]
OPTION = re.compile(r"--([\w.]+) ([\w.\[\]]+)")
LINE = re.compile(r"((?:model|data|trainer)\.[\w.]+): ([\w.\[\]]+)")
CORRECTED = re.compile(r"^(?P<key>[\w.]+)(?::| must).*(?:; use |did you mean )(?P<value>[\w.]+)\??$")

MISTAKES = {
    "an accelerator that is not here": ["--trainer.accelerator=gpu"],
    "an accelerator with a slip": ["--trainer.accelerator=autp"],
    "more processes than cores carry": ["--trainer.devices=9999"],
    "no process": ["--trainer.devices=0"],
    "a strategy with a slip": ["--trainer.strategy=zero_9"],
    "a word that is none of a key's": ["--trainer.plugins.init_args.memory=lea"],
    "a side that latents do not divide": ["--data.init_args.resolution=63"],
    "buckets upside down": ["--data.init_args.min_bucket_reso=512", "--data.init_args.max_bucket_reso=256"],
    "crops of cached latents": ["--data.init_args.center_crop=false"],
    "orders of cached captions": ["--data.init_args.shuffle_caption=true"],
    "a ratio of no class images": ["--data.init_args.prior_ratio=-1"],
    "an encoding that Python lacks": ["--data.init_args.caption_encoding=chinois"],
    "a word that is no word": ["--data.init_args.trigger_word=é"],
    "a schedule with a slip": ["--model.init_args.lr_scheduler=cosin"],
    "a name that is a path": ["--model.init_args.output_name=a/b"],
    "DoRA on a packed base": ["--model.init_args.use_dora=true", "--model.init_args.base_quantization=int8"],
}


def build(path: Path, *arguments: str) -> None:
    AIGCCLI(args=["-c", str(path), *arguments], run=False)


def remedies(sentence: str) -> list[tuple[str, str]]:
    """Keys and values that an error proposes: as options, as lines of a config, or as another value for its key."""
    found = [*OPTION.findall(sentence), *LINE.findall(sentence.partition(";")[2])]
    if corrected := CORRECTED.match(sentence):
        found.append((corrected["key"], corrected["value"]))
    return found


PLUGIN, OPTIMIZER = "--trainer.plugins.init_args", "--model.init_args.optimizer"
WHILE_BUILDING: dict[str, tuple[list[str], dict[str, list[str]]]] = {
    "a schedule without an end": (
        ["--model.init_args.max_train_steps=null", "--model.init_args.lr_scheduler=cosine"],
        {"set model.init_args.max_train_steps": ["--model.init_args.max_train_steps=1"]},
    ),
    "no signal where noise is predicted": (
        ["--model.init_args.zero_terminal_snr=true"],
        {"set model.init_args.prediction_type: v_prediction": ["--model.init_args.prediction_type=v_prediction"]},
    ),
    "every image held out": (
        ["--data.init_args.validation_split=0.999"],
        {
            "use a smaller share": ["--data.init_args.validation_split=0.2"],
            "or data.init_args.validation_data_dir": ["--data.init_args.validation_data_dir=PHOTOS", "-split"],
        },
    ),
    "a schedule for an optimizer with its own": (
        [OPTIMIZER + "={class_path: schedulefree.AdamWScheduleFree}", "--model.init_args.lr_scheduler=cosine"],
        {
            "set model.init_args.lr_scheduler: constant and lr_warmup_steps: 0": [
                "--model.init_args.lr_scheduler=constant",
                "--model.init_args.lr_warmup_steps=0",
            ]
        },
    ),
    "a norm of gradients that are gone": (
        [
            "--model=DiffusionFineTuning",
            "--model.init_args.optimizer_in_backward=true",
            "--trainer.gradient_clip_val=1",
        ],
        {
            "use 0": ["--trainer.gradient_clip_val=0"],
            "or set optimizer_in_backward: false": ["--model.init_args.optimizer_in_backward=false"],
        },
    ),
    "weights that are packed and trained": (
        ["--model=DiffusionFineTuning", "--model.init_args.base_quantization=int8"],
        {
            "leave it unset": ["--model.init_args.base_quantization=null"],
            "or train a LoRA on a packed base with DiffusionLoRA": ["--model=DiffusionLoRA"],
        },
    ),
    "a budget that packs nothing": (
        ["--model.init_args.base_quantization={target_mib: 100000}"],
        {
            "leave base_quantization unset": ["--model.init_args.base_quantization=null"],
            "or ask for less than 0.2667": ["--model.init_args.base_quantization={target_mib: 0.26}"],
        },
    ),
    "two budgets": (
        [PLUGIN + ".memory={kept: 0.18, peak_gb: 6}"],
        {
            "{kept: 0.18}": [PLUGIN + ".memory={kept: 0.18}"],
            "or {peak_gb: 6}": [PLUGIN + ".memory={peak_gb: 6}"],
        },
    ),
    "two precisions": (
        ["--trainer.precision=bf16-mixed"],
        {
            "set trainer.plugins.init_args.precision: bf16-mixed, and trainer.precision: null": [
                PLUGIN + ".precision=bf16-mixed",
                "--trainer.precision=null",
            ]
        },
    ),
    "a negative limit of the norm": (
        ["--trainer.gradient_clip_val=-1"],
        {"set trainer.gradient_clip_val: null": ["--trainer.gradient_clip_val=null"]},
    ),
    "captions of another ending": (
        ["--data.init_args.caption_extension=.cap"],
        {"Set data.init_args.caption_extension to .txt": ["--data.init_args.caption_extension=.txt"]},
    ),
    "a judge that is not here": (
        [
            "--trainer.callbacks+=CLIPConvergenceGuard",
            "--trainer.callbacks.prompts=[a zorp cup]",
            "--trainer.callbacks.clip_model=nonsense",
        ],
        {"or `embedded:clip`": ["--trainer.callbacks.clip_model=embedded:clip"]},
    ),
    "two snapshots of a run": (
        ["--trainer.callbacks+=ExactSnapshot", "--trainer.callbacks+=ExactSnapshot"],
        {"leave one of them out": ["--trainer.callbacks+=ExactSnapshot", "-ExactSnapshot"]},
    ),
    "a base that is not here": (
        ["--model.init_args.pretrained_model_name_or_path=nobody/nothing"],
        {"embedded:sd needs no download": ["--model.init_args.pretrained_model_name_or_path=embedded:sd"]},
    ),
}
"""Mistakes that are seen once models and images are read: what was typed, and for each remedy how it is typed.

`-word` takes out what was typed with this word in it.
"""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_remedy_of_an_error_can_be_typed_and_ends_it(
    mistake: str,
    quick_config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning"])
    quick_config["trainer"]["default_root_dir"] = str(tmp_path / "run")
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(quick_config))
    try:
        build(tmp_path / "my.yaml", *MISTAKES[mistake])
    except UserError as error:
        sentence = str(error)
    except SystemExit:
        sentence = capsys.readouterr().err.strip().splitlines()[-1].removeprefix("error: ")
    else:
        pytest.fail("there is no error")
    proposed = remedies(sentence)
    assert proposed, sentence
    for key, value in proposed:  # as a user edits the line
        others = [argument for argument in MISTAKES[mistake] if not argument.startswith(f"--{key}=")]
        build(tmp_path / "my.yaml", *others, f"--{key}={value}")


@pytest.mark.parametrize(
    "mistake", [pytest.param(m, marks=pytest.mark.long if at >= 2 else ()) for at, m in enumerate(WHILE_BUILDING)]
)
def test_the_remedies_of_an_error_from_models_or_images_end_it(
    command: Command, mistake: str, quick_config: dict[str, Any], photos: Path, tmp_path: Path
) -> None:
    quick_config["trainer"] |= {"default_root_dir": str(tmp_path / "run"), "gradient_clip_val": None}
    quick_config["model"]["init_args"] |= {"max_train_steps": 1, "validation_prompts": []}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(quick_config))
    typed, remedies_typed = WHILE_BUILDING[mistake]
    said = command("fit", "-c", tmp_path / "my.yaml", *typed)
    assert said.code == 1 and len(said.errors) == 1
    for remedy, given in remedies_typed.items():
        assert remedy in said.errors[0]
        instead = [argument.replace("PHOTOS", str(photos)) for argument in given]
        dropped = [argument.removeprefix("-") for argument in instead if not argument.startswith("--")]
        keys = {argument.partition("=")[0] for argument in instead} - {"--trainer.callbacks+"}
        kept = [a for a in typed if a.partition("=")[0] not in keys and not any(word in a for word in dropped)]
        classes = [a for a in instead if a.startswith("--model=")]
        added = [a for a in instead if a.startswith("--") and a not in classes]
        ended = command("fit", "-c", tmp_path / "my.yaml", *classes, *kept, *added, "--overwrite")
        assert ended.code == 0, (remedy, ended.err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fit"], "the config is missing, or lacks data, model; give one with -c my.yaml"),
        (["fit", "--model.init_args.rank", "3"], "the config is missing, or its block has no class_path"),
        (["sample"], "lightning sample needs -c/--config (lightning sample --help"),
        (["sample", "-c", "x", "--wieght", "1"], "lightning sample has no option --wieght; did you mean --weight?"),
        (["plan"], "lightning plan needs --nodes, --devices"),
        (["export", "a", "--to", "koh", "--output", "b"], "invalid choice: 'koh' (choose from"),
        (["doctor", "--foo"], "lightning doctor has no option --foo"),
    ],
)
def test_a_command_line_that_lacks_something_is_one_line(command: Command, words: list[str], said: str) -> None:
    done = command(*words)
    assert done.code == 2 and len(done.err.splitlines()) == 1 and said in done.err


@pytest.mark.parametrize("strategy", ["ddp", "npu_sparse"])
def test_a_port_that_is_in_use_is_named_and_no_rank_is_left(
    quick_config: dict[str, Any], tmp_path: Path, strategy: str
) -> None:
    quick_config["trainer"] |= {"default_root_dir": "run", "devices": 2, "strategy": strategy}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(quick_config))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "lightning_aigc", "fit", "-c", "my.yaml"],
            cwd=tmp_path,
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            capture_output=True,  # ends only once every rank has closed it
            text=True,
            timeout=100,
        )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 1 and len(errors) == 1
    assert f"port {port} of 127.0.0.1, where the ranks meet, is in use" in errors[0]
