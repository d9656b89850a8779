"""Sweep files: shipped ones are valid, words change what they name, mistakes are explained."""

from __future__ import annotations

import pytest
import yaml

from adaptive_platform.errors import UserError
from adaptive_platform.recipe import load_recipe
from adaptive_platform.sweeps.config import Sweep, load_sweep, shipped_sweeps

SMALL = {
    "recipe": "quickstart",
    "set": {"batch.kind": "fixed", "lr_rule.kind": "none"},
    "space": {"optimizer.lr": {"kind": "log_uniform", "low": 0.01, "high": 1.0}},
}


def changed(**fields) -> dict:
    return {**SMALL, **fields}


def test_what_ships():
    found = shipped_sweeps()
    assert {"warmup-lars", "natural-gradient", "controllers", "large-batch-ladder"} <= set(found)
    assert all(len(description) > 20 for description in found.values())


@pytest.mark.parametrize("name", sorted(shipped_sweeps()))
def test_every_trial_of_a_shipped_sweep_has_a_valid_recipe(name):
    sweep = load_sweep(name)
    assert sweep.name == name
    planned = sweep.searcher.planned(
        sweep.space, 40 if sweep.searcher.kind == "random" else None, 1
    )
    assert planned is not None
    recipes = [sweep.recipe_of(fields) for fields in planned]
    assert all(recipe.data.kind == "digits" for recipe in recipes)


def test_a_sweep_is_read_back_from_its_file():
    sweep = load_sweep("natural-gradient", ["budget.trials=3"])
    assert load_sweep(yaml.safe_load(sweep.to_yaml())) == sweep


def test_words_change_the_sweep_or_every_recipe():
    sweep = load_sweep(
        SMALL,
        ["budget.trials=4", "stop.epochs=2", "scheduler.kind=asha", "optimizer.momentum=0.5"],
    )
    assert sweep.budget.trials == 4
    assert sweep.scheduler.kind == "asha"
    recipe = sweep.recipe_of({"optimizer.lr": 0.125})
    assert recipe.stop.epochs == 2
    assert recipe.optimizer.momentum == 0.5
    assert recipe.optimizer.lr == 0.125


def test_a_word_for_a_field_of_the_space_fixes_it():
    sweep = load_sweep("warmup-lars", ["optimizer.lr=3"])
    assert "optimizer.lr" not in sweep.space
    assert sweep.recipe_of({"schedule.kind": "cosine"}).optimizer.lr == 3


def test_drawn_kinds_drop_the_numbers_of_the_old_kind():
    sweep = load_sweep(SMALL)
    recipe = sweep.recipe_of({"optimizer.kind": "lars", "optimizer.lr": 2.0})
    assert recipe.optimizer.kind == "lars"
    assert recipe.optimizer.lr == 2.0
    assert (
        recipe.optimizer.weight_decay
        == load_recipe(
            "quickstart", ["optimizer.kind=lars", "optimizer.lr=2"]
        ).optimizer.weight_decay
    )


@pytest.mark.parametrize("kind", ["sgd", "lars", "adamw"])
def test_what_is_set_for_all_trials_is_so_with_each_drawn_kind(kind):
    sweep = load_sweep(changed(set={"stop.epochs": 1}), ["optimizer.weight_decay=0.07"])
    assert sweep.recipe_of({"optimizer.kind": kind}).optimizer.weight_decay == 0.07


def test_a_population_is_scored_and_saved_at_each_look():
    space = {**SMALL["space"], "batch.global_batch": {"kind": "choice", "values": [32, 64]}}
    scheduler = {"kind": "pbt", "moves": ["optimizer.lr"], "every_percent": 25}
    sweep = load_sweep(changed(space=space, scheduler=scheduler), ["stop.epochs=8"])
    recipe = sweep.recipe_of({"optimizer.lr": 0.1, "batch.global_batch": 32})
    assert str(recipe.report.evaluate_every) == "2 epochs"
    assert str(recipe.checkpoint.every) == "2 epochs"


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (changed(space={}), ["space"]),
        (changed(shceduler={"kind": "asha"}), ["shceduler", "Did you mean `scheduler`"]),
        (changed(scheduler={"kind": "ahsa"}), ["scheduler.kind = ahsa", "Did you mean `asha`"]),
        (changed(searcher={"kind": "tpe"}), ["searcher.kind = tpe", "optuna"]),
        (changed(scheduler={"kind": "asha", "grace_percent": 0}), ["grace_percent = 0"]),
        (changed(budget={"trials": 0}), ["budget.trials = 0"]),
        (changed(metric="f1"), ["metric = 'f1'", "accuracy"]),
        (changed(set=["a=1"]), ["set = ['a=1']", "mapping, not a list"]),
        (changed(space=5), ["space = 5", "mapping"]),
        (changed(set={"out": "x"}), ["set.out", "sweep itself decides"]),
        (
            changed(set={"optimizer.lr": 1}),
            ["space.optimizer.lr", "under `set` as well"],
        ),
        (
            changed(scheduler={"kind": "pbt", "moves": ["optimizer.momentum"]}),
            ["scheduler.moves = optimizer.momentum", "no field of the space"],
        ),
    ],
)
def test_mistakes_in_a_sweep_file_are_explained(content, parts):
    with pytest.raises(UserError) as caught:
        load_sweep(content)
    for part in parts:
        assert part in str(caught.value)


def test_an_unknown_sweep_is_explained():
    with pytest.raises(
        UserError, match=r"sweep = controler: .*Did you mean `controllers`.*Shipped"
    ):
        load_sweep("controler")
    with pytest.raises(UserError, match=r"space\.optimizer\.lr: the space is changed in"):
        load_sweep("controllers", ["space.optimizer.lr=1"])


def test_a_field_of_the_space_that_does_not_exist_is_named():
    sweep = load_sweep(changed(space={"optimizer.lrate": {"kind": "choice", "values": [1]}}))
    with pytest.raises(UserError, match=r"optimizer.lrate: there is no such field"):
        sweep.recipe_of({"optimizer.lrate": 1})


def test_a_grid_larger_than_its_budget_is_refused():
    sweep = load_sweep("controllers", ["budget.trials=3"])
    with pytest.raises(UserError, match=r"budget.trials = 3: the grid has 8 combinations"):
        sweep.searcher.planned(sweep.space, sweep.budget.trials, 0)


def test_no_field_is_left_undocumented():
    for name, info in Sweep.model_fields.items():
        assert info.description, name
