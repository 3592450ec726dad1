"""CLIPConvergenceGuard: what it scores, when it stops, what it keeps, and that training does not notice."""

from __future__ import annotations

import contextlib
import json
import math
import re
import warnings
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fakes.processes.ranks import run_ranks
from fakes.runs.killed_trainings import KillAt, Killed
from lightning_aigc import callbacks
from lightning_aigc.callbacks import (
    AdaptiveLR,
    CLIPConvergenceGuard,
    ExactSnapshot,
    GradientHealthMonitor,
    RunReport,
    SampleGrid,
    SaveLoRA,
)
from lightning_aigc.checkpoint.run_config import find_finished, finished_sentence
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.embedded import resolve
from lightning_aigc.errors import ConfigError, ImageWarning, ModelError, SamplingTooSlow
from lightning_aigc.report.paired_scores import Check

BRAND = resolve("embedded:brand")
PROMPTS = ["a zorp mug", "a zorp bottle"]
BEST_STEP = 6


def picture_of(prompt: str) -> Tensor:
    pixels = np.asarray(Image.open(BRAND / f"{prompt.split()[-1]}_000.png").convert("RGB"))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255


class Painter(LightningModule):
    """Its images are real products under noise, which fades until `BEST_STEP` and then comes back."""

    noise_of_rest = 0.9

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.drawn: list[tuple[list[str], list[int]]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
        self.drawn.append((prompts, seeds))
        noise = min(self.noise_of_rest, abs(self.trainer.global_step - BEST_STEP) / 6)
        images = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            rest = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(seed))
            images.append((1 - noise) * picture_of(prompt) + noise * rest)
        return torch.stack(images)


def fit(module: LightningModule, root: Path, *callbacks: Any, steps: int = 20, **given: Any) -> Trainer:
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": root}
    trainer = Trainer(max_steps=steps, callbacks=list(callbacks), **(options | given))
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(80, 4)), batch_size=4))
    return trainer


def guard(**given: Any) -> CLIPConvergenceGuard:
    options: dict[str, Any] = {"prompts": PROMPTS, "every_n_steps": 2, "num_images": 2, "patience": 6}
    return CLIPConvergenceGuard(**(options | {"clip_model": "embedded:clip"} | given))


def test_it_stops_after_its_patience_and_keeps_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watching, painter = guard(), Painter()
    with caplog.at_level("INFO"):
        trainer = fit(painter, tmp_path, watching)
    assert watching.best_step == BEST_STEP
    assert trainer.global_step == BEST_STEP + 6
    assert watching.should_stop_early()
    best = next(check for check in watching.checks if check.step == BEST_STEP)
    assert watching.best_metric == pytest.approx(sum(best.scores("clip_t")) / 4)
    assert watching.best_metric > 0.8 > watching.checks[0].mean("clip_t")
    line = next(r.message for r in caplog.records if "CLIPConvergenceGuard" in r.message)
    assert f"stopped at step {BEST_STEP + 6}; best clip_t {watching.best_metric:.4f} at step {BEST_STEP}" in line
    assert f"{tmp_path / 'lora_best.safetensors'}: use that file, the one without _best holds the last weights" in line
    with safe_open(tmp_path / "lora_best.safetensors", "pt") as file:
        assert file.metadata() == {"step": str(BEST_STEP)}
        assert set(file.keys()) == {"net.0.weight", "net.0.bias"}


def test_checks_are_paired_by_prompt_and_seed(tmp_path: Path) -> None:
    painter = Painter()
    fit(painter, tmp_path, guard(seed=70, stop=False), steps=4)
    assert painter.drawn == [(["a zorp mug"] * 2 + ["a zorp bottle"] * 2, [70, 71, 70, 71])] * 3


def test_without_stop_it_only_watches(tmp_path: Path) -> None:
    watching = guard(stop=False)
    assert fit(Painter(), tmp_path, watching, steps=16).global_step == 16
    assert watching.best_step == BEST_STEP


@pytest.mark.parametrize(("min_delta", "best"), [(None, 0), (0.0, 2), (0.2, 0)])
def test_min_delta_takes_the_place_of_the_measured_noise(
    min_delta: float | None, best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image becomes 0.3 better and another 0.2 worse: 0.05 on average, with a standard error of 0.25."""
    scores = iter([[0.4, 0.6], [0.7, 0.4]])
    monkeypatch.setattr(
        "lightning_aigc.metrics.CLIPSimilarity.scores",
        lambda *_: {"clip_t": torch.tensor(next(scores)), "clip_i": torch.full((2,), torch.nan)},
    )
    watching = guard(num_images=1, min_delta=min_delta)
    fit(Painter(), tmp_path, watching, steps=2)
    assert watching.best_step == best


def test_grids_scores_and_a_last_before_and_after_are_written(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(Painter(), tmp_path, guard(stop=False), steps=4, logger=logger, log_every_n_steps=1)
    assert {p.name for p in (tmp_path / "guard").iterdir()} == {
        "step_000000.png", "step_000002.png", "step_000004.png", "before_after.png",
    }  # fmt: skip
    logged = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "guard/clip_t" in logged
    assert "guard/best" in logged
    with Image.open(tmp_path / "guard" / "step_000004.png") as sheet:
        assert json.loads(sheet.text["step"]) == 4  # type: ignore[attr-defined]
        with Image.open(tmp_path / "guard" / "before_after.png") as before_after:
            assert (before_after.width > 1.8 * sheet.width, before_after.height) == (True, sheet.height)


def test_its_state_resumes_and_is_plain(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=8, save_top_k=-1, filename="{step}")
    whole = guard()
    fit(Painter(), tmp_path / "whole", whole, checkpoint, enable_checkpointing=True)
    resumed = guard()
    trainer = Trainer(
        accelerator="cpu", max_steps=20, callbacks=[resumed], logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path / "resumed", enable_checkpointing=False,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(torch.randn(80, 4)), batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning: the loader is not resumable, which does not matter here
        trainer.fit(Painter(), loader, ckpt_path=str(tmp_path / "step=8.ckpt"), weights_only=True)
    assert [(c.step, c.scores("clip_t")) for c in resumed.checks] == [
        (c.step, c.scores("clip_t")) for c in whole.checks
    ]
    assert (resumed.best_step, trainer.global_step) == (whole.best_step, BEST_STEP + 6)


@pytest.mark.parametrize(
    "every_n_steps", [2, 4], ids=["the last check was before the kill", "the last check is the end's"]
)
def test_a_resumed_guard_draws_the_whole_runs_before_and_after(tmp_path: Path, every_n_steps: int) -> None:
    class KillAtEnd(KillAt):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            trainer.callbacks[0].wait()
            self.kill(trainer)

    def go(root: Path, *callbacks: Any, **more: Any) -> CLIPConvergenceGuard:
        watching = guard(stop=False, every_n_steps=every_n_steps)
        with contextlib.suppress(Killed):
            trainer = Trainer(
                max_steps=6, callbacks=[ExactSnapshot(2), *callbacks, watching], accelerator="cpu", logger=False,
                enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
                default_root_dir=root,
            )  # fmt: skip
            loader = DataLoader(TensorDataset(torch.ones(80, 4)), batch_size=4)
            trainer.fit(Painter(), loader, **more)
        for callback in trainer.callbacks:
            if isinstance(callback, ExactSnapshot):
                callback.abandon()
        return watching

    go(tmp_path / "whole")
    go(tmp_path / "run", KillAtEnd(-1))
    assert not (tmp_path / "run" / "guard" / "before_after.png").exists()
    resumed = go(tmp_path / "run", ckpt_path="latest")
    sheets = [(tmp_path / root / "guard" / "before_after.png").read_bytes() for root in ("whole", "run")]
    assert sheets[0] == sheets[1]
    assert [check.step for check in resumed.checks] == list(range(0, 7, every_n_steps)) + [6] * (every_n_steps == 4)


def test_a_run_that_the_guard_stopped_is_finished_until_its_patience_is_raised(tmp_path: Path) -> None:
    snapshots = ExactSnapshot(2)
    trainer = fit(Painter(), tmp_path, snapshots, guard(patience=2, min_delta=1.0))
    assert trainer.global_step == 2
    given = (trainer.lightning_module, None, tmp_path / "snapshots")
    finished = find_finished(trainer, *given)
    assert finished is not None
    assert re.search(
        r"2 steps, stopped before max_steps=20, .* or CLIPConvergenceGuard\.patience above 2, continues",
        finished_sentence(finished, tmp_path),
    )
    trainer.callbacks = [snapshots, guard(patience=4, min_delta=1.0)]  # type: ignore[attr-defined]
    assert find_finished(trainer, *given) is None


def test_a_guard_of_two_trainers_watches_each_by_itself_and_goes_on_in_a_second_fit_of_one(tmp_path: Path) -> None:
    watching, fresh = guard(stop=False), guard(stop=False)
    fit(Painter(), tmp_path / "first", watching, steps=8)
    trainer = fit(Painter(), tmp_path / "second", watching, steps=4)
    fit(Painter(), tmp_path / "fresh", fresh, steps=4)
    assert str(watching.checks) == str(fresh.checks) and watching.best_step == fresh.best_step == 4
    assert watching.best_file == str(tmp_path / "second" / "lora_best.safetensors")
    trainer.fit_loop.epoch_loop.max_steps = 8
    painter = Painter()
    trainer.fit(painter, DataLoader(TensorDataset(torch.randn(80, 4)), batch_size=4))
    assert [check.step for check in watching.checks] == [0, 2, 4, 6, 8] and watching.best_step == BEST_STEP


def test_a_guard_that_is_asked_for_other_pictures_begins_anew(tmp_path: Path) -> None:
    first = guard()
    first._prompts, first.checks, first.best_step = PROMPTS, [Check(0, {"clip_t": [0.1] * 4})], 0
    other = guard(num_images=1)
    other._prompts = PROMPTS
    with pytest.warns(UserWarning, match="begins anew from this step"):
        other.load_state_dict(first.state_dict())
    assert other.checks == []


def test_the_best_weights_of_an_earlier_run_are_set_aside(tmp_path: Path) -> None:
    earlier = {"lora_best.safetensors": b"file", "lora_best.diffusers.safetensors": b"DoRA", "lora_best": None}
    for again in ("earlier-1", "earlier-2"):
        for name, content in earlier.items():
            (tmp_path / name).mkdir() if content is None else (tmp_path / name).write_bytes(content)
        fit(Painter(), tmp_path, guard(min_delta=1.0), steps=2)
        assert [tmp_path / name for name in earlier if (tmp_path / name).exists()] == []
        assert {path.name for path in (tmp_path / again).glob("lora_best*")} == set(earlier)


def test_a_prompt_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'a zorp lamp' twice.*num_images"):
        fit(Painter(), tmp_path, guard(prompts=["a zorp lamp", "a zorp mug", "a zorp lamp"]), steps=2)


@pytest.mark.filterwarnings("error")
def test_a_guard_that_only_validates_says_nothing(tmp_path: Path) -> None:
    first, other = guard(), guard()
    first._prompts, first.checks, first.best_step = PROMPTS, [Check(0, {"clip_t": [0.1] * 4})], 0
    other.load_state_dict(first.state_dict())  # without the setup of a fit
    assert other.checks == first.checks


def test_a_score_that_is_not_finite_never_becomes_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([[0.4, 0.4], [0.5, 0.5], [torch.nan, 0.9], [torch.nan, 0.9]])
    monkeypatch.setattr(
        "lightning_aigc.metrics.CLIPSimilarity.scores",
        lambda *_: {"clip_t": torch.tensor(next(scores)), "clip_i": torch.full((2,), torch.nan)},
    )
    watching = guard(num_images=1)
    with pytest.warns(UserWarning, match="clip_t of step . is not finite.*learning_rate") as said:
        fit(Painter(), tmp_path, watching, steps=6)
    assert ["step 4" in str(each.message) for each in said if "is not finite" in str(each.message)] == [True]  # once
    assert (watching.best_step, watching.best_metric) == (2, pytest.approx(0.5))


def test_a_guard_that_can_check_only_the_ends_of_a_run_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        fit(Painter(), tmp_path, guard(every_n_steps=10, stop=False), steps=10)
    assert "checks only the start and the end of these 10 steps" in caplog.text
    assert "set its every_n_steps: 2 to find the best step" in caplog.text


def test_broken_pictures_are_named_and_score_as_black(tmp_path: Path) -> None:
    class Diverging(Painter):
        def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
            images = super().sample(prompts, seeds)
            return images * torch.nan if self.trainer.global_step == BEST_STEP else images

    watching = guard(stop=False)
    with pytest.warns(ImageWarning, match="not finite images .*step 6"):
        fit(Diverging(), tmp_path, watching, steps=8)
    assert watching.best_step != BEST_STEP


def test_words_that_are_lost_while_pictures_are_copied_are_reported() -> None:
    watching = guard()
    rows = [(0.8, 0.2), (0.7, 0.4), (0.6, 0.6), (0.5, 0.8)]
    watching.checks = [Check(i, {"clip_t": [t, t + 0.01], "clip_i": [s, s + 0.01]}) for i, (t, s) in enumerate(rows)]
    with pytest.warns(UserWarning, match=r"clip_i rises while clip_t falls.*memorises"):
        watching._watch_memorising(None, watching.checks[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watching._watch_memorising(None, watching.checks[-1])  # said once


def test_sampling_that_takes_too_long_ends_the_checks_and_not_the_training(tmp_path: Path) -> None:
    class Slow(Painter):
        def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
            raise SamplingTooSlow("2 hours")

    with pytest.warns(UserWarning, match="checks no more: 2 hours"):
        assert fit(Slow(), tmp_path, guard(), steps=4).global_step == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompts": []}, "wanted a list of prompts"),
        ({"prompts": "a cup"}, r"prompts='a cup'; wanted a list of strings or None; write \['a cup'\]"),
        ({"metric": "fid"}, "metric='fid'; wanted one of clip_t, clip_i, mean, edit, direction, kept"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"every_n_steps": 0}, "every_n_steps must be at least 1"),
        ({"min_delta": -1.0}, "min_delta must be 0 to 1, as scores are, or None for the noise; got -1.0"),
        ({"min_delta": 5.0}, "min_delta must be 0 to 1, as scores are, or None for the noise; got 5.0"),
        ({"min_delta": math.nan}, "min_delta must be 0 to 1, as scores are, or None for the noise; got nan"),
        ({"reference_images": 0}, "reference_images must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        guard(**options)


@pytest.mark.parametrize("name", callbacks.__all__)
def test_an_argument_of_another_type_is_refused_by_every_callback(name: str) -> None:
    make: Any = getattr(callbacks, name)
    make()
    for argument, hint in get_type_hints(make.__init__).items():
        if argument != "return" and "Literal" not in str(hint) and "dict" not in str(hint):
            with pytest.raises(ConfigError, match=rf"^got {name} {argument}=<object .*>; wanted "):
                make(**{argument: object()})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RunReport(prompts="mug"), r"got RunReport prompts='mug'; wanted a list of strings or None; write \["),
        (lambda: RunReport(prior_prompts="mug"), "prior_prompts='mug'; wanted a list of strings; write"),
        (lambda: RunReport(prompts=[1]), r"prompts=\[1\]; wanted a list of strings or None$"),
        (lambda: GradientHealthMonitor(page="no"), "page='no'; wanted true or false"),  # type: ignore[arg-type]
        (lambda: AdaptiveLR(recovery_steps=1.5), "recovery_steps=1.5; wanted a whole number"),  # type: ignore[arg-type]
        (lambda: ExactSnapshot(keep_best=3), "keep_best=3; wanted a string or None"),  # type: ignore[arg-type]
        (lambda: guard(seed=1.5), "got CLIPConvergenceGuard seed=1.5; wanted a whole number"),
        (lambda: SampleGrid(seeds=[0, 1.5]), r"seeds=\[0, 1.5\]; wanted a list of whole numbers"),  # type: ignore[list-item]
        (lambda: SaveLoRA(keep_last="all"), "got SaveLoRA keep_last='all'; wanted a whole number"),  # type: ignore[arg-type]
    ],
)
def test_what_was_got_is_said_of_an_argument_of_another_type(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_numbers_of_numpy_and_tuples_are_taken() -> None:
    guard(prompts=tuple(PROMPTS), num_images=np.int64(2), min_delta=np.float32(0.5))
    AdaptiveLR(grad_norm_threshold=6)


def test_prompts_of_a_module_that_are_a_string_are_refused(tmp_path: Path) -> None:
    class Prompted(Painter):
        validation_prompts = "a zorp mug"

    with pytest.raises(ModelError, match=r"Prompted.validation_prompts is 'a zorp mug'; wanted a list: write"):
        fit(Prompted(), tmp_path, guard(prompts=None))


@pytest.mark.parametrize("watch", ["guard", "SampleGrid", "RunReport"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda images: (images * 255).byte(), "torch.uint8; wanted floating point in 0..1: divide by 255"),
        (lambda images: images * 255, r"from [\d.e-]+ to 2\d\d; wanted 0..1: return images / 255"),
        (lambda images: images * 2 - 1, r"from -[\d.]+ to [\d.]+; wanted 0..1: return images / 2 \+ 0.5"),
    ],
)
def test_images_that_are_not_in_0_to_1_are_refused_before_training(
    change: Any, said: str, watch: str, tmp_path: Path
) -> None:
    class Wrong(Painter):
        validation_prompts = PROMPTS

        def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
            return change(super().sample(prompts, seeds))

    made = {"guard": guard, "SampleGrid": SampleGrid, "RunReport": RunReport}[watch]()
    with pytest.raises(ModelError, match=rf"Wrong.sample returned .*{said}"):
        fit(Wrong(), tmp_path, made, steps=2)


def test_images_that_a_decoder_did_not_clamp_or_that_diverge_later_are_taken(tmp_path: Path) -> None:
    class Loose(Painter):
        def sample(self, prompts: list[str], seeds: list[int]) -> Tensor:
            return super().sample(prompts, seeds) * (1.2 if self.trainer.global_step == 0 else 9.0)

    assert fit(Loose(), tmp_path, guard(), steps=2).global_step == 2


def test_what_training_cannot_give_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Dumb(Painter):
        sample = None  # type: ignore[assignment]

    with pytest.raises(ModelError, match=r"Dumb has no `sample`; add this method to it: `def sample"):
        fit(Dumb(), tmp_path, guard())
    with pytest.raises(ConfigError, match="got no prompts"):
        fit(Painter(), tmp_path, guard(prompts=None))
    with pytest.raises(ConfigError, match="no `reference_images"):
        fit(Painter(), tmp_path, guard(metric="clip_i"))
    with pytest.raises(ModelError, match=r"without open_clip_config\.json"):
        fit(Painter(), tmp_path, guard(clip_model=str(tmp_path)))


def tiny_run(root: Path, *callbacks: Any) -> tuple[dict[str, Tensor], list[Any]]:
    """Six steps of the embedded Stable Diffusion on its brand: trained weights and losses."""
    seed_everything(7, verbose=False)
    losses: list[Any] = []

    class Watched(StableDiffusionLoRA):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(outputs["loss"].item())

    module = Watched(
        "embedded:sd", rank=4, learning_rate=1e-3, max_train_steps=6, num_inference_steps=2,
        validation_prompts=PROMPTS,
    )  # fmt: skip
    module.configure_callbacks = list  # type: ignore[method-assign]  # the guard alone
    data = ImageCaptionData(str(BRAND), resolution=64, train_batch_size=4)
    trainer = Trainer(
        accelerator="cpu", max_steps=6, callbacks=list(callbacks), logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=root,
    )  # fmt: skip
    trainer.fit(module, data)
    return {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}, losses


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on modules in eval mode and on workers
def test_a_stable_diffusion_trains_the_same_to_the_bit_with_the_guard(tmp_path: Path) -> None:
    plain, losses = tiny_run(tmp_path / "plain")
    watching = guard(prompts=None, metric="mean", stop=False, min_delta=0.0)
    watched, watched_losses = tiny_run(tmp_path / "watched", watching)
    assert [check.step for check in watching.checks] == [0, 2, 4, 6]
    assert all(torch.tensor(check.scores("clip_i")).isfinite().all() for check in watching.checks)
    assert watched_losses == losses
    assert plain.keys() == watched.keys()
    assert all(torch.equal(watched[name], value) for name, value in plain.items())
    if watching.best_step:
        with safe_open(tmp_path / "watched" / "lora_best.safetensors", "pt") as file:
            assert file.metadata()["ss_steps"] == str(watching.best_step)


def two_ranks(rank: int, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    watching, painter = guard(num_images=3), Painter()
    trainer = fit(painter, Path(folder), watching, devices=2, strategy="ddp")
    return {
        "steps": trainer.global_step, "best": watching.best_step,
        "checks": [c.scores("clip_t") for c in watching.checks], "drawn": painter.drawn[0],
    }  # fmt: skip


def test_two_ranks_share_the_pictures_and_decide_alike(tmp_path: Path) -> None:
    first, second = run_ranks(two_ranks, 2, tmp_path / "ranks", str(tmp_path / "run"), gloo=False)
    alone = guard(num_images=3)
    fit(Painter(), tmp_path / "alone", alone)
    assert first["drawn"] == (["a zorp mug", "a zorp mug", "a zorp bottle"], [2000, 2002, 2001])
    assert second["drawn"] == (["a zorp mug", "a zorp bottle", "a zorp bottle"], [2001, 2000, 2002])
    assert first["checks"] == second["checks"]
    assert (first["steps"], first["best"]) == (second["steps"], second["best"]) == (BEST_STEP + 6, BEST_STEP)
    for mine, theirs in zip(first["checks"], alone.checks, strict=True):
        assert mine == pytest.approx(theirs.scores("clip_t"), abs=1e-5)
