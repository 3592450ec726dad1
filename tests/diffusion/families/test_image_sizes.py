"""Sizes that a denoiser cannot take are refused before the first step, with the setting that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from lightning.pytorch import Trainer
from PIL import Image

from fakes.models.transformer_pipelines import MAKE
from lightning_aigc.data import EncodedImageData, ImageCaptionData
from lightning_aigc.data.encoded_stream.manifest import FILE, Manifest, Shard
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.diffusion.families import FAMILIES
from lightning_aigc.diffusion.pipeline.image_sizes import check_image_sizes
from lightning_aigc.diffusion.pipeline.loading import load_components
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ModelError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on workers and loggers


class KnownSizes:
    """A data module of given sizes."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        self.sizes = sizes

    def image_sizes(self) -> list[tuple[int, int]]:
        return list(self.sizes)

    def size_remedy(self, step: int) -> str:
        return f"use multiples of {step}"


@pytest.mark.parametrize("family", sorted(MAKE))
def test_each_family_asks_for_multiples_of_its_patches(family: str, transformers: Callable[[str], str]) -> None:
    parts = load_components(transformers(family), families=tuple(FAMILIES))  # 2 pixels a latent, patches of 2
    check_image_sizes(parts, KnownSizes((32, 32), (24, 36)))
    check_image_sizes(parts, object())  # of unknown sizes
    with pytest.raises(ModelError, match=r"images of 34 x 32 pixels \(and 1 more sizes\) .* use multiples of 4$"):
        check_image_sizes(parts, KnownSizes((32, 32), (34, 32), (32, 38)))


def test_a_unet_asks_for_multiples_of_its_autoencoders_step() -> None:
    parts = load_components("embedded:sd")
    step = 2 ** (len(parts.vae.config.block_out_channels) - 1)
    check_image_sizes(parts, KnownSizes((64 + step, 64)))
    with pytest.raises(ModelError, match="as this unet reads them"):
        check_image_sizes(parts, KnownSizes((64 + step // 2, 64)))


@pytest.fixture(scope="module")
def sd3_of_8_pixels(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Stable Diffusion 3 whose autoencoder has 8 pixels a latent, as the real one."""
    torch.manual_seed(0)
    source = resolve("embedded:sd3")
    pipeline = StableDiffusion3Pipeline.from_pretrained(source, text_encoder_3=None, tokenizer_3=None)
    pipeline.vae = AutoencoderKL(
        block_out_channels=(8,) * 4, down_block_types=("DownEncoderBlock2D",) * 4, norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=pipeline.transformer.config.in_channels,
        layers_per_block=1, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("sd3_of_8_pixels")
    pipeline.save_pretrained(folder)
    return str(folder)


def images(folder: Path, *sizes: tuple[int, int]) -> str:
    folder.mkdir()
    for number, (width, height) in enumerate(sizes):
        values = np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(values).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a zorp {number}")
    return str(folder)


def refusal(source: str, data: Any, tmp_path: Path, verb: str = "fit") -> str:
    trainer = Trainer(
        default_root_dir=tmp_path, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ModelError) as refused:
        getattr(trainer, verb)(DiffusionLoRA(source, rank=2, max_train_steps=3), data)
    assert trainer.global_step == 0
    return str(refused.value)


SETTINGS: dict[str, Any] = {"num_workers": 0, "train_batch_size": 1, "min_bucket_reso": 64}


@pytest.mark.parametrize(
    ("changes", "size", "remedy"),
    [
        ({"bucket_reso_steps": 8}, (136, 120), "set data.init_args.bucket_reso_steps: 16"),
        ({"bucket_reso_steps": 24, "bucket_no_upscale": True}, (72, 72), "set data.init_args.bucket_reso_steps: 32"),
        ({"resolution": 120, "enable_bucket": False}, (128, 128), "set data.init_args.resolution: 128"),
        (
            {"resolution": 120, "bucket_reso_steps": 8}, (120, 120),
            "set data.init_args.bucket_reso_steps: 16 and data.init_args.resolution: 128",
        ),
    ],
)  # fmt: skip
def test_the_setting_that_is_wrong_is_named(
    changes: dict[str, Any], size: tuple[int, int], remedy: str, sd3_of_8_pixels: str, tmp_path: Path
) -> None:
    folder = images(tmp_path / "images", *[(128, 128)] * 2, size)
    data = ImageCaptionData(folder, cache_dir=str(tmp_path), **({"resolution": 128} | SETTINGS | changes))
    assert refusal(sd3_of_8_pixels, data, tmp_path).endswith(remedy)


@pytest.mark.parametrize("verb", ["fit", "validate"])
def test_held_out_images_are_looked_at_too(verb: str, sd3_of_8_pixels: str, tmp_path: Path) -> None:
    data = ImageCaptionData(
        images(tmp_path / "images", (128, 128)), validation_data_dir=images(tmp_path / "held_out", (136, 120)),
        cache_dir=str(tmp_path), resolution=128, bucket_reso_steps=8, **SETTINGS,
    )  # fmt: skip
    assert "images of 136 x 120 pixels" in refusal(sd3_of_8_pixels, data, tmp_path, verb)


@pytest.mark.parametrize("role", ["shards_dir", "validation_shards_dir"])
def test_the_sizes_of_encoded_shards_are_looked_at(role: str, sd3_of_8_pixels: str, tmp_path: Path) -> None:
    folders = {"shards_dir": tmp_path / "even", "validation_shards_dir": tmp_path / "even"} | {role: tmp_path / "odd"}
    for name, width in (("even", 128), ("odd", 136)):
        shard = Shard.from_name(f"{width}x128-000000.{'0' * 16}.1.{'0' * 16}.tar")
        assert shard is not None
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_text(Manifest([shard]).to_json())
    data = EncodedImageData(**{key: str(folder) for key, folder in folders.items()}, num_workers=0)
    said = refusal(sd3_of_8_pixels, data, tmp_path)
    assert "images of 136 x 128 pixels" in said and said.endswith("that are multiples of 16")
