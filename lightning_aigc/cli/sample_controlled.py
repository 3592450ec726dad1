"""`lightning sample` for a ControlNet's run: images that follow given ones."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_aigc.errors import ConfigError


def draw_controlled(args: argparse.Namespace, settings: Any, prompts: list[str]) -> int:
    """Draw each prompt and seed for each condition, at each weight, and print the grid's path; returns the exit status.

    Raises: ConfigError for a condition or ControlNet that cannot be used.
    """
    if not args.condition:
        raise ConfigError("a ControlNet draws what it is shown; give images: --condition mug.png chair.png")
    if missing := [str(path) for path in args.condition if not path.is_file()]:
        raise ConfigError(f"--condition: there is no file {missing[0]}; give images")
    folder = find_controlnet(settings, args.controlnet)

    import torch

    from lightning_aigc.callbacks.sampling.png import write_png
    from lightning_aigc.callbacks.sampling.sheet import draw_sheet
    from lightning_aigc.diffusion.samplers.controlnet import ControlNetSampler

    print(f"drawing with {folder}")
    sampler = ControlNetSampler(settings.model, settings.precision, settings.accelerator, folder)
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
            )
        )
    names = ["condition", *(f"weight {weight:g}" for weight in args.weight)]
    captions = [f"{name}, seed {seed}\n{prompt}" for prompt, seed, _ in rows for name in names]
    facts = {"prompts": prompts, "seeds": seeds, "weights": args.weight, "controlnet": str(folder)}
    try:
        write_png(args.output, draw_sheet(torch.stack(columns, 1).flatten(0, 1), captions, len(names)), facts)
    except OSError as error:
        raise ConfigError(f"cannot write {args.output}: {error.strerror or error}; give another --output") from error
    print(f"wrote {args.output}")
    return 0


def find_controlnet(settings: Any, given: str | None) -> Path:
    """The ControlNet's folder: the given one, or the run's best, or its last. Raises: ConfigError if there is none."""
    if given is not None:
        if not (Path(given) / "config.json").is_file():
            raise ConfigError(f"--controlnet: {given} is no ControlNet folder; give one with a config.json")
        return Path(given)
    name = str(settings.model.get("output_name") or "lora")
    folders: list[Path] = [settings.path.parent, Path(settings.trainer.get("default_root_dir") or ".")]
    for folder in folders:
        for stem in (f"{name}_best", name):
            if (folder / stem / "config.json").is_file():
                return folder / stem
    raise ConfigError(f"the run in {folders[-1]} has no ControlNet {name}/ yet; train it first, or give --controlnet")
