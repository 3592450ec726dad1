"""Train by the command line and check the end of the run as a user would: with plain diffusers, or by one sentence."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from fakes.models.edit_pipelines import scale_sources_to
from fakes.models.pipelines import SIDE, read_single_files_with, tiny_configs
from fakes.npu import fake_npu
from fakes.processes.ranks import forking_context, meeting_point
from lightning_aigc.checkpoint import find_snapshots
from lightning_aigc.cli import main
from lightning_aigc.diffusion.families import CONTROLLED, FAMILIES
from lightning_aigc.diffusion.pipeline import streamed_base
from lightning_aigc.diffusion.samplers.lora import LoRASampler
from lightning_aigc.precision.memory import streamed_blocks
from pairs.options import CONTROL, U_NETS, Row

LIMIT_S = 400
PROMPT = "a zorp cup"
LORA_UPS = ("lora_B", "lora_up", "lora.up", "lora_linear_layer.up", "lokr_w1")


class Ended(NamedTuple):
    """A command's exit code, and all that it printed."""

    code: int
    said: str

    @property
    def errors(self) -> list[str]:
        """Lines that begin with `error:`; ranks repeat a line."""
        return sorted({line for line in self.said.splitlines() if line.startswith("error:")})


def run(
    *words: object, log: Path, ranks: int = 1, kill_when: Callable[[], bool] | None = None, device: str = "cpu"
) -> Ended:
    """Run the `lightning` command on these ranks, and kill them once `kill_when` says so.

    The ranks are forked from a server that has imported everything, as torchrun would start them otherwise.
    """
    context = forking_context(
        "lightning_aigc.cli.fit.trainer_commands", "diffusers", "transformers", "fakes.models.edit_pipelines"
    )
    with meeting_point() as where:
        configs = tiny_configs()
        given = [
            (rank, ranks, [str(word) for word in words], str(log), where, device, configs) for rank in range(ranks)
        ]
        processes = [context.Process(target=_command, args=one) for one in given]
        for process in processes:
            process.start()
        ends = time.monotonic() + LIMIT_S
        while any(process.is_alive() for process in processes) and time.monotonic() < ends:
            if kill_when is not None and kill_when():
                break
            time.sleep(0.05)
        is_late = time.monotonic() >= ends
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
    said = "".join(Path(f"{log}.{rank}").read_text(encoding="utf-8", errors="replace") for rank in range(ranks))
    assert not is_late, f"no end after {LIMIT_S} s: {said[-2000:]}"
    return Ended(max((process.exitcode or 0 for process in processes), key=abs), said)


def _command(
    rank: int, ranks: int, words: list[str], log: str, where: dict[str, str], device: str, configs: dict[str, str]
) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if ranks > 1:
        node, local = (rank, 0) if device == "npu" else (0, rank)  # each fake npu is the first of its machine
        os.environ |= where | {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(ranks)}
        os.environ |= {"NODE_RANK": str(node)}
    torch.set_num_threads(1)
    scale_sources_to(2 * SIDE)
    streamed_base.HOST_DEVICES, streamed_blocks.FEWEST_NUMBERS = (), 64  # stream tiny blocks on the CPU
    read_single_files_with(configs)
    with Path(f"{log}.{rank}").open("w", encoding="utf-8") as output:
        for stream in (1, 2):  # loggers hold the streams of the server that this is a fork of
            os.dup2(output.fileno(), stream)
    sys.argv = ["lightning", *words]
    if device == "npu":
        fake_npu.install()
        fake_npu.pin_everything()
        fake_npu.keep_gathered_weights()
        fake_npu.apply_patches()
    try:
        main(words)
    except SystemExit as stop:
        sys.stdout.flush()
        os._exit(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def train(row: Row, config: Path, root: Path) -> Ended:
    """Fit a config; where the row says so, kill it after its first snapshot and resume."""
    ranks = 1 if row["strategy"] == "auto" else 2
    if row["ending"] == "whole":
        return run("fit", "-c", config, log=config.with_name("fit.log"), ranks=ranks, device=row["device"])
    snapshots, log = root / "snapshots", config.with_name("killed.log")
    on: dict[str, Any] = {"ranks": ranks, "device": row["device"]}
    killed = run("fit", "-c", config, log=log, kill_when=lambda: bool(find_snapshots(snapshots)), **on)
    if killed.code > 0:  # it was refused
        return killed
    assert killed.code == -signal.SIGKILL, killed.said[-2000:]
    resumed = run("fit", "-c", config, "--resume", log=config.with_name("fit.log"), **on)
    assert resumed.code or "resuming from" in resumed.said, resumed.said[-2000:]
    return resumed


def result_of(root: Path) -> dict[str, Tensor]:
    """The tensors of a run's result, by file and name; not those of its snapshots."""
    files = [path for path in sorted(root.rglob("*.safetensors")) if root / "snapshots" not in path.parents]
    return {f"{path.relative_to(root)} {k}": tensor for path in files for k, tensor in load_file(path).items()}


def check_result(row: Row, base: Path, root: Path, source: Path | None) -> None:
    """Load the result in plain diffusers, draw with it, and see that what was trained is not what it began as.

    source: an image for a model that edits.
    """
    optional = dict.fromkeys(FAMILIES[row["family"]].optional_folders)
    extra: dict[str, Any] = {}
    folder, lora = base, None
    if row["method"] in CONTROL:
        kind = getattr(diffusers, _controlnet_class(row["family"]))
        controlnet = kind.from_pretrained(root / "zorp")
        assert _largest(_zero_weights(controlnet)) > 0, "the ControlNet's zero layers did not move"
        pipeline_kind = getattr(diffusers, FAMILIES[row["family"]].control.pipeline)
        pipeline = pipeline_kind.from_pretrained(base, **optional, controlnet=controlnet)
        name = "image" if row["family"] in U_NETS else "control_image"
        extra[name] = torch.rand(1, 3, SIDE, SIDE)
    elif row["method"] == "full":
        folder = root / "zorp"
        pipeline = DiffusionPipeline.from_pretrained(folder, **optional)
        before = DiffusionPipeline.from_pretrained(base, **optional)
        for part in ("unet" if row["family"] in U_NETS else "transformer", *["text_encoder"] * row["text_encoder"]):
            assert _differ(getattr(pipeline, part), getattr(before, part)), f"{part} did not move"
    else:
        pipeline = DiffusionPipeline.from_pretrained(base, **optional)
        lora = lora_of(row, root)
        ups = {k: v for k, v in load_file(lora).items() if any(end in k for end in LORA_UPS)}
        assert ups and _largest(ups) > 0, "lora_B did not move"
        assert any("text" in k or "te" in k.split("_") for k in ups) or not row["text_encoder"]
        _load(pipeline, row, lora)
    _draws(pipeline, row, extra, source, folder, lora)


def lora_of(row: Row, root: Path) -> Path:
    """The run's file for diffusers; a LoKr of a U-Net has kohya's names and is converted first."""
    if row["method"] == "dora":
        return root / "zorp.diffusers.safetensors"
    file, converted = root / "zorp.safetensors", root / "converted.safetensors"
    if row["method"] != "lokr" or row["family"] not in U_NETS:
        return file
    ended = run("export", file, "--to", "diffusers", "--output", converted, log=root / "converted.log")
    assert ended.code == 0, ended.said[-2000:]
    return converted


def _load(pipeline: Any, row: Row, file: Path) -> None:
    if row["method"] != "lokr":
        pipeline.load_lora_weights(file)
        return
    part = "unet" if row["family"] in U_NETS else "transformer"
    getattr(pipeline, part).load_lora_adapter(load_file(file), prefix=part)


def export(row: Row, model: Path, root: Path, folder: Path) -> Ended:
    """Export the LoRA as the row says; merge it into `model`."""
    lora = root / "zorp.safetensors" if row["method"] == "lokr" else lora_of(row, root)
    target = ("--merge_into", model) if row["export"] == "merge" else ("--to", row["export"])
    return run("export", lora, *target, "--output", exported(row, folder), log=folder / "export.log")


def exported(row: Row, folder: Path) -> Path:
    """The file or folder that `export` writes."""
    return folder / ("merged" if row["export"] == "merge" and row["weights"] != "single" else "exported.safetensors")


def check_export(row: Row, base: Path, model: Path, root: Path, folder: Path, source: Path | None) -> None:
    """Export the LoRA as the row says and load that in plain diffusers.

    model: the base that the run trained on, a folder or a file; base: its folder.
    """
    optional = dict.fromkeys(FAMILIES[row["family"]].optional_folders)
    output, ended = exported(row, folder), export(row, model, root, folder)
    assert ended.code == 0, ended.said[-2000:]
    if row["export"] == "merge":
        if output.is_file():
            kind = getattr(diffusers, FAMILIES[row["family"]].pipeline)
            merged = kind.from_single_file(output, config=str(base), local_files_only=True)
        else:
            merged = DiffusionPipeline.from_pretrained(output, **optional)
        _draws(merged, row, {}, source, output, None)
    elif row["export"] == "diffusers":
        pipeline = DiffusionPipeline.from_pretrained(base, **optional)
        _load(pipeline, row, output)
        _draws(pipeline, row, {}, source, base, output)
    else:
        assert load_file(output)


def _draws(
    pipeline: Any, row: Row, extra: dict[str, Any], source: Path | None, folder: Path, lora: Path | None
) -> None:
    """Draw by the pipeline, or where none edits with the family, by our sampler of the folder and the file."""
    pipeline.set_progress_bar_config(disable=True)
    size = {} if extra else {"height": SIDE, "width": SIDE}
    if source is None:
        drawn = _images(pipeline, size | extra)
    elif FAMILIES[row["family"]].edit_pipeline is None:
        sampler = LoRASampler({"pretrained_model_name_or_path": str(folder)}, "32-true", "cpu", lora)
        sources = [[image.resize((SIDE, SIDE))] for image in _turned(source)]
        drawn = sampler.sample([(PROMPT, 0)] * 2, num_inference_steps=2, sources=sources)
    else:
        if row["family"] == "flux_kontext":
            size |= {"_auto_resize": False, "max_area": SIDE * SIDE}
        drawn = torch.cat([_images(pipeline, size | {"image": image}) for image in _turned(source)])
    assert drawn.shape[-2:] == (SIDE, SIDE) and drawn.isfinite().all()
    assert float(drawn.float().std()) > 0, "a flat image"
    assert source is None or not torch.equal(*drawn), "the image does not depend on its source"


def _images(pipeline: Any, given: dict[str, Any]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        drawn: Tensor = pipeline(
            prompt=PROMPT, num_inference_steps=2, output_type="pt", generator=generator, **given
        ).images
    return drawn


def _turned(path: Path) -> list[Image.Image]:
    """An image as it is, and turned."""
    with Image.open(path) as image:
        opened = image.convert("RGB").resize((2 * SIDE, 2 * SIDE))
    return [opened, opened.transpose(Image.Transpose.ROTATE_90)]


def _controlnet_class(family: str) -> str:
    return "ControlNetModel" if family in U_NETS else str(CONTROLLED[family].control.network)


def _zero_weights(controlnet: Any) -> dict[str, Tensor]:
    """The weights that a new ControlNet begins at zero with."""
    zeros = ("controlnet_down_blocks", "controlnet_mid_block", "controlnet_blocks", "controlnet_single_blocks",
             "before_proj", "after_proj", "control_all_x_embedder", "control_layers")  # fmt: skip
    return {k: v for k, v in controlnet.state_dict().items() if k.startswith(zeros)}


def _largest(tensors: dict[str, Tensor]) -> float:
    return max((float(t.float().abs().max()) for t in tensors.values()), default=0.0)


def _differ(one: Any, other: Any) -> bool:
    known = other.state_dict()
    return any(not torch.equal(v.float(), known[k].float()) for k, v in one.state_dict().items())
