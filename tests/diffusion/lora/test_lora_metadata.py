"""The header of a LoRA file: what programs show of it, and which base model it names."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from fakes.models.lora_models import ATTENTION, adapt, make_unet
from lightning_aigc.diffusion.lora.file import read_lora, save_lora
from lightning_aigc.diffusion.lora.metadata import LoRAMetadata, hash_base_model


def test_header_says_what_a1111_and_comfyui_show(tmp_path: Path) -> None:
    unet = adapt(make_unet(), [*ATTENTION, "conv1"], rank_pattern={"conv1": 2})
    metadata = LoRAMetadata(
        output_name="zorp",
        trigger_phrase="zorp",
        base_model_name="some/model",
        base_model_hash="ab" * 32,
        resolution=512,
        num_train_images=20,
        steps=300,
        learning_rate=1e-4,
        captions=("zorp, cat", "zorp, dog"),
        started_at=1.5,
        date="2026-01-02",
    )
    path = save_lora(tmp_path / "a.safetensors", unet=unet, metadata=metadata)
    header = read_lora(path).metadata
    wanted = {
        "ss_base_model_version": "sd_v1",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "4",
        "ss_network_alpha": "3",
        "ss_sd_model_name": "some/model",
        "ss_sd_model_hash": "ab" * 5,
        "ss_new_sd_model_hash": "ab" * 32,
        "ss_resolution": "(512, 512)",
        "ss_num_train_images": "20",
        "ss_steps": "300",
        "ss_learning_rate": "0.0001",
        "ss_output_name": "zorp",
        "ss_training_started_at": "1.5",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": "stable-diffusion-v1/lora",
        "modelspec.title": "zorp",
        "modelspec.trigger_phrase": "zorp",
        "modelspec.prediction_type": "epsilon",
        "modelspec.resolution": "512x512",
        "modelspec.date": "2026-01-02",
    }
    assert wanted.items() <= header.items()
    assert json.loads(header["ss_tag_frequency"]) == {"captions": {"zorp": 2, "cat": 1, "dog": 1}}
    assert json.loads(header["ss_network_args"]) == {"conv_dim": "2", "conv_alpha": "3"}
    content = path.read_bytes()
    tensors = content[8 + int.from_bytes(content[:8], "little") :]
    assert header["sshs_model_hash"] == hashlib.sha256(tensors).hexdigest()
    assert header["modelspec.hash_sha256"] == "0x" + header["sshs_model_hash"]
    again = save_lora(tmp_path / "b.safetensors", unet=unet, metadata=metadata)
    assert again.read_bytes() == content


@pytest.mark.parametrize(
    ("base_model", "prediction", "architecture", "version"),
    [
        ("sd2", "epsilon", "stable-diffusion-v2-512/lora", "sd_v2"),
        ("sd2", "v_prediction", "stable-diffusion-v2-768-v/lora", "sd_v2_v"),
        ("sdxl", "epsilon", "stable-diffusion-xl-v1-base/lora", "sdxl_base_v1-0"),
    ],
)
def test_header_names_the_base_model(base_model: str, prediction: str, architecture: str, version: str) -> None:
    metadata = LoRAMetadata(prediction_type=prediction)
    header = metadata.to_header(base_model=base_model, rank=4, alpha=4, network_args={})
    assert header["modelspec.architecture"] == architecture and header["ss_base_model_version"] == version
    assert all(isinstance(value, str) for value in header.values())


def test_base_model_hash_covers_the_unet_weights(tmp_path: Path) -> None:
    assert hash_base_model(tmp_path) is None
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"weights")
    assert hash_base_model(tmp_path) == hashlib.sha256(b"weights").hexdigest()
