from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_platform.report.run_data import RunData
from adaptive_platform.report.series import (
    axes_of,
    buckets,
    column,
    extremes,
    full_steps,
    json_numbers,
    smooth,
    staircase,
    time_parts,
)

VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), max_size=80).map(np.array)


@given(values=VALUES, limit=st.integers(4, 30))
def test_downsampling_keeps_ends_and_extremes_within_the_limit(
    values: np.ndarray, limit: int
) -> None:
    chosen = extremes(values, limit)
    assert len(chosen) <= limit
    assert (np.diff(chosen) > 0).all()
    if len(values):
        assert chosen[0] == 0
        assert chosen[-1] == len(values) - 1
    if np.isfinite(values).any():
        assert np.nanmax(values[chosen]) == np.nanmax(values)
        assert np.nanmin(values[chosen]) == np.nanmin(values)


@given(levels=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20)), min_size=1, max_size=20))
def test_a_staircase_is_kept_exactly(levels: list[tuple[int, int]]) -> None:
    values = np.concatenate([np.full(length, float(level)) for level, length in levels])
    chosen = staircase(values, 100)
    rebuilt = values[chosen[np.searchsorted(chosen, np.arange(len(values)))]]
    assert (rebuilt == values).all()
    assert len(chosen) <= len(levels) + 1


def test_a_staircase_of_noise_is_downsampled() -> None:
    assert len(staircase(np.random.default_rng(0).normal(size=5000), 100)) <= 100


def test_smoothing_passes_over_nan_and_starts_unbiased() -> None:
    averaged = smooth(np.array([4.0, np.nan, 4.0, 0.0]), 1.0)
    assert averaged[0] == 4.0
    assert np.isnan(averaged[1])
    assert averaged[2] == pytest.approx(4.0)
    # weights 1, 1/2, 1/4 from the newest: (4/4 + 4/2 + 0) / (1/4 + 1/2 + 1)
    assert averaged[3] == pytest.approx(3.0 / 1.75)


@given(values=VALUES, limit=st.integers(1, 50))
def test_bucket_sums_add_up(values: np.ndarray, limit: int) -> None:
    last, (sums,) = buckets([values], limit)
    assert len(last) == len(sums) <= limit
    assert sums.sum() == pytest.approx(np.nansum(values), abs=1e-3)
    if len(values):
        assert last[-1] == len(values) - 1


def test_time_parts_add_up_to_the_step_and_are_never_negative() -> None:
    steps = pd.DataFrame(
        {"step_seconds": [1.0, 1.0], "data_seconds": [0.2, 0.9], "reduce_seconds": [0.3, 0.4]}
    )
    parts = time_parts(steps)
    assert parts["compute"].tolist() == [0.5, 0.0]
    assert parts["statistics"].tolist() == [0.0, 0.0]


def test_a_column_is_numbers_whatever_it_holds() -> None:
    frame = pd.DataFrame({"a": [1, None, "x", float("inf"), True]})
    np.testing.assert_array_equal(column(frame, "a"), [1.0, np.nan, np.nan, np.nan, 1.0])
    assert np.isnan(column(frame, "missing")).all()


def test_events_have_a_place_among_the_samples() -> None:
    steps = pd.DataFrame(
        {"step": [1, 2, 3], "samples_seen": [10, 30, 70], "time": [100.0, 160.0, 220.0],
         "step_seconds": [60.0, 60.0, 60.0]}
    )  # fmt: skip
    events = pd.DataFrame({"step": [2, 3], "time": [160.0, 250.0], "kind": ["a", "b"]})
    axes = axes_of(RunData(path="x", steps=steps), events)
    assert axes["samples"].tolist() == [30.0, 70.0]
    assert axes["steps"].tolist() == [2.0, 3.0]
    assert axes["minutes"].tolist() == [2.0, 3.5]


def test_numbers_for_json_are_short_and_finite() -> None:
    assert json_numbers([1 / 3, np.nan, np.inf, 12345678.0]) == [0.33333, None, None, 12346000.0]


def test_what_is_left_at_the_end_of_an_epoch_is_not_the_batch_in_force() -> None:
    steps = pd.DataFrame(
        {"epoch": [0, 0, 0, 1, 1, 1, 2, 3], "global_batch": [32, 32, 5, 32, 64, 40, 20, 20]}
    )
    assert full_steps(steps)["global_batch"].tolist() == [32, 32, 32, 64, 20, 20]
    assert len(full_steps(steps.head(0))) == 0
