"""On a device called npu, mixed precision is npu's: the stock plugin would be built for cuda and do nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fakes.processes.ranks import run_script
from lightning_aigc.devices import grad_scaler

SCRIPT = """
import json, sys
from pathlib import Path
import lightning_aigc
import torch
from fakes.npu import fake_npu
fake_npu.install()
from fakes.runs.trainings import WIDTH, Regression, make_batches
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader
from lightning_aigc.precision import FusedBackwardPrecision

class NPU(Accelerator):
    def setup_device(self, device): torch.npu.set_device(device)
    def teardown(self): pass
    @staticmethod
    def parse_devices(devices): return [0]
    @staticmethod
    def get_parallel_devices(devices): return [torch.device("npu", 0)]
    @staticmethod
    def auto_device_count(): return 1
    @staticmethod
    def is_available(): return True
    @staticmethod
    def name(): return "npu"

def run(precision, memory, huge=()):
    module = Regression([nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)])
    module.seen = nn.Identity()
    module.seen.update = lambda value: None
    seen = []
    module.net[0].register_forward_hook(lambda m, given, out: seen.append((str(out.device), str(out.dtype))))
    plugin = FusedBackwardPrecision(precision, memory=memory)
    trainer = Trainer(accelerator=NPU(), devices=1, strategy=SingleDeviceStrategy("npu:0"), plugins=[plugin],
                      max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                      enable_model_summary=False)
    before = module.net[0].weight.detach().clone()
    trainer.fit(module, DataLoader(make_batches(3, huge=huge), batch_size=None))
    moved = not torch.equal(before, module.net[0].weight.detach().cpu())
    scale = plugin.scaler.get_scale() if plugin.scaler is not None else None
    kind = plugin.scaler._scale.device.type if plugin.scaler is not None else None
    return {"activations": seen[0], "scale": scale, "scaled on": kind, "moved": moved}

rows = {}
for precision, memory, huge in (("32-true", "off", ()), ("bf16-mixed", "off", ()), ("16-mixed", "off", ()),
                                ("16-mixed overflow", "off", (1,)), ("bf16-true", "off", ()),
                                ("bf16-forward-fp16-backward", "lean", ())):
    rows[precision] = run(precision.split()[0], memory, huge)
Path(sys.argv[1], "rows.json").write_text(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def on_npu(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Results and log lines of every precision on the fake npu, in a process of its own."""
    folder = tmp_path_factory.mktemp("npu")
    script = folder / "on_npu.py"
    script.write_text(SCRIPT)
    (said,) = run_script(script, 1, folder / "ranks", folder)
    return json.loads((folder / "rows.json").read_text()), said


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", "torch.float32"),
        ("bf16-mixed", "torch.bfloat16"),
        ("16-mixed", "torch.float16"),
        ("bf16-true", "torch.bfloat16"),
        ("bf16-forward-fp16-backward", "torch.bfloat16"),
    ],
)
def test_activations_have_the_dtype_asked_for(precision: str, dtype: str, on_npu: tuple[dict[str, Any], str]) -> None:
    row = on_npu[0][precision]
    assert row["activations"] == ["npu:0", dtype]
    assert row["moved"]


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-forward-fp16-backward"])
def test_gradients_are_scaled_on_the_npu(precision: str, on_npu: tuple[dict[str, Any], str]) -> None:
    assert on_npu[0][precision]["scale"] == 2.0**16
    assert on_npu[0][precision]["scaled on"] == "npu"
    assert on_npu[0]["bf16-mixed"]["scale"] is None


def test_an_overflow_on_the_npu_halves_the_scale_and_is_named(on_npu: tuple[dict[str, Any], str]) -> None:
    rows, said = on_npu
    assert rows["16-mixed overflow"]["scale"] == 2.0**15
    skipped = [line for line in said.splitlines() if "skipped" in line]
    assert len(skipped) == 1
    assert "step 2 skipped: the backward pass of code outside the modules" in skipped[0]


def test_torch_npus_own_scaler_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = object()
    npu = SimpleNamespace(amp=SimpleNamespace(GradScaler=lambda: made))
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    assert grad_scaler("npu") is made
    assert isinstance(grad_scaler("cpu"), torch.amp.GradScaler)
