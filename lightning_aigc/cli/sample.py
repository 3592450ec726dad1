"""`lightning sample`: draw a labelled grid of images with a run's LoRA, or another, or none."""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_aigc.atomic_file import require_writable
from lightning_aigc.errors import ConfigError

NO_LORA = "none"
CONTROLNETS = ("DiffusionControlNet", "ControlNetTraining")
"""Classes whose runs draw what they are shown."""
FINE_TUNINGS = ("DiffusionFineTuning", "StableDiffusionFineTuning")
"""Classes whose runs save a whole model."""
BASE_OPTIONS = ("revision", "variant", "denoiser_file", "training_adapter")
"""Arguments of the base model, which its fine-tuned copy is loaded without."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.description = (
        "Draw images with the base model and the LoRA or ControlNet of a run, or with its fine-tuned model, as the run"
        " itself sampled."
    )
    parser.add_argument("-c", "--config", type=Path, required=True, help="the run's config.yaml")
    parser.add_argument("--prompts", nargs="+", default=[], help="one row each; default: the run's validation_prompts")
    parser.add_argument("--negative_prompt", default=None, help="what the images shall not show")
    parser.add_argument("--lora", default=None, help=f"a .safetensors file, or {NO_LORA}; default: the run's own")
    parser.add_argument(
        "--weight", nargs="+", type=float, default=[1.0], help="weights of the LoRA or ControlNet, one column each"
    )
    parser.add_argument(
        "--source", nargs="+", type=Path, default=[], help="images to edit, for a model that edits; one row each"
    )
    parser.add_argument(
        "--references", action="store_true", help="all of --source belong to one image, as FLUX.2 reads several"
    )
    control = parser.add_argument_group(f"runs of {' and '.join(CONTROLNETS)}")
    control.add_argument("--condition", nargs="+", type=Path, default=[], help="images to follow")
    control.add_argument("--is_condition", action="store_true", help="they are conditions already: edges, not photos")
    control.add_argument("--controlnet", default=None, help="a ControlNet's folder; default: the run's own")
    parser.add_argument(
        "--resolution", type=int, default=None, help="pixels of an image's longer side; default: the run's"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=None, help="default: the run's validation seeds")
    parser.add_argument("--num_inference_steps", type=int, default=None, help="default: the run's")
    parser.add_argument("--guidance_scale", type=float, default=None, help="default: the run's")
    parser.add_argument("-o", "--output", type=Path, default=Path("grid.png"), help="PNG to write (default: grid.png)")


def run(args: argparse.Namespace) -> int:
    """Load the base as the run did, draw the grid and print its path; returns the exit status.

    Raises: UserError for a config, LoRA or prompts that cannot be used.
    """
    from lightning_aigc.cli.fit.console import tidy_console
    from lightning_aigc.data.captions.captions import without_trigger_word

    tidy_console()
    settings = _settings(args.config)
    prompts = args.prompts or list(settings.model.get("validation_prompts") or [])
    if empty := [number for number, prompt in enumerate(prompts, 1) if not prompt.strip()]:
        where = "--prompts" if args.prompts else "validation_prompts of the run"
        raise ConfigError(f"{where}: prompt {empty[0]} of {len(prompts)} is empty; give only prompts with words")
    if not prompts:
        raise ConfigError('there are no prompts to draw; give some: --prompts "a photo of a zorp mug"')
    for name in ("num_inference_steps", "resolution"):
        if (given := getattr(args, name)) is not None and given < 1:
            raise ConfigError(f"--{name} must be at least 1, got {given}; leave it out for the run's")
    for seed in args.seeds or []:
        if not -(2**63) <= seed < 2**64:
            raise ConfigError(f"--seeds must be numbers of 64 bits, got {seed}; give smaller ones: --seeds 0 1")
    guidance = settings.model.get("guidance_scale", 7.5) if args.guidance_scale is None else args.guidance_scale
    if guidance is not None and guidance < 0:
        raise ConfigError(f"--guidance_scale must not be negative, got {guidance:g}; 0 draws without guidance")
    if args.negative_prompt and guidance is not None and guidance <= 1:
        raise ConfigError(
            f"--negative_prompt is read at a guidance scale above 1 alone, got {guidance:g}; give --guidance_scale 7.5,"
            " or leave it out"
        )
    for name in ("weight", "guidance_scale"):
        given = getattr(args, name)
        for number in given if isinstance(given, list) else [given]:
            if number is not None and not math.isfinite(number):
                raise ConfigError(f"--{name} must be a finite number, got {number}; leave it out for the default")
    with _written(args.output):
        require_writable(args.output)
    word = settings.data.get("trigger_word")
    if word and args.lora != NO_LORA and (without := without_trigger_word(prompts, word)):
        print(f"{len(without)} of {len(prompts)} prompts lack the trigger word {word} (such as {without[0]!r})")
    from lightning_aigc.cli.fit.start_lines import of_long_prompts
    from lightning_aigc.diffusion.pipeline.caption_tokens import count_tokens

    base, revision = settings.model["pretrained_model_name_or_path"], settings.model.get("revision")
    for sentence in of_long_prompts("prompts", count_tokens(base, revision, prompts)):
        print(sentence)
    if args.references and not args.source:
        raise ConfigError("--references says how --source is read; give images: --source a.png b.png --references")
    if args.source and settings.model_class in CONTROLNETS:
        raise ConfigError("--source belongs to models that edit; a ControlNet draws what --condition shows")
    if settings.model_class in CONTROLNETS:
        return draw_controlled(args, settings, prompts)
    if args.condition or args.controlnet:
        raise ConfigError(f"--condition and --controlnet belong to runs of {CONTROLNETS[0]}; leave them out")
    lora = settings.take_result(args.lora)
    if args.source:
        return draw_edits(args, settings, prompts, lora)

    import torch

    from lightning_aigc.callbacks.sampling.sheet import draw_sheet, write_png
    from lightning_aigc.diffusion.pipeline.image_sizes import check_sample_size, check_sample_steps
    from lightning_aigc.diffusion.samplers.lora import LoRASampler

    print(f"drawing with {lora or settings.pipeline or 'the base model alone'}")
    seeds = args.seeds or settings.seeds
    weights = args.weight if lora else [0.0]
    sampler = LoRASampler(settings.model, settings.precision, settings.accelerator, lora)
    if sampler.components.family.needs_sources:
        family = sampler.components.family.title
        raise ConfigError(f"{family} edits images; give those to start from: --source before.png")
    if settings.data.get("source_data_dir"):
        print("this run learned edits, and without images to edit it draws from the prompts alone: --source before.png")
    check_sample_size(sampler.components, args.resolution, "--resolution")
    check_sample_steps(sampler.components, args.num_inference_steps, "--num_inference_steps")
    steps, scale = args.num_inference_steps, args.guidance_scale
    titles = settings.titles(lora, weights)
    columns = []
    for weight, title in zip(weights, titles, strict=True):
        pairs = [(prompt, seed) for prompt in prompts for seed in seeds]
        columns.append(
            sampler.sample(pairs, weight, args.negative_prompt, steps, scale, title, resolution=args.resolution)
        )
    pictures = torch.stack(columns, 1).flatten(0, 1)  # all weights of a prompt and seed side by side
    captions = [f"{name}, seed {seed}\n{prompt}" for prompt in prompts for seed in seeds for name in titles]
    facts = {"prompts": prompts, "seeds": seeds, "weights": weights, "lora": str(lora or settings.pipeline or NO_LORA)}
    with _written(args.output):
        write_png(args.output, draw_sheet(pictures, captions, len(weights) if len(weights) > 1 else len(seeds)), facts)
    print(f"wrote {args.output}")
    return 0


@contextlib.contextmanager
def _written(output: Path) -> Iterator[None]:
    """Raise ConfigError where the block cannot write the output file, or a folder has its name."""
    try:
        if output.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror or error}; give another --output") from error


def _settings(path: Path) -> RunConfig:
    import yaml

    if path.is_dir():
        path = path / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no YAML"
        raise ConfigError(
            f"the config {path} cannot be read ({reason}); give the run's: -c runs/x/config.yaml"
        ) from error
    config = config if isinstance(config, dict) else {}
    model = (config.get("model") or {}).get("init_args") or {}
    if "pretrained_model_name_or_path" not in model:
        raise ConfigError(
            f"the config {path} names no model.init_args.pretrained_model_name_or_path; give the config of a run"
        )
    class_path = str((config.get("model") or {}).get("class_path") or "")
    data = (config.get("data") or {}).get("init_args") or {}
    return RunConfig(path, model, config.get("trainer") or {}, class_path.rpartition(".")[2], data)


class RunConfig:
    """The entries of a run's config that `sample` needs."""

    def __init__(
        self,
        path: Path,
        model: dict[str, Any],
        trainer: dict[str, Any],
        model_class: str = "",
        data: dict[str, Any] | None = None,
    ) -> None:
        self.path, self.model, self.trainer = path, model, trainer
        self.model_class, self.data = model_class, data or {}
        self.pipeline: Path | None = None
        """Folder of the fine-tuned model that draws instead of the base."""

    def titles(self, lora: Path | None, weights: list[float]) -> list[str]:
        """A title for the column of each weight; without a LoRA, the model's."""
        model = "base" if self.pipeline is None else "fine-tuned"
        return [f"weight {weight:g}" if lora else model for weight in weights]

    @property
    def seeds(self) -> list[int]:
        first = int(self.model.get("validation_seed") or 0)
        return list(range(first, first + int(self.model.get("num_validation_images") or 4)))

    @property
    def accelerator(self) -> str:
        return str(self.trainer.get("accelerator") or "auto")

    @property
    def precision(self) -> str:
        """The Trainer's precision, or its precision plugin's."""
        plugins = self.trainer.get("plugins") or []
        for plugin in plugins if isinstance(plugins, list) else [plugins]:
            given = plugin.get("init_args") if isinstance(plugin, dict) else None
            if isinstance(given, dict) and "precision" in given:
                return str(given["precision"])
        return str(self.trainer.get("precision") or "32-true")

    def take_result(self, given: str | None) -> Path | None:
        """Find what the run has trained. Returns: the LoRA to use; None for none, such as after full fine-tuning, whose
        model replaces the base.

        Raises: ConfigError if there is no such file or folder.
        """
        if given is not None or self.model_class not in FINE_TUNINGS:
            return self.find_lora(given)
        self.pipeline = self._find_folder("model_index.json", "fine-tuned model", f"--lora {NO_LORA} for the base")
        kept = {name: value for name, value in self.model.items() if name not in BASE_OPTIONS}
        self.model = kept | {"pretrained_model_name_or_path": str(self.pipeline)}
        return None

    def find_controlnet(self, given: str | None) -> Path:
        """Folder of the ControlNet to use: the given one, or the run's best, or its last.

        Raises: ConfigError if there is none.
        """
        if given is None:
            return self._find_folder("config.json", "ControlNet", "--controlnet")
        if not (Path(given) / "config.json").is_file():
            raise ConfigError(f"--controlnet: {given} is no ControlNet folder; give one with a config.json")
        return Path(given)

    def _find_folder(self, file: str, title: str, option: str) -> Path:
        """Folder of the run's best or last result, which has this file. Raises: ConfigError if there is none."""
        name = str(self.model.get("output_name") or "lora")
        for folder in self._folders:
            for stem in (f"{name}_best", name):
                if (folder / stem / file).is_file():
                    return folder / stem
        raise ConfigError(
            f"the run in {self._folders[-1]} has no {title} {name}/ yet; train it first, or give {option}"
        )

    @property
    def _folders(self) -> list[Path]:
        return [self.path.parent, Path(self.trainer.get("default_root_dir") or ".")]

    def find_lora(self, given: str | None) -> Path | None:
        """The LoRA to use, None for none: the given one, or the run's best, its last, or its newest by step.

        Raises: ConfigError if there is no such file.
        """
        if given == NO_LORA:
            return None
        if given is not None:
            if not Path(given).is_file():
                raise ConfigError(f"--lora: there is no file {given}; give a .safetensors file, or {NO_LORA}")
            return Path(given)
        name = str(self.model.get("output_name") or "lora")
        kinds = [".diffusers.safetensors", ".safetensors"] if self.model.get("use_dora") else [".safetensors"]
        for folder in self._folders:
            for stem in (f"{name}_best", name):
                for kind in kinds:
                    if (folder / f"{stem}{kind}").is_file():
                        return folder / f"{stem}{kind}"
            if by_step := sorted(folder.glob(f"{name}_step_*[0-9].safetensors")):
                return by_step[-1]
        raise ConfigError(
            f"the run in {self._folders[-1]} has no LoRA file {name}.safetensors yet; train it first, or give --lora"
            f" FILE or --lora {NO_LORA}"
        )


def draw_controlled(args: argparse.Namespace, settings: Any, prompts: list[str]) -> int:
    """Draw each prompt and seed for each condition, at each weight, and print the grid's path; returns the exit status.

    Raises: ConfigError for a condition or ControlNet that cannot be used.
    """
    if not args.condition:
        raise ConfigError("a ControlNet draws what it is shown; give images: --condition mug.png chair.png")
    if missing := [str(path) for path in args.condition if not path.is_file()]:
        raise ConfigError(f"--condition: there is no file {missing[0]}; give images")
    folder = settings.find_controlnet(args.controlnet)

    import torch

    from lightning_aigc.callbacks.sampling.sheet import draw_sheet, write_png
    from lightning_aigc.diffusion.pipeline.image_sizes import check_sample_steps
    from lightning_aigc.diffusion.samplers.controlnet import ControlNetSampler

    print(f"drawing with {folder}")
    sampler = ControlNetSampler(settings.model, settings.precision, settings.accelerator, folder)
    check_sample_steps(sampler.components, args.num_inference_steps, "--num_inference_steps")
    resolution = args.resolution or int(settings.data.get("resolution") or 512)
    conditions = sampler.conditions_of(args.condition, resolution, are_conditions=args.is_condition)
    seeds = args.seeds or settings.seeds[:1]
    rows = [(prompt, seed, place) for place in range(len(conditions)) for prompt in prompts for seed in seeds]
    columns = [conditions[[place for _, _, place in rows]].clamp(0, 1).expand(-1, 3, -1, -1)]
    for weight in args.weight:
        columns.append(
            sampler.sample(
                [prompt for prompt, _, _ in rows],
                [seed for _, seed, _ in rows],
                conditions[[place for _, _, place in rows]],
                weight,
                args.negative_prompt,
                args.num_inference_steps,
                args.guidance_scale,
                f"weight {weight:g}",
            )
        )
    names = ["condition", *(f"weight {weight:g}" for weight in args.weight)]
    captions = [f"{name}, seed {seed}\n{prompt}" for prompt, seed, _ in rows for name in names]
    facts = {"prompts": prompts, "seeds": seeds, "weights": args.weight, "controlnet": str(folder)}
    with _written(args.output):
        write_png(args.output, draw_sheet(torch.stack(columns, 1).flatten(0, 1), captions, len(names)), facts)
    print(f"wrote {args.output}")
    return 0


def draw_edits(args: argparse.Namespace, settings: Any, prompts: list[str], lora: Path | None) -> int:
    """Draw each prompt and seed for each source, at each weight, behind the source itself; returns the exit status.

    Raises: ConfigError for a source that is missing, broken, too small or too long, before the model is loaded.
    """
    from lightning_aigc.diffusion.pipeline.edits import cut_source, open_source

    opened = [open_source(path, "--source") for path in args.source]

    import torch

    from lightning_aigc.callbacks.sampling.judges import as_pixels
    from lightning_aigc.callbacks.sampling.sheet import draw_sheet, write_png
    from lightning_aigc.diffusion.pipeline.generate import stacked
    from lightning_aigc.diffusion.pipeline.image_sizes import check_sample_size, check_sample_steps
    from lightning_aigc.diffusion.samplers.lora import LoRASampler

    print(f"editing {len(opened)} images with {lora or settings.pipeline or 'the base model alone'}")
    sampler = LoRASampler(settings.model, settings.precision, settings.accelerator, lora)
    parts = sampler.components
    side = args.resolution or settings.data.get("resolution") or settings.model.get("sample_resolution")
    check_sample_size(parts, args.resolution, "--resolution")
    check_sample_steps(parts, args.num_inference_steps, "--num_inference_steps")
    step = parts.family.size_step(parts.denoiser, parts.vae)
    cut = [cut_source(image, step, side) for image in opened]
    groups = [tuple(cut)] if args.references else [(image,) for image in cut]
    seeds = args.seeds or settings.seeds[:1]
    rows = [(prompt, seed, group) for group in groups for prompt in prompts for seed in seeds]
    weights = args.weight if lora else [0.0]
    pairs, sources = [(prompt, seed) for prompt, seed, _ in rows], [group for _, _, group in rows]
    given = (args.negative_prompt, args.num_inference_steps, args.guidance_scale)
    columns = [stacked([as_pixels(image[0]) for image in sources])]
    columns += [sampler.sample(pairs, weight, *given, f"weight {weight:g}", sources) for weight in weights]
    names = ["source", *settings.titles(lora, weights)]
    captions = [f"{name}, seed {seed}\n{prompt}" for prompt, seed in pairs for name in names]
    facts = {"prompts": prompts, "seeds": seeds, "weights": weights, "lora": str(lora or settings.pipeline or NO_LORA)}
    with _written(args.output):
        write_png(args.output, draw_sheet(torch.stack(columns, 1).flatten(0, 1), captions, len(names)), facts)
    print(f"wrote {args.output}")
    return 0
