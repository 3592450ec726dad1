"""Instructions for a trained LoRA file: lines to copy for diffusers, ComfyUI and A1111."""

from __future__ import annotations

import html
import json
import shlex
from pathlib import Path

from lightning_aigc.report.page import code, note
from lightning_aigc.report.record import LoRAFile

WEIGHT = 0.8
EMBEDDED = "embedded:"
CONVERTED = ".diffusers.safetensors"


def usage_html(lora: LoRAFile, prompt: str) -> str:
    """One block for each program, filled with this run's file, trigger word and prompt."""
    file = Path(lora.file)
    prompt = _with_trigger(prompt, lora.trigger_word)
    parts = []
    if lora.trigger_word:
        word = html.escape(lora.trigger_word)
        parts.append(f"<p>Say <code>{word}</code> in the prompt: it is the word this file was trained on.</p>")
    if lora.edits:
        parts.append(note("The file edits the image that it is given."))
        parts.append(code(edit_command(file.parent / "config.yaml", prompt)))
    if lora.edits and lora.edit_pipeline is None:
        parts.append(note("diffusers has no pipeline that edits with this base, so only this command draws with it."))
        return "".join(parts)
    parts += ["<h3>diffusers</h3>", code(diffusers_snippet(lora, prompt))]
    if lora.kohya_layout and not lora.edits:
        parts += [
            "<h3>ComfyUI</h3>",
            note(f"Copy the file to ComfyUI/models/loras/, add the node “Load LoRA”, weight {WEIGHT} to begin with."),
            code(f"cp {shlex.quote(str(file))} ComfyUI/models/loras/\nprompt: {prompt}"),
            "<h3>A1111</h3>",
            note("Copy the file to stable-diffusion-webui/models/Lora/; the weight stands in the prompt."),
            code(
                f"cp {shlex.quote(str(file))} stable-diffusion-webui/models/Lora/\n"
                f"prompt: {prompt} <lora:{file.stem}:{WEIGHT}>"
            ),
        ]
    return "".join(parts)


def diffusers_snippet(lora: LoRAFile, prompt: str) -> str:
    """Python that draws an image with this file."""
    base = lora.base_model or "PATH_OR_HUB_ID_OF_THE_BASE_MODEL"
    loads, embedded = quoted(base), ""
    if base.startswith(EMBEDDED):
        embedded = "from lightning_aigc.embedded import resolve\n"
        loads = f"resolve({quoted(base)})"
    loader = "from_single_file" if base.endswith((".safetensors", ".ckpt")) else "from_pretrained"
    of_file = lora.base_pipeline or "StableDiffusionPipeline"
    pipeline = "DiffusionPipeline" if loader == "from_pretrained" else of_file
    given, more = repr(prompt), ""
    if lora.edits and lora.edit_pipeline is not None:
        pipeline, more = lora.edit_pipeline, "from diffusers.utils import load_image\n"
        given = f'image=load_image("before.png"), prompt={prompt!r}'
    return (
        f"from diffusers import {pipeline}\n{more}{embedded}\n"
        f"pipe = {pipeline}.{loader}({loads})\n{_loads_adapter(lora)}"
        f'pipe({given}).images[0].save("picture.png")'
    )


def edit_command(config: Path, prompt: str) -> str:
    """The command that edits an image with a run's file."""
    command = f"lightning sample -c {shlex.quote(str(config))} --source before.png"
    return f"{command} --prompts {shlex.quote(prompt)} -o after.png"


def _loads_adapter(lora: LoRAFile) -> str:
    """Lines that load the file; diffusers' pipelines load no LoKr, but their parts do, under diffusers' names."""
    file, first = Path(lora.file), ""
    if lora.lokr_of is None:
        loads, owner = f"pipe.load_lora_weights({quoted(file.parent)}", "pipe"
        more = ""
    else:
        owner = f"pipe.{lora.lokr_of}"
        if lora.lokr_of == "unet" and not file.name.endswith(CONVERTED):
            converted = file.with_name(f"{file.stem}{CONVERTED}")
            first = (
                f"# once: lightning export {shlex.quote(str(file))} --to diffusers -o {shlex.quote(str(converted))}\n"
            )
            file = converted
        loads, more = f"{owner}.load_lora_adapter({quoted(file.parent)}", f" prefix={quoted(lora.lokr_of)},"
    name = quoted(file.name.removesuffix(".safetensors").removesuffix(".diffusers").replace(".", "_"))  # for peft
    return (
        f"{first}{loads}, weight_name={quoted(file.name)},{more} adapter_name={name})\n"
        f"{owner}.set_adapters({name}, {WEIGHT})\n"
    )


def quoted(value: object) -> str:
    """A value as a Python string literal, in double quotes."""
    return json.dumps(str(value), ensure_ascii=False)


def _with_trigger(prompt: str, word: str | None) -> str:
    if not prompt:
        return f"a photo of {word}" if word else "a photo"
    return prompt if not word or word in prompt else f"{word} {prompt}"
