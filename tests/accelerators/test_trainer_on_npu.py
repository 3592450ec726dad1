"""Trainer(accelerator="npu") end to end on the fake npu: precisions, checkpoints, resuming, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.processes.ranks import run_script

PRELUDE = """
import csv, json, sys
import lightning_aigc
import torch
from fakes.npu import fake_npu
fake_npu.install()
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader
from fakes.runs.trainings import WIDTH, make_batches

class Small(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Linear(16, WIDTH))
        self.dtypes = []

    def training_step(self, batch_NC, batch_idx):
        out_NC = self.net(batch_NC)
        self.dtypes.append((str(out_NC.device), str(out_NC.dtype)))
        loss = nn.functional.mse_loss(out_NC.float(), batch_NC)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)

def trainer(**arguments):
    quiet = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False}
    return Trainer(**(quiet | arguments))

def fit(trainer, **arguments):
    module = Small()
    trainer.fit(module, DataLoader(make_batches(4), batch_size=None, shuffle=False), **arguments)
    return module

def report(rows, rank=0):
    with open(f"{sys.argv[1]}/rows{rank}.json", "w") as file:
        json.dump(rows, file)

def weights(module):
    return {name: value.detach().cpu().tolist() for name, value in module.state_dict().items()}
"""
ONE_PROCESS = (
    PRELUDE
    + """
folder, rows = sys.argv[1], {}
for precision in ("32-true", "bf16-mixed", "16-mixed"):
    saving = ModelCheckpoint(f"{folder}/{precision}", monitor="loss", save_top_k=-1, every_n_epochs=1)
    whole = trainer(accelerator="npu", devices=1, precision=precision, max_epochs=2, enable_checkpointing=True,
                    callbacks=[saving])
    module = fit(whole)
    checkpoints = sorted(saving.best_k_models)
    resumed = trainer(accelerator="npu", devices=1, precision=precision, max_epochs=2)
    scaler = whole.precision_plugin.scaler if precision.endswith("mixed") else None
    rows[precision] = {
        "steps": module.dtypes, "checkpoints": checkpoints, "root": str(whole.strategy.root_device),
        "strategy": type(whole.strategy).__name__, "weights": weights(module),
        "resumed": weights(fit(resumed, ckpt_path=checkpoints[0])), "resumed at": resumed.current_epoch,
        "autocast for": getattr(whole.precision_plugin, "device", None),
        "scaler": type(scaler).__name__, "scale": scaler and scaler.get_scale(),
    }

auto = trainer(devices=1)
rows["auto"] = [type(auto.accelerator).__name__, str(auto.strategy.root_device)]
rows["all"] = [str(d) for d in trainer(accelerator="npu", strategy="npu_sparse").strategy.parallel_devices]

torch.npu.allocated = 3 * 2**20
logger = CSVLogger(folder)
fit(trainer(accelerator="npu", devices=1, logger=logger, callbacks=[DeviceStatsMonitor()], log_every_n_steps=1))
rows["stats"] = next(csv.DictReader(open(logger.experiment.metrics_file_path)))

def refused(**arguments):
    try:
        fit(trainer(accelerator="npu", **arguments))
    except Exception as error:
        return f"{type(error).__name__}: {error}"

rows["refused"] = {
    "cpu": refused(devices=1, strategy=SingleDeviceStrategy("cpu")),
    "ddp": refused(devices=1, strategy="ddp"),
    "three": refused(devices=3),
    "float64": refused(devices=1, precision="64-true"),
}
def operator_refused(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

x = torch.randn(2, 3, 4, 4, device="npu")
last = torch.channels_last
rows["operators"] = {
    "float64": operator_refused(lambda: x.double() + 1),
    "complex": operator_refused(lambda: torch.complex(x, x)),
    "fft": operator_refused(lambda: torch.fft.fft(x)),
    "sparse": operator_refused(lambda: x.to_sparse()),
    "csr": operator_refused(lambda: x[0, 0].to_sparse_csr()),
    "to channels_last": operator_refused(lambda: x.to(memory_format=last)),
    "contiguous channels_last": operator_refused(lambda: x.contiguous(memory_format=last)),
    "empty channels_last": operator_refused(lambda: torch.empty(2, 3, 4, 4, device="npu", memory_format=last)),
}
from_cpu = torch.randn(2, 3, 4, 4).to(memory_format=last)
conv = nn.Conv2d(3, 8, 3).to(memory_format=last).to("npu")
moved = from_cpu.to("npu")
rows["moved"] = [moved.is_contiguous(), torch.equal(moved.cpu(), from_cpu), conv.weight.is_contiguous()]
report(rows)
"""
)
TWO_RANKS = (
    PRELUDE
    + """
class Dense(DDPStrategy):
    def determine_ddp_device_ids(self):
        return None  # no CUDA stream

two = trainer(accelerator="npu", devices=2, precision="bf16-mixed", strategy=Dense(process_group_backend="hccl"),
              enable_checkpointing=True, callbacks=[ModelCheckpoint(sys.argv[1])])
module = Small()
data = [(batch + rank) for batch in make_batches(2) for rank in (0, 1)]
two.fit(module, DataLoader(data, batch_size=None))
state = {name: value.sum().item() for name, value in module.named_parameters()}
report([two.global_rank, torch.distributed.get_backend(), module.dtypes, state], two.global_rank)
"""
)


def run(code: str, ranks: int, folder: Path) -> tuple[list[Any], str]:
    """Reports of each rank of the script, and the other output of rank 0."""
    script = folder / "script.py"
    script.write_text(code)
    said = run_script(script, ranks, folder / "ranks", folder)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rows*.json"))], said[0]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    (rows,), said = run(ONE_PROCESS, 1, tmp_path_factory.mktemp("one_process"))
    return rows, said


Rows = tuple[dict[str, Any], str]
MIXED = {"32-true": "torch.float32", "bf16-mixed": "torch.bfloat16", "16-mixed": "torch.float16"}


@pytest.mark.parametrize("precision", MIXED)
def test_one_npu_trains_on_the_npu_in_the_precision_asked_for(precision: str, one_process: Rows) -> None:
    row = one_process[0][precision]
    assert row["steps"] == [["npu:0", MIXED[precision]]] * 8
    assert (row["strategy"], row["root"]) == ("SingleDeviceStrategy", "npu:0")
    assert row["autocast for"] == (None if precision == "32-true" else "npu")


def test_only_float16_is_scaled_and_by_the_npus_own_scaler(one_process: Rows) -> None:
    rows = one_process[0]
    assert (rows["16-mixed"]["scaler"], rows["16-mixed"]["scale"]) == ("NpuGradScaler", 2.0**16)
    assert rows["bf16-mixed"]["scale"] is None


@pytest.mark.parametrize("precision", MIXED)
def test_a_checkpoint_loads_without_an_npu_and_without_code(precision: str, one_process: Rows) -> None:
    row = one_process[0][precision]
    saved = torch.load(row["checkpoints"][-1], weights_only=True)  # no map_location: this process has no npu
    assert {name: value.tolist() for name, value in saved["state_dict"].items()} == row["weights"]
    assert saved["state_dict"]._metadata["net.1"]["version"] == 2  # BatchNorm1d's
    moment = saved["optimizer_states"][0]["state"][0]["exp_avg"]
    assert moment.device.type == "cpu" and moment.abs().sum() > 0
    (monitored,) = (state for name, state in saved["callbacks"].items() if "ModelCheckpoint" in name)
    assert monitored["current_score"].device.type == "cpu"


@pytest.mark.parametrize("precision", MIXED)
def test_a_resumed_run_ends_where_the_whole_one_did(precision: str, one_process: Rows) -> None:
    row = one_process[0][precision]
    assert row["resumed at"] == 2 and len(row["checkpoints"]) == 2
    assert row["resumed"] == row["weights"]


def test_auto_finds_the_npu(one_process: Rows) -> None:
    assert one_process[0]["auto"] == ["NPUAccelerator", "npu:0"]
    assert one_process[0]["all"] == ["npu:0", "npu:1"]


def test_the_device_is_named_in_the_log(one_process: Rows) -> None:
    assert "NPU available: 2 (FakeAscend910B), used: 1" in one_process[1]


def test_device_stats_monitor_logs_memory_and_utilisation(one_process: Rows) -> None:
    row = one_process[0]["stats"]
    stats = {name.rpartition("/")[2].rpartition(".")[2]: float(value) for name, value in row.items() if value}
    assert stats["allocated_mib"] == 3.0 and stats["free_mib"] == stats["total_mib"] - 3 == 64 * 1024 - 3
    assert {"peak_allocated_mib", "reserved_mib", "peak_reserved_mib", "utilization_percent"} <= stats.keys()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("cpu", "ConfigError: accelerator='npu' got the device 'cpu' from its strategy, wanted an npu"),
        ("ddp", "ConfigError: DDPStrategy got 1 npu, wanted cuda or cpu, as it opens a CUDA stream"),
        ("three", "ConfigError: devices=3 got 3 NPUs, and 2 are here"),
        ("float64", "RuntimeError: call aclnn"),
    ],
)
def test_what_would_not_train_on_the_npu_is_refused(what: str, words: str, one_process: Rows) -> None:
    assert one_process[0]["refused"][what].startswith(words)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("float64", "RuntimeError: call aclnn add failed, detail:EZ1001: Tensor not implemented for DT_DOUBLE"),
        ("complex", "RuntimeError: call aclnn complex failed, detail:EZ1001: Tensor not implemented for DT_COMPLEX"),
        ("fft", "RuntimeError: call aclnn _fft_r2c failed, detail:EZ1001: Tensor not implemented for DT_COMPLEX"),
        ("sparse", "NotImplementedError: Could not run 'aten::_to_sparse' with arguments from the 'SparsePrivateUse1'"),
        ("csr", "NotImplementedError: Could not run 'aten::_to_sparse_csr' with arguments from the 'SparseCsrPrivate"),
        ("to channels_last", "RuntimeError: _to_copy: NPU contiguous operator only supported contiguous"),
        ("contiguous channels_last", "RuntimeError: clone: NPU contiguous operator only supported contiguous"),
        ("empty channels_last", "RuntimeError: empty: NPU contiguous operator only supported contiguous"),
    ],
)
def test_the_fake_refuses_what_an_ascend_lacks(what: str, words: str, one_process: Rows) -> None:
    assert one_process[0]["operators"][what].startswith(words)


def test_channels_last_from_the_cpu_is_contiguous_on_the_npu(one_process: Rows) -> None:
    assert one_process[0]["moved"] == [True, True, True]


def test_two_ranks_train_alike_over_hccl(tmp_path: Path) -> None:
    rows, _ = run(TWO_RANKS, 2, tmp_path)
    (rank, backend, dtypes, state), (_, _, _, other) = rows
    assert (rank, backend) == (0, "hccl") and dtypes == [["npu:0", "torch.bfloat16"]] * 2
    assert state == other
    (checkpoint,) = tmp_path.glob("*.ckpt")
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert {name: saved[name].sum().item() for name in state} == pytest.approx(state, rel=1e-6)
