"""Spaces: ranges and conditions hold, grids are complete, what can't be meant is refused."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from adaptive_platform.sweeps.space import (
    AnyDimension,
    Choice,
    IntRange,
    LogUniform,
    RandomChooser,
    Uniform,
    check_space,
    draw,
    grid,
)

SPACE = {
    "optimizer.kind": Choice(values=("sgd", "lars", "lamb")),
    "optimizer.lr": LogUniform(low=0.01, high=10.0),
    "optimizer.trust_coefficient": Uniform(low=0.1, high=0.2, when={"optimizer.kind": "lars"}),
    "batch.global_batch": IntRange(low=8, high=64, when={"optimizer.kind": ("lars", "lamb")}),
}


def test_every_kind_is_read_from_a_file():
    read = TypeAdapter(AnyDimension).validate_python
    assert isinstance(read({"kind": "choice", "values": [1, "a", None]}), Choice)
    assert isinstance(read({"kind": "uniform", "low": 0, "high": 1}), Uniform)
    assert isinstance(read({"kind": "log_uniform", "low": 1, "high": 2}), LogUniform)
    assert isinstance(read({"kind": "int", "low": 1, "high": 2}), IntRange)


@given(st.integers(0, 10_000))
def test_conditions_decide_which_fields_are_drawn(seed):
    drawn = draw(SPACE, RandomChooser(np.random.default_rng(seed)))
    kind = drawn["optimizer.kind"]
    assert ("optimizer.trust_coefficient" in drawn) == (kind == "lars")
    assert ("batch.global_batch" in drawn) == (kind in ("lars", "lamb"))
    assert 0.01 <= drawn["optimizer.lr"] <= 10.0
    assert list(drawn) == [name for name in SPACE if name in drawn]


@given(st.integers(0, 1000), st.floats(1e-6, 1e3), st.floats(1.001, 1e4), st.booleans())
def test_draws_stay_inside(seed, low, factor, log):
    high = low * factor
    chooser = RandomChooser(np.random.default_rng(seed))
    assert low <= chooser.real("x", low, high, log=log) <= high
    first, last = math.ceil(low), math.ceil(low) + math.ceil(factor)
    assert first <= chooser.integer("x", first, last, log=log) <= last


def test_log_ranges_give_each_decade_the_same():
    chooser = RandomChooser(np.random.default_rng(0))
    drawn = np.array([chooser.real("x", 1e-4, 1.0, log=True) for _ in range(4000)])
    shares = np.histogram(np.log10(drawn), bins=4, range=(-4, 0))[0] / 4000
    assert np.abs(shares - 0.25).max() < 0.03
    whole = [chooser.integer("x", 1, 8, log=True) for _ in range(4000)]
    assert whole.count(1) > 3 * whole.count(8)  # ln 2 against ln 9/8
    assert set(whole) == set(range(1, 9))


def test_equal_seeds_draw_alike_and_others_do_not():
    def drawn(seed: int) -> list[dict]:
        chooser = RandomChooser(np.random.default_rng(seed))
        return [draw(SPACE, chooser) for _ in range(5)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_a_grid_holds_every_combination_once():
    space = {
        "a": Choice(values=("x", "y")),
        "b": Choice(values=(1, 2, 3), when={"a": "x"}),
        "c": Choice(values=(True, False)),
    }
    found = grid(space)
    wanted = [
        {"a": "x", "b": b, "c": c} for b, c in itertools.product((1, 2, 3), (True, False))
    ] + [{"a": "y", "c": c} for c in (True, False)]
    assert found == wanted


def test_a_grid_of_a_range_is_refused():
    with pytest.raises(ValueError, match=r"space.optimizer.lr.kind = log_uniform.*must be choice"):
        grid(SPACE)


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (
            {"b": Choice(values=(1,), when={"a": 1})},
            "names a, which is no field of the space above",
        ),
        (
            {"a": Choice(values=("x",)), "b": Choice(values=(1,), when={"a": "z"})},
            "space.b.when.a = z: it is never chosen",
        ),
        (
            {"b": Choice(values=(1,), when={"a": "x"}), "a": Choice(values=("x",))},
            "above it",
        ),
    ],
)
def test_conditions_that_can_never_hold_are_refused(space, said):
    with pytest.raises(ValueError, match=said):
        check_space(space)


@pytest.mark.parametrize(
    "words",
    [
        {"kind": "uniform", "low": 2, "high": 1},
        {"kind": "log_uniform", "low": 0, "high": 1},
        {"kind": "int", "low": 0, "high": 4, "log": True},
        {"kind": "int", "low": 4, "high": 4},
        {"kind": "choice", "values": []},
        {"kind": "normal", "mean": 0},
    ],
)
def test_impossible_dimensions_are_refused(words):
    with pytest.raises(ValueError, match=r"."):
        TypeAdapter(AnyDimension).validate_python(words)


@given(st.floats(-1e6, 1e6))
def test_the_nearest_value_inside(value):
    assert 1.0 <= Uniform(low=1, high=2).inside(value) <= 2.0
    assert IntRange(low=1, high=5).inside(value) in range(1, 6)
    nearest = Choice(values=(32, 64, 128)).inside(value)
    assert abs(nearest - value) == min(abs(known - value) for known in (32, 64, 128))
