"""DiffusionFineTuning on every family: what is trained, diffusers' loss, files that draw the same, resume, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from diffusers import DiffusionPipeline
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from fakes.models.pipelines import SIDE, make_batch
from fakes.models.transformer_pipelines import MAKE
from fakes.runs.rewinding import rewind
from fakes.runs.seeded_fits import fit, same
from fakes.runs.training_losses import example_losses
from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.diffusion import DiffusionFineTuning, DiffusionLoRA
from lightning_aigc.errors import ModelError

pytestmark = [
    pytest.mark.usefixtures("without_report_page"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice on workers, loggers and folders
]
Folder = Callable[[str], str]


@pytest.fixture(params=sorted(MAKE))
def folder(request: pytest.FixtureRequest, transformers: Folder) -> str:
    return transformers(str(request.param))


@pytest.fixture
def sd3(transformers: Folder) -> str:
    return transformers("sd3")


def make_module(path: str, **options: Any) -> DiffusionFineTuning:
    torch.manual_seed(0)
    given = {"learning_rate": 1e-3, "num_inference_steps": 2, "max_train_steps": 2, "sample_resolution": SIDE}
    return DiffusionFineTuning(path, **(given | options))  # type: ignore[arg-type]


def weights(module: DiffusionFineTuning) -> dict[str, Tensor]:
    assert module.transformer is not None
    return {name: p.detach().clone() for name, p in module.transformer.named_parameters()}


def test_the_transformer_is_trained_and_nothing_else(folder: str, tmp_path: Path) -> None:
    module = make_module(folder)
    module.configure_model()
    parts = module.loaded()
    frozen = [p for model in (parts.vae, *parts.text_encoders) for p in model.parameters()]
    before, others = weights(module), [p.detach().clone() for p in frozen]
    fit(module, tmp_path, batch=make_batch(("a red cup", "zorp")))
    after = weights(module)
    assert module.transformer is not None
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(moved) > 0.8 * len(before)
    still = {name for name, p in module.transformer.named_parameters() if p.requires_grad} - moved
    assert still <= {"x_pad_token"}  # Z-Image's, which an image of a multiple of 32 tokens does not read
    assert all(torch.equal(was, now) for was, now in zip(others, frozen, strict=True))


def test_the_first_loss_is_that_of_a_lora_which_begins_at_nothing(folder: str) -> None:
    """tests/diffusion/families/test_families.py holds the LoRA's to diffusers' own scripts."""
    losses = []
    for module in (make_module(folder), DiffusionLoRA(folder, rank=2, num_inference_steps=2)):
        module.configure_model()
        batch = make_batch(("a red cup", "zorp"))
        moments = module.encode_pixels(batch["pixel_values"]).contiguous()
        torch.manual_seed(5)
        losses.append(float(example_losses(module, batch | {"latent_moments": moments}).mean()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_patterns_choose_what_is_trained(sd3: str, tmp_path: Path) -> None:
    module = make_module(sd3, trained_parts=["transformer.*attn*"])
    module.configure_model()
    chosen = [name for name, p in module.named_parameters() if p.requires_grad]
    assert chosen and all("attn" in name for name in chosen)


def test_the_saved_folder_draws_what_the_run_drew(folder: str, tmp_path: Path) -> None:
    module = make_module(folder)
    fit(module, tmp_path, batch=make_batch(("a red cup", "zorp")))
    written, single = module.save_model(tmp_path / "tuned.safetensors")
    drawn = module.sample(["a red cup"], [4])
    again = make_module(str(written))
    again.configure_model()
    torch.testing.assert_close(again.sample(["a red cup"], [4]), drawn, rtol=0, atol=1e-5)
    index = json.loads((written / "model_index.json").read_text())
    assert index["_class_name"] == json.loads((Path(folder) / "model_index.json").read_text())["_class_name"]
    optional = {name: None for name in module.loaded().family.optional_folders if not (written / name).is_dir()}
    pipeline = DiffusionPipeline.from_pretrained(written, **optional)
    saved, transformer = safetensors.torch.load_file(single), pipeline.transformer.state_dict()
    if not module.loaded().family.original_names:  # else diffusion/pipeline/test_transformer_names.py
        assert same(saved, {name: tensor for name, tensor in transformer.items() if name in saved})


def test_text_encoders_that_left_memory_are_in_the_folder(sd3: str, tmp_path: Path) -> None:
    module = make_module(sd3)
    module.configure_model()
    parts = module.loaded()
    parts.text_encoders = ()
    written, _ = module.save_model(tmp_path / "tuned.safetensors")
    for name in ("text_encoder", "text_encoder_2", "tokenizer", "vae", "transformer"):
        assert (written / name).is_dir(), name


def test_a_stopped_run_resumes_to_the_bit(sd3: str, tmp_path: Path) -> None:
    def run(root: Path, steps: int, ckpt_path: str | None = None) -> dict[str, Tensor]:
        module = make_module(sd3, use_ema=True)
        options: dict[str, Any] = {
            "default_root_dir": root, "accelerator": "cpu", "devices": 1, "logger": False, "max_steps": steps,
            "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        }  # fmt: skip
        batches: Any = [make_batch(seed=number) for number in range(4)]
        torch.manual_seed(1)
        trainer = Trainer(**options, callbacks=[ExactSnapshot(1)])
        trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
        return weights(module)

    whole = run(tmp_path, 3)
    rewind(tmp_path, step=1)
    assert same(run(tmp_path, 3, ckpt_path="latest"), whole)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trained_parts": ["unet"]}, "'unet' covers no weight of"),
        ({"trained_parts": ["text_encoder"]}, "'text_encoder' covers no weight of"),
        ({"trained_parts": []}, "must be a list"),
        ({"base_quantization": "nf4"}, "packs weights that DiffusionFineTuning trains.* DiffusionLoRA"),
    ],
)
def test_what_cannot_be_is_one_sentence(sd3: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        make_module(sd3, **options).configure_model()


def test_a_u_net_trains_by_the_same_class() -> None:
    module = DiffusionFineTuning("embedded:sd", trained_parts=["unet.*attn2*"])
    module.configure_model()
    assert all(".attn2." in name for name, p in module.named_parameters() if p.requires_grad)
