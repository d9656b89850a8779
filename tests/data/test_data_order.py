import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from adaptive_platform.data.order import EpochOrders, global_order, sample_seeds


@given(st.integers(0, 2**40), st.integers(0, 1000), st.integers(0, 300))
def test_a_permutation_and_a_pure_function(seed, epoch, size):
    np.random.seed(1)
    order = global_order(seed, epoch, size)
    np.random.seed(2)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(size))
    assert np.array_equal(order, global_order(seed, epoch, size))


def test_epochs_and_seeds_differ():
    orders = [tuple(global_order(seed, epoch, 50)) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 9


def test_the_order_of_a_seed_is_part_of_the_contract():
    assert global_order(7, 3, 8).tolist() == [3, 5, 0, 4, 2, 7, 1, 6]


def test_orders_remembered_equal_orders_computed_in_any_sequence():
    orders = EpochOrders(5, 20)
    for epoch in (0, 1, 0, 3, 2, 0, 1):
        assert np.array_equal(orders[epoch], global_order(5, epoch, 20))


def test_sample_seeds_depend_on_seed_epoch_and_sample_only():
    ids = np.arange(100)
    seeds = sample_seeds(1, 2, ids)
    assert len(set(seeds)) == 100
    assert sample_seeds(1, 2, ids[[40, 7]]) == [seeds[40], seeds[7]]
    assert not set(seeds) & set(sample_seeds(1, 3, ids))
    assert not set(seeds) & set(sample_seeds(2, 2, ids))
