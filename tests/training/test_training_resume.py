"""A resumed run goes on as if it had never stopped; another number of workers keeps data and LR."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from runs import Points, assert_same, linear_net, recipe, sample_loss, train
from torch import nn

from adaptive_platform.checkpoints.store import CheckpointStore
from adaptive_platform.controllers import ControllerConfig
from adaptive_platform.errors import CheckpointError
from adaptive_platform.settings import variants_of

NOISY = {
    "batch": {
        "kind": "noise_scale",
        "global_batch": 8,
        "max_batch": 20,
        "decide_every": "0.2 epochs",
        "min_observations": 2,
    },
    "lr_rule": {"kind": "adascale"},
    "schedule": {"kind": "step", "milestones": [0.3, 0.7], "warmup": "0.2 epochs"},
}


def steps_of(outcome):
    return [(r.step, r.lr, r.global_batch, r.gain, r.noise_scale) for r in outcome.watcher.steps]


@pytest.mark.parametrize("stop_after", [2, 5, 9])
@pytest.mark.parametrize("world_size", [1, 2])
def test_same_workers_give_the_same_run(tmp_path, stop_after, world_size):
    """F22, F23: learning rates, batches and weights equal those of the uninterrupted run."""
    data = Points(50)
    config = recipe("stop.epochs=3", **NOISY)
    whole = train(config, world_size=world_size, data=data)[0]
    first = train(
        config, world_size=world_size, data=data, run_dir=tmp_path, stop_after=stop_after
    )[0]
    assert first.run.interrupted
    assert first.run.progress.step == stop_after
    second = train(config, world_size=world_size, data=data, run_dir=tmp_path, must_resume=True)[0]
    assert steps_of(first) + steps_of(second) == steps_of(whole)
    assert first.ids + second.ids == whole.ids
    assert_same(second.weights, whole.weights, 0.0)


def test_a_resumed_run_knows_what_batch_it_began_with(tmp_path):
    data = Points(50)
    config = recipe("stop.epochs=3", **NOISY)
    first = train(config, data=data, run_dir=tmp_path, stop_after=9)[0]
    assert first.run.state.global_batch > 8
    second = train(config, world_size=2, data=data, run_dir=tmp_path, must_resume=True)
    assert [outcome.run.state.initial_batch for outcome in second] == [8, 8]


@pytest.mark.parametrize("workers_then", [1, 3])
def test_resize_in_mid_epoch_uses_the_rest_once(tmp_path, workers_then):
    """F08: stop two workers after 40 of 100 samples, go on with one or three."""
    data = Points(100)
    config = recipe("batch.global_batch=10", "stop.epochs=2")
    first = train(config, world_size=2, data=data, run_dir=tmp_path, stop_after=4)[0]
    second = train(config, world_size=workers_then, data=data, run_dir=tmp_path)[0]
    seen = [i for ids in first.ids for i in ids]
    assert len(seen) == 40
    rest = [
        i
        for r, ids in zip(second.watcher.steps, second.ids, strict=True)
        if r.epoch == 0
        for i in ids
    ]
    assert Counter(seen + rest) == Counter(range(100))
    again = [
        i
        for r, ids in zip(second.watcher.steps, second.ids, strict=True)
        if r.epoch == 1
        for i in ids
    ]
    assert sorted(again) == list(range(100))
    assert again != seen + rest


def test_resizes_do_not_change_the_run(tmp_path):
    """Batch, rate and statistics refer to samples, so the resized run follows the other."""
    data = Points(60)
    config = recipe("stop.epochs=2", **(NOISY | {"batch": {"kind": "fixed", "global_batch": 12}}))
    whole = train(config, world_size=2, data=data)[0]
    parts = []
    for world_size, stop_after in ((2, 3), (3, 3), (1, None)):
        parts.append(
            train(
                config, world_size=world_size, data=data, run_dir=tmp_path, stop_after=stop_after
            )[0]
        )
    ids = [sorted(step) for part in parts for step in part.ids]
    assert ids == [sorted(step) for step in whole.ids]
    # AdaScale's estimate depends on the split into micro-batches, hence not bit for bit; the
    # schedule and everything that counts samples is.
    assert parts[-1].run.progress.samples == whole.run.progress.samples
    assert parts[-1].run.progress.step == whole.run.progress.step


@pytest.mark.parametrize("worlds", [(1, 2, 1), (2, 1, 3)])
def test_fixed_batch_and_rate_are_equal_to_rounding_under_resizes(tmp_path, worlds):
    """F18, constant-batch semantics: weights of the resized run equal those of the plain one."""
    data = Points(60)
    config = recipe("batch.global_batch=12", "stop.epochs=2")
    whole = train(config, data=data)[0]
    for index, world_size in enumerate(worlds):
        stop = 3 if index < 2 else None
        part = train(config, world_size=world_size, data=data, run_dir=tmp_path, stop_after=stop)[0]
    assert_same(part.weights, whole.weights, 5e-6)


def test_checkpoint_loads_in_plain_pytorch_at_any_worker_count(tmp_path):
    """F18."""
    outcome = train(recipe(), world_size=2, run_dir=tmp_path)[0]
    newest = CheckpointStore(str(tmp_path)).saved()[-1]
    saved = torch.load(f"{newest.path}/state.pt", weights_only=True)
    model = linear_net()
    model.load_state_dict(saved["model"], strict=True)
    assert_same(dict(model.state_dict()), outcome.weights, 0.0)


EAGER = {
    "decide_every": "12 samples",
    "min_observations": 1,
    "hysteresis": 0.0,
    "max_growth": 1.15,
    "max_batch": 30,
}
DECIDES = {
    "fixed": {},
    "schedule": {"stages": [{"at": "1 epochs", "batch": 12}, {"at": "2 epochs", "batch": 20}]},
    "smith": {"decays": ["0.5 epochs", "2 epochs"], "factor": 2.0},
    "noise_scale": EAGER,
    "gsnr": EAGER,
    "goodput": EAGER | {"min_gain": 0.0},
    "abs": {"eigenvalue_drop": 1.001, "duration_epochs": 1},
    "absa": {"eigenvalue_drop": 1.001, "duration_epochs": 1, "adversarial_fraction": 0.8},
}
"""Settings with which each kind changes the batch before and after the stop at step 12."""


@pytest.mark.parametrize("kind", sorted(variants_of(ControllerConfig)))
def test_every_controller_resumes(tmp_path, kind):
    """F23 for each batch controller: the batches chosen after the resume are the same."""
    data = Points(60)
    config = recipe(
        "stop.steps=30",
        batch={"kind": kind, "global_batch": 6} | DECIDES[kind],
        lr_rule={"kind": "none" if kind == "smith" else "linear"},
    )

    def run(**how):
        return train(config, world_size=2, data=data, seconds_of=lambda b: 0.01 + 0.001 * b, **how)[
            0
        ]

    whole = run()
    first = run(run_dir=tmp_path, stop_after=12)
    second = run(run_dir=tmp_path)
    assert steps_of(first) + steps_of(second) == steps_of(whole)
    assert_same(second.weights, whole.weights, 0.0)
    before = {record.global_batch for record in first.watcher.steps}
    after = {record.global_batch for record in second.watcher.steps}
    if kind != "fixed":
        changed = [d.step for d in whole.watcher.decisions if d.new_batch != d.old_batch]
        assert min(changed) <= 12 < max(changed), (before, after)


def test_dropout_draws_the_same_after_a_resume(tmp_path):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.5), nn.Linear(10, 3))

    config = recipe("stop.steps=8")
    whole = train(config, model=net)[0]
    train(config, model=net, run_dir=tmp_path, stop_after=3)
    second = train(config, model=net, run_dir=tmp_path)[0]
    assert_same(second.weights, whole.weights, 0.0)


def test_foreign_checkpoints_are_refused_with_the_reason(tmp_path):
    train(recipe("stop.steps=2"), run_dir=tmp_path, classes=("a", "b", "c"))

    def other():
        return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 3))

    with pytest.raises(CheckpointError, match=r"another model.*0\.weight \(10, 6\) instead of"):
        train(recipe(), run_dir=tmp_path, model=other, classes=("a", "b", "c"))
    with pytest.raises(CheckpointError, match=r"classes a, b, c are not the data's a, c, b"):
        train(recipe(), run_dir=tmp_path, classes=("a", "c", "b"))
    with pytest.raises(CheckpointError, match="made with 40 training samples, the data has 44"):
        train(recipe(), world_size=2, run_dir=tmp_path, data=Points(44), classes=("a", "b", "c"))


def test_resume_before_the_first_checkpoint_begins_anew_and_says_so(tmp_path):
    """Killed early, a directory must not be lost for resuming."""
    outcome = train(recipe("stop.steps=2"), world_size=2, run_dir=tmp_path, must_resume=True)[0]
    assert outcome.run.progress.step == 2
    assert any("starting from the beginning" in e.text for e in outcome.watcher.events)


def test_another_optimizer_starts_anew_and_says_so(tmp_path):
    train(recipe("stop.steps=3"), run_dir=tmp_path)
    second = train(recipe("stop.steps=5", "optimizer.kind=adamw"), run_dir=tmp_path)[0]
    assert second.run.progress.step == 5
    assert any("optimizer.kind was sgd" in e.text for e in second.watcher.events)


def test_full_storage_is_told_and_training_goes_on(tmp_path, monkeypatch):
    real = CheckpointStore.save

    def full(self, state, step):
        if step == 10:
            raise OSError(28, "No space left on device")
        return real(self, state, step)

    monkeypatch.setattr(CheckpointStore, "save", full)
    outcome = train(recipe("checkpoint.every=5 steps", "stop.steps=12"), run_dir=tmp_path)[0]
    assert any("No space left" in e.text for e in outcome.watcher.events)
    assert [s.step for s in CheckpointStore(str(tmp_path)).saved()] == [5, 12]


def test_models_that_differ_start_from_rank_zero():
    made = iter(range(10))

    def unseeded():
        torch.manual_seed(100 + next(made))
        return nn.Linear(6, 3)

    outcomes = train(recipe("stop.steps=1"), world_size=2, model=unseeded)
    assert_same(outcomes[0].weights, outcomes[1].weights, 0.0)


def test_evaluation_covers_the_held_out_set_exactly():
    held_out = Points(37, seed=9)
    for world_size in (1, 3):
        outcome = train(recipe("stop.epochs=1"), world_size=world_size, eval_data=held_out)[0]
        (record,) = outcome.watcher.evaluations
        model = linear_net()
        model.load_state_dict(outcome.weights)
        right = (model(held_out.inputs).argmax(1) == held_out.labels).float().mean()
        assert record.samples == 37
        assert record.accuracy == pytest.approx(float(right), abs=1e-6)


def test_target_ends_the_run_early():
    outcome = train(recipe("stop.epochs=50", "stop.target=0.4"), eval_data=Points(40))[0]
    assert outcome.run.progress.epoch < 50
    assert outcome.watcher.evaluations[-1].accuracy >= 0.4


def normalized_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("stop_after", [3, 5])
def test_resume_with_batch_norm_and_evaluation_is_bit_identical(tmp_path, stop_after):
    """Evaluations and checkpoints on the way leave no trace; a due evaluation is not lost."""
    data, held_out = Points(40), Points(30, seed=5)
    config = recipe("stop.epochs=3", "report.evaluate_every=1 epochs")
    settings = {"world_size": 2, "data": data, "eval_data": held_out, "model": normalized_net}
    whole = train(config, **settings)[0]
    first = train(config, **settings, run_dir=tmp_path, stop_after=stop_after)[0]
    second = train(config, **settings, run_dir=tmp_path)[0]
    assert_same(second.weights, whole.weights, 0.0)
    scores = [(e.step, e.accuracy, e.loss) for e in whole.watcher.evaluations]
    both = [*first.watcher.evaluations, *second.watcher.evaluations]
    assert [(e.step, e.accuracy, e.loss) for e in both] == scores


def test_another_seed_is_refused(tmp_path):
    train(recipe("stop.steps=2"), run_dir=tmp_path)
    with pytest.raises(CheckpointError, match="seed = 9, the run was made with seed 3"):
        train(recipe("seed=9"), run_dir=tmp_path)


def test_the_base_batch_is_that_of_the_beginning(tmp_path):
    """Overriding the start batch on resume must not halve the learning rate."""
    adaptive = {
        "batch": {"kind": "noise_scale", "global_batch": 8, "max_batch": 32},
        "lr_rule": {"kind": "linear"},
    }
    train(recipe("stop.steps=2", **adaptive), run_dir=tmp_path)
    second = train(recipe("stop.steps=4", "batch.global_batch=16", **adaptive), run_dir=tmp_path)[0]
    for record in second.watcher.steps:
        assert record.lr == pytest.approx(0.1 * record.global_batch / 8)


def test_the_best_is_saved_when_it_is_scored(tmp_path):
    config = recipe("checkpoint.every=1000 steps", "stop.epochs=4", "checkpoint.keep_last=1")
    outcome = train(config, eval_data=Points(40), run_dir=tmp_path)[0]
    saved = [s.step for s in CheckpointStore(str(tmp_path)).saved()]
    assert outcome.run.state.best_step in saved


class Mixtures(Points):
    """Targets are probabilities, of which no prediction is right or wrong."""

    def __getitem__(self, index):
        return self.inputs[index], self.inputs[index, :3].softmax(0)


def test_without_an_accuracy_the_lowest_loss_is_the_best(tmp_path):
    """The rate is far too high from the start, so that later losses are worse."""
    config = recipe(
        "checkpoint.every=1000 steps", "stop.epochs=4", "checkpoint.keep_last=1", "optimizer.lr=30"
    )
    outcome = train(config, data=Mixtures(40), eval_data=Mixtures(20, seed=1), run_dir=tmp_path)[0]
    scores = outcome.watcher.evaluations
    assert {score.accuracy for score in scores} == {None}
    best = min(scores, key=lambda score: score.loss)
    assert best is not scores[-1]
    assert outcome.run.state.best_step == best.step
    assert best.step in [saved.step for saved in CheckpointStore(str(tmp_path)).saved()]


def test_records_are_durable_before_the_checkpoint_that_stands_on_them(tmp_path, monkeypatch):
    """A run killed right after a checkpoint does not make the steps behind it again."""
    order = []
    real = CheckpointStore.save

    def save(self, state, step):
        order.append(("checkpoint", step))
        return real(self, state, step)

    monkeypatch.setattr(CheckpointStore, "save", save)
    config = recipe("checkpoint.every=5 steps", "stop.steps=10")
    outcome = train(config, run_dir=tmp_path)[0]
    assert [step for _, step in order] == [5, 10]
    assert len(outcome.watcher.kept) == 2
    assert all(kept >= step for kept, (_, step) in zip(outcome.watcher.kept, order, strict=True))


def test_steps_that_are_skipped_after_the_best_score_save_it_no_more(tmp_path, monkeypatch):
    saves = []
    save = CheckpointStore.save

    def counted(self, state, step):
        saves.append((step, state["run"]["skipped_in_a_row"]))
        return save(self, state, step)

    def loss(run, outputs, targets):
        bad = run.progress.step == 5 and run.progress.skipped_steps < 3
        return sample_loss(outputs, targets) * (torch.inf if bad else 1.0)

    monkeypatch.setattr(CheckpointStore, "save", counted)
    config = recipe("stop.epochs=2", "checkpoint.every=100 steps")
    (outcome,) = train(config, eval_data=Points(9), run_dir=tmp_path, loss=loss)
    assert [r.step for r in outcome.watcher.steps] == [1, 2, 3, 4, 5, 6, 6, 6, 6, 7]
    assert saves == [(5, 0), (7, 0)]
