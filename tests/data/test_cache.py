"""The caches on disk: what is in the key, damage, full disks, several processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from lightning_aigc.errors import DataError


def fill(tools, folder, count=6):
    for number in range(count):
        size = [(64, 64), (96, 60)][number % 2]
        tools.save(folder / f"{number}.png", tools.picture(*size, seed=number), f"thing {number}")


def run(data, encoder, epoch=0):
    data.prepare(encoder)
    loader = data.loader()
    loader.sampler.set_epoch(epoch)
    return list(loader)


CACHED = {"cache_latents": True, "cache_text_embeddings": True}


def entries(tmp_path, kind="latents"):
    return sorted((tmp_path / "cache" / kind).rglob("*.safetensors"))


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_cached_batch_holds_what_the_encoder_makes_of_the_uncached_one(tools, make, folder, monkeypatch, in_memory):
    if not in_memory:
        monkeypatch.setattr("lightning_aigc.data.cache.encoded_caches._MEMORY_SHARE", 0)
    fill(tools, folder)
    options = {"random_flip": True, "caption_dropout_rate": 0.3, "trigger_word": "zorp"}
    cached = make(**CACHED, **options)
    encoder = tools.FakeEncoder()
    for epoch in range(3):
        plain = run(make(**options), None, epoch)
        for batch, raw in zip(run(cached, encoder, epoch), plain, strict=True):
            pixels = raw.pop("pixel_values")
            assert torch.allclose(batch.pop("latent_moments"), encoder.encode_pixels(pixels), atol=1e-5)
            for name, expected in encoder.encode_captions(raw["captions"]).items():
                assert torch.equal(batch.pop(name), expected)
            assert batch.keys() == raw.keys()
            for key, value in raw.items():
                assert torch.equal(value, batch[key]) if isinstance(value, torch.Tensor) else value == batch[key]
    assert cached.caches.latents.in_memory == in_memory


def test_a_second_start_encodes_nothing(tools, make, folder):
    fill(tools, folder)
    first, second = tools.FakeEncoder(), tools.FakeEncoder()
    cold = run(make(**CACHED), first)
    warm = run(make(**CACHED), second)
    assert first.pictures_encoded == 6 and len(first.captions_encoded) == 6
    assert second.pictures_encoded == 0 and not second.captions_encoded
    assert all(torch.equal(a["latent_moments"], b["latent_moments"]) for a, b in zip(cold, warm, strict=True))


def test_repeats_and_equal_pictures_are_encoded_once(tools, make, folder):
    fill(tools, folder, 1)
    (folder / "copy.png").write_bytes((folder / "0.png").read_bytes())
    (folder / "copy.txt").write_text("thing 0")
    encoder = tools.FakeEncoder()
    run(make(**CACHED, num_repeats=5), encoder)
    assert encoder.pictures_encoded == 1 and len(encoder.captions_encoded) == 1


def change_content(tools, folder, arguments, encoder):
    before = (folder / "0.png").stat()
    tools.picture(seed=99).save(folder / "0.bmp")
    (folder / "0.bmp").replace(folder / "0.png")
    os.utime(folder / "0.png", ns=(before.st_atime_ns, before.st_mtime_ns))
    return 1


def change_vae(tools, folder, arguments, encoder):
    encoder.identity["vae"] = "vae-1 bfloat16"
    return 6


def change_resolution(tools, folder, arguments, encoder):
    arguments["resolution"] = 96
    return 6


def change_buckets(tools, folder, arguments, encoder):
    arguments["enable_bucket"] = False
    return 3  # the square ones are where they were


def change_flip(tools, folder, arguments, encoder):
    arguments["random_flip"] = True
    return 6


def change_name(tools, folder, arguments, encoder):
    (folder / "0.png").rename(folder / "new.png")
    (folder / "0.txt").rename(folder / "new.txt")
    return 0


def change_library(tools, folder, arguments, encoder):
    arguments["_library"] = "9.9"
    return 6


@pytest.mark.parametrize(
    "change",
    [change_content, change_vae, change_resolution, change_buckets, change_flip, change_name, change_library],
)
def test_exactly_what_changed_is_encoded_again(tools, make, folder, monkeypatch, change):
    fill(tools, folder)
    run(make(cache_latents=True), tools.FakeEncoder())
    arguments, encoder = {}, tools.FakeEncoder()
    expected = change(tools, folder, arguments, encoder)
    if library := arguments.pop("_library", None):
        monkeypatch.setattr("lightning_aigc.data.cache.encoded._DIFFUSERS", library)
    run(make(cache_latents=True, **arguments), encoder)
    assert encoder.pictures_encoded == expected


def test_a_changed_text_encoder_encodes_captions_again(tools, make, folder):
    fill(tools, folder)
    run(make(**CACHED), tools.FakeEncoder())
    encoder = tools.FakeEncoder(text="text-2")
    run(make(**CACHED), encoder)
    assert len(encoder.captions_encoded) == 6 and encoder.pictures_encoded == 0


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped bit", "text", "long header", "folder in the way"])
@pytest.mark.parametrize("kind", ["latents", "text"])
def test_a_damaged_file_is_encoded_again_and_counted(tools, make, folder, tmp_path, damage, kind):
    fill(tools, folder)
    good = run(make(**CACHED), tools.FakeEncoder())
    path = entries(tmp_path, kind)[2]
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[:-20])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "flipped bit":
        content[-5] ^= 4
        path.write_bytes(content)
    elif damage == "text":
        path.write_bytes(b"no tensors here at all")
    elif damage == "long header":
        path.write_bytes(b"\xff" * 8 + content[8:])
    else:
        path.unlink()
        path.mkdir()
        with pytest.raises(DataError, match="cannot write the cache"):
            run(make(**CACHED), tools.FakeEncoder())
        return
    encoder = tools.FakeEncoder()
    data = make(**CACHED)
    again = run(data, encoder)
    assert (encoder.pictures_encoded, len(encoder.captions_encoded)) == ((1, 0) if kind == "latents" else (0, 1))
    assert "1 of them were damaged" in data.report()
    for a, b in zip(good, again, strict=True):
        assert torch.equal(a["latent_moments"], b["latent_moments"])
        assert torch.equal(a["prompt_embeds"], b["prompt_embeds"])


def test_damage_during_training_is_an_error_that_names_the_file(tools, make, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_aigc.data.cache.encoded_caches._MEMORY_SHARE", 0)
    fill(tools, folder)
    data = make(**CACHED)
    data.prepare(tools.FakeEncoder())
    entries(tmp_path)[0].write_bytes(b"")
    with pytest.raises(DataError, match=r"latents/.*start again"):
        list(data.loader())


def test_a_cache_folder_that_cannot_be_made_is_refused_before_anything_is_encoded(tools, make, folder, tmp_path):
    fill(tools, folder, 1)
    (tmp_path / "file").write_text("in the way")
    data = make(**CACHED, cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot write the cache in .*file/cache.*data\.init_args\.cache_dir"):
        data.setup("fit")


@pytest.mark.parametrize("call", ["replace", "open"])
def test_a_full_disk_is_an_error_that_names_the_folder_and_leaves_no_litter(
    tools, make, folder, tmp_path, monkeypatch, call
):
    fill(tools, folder)

    stock = getattr(Path, call)

    def full(path, *arguments, **named):
        if call == "open" and arguments != ("xb",):  # a new file
            return stock(path, *arguments, **named)
        raise OSError(errno.ENOSPC, "No space left on device")

    data = make(**CACHED)
    data.setup("fit")
    monkeypatch.setattr(Path, call, full)
    with pytest.raises(DataError, match=r"No space left.*cache_dir"):
        data.prepare(tools.FakeEncoder())
    assert not list((tmp_path / "cache" / "latents").rglob("*.part"))


def test_without_caches_a_cache_folder_that_cannot_be_written_is_no_obstacle(tools, make, folder, tmp_path):
    fill(tools, folder, 2)
    (tmp_path / "file").write_text("in the way")
    data = make(cache_dir=str(tmp_path / "file" / "cache"))
    assert len(run(data, None)) > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_latents_that_are_not_finite_name_the_picture_and_the_cure(tools, make, folder, value):
    fill(tools, folder)
    encoder = tools.FakeEncoder()
    encoder.weight[0, 0, 0, 0] = value
    with pytest.raises(DataError, match=r"photos/\d\.png .* in float32 already: look at the image"):
        run(make(**CACHED), encoder)
    encoder.identity |= {"vae": "0123-torch.bfloat16"}
    with pytest.raises(DataError, match=r"photos/\d\.png .*; set model.init_args.vae_dtype: float32"):
        run(make(**CACHED), encoder)


def test_a_model_without_the_methods_is_refused_naming_them(tools, make, folder):
    fill(tools, folder, 1)
    with pytest.raises(DataError, match=r"lacks encoder_identity, encode_pixels, encode_captions.*cache_latents"):
        make(**CACHED).prepare(object())
    with pytest.raises(DataError, match=r"call prepare\(encoder\)"):
        make(**CACHED).loader()


def test_an_encoder_that_returns_a_wrong_shape_is_told_what_is_wanted(tools, make, folder):
    fill(tools, folder, 1)
    encoder = tools.FakeEncoder()
    encoder.encode_pixels = lambda pixels_B3HW: pixels_B3HW
    with pytest.raises(DataError, match=r"\[B, 2C, h, w\].*got shape \[1, 3, 64, 64\]"):
        run(make(**CACHED), encoder)


def test_each_rank_encodes_its_share_and_reads_the_rest(tools, make, folder):
    fill(tools, folder)
    encoders = [tools.FakeEncoder() for _ in range(2)]
    ranks = [make(**CACHED) for _ in range(2)]
    for rank, (data, encoder) in enumerate(zip(ranks, encoders, strict=True)):
        data._fill_caches(encoder, rank, 2)
    assert [encoder.pictures_encoded for encoder in encoders] == [3, 3]
    for data, encoder in zip(ranks, encoders, strict=True):
        data.caches.open(encoder, 2)
    assert [encoder.pictures_encoded for encoder in encoders] == [3, 3]
    assert len(list(ranks[0].loader(0, 2))) == len(list(ranks[1].loader(1, 2)))


def test_a_rank_on_a_node_of_its_own_encodes_what_it_cannot_see(tools, make, folder):
    fill(tools, folder)
    encoder = tools.FakeEncoder()
    make(**CACHED).prepare(encoder, rank=1, world_size=2)
    assert encoder.pictures_encoded == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts its processes by fork, to save the imports")
def test_processes_may_fill_one_cache_at_the_same_time(tools, make, folder, tmp_path):
    fill(tools, folder, 20)
    context = multiprocessing.get_context("fork")
    barrier, sums = context.Barrier(3), context.Queue()

    def work():
        data = make(**CACHED)
        barrier.wait(30)
        data.prepare(tools.FakeEncoder())
        sums.put(sum(float(batch["latent_moments"].double().sum()) for batch in data.loader()))

    processes = [context.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    results = {sums.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(results) == 1
    assert len(entries(tmp_path)) == 20
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_the_second_start_decodes_no_picture_and_an_edit_is_seen(tools, make, folder, monkeypatch):
    import lightning_aigc.data.images.verify as verify

    fill(tools, folder)
    monkeypatch.setattr(verify, "_RECENT_NS", -(10**18))  # files of this test are new; take them for old ones
    make().setup("fit")
    checked = []
    inspect = verify.inspect_picture
    monkeypatch.setattr(
        verify, "inspect_picture", lambda path, limit: checked.append(path.name) or inspect(path, limit)
    )
    make().setup("fit")
    assert checked == []
    (folder / "1.png").write_bytes(b"broken")
    assert dict(make().data_report.rejected).keys() == {"1.png"}
    assert checked == ["1.png"]


@pytest.mark.parametrize("keep_time", [False, True])
def test_an_edit_of_the_same_size_is_seen_even_with_the_old_time(tools, make, folder, monkeypatch, keep_time):
    monkeypatch.setattr("lightning_aigc.data.images.verify._RECENT_NS", -(10**18))
    path = tools.save(folder / "a.bmp", tools.picture(seed=1))
    run(make(cache_latents=True), tools.FakeEncoder())
    before = path.stat()
    time.sleep(0.02)
    tools.picture(seed=2).save(path)
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    encoder = tools.FakeEncoder()
    run(make(cache_latents=True), encoder)
    assert encoder.pictures_encoded == 1


def test_a_damaged_memory_of_checks_is_made_again(tools, make, folder, tmp_path):
    fill(tools, folder)
    make().setup("fit")
    for content in (b"", b"[1]", b'{"a": 3}', b"\xff"):
        for path in (tmp_path / "cache" / "pictures").iterdir():
            path.write_bytes(content)
        assert make().data_report.images_used == 6
