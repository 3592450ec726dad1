"""The model card of a hub folder: metadata that the hub reads, then what a person has to know to use the files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from lightning_aigc.cli.hub.contents import CONFIG_FILE, Contents, is_embedded
from lightning_aigc.diffusion.lora.names import UNET
from lightning_aigc.report.record import LoRAFile
from lightning_aigc.report.units import score_text
from lightning_aigc.report.usage import WEIGHT, diffusers_snippet, edit_command, quoted
from lightning_aigc.report.verdict import judge
from lightning_aigc.secrets import without_local_paths

TO_FILL_IN = "TO BE FILLED IN"
HUB = "https://huggingface.co"


@dataclass(frozen=True)
class Licence:
    """A licence as the hub names it; one that the hub has no identifier for is `other`, with a name and a link."""

    license: str
    license_name: str | None = None
    license_link: str | None = None

    @property
    def title(self) -> str:
        return self.license_name or self.license


OPENRAIL_M, OPENRAIL_PP, APACHE = Licence("creativeml-openrail-m"), Licence("openrail++"), Licence("apache-2.0")


def _other(name: str, base: str, file: str = "LICENSE.md") -> Licence:
    return Licence("other", name, f"{HUB}/{base}/blob/main/{file}")


LICENCES: dict[str, Licence] = {
    "CompVis/stable-diffusion-v1-4": OPENRAIL_M,
    "runwayml/stable-diffusion-v1-5": OPENRAIL_M,
    "stable-diffusion-v1-5/stable-diffusion-v1-5": OPENRAIL_M,
    "stabilityai/stable-diffusion-2": OPENRAIL_PP,
    "stabilityai/stable-diffusion-2-base": OPENRAIL_PP,
    "stabilityai/stable-diffusion-2-1": OPENRAIL_PP,
    "stabilityai/stable-diffusion-2-1-base": OPENRAIL_PP,
    "stabilityai/stable-diffusion-xl-base-1.0": OPENRAIL_PP,
    "black-forest-labs/FLUX.1-schnell": APACHE,
    "black-forest-labs/FLUX.2-klein-4B": APACHE,
    "black-forest-labs/FLUX.2-klein-base-4B": APACHE,
    "Tongyi-MAI/Z-Image": APACHE,
    "Tongyi-MAI/Z-Image-Turbo": APACHE,
    "Qwen/Qwen-Image": APACHE,
    "Qwen/Qwen-Image-Edit": APACHE,
    "Qwen/Qwen-Image-Edit-2509": APACHE,
    "Qwen/Qwen-Image-Edit-2511": APACHE,
    "lodestones/Chroma1-HD": APACHE,
    "black-forest-labs/FLUX.2-dev": _other("flux-dev-non-commercial-license", "black-forest-labs/FLUX.2-dev"),
    "krea/Krea-2-Raw": _other("krea-2-community-license", "krea/Krea-2-Raw", "LICENSE.pdf"),
    **{
        base: _other("flux-1-dev-non-commercial-license", base)
        for base in ("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-Kontext-dev")
    },
    **{
        base: _other("stabilityai-ai-community", base)
        for base in (
            "stabilityai/stable-diffusion-3-medium-diffusers",
            "stabilityai/stable-diffusion-3.5-medium",
            "stabilityai/stable-diffusion-3.5-large",
        )
    },
}
"""Licences of base models by hub id, as their pages name them. A LoRA of a base is used under the base's licence."""
_BY_LOWER_NAME = {base.casefold(): licence for base, licence in LICENCES.items()}
KINDS = {"lora": "a LoRA", "pipeline": "a fine-tuned pipeline", "controlnet": "a ControlNet"}
SETTINGS = (
    ("model", "rank"),
    ("model", "use_dora"),
    ("model", "lora_targets"),
    ("model", "trained_parts"),
    ("model", "conditions"),
    ("model", "learning_rate"),
    ("model", "max_train_steps"),
    ("model", "base_quantization"),
    ("data", "resolution"),
    ("data", "train_batch_size"),
)
SCORES = {
    "clip_t": "CLIP-T, images against their prompts",
    "clip_i": "CLIP-I, images against training images",
    "direction": "CLIP directional similarity of edits to their true targets",
    "kept": "What edits keep of the pixels that they should leave alone",
    "prior_clip_t": "CLIP-T of unrelated prompts, which shows forgetting",
}


def licence_of(contents: Contents) -> Licence | None:
    """The base model's licence; None where it is not known."""
    if is_embedded(contents.base):
        return APACHE  # this package's own
    return _BY_LOWER_NAME.get((contents.hub_base or "").casefold())


def write_card(contents: Contents, files: Sequence[str], images: Sequence[tuple[str, str]], repository: str) -> str:
    """The text of README.md.

    Args: files: names of a LoRA's files. images: prompt and path of each image. repository: `owner/name`.
    """
    metadata = ModelCardData(**_metadata(contents, images))
    parts = [
        f"# {contents.name}",
        "<Gallery />" if images else "",
        _introduction(contents),
        "## Use",
        *_usage(contents, files, images, repository),
        "## Training",
        _training(contents),
        *(["## Scores", _scores(contents)] if contents.record is not None else []),
        "## Licence",
        _licence(contents),
    ]
    text = without_local_paths("\n\n".join(part for part in parts if part))
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}\n"))


def _metadata(contents: Contents, images: Sequence[tuple[str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {"library_name": "diffusers", "pipeline_tag": _task(contents), "tags": _tags(contents)}
    if contents.hub_base is not None:
        relation = {"lora": "adapter", "pipeline": "finetune", "controlnet": "adapter"}[contents.kind]
        found |= {"base_model": contents.hub_base, "base_model_relation": relation}
    licence = licence_of(contents)
    if licence is not None:
        found |= {"license": licence.license, "license_name": licence.license_name}
        found |= {"license_link": licence.license_link}
    if contents.trigger_word:
        found["instance_prompt"] = contents.trigger_word
    if images:
        found["widget"] = [{"text": prompt, "output": {"url": path}} for prompt, path in images]
    return found


def _task(contents: Contents) -> str:
    return "image-to-image" if contents.edits else "text-to-image"


def _tags(contents: Contents) -> list[str]:
    tags = [_task(contents), "diffusers", "lightning_aigc"]
    if contents.kind == "lora":
        tags += ["lora", "template:sd-lora"]
    elif contents.kind == "controlnet":
        tags += ["controlnet"]
    if contents.setting("model", "use_dora"):
        tags += ["dora"]
    return [*tags, *([contents.family.title.lower().replace(" ", "-")] if contents.family is not None else [])]


def _introduction(contents: Contents) -> str:
    base = contents.hub_base
    if base is not None:
        of = f"of [{base}]({HUB}/{base})"
    elif is_embedded(contents.base):
        of = f"of `{contents.base}`, a tiny model in the package lightning_aigc"
    else:
        of = f"of a base model that has no hub id in its run (base model: {TO_FILL_IN})"
    sentence = f"{KINDS[contents.kind][0].upper()}{KINDS[contents.kind][1:]} {of}, trained with lightning_aigc."
    if contents.trigger_word:
        sentence += f" Trigger word: `{contents.trigger_word}`; write it into the prompt."
    return sentence


def _usage(contents: Contents, files: Sequence[str], images: Sequence[tuple[str, str]], repository: str) -> list[str]:
    word = contents.trigger_word
    prompt = images[0][0] if images else f"a photo of {word}" if word else "a photo"
    if contents.kind == "lora":
        file = next((name for name in files if name.endswith(".diffusers.safetensors")), files[0])
        base = contents.base if is_embedded(contents.base) else contents.hub_base
        edits = contents.edits
        pipeline = contents.family.edit_pipeline if edits and contents.family is not None else None
        if edits and pipeline is None:
            said = "diffusers has no pipeline that edits with this base; lightning_aigc draws with it, in this folder:"
            return [said, f"```bash\n{edit_command(Path(CONFIG_FILE), prompt)}\n```"]
        if contents.lokr_of == UNET and file == files[0]:
            said = "diffusers does not load a LoKr of these factors on convolutions; merge it into the base model:"
            command = f"lightning export {file} --merge_into PIPELINE -o FOLDER"
            return [said, f"```bash\n{command}\n```", *_other_programs(files)]
        lora = LoRAFile(
            f"{repository}/{file}", word, base, edits=edits, edit_pipeline=pipeline, lokr_of=contents.lokr_of
        )
        code = diffusers_snippet(lora, prompt)
        return [f"```python\n{code}\n```", *([] if lora.edits else _other_programs(files))]
    if contents.kind == "pipeline":
        imported, given = "from diffusers import DiffusionPipeline\n", quoted(prompt)
        if contents.edits:
            imported += "from diffusers.utils import load_image\n"
            given = f'image=load_image("before.png"), prompt={given}'
        lines = [
            imported,
            f"pipe = DiffusionPipeline.from_pretrained({quoted(repository)})",
            f'pipe({given}).images[0].save("image.png")',
        ]
    else:
        control = contents.family.control if contents.family is not None else None
        network = getattr(control, "network", "ControlNetModel")
        pipeline = getattr(control, "pipeline", "StableDiffusionControlNetPipeline")
        base = contents.hub_base or "PATH_OR_HUB_ID_OF_THE_BASE_MODEL"
        lines = [
            f"from diffusers import {network}, {pipeline}\n",
            f"controlnet = {network}.from_pretrained({quoted(repository)})",
            f"pipe = {pipeline}.from_pretrained({quoted(base)}, controlnet=controlnet)",
        ]
    return ["```python\n" + "\n".join(lines) + "\n```"]


def _other_programs(files: Sequence[str]) -> list[str]:
    """Lines for ComfyUI and A1111."""
    special = next((name for name in files if name.endswith(".comfyui.safetensors")), None)
    name = special or files[0]
    line = f"ComfyUI: copy `{name}` to `models/loras`, node *Load LoRA*, weight {WEIGHT}."
    if special is None:
        stem = name.removesuffix(".safetensors")
        line += f" A1111: copy it to `models/Lora`, in the prompt `<lora:{stem}:{WEIGHT}>`."
    return [line]


def _training(contents: Contents) -> str:
    rows = [(key, contents.setting(block, key)) for block, key in SETTINGS]
    record = contents.record
    if record is not None:
        rows += [("steps taken", record.steps), ("precision", record.precision), ("device", record.device)]
    elif contents.kind == "lora":
        rows += [("rank", contents.header.get("ss_network_dim")), ("steps taken", contents.header.get("ss_steps"))]
    shown = [(key, value) for key, value in rows if value not in (None, "", False)]
    if not shown:
        return "The file does not tell how it was trained."
    table = ["| setting | value |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in shown)]
    if contents.config:
        table += ["", f"All settings: [{CONFIG_FILE}]({CONFIG_FILE})."]
    return "\n".join(table)


def _scores(contents: Contents) -> str:
    record = contents.record
    assert record is not None
    found = {title: score_text(record, name) for name, title in SCORES.items()}
    table = [f"| {title} | {text} |" for title, text in found.items() if text != "-"]
    head = ["", "| score | before → after, ± standard error |", "|---|---|"] if table else []
    faults = [f"* {each.check}: {each.message}" for each in record.fine_tune.findings] if record.fine_tune else []
    verdict = judge(dataclasses.replace(record, fine_tune=None)).sentence
    return "\n".join([verdict, *head, *table, *(["", *faults] if faults else [])])


def _licence(contents: Contents) -> str:
    licence = licence_of(contents)
    if licence is None:
        return (
            f"{TO_FILL_IN}: the licence of the base model is not known to lightning_aigc. Read it on the base model's"
            " page, write its identifier as `license:` at the top of this file, and replace this sentence."
        )
    name = f"[{licence.title}]({licence.license_link})" if licence.license_link else f"`{licence.title}`"
    return f"{name}, the licence of the base model."


def _cell(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
