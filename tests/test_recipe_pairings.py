"""Choices that are right alone and refused together, with the reason and the way out."""

from __future__ import annotations

import pytest

from adaptive_platform.errors import UserError
from adaptive_platform.recipe import load_recipe

SMITH = "batch={kind: smith, decays: [1 epochs]}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([SMITH], r"quickstart: lr_rule\.kind = adascale: .*smith.*must be none"),
        ([SMITH, "lr_rule.kind=none"], r"schedule\.kind = cosine: .*decay twice.*constant"),
        (
            ["lr_rule={kind: legw, warmup_epochs: 2}"],
            r"lr_rule\.warmup_epochs = 2: .*schedule\.warmup = 0 epochs; make the two equal",
        ),
        (["momentum_rule.kind=correct"], r"momentum_rule\.kind = correct: .*keep or hold_noise"),
        (
            ["momentum_rule.kind=hold_noise", "optimizer.momentum=0"],
            r"momentum_rule\.kind = hold_noise: optimizer\.kind = sgd has no momentum",
        ),
        (
            ["statistics.preconditioned=true"],
            r"statistics\.preconditioned = true: optimizer\.kind = sgd keeps no average",
        ),
        (["vr={gamma: 0}"], r"vr\.gamma = 0: .*greater than 0"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(words, message):
    with pytest.raises(UserError, match=message):
        load_recipe("quickstart", words)


@pytest.mark.parametrize(
    "words",
    [
        [SMITH, "lr_rule.kind=none", "schedule={kind: constant, warmup: 1 epochs}"],
        ["lr_rule={kind: legw, warmup_epochs: 1}", "schedule.warmup=1 epochs"],
        ["momentum_rule.kind=correct", "optimizer.kind=lars"],
        ["momentum_rule.kind=hold_noise", "optimizer.kind=adamw"],
        ["vr={every: 10}", "optimizer.kind=lamb"],
        ["statistics.preconditioned=true", "optimizer.kind=adamw"],
        ["statistics.preconditioned=false"],
    ],
)
def test_what_makes_sense_is_let_through(words):
    recipe = load_recipe("quickstart", words)
    import yaml

    assert load_recipe(yaml.safe_load(recipe.to_yaml())) == recipe
