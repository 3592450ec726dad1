"""Choices of `lightning init` for a folder of images, a base model and a card, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from lightning_aigc.cli.init.base import Base, is_embedded
from lightning_aigc.cli.init.cards import Card, CardValues
from lightning_aigc.cli.init.config import Choice, read_shipped
from lightning_aigc.cli.init.folder import FolderSummary, is_rare, made_up_trigger_word, shared_trigger_word
from lightning_aigc.data.captions.caption_lengths import is_long
from lightning_aigc.data.captions.captions import add_trigger_word
from lightning_aigc.data.captions.encodings import title_of
from lightning_aigc.data.loader.buckets import BucketSettings, bucket_shapes, place
from lightning_aigc.diffusion.families import SHORT
from lightning_aigc.errors import ConfigError

_WORD = re.compile(r"\w[\w-]*")
CAPTION_CALLBACK = "FineTuneCheck"
"""Callback that compares images with captions, which instructions are not."""
JUDGING = ("RunReport", "CLIPConvergenceGuard", CAPTION_CALLBACK)
"""Callbacks with a CLIP model."""
NO_TRIGGER = Choice("data.init_args.trigger_word", None, "an instruction needs no trigger word")
LOOKS_PER_PICTURE = 100
FEWEST_STEPS, MOST_STEPS = 400, 3000
FEW_PICTURES = 10
HELD_OUT_FROM, HELD_OUT = 20, 0.1
CHECKS = 6
"""About how many times a run is looked at."""
EMBEDDED_DEMOS = {"sd": "sd_lora_demo.yaml", "sd3": "sd3_lora_demo.yaml"}
"""The config in which an embedded model was measured, by family."""
FROM_THE_DEMO = ("lora_targets", "learning_rate", "guidance_scale")
"""Arguments that the tiny models need as in their demos: by its attention alone the tiny U-Net draws no photograph."""


def choose(
    look: FolderSummary,
    base: Base,
    card: Card,
    values: CardValues,
    pictures_a_step: int,
    trigger_word: str | None,
    name: str,
) -> list[Choice]:
    """All choices. `pictures_a_step` is the template's batch size times its accumulation."""
    trigger = _trigger_word(look, trigger_word) if not look.sources else NO_TRIGGER
    memory, memory_reason = values.memory
    chosen = [
        Choice("trainer.default_root_dir", f"runs/{name}", "images, snapshots, report and the LoRA go here"),
        Choice("trainer.plugins.init_args.memory", memory, f"{card.reason}: {memory_reason}"),
        Choice("model.init_args.pretrained_model_name_or_path", base.source, base.reason),
        *_schedule(look, pictures_a_step),
        Choice("model.init_args.validation_prompts", _prompts(look, str(trigger.value or "")), _prompts_reason(look)),
        Choice("model.init_args.output_name", name, f"you get {name}_best.safetensors and {name}.safetensors"),
        Choice("data.init_args.train_data_dir", look.folder, f"{len(look.sizes)} usable images"),
        *_shapes(look, base),
        trigger,
        _captions(look),
        *_caption_files(look),
    ]
    if base.denoiser_file is not None:
        chosen.append(
            Choice("model.init_args.denoiser_file", base.denoiser_file, f"the weights of {base.family.title}")
        )
    if values.base_quantization is not None:
        kind, why = values.base_quantization
        if kind == "int8" and base.is_float8:
            kind, why = "fp8", f"keeps the file's float8 values, in the bytes of int8: {why}"
        chosen.append(Choice("model.init_args.base_quantization", kind, why))
    if values.base_location is not None:
        chosen.append(Choice("model.init_args.base_location", *values.base_location))
    if card.precision is not None:
        chosen.append(Choice("trainer.plugins.init_args.precision", card.precision, "this card has no bfloat16"))
    if base.family.name == "sdxl":
        chosen.append(
            Choice("model.init_args.gradient_checkpointing", False, f"memory: {memory} does its work, and faster")
        )
    if card.kind == "910b" and base.family.name != "sd":  # whose shipped config says it
        chosen.append(Choice("trainer.accelerator", "npu", card.reason))
    chosen.append(_held_out(look))
    if look.sources:
        if not base.family.needs_sources:  # of one that does, a step was counted with its source
            memory_reason += "; that is without sources, which add their tokens"
        chosen += _of_edits(look, base, memory_reason)
    if is_embedded(base):
        for callback in JUDGING[: -1 if look.sources else None]:
            chosen.append(Choice(f"trainer.callbacks.{callback}.clip_model", "embedded:clip", "ships with the package"))
            chosen.append(Choice(f"trainer.callbacks.{callback}.clip_pretrained", None, "its own weights"))
        measured = read_shipped(EMBEDDED_DEMOS[base.family.name])["model"]["init_args"]
        chosen += [Choice(f"model.init_args.{key}", measured[key], "as in the demo") for key in FROM_THE_DEMO]
    return list({choice.key: choice for choice in chosen}.values())  # the last of each key


def check_edits(look: FolderSummary, base: Base) -> None:
    """Check pairs of an edit and their base.

    Raises: ConfigError for pairs with a base that takes none, an edit base without pairs, pairs without instructions.
    """
    family = base.family
    if look.sources > family.max_sources:
        edits = ", ".join(sorted(short for short, each in SHORT.items() if each.max_sources >= look.sources))
        takes = f"reads {family.max_sources} sources" if family.max_sources else "draws from text alone"
        raise ConfigError(
            f"{look.folder} has pairs of an edit with {look.sources} source{'s' * (look.sources > 1)} for each image,"
            f" and {family.title} {takes}; use --base {edits}"
        )
    if family.needs_sources and not look.sources:
        raise ConfigError(
            f"--base {base.source} edits images, and {look.folder} has none to start from; put the images before the"
            " edit into before/ and those after it into after/, with equal names, or list them in metadata.jsonl under"
            " source"
        )
    missing = len(look.sizes) - len(look.written)
    if look.sources and missing:
        beside = "" if look.source_folder is None else f", not into {look.source_folder}"
        raise ConfigError(
            f"{missing} of {len(look.sizes)} pairs have no instruction; write it into a {look.caption_extension} of the"
            f" image's name in {look.folder}{beside}, such as: make it red"
        )


def _of_edits(look: FolderSummary, base: Base, memory_reason: str) -> Iterator[Choice]:
    """Choices for pairs of an edit, which take precedence over those for captioned images."""
    where = "listed in the captions' table"
    if look.source_folder is not None:
        where = "the images before the edit, with the names of those after it"
    yield Choice("data.init_args.source_data_dir", look.source_folder, where)
    if base.family.text_sees_sources:
        why = "its pipelines, which draw the samples, scale every source to about this area"
        yield Choice("data.init_args.source_fit", "own", "a source keeps its own shape, as in its pipelines")
        yield Choice("data.init_args.source_resolution", base.side, why)
    yield Choice("data.init_args.missing_captions", "error", "a caption is the instruction of its edit")
    yield Choice("data.init_args.class_data_dir", None, "class images have no sources")
    yield Choice("data.init_args.random_flip", False, "an instruction may say left or right")
    prompts = sorted(set(look.written))[:3]
    yield Choice("model.init_args.validation_prompts", prompts, "instructions; the sources are those of your pairs")
    yield Choice("trainer.callbacks.CLIPConvergenceGuard.metric", "edit", "edits are compared with their true targets")
    yield Choice("trainer.callbacks.RunReport.prior_prompts", [], "captions of other images, which are no instructions")
    yield Choice("trainer.plugins.init_args.memory", "max", memory_reason)


def _schedule(look: FolderSummary, pictures_a_step: int) -> list[Choice]:
    count = len(look.sizes)
    wanted = round(LOOKS_PER_PICTURE * count / pictures_a_step, -1)
    steps = int(min(max(wanted, FEWEST_STEPS), MOST_STEPS))
    looks = steps * pictures_a_step // count
    every = steps // CHECKS // 10 * 10
    limit = ", the least" if steps > wanted else ", the most" if steps < wanted else ""
    rate, why = (1e-4, "the usual rate of a LoRA; AdaptiveLR looks for a better one from here")
    if count < FEW_PICTURES:
        rate, why = 5e-5, f"half the usual rate: fewer than {FEW_PICTURES} images are learnt by heart sooner"
    return [
        Choice("model.init_args.max_train_steps", steps,
               f"each image is seen {looks} times, {pictures_a_step} a step{limit}; the guard stops sooner"),
        Choice("model.init_args.learning_rate", rate, why),
        Choice("model.init_args.lr_warmup_steps", min(50, steps // 10), "a tenth of the steps, 50 at most"),
        Choice("model.init_args.validation_steps", every, "some six times in the run"),
        Choice("model.init_args.checkpointing_steps", steps // 2, "a LoRA on the way, and a snapshot for --resume"),
        Choice("trainer.callbacks.CLIPConvergenceGuard.every_n_steps", every, "some six times in the run"),
        Choice("trainer.callbacks.CLIPConvergenceGuard.patience", 3 * every, "three checks without a better"),
    ]  # fmt: skip


def _shapes(look: FolderSummary, base: Base) -> list[Choice]:
    side = base.side
    least = min(side, 256)
    resolution = max(least, min(side, look.side // 64 * 64))
    why = f"what the base was trained at; the median image has the area of {look.side} x {look.side}"
    if look.side < least:
        why = f"the median image has the area of {look.side} x {look.side} and is enlarged: larger ones learn better"
    elif resolution < side:
        why = f"below the base's {side}: the median image has the area of {look.side} x {look.side} only"
    longest = max(1024, resolution * 3 // 2)
    settings = BucketSettings(resolution, max_bucket_reso=longest)
    shapes = bucket_shapes(settings)
    used = {(p.width, p.height) for p in (place(width, height, settings, shapes) for width, height in look.sizes)}
    several = used != {(resolution, resolution)}
    is_square = all(width == height for width, height in look.sizes)
    alone = "all are square" if is_square else f"{resolution} x {resolution} is the bucket of each image"
    listed = ", ".join(f"{width} x {height}" for width, height in sorted(used)[:4]) + (" ..." if len(used) > 4 else "")
    return [
        Choice("data.init_args.resolution", resolution, why),
        Choice("data.init_args.enable_bucket", several, f"shapes: {listed}" if several else alone),
        Choice("data.init_args.max_bucket_reso", longest, "the longest side that an image may have"),
    ]


def _trigger_word(look: FolderSummary, given: str | None) -> Choice:
    key = "data.init_args.trigger_word"
    if given is not None:
        return Choice(key, given, "given by --trigger_word")
    if look.trigger_folder is not None:
        repeats, _, words = look.trigger_folder.partition("_")
        word = _WORD.search(words)
        if word is not None:
            why = f"the word of the folder {look.trigger_folder}, whose images are taken {repeats} times an epoch"
            return Choice(
                key, word[0], why + ("" if is_rare(word[0]) else "; a common word, --trigger_word gives another")
            )
    shared = shared_trigger_word(look.written)
    if shared is not None:
        return Choice(key, shared, "the rare word that all captions share")
    why = "captions share no rare word" if look.written else "there are no captions"
    made_up = made_up_trigger_word(look.folder, look.written)
    return Choice(key, made_up, f"made up from the folder's name: {why}; it is prepended, and stands in your prompts")


def _caption_files(look: FolderSummary) -> Iterator[Choice]:
    """Ending and encoding of the caption files, where they are not `.txt` in UTF-8."""
    if look.caption_extension != ".txt":
        yield Choice("data.init_args.caption_extension", look.caption_extension, "the ending of your caption files")
    if look.encoding is not None:
        why = (
            f"your captions are not UTF-8 but {title_of(look.encoding)}; look at the prompts above: are they your text?"
        )
        yield Choice("data.init_args.caption_encoding", look.encoding, why)


def _captions(look: FolderSummary) -> Choice:
    key, without = "data.init_args.missing_captions", len(look.sizes) - len(look.written)
    if not look.written:
        return Choice(key, "trigger", "no image has a caption: all learn on the trigger word; captions do better")
    if without or look.orphans:
        found = [f"{without} of {len(look.sizes)} images have no caption and learn on the trigger word"] * bool(without)
        found += [f"{len(look.orphans)} captions match no image, such as {look.orphans[0]}"] if look.orphans else []
        return Choice(key, "trigger", "; ".join(found))
    return Choice(key, "error", "every image has a caption, and training stops if one gets lost")


def _prompts(look: FolderSummary, trigger: str) -> list[str]:
    """Two captions, and the trigger word in two places that captions may not show."""
    captions = sorted({add_trigger_word(caption, trigger, ",") for caption in look.written})
    captions = [caption for caption in captions if not is_long(caption)]
    own: Sequence[str] = sorted({captions[len(captions) // 4], captions[3 * len(captions) // 4]}) if captions else ()
    return [*own, f"a photo of {trigger} on a wooden table", f"a photo of {trigger} in the snow"]


def _prompts_reason(look: FolderSummary) -> str:
    own = "two captions, then " if look.written else ""
    return f"{own}the trigger word in places that your images may not show"


def _held_out(look: FolderSummary) -> Choice:
    key, count = "data.init_args.validation_split", len(look.sizes)
    if count < HELD_OUT_FROM:
        return Choice(key, 0.0, f"no image is held out: {count} are too few to spare any")
    return Choice(
        key, HELD_OUT, f"{round(count * HELD_OUT)} of {count} images are held out: val_loss rises on them first"
    )
