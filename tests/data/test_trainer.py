"""The data module inside a Lightning Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from fakes.models.encoder import FakeEncoder
from fakes.processes.ranks import run_ranks
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.errors import DataError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


class Model(LightningModule):
    """A LightningModule that is an Encoder and writes down what it is given."""

    def __init__(self, encoder, stop_after=10**9):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.encoder = encoder
        self.stop_after = stop_after
        self.seen = []
        self.encoder_identity = encoder.encoder_identity
        self.encode_pixels = encoder.encode_pixels
        self.encode_captions = encoder.encode_captions

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, tuple(batch["names"]), tuple(batch["captions"])))
        if len(self.seen) == self.stop_after:
            self.trainer.should_stop = True
        return (self.weight * batch["latent_moments"].mean()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class SaveAt(Callback):
    """Saves a checkpoint after one step."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def trainer(tmp_path, **arguments):
    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path / "runs",
        **{"devices": 1, **arguments},
    )


def fill(tools, folder, count=11):
    for number in range(count):
        size = [(64, 64), (96, 60)][number % 2]
        tools.save(folder / f"{number}.png", tools.picture(*size, seed=number), f"thing {number}")


CACHED = {"cache_latents": True, "cache_text_embeddings": True, "train_batch_size": 2, "caption_dropout_rate": 0.3}


def test_fit_prints_the_report_fills_the_caches_and_sees_every_picture_each_epoch(
    tools, make, folder, tmp_path, capsys
):
    fill(tools, folder)
    model = Model(tools.FakeEncoder())
    trainer(tmp_path, max_epochs=2).fit(model, datamodule=make(**CACHED))
    printed = capsys.readouterr().out
    assert "11 found, 11 used, 0 rejected" in printed and "64 x 64" in printed and "11 encoded now" in printed
    for epoch in range(2):
        names = sorted(name for e, batch, _ in model.seen if e == epoch for name in batch)
        assert names == sorted(f"{number}.png" for number in range(11))
    assert model.seen[:6] != [(0, *rest) for _, *rest in model.seen[6:]], "epochs differ in order"


def test_a_model_without_the_encoder_methods_is_told_which_to_add(tools, make, folder, tmp_path):
    fill(tools, folder)

    class Plain(Model):
        def __init__(self):
            super().__init__(tools.FakeEncoder())
            del self.encoder_identity, self.encode_pixels, self.encode_captions

    with pytest.raises(DataError, match="lacks encoder_identity"):
        trainer(tmp_path, max_epochs=1).fit(Plain(), datamodule=make(**CACHED))


@pytest.mark.parametrize("steps", [3, 6, 8, 12])
def test_a_resumed_run_sees_exactly_the_batches_that_the_whole_run_would_have(tools, make, folder, tmp_path, steps):
    fill(tools, folder)
    whole = Model(tools.FakeEncoder())
    trainer(tmp_path, max_epochs=3).fit(whole, datamodule=make(**CACHED))
    first = Model(tools.FakeEncoder())
    save = SaveAt(steps, tmp_path / "a.ckpt")  # while training: after fit, Lightning counts a cut epoch as a whole one
    trainer(tmp_path, max_epochs=3, max_steps=steps, callbacks=[save]).fit(first, datamodule=make(**CACHED))
    second = Model(tools.FakeEncoder())
    trainer(tmp_path, max_epochs=3).fit(second, datamodule=make(**CACHED), ckpt_path=tmp_path / "a.ckpt")
    assert first.seen + second.seen == whole.seen


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfit_batches_repeats_the_same_batches(tools, make, folder, tmp_path):
    fill(tools, folder)
    model = Model(tools.FakeEncoder())
    trainer(tmp_path, max_epochs=3, overfit_batches=2).fit(model, datamodule=make(**CACHED))
    assert len(model.seen) == 6 and len({names for _, names, _ in model.seen}) == 2


def train_as_a_rank(rank, root):
    warnings.simplefilter("ignore")
    data = ImageCaptionData(
        f"{root}/pictures",
        resolution=64,
        cache_dir=f"{root}/cache",
        num_workers=0,
        cache_latents=True,
        train_batch_size=1,
    )
    model = Model(FakeEncoder())
    trainer(Path(root), devices=2, strategy="ddp", max_epochs=1).fit(model, datamodule=data)
    return model.encoder.pictures_encoded, [name for _, batch, _ in model.seen for name in batch]


def test_two_ddp_processes_split_the_pictures_and_the_encoding(tools, tmp_path):
    fill(tools, tmp_path / "pictures", 8)
    ranks = run_ranks(train_as_a_rank, 2, tmp_path / "ranks", str(tmp_path), gloo=False)
    assert [encoded for encoded, _ in ranks] == [4, 4]
    assert [len(names) for _, names in ranks] == [4, 4]
    assert sorted(ranks[0][1] + ranks[1][1]) == [f"{number}.png" for number in range(8)]
