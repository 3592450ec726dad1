"""RunReport, SaveLoRA and RunProgress on a toy module, so that they are held to any LightningModule."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fakes.processes.ranks import run_ranks
from lightning_aigc.callbacks import (
    AdaptiveLR,
    CLIPConvergenceGuard,
    ExactSnapshot,
    FineTuneCheck,
    GradientHealthMonitor,
    RunProgress,
    RunReport,
    SampleGrid,
    SaveLoRA,
)
from lightning_aigc.checkpoint import find_snapshots
from lightning_aigc.errors import ConfigError, ModelError, SamplingTooSlow, UserError
from lightning_aigc.report.record import read_run
from lightning_aigc.report.verdict import judge

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
            raise SamplingTooSlow("8 sample images would take about 90 minutes here")
        self.asked.append((prompts, seeds))
        torch.rand(1)  # a sampler that touches the global random state must not change the training
        noise = torch.stack([torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(s)) for s in seeds])
        return (self.colour.detach() + 0.1 * noise).clamp(0, 1)

    def save_lora(self, path: Path, **metadata: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"steps": metadata["steps"]}), encoding="utf-8")


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


def test_callbacks_of_two_trainers_say_of_the_second_what_fresh_ones_say(tmp_path: Path) -> None:
    def watch() -> tuple[RunReport, FineTuneCheck, SampleGrid]:
        return RunReport("embedded:clip"), FineTuneCheck(clip_model="embedded:clip"), SampleGrid(every_n_steps=3)

    class Others(Painter):
        validation_prompts = ("a green hat", "a red mug on white", "a brown shoe")

    reused, fresh = watch(), watch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(tmp_path / "a", *reused, steps=9, module=Painter(is_slow=True))
        fit(tmp_path / "b", *reused, steps=9)
        fit(tmp_path / "c", *reused, module=Others())
        fit(tmp_path / "d", *fresh, module=Others())
    assert str(reused[1].figures) == str(fresh[1].figures) and reused[1].findings == fresh[1].findings
    assert [Path(path).parts[-3:] for _, path in reused[2].history] == [
        ("c", "samples", f"step_{step:06d}.png") for step in (0, 3, 6)
    ]
    records = [read_run(tmp_path / name) for name in "cd"]
    assert str(records[0].scores) == str(records[1].scores) and records[0].notes == records[1].notes == []
    assert [picture.prompt for picture in records[0].pictures] == [picture.prompt for picture in records[1].pictures]


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


class Returner(Painter):
    """Returns its loss, which is not finite from a step on, and logs it by another name or not at all."""

    def __init__(self, name: str | None, bad_from: int = 99) -> None:
        super().__init__()
        self.name, self.bad_from = name, bad_from

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = (self.colour - 0.0 * batch.view(-1, 1, 1, 1)).square().mean()
        if self.name is not None:
            self.log(self.name, loss)
        return {"loss": loss * float("nan") if self.global_step >= self.bad_from else loss}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", [None, "train_loss"])
def test_the_returned_loss_is_the_curve_where_none_is_logged(name: str | None, accumulate: int, tmp_path: Path) -> None:
    fit(tmp_path, RunReport(), module=Returner(name), accumulate_grad_batches=accumulate)
    fit(tmp_path / "logged", RunReport(), module=Returner("loss"), accumulate_grad_batches=accumulate)
    found, wanted = (read_run(root).curves["loss"] for root in (tmp_path, tmp_path / "logged"))
    assert found.steps == wanted.steps
    assert found.values == pytest.approx(wanted.values)


def test_a_returned_loss_that_is_not_finite_is_the_verdict(tmp_path: Path) -> None:
    fit(tmp_path, RunReport(), module=Returner(None, bad_from=3))
    assert "Diverged: the loss is not finite from step 4 on" in judge(read_run(tmp_path)).sentence


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
    records = [read_run(tmp_path / name) for name in ("whole", "run")]
    assert records[0].pictures == records[1].pictures and len(records[0].pictures) == 2
    assert records[0].curves == records[1].curves and records[0].curves["lr"].steps == list(range(1, 10))
    assert records[1].snapshots.taken == 2  # the one before the kill too


class Reader(Callback):
    """Notes the page that is there after each step, and may end the run."""

    def __init__(self, ends_at: int = -1) -> None:
        self.pages: list[str] = []
        self.ends_at = ends_at

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.pages.append((Path(trainer.default_root_dir) / "report.html").read_text())
        if trainer.global_step == self.ends_at:
            raise RuntimeError("the machine is gone")


def test_the_page_is_there_from_the_start_and_renews_itself_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunReport._write_so_far, "__defaults__", (0.0, ""))  # each check is late enough
    reader = Reader()
    fit(tmp_path, reader, RunReport(num_images=2), SampleGrid(every_n_steps=2, num_images=1), steps=4)
    said = [re.findall(r"this is step (\d)", page) for page in reader.pages]
    assert said[0] == ["0"] and said[2] == ["2"] and all("location.reload" in page for page in reader.pages)
    last = (tmp_path / "report.html").read_text()
    assert "location.reload" not in last and "Not finished" not in last


def test_a_run_that_fails_leaves_a_page_that_does_not_renew_itself(tmp_path: Path) -> None:
    reader = Reader(ends_at=2)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        fit(tmp_path, reader, RunReport(num_images=2), steps=4)
    page = (tmp_path / "report.html").read_text()
    assert "location.reload" in reader.pages[-1] and "location.reload" not in page
    assert "Stopped at step 2 by RuntimeError: the machine is gone" in page and "--resume" not in page  # no snapshot


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
    markup = re.sub(r"(?s)<script.*?</script>", "", page)
    assert not re.findall(r"""(?:src|href)=["']?+(?!data:)""", markup)
    assert page.count('<img src="data:image/png;base64,') == 2 * 8
    assert 'class="chart"' in page and "rank: 16" in page
    assert "<script>alert(1)" not in page
    assert "MiB" not in re.sub(r"(?s)<script.*?</script>", "", page) and "GiB" in page


class SlowOnRankOne(Painter):
    def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
        if self.global_rank == 1:
            raise SamplingTooSlow("an hour")
        return super().sample(prompts, seeds)


def two_ranks(rank: int, folder: str) -> list[tuple[list[str], list[int]]]:
    """Pairs that this rank was asked to draw in a run; of two more one rank cannot draw, or lacks the judge."""
    warnings.simplefilter("ignore")
    root, two = Path(folder), {"devices": 2, "strategy": "ddp"}
    report = RunReport(clip_model="embedded:clip", prior_prompts=["a green hat"], num_images=5)
    painter = fit(root / "run", report, **two)
    fit(root / "slow", RunReport(clip_model="embedded:clip"), module=SlowOnRankOne(), **two)
    fit(root / "lacking", RunReport(clip_model="missing/" if rank == 1 else "embedded:clip"), **two)
    return painter.asked


def test_two_ranks_draw_each_picture_once_and_report_what_one_rank_does(tmp_path: Path) -> None:
    asked = run_ranks(two_ranks, 2, tmp_path / "ranks", str(tmp_path), gloo=False)
    alone = fit(tmp_path / "alone", RunReport(clip_model="embedded:clip", prior_prompts=["a green hat"], num_images=5))
    for of_ranks, (prompts, seeds) in zip(zip(*asked, strict=True), alone.asked, strict=True):
        drawn = [pair for pairs in of_ranks for pair in zip(*pairs, strict=True)]
        assert sorted(drawn) == sorted(zip(prompts, seeds, strict=True))
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "alone")]
    before = [{key: value for key, value in summary.items() if key.endswith("_before")} for summary in summaries]
    assert before[0] == pytest.approx(before[1], abs=2e-4) and len(before[1]) == 3
    assert summaries[0]["clip_t_after"] is not None and summaries[0]["prior_clip_t_after"] is not None
    records = [read_run(tmp_path / name) for name in ("run", "alone")]
    drawn = [[(p.prompt, p.seed, p.is_other, p.before) for p in record.pictures] for record in records]
    assert drawn[0] == drawn[1] and len(drawn[0]) == 6 + 4  # before training, both have the same model
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


def test_the_newest_files_by_step_are_kept(tmp_path: Path) -> None:
    others = ["painter_step_final.safetensors", "painter_2_step_000001.safetensors", "my_painter.safetensors"]
    for name in others:
        (tmp_path / name).write_text("of someone else", encoding="utf-8")
    fit(tmp_path, SaveLoRA(every_n_steps=1, keep_last=2), steps=5)
    own = ["painter.safetensors", "painter_step_000004.safetensors", "painter_step_000005.safetensors"]
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == sorted(own + others)
    fit(tmp_path / "none", SaveLoRA(every_n_steps=1, keep_last=0), steps=2)
    assert [p.name for p in (tmp_path / "none").glob("*.safetensors")] == ["painter.safetensors"]
    with pytest.raises(ConfigError, match=r"SaveLoRA keep_last=-2; wanted -1 \(all\) or more"):
        SaveLoRA(keep_last=-2)


def test_a_run_that_begins_anew_sets_aside_what_would_pass_for_its_own(tmp_path: Path) -> None:
    """An interrupted run leaves no earlier result, best weights, file by step, summary or sheet where its own go."""
    callbacks = [RunReport(), SaveLoRA(every_n_steps=2), SampleGrid(["a zorp mug"], every_n_steps=2)]
    fit(tmp_path, *callbacks, steps=4)
    (tmp_path / "painter_best.safetensors").write_text("{}", encoding="utf-8")
    begun_from = tmp_path / "painter_step_000003.safetensors"
    begun_from.write_text("{}", encoding="utf-8")
    (tmp_path / "samples" / "mine.png").write_bytes(b"an image of the user")

    class Interrupted(Painter):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if self.global_step == 1:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    module = Interrupted()
    module.save_hyperparameters({"lora_from": str(begun_from)})
    with pytest.raises(SystemExit):
        fit(tmp_path, SaveLoRA(every_n_steps=2), SampleGrid(["a zorp mug"]), module=module, steps=4)
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.suffix in (".safetensors", ".png"))
    aside = ["painter", "painter_best", "painter_step_000002", "painter_step_000004"]
    assert names == sorted([
        *(f"earlier-1/{name}.safetensors" for name in aside),
        *(f"earlier-1/samples/step_{step:06d}.png" for step in (0, 2, 4)),
        "painter_step_000001.safetensors", begun_from.name, "samples/mine.png", "samples/step_000000.png",
    ])  # fmt: skip
    assert (tmp_path / "earlier-1" / "summary.json").is_file() and not (tmp_path / "summary.json").exists()


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


def test_the_rate_that_a_step_used_is_what_adaptive_lr_set(tmp_path: Path) -> None:
    fit(tmp_path, RunReport(), AdaptiveLR(), steps=20)
    record = read_run(tmp_path)
    rates = record.curves["lr"].values
    assert rates[0] == pytest.approx(0.1 * 0.01)  # the search begins at a hundredth of the configured rate
    assert rates[5] > rates[0] and record.curves["lr"].steps[:2] == [1, 2]


def test_the_grid_of_step_zero_is_scored_whatever_the_order_of_the_callbacks(tmp_path: Path) -> None:
    for name, order in (("first", 1), ("last", -1)):
        callbacks = [RunReport(clip_model="embedded:clip", num_images=2), SampleGrid(every_n_steps=3, num_images=1)]
        fit(tmp_path / name, *callbacks[::order], steps=6)
        record = read_run(tmp_path / name)
        assert [grid.step for grid in record.grids] == [0, 3, 6]
        assert all(len(grid.scores("clip_t")) == 2 for grid in record.grids)


def test_a_run_that_was_killed_has_a_record_of_what_it_measured(tmp_path: Path) -> None:
    report = RunReport(clip_model="embedded:clip", num_images=2)
    with pytest.raises(RuntimeError, match="killed"):
        fit(tmp_path, report, SampleGrid(every_n_steps=3, num_images=1), StopAt(5), ExactSnapshot(2), steps=9)
    record = read_run(tmp_path)
    assert not record.is_finished and record.steps == 5 and [grid.step for grid in record.grids] == [0, 3]
    verdict = judge(record)
    sentence = "Stopped at step 5 by RuntimeError: killed; --resume continues from the last snapshot."
    assert verdict.kind == "stopped" and verdict.sentence == sentence
    assert "Stopped at step 5 by RuntimeError: killed" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_record_follows_the_run_between_grids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorded(Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.steps.append(read_run(tmp_path).steps)  # what a kill would leave

    monkeypatch.setattr("lightning_aigc.callbacks.run_report.run_report.RENEWED_EVERY_S", 0.0)
    recorded = Recorded()
    fit(tmp_path, recorded, RunReport(num_images=2), steps=4)
    assert recorded.steps == [0, 1, 2, 3]


def test_what_other_callbacks_found_is_in_the_record(tmp_path: Path) -> None:
    guard = CLIPConvergenceGuard(every_n_steps=3, num_images=2, clip_model="embedded:clip")
    fit(tmp_path, RunReport(), guard, GradientHealthMonitor(every_n_steps=2), ExactSnapshot(3), SaveLoRA(), steps=7)
    record = read_run(tmp_path)
    assert record.guard is not None and [c.step for c in record.guard.checks] == [0, 3, 6, 7]  # the last one too
    assert record.guard.best_step == guard.best_step
    assert record.health is not None and record.health.steps == [2, 4, 6] and "colour" in record.health.norms
    assert record.snapshots is not None and record.snapshots.newest_step == 7 and record.snapshots.newest_bytes > 0
    assert record.lora is not None and Path(record.lora.file).is_file()
    page = (tmp_path / "report.html").read_text()
    for title in ("Before and after", "Progress", "Gradients", "Snapshots", "Use the file"):
        assert f"<h2>{title}</h2>" in page


class Validating(Painter):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", (self.colour - batch.view(-1, 1, 1, 1)).square().mean())


def test_a_validation_loss_is_a_curve_where_it_is_logged(tmp_path: Path) -> None:
    loader = DataLoader(torch.linspace(0, 1, 8), batch_size=2)
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_epochs": -1}
    trainer = Trainer(
        callbacks=[RunReport()], default_root_dir=tmp_path, max_steps=8, val_check_interval=2,
        enable_checkpointing=False, enable_model_summary=False, num_sanity_val_steps=1, **options,
    )  # fmt: skip
    trainer.fit(Validating(), loader, loader)
    assert read_run(tmp_path).curves["val_loss"].steps == [2, 4, 6, 8]
    fit(tmp_path / "without", RunReport(), steps=4)
    assert "val_loss" not in read_run(tmp_path / "without").curves
