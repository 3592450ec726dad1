"""The `lightning` command: fit, validate, test and predict from YAML, demo, and other verbs such as init and report."""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import io
import os
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from lightning_aigc.errors import UserError
from lightning_aigc.secrets import redact_text

TRAINER_VERBS = ("fit", "validate", "test", "predict", "demo")
VERBS_IN_FOLDERS = ("init", "doctor", "plan", "import-config", "bench")
HELP_ALL = "--help_all"
"""Shows every key; `--help` shows those that people set."""
DEMO_CONFIG = Path(__file__).parents[1] / "configs" / "sd_lora_demo.yaml"
OWN_VERBS = {
    "init": "look at a folder of images and write a config for it: lightning init photos/ -o my.yaml",
    "caption": "write a caption next to each image that has none: lightning caption photos/ --trigger_word zorp",
    "sample": 'draw a grid of images with a run\'s LoRA: -c runs/x/config.yaml --prompts "a zorp mug" -o grid.png',
    "encode": "write latents and embeddings of many images as shards, which training streams: -c my.yaml -o shards/",
    "export": "convert a LoRA file, merge it, or write a hub folder of a run: export runs/x --to hub -o folder/",
    "doctor": "say what this machine has and what does not fit together; explain HCCL codes in a log",
    "report": "compare runs: one page, a Markdown table, and their curves as an image",
    "import-config": "write a config from one of ai-toolkit, sd-scripts, OneTrainer or SimpleTuner: FILE -o my.yaml",
    "import-deepspeed": "write a config from a ds_config.json, and say what each of its keys became",
    "plan": "model bytes, step time and memory of each way to send gradients on many cards",
    "bench": "measure rows that MindSpeed-MM and mindone publish: bench --as mindspeed-mm -o rows.jsonl",
}
USAGE = """usage: lightning VERB [options]

  demo       fit with the models and images in this package: offline, minutes on a CPU; results in runs/demo
  fit        train:      lightning fit -c configs/sd_lora.yaml [--model.init_args.rank 32 ...]
  init       {init}
  validate   print val_loss of the held-out images, with the run's newest snapshot; test does the same
  predict    draw the run's validation_prompts with its newest snapshot
  caption    {caption}
  sample     {sample}
  encode     {encode}
  export     {export}
  doctor     {doctor}
  report     {report}
  plan       {plan}
  bench      {bench}
  import-config      {import-config}
  import-deepspeed   {import-deepspeed}

lightning VERB --help shows a verb's options; fit and demo take -c several times, --print_config and --dry_run.
""".format(**OWN_VERBS)


def main(argv: list[str] | None = None) -> None:
    """Run one verb and exit with 0 for success, 1 for a UserError, 2 for a wrong command line, 130 for Ctrl-C."""
    try:
        _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # while modules are imported, or between the handlers of a run
        print("stopped", file=sys.stderr, flush=True)
        raise SystemExit(130) from None


def _run(arguments: list[str]) -> NoReturn:
    _print_any_character()
    verb = next((a for a in arguments if not a.startswith("-")), None)
    if verb is None:
        _print_page(USAGE)
        raise SystemExit(0 if {"-h", "--help"} & set(arguments) else 2)
    atexit.register(gc.freeze)  # else Python looks for garbage in all that was imported before it ends: 1.5 s
    if verb in TRAINER_VERBS and {"-h", "--help"} & set(arguments):
        from lightning_aigc.cli.fit.short_help import short_help

        _print_page(short_help(verb))
        raise SystemExit(0)
    if verb in TRAINER_VERBS:
        from lightning_aigc.cli.fit.trainer_commands import run_trainer_verb

        arguments = ["--help" if argument == HELP_ALL else argument for argument in arguments]
        raise SystemExit(run_trainer_verb(_demo_as_fit(arguments) if verb == "demo" else arguments))
    if verb in OWN_VERBS:
        raise SystemExit(_run_own_verb(verb, arguments[arguments.index(verb) + 1 :]))
    raise SystemExit(_hand_to_lightning_sdk(verb))


def _print_any_character() -> None:
    """Print `?` for a character that the terminal's encoding lacks, such as a tick on Windows, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _print_page(text: str) -> None:
    """Print a help page, of which `lightning --help | head` reads a part."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _close_output()


def _close_output() -> None:
    """Send further output nowhere: Python flushes once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _demo_as_fit(arguments: list[str]) -> list[str]:
    """The command line of `fit` for one of `demo`: its config, then all other arguments."""
    position = arguments.index("demo")
    is_alone = not any(argument.startswith(("--resume", "--overwrite", "--print_config")) for argument in arguments)
    again = ["--overwrite"] if is_alone else []
    return ["fit", "-c", str(DEMO_CONFIG), *again, *arguments[:position], *arguments[position + 1 :]]


def _run_own_verb(verb: str, arguments: list[str]) -> int:
    # Imported on demand: doctor must run where importing torch, which the other verbs need, fails.
    name = verb.replace("-", "_")
    folder = ".command" if verb in VERBS_IN_FOLDERS else ""
    own = importlib.import_module(f"lightning_aigc.cli.{name}{folder}")
    parser = OneLineParser(prog=f"lightning {verb}")
    own.add_arguments(parser)
    try:
        status: int = own.run(parser.parse_args(arguments))
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {redact_text(str(error))}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `lightning doctor | head`
        _close_output()
        return 1
    return status


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in one line, with the nearest option, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        if missing := message.partition("arguments are required: ")[2]:
            message = f"{self.prog} needs {missing}"
        elif message.startswith("unrecognized arguments: "):
            given = message.partition(": ")[2].split()[0]
            near = get_close_matches(given, self._option_string_actions, n=1)
            message = f"{self.prog} has no option {given}" + (f"; did you mean {near[0]}?" if near else "")
        print(f"error: {redact_text(message)} ({self.prog} --help shows how to use it)", file=sys.stderr)
        raise SystemExit(2)


def _hand_to_lightning_sdk(verb: str) -> int:
    """Forward an unknown verb to lightning-sdk, which installs a `lightning` script too."""
    try:
        from lightning_sdk.cli.entrypoint import main_cli  # type: ignore[import-not-found]
    except ImportError:
        near = get_close_matches(verb, (*TRAINER_VERBS, *OWN_VERBS), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"error: there is no verb {verb!r}{hint}\n\n{USAGE}", file=sys.stderr)
        return 2
    main_cli()
    return 0
