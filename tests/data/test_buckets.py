"""Bucket shapes, placement and the table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_aigc.data.loader.buckets import BucketSettings, bucket_shapes, place
from lightning_aigc.errors import DataError


def kohya_shapes(resolution, low, high, steps):
    """sd-scripts' make_bucket_resolutions, copied in meaning."""
    shapes = {(resolution // steps * steps, resolution // steps * steps)}
    for side in range(low, high + 1, steps):
        other = min(high, resolution**2 // side // steps * steps)
        if other >= low:
            shapes |= {(side, other), (other, side)}
    return sorted(shapes)


@pytest.mark.parametrize("resolution", [512, 768, 1024])
def test_shapes_are_those_of_sd_scripts(resolution):
    assert bucket_shapes(BucketSettings(resolution)) == kohya_shapes(resolution, 256, 1024, 64)


settings = st.builds(
    lambda resolution, low, more, steps, enable, no_upscale: BucketSettings(
        resolution * 8, enable, low * 8, (low + more) * 8, steps * 8, no_upscale
    ),
    st.integers(1, 200),
    st.integers(1, 100),
    st.integers(0, 200),
    st.integers(1, 20),
    st.booleans(),
    st.booleans(),
)


@given(settings, st.integers(8, 20_000), st.integers(8, 20_000))
def test_every_picture_has_a_bucket_that_it_covers_and_that_the_vae_can_take(settings, width, height):
    shapes = bucket_shapes(settings)
    placement = place(width, height, settings, shapes)
    assert placement.width % 8 == placement.height % 8 == 0 and min(placement.width, placement.height) >= 8
    assert placement.spare[0] >= 0 and placement.spare[1] >= 0
    assert 0 <= placement.cropped_fraction < 1
    if not (settings.enable_bucket and settings.bucket_no_upscale):
        assert (placement.width, placement.height) in shapes
        assert placement.width * placement.height <= settings.resolution**2


def test_without_upscaling_a_small_picture_keeps_its_size():
    settings = BucketSettings(512, bucket_no_upscale=True)
    placement = place(200, 140, settings, bucket_shapes(settings))
    assert (placement.width, placement.height) == (192, 128)
    large = place(4000, 2000, settings, bucket_shapes(settings))
    assert large.width * large.height <= 512**2 and large.width > large.height


@pytest.mark.parametrize("resolution", [512, 768, 1024])
@pytest.mark.parametrize(("across", "down"), [(1, 1), (4, 1), (1, 4)])
def test_without_upscaling_every_larger_picture_of_a_buckets_ratio_gets_that_bucket(resolution, across, down):
    settings = BucketSettings(resolution, max_bucket_reso=4096, bucket_no_upscale=True)
    bucket = {(1, 1): (resolution, resolution), (4, 1): (2 * resolution, resolution // 2)}.get((across, down))
    bucket = bucket or (resolution // 2, 2 * resolution)
    for factor in range(resolution, 4 * resolution):
        placement = place(factor * across, factor * down, settings, [])
        assert (placement.width, placement.height) == bucket, factor


@pytest.mark.parametrize("no_upscale", [False, True])
def test_the_largest_side_is_cut_to_steps_too(no_upscale):
    settings = BucketSettings(512, max_bucket_reso=1000, bucket_no_upscale=no_upscale)
    for shape in [(4000, 1000), (1000, 4000)]:
        placement = place(*shape, settings, bucket_shapes(settings))
        assert (placement.width % 64, placement.height % 64) == (0, 0)


def test_without_buckets_everything_is_square():
    settings = BucketSettings(64, enable_bucket=False)
    assert bucket_shapes(settings) == [(64, 64)]


def test_a_resolution_below_the_smallest_side_is_served():
    assert (64, 64) in bucket_shapes(BucketSettings(64))
    assert len(bucket_shapes(BucketSettings(64, bucket_reso_steps=16))) > 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resolution": 500}, "resolution must be a positive multiple of 8 .*got 500; use 496"),
        ({"resolution": 0}, "got 0"),
        ({"bucket_reso_steps": 10}, "bucket_reso_steps"),
        ({"min_bucket_reso": 1024, "max_bucket_reso": 512}, "set data.init_args.max_bucket_reso: 1024 or more"),
    ],
)
def test_sizes_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(DataError, match=message):
        BucketSettings(**arguments)


def test_the_table_counts_every_picture_once(tools, make, folder):
    for number, size in enumerate([(64, 64)] * 5 + [(128, 64)] * 3 + [(64, 128)] * 2):
        tools.save(folder / f"{number}.png", tools.picture(*size))
    data = make(train_batch_size=2)
    rows = data.data_report.buckets
    assert [(row.images, row.batches) for row in sorted(rows, key=lambda row: row.width)] == [(2, 1), (5, 3), (3, 2)]
    assert data.data_report.batches_per_epoch == len(data.loader()) == 6
    for row in rows:
        assert f"{row.width} x {row.height}" in data.report()


def test_a_resolution_of_the_smallest_side_has_other_shapes_than_the_square() -> None:
    shapes = bucket_shapes(BucketSettings(256, min_bucket_reso=256))
    assert {(256, 256), (320, 192), (192, 320)} <= set(shapes)
    assert all(width * height <= 256**2 for width, height in shapes)
