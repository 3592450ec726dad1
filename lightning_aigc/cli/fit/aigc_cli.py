"""The LightningCLI behind fit, validate, test and predict."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
import yaml

# Imported so that YAML can name the package's classes without a path.
from lightning_aigc import callbacks, data, diffusion, precision  # noqa: F401
from lightning_aigc._lightning import (
    Callback,
    LightningArgumentParser,
    LightningCLI,
    LightningDataModule,
    LightningModule,
    MisconfigurationException,
    SaveConfigCallback,
    TensorBoardLogger,
    Trainer,
    WandbLogger,
    get_filesystem,
    is_overridden,
    rank_zero_info,
)
from lightning_aigc.callbacks import CLIPConvergenceGuard, ExactSnapshot, RunReport, SampleGrid
from lightning_aigc.callbacks.order import FIRST, LAST, order_callbacks
from lightning_aigc.callbacks.run_report.run_report import REPORT_FILE
from lightning_aigc.checkpoint.files.reader import find_snapshots
from lightning_aigc.checkpoint.lightning_loops import finds_last
from lightning_aigc.checkpoint.preemption import is_requeued
from lightning_aigc.checkpoint.resume import LATEST, is_snapshot
from lightning_aigc.checkpoint.run_config import YAML_LOADER, find_finished, finished_sentence
from lightning_aigc.cli.fit.config_errors import first_sentence, readable_config_error, refuse_nulls, user_error_within
from lightning_aigc.cli.fit.empty_blocks import unknown_empty_blocks
from lightning_aigc.cli.fit.evaluate import EVALUATION_VERBS, UNTRAINED, load_weights, snapshot_folder
from lightning_aigc.cli.fit.rank_agreement import check_ranks_agree, check_world
from lightning_aigc.cli.fit.rank_errors import end_started_ranks, share_errors
from lightning_aigc.cli.fit.short_help import OPTIONS
from lightning_aigc.cli.fit.start_lines import StartLines
from lightning_aigc.cli.fit.traceback_file import bug_within
from lightning_aigc.cli.fit.trainer_values import check_trainer_values
from lightning_aigc.diffusion.training.module import DiffusionTraining
from lightning_aigc.errors import ConfigError, UserError
from lightning_aigc.gradient_sync.transport.process_groups import is_first_of_node
from lightning_aigc.protocols import HasValidationPrompts
from lightning_aigc.report.record import SUMMARY_FILE
from lightning_aigc.secrets import redact, redact_text, refuse_hidden
from lightning_aigc.strategies.device_process_group import meet_ranks

LISTED = 3
"""Files of an earlier run that a refusal names."""
KNOWN_CHECKPOINTS = ("best", "last", "latest", "hpc", "registry", UNTRAINED)  # keywords for ckpt_path


@runtime_checkable
class BringsSnapshots(Protocol):
    """Adds ExactSnapshot in `configure_callbacks`, so that the command line does not."""

    def brings_snapshots(self, trainer: Any) -> bool:
        """Whether it adds ExactSnapshot for this Trainer."""
        ...


class AIGCArgumentParser(LightningArgumentParser):
    """Reports a config error in one line instead of jsonargparse's sixty."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        refuse_command(readable_config_error(message, self))

    def parse_path(self, cfg_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Parse a config file, refusing unknown empty blocks, which jsonargparse drops unchecked."""
        config: Any = None
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):  # jsonargparse reports these itself
            text = Path(str(cfg_path)).read_text(encoding="utf-8")
            config = yaml.load(text, YAML_LOADER)
        for sentence in unknown_empty_blocks(config, self):
            refuse_command(sentence)
        return super().parse_path(cfg_path, *args, **kwargs)


def refuse_command(sentence: str) -> NoReturn:
    """Print what is wrong with the command or its config, once a node, whose ranks all have it, and exit with 2."""
    if is_first_of_node():
        print(f"error: {redact_text(sentence)}", file=sys.stderr)
    raise SystemExit(2)


class SaveConfig(SaveConfigCallback):
    """Saves the config of a fit, without its secrets, in `default_root_dir` and in the logger's folder."""

    callback_order = LAST  # behind all that may refuse the run

    def __init__(self, parser: LightningArgumentParser, config: Any, *args: Any, **kwargs: Any) -> None:
        shared = config.clone()
        for key, value in config.items():
            shared[key] = redact(value, key.rpartition(".")[2])
        shared.overwrite = False  # the saved config describes the run, not how it was started
        super().__init__(parser, shared, *args, **kwargs)
        self.save_to_log_dir = False  # save_config below writes there

    @cached_property
    def text(self) -> str:
        """The config as YAML, made once: the parser has validated it, and a dump with its checks takes 0.1 s."""
        return str(self.parser.dump(self.config, skip_none=False, skip_validation=True, format="yaml"))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # validate would replace the run's config.yaml by one that fit cannot read
            log_dir = trainer.log_dir  # asked of every rank: rank 0 sends it to the others
            self._folders = dict.fromkeys((str(trainer.default_root_dir), str(log_dir or trainer.default_root_dir)))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the config now: one that is refused until here must not replace that of an earlier run."""
        if trainer.is_global_zero:
            self.save_config(trainer, pl_module, "fit")

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for folder in self._folders:
            files = get_filesystem(folder)
            files.makedirs(folder, exist_ok=True)
            with files.open(f"{folder}/config.yaml", "w", encoding="utf-8") as file:
                file.write(self.text)


class CompareRanks(Callback):
    """Stops a run whose ranks do not agree, once the data module has its images and before anything is written."""

    callback_order = FIRST

    def __init__(self, config: Any) -> None:
        self._config = config

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            check_ranks_agree(trainer, self._config)


class AIGCCLI(LightningCLI):
    """LightningCLI for any LightningModule and LightningDataModule; the package's classes go by short name."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=AIGCArgumentParser,
            seed_everything_default=42,
            trainer_defaults={
                "max_epochs": -1,
                "default_root_dir": "runs/default",
                "enable_model_summary": False,  # StartLines has the two counts that matter
            },
            # docs/architecture.md, decision 13: the automatic key binds parameters before the LoRA exists.
            auto_configure_optimizers=False,
            save_config_callback=SaveConfig,
            **kwargs,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the verb of this command line alone: each verb's parser takes 50 ms, and no other one is asked."""
        verbs = LightningCLI.subcommands()
        asked = sys.argv[1] if len(sys.argv) > 1 else ""
        return {asked: verbs[asked]} if asked in verbs else verbs

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for option, given in OPTIONS.items():
            parser.add_argument(option, **given)

    def before_instantiate_classes(self) -> None:
        self._check_values()
        threads = self._get(self.config, "threads")
        if threads:
            torch.set_num_threads(threads)
        if self._get(self.config, "resume"):
            self._resume()

    def _resume(self) -> None:
        given = self._get(self.config, "ckpt_path")
        if given not in (None, LATEST):
            raise ConfigError(f"--resume takes the newest snapshot, and ckpt_path names {given}; give only one of them")
        if self.subcommand != "fit":
            raise ConfigError(f"--resume is for fit; give {self.subcommand} a --ckpt_path")
        config = self.config[str(self.subcommand)]
        if config.overwrite:
            raise ConfigError("--resume continues the earlier run and --overwrite replaces it; give only one of them")
        config.resume = False  # as `overwrite` in SaveConfig
        config.ckpt_path = None if config.dry_run else LATEST

    def before_fit(self) -> None:
        """Compare the ranks, say where to look, and add ExactSnapshot for `--resume` if nobody else provides it."""
        found: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        found.insert(0, CompareRanks(self.config[str(self.subcommand)]))
        module = self.model
        module_brings = isinstance(module, BringsSnapshots) and module.brings_snapshots(self.trainer)
        has_snapshots = module_brings or any(isinstance(callback, ExactSnapshot) for callback in found)
        given = self._get(self.config, "ckpt_path")
        if (given == LATEST or is_snapshot(given)) and not has_snapshots:
            found.append(ExactSnapshot())
        if not self._get(self.config, "dry_run"):
            found.append(StartLines())
        order_callbacks(self.trainer)
        if self.trainer.world_size > 1:
            share_errors(self.model, self.datamodule)
        if self.trainer.is_global_zero and not self._get(self.config, "dry_run"):
            print("\n".join(where_to_look(self.trainer, module)), flush=True)

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the subcommand, unless this run has finished: then not even its loggers open a file."""
        if subcommand == "fit" and self._is_finished():
            return
        if subcommand == "fit" and not self._may_replace():
            refuse_earlier_run(self.trainer)
        check_world(self.trainer)
        meet_ranks(self.trainer)
        try:
            super()._run_subcommand(subcommand)
        except BaseException:
            end_started_ranks(self.trainer)
            raise

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """The Trainer's arguments; validate, test and predict load the run's newest snapshot unless told otherwise."""
        given = super()._prepare_subcommand_kwargs(subcommand)
        if given.get("weights_only") is None:  # with None Lightning runs the code in a checkpoint of an http address
            given["weights_only"] = True
        if subcommand in EVALUATION_VERBS and isinstance(self.model, DiffusionTraining):
            given["ckpt_path"] = load_weights(
                self.trainer, given.get("ckpt_path"), self.model, self.datamodule, subcommand
            )
            if subcommand == "predict" and not is_overridden(
                "predict_dataloader", self.datamodule, LightningDataModule
            ):
                self._attach_data(given.pop("datamodule", None))  # the module brings the prompts
        return given

    def _attach_data(self, given: LightningDataModule | None) -> None:
        """Give the Trainer data that have no loader for this verb: samples take sources or conditions from them."""
        if given is not None:
            given.trainer, self.trainer.datamodule = self.trainer, given  # type: ignore[attr-defined]

    def _may_replace(self) -> bool:
        """Whether this command may write into the folder of an earlier run: it continues one, replaces it or is dry."""
        given = self._get(self.config, "ckpt_path")
        if given == LATEST:
            has_results = Path(self.trainer.default_root_dir, SUMMARY_FILE).is_file()
            continues = bool(find_snapshots(snapshot_folder(self.trainer))) or not has_results
        else:
            continues = finds_last(self.trainer) if given == "last" else given is not None
        return continues or is_requeued() or any(self._get(self.config, key) for key in ("overwrite", "dry_run"))

    def _is_finished(self) -> bool:
        given = self._get(self.config, "ckpt_path")
        if given != LATEST and not (given is None and is_requeued()):
            return False
        finished = find_finished(self.trainer, self.model, self.datamodule, snapshot_folder(self.trainer))
        if finished is not None:
            rank_zero_info(finished_sentence(finished, self.trainer.default_root_dir))
        return finished is not None

    def _check_values(self) -> None:
        """Refuse values of the right type on which the Trainer would fail with a traceback."""
        trainer, threads, ckpt_path = (self._get(self.config, key) for key in ("trainer", "threads", "ckpt_path"))
        if not hasattr(trainer, "as_dict"):
            raise ConfigError(f"trainer: wanted a block of keys such as `max_steps: 100`, got {trainer!r}")
        if threads is not None and threads < 1:
            raise ConfigError(f"threads must be at least 1, or null for torch's default; got {threads}")
        check_trainer_values(trainer.as_dict())
        if ckpt_path and "://" not in ckpt_path and ckpt_path not in KNOWN_CHECKPOINTS and not Path(ckpt_path).exists():
            raise ConfigError(
                f"ckpt_path: there is no checkpoint {ckpt_path}; give a file or a snapshot's folder, or latest for the"
                " newest snapshot"
            )

        given = trainer.get("callbacks")
        for at, callback in enumerate(given if isinstance(given, list) else []):
            refuse_nulls(callback, f"trainer.callbacks[{at}]")
        for key in ("model", "data"):
            refuse_nulls(self._get(self.config, key), key)
        blocks = {key: self._get(self.config, key) for key in ("trainer", "model", "data")}
        refuse_placeholders(blocks)
        refuse_hidden(blocks)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning 2.6 would silently override the config by the checkpoint's hyperparameters.

        A larger max_train_steps would then be ignored. The module refuses a checkpoint that does not fit the config.
        """

    def _dump_config(self) -> None:
        """As Lightning's, without the checks that the parser has made: a quarter of the time."""
        if not hasattr(self, "config_dump"):
            text = self.parser.dump(
                self.config, skip_link_targets=False, skip_none=False, skip_validation=True, format="yaml"
            )
            self.config_dump = yaml.load(text, YAML_LOADER)
            if "subcommand" in self.config:
                self.config_dump = self.config_dump[self.config.subcommand]

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, MisconfigurationException) as error:
            root = Path(self._get(self.config, "trainer").default_root_dir)
            raise bug_within(error, root) or user_error_within(error) from error

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        trainer = self._get(self.config, "trainer")
        if self._get(self.config, "dry_run"):
            from lightning_aigc.cli.fit.dry_run import dry_run_trainer_arguments

            kwargs |= dry_run_trainer_arguments(self._get(self.config_init, "trainer").get("callbacks") or ())
            self.save_config_callback = None
        if self.subcommand in EVALUATION_VERBS and trainer.get("logger") in (None, True):
            kwargs["logger"] = False  # the run's own logs stay as they are
        try:
            return super().instantiate_trainer(**kwargs)
        except UserError:
            raise
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise ConfigError(f"trainer: {first_sentence(str(error))}") from error
        except RuntimeError as error:
            if twice := re.search(r"more than one stateful callback of type `(\w+)`", str(error)):
                raise ConfigError(
                    f"trainer.callbacks has {twice[1]} twice, and the state of one alone is kept; keep one"
                ) from error
            if tasks := re.search(r"You set `--ntasks=(\d+)`", str(error)):
                raise ConfigError(
                    f"SLURM's job has --ntasks={tasks[1]}, which does not say how many run on a node; ask for --nodes"
                    " and --ntasks-per-node instead, and give --trainer.num_nodes and --trainer.devices these numbers"
                ) from error
            raise


TRIGGER, NAME = "YOUR_TRIGGER_WORD", "YOUR_LORA_NAME"
_PLACEHOLDER = re.compile(rf"\b({TRIGGER}|{NAME})\b")


def refuse_placeholders(blocks: Mapping[str, Any]) -> None:
    """Raise ConfigError that names every key of the config in which an example's word still stands."""
    found = {path: word for key, block in blocks.items() for path, word in _placeholders(block, key)}
    if found:
        words = " and ".join(dict.fromkeys(found.values()))
        raise ConfigError(
            f"{', '.join(found)} still {'says' if len(found) == 1 else 'say'} {words}, the example's: set your own"
            " (a rare trigger word or null, prompts that show it, the name of the file), or let"
            " `lightning init photos/ -o my.yaml` write a config for your images"
        )


def _placeholders(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _placeholders(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _placeholders(inner, path)
    elif isinstance(value, str) and (match := _PLACEHOLDER.search(value)):
        yield path, match[1]


def where_to_look(trainer: Any, module: Any) -> list[str]:
    """The run's folder and what comes into it, and the commands of its loggers.

    Args: module: a module that brings RunReport and SampleGrid itself has `validation_prompts`.
    """
    root = Path(trainer.default_root_dir)
    found = trainer.callbacks
    brings_report = isinstance(module, HasValidationPrompts)
    parts = []
    if any(isinstance(c, SampleGrid) for c in found) or (brings_report and module.validation_prompts):
        parts.append("images in samples/")
    if any(isinstance(c, CLIPConvergenceGuard) for c in found):
        parts.append("scored images in guard/")
    if brings_report or any(isinstance(c, RunReport) for c in found):
        parts.append(f"open {root / REPORT_FILE}, which renews itself")
    lines = [f"run: {root}" + (f" ({', '.join(parts)})" if parts else "")]
    live = []
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            live.append(f"tensorboard --logdir {logger.root_dir}")
        elif isinstance(logger, WandbLogger):
            is_offline = logger._offline or os.environ.get("WANDB_MODE") == "offline"
            live.append("Weights & Biases, offline: wandb sync afterwards" if is_offline else "Weights & Biases")
    return [*lines, f"live: {', '.join(live)}"] if live else lines


def refuse_earlier_run(trainer: Trainer) -> None:
    """Raise ConfigError, with what to type instead, where the run's folder has results or snapshots."""
    root = Path(trainer.default_root_dir)
    pages = [REPORT_FILE] if (root / SUMMARY_FILE).is_file() else []  # an unfinished run has a page too
    found = [*pages, *sorted(path.name for path in root.glob("*.safetensors"))]
    newest = next(iter(find_snapshots(snapshot_folder(trainer))), None)
    if not found and newest is None:
        return
    if found:
        more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
        what = f"the results of an earlier run, {', '.join(found[:LISTED])}{more}"
    else:
        assert newest is not None
        what = f"an unfinished run, at step {newest.step}"
    remedy = ", and no snapshot to resume from; add" if newest is None else "; add --resume to continue that run,"
    raise ConfigError(
        f"{root} has {what}{remedy} --overwrite to replace it, or"
        f" --trainer.default_root_dir {shlex.quote(str(next_folder(root)))} to keep both"
    )


def next_folder(root: Path) -> Path:
    """A folder next to `root` that does not exist: `runs/my_2`, then `runs/my_3`."""
    number = 2
    while (found := root.with_name(f"{root.name}_{number}")).exists():
        number += 1
    return found
