"""Cadence: multiples crossed, run lengths in each unit, the scale-invariant clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_platform.progress import Duration, Progress, Unit
from adaptive_platform.training.cadence import crossed, is_over, schedule_time


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.sampled_from([0.25, 0.5, 1.0]))
def test_epoch_multiples_are_crossed_once_each(batches, every):
    progress = Progress(dataset_size=40)
    crossings = 0
    for batch in batches:
        after = progress.committed(min(batch, 40 - progress.cursor), batch, 1.0)
        crossings += crossed(Duration(every), progress, after)
        progress = after
    assert crossings <= progress.position / every + 1e-9
    assert crossings >= int(progress.position)


def test_end_of_an_epoch_is_crossed_even_where_steps_were_skipped():
    before = Progress(dataset_size=10, cursor=5)
    assert crossed(Duration(1.0), before, before.skipped(5))
    assert not crossed(Duration(1.0), before, before.skipped(4))


def test_lengths():
    done = Progress(dataset_size=10, epoch=2, step=7, samples=18)
    assert is_over(done, Duration(2.0), "samples", 4)
    assert not is_over(done, Duration(2.1), "samples", 4)
    assert is_over(done, Duration(7, Unit.STEPS), "samples", 4)
    assert not is_over(done, Duration(8, Unit.STEPS), "samples", 4)


def test_scale_invariant_time_counts_gains():
    """With gain 1 at the base batch it is plain time; a step of gain 2 is worth two."""
    progress = Progress(dataset_size=12)
    progress = progress.committed(4, 4, 1.0).committed(8, 8, 2.0)
    assert schedule_time(progress, Unit.EPOCHS, "scale_invariant", 4) == pytest.approx(1.0)
    assert schedule_time(progress, Unit.STEPS, "scale_invariant", 4) == pytest.approx(3.0)
    assert is_over(progress, Duration(3, Unit.STEPS), "scale_invariant", 4)
    assert not is_over(progress, Duration(1.1), "scale_invariant", 4)
