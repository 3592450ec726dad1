"""A merged pipeline folder is a plain one: a stranger's diffusers loads it and draws, whatever dtypes the base had."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from diffusers import StableDiffusionPipeline
from peft import LoraConfig

from fakes.models import lora_models
from fakes.models.lora_models import ATTENTION, EVERYTHING, TEXT, adapt, assert_same_model, make_unet
from fakes.models.pipelines import make_pipeline, make_text_encoder
from fakes.processes.programs import WITHOUT_COLLECTIONS
from lightning_aigc.diffusion.lora.file import save_lora
from lightning_aigc.diffusion.lora.merge import merge_into_pipeline
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.errors import ModelError

# Nothing of this package; torchvision's CUDA build does not load beside a CPU build of torch, and diffusers needs none.
STRANGER = """
import json, sys
sys.modules["torchvision"] = None
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
assert not [name for name in sys.modules if name.startswith("lightning_aigc")]
rows = []
for folder in sys.argv[1:]:
    kind = StableDiffusionXLPipeline if folder.endswith("xl") else StableDiffusionPipeline
    extras = {"add_watermarker": False} if folder.endswith("xl") else {}
    pipeline = kind.from_pretrained(folder, **extras)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(1)
    image = pipeline("a red cup", num_inference_steps=2, output_type="pt", generator=generator).images
    rows.append([list(image.shape), bool(image.isfinite().all()), image.std().item()])
print(json.dumps(rows))
"""
BASES = {
    "half": ("float16", "float16", "float16"),
    "all apart": ("bfloat16", "float16", "float32"),
    "half unet": ("float16", "float32", "float32"),
    "half text": ("float32", "bfloat16", "float16"),
    "half xl": ("float16", "float16", "float32"),
}
"""Dtypes of the U-Net's, the text encoders' and the autoencoder's files."""


def make_base(folder: Path, unet: str, text: str, vae: str) -> Path:
    """A pipeline folder with its files in these dtypes, as its configs say."""
    make_pipeline(folder, sdxl=folder.name.endswith("xl"))
    for part, name in {"unet": unet, "vae": vae, "text_encoder": text, "text_encoder_2": text}.items():
        for path in (folder / part).glob("*.safetensors") if (folder / part).is_dir() else ():
            state = safetensors.torch.load_file(path)
            safetensors.torch.save_file(
                {k: v.to(getattr(torch, name)) if v.is_floating_point() else v for k, v in state.items()}, path
            )
            config = folder / part / "config.json"
            if "text" in part:
                config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": name}))
    return folder


def dtypes_in(path: Path) -> set[torch.dtype]:
    return {v.dtype for v in safetensors.torch.load_file(path).values() if v.is_floating_point()}


def make_lora(path: Path, base: Path) -> Path:
    parts = load_components(str(base))
    torch.manual_seed(5)
    parts.denoiser.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    text = []
    if parts.family.name == "sd":
        text = [make_text_encoder()]
        text[0].add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return save_lora(path, unet=parts.denoiser, text_encoders=text)


@pytest.mark.filterwarnings("ignore")
def test_a_stranger_loads_and_draws_whatever_dtypes_the_base_had(tmp_path: Path) -> None:
    folders = []
    for name, dtypes in BASES.items():
        base = make_base(tmp_path / name, *dtypes)
        lora = make_lora(tmp_path / f"{name}.safetensors", base)
        folders.append(merge_into_pipeline(lora, base, tmp_path / f"merged {name}"))
        for part, dtype in zip(("unet", "text_encoder", "vae"), dtypes, strict=True):
            (stored,) = (folders[-1] / part).glob("*.safetensors")
            assert dtypes_in(stored) == {getattr(torch, dtype)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_COLLECTIONS + STRANGER, *map(str, folders)],
        capture_output=True, text=True, timeout=240, cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row[:2] for row in rows] == [[[1, 3, 32, 32], True]] * len(BASES)
    assert all(row[2] > 0 for row in rows)


def test_a_part_of_two_dtypes_keeps_both_and_a_variant_beside_it_does_not_count(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "float16", "float32", "float16")
    path = base / "unet" / "diffusion_pytorch_model.safetensors"
    state = safetensors.torch.load_file(path)
    last = sorted(state)[-1]
    wide = state[last].float() + 1e-7
    safetensors.torch.save_file(state | {last: wide}, path)
    variant = {key: value.float() for key, value in state.items()}
    safetensors.torch.save_file(variant, base / "vae" / "diffusion_pytorch_model.wide.safetensors")
    merged = merge_into_pipeline(make_lora(tmp_path / "l.safetensors", base), base, tmp_path / "merged")
    stored = safetensors.torch.load_file(merged / "unet" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(stored[last], wide)
    assert dtypes_in(merged / "vae" / "diffusion_pytorch_model.safetensors") == {torch.float16}


@pytest.mark.parametrize("strength", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.filterwarnings("ignore:.*DoRA in the kohya layout")
def test_merging_leaves_a_plain_pipeline_with_the_blended_weights(tmp_path: Path, strength: float, dora: bool) -> None:
    base = lora_models.make_pipeline(tmp_path / "tokenizer")
    base.save_pretrained(tmp_path / "base")
    unet = adapt(make_unet(), EVERYTHING, use_dora=dora)
    text_encoder = adapt(make_text_encoder(), TEXT, use_dora=dora)
    path = tmp_path / "lora.safetensors"
    save_lora(path, unet=unet, text_encoders=[text_encoder], dtype=torch.float32)
    merged = StableDiffusionPipeline.from_pretrained(
        merge_into_pipeline(path, tmp_path / "base", tmp_path / "merged", strength)
    )
    assert not any("lora" in name for name, _ in merged.unet.named_parameters())
    before, after = make_unet().state_dict(), merged.unet.state_dict()
    for module in unet.modules():
        if hasattr(module, "merge"):
            module.merge()
    trained = {key.replace(".base_layer", ""): value for key, value in unet.state_dict().items()}
    for key, value in after.items():
        torch.testing.assert_close(value, torch.lerp(before[key], trained[key], strength), rtol=1e-4, atol=1e-6)
    if strength == 1.0:
        assert_same_model(merged, None, text_encoder)


def test_merging_keeps_half_precision_and_refuses_to_overwrite(tmp_path: Path) -> None:
    lora_models.make_pipeline(tmp_path / "tokenizer").to(torch.float16).save_pretrained(tmp_path / "base")
    path = save_lora(tmp_path / "lora.safetensors", unet=adapt(make_unet(), ATTENTION))
    (tmp_path / "merged").mkdir()
    merge_into_pipeline(path, tmp_path / "base", tmp_path / "merged")
    stored = safetensors.torch.load_file(tmp_path / "merged/unet/diffusion_pytorch_model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.float16}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base", "lora.safetensors", "merged", "tokenizer"]
    with pytest.raises(ModelError, match="name a new or empty folder"):
        merge_into_pipeline(path, tmp_path / "base", tmp_path / "merged")
    with pytest.raises(ModelError, match="wanted a diffusers pipeline folder"):
        merge_into_pipeline(path, tmp_path, tmp_path / "other")
    other = save_lora(tmp_path / "xl.safetensors", unet=adapt(make_unet(True), ATTENTION))
    with pytest.raises(ModelError, match="trained on another kind of model"):
        merge_into_pipeline(other, tmp_path / "base", tmp_path / "other")
    assert not (tmp_path / "other").exists()
