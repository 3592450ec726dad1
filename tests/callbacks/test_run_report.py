"""RunReport, SaveLoRA and RunProgress on a toy module, so that they are held to any LightningModule."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fakes.ranks import meeting_point
from lightning_aigc.callbacks import ExactSnapshot, RunProgress, RunReport, SaveLoRA
from lightning_aigc.callbacks.report_page import curve, picture_grid, render_page, smooth
from lightning_aigc.checkpoint import find_snapshots
from lightning_aigc.errors import ModelError, SamplingTooSlow, UserError

KEYS = {
    "steps", "seconds", "peak_memory_mib", "clip_t_before", "clip_t_after", "clip_i_before", "clip_i_after",
    "lora_file", "report",
}  # fmt: skip


class Painter(LightningModule):
    """Learns one colour; `sample` shows it."""

    output_name = "painter"
    validation_prompts = ("a red mug on white", "a blue sock on sky")

    def __init__(self, is_slow: bool = False) -> None:
        super().__init__()
        self.colour = nn.Parameter(torch.full((3, 1, 1), 0.5))
        self.is_slow = is_slow
        self.asked: list[tuple[list[str], list[int]]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.colour - batch.view(-1, 1, 1, 1)).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
        if self.is_slow:
            raise SamplingTooSlow("8 sample pictures would take about 90 minutes here")
        self.asked.append((prompts, seeds))
        torch.rand(1)  # a sampler that touches the global random state must not change the training
        noise = torch.stack([torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(s)) for s in seeds])
        return (self.colour.detach() + 0.1 * noise).clamp(0, 1)

    def save_lora(self, path: Path, **metadata: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"steps": metadata["steps"]}))


def fit(
    root: Path,
    *callbacks: Any,
    module: Painter | None = None,
    steps: int = 6,
    ckpt_path: str | None = None,
    **trainer: Any,
) -> Painter:
    module = module or Painter()
    options = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    options |= {"default_root_dir": root, "accelerator": "cpu", "max_steps": steps, "max_epochs": -1} | trainer
    loader = DataLoader(torch.linspace(0, 1, 8), batch_size=2)
    Trainer(callbacks=list(callbacks), **options).fit(module, loader, ckpt_path=ckpt_path)
    return module


def test_every_fit_leaves_a_summary_with_the_promised_keys(tmp_path: Path) -> None:
    fit(tmp_path, RunReport(clip_model="embedded:clip"), SaveLoRA())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.keys() >= KEYS
    assert summary["steps"] == 6
    assert -1 <= summary["clip_t_before"] <= 1 and summary["clip_t_after"] is not None
    assert Path(summary["lora_file"]).is_file() and Path(summary["report"]).is_file()


def test_before_and_after_use_the_same_prompts_and_seeds(tmp_path: Path) -> None:
    module = fit(tmp_path, RunReport(num_images=5, seed=7))
    (before, after) = module.asked
    assert before == after
    assert before[0] == [p for p in module.validation_prompts for _ in range(3)]  # five shared out over two, rounded up
    assert before[1] == list(range(7, 13))


def test_the_weights_end_the_same_with_and_without_a_report(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = fit(tmp_path / "a", steps=9)
    torch.manual_seed(0)
    reported = fit(tmp_path / "b", RunReport(clip_model="embedded:clip"), steps=9)
    assert torch.equal(plain.colour, reported.colour)


def test_a_second_fit_reports_nothing_of_the_first(tmp_path: Path) -> None:
    reused, fresh = RunReport(), RunReport()
    fit(tmp_path / "first", reused, steps=9)
    fit(tmp_path / "second", reused, steps=4)
    fit(tmp_path / "alone", fresh, steps=4)
    assert reused.summary["final_loss"] == fresh.summary["final_loss"]


class StopAt(Callback):
    """Ends the training as an error would, after so many steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("killed")


def test_a_resumed_run_reports_on_the_whole_run(tmp_path: Path) -> None:
    def report() -> RunReport:
        return RunReport(clip_model="embedded:clip", num_images=2)

    torch.manual_seed(0)
    whole = report()
    fit(tmp_path / "whole", whole, steps=9)
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="killed"):
        fit(tmp_path / "run", ExactSnapshot(5), report(), StopAt(7), steps=9)
    snapshot = find_snapshots(tmp_path / "run" / "snapshots")[-1]
    resumed, module = report(), Painter()
    fit(tmp_path / "run", ExactSnapshot(5), resumed, module=module, steps=9, ckpt_path=str(snapshot.path))
    assert snapshot.step == 5 and len(module.asked) == 1  # after alone
    same = ("clip_t_before", "clip_t_after", "clip_i_before", "clip_i_after", "final_loss", "steps")
    assert {name: resumed.summary[name] for name in same} == {name: whole.summary[name] for name in same}
    pages = [(tmp_path / name / "report.html").read_text() for name in ("whole", "run")]
    found = [re.findall(r'<img src="[^"]*"|<polyline points="[^"]*"', page) for page in pages]
    assert len(found[0]) == 2 * 2 + 1 and found[0] == found[1]


def test_a_report_is_kept_in_stock_checkpoints_without_code(tmp_path: Path) -> None:
    report = RunReport(num_images=2)
    fit(tmp_path, report, ModelCheckpoint(tmp_path, every_n_train_steps=4), enable_checkpointing=True)
    (path,) = tmp_path.glob("*.ckpt")
    state = torch.load(path, weights_only=True)["callbacks"]["RunReport"]
    assert state["before"][""].dtype is torch.uint8 and state["losses"]["steps"].tolist() == [1, 2, 3, 4]


def test_other_prompts_on_resume_are_measured_anew_and_said(tmp_path: Path) -> None:
    fit(tmp_path, ExactSnapshot(4), RunReport(num_images=2), steps=4)
    module, report = Painter(), RunReport(num_images=3)
    with pytest.warns(UserWarning, match="before was measured at step 4"):
        fit(tmp_path, ExactSnapshot(4), report, module=module, steps=6, ckpt_path="latest")
    assert len(module.asked) == 2 and report.summary["steps"] == 6


def test_a_missing_judge_costs_the_score_and_not_the_run(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no CLIP score"):
        fit(tmp_path, RunReport(clip_model=str(tmp_path / "no_such_judge")))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["clip_t_after"] is None
    assert "no CLIP score" in summary["notes"][0]


def test_sampling_that_would_take_too_long_is_left_out_with_its_reason(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="90 minutes"):
        fit(tmp_path, RunReport(clip_model="embedded:clip"), module=Painter(is_slow=True))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["clip_t_before"] is None


def test_the_page_opens_without_a_network_and_shows_pictures_and_curves(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("rank: 16  # <script>alert(1)</script>\n")
    fit(tmp_path, RunReport(clip_model="embedded:clip"), steps=8)
    page = (tmp_path / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=["']?+(?!data:)""", page)
    assert page.count('<img src="data:image/png;base64,') == 2 * 8
    assert "<polyline" in page and "rank: 16" in page
    assert "<script>" not in page


TWO_RANKS = """
import json, os, sys
from pathlib import Path
import lightning_aigc
import torch
sys.path.insert(0, sys.argv[2])
from lightning_aigc.callbacks import RunReport
from lightning_aigc.errors import SamplingTooSlow
from test_run_report import Painter, fit

class SlowOnRankOne(Painter):
    def sample(self, prompts, seeds):
        if self.global_rank == 1:
            raise SamplingTooSlow("an hour")
        return super().sample(prompts, seeds)

root = Path(sys.argv[1])
painter, report = Painter(), RunReport(clip_model="embedded:clip", prior_prompts=["a green hat"], num_images=5)
fit(root / "run", report, module=painter, devices=2, strategy="ddp")
(root / f"rank{painter.global_rank}.json").write_text(json.dumps(painter.asked))
slow = RunReport(clip_model="embedded:clip")
fit(root / "slow", slow, module=SlowOnRankOne(), devices=2, strategy="ddp")
lacking = RunReport(clip_model="missing/" if os.environ.get("LOCAL_RANK") == "1" else "embedded:clip")
fit(root / "lacking", lacking, devices=2, strategy="ddp")
torch.distributed.destroy_process_group()  # gloo's threads may abort a process that ends first (pytorch#179291)
"""


def test_two_ranks_draw_each_picture_once_and_report_what_one_rank_does(tmp_path: Path) -> None:
    here = Path(__file__).parent
    paths = os.pathsep.join(str(here.parents[1] / part) for part in ("", "kernels", "tests"))
    (tmp_path / "script.py").write_text(TWO_RANKS)
    with meeting_point() as where:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(tmp_path / "script.py"), str(tmp_path), str(here)],
            capture_output=True, text=True, timeout=240,
            env=os.environ | where | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    asked = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    alone = fit(tmp_path / "alone", RunReport(clip_model="embedded:clip", prior_prompts=["a green hat"], num_images=5))
    for of_ranks, (prompts, seeds) in zip(zip(*asked, strict=True), alone.asked, strict=True):
        drawn = [pair for pairs in of_ranks for pair in zip(*pairs, strict=True)]
        assert sorted(drawn) == sorted(zip(prompts, seeds, strict=True))
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "alone")]
    before = [{key: value for key, value in summary.items() if key.endswith("_before")} for summary in summaries]
    assert before[0] == pytest.approx(before[1], abs=2e-4) and len(before[1]) == 3
    assert summaries[0]["clip_t_after"] is not None and summaries[0]["prior_clip_t_after"] is not None
    pages = [(tmp_path / name / "report.html").read_text() for name in ("run", "alone")]
    figures = [re.findall(r'<img src="[^"]*"|<div class="prompt">[^<]*<', page.split(", after")[0]) for page in pages]
    assert figures[0] == figures[1] and len(figures[0]) == 2 + 6  # before training, both have the same model
    slow = json.loads((tmp_path / "slow" / "summary.json").read_text())
    assert (slow["steps"], slow["clip_t_before"], slow["notes"]) == (6, None, ["another rank was too slow"])
    lacking = json.loads((tmp_path / "lacking" / "summary.json").read_text())
    assert (lacking["steps"], lacking["clip_t_before"]) == (6, None)
    assert "another rank could not load the CLIP model" in lacking["notes"][0]


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    fit(tmp_path / "run", RunReport(), SaveLoRA(), fast_dev_run=1)
    assert not (tmp_path / "run").exists()


def test_lora_files_on_the_way_are_named_by_step(tmp_path: Path) -> None:
    fit(tmp_path, SaveLoRA(every_n_steps=2), steps=5, accumulate_grad_batches=2)
    names = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert names == ["painter.safetensors", "painter_step_000002.safetensors", "painter_step_000004.safetensors"]
    assert json.loads((tmp_path / "painter.safetensors").read_text())["steps"] == 5


def test_a_run_that_is_interrupted_keeps_its_lora(tmp_path: Path) -> None:
    class Interrupted(Painter):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if self.global_step == 3:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    with pytest.raises(SystemExit):
        fit(tmp_path, SaveLoRA(every_n_steps=100), module=Interrupted(), steps=8)
    assert [p.name for p in tmp_path.glob("*.safetensors")] == ["painter_step_000003.safetensors"]


def test_save_lora_says_what_a_module_lacks(tmp_path: Path) -> None:
    class Mute(Painter):
        save_lora = None  # type: ignore[assignment]

    with pytest.raises(ModelError, match="save_lora"):
        fit(tmp_path, SaveLoRA(), module=Mute())


def test_the_bar_counts_optimizer_steps_and_keeps_the_last_score(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bar = RunProgress()

    bar.show({"clip_t": 0.25, "clip_i": 0.5})
    fit(tmp_path, bar, steps=4, accumulate_grad_batches=2, enable_progress_bar=True)
    last = capfd.readouterr().err.replace("\r", "\n").strip().splitlines()[-1]
    assert "4/4" in last and "loss=" in last and "clip_t=0.250" in last and "clip_i" not in last


def test_bad_numbers_of_images_are_refused() -> None:
    with pytest.raises(UserError, match="num_images must be at least 1, got 0"):
        RunReport(num_images=0)


def test_a_curve_leaves_out_what_is_not_finite_and_needs_two_points() -> None:
    assert curve([(0, float("nan")), (1, 2.0)], "loss") == ""
    drawn = curve([(0, 1.0), (1, float("inf")), (2, 3.0)], "loss")
    assert drawn.count(",") >= 2 and "inf" not in drawn and "nan" not in drawn


def test_smoothing_is_the_mean_of_the_last_values() -> None:
    assert smooth([(0, 1.0), (1, 3.0), (2, 5.0)], window=2) == [(0, 1.0), (1, 2.0), (2, 4.0)]


def test_a_page_escapes_what_users_write() -> None:
    grid = picture_grid([torch.zeros(3, 8, 8)], ['<b>"prompt"'], 1, "<i>")
    page = render_page("<u>", {"a": "<s>"}, ["<note>"], [grid], [""], "<cfg>")
    for raw in ("<b>", "<i>", "<u>", "<s>", "<note>", "<cfg>"):
        assert raw not in page
