"""A dropped caption in training is the same embedding as a prompt that sampling is not given."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import torch

from fakes.models.pipelines import make_pipeline
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.diffusion.pipeline.generate import make_pipeline as sampling_pipeline

FLAG = "force_zeros_for_empty_prompt"


@pytest.mark.parametrize("flag", [True, False, None], ids=["zeros", "encoded", "unset"])
@pytest.mark.parametrize("sdxl", [False, True], ids=["sd", "sdxl"])
def test_a_dropped_caption_is_what_the_pipeline_takes_without_a_negative_prompt(
    tmp_path: Path, sdxl: bool, flag: bool | None
) -> None:
    folder = make_pipeline(tmp_path / "base", sdxl)
    index = json.loads((folder / "model_index.json").read_text())
    index.pop(FLAG, None)
    (folder / "model_index.json").write_text(json.dumps(index | ({} if flag is None or not sdxl else {FLAG: flag})))
    reference = diffusers.DiffusionPipeline.from_pretrained(folder, safety_checker=None)
    with torch.no_grad():
        given, not_given, *pooled = reference.encode_prompt("a mug", device="cpu", num_images_per_prompt=1,
            do_classifier_free_guidance=True)  # fmt: skip
    module = DiffusionLoRA(str(folder), rank=2)
    module.configure_model()
    found = module.encode_captions(["a mug", ""])
    torch.testing.assert_close(found["prompt_embeds"], torch.cat([given, not_given]))
    assert bool(found["prompt_embeds"][1].abs().max() > 0) is not (sdxl and flag is not False)
    if sdxl:
        torch.testing.assert_close(found["pooled_prompt_embeds"], torch.cat(pooled))
        drawn = sampling_pipeline(module.loaded(), module.sampling_config())
        assert drawn.config[FLAG] is reference.config[FLAG] is (flag is not False)
