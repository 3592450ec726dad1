"""The diffs of docs/architecture.md, applied to a copy of the package: a family and a method are one file each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.processes.programs import WITHOUT_COLLECTIONS

ROOT = Path(__file__).parents[3]
DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), re.DOTALL)


FAMILY = """
import sys
from pathlib import Path
import torch
import lightning_aigc
from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler
from transformers import UMT5Config, UMT5EncoderModel
from fakes.models.pipelines import make_batch
from fakes.runs.training_losses import example_losses
from fakes.models.transformer_pipelines import WIDTH, _vae, make_t5_tokenizer
from lightning_aigc.cli.init.base import find_base
from lightning_aigc.diffusion import DiffusionLoRA

folder = Path(sys.argv[1])
torch.manual_seed(0)
text = UMT5Config(vocab_size=40, d_model=WIDTH, d_kv=16, d_ff=48, num_layers=2, num_heads=2)
AuraFlowPipeline(
    tokenizer=make_t5_tokenizer(), text_encoder=UMT5EncoderModel(text), scheduler=FlowMatchEulerDiscreteScheduler(),
    vae=_vae(scaling_factor=0.13), transformer=AuraFlowTransformer2DModel(
        sample_size=16, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, caption_projection_dim=WIDTH, pos_embed_max_size=256,
    ),
).save_pretrained(folder / "base")
assert find_base("fal/AuraFlow-v0.3").family.title == "AuraFlow"
module = DiffusionLoRA(str(folder / "base"), rank=2, max_train_steps=1, num_inference_steps=2, sample_resolution=16)
module.loaded()
example_losses(module, make_batch()).mean().backward()
changed = [p for p in module.trainable_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
for parameter in changed:
    parameter.data -= parameter.grad
assert module.sample(["a cup"], [0]).isfinite().all()
module.save_lora(folder / "lora.safetensors")
AuraFlowPipeline.from_pretrained(folder / "base").load_lora_weights(str(folder / "lora.safetensors"))
Path("trained").write_text(str(len(changed)))
"""


METHOD = """
import sys
from lightning_aigc.cli import main
main(["fit", "--model", "lightning_aigc.diffusion.training.bias_tuning.DiffusionBiasTuning",
      "--model.pretrained_model_name_or_path", "embedded:sd", "--model.max_train_steps", "2",
      "--model.output_name", "biases", "--data", "ImageCaptionData", "--data.train_data_dir", "embedded:brand",
      "--data.resolution", "64", "--data.num_workers", "0", "--data.cache_dir", sys.argv[1] + "/cache",
      "--trainer.default_root_dir", sys.argv[1] + "/run", "--trainer.accelerator", "cpu", "--trainer.logger", "false"])
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a copy of the package with both diffs trained the family and the method."""
    folder = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("*.zip")  # bytecode comes along: compiling it anew takes seconds
    shutil.copytree(ROOT / "lightning_aigc", folder / "lightning_aigc", ignore=ignored)
    for archive in (ROOT / "lightning_aigc" / "embedded").glob("*.zip"):
        (folder / "lightning_aigc" / "embedded" / archive.name).symlink_to(archive)
    assert len(DIFFS) == 2
    for diff in DIFFS:
        subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=folder, check=True, capture_output=True)
    paths = os.pathsep.join(map(str, (folder, ROOT / "kernels", ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_COLLECTIONS + FAMILY + METHOD, str(folder)]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


def test_a_family_is_one_file(ran: Path) -> None:
    assert int((ran / "trained").read_text()) > 0


def test_a_method_is_one_file(ran: Path) -> None:
    assert (ran / "run" / "biases" / "model_index.json").is_file()
