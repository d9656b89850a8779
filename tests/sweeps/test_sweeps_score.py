"""A diverged trial in Tune's own schedulers: it loses against every other, and nothing is NaN."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from ray.tune.schedulers import TrialScheduler

from adaptive_platform.sweeps.schedulers import Asha, Median, Pbt
from adaptive_platform.sweeps.score import MODE, SCORE, WORST, score_of
from adaptive_platform.sweeps.space import LogUniform

SPACE = {"optimizer.lr": LogUniform(low=0.01, high=1.0)}
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]


class Trial(SimpleNamespace):
    """What the schedulers ask of Tune's trials."""

    status = "RUNNING"

    def __hash__(self) -> int:
        return hash(self.trial_id)

    def is_finished(self) -> bool:
        return False


def population(count: int) -> list[Trial]:
    keeper = SimpleNamespace(checkpoint_config=SimpleNamespace(num_to_keep=None))
    config = {"fields": {"optimizer.lr": 0.1}}
    return [
        Trial(
            trial_id=f"ab_{n}",
            experiment_tag=str(n),
            run_metadata=SimpleNamespace(checkpoint_manager=keeper),
            config=dict(config),
            evaluated_params={},
        )
        for n in range(count)
    ]


def report(loss: float, metric: str = "loss") -> dict:
    scores = {"accuracy": 0.9, "loss": loss}
    return {"percent": 30.0, "training_iteration": 1, **scores, SCORE: score_of(metric, scores)}


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@pytest.mark.parametrize("loss", NOT_FINITE)
def test_what_is_not_finite_is_the_worst(metric, loss):
    assert score_of(metric, {"accuracy": 0.9, "loss": loss}) == WORST
    assert score_of(metric, {"accuracy": 0.1, "loss": 1e20}) > WORST
    assert score_of(metric, {"loss": 1e40}) == WORST
    assert score_of(metric, {}) == WORST
    assert score_of("accuracy", {"accuracy": float("nan")}) == WORST


def test_more_is_better_for_either_metric():
    assert score_of("loss", {"loss": 0.5}) > score_of("loss", {"loss": 0.7})
    assert score_of("accuracy", {"accuracy": 0.7}) > score_of("accuracy", {"accuracy": 0.5})


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@pytest.mark.parametrize("loss", NOT_FINITE)
@pytest.mark.parametrize("kind", [Asha(), Median(min_trials=2)])
def test_a_diverged_trial_is_stopped(kind, loss, metric):
    scheduler = kind.build(SCORE, MODE, SPACE, 0)
    trials = population(4)
    controller = SimpleNamespace(get_live_trials=lambda: trials)
    told = []
    for at, trial in enumerate(trials):
        scheduler.on_trial_add(controller, trial)
        value = report(0.5 + at / 10 if at < 3 else loss, metric)
        told.append(scheduler.on_trial_result(controller, trial, value))
    assert told[0] == TrialScheduler.CONTINUE
    assert told[-1] == TrialScheduler.STOP


@pytest.mark.parametrize("kind", [Asha(), Median(min_trials=2)])
def test_a_diverged_trial_stops_no_other(kind):
    scheduler = kind.build(SCORE, MODE, SPACE, 0)
    controller = SimpleNamespace(get_live_trials=list)
    for at, trial in enumerate(population(4)):
        scheduler.on_trial_add(controller, trial)
        value = report(math.nan if at in (0, 2) else 0.5)
        told = scheduler.on_trial_result(controller, trial, value)
    assert told == TrialScheduler.CONTINUE


@pytest.mark.parametrize("loss", NOT_FINITE)
def test_a_diverged_trial_takes_over_a_strong_ones_weights(loss, monkeypatch):
    scheduler = Pbt(moves=("optimizer.lr",)).build(SCORE, MODE, SPACE, 0)
    trials = population(4)
    controller = SimpleNamespace(search_alg=None, get_trials=lambda: trials)
    looked = {}

    def look(trial, controller, upper, lower):
        looked[trial.trial_id] = (upper, lower)

    monkeypatch.setattr(scheduler, "_checkpoint_or_exploit", look)
    for at, trial in enumerate(trials):
        scheduler.on_trial_add(controller, trial)
        scheduler.on_trial_result(controller, trial, report(0.5 + at / 10 if at < 3 else loss))
    strong, weak = looked["ab_3"]
    assert [trial.trial_id for trial in strong] == ["ab_0"]
    assert [trial.trial_id for trial in weak] == ["ab_3"]
