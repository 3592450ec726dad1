"""Shards: the same batches as from caches, resumable to write and to read, from any address; bad ones are named."""

from __future__ import annotations

import dataclasses
import itertools
import re
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from PIL import Image

from fakes.models.encoder import FakeEncoder, UnequalTexts
from fakes.models.pipelines import make_pipeline
from fakes.runs.killed_trainings import KillAt, Killed
from lightning_aigc.callbacks import ExactSnapshot
from lightning_aigc.cli import main
from lightning_aigc.data import EncodedImageData, ImageCaptionData
from lightning_aigc.data.encoded_stream.encode import EncodeOptions, encode_shards, finish, samples_of, write_common
from lightning_aigc.data.encoded_stream.encoded_image_data import facts_of
from lightning_aigc.data.encoded_stream.order import StreamSampler
from lightning_aigc.errors import DataError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]
PICTURES = 22
shard_counts = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3)


def plans(counts: Any, batch_size: int, window: int, rank: int = 0, world_size: int = 1, **options: Any) -> list[Any]:
    return list(StreamSampler(counts, batch_size, window, rank=rank, world_size=world_size, **options))


def entries_of(plan: Any) -> list[tuple[int, int, int]]:
    return [(plan.bucket, shard, place) for shard, place in zip(plan.shards, plan.places, strict=True)]


@settings(deadline=None)
@given(shard_counts, st.integers(1, 5), st.integers(1, 12))
def test_one_rank_sees_every_entry_once_in_batches_of_one_bucket(counts: Any, batch_size: int, window: int) -> None:
    found = plans(counts, batch_size, window)
    every = {(b, s, p) for b, shards in enumerate(counts) for s, count in enumerate(shards) for p in range(count)}
    seen = [entry for plan in found for entry in entries_of(plan)]
    assert len(found) == len(StreamSampler(counts, batch_size, window))
    assert len(seen) == len(every) and set(seen) == every


@settings(deadline=None)
@given(shard_counts, st.integers(1, 4), st.integers(1, 12), st.integers(2, 5))
def test_ranks_take_equal_steps_in_the_same_buckets_and_cover_everything(
    counts: Any, batch_size: int, window: int, world_size: int
) -> None:
    ranks = [plans(counts, batch_size, window, rank, world_size) for rank in range(world_size)]
    assert len({len(found) for found in ranks}) == 1
    for step in zip(*ranks, strict=True):
        assert len({(plan.bucket, len(plan.places)) for plan in step}) == 1
    first = [
        entry
        for found in ranks
        for plan in found
        for entry, is_first in zip(entries_of(plan), plan.is_first, strict=True)
        if is_first
    ]
    every = {(b, s, p) for b, shards in enumerate(counts) for s, count in enumerate(shards) for p in range(count)}
    assert len(first) == len(every) and set(first) == every  # what is no repeat is there once


@settings(deadline=None)
@given(shard_counts, st.integers(1, 4), st.integers(1, 12), st.integers(0, 40), st.integers(1, 2))
def test_a_sampler_resumes_at_any_batch(counts: Any, batch_size: int, window: int, at: int, world_size: int) -> None:
    whole = plans(counts, batch_size, window, world_size=world_size)
    resumed = StreamSampler(counts, batch_size, window, world_size=world_size)
    resumed.load_state_dict({"epoch": 0, "position": min(at, len(whole)), "batches": len(whole)})
    if at < len(whole):
        assert list(resumed) == whole[at:]
    else:
        assert resumed.epoch == 1


def test_the_order_changes_with_epoch_and_seed_and_not_without_shuffle() -> None:
    sampler, other = StreamSampler([[8, 8]], 2), StreamSampler([[8, 8]], 2, seed=1)
    first = list(sampler)
    sampler.set_epoch(1)
    assert first != list(sampler) and first != list(other) and first == list(StreamSampler([[8, 8]], 2))
    in_order = [place for plan in plans([[8, 8]], 4, 5, shuffle=False) for place in plan.places]
    assert in_order == [*range(8), *range(8)]


@pytest.fixture
def source(make: Callable[..., ImageCaptionData], tools: SimpleNamespace, folder: Path) -> ImageCaptionData:
    """Images of two shapes."""
    for number in range(PICTURES):
        size = (64, 64) if number % 3 else (96, 48)
        tools.save(folder / f"{number}.png", tools.picture(*size, seed=number), f"a thing number {number}")
    return make(cache_latents=True, cache_text_embeddings=True, train_batch_size=3)


def options(tmp_path: Path, **changes: Any) -> EncodeOptions:
    return EncodeOptions(tmp_path / "shards", **{"entries_per_shard": 4, "batch_size": 3} | changes)


def encode(source: ImageCaptionData, tmp_path: Path, kind: type[FakeEncoder] = FakeEncoder, **changes: Any) -> str:
    encoder, chosen = kind(), options(tmp_path, **changes)
    encode_shards(encoder, samples_of(source.index()), chosen)
    write_common(encoder, source.reference_images(5), chosen.folder)
    finish(encoder, samples_of(source.index()), chosen, facts_of(source), 0)
    return str(chosen.folder)


def stream(folder: str, tmp_path: Path, **changes: Any) -> EncodedImageData:
    given_ = {"train_batch_size": 3, "cache_dir": str(tmp_path / "fetched"), "num_workers": 0, "pin_memory": False}
    data = EncodedImageData(folder, **given_ | changes)
    data.setup("validate")
    return data


def by_name(loader: Any) -> dict[str, dict[str, Any]]:
    found = {}
    for batch in loader:
        for at, name in enumerate(batch["names"]):
            found[name] = {key: value[at] for key, value in batch.items() if key not in ("seeds", "is_counted")}
    return found


def assert_equal_entries(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, entry in theirs.items():
        for key, value in entry.items():
            same = torch.equal(ours[name][key], value) if isinstance(value, torch.Tensor) else ours[name][key] == value
            assert same, (name, key)


def test_shards_give_the_batches_of_the_caches_to_the_bit(source: ImageCaptionData, tmp_path: Path) -> None:
    source.prepare(FakeEncoder())
    cached = by_name(source.loader())
    data = stream(encode(source, tmp_path), tmp_path)
    assert_equal_entries(by_name(data.loader()), cached)
    assert len(cached) == PICTURES
    assert torch.equal(data.reference_images(3), (source.reference_images(5) * 255).round()[:3] / 255)
    assert data.lora_metadata()["num_train_images"] == PICTURES
    batch = data.example_batch(2)
    assert len(batch["captions"]) == 2 and batch["names"] == data.example_batch(2)["names"]


def test_captions_of_unequal_length_keep_their_own_and_are_padded_in_a_batch(
    source: ImageCaptionData, tmp_path: Path
) -> None:
    source.prepare(UnequalTexts())
    data = stream(encode(source, tmp_path, UnequalTexts), tmp_path, caption_dropout_rate=0.3)
    assert source.caches.embeddings is not None and source.caches.embeddings.in_memory
    for loader in (source.loader(), data.loader()):
        lengths = set()
        for batch in loader:
            assert batch["prompt_embeds"].shape[1] == max(batch["prompt_lengths"])
            for embeddings, length, caption in zip(
                batch["prompt_embeds"], batch["prompt_lengths"], batch["captions"], strict=True
            ):
                assert torch.equal(embeddings[:length], UnequalTexts().encode_captions([caption])["prompt_embeds"][0])
                assert not embeddings[length:].any()
                lengths.add(int(length))
        assert len(lengths) > 1


def test_flips_and_dropped_captions_are_those_that_were_encoded(source: ImageCaptionData, tmp_path: Path) -> None:
    folder = encode(source, tmp_path, flips=True)
    plain = by_name(stream(folder, tmp_path).loader())
    drawn = by_name(stream(folder, tmp_path, random_flip=True, caption_dropout_rate=0.5).loader())
    source.caches.flips = True
    empty = FakeEncoder().encode_captions([""])["prompt_embeds"][0]
    mirrored = {name for name in plain if not torch.equal(plain[name]["latent_moments"], drawn[name]["latent_moments"])}
    dropped = {name for name in plain if drawn[name]["captions"] == ""}
    assert 4 < len(mirrored) < PICTURES - 4 and 4 < len(dropped) < PICTURES - 4
    for name in plain:
        expected = empty if name in dropped else plain[name]["prompt_embeds"]
        assert torch.equal(drawn[name]["prompt_embeds"], expected)
    pixels = next(iter(source.val_dataloader()), None)
    assert pixels is None  # nothing is held out
    sample = next(s for s in samples_of(source.index()) if s.name in mirrored)
    twin = ImageCaptionData(str(source._given["train_data_dir"]), resolution=64, bucket_reso_steps=16, num_workers=0)
    shown = by_name(twin.loader())[sample.name]["pixel_values"]
    flipped = FakeEncoder().encode_pixels(shown.flip(-1)[None])[0]
    torch.testing.assert_close(drawn[sample.name]["latent_moments"], flipped)


def test_any_number_of_ranks_writes_the_same_files_and_a_second_run_nothing(
    source: ImageCaptionData, tmp_path: Path
) -> None:
    alone = Path(encode(source, tmp_path))
    names = {p.name for p in alone.glob("*.tar")}
    together = options(tmp_path / "ranks")
    for rank in range(3):
        encode_shards(FakeEncoder(), samples_of(source.index()), together, rank, 3)
    assert {p.name for p in together.folder.glob("*.tar")} == names
    keys: list[str] = []
    for name in names:
        with tarfile.open(alone / name) as shard:
            keys += shard.getnames()
    assert len(keys) == len(set(keys)) == PICTURES, "a reader of several shards takes an equal key for the same entry"
    (alone / min(names)).unlink()
    with pytest.raises(DataError, match=r"1 of 6 shards are not in .*: another rank has stopped; run the same command"):
        finish(FakeEncoder(), samples_of(source.index()), options(tmp_path), {}, 0)
    encoder = FakeEncoder()
    assert encode_shards(encoder, samples_of(source.index()), options(tmp_path)) == (1, 5)
    assert encoder.pictures_encoded == 4
    assert {p.name for p in alone.glob("*.tar")} == names


def test_what_has_changed_is_encoded_again_and_nothing_else(
    source: ImageCaptionData, make: Callable[..., ImageCaptionData], folder: Path, tmp_path: Path
) -> None:
    chosen = options(tmp_path)
    encode(source, tmp_path)

    def again(encoder: FakeEncoder, data: ImageCaptionData, **changes: Any) -> tuple[int, int]:
        return encode_shards(encoder, samples_of(data.index()), dataclasses.replace(chosen, **changes))

    assert again(FakeEncoder(), source) == (0, 6)
    (folder / "0.txt").write_text("another caption")
    changed = make(cache_latents=True, train_batch_size=3)
    assert again(FakeEncoder(), changed) == (1, 5), "a caption"
    assert again(FakeEncoder(vae="vae-2"), changed) == (6, 0), "weights"
    assert again(FakeEncoder(vae="vae-2"), changed, latents_dtype=torch.float16) == (6, 0), "dtype"
    assert again(FakeEncoder(vae="vae-2"), changed, latents_dtype=torch.float16, flips=True) == (6, 0), "mirrored"
    options_ = dataclasses.replace(chosen, latents_dtype=torch.float16, flips=True)
    manifest = finish(FakeEncoder(vae="vae-2"), samples_of(changed.index()), options_, {}, 0)
    assert len(list(chosen.folder.glob("*.tar"))) == len(manifest.shards) == 6


def test_another_mask_is_encoded_again(
    make: Callable[..., ImageCaptionData], tools: SimpleNamespace, folder: Path, tmp_path: Path
) -> None:
    tools.save(folder / "a.png", tools.picture(64, 64), "a cup")
    masks = tmp_path / "masks"
    for level, counts in ((255, (1, 0)), (255, (0, 1)), (7, (1, 0))):
        tools.save(masks / "a.png", Image.new("L", (64, 64), level))
        samples = samples_of(make(mask_dir=str(masks)).index())
        assert samples[0].mask is not None
        assert encode_shards(FakeEncoder(), samples, options(tmp_path, has_masks=True)) == counts


class Model(LightningModule):
    """Sums what it is given into one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[str]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.seen.append(batch["names"])
        return (self.weight - batch["latent_moments"].mean() - batch["prompt_embeds"].mean()).square()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val_loss", batch["latent_moments"].mean(), batch_size=len(batch["names"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(model: Model, data: EncodedImageData, root: Path, *callbacks: Any, ckpt_path: Any = None) -> Model:
    trainer = Trainer(
        default_root_dir=root, accelerator="cpu", max_steps=13, max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, callbacks=list(callbacks), num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return model


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_goes_on_in_the_middle_of_a_shard_with_the_same_bits(
    source: ImageCaptionData, tmp_path: Path, workers: int
) -> None:
    folder = encode(source, tmp_path)

    def make_data(**more: Any) -> EncodedImageData:
        return stream(folder, tmp_path, validation_shards_dir=folder, caption_dropout_rate=0.3, **more)

    whole = fit(Model(), make_data(), tmp_path / "whole")
    snapshots = ExactSnapshot(1)
    with pytest.raises(Killed):
        fit(Model(), make_data(num_workers=workers), tmp_path, snapshots, KillAt(10))  # in the second epoch
    snapshots.abandon()
    resumed = fit(Model(), make_data(num_workers=workers), tmp_path, ExactSnapshot(1), ckpt_path="latest")
    assert 0 < len(resumed.seen) < 13 and resumed.seen == whole.seen[-len(resumed.seen) :]
    assert torch.equal(resumed.weight, whole.weight)


def test_a_resumed_run_names_entries_that_changed(
    source: ImageCaptionData, make: Callable[..., ImageCaptionData], tmp_path: Path, folder: Path
) -> None:
    shards = encode(source, tmp_path)
    state = stream(shards, tmp_path, validation_shards_dir=shards).loader().state_dict()
    with warnings.catch_warnings(action="error"):
        stream(shards, tmp_path, validation_shards_dir=shards).loader().load_state_dict(state)
    next(folder.glob("*.txt")).write_text("another caption")
    again = make(cache_latents=True, cache_text_embeddings=True, train_batch_size=3)
    other = encode(again, tmp_path / "again")
    for held, said in ((shards, "entries"), (other, "entries .*, held-out entries")):
        with pytest.warns(UserWarning, match=rf"resume: {said} \({PICTURES} then, {PICTURES} now\); a change"):
            stream(other, tmp_path, validation_shards_dir=held).loader().load_state_dict(state)


def remote_copy(folder: str, name: str) -> str:
    address = f"memory://{name}"
    memory = fsspec.filesystem("memory")
    for path in Path(folder).iterdir():
        memory.pipe(f"/{name}/{path.name}", path.read_bytes())
    return address


def test_shards_at_another_address_are_fetched_once_and_mended(source: ImageCaptionData, tmp_path: Path) -> None:
    folder = encode(source, tmp_path)
    data = stream(remote_copy(folder, "mended"), tmp_path)
    assert_equal_entries(by_name(data.loader()), by_name(stream(folder, tmp_path).loader()))
    (cached, *others) = sorted((tmp_path / "fetched").rglob("*.tar"))
    assert len(others) == 5
    untouched = others[0].stat().st_mtime_ns
    cached.write_bytes(b"torn")
    assert_equal_entries(by_name(stream("memory://mended", tmp_path).loader()), by_name(data.loader()))
    assert cached.stat().st_size > 4 and others[0].stat().st_size and untouched <= others[0].stat().st_mtime_ns


def test_fetched_shards_stay_below_the_limit(source: ImageCaptionData, tmp_path: Path) -> None:
    folder = encode(source, tmp_path)
    size = max(path.stat().st_size for path in Path(folder).glob("*.tar"))
    data = stream(remote_copy(folder, "limited"), tmp_path, cache_limit_gb=3.5 * size / 1e9)
    assert len(by_name(data.loader())) == PICTURES
    assert 1 <= len(list((tmp_path / "fetched").rglob("*.tar"))) <= 4


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("harm", "what"), [(Path.unlink, "it is missing"), (damage, "its bytes are not those that were written")]
)
def test_a_bad_shard_is_named_and_stops_or_is_skipped(
    source: ImageCaptionData, tmp_path: Path, harm: Callable[[Path], object], what: str
) -> None:
    folder = encode(source, tmp_path)
    before = by_name(stream(folder, tmp_path).loader())
    bad = sorted(Path(folder).glob("64x64*.tar"))[1]
    harm(bad)
    with pytest.raises(DataError, match=f"the shard [^:]*{bad.name} cannot be used: {what}; copy it again"):
        by_name(stream(folder, tmp_path).loader())
    with pytest.warns(UserWarning, match=f"skipped: the shard [^:]*{bad.name} cannot be used: {what}$"):
        loaded = [batch["names"] for batch in stream(folder, tmp_path, on_bad_shard="skip").loader()]
    assert len(list(itertools.chain(*loaded))) == PICTURES  # as many steps, other images instead of its four
    assert len(set(itertools.chain(*loaded))) == PICTURES - 4 and set(itertools.chain(*loaded)) < before.keys()
    for other in Path(folder).glob("64x64*.tar"):
        other.unlink()
    with (
        pytest.raises(DataError, match=r"no shard of 64 x 64 pixels can be used, so there is nothing to skip to"),
        pytest.warns(UserWarning, match="skipped"),
    ):
        by_name(stream(folder, tmp_path, on_bad_shard="skip").loader())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"random_flip": True}, "random_flip wants mirrored latents, which .* does not hold; encode it with --flips"),
        ({"train_batch_size": 0}, "train_batch_size must be at least 1, got 0"),
        ({"caption_dropout_rate": 2.0}, "caption_dropout_rate must be in 0..1, got 2.0"),
        ({"shards_dir": "nowhere"}, "there is no nowhere/index.json: `lightning encode` writes it once all shards are"),
        ({"shards_dir": "nofs://x"}, r"nofs://x/index.json cannot be read \(ValueError: Protocol not known: nofs"),
    ],
)
def test_what_cannot_be_streamed_is_one_sentence(
    source: ImageCaptionData, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    folder = encode(source, tmp_path)
    with pytest.raises(DataError, match=message):
        stream(arguments.pop("shards_dir", folder), tmp_path, **arguments)


def test_entries_of_other_weights_are_refused(source: ImageCaptionData, tmp_path: Path) -> None:
    data = stream(encode(source, tmp_path), tmp_path)
    data._check_encoder(FakeEncoder(), data.shards_dir)
    with pytest.raises(DataError, match=r"was encoded with another vae than the model's \(vae-1 float32, not vae-2\)"):
        data._check_encoder(FakeEncoder(vae="vae-2"), data.shards_dir)


def test_an_index_that_is_torn_is_one_sentence(source: ImageCaptionData, tmp_path: Path) -> None:
    folder = Path(encode(source, tmp_path))
    for text, message in (("{", "cannot be read"), ('{"format": 9}', "is of format 9, this version reads 1")):
        (folder / "index.json").write_text(text)
        with pytest.raises(DataError, match=message):
            stream(str(folder), tmp_path)


def test_class_pictures_are_not_encoded(
    make: Callable[..., ImageCaptionData], tools: SimpleNamespace, folder: Path, tmp_path: Path
) -> None:
    tools.save(folder / "a.png")
    tools.save(tmp_path / "class" / "b.png")
    data = make(class_data_dir=str(tmp_path / "class"), class_prompt="a thing")
    with pytest.raises(DataError, match=r"shards hold no class images; take data.init_args.class_data_dir out"):
        samples_of(data.index())


def test_the_command_encodes_and_a_config_trains_on_the_shards(
    tools: SimpleNamespace, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(5):
        tools.save(folder / f"{number}.png", tools.picture(32, 32, seed=number), "a red cup")
    model = {
        "class_path": "StableDiffusionLoRA",
        "init_args": {
            "pretrained_model_name_or_path": str(make_pipeline(tmp_path / "sd")),
            "rank": 2,
            "max_train_steps": 3,
        },
    }
    trainer = {"accelerator": "cpu", "default_root_dir": str(tmp_path / "run"), "logger": False}
    data = {"class_path": "ImageCaptionData", "init_args": {"train_data_dir": str(folder), "resolution": 32}}
    config = tmp_path / "my.yaml"
    config.write_text(yaml.safe_dump({"model": model, "trainer": trainer, "data": data}))
    command = ["encode", "-c", str(config), "-o", str(tmp_path / "shards"), "--device", "cpu"]
    for said in ("1 shards written, 0 were there", "0 shards written, 1 were there"):
        with pytest.raises(SystemExit) as end:
            main(command)
        assert end.value.code == 0
        assert said in capsys.readouterr().out
    (tmp_path / "file").touch()
    for changes, said in (
        (["--device", "nothing"], "--device nothing is no device"),
        (["-o", str(tmp_path / "file")], "is a file; name a folder for the shards"),
        (["-o", "/proc/none/shards"], "cannot write shards into /proc/none/shards: .*; free some space, or name"),
    ):
        with pytest.raises(SystemExit) as end:
            main([*command, *changes])
        assert end.value.code == 1
        assert re.search(said, capsys.readouterr().err)
    base: Any = model["init_args"]
    of_control = {"class_path": "DiffusionControlNet", "init_args": {**base, "rank": None}}
    config.write_text(yaml.safe_dump({"model": of_control, "trainer": trainer, "data": data}))
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 1
    assert "a ControlNet makes or reads a condition for each image" in capsys.readouterr().err
    streamed = {
        "class_path": "EncodedImageData",
        "init_args": {"shards_dir": str(tmp_path / "shards"), "num_workers": 0},
    }
    config.write_text(yaml.safe_dump({"model": model, "trainer": trainer, "data": streamed}))
    with pytest.raises(SystemExit) as end:
        main(["fit", "-c", str(config)])
    assert end.value.code == 0
    assert (tmp_path / "run" / "lora.safetensors").is_file()
    with pytest.raises(SystemExit) as end:
        main(["validate", "-c", str(config)])
    assert end.value.code == 1
    assert "set data.init_args.validation_shards_dir" in capsys.readouterr().err
    config.write_text(yaml.safe_dump({"model": model, "trainer": trainer, "data": streamed}))
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 1
    assert "encode reads the images of an ImageCaptionData, got EncodedImageData" in capsys.readouterr().err
