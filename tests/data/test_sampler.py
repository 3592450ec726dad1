"""The order of batches: pure in buckets, fair to ranks, the same for the same seed and epoch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_aigc.data.loader.sampler import BucketBatchSampler

sizes = st.lists(st.integers(1, 17), min_size=1, max_size=4)


def buckets_of(counts: list[int]) -> list[list[int]]:
    starts = [sum(counts[:at]) for at in range(len(counts))]
    return [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]


@given(sizes, st.integers(1, 5), st.integers(0, 3))
def test_one_process_sees_everything_once_in_batches_of_one_bucket(counts, batch_size, epoch):
    buckets = buckets_of(counts)
    sampler = BucketBatchSampler(buckets, [[] for _ in buckets], batch_size)
    sampler.set_epoch(epoch)
    plans = list(sampler)
    assert len(plans) == len(sampler)
    assert sorted(index for plan in plans for index in plan.samples) == list(range(sum(counts)))
    for plan in plans:
        assert any(set(plan.samples) <= set(bucket) for bucket in buckets)
        assert len(plan.samples) == plan.user_count <= batch_size


@given(sizes, st.integers(1, 4), st.integers(2, 5))
def test_ranks_take_as_many_steps_in_the_same_buckets_and_cover_everything(counts, batch_size, world_size):
    buckets = buckets_of(counts)
    ranks = [
        list(BucketBatchSampler(buckets, [[] for _ in buckets], batch_size, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(plans) for plans in ranks}) == 1
    seen: list[int] = []
    for step in zip(*ranks, strict=True):
        together = [index for plan in step for index in plan.samples]
        assert any(set(together) <= set(bucket) for bucket in buckets)
        assert len({len(plan.samples) for plan in step}) == 1
        seen += together
    assert set(seen) == set(range(sum(counts)))
    assert len(seen) == sum(-(-count // world_size) * world_size for count in counts)


def test_ranks_are_disjoint_when_the_pictures_divide():
    ranks = [list(BucketBatchSampler([list(range(24))], [[]], 3, rank=rank, world_size=4)) for rank in range(4)]
    seen = [index for plans in ranks for plan in plans for index in plan.samples]
    assert sorted(seen) == list(range(24))


def test_the_order_depends_on_seed_and_epoch_alone():
    def order(seed, epoch):
        sampler = BucketBatchSampler([list(range(30))], [[]], 4, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3) and order(1, 2) != order(2, 2)


@given(st.integers(0, 12), st.integers(0, 3))
def test_a_loaded_position_goes_on_with_the_very_next_batch(position, epoch):
    def fresh():
        return BucketBatchSampler([list(range(30)), list(range(30, 41))], [[], []], 4)

    whole = fresh()
    whole.set_epoch(epoch)
    expected = list(whole)[position:]
    resumed = fresh()
    resumed.load_state_dict(whole.state_dict(position))
    resumed.set_epoch(resumed.epoch)
    if position >= len(whole):
        assert resumed.epoch == epoch + 1 and len(list(resumed)) == len(whole)
    else:
        assert list(resumed) == expected
        assert list(resumed) == list(whole), "the epoch after the resumed one is whole"


@pytest.mark.parametrize(("ratio", "batch", "expected"), [(1.0, 4, 4), (0.5, 4, 2), (2.0, 3, 6)])
def test_a_batch_has_its_class_pictures_after_the_users(ratio, batch, expected):
    sampler = BucketBatchSampler([list(range(8 * batch))], [list(range(100, 107))], batch, ratio)
    for plan in sampler:
        assert plan.user_count == batch
        assert len(plan.samples) == batch + expected
        assert all(index >= 100 for index in plan.samples[batch:])


def class_counts(sampler: BucketBatchSampler, epoch: int) -> list[int]:
    sampler.set_epoch(epoch)
    return [len(plan.samples) - plan.user_count for plan in sampler]


@pytest.mark.parametrize(
    ("ratio", "batch", "in_a_batch", "in_all"),
    [(0.5, 1, {0, 1}, 50), (0.1, 4, {0, 1}, 10), (1.5, 1, {1, 2}, 150), (0.29, 1, {0, 1}, 29), (0.3, 3, {0, 1}, 30)],
)
@pytest.mark.parametrize("counts", [[100], [1, 37, 62], [5] * 20])
def test_a_ratio_that_does_not_divide_a_batch_holds_over_the_epoch(ratio, batch, in_a_batch, in_all, counts):
    class_buckets = [list(range(1000 + 50 * bucket, 1000 + 50 * bucket + 7)) for bucket in range(len(counts))]
    found = class_counts(BucketBatchSampler(buckets_of(counts), class_buckets, batch, ratio), 0)
    assert sum(found) == in_all
    assert set(found) <= in_a_batch, "spread over the batches"


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_ratio_below_one_an_epoch_holds_over_epochs_and_is_the_same_on_all_ranks(world_size):
    users = 3 * world_size
    ranks = [
        BucketBatchSampler([list(range(users))], [[100, 101]], 1, 0.1, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    found = [[class_counts(sampler, epoch) for epoch in range(20)] for sampler in ranks]
    assert all(each == found[0] for each in found), "each rank has as much to do in a step"
    assert sum(map(sum, found[0])) == 6 and max(map(sum, found[0])) == 1


@pytest.mark.parametrize("ratio", [0.3, 0.75, 1.0, 1.4])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_class_picture_is_used_once_before_any_comes_again(world_size, ratio):
    drawn: list[int] = []
    for epoch in range(9):
        by_draw: dict[int, int] = {}
        for rank in range(world_size):
            sampler = BucketBatchSampler([list(range(13))], [list(range(100, 117))], 2, ratio, 7, rank, world_size)
            sampler.set_epoch(epoch)
            for plan in sampler:
                by_draw |= dict(zip(plan.draws[plan.user_count :], plan.samples[plan.user_count :], strict=True))
        drawn += [by_draw[draw] for draw in sorted(by_draw, reverse=True)]
    for start in range(0, len(drawn) - 17, 17):
        assert sorted(drawn[start : start + 17]) == list(range(100, 117))


def test_no_draw_is_used_twice_in_an_epoch():
    draws = [
        draw
        for rank in range(2)
        for plan in BucketBatchSampler([[0] * 10, [1] * 6], [[2, 3], [4]], 2, 1.0, rank=rank, world_size=2)
        for draw in plan.draws
    ]
    assert len(draws) == len(set(draws))


def test_half_a_class_image_a_batch_is_one_in_every_other(tools, make, folder, tmp_path):
    for number in range(10):
        tools.save(folder / f"{number}.png")
        tools.save(tmp_path / "class" / f"{number}.png", tools.picture(seed=100 + number))
    data = make(class_data_dir=str(tmp_path / "class"), prior_ratio=0.5, train_batch_size=1)
    shown = [batch["is_prior"] for batch in data.loader()]
    assert sorted(shown) == [[False]] * 5 + [[False, True]] * 5
