"""Every kind of mistake in a config or on the command line: one line that names the key and the nearest right name."""

from __future__ import annotations

import contextlib
import copy
import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from lightning_aigc.cli.fit.aigc_cli import AIGCCLI
from lightning_aigc.errors import UserError

Command = Callable[..., Any]
DEMO = Path(__file__).parents[3] / "configs" / "sd_lora_demo.yaml"
REAL = DEMO.with_name("sd_lora.yaml")


@pytest.fixture
def mistake(command: Command, tmp_path: Path) -> Callable[..., str]:
    """The one error line of a fit with these arguments or this YAML on top of the demo's."""

    def run(*arguments: str, text: str | None = None) -> str:
        extra = list(arguments)
        if text is not None:
            path = tmp_path / "mine.yaml"
            path.write_text(text)
            extra += ["-c", str(path)]
        said = command("fit", "-c", DEMO, "--trainer.default_root_dir", tmp_path / "run", *extra)
        assert said.code in (1, 2)
        lines = [line for line in said.err.splitlines() if line.strip() and not line.startswith("Seed set to")]
        assert len(lines) == 1 and lines[0].startswith("error: "), said.err
        assert not (tmp_path / "run" / "summary.json").exists()
        return str(lines[0])

    return run


ON_THE_LINE = {
    "a wrong key": ("--model.init_args.rnak=3", "DiffusionLoRA has no key 'rnak'; did you mean rank?"),
    "a wrong key of the trainer": ("--trainer.max_stpes=3", "'trainer.max_stpes'; did you mean trainer.max_steps?"),
    "a wrong block": ("--modle.init_args.rank=3", "no key 'modle'; did you mean model?"),
    "a wrong class": ("--model.class_path=StableDifusionLoRA", "did you mean StableDiffusionLoRA?"),
    "a wrong callback": ("--trainer.callbacks+=RunRepot", "did you mean RunReport?"),
    "a wrong optimizer": (
        "--model.init_args.optimizer=AdamWW",
        "or the class path of one that imports; got 'AdamWW'; did you mean adamw?",
    ),
    "a key of the other block": (
        "--model.init_args.resolution=512",
        "DiffusionLoRA has no key 'resolution'; it is data.init_args.resolution",
    ),
    "a key of a sibling": (
        "--model.init_args.protect_edges=true",
        "DiffusionLoRA has no key 'protect_edges', which DiffusionControlNet has; leave it out, or train with that",
    ),
    "a value that trips the parser": ("--seed_everything=?", "seed_everything: this value cannot be read"),
    "text for a whole number": (
        "--model.init_args.rank=three",
        "model.init_args.rank: wanted a whole number, got three",
    ),
    "a fraction for one": ("--model.init_args.rank=2.5", "model.init_args.rank: wanted a whole number, got 2.5"),
    "a wrong choice": ("--model.init_args.loss_type=hubber", "model.init_args.loss_type"),
    "a wrong precision": ("--trainer.precision=bf16-mixd", "did you mean bf16-mixed?"),
    "rank zero": ("--model.init_args.rank=0", "model.init_args.rank must be at least 1, got 0"),
    "a side that no pipeline draws": (
        "--model.init_args.sample_resolution=100",
        "model.init_args.sample_resolution must be a multiple of 8 pixels for SD 1.5, got 100; use 96",
    ),
    "a wrong schedule": ("--model.init_args.lr_scheduler=cosin", "lr_scheduler must be one of"),
    "no such folder": ("--data.init_args.train_data_dir=/no/such", "data.init_args.train_data_dir"),
    "no such embedded set": ("--data.init_args.train_data_dir=embedded:bran", "brand"),
    "no such pipeline": ("--model.init_args.pretrained_model_name_or_path=embedded:ds", "embedded are"),
    "no such config": ("--config=/no/such.yaml", "/no/such.yaml"),
    "a folder for a config": ("--config=configs", "config"),
    "no such checkpoint": ("--ckpt_path=/no/such.ckpt", "ckpt_path: there is no checkpoint /no/such.ckpt"),
    "a wrong accelerator": ("--trainer.accelerator=gpuu", "there is no accelerator 'gpuu'; did you mean gpu?"),
    "a wrong strategy": ("--trainer.strategy=ddpp", "there is no strategy 'ddpp'; did you mean ddp?"),
    "too few steps": ("--trainer.max_steps=-5", "`max_steps` must be a non-negative integer"),
    "no accumulation": ("--trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches must be at least 1"),
    "no threads": ("--threads=0", "threads must be at least 1"),
    "a batch of none": ("--data.init_args.train_batch_size=0", "train_batch_size"),
    "a resolution of none": ("--data.init_args.resolution=0", "resolution"),
}
IN_YAML = {
    "broken YAML": ("a: [", "the YAML cannot be read"),
    "an empty file": ("", "the YAML must hold blocks"),
    "a list": ("- 1", "the YAML must hold blocks"),
    "a number": ("3", "the YAML must hold blocks"),
    "a control character": ("\x00", "the YAML cannot be read"),
    "a number for the trainer": ("trainer: 3", "trainer: wanted a block of keys"),
    "callback without an argument": (
        "trainer: {callbacks: [{class_path: lightning.pytorch.callbacks.EarlyStopping}]}",
        "trainer.callbacks.init_args: monitor of EarlyStopping is missing; add it",
    ),
    "one callback twice": (
        "trainer: {callbacks: [{class_path: CLIPConvergenceGuard}, {class_path: CLIPConvergenceGuard}]}",
        "trainer.callbacks has CLIPConvergenceGuard twice, and the state of one alone is kept; keep one",
    ),
    "schedule without an argument": (
        "model: {init_args: {lr_scheduler: {class_path: torch.optim.lr_scheduler.StepLR}}}",
        "model.init_args.lr_scheduler: step_size is missing; add it",
    ),
    "no model": ("model: null", "the config is missing, or lacks model; give one with -c my.yaml"),
    "a class of another kind": ("model: {class_path: ImageCaptionData}", "ImageCaptionData is a class of another kind"),
    "a number for a class": ("model: {class_path: 5}", "model"),
    "a wrong key in a callback": (
        "trainer: {callbacks: [{class_path: RunReport, init_args: {clip_modle: x}}]}",
        "RunReport has no key 'clip_modle'; did you mean clip_model?",
    ),
    "a number for callbacks": ("trainer: {callbacks: 3}", "trainer.callbacks: wanted a list"),
    "a wrong key of the data": (
        "data: {init_args: {train_data_dri: x}}",
        "ImageCaptionData has no key 'train_data_dri'; did you mean train_data_dir?",
    ),
    "a wrong key of the optimizer": (
        "model: {init_args: {optimizer: {class_path: torch.optim.AdamW, init_args: {lrr: 1}}}}",
        "AdamW has no key 'lrr'; did you mean lr?",
    ),
    "text for an optimizer's list": (
        "model: {init_args: {optimizer: {class_path: torch.optim.AdamW, init_args: {betas: 0.9;0.95}}}}",
        "model.init_args.optimizer.init_args.betas: wanted a list, got 0.9;0.95",
    ),
    "a missing key of the schedule": (
        "model: {init_args: {lr_scheduler: {class_path: torch.optim.lr_scheduler.StepLR}}}",
        "step_size",
    ),
    "text for a list": (
        "model: {init_args: {validation_prompts: a dog}}",
        "validation_prompts: wanted a list, got a dog",
    ),
    "a wrong word in a list": ("model: {init_args: {lora_targets: [attentoin]}}", "did you mean attention?"),
    "a list for a number": ("model: {init_args: {rank: [1]}}", "model.init_args.rank: wanted a whole number"),
    "null for a number": ("model: {init_args: {rank: null}}", "model.init_args.rank must not be null"),
    "null for a switch of the data": ("data: {init_args: {resolution: null}}", "resolution"),
    "text for a switch": ("model: {init_args: {use_ema: maybe}}", "model.init_args.use_ema: wanted true or false"),
    "another trainer's word": ("model: {init_args: {network_dim: 3}}", "it is called rank here"),
    "another trainer's word for data": ("data: {init_args: {batch_size: 3}}", "it is called train_batch_size here"),
    "zero terminal SNR with epsilon": (
        "model: {init_args: {zero_terminal_snr: true}}",
        "set model.init_args.prediction_type: v_prediction",
    ),
    "two weightings": ("model: {init_args: {debiased_estimation: true}}", "snr_gamma and debiased_estimation"),
    "half precision decoding": ("model: {init_args: {vae_dtype: float16}}", "model.init_args.vae_dtype"),
}


@pytest.mark.parametrize(("argument", "said"), ON_THE_LINE.values(), ids=ON_THE_LINE.keys())
def test_a_mistake_on_the_command_line_is_one_line(mistake: Callable[..., str], argument: str, said: str) -> None:
    assert said in mistake(argument)


@pytest.mark.parametrize(("text", "said"), IN_YAML.values(), ids=IN_YAML.keys())
def test_a_mistake_in_yaml_is_one_line(mistake: Callable[..., str], text: str, said: str) -> None:
    assert said in mistake(text=text)


def test_a_damaged_checkpoint_is_one_line(mistake: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "bad.ckpt").write_bytes(b"not a checkpoint")
    assert "ckpt_path" in mistake(f"--ckpt_path={tmp_path / 'bad.ckpt'}", "--trainer.callbacks=[]")


def test_an_unknown_verb_names_the_nearest(command: Command) -> None:
    said = command("fitt", "-c", "x.yaml")
    assert said.code == 2
    assert said.err.splitlines()[0] == "error: there is no verb 'fitt'; did you mean fit?"


def test_without_a_verb_the_usage_is_printed(command: Command) -> None:
    for arguments, code in (((), 2), (("--help",), 0)):
        said = command(*arguments)
        assert said.code == code and said.out.startswith("usage: lightning VERB")


def test_the_first_line_on_a_terminal_is_the_error_and_imports_are_left_out_of_garbage_collection(
    tmp_path: Path,
) -> None:
    program = """
import gc, sys
from lightning_aigc.cli import main
try:
    main(sys.argv[1:])
finally:
    print("collects:", gc.isenabled(), "left out:", gc.get_freeze_count())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "fit", "-c", str(DEMO), "--model.init_args.rank", "0"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if not line.startswith("Seed set")]
    assert said == ["error: model.init_args.rank must be at least 1, got 0"]
    assert list(tmp_path.iterdir()) == []
    found = re.search(r"collects: (\w+) left out: (\d+)", done.stdout)
    assert found is not None and found[1] == "True" and int(found[2]) > 100_000, done.stdout


# Any config at all --------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.sampled_from(["", "1e-4", "three", "auto", "cosine", "embedded:sd", "AdamW", "ImageCaptionData", "é", "a.b.C"]),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=8),
)
EMPTY_BLOCKS = {
    "at the top": ("modle: {}", "the config has no key 'modle'; did you mean model?"),
    "empty below too": ("modle: {init_args: {}}", "the config has no key 'modle'; did you mean model?"),
    "of the trainer": ("trainer: {calbacks: {}}", "trainer has no key 'calbacks'; did you mean callbacks?"),
    "an argument": (
        "model: {class_path: StableDiffusionLoRA, init_args: {rnak: {}}}",
        "no key 'rnak'; did you mean rank?",
    ),
    "in a list": (
        "trainer: {callbacks: [{class_path: RunReport, init_args: {promts: {}}}]}",
        "trainer.callbacks[0].init_args: RunReport has no key 'promts'; did you mean prompts?",
    ),
    "beside a class": (
        "data: {class_path: ImageCaptionData, init_agrs: {}}",
        "data has no key 'init_agrs'; did you mean init_args?",
    ),
}


@pytest.mark.parametrize("case", EMPTY_BLOCKS)
def test_an_unknown_block_without_a_value_is_no_less_wrong(case: str, mistake: Callable[..., str]) -> None:
    text, said = EMPTY_BLOCKS[case]
    assert said in mistake(text=text)


def test_blocks_without_a_value_that_are_known_pass(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("trainer: {}\nmodel: {init_args: {}}\n")
    assert command("fit", "-c", DEMO, "-c", path, "--print_config").code == 0


BUGS = """
from lightning.pytorch import Callback, LightningModule

def deeper(kind):
    return None + 1 if kind == "type" else {}["gone"] if kind == "key" else None.foo

class Buggy(Callback):
    def __init__(self, kind: str = "type") -> None:
        deeper(kind)

class BuggyModel(LightningModule):
    def __init__(self, kind: str = "type") -> None:
        super().__init__()
        deeper(kind)
"""


@pytest.mark.parametrize("kind", ["type", "key", "attribute"])
@pytest.mark.parametrize("block", ["model", "trainer.callbacks"])
def test_a_bug_in_a_users_own_class_is_one_line_and_its_traceback_a_file(
    kind: str, block: str, mistake: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_bugs.py").write_text(BUGS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_bugs", raising=False)
    if block == "model":
        text = f"model: {{class_path: own_bugs.BuggyModel, init_args: {{kind: {kind}}}}}"
    else:
        text = f"trainer: {{callbacks: [{{class_path: own_bugs.Buggy, init_args: {{kind: {kind}}}}}]}}"
    line = mistake(text=text)
    kept = tmp_path / "run" / "traceback.txt"
    assert line.endswith(f"(own_bugs.py:5); its traceback is in {kept}")
    assert f"{kind.capitalize()}Error" in line
    assert "in deeper\n" in kept.read_text() and kept.read_text().startswith("Traceback (most recent call last)")
    # Where the run's folder cannot be written, it goes where it can.
    kept.unlink()
    kept.mkdir()
    elsewhere = Path(mistake(text=text).rpartition(" is in ")[2])
    assert "in deeper\n" in elsewhere.read_text(encoding="utf-8")
    elsewhere.unlink()


VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(["class_path", "init_args", "rank", "x", "lr"]), SCALARS, max_size=3),
)
PYTHON_SPEAKING = ("not supported between", "NoneType", "object is not", "has no attribute", "unsupported operand")
# What would really start something (processes, a logger's service) or fill the machine is left to the tests above.
LEFT_ALONE = {"trainer.devices", "trainer.accelerator", "trainer.default_root_dir", "threads"}


def places(config: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(config, dict | list):
        for key, value in config.items() if isinstance(config, dict) else enumerate(config):
            yield (*path, key)
            yield from places(value, (*path, key))


def misspelt(data: st.DataObject, key: str) -> str:
    at = data.draw(st.integers(0, len(key) - 1))
    return data.draw(st.sampled_from([key[:at] + key[at + 1 :], key[:at] + "x" + key[at:], key.upper(), key + "s"]))


def spoil(data: st.DataObject, config: dict[str, Any]) -> None:
    """Change one random place: its value, its key, or take it away, or put something beside it."""
    everywhere = [path for path in places(config) if ".".join(map(str, path)) not in LEFT_ALONE]
    path = data.draw(st.sampled_from(everywhere))
    owner: Any = config
    for key in path[:-1]:
        owner = owner[key]
    last = path[-1]
    how = data.draw(st.sampled_from(["value", "value", "value", "key", "drop", "add"]))
    event(how)
    if how == "value" or isinstance(owner, list):
        owner[last] = data.draw(VALUES)
    elif how == "key":
        owner[misspelt(data, last) or "x"] = owner.pop(last)
    elif how == "drop":
        del owner[last]
    else:
        owner[data.draw(st.sampled_from(["x", "rank", "lr", "seed", "class_path", "init_args"]))] = data.draw(VALUES)


@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_config_parses_and_builds_or_gives_one_error_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """No traceback, whatever is wrong where; parsed and built in process, so an escaping exception fails the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning"])
    source = data.draw(st.sampled_from([DEMO, REAL]))
    config = copy.deepcopy(yaml.safe_load(source.read_text(encoding="utf-8")))
    config["threads"] = 1
    config["trainer"] |= {"accelerator": "cpu", "devices": 1}
    for _ in range(data.draw(st.integers(1, 3))):
        spoil(data, config)
    path = tmp_path / "any.yaml"
    path.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    said, status = io.StringIO(), 2
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            AIGCCLI(args=["-c", str(path)], run=False)
        event("built")
        return
    except UserError as error:
        said.write(f"error: {error}")
    except SystemExit as stop:
        status = int(str(stop.code))
    event("refused")
    assert status == 2
    errors = [line for line in said.getvalue().splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and len(errors[0]) > len("error: "), said.getvalue()
    assert not any(words in errors[0] for words in PYTHON_SPEAKING), said.getvalue()
    assert "\n" not in said.getvalue()[said.getvalue().index("error:") :].strip(), said.getvalue()
