"""The pitfalls of docs/guide.md: how each is made, the line that detects it, and the config line that cures it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Arguments = Mapping[str, str]
DATA = "data.init_args."
MODEL = "model.init_args."


@dataclass(frozen=True)
class Pitfall:
    """One way to ruin a fine-tune. `{data}` in a value is the folder that `tools.guide data` writes into."""

    name: str
    title: str
    part: str
    """Component of the package that detects it."""
    detects: str
    """Regular expression of the line that it prints."""
    cure: Arguments
    """Arguments that replace those of the mistake."""
    folders: tuple[str, ...] = ()
    """Folders of data.py that it needs; the first has the mistake."""
    short: Arguments = field(default_factory=dict)
    """Arguments that the short form needs in addition to SHORT to show the mistake; `{data}` as in the cure."""
    cured_by_default: bool = False
    """Whether the cure is the value of the demo's config, so that the cured run is the healthy run."""
    is_dry_run: bool = False
    """Whether its command is a dry run, in the long form too."""
    is_seen_at_start: bool = False
    """Whether a dry run detects it: the short form then takes one step."""


SHORT: Arguments = {
    f"{MODEL}max_train_steps": "12",
    f"{MODEL}num_inference_steps": "4",
    f"{DATA}cache_latents": "false",
    f"{DATA}cache_text_embeddings": "false",
    f"{DATA}class_data_dir": "null",
}
"""The short form of a run, for the test."""

PITFALLS: tuple[Pitfall, ...] = (
    Pitfall(
        "over_training",
        "Over-training",
        "FineTuneCheck",
        r"fine-tune: memorised: ",
        {f"{MODEL}max_train_steps": "120"},
        ("twelve", "four"),
        {f"{MODEL}max_train_steps": "70", f"{MODEL}num_inference_steps": "8", f"{DATA}train_data_dir": "{data}/four"},
    ),
    Pitfall(
        "forgetting",
        "Forgetting",
        "FineTuneCheck",
        r"fine-tune: forgotten: ",
        {f"{DATA}class_data_dir": "embedded:prior"},
        short={f"{MODEL}max_train_steps": "40"},
    ),
    Pitfall(
        "rate_too_high",
        "A learning rate that is too high",
        "GradientHealthMonitor",
        r"health (warning|error): ",
        {f"{MODEL}learning_rate": "5.0e-3"},
        short={f"{MODEL}max_train_steps": "24"},
        cured_by_default=True,
    ),
    Pitfall(
        "rate_too_low",
        "A learning rate that is too low",
        "FineTuneCheck",
        r"fine-tune: not_learned: ",
        {f"{MODEL}learning_rate": "5.0e-3"},
        cured_by_default=True,
    ),
    Pitfall(
        "silent_captions",
        "Captions that say nothing",
        "the data report",
        r"captions say nothing beyond the trigger word",
        {f"{DATA}train_data_dir": "embedded:brand"},
        ("silent",),
        is_seen_at_start=True,
        cured_by_default=True,
    ),
    Pitfall(
        "leaking_background",
        "Captions that leak the background",
        "the data report",
        r"no word of their captions tells which",
        {f"{DATA}train_data_dir": "{data}/named"},
        ("leaking", "named"),
        is_seen_at_start=True,
    ),
    Pitfall(
        "too_few_pictures",
        "Too few images",
        "the data report",
        r"\w+ for this many steps: each is seen \d+ times",
        {f"{DATA}train_data_dir": "embedded:brand"},
        ("one",),
        {f"{MODEL}max_train_steps": "110"},
        is_seen_at_start=True,
    ),
    Pitfall(
        "one_background",
        "One background",
        "the data report",
        r"have the same background .* asks for another",
        {f"{DATA}train_data_dir": "{data}/named"},
        ("brand", "named"),
        is_seen_at_start=True,
    ),
    Pitfall(
        "fp16_vae",
        "An autoencoder in float16",
        "lightning fit --dry_run",
        r"autoencoder: float16 overflows at",
        {f"{MODEL}pretrained_model_name_or_path": "embedded:sd"},
        ("fp16_vae",),
        is_dry_run=True,
        is_seen_at_start=True,
    ),
    Pitfall(
        "wrong_prediction_type",
        "The wrong prediction type",
        "DiffusionLoRA",
        r"prediction_type v_prediction does not fit",
        {f"{MODEL}prediction_type": "null"},
        is_seen_at_start=True,
        cured_by_default=True,
    ),
    Pitfall(
        "text_encoder",
        "A text encoder that is over-trained",
        "FineTuneCheck",
        r"fine-tune: text_encoder_drift: ",
        {f"{MODEL}train_text_encoder": "false"},
        cured_by_default=True,
    ),
    Pitfall(
        "bleeding",
        "The look bleeds into the class",
        "FineTuneCheck",
        r"fine-tune: bleeding: ",
        {
            f"{DATA}train_data_dir": "embedded:brand",
            f"{DATA}class_data_dir": "embedded:prior",
            f"{DATA}prior_ratio": "2.0",
            f"{MODEL}validation_prompts": "[a zorp mug, a zorp umbrella, a zorp teapot, a zorp guitar]",
        },
        ("without_trigger",),
        {f"{MODEL}max_train_steps": "40"},
    ),
    Pitfall(
        "cut_heads",
        "Crops that cut heads",
        "the data report",
        r"\w+ lose more than 20% to the crop",
        {f"{DATA}enable_bucket": "true", f"{DATA}bucket_reso_steps": "16", f"{DATA}min_bucket_reso": "32"},
        ("tall",),
        is_seen_at_start=True,
    ),
    Pitfall(
        "small_faces",
        "Faces",
        "the data report",
        r"face or masked subject is smaller than",
        {f"{DATA}train_data_dir": "{data}/faces", f"{DATA}mask_dir": "{data}/faces_masks"},
        ("small_faces", "faces"),
        is_seen_at_start=True,
    ),
    Pitfall(
        "rank_too_low",
        "A rank that is too low",
        "FineTuneCheck",
        r"fine-tune: rank_full: ",
        {f"{MODEL}rank": "16"},
        cured_by_default=True,
    ),
    Pitfall(
        "rank_too_high",
        "A rank that is too high",
        "FineTuneCheck",
        r"fine-tune: rank_unused: ",
        {f"{MODEL}rank": "16"},
        cured_by_default=True,
    ),
    Pitfall(
        "colour_shift",
        "Colours and noise offset",
        "FineTuneCheck",
        r"fine-tune: colour_shift: ",
        {f"{MODEL}noise_offset": "0.0"},
        cured_by_default=True,
    ),
)
BY_NAME = {pitfall.name: pitfall for pitfall in PITFALLS}
