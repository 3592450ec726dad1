"""FineTuneCheck in real fits of the embedded model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightning_aigc.callbacks import FineTuneCheck, RunReport
from lightning_aigc.callbacks.fine_tune.check import _drift, _without
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.diffusion import StableDiffusionLoRA
from lightning_aigc.errors import ConfigError
from lightning_aigc.report.record import read_run

pytestmark = [  # of Lightning: frozen parts are in eval mode, and so small a run has no workers
    pytest.mark.filterwarnings("ignore:.*module\\(s\\) in eval mode"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


def fit(
    tmp_path: Path, check: FineTuneCheck | None, steps: int = 2, more: Sequence[Callback] = (), **model: Any
) -> StableDiffusionLoRA:
    torch.manual_seed(0)
    module = StableDiffusionLoRA(
        "embedded:sd", rank=4, num_inference_steps=2, validation_prompts=["a zorp mug", "a zorp hat"], **model
    )
    data = ImageCaptionData(
        "embedded:brand", resolution=64, trigger_word="zorp", cache_dir=str(tmp_path / "cache"), train_batch_size=2
    )
    trainer = Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=tmp_path, callbacks=[*([check] if check else []), *more],
    )  # fmt: skip
    trainer.fit(module, data)
    return module


class Checked(NamedTuple):
    """A run at a rate that moves nothing, and what watched it."""

    folder: Path
    module: StableDiffusionLoRA
    check: FineTuneCheck
    report: RunReport


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    folder = tmp_path_factory.mktemp("checked")
    check = FineTuneCheck(num_images=2, clip_model="embedded:clip")
    report = RunReport("embedded:clip", num_images=2)
    with pytest.warns(UserWarning, match=r"fine-tune: not_learned: .* Remedy: .*learning_rate"):
        module = fit(folder, check, learning_rate=1e-7, more=[report])
    return Checked(folder, module, check, report)


def test_a_run_that_learned_nothing_is_named_with_figures_and_a_remedy(checked: Checked) -> None:
    written = json.loads((checked.folder / "fine_tune.json").read_text())
    assert [finding["check"] for finding in written["findings"]] == ["not_learned"]
    figures = checked.check.figures
    assert figures is not None and figures.text_drift == pytest.approx(0, abs=1e-3)
    assert figures.ranks and len(figures.copy_ratios) == 4
    assert checked.check._sets[1] == ["a mug", "a hat"]  # the prompts without the trigger word


@pytest.mark.parametrize(
    ("prompt", "plain"),
    [
        ("a zorp mug on white", "a mug on white"),
        ("a photo of zorp on a wooden table", "a photo of an object on a wooden table"),
        ("a drawing of a Zorp", "a drawing of an object"),
        ("zorp", "an object"),
        ("a zorpian mug", "a zorpian mug"),
    ],
)
def test_a_prompt_without_the_trigger_word_still_names_a_thing(prompt: str, plain: str) -> None:
    assert _without("zorp", prompt) == plain


def test_the_finding_and_its_remedy_are_on_the_page_of_the_run(checked: Checked) -> None:
    finding = read_run(checked.folder).fine_tune.findings[0]  # type: ignore[union-attr]
    page = (checked.folder / "report.html").read_text().replace("<wbr>", "")  # where a key may break
    assert finding.remedy in page and "What to fix" in page
    ours, theirs = checked.check._judge, checked.report._judge
    assert ours.clip._clip() is theirs.clip._clip()  # type: ignore[union-attr] - one CLIP model on the card


def test_text_drift_is_none_for_equal_embeddings_and_one_for_exchanged_ones() -> None:
    torch.manual_seed(0)
    embeddings_ND = torch.randn(5, 64)
    assert _drift(embeddings_ND, embeddings_ND) == pytest.approx(0, abs=1e-5)
    exchanged = _drift(embeddings_ND, embeddings_ND.roll(1, dims=0))
    assert exchanged is not None and 0.7 < exchanged < 1.3
    assert _drift(embeddings_ND[:1], embeddings_ND[:1]) is None and _drift(None, None) is None


def test_the_training_has_the_same_bits_with_the_check(checked: Checked, tmp_path: Path) -> None:
    without = fit(tmp_path, None, learning_rate=1e-7)
    pairs = zip(checked.module.trainable_parameters(), without.trainable_parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("bad", [{"prompts": "a mug"}, {"class_prompts": "a mug"}, {"num_images": 0}])
def test_bad_arguments_are_one_sentence(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="FineTuneCheck"):
        FineTuneCheck(**bad)
