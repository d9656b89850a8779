import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from adaptive_platform.data.order import global_order
from adaptive_platform.data.shares import deal_of, microbatch_sizes, next_slice, positions_of
from adaptive_platform.errors import DataError, UserError

MINIMUM = st.integers(1, 4)


@given(st.data(), MINIMUM, st.integers(1, 200))
def test_slices_cover_an_epoch_whatever_the_batch_does(data, minimum, size):
    assume(size >= minimum)
    cursor = 0
    while cursor < size:
        batch = data.draw(st.integers(minimum, 2 * size + minimum))
        count = next_slice(cursor, batch, size, minimum)
        assert minimum <= count <= batch + minimum - 1
        if count != min(batch, size - cursor):
            assert cursor + count == size
        cursor += count
    assert cursor == size


def test_the_rest_that_is_too_small_is_merged_and_a_good_rest_is_not():
    assert next_slice(4, 4, 9, minimum=2) == 5
    assert next_slice(4, 4, 10, minimum=2) == 4
    assert next_slice(4, 4, 9, minimum=1) == 4
    assert next_slice(8, 4, 9, minimum=1) == 1


def test_what_cannot_work_is_refused_with_the_numbers():
    with pytest.raises(DataError, match=r"1 training samples.*at least 2.*batch norm"):
        next_slice(0, 4, 1, minimum=2)
    with pytest.raises(UserError, match=r"batch of 1 .*at least 2"):
        next_slice(0, 1, 10, minimum=2)


@given(st.integers(1, 9), st.integers(0, 500), st.integers(1, 100), MINIMUM)
def test_shares_are_disjoint_complete_balanced_and_never_too_small(world, cursor, count, minimum):
    assume(count >= minimum)
    shares = [positions_of(rank, world, cursor, count, minimum) for rank in range(world)]
    assert sorted(np.concatenate(shares)) == list(range(cursor, cursor + count))
    sizes = [len(share) for share in shares if len(share)]
    assert min(sizes) >= minimum
    assert max(sizes) - min(sizes) <= 1
    assert all(np.all(np.diff(share) > 0) for share in shares)
    assert len(sizes) == min(world, count // minimum), "as many workers as possible take part"


@given(st.integers(1, 6), st.lists(st.integers(12, 40), min_size=1, max_size=10))
def test_a_workers_stream_does_not_depend_on_the_batch(world, batches):
    for rank in range(world):
        cursor, stream = 0, []
        for batch in batches:
            stream += positions_of(rank, world, cursor, batch, minimum=2).tolist()
            cursor += batch
        assert stream == [p for p in range(cursor) if p % world == rank]


def test_fewer_samples_than_workers_stay_on_the_stream():
    shares = [positions_of(rank, 4, 6, 2, minimum=1).tolist() for rank in range(4)]
    assert shares == [[], [], [6], [7]]


def test_five_samples_on_three_workers_with_batch_norm_leave_one_out_of_the_step():
    shares = [positions_of(rank, 3, 10, 5, minimum=2).tolist() for rank in range(3)]
    assert shares == [[10, 12, 14], [11, 13], []]


@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=30),
    st.lists(st.integers(1, 5), min_size=1, max_size=8),
    st.integers(2, 120),
    st.integers(1, 2),
    st.integers(0, 5),
)
def test_every_sample_once_per_epoch_under_resizes_and_batch_changes(
    batches, worlds, size, minimum, seed
):
    seen = []
    cursor = step = 0
    while cursor < size:
        batch, world = batches[step % len(batches)], worlds[step % len(worlds)]
        count = next_slice(cursor, batch, size, minimum)
        order = global_order(seed, 0, size)
        for rank in range(world):
            seen += order[positions_of(rank, world, cursor, count, minimum)].tolist()
        cursor += count
        step += 1
    assert sorted(seen) == list(range(size))


@given(st.integers(0, 300), st.integers(1, 40), MINIMUM, st.integers(1, 6))
def test_microbatches_sum_are_equal_and_as_few_as_allowed(share, microbatch, minimum, at_least):
    assume(share == 0 or share >= minimum)
    sizes = microbatch_sizes(share, microbatch, minimum, at_least)
    assert sum(sizes) == share
    if share == 0:
        assert sizes == ()
        return
    assert min(sizes) >= minimum
    assert max(sizes) - min(sizes) <= 1
    most = share // minimum
    assert len(sizes) >= min(at_least, most)
    if len(sizes) < most:
        assert max(sizes) <= microbatch
    if len(sizes) > max(1, min(at_least, most)):
        assert -(-share // (len(sizes) - 1)) > microbatch, "one piece fewer would have fitted"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((10, 4, 1), (4, 3, 3)),
        ((8, 4, 1), (4, 4)),
        ((3, 2, 2), (3,)),
        ((5, 8, 1, 2), (3, 2)),
        ((3, 8, 2, 2), (3,)),
        ((1, 8, 1, 4), (1,)),
    ],
)
def test_microbatches_by_example(arguments, expected):
    assert microbatch_sizes(*arguments) == expected


def test_impossible_requests_are_our_own_mistakes():
    with pytest.raises(AssertionError, match="below the minimum of 2"):
        positions_of(0, 2, 0, 1, minimum=2)
    with pytest.raises(AssertionError, match="below the minimum of 2"):
        microbatch_sizes(1, 8, minimum=2)
    with pytest.raises(AssertionError, match="cursor 9 of 10"):
        next_slice(9, 4, 10, minimum=2)


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.integers(0, 500),
    st.integers(1, 200),
    MINIMUM,
)
def test_shares_by_parts_are_disjoint_complete_and_close_to_what_was_asked(
    parts, cursor, count, minimum
):
    assume(count >= minimum)
    deal = deal_of(parts)
    world = len(parts)
    shares = [positions_of(rank, world, cursor, count, minimum, deal) for rank in range(world)]
    assert sorted(np.concatenate(shares)) == list(range(cursor, cursor + count))
    assert all(len(share) == 0 or len(share) >= minimum for share in shares)
    even = [positions_of(rank, world, cursor, count, minimum).tolist() for rank in range(world)]
    if [share.tolist() for share in shares] == even:
        return  # the same for all, or a share was too small
    for share, part in zip(shares, parts, strict=True):
        assert abs(len(share) - count * part / sum(parts)) < world + 1


@given(st.integers(1, 9), st.integers(1, 5))
def test_equal_parts_deal_as_ever(world, parts):
    assert deal_of([parts] * world) == tuple(range(world))
