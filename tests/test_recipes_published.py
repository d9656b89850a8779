"""The published systems: each recipe loads, has its card, says what the paper says, and runs."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from runs import train
from torch import nn

from adaptive_platform.controllers import Limits
from adaptive_platform.progress import Progress
from adaptive_platform.recipe import Recipe, load_recipe, published_recipes
from adaptive_platform.summary import GradientSummary

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "recipes"
SMALL = sorted(published_recipes())
SYSTEMS = {
    "firecaffe-2015", "das-2016", "jin-2016-gossip", "jin-2016-easgd", "keskar-2016",
    "keskar-2016-small", "goyal-2017", "akiba-2017", "codreanu-2017", "jia-2018", "lin-2018",
    "yao-2018", "mikami-2018", "ying-2018", "osawa-2018", "yamazaki-2019", "sun-2019",
    "osawa-2020", "johnson-2020", "jiang-2023", "ou-2024", "donatella-2024", "mccandlish-2018",
    "smith-2017", "pollux-2021",
}  # fmt: skip
IMAGENET = 1_281_167

PROPERTIES = {
    "firecaffe-2015": [
        "collectives/test_collectives_cost.py::test_parameter_server_against_tree",
        "collectives/test_collectives_plans_by_paper.py::test_tree_depth_and_messages",
    ],
    "das-2016": [
        "collectives/test_collectives_cost.py::test_exposed_time",
        "test_recipes_published.py::test_two_workers_take_the_single_workers_steps",
    ],
    "jin-2016-gossip": [
        "sync/test_sync_strategies.py::test_gossip_keeps_what_is_equal_and_never_widens_the_spread",
        "sync/test_sync_strategies.py::test_a_push_of_the_sheet",
    ],
    "jin-2016-easgd": [
        "sync/test_sync_strategies.py::test_elastic_averaging_of_the_sheet",
        "sync/test_sync_strategies.py::test_elastic_averaging_conserves_the_total",
    ],
    "keskar-2016": ["statistics/test_statistics_sharpness.py::test_worked_examples"],
    "keskar-2016-small": [
        "statistics/test_statistics_sharpness.py::test_parametric_plots_meet_both_solutions"
    ],
    "goyal-2017": [
        "optimizers/test_optimizers_sgd.py::test_the_stored_step_form_with_correction_is_the_same",
        "models/test_models_config.py::test_zero_gamma_blocks_start_as_their_shortcut",
        "test_recipes_published.py::test_published_rates",
    ],
    "akiba-2017": [
        "optimizers/test_optimizers_rmsprop_warmup.py::test_share_of_sgd",
        "optimizers/test_optimizers_rmsprop_warmup.py::test_worked_first_step",
        "optimizers/test_optimizers_schedules.py::test_slow_start_table",
    ],
    "codreanu-2017": [
        "optimizers/test_optimizers_schedules.py::test_cycles_start_high_and_end_at_zero",
        "training/test_training_averaging.py"
        "::test_an_ensemble_averages_the_probabilities_of_its_snapshots",
        "test_recipes_published.py::test_a_checkpoint_ends_every_cycle",
    ],
    "jia-2018": [
        "gradients/test_gradients_buckets.py::test_fusion_pools_of_the_sheet",
        "collectives/test_collectives_plans_by_paper.py::test_hybrid_changes_plan_at_the_threshold",
        "optimizers/test_optimizers_contract.py"
        "::test_norms_and_biases_are_left_alone_by_decay_and_the_others_shrink",
    ],
    "lin-2018": [
        "training/test_training_sync.py::test_one_local_step_is_synchronous_sgd",
        "sync/test_sync_strategies.py::test_local_sgd_averages_when_it_should",
    ],
    "yao-2018": [
        "controllers/test_controllers_absa.py"
        "::test_constant_curvature_doubles_every_ten_epochs_and_the_rate_follows",
        "controllers/test_controllers_absa.py"
        "::test_falling_curvature_grows_against_its_last_trigger",
    ],
    "mikami-2018": [
        "controllers/test_controllers_schedule.py"
        "::test_the_wide_schedule_of_the_paper_takes_2010_steps",
        "collectives/test_collectives_torus.py::test_two_by_two_example",
        "gradients/test_gradients_precision.py::test_label_smoothing_of_the_sheet",
    ],
    "ying-2018": [
        "optimizers/test_optimizers_lars.py"
        "::test_forms_coincide_at_a_constant_rate_and_part_when_it_moves",
        "optimizers/test_optimizers_schedules.py::test_polynomial_of_the_tpu_runs",
        "models/test_models_policies.py::test_the_sheet_example_of_two_shards",
    ],
    "osawa-2018": [
        "optimizers/test_natural_kronecker.py::test_a_step_is_a_dense_kronecker_solve",
        "optimizers/test_natural_functions.py::test_damping_is_split_by_the_traces",
        "optimizers/test_natural_functions.py::test_weights_are_shrunk_and_never_grown",
    ],
    "yamazaki-2019": [
        "optimizers/test_optimizers_multi_tensor.py::test_both_paths_take_the_same_step",
        "models/test_models_config.py"
        "::test_the_seed_decides_the_weights_and_the_global_state_stays",
        "optimizers/test_optimizers_schedules.py::test_polynomial_with_an_end",
    ],
    "sun-2019": [
        "collectives/test_collectives_sparse.py::test_worked_example_of_two_workers",
        "collectives/test_collectives_sparse.py::test_momentum_correction",
    ],
    "osawa-2020": [
        "optimizers/test_optimizers_schedules.py::test_sp_ngd_row_of_batch_32k",
        "optimizers/test_natural_functions.py"
        "::test_intervals_grow_like_fibonacci_while_nothing_changes",
        "optimizers/test_natural_functions.py::test_a_batch_norm_block_is_solved_in_closed_form",
        "data/test_data_mixing.py::test_running_mixup_with_constant_weight",
    ],
    "johnson-2020": [
        "statistics/test_statistics_noise_scale.py::test_worked_example_of_adascale",
        "controllers/test_controllers_lr_rules.py"
        "::test_adascale_reads_the_schedule_in_scale_invariant_steps_as_published",
    ],
    "jiang-2023": [
        "statistics/test_statistics_variance_reduction.py"
        "::test_first_refresh_gives_the_worked_example",
        "training/test_training_variance_reduction.py::test_gamma_one_is_plain",
    ],
    "ou-2024": [
        "optimizers/test_natural_fngd.py::test_the_worked_example",
        "optimizers/test_natural_fngd.py::test_a_repeated_sample_has_equal_coefficients",
    ],
    "donatella-2024": [
        "optimizers/test_natural_tngd.py::test_the_worked_example",
        "optimizers/test_natural_tngd.py::test_a_long_run_is_the_natural_gradient",
        "optimizers/test_natural_tngd.py::test_no_time_is_the_gradient",
    ],
    "mccandlish-2018": [
        "statistics/test_statistics_noise_scale.py::test_worked_example_of_the_noise_scale",
        "statistics/test_statistics_noise_scale.py::test_identical_gradients_have_no_noise",
    ],
    "smith-2017": [
        "controllers/test_controllers_smith.py"
        "::test_three_stages_take_1_24_instead_of_3_units_of_updates",
        "controllers/test_controllers_smith.py::test_noise_equals_that_of_the_decaying_recipe",
    ],
    "pollux-2021": [
        "controllers/test_controllers_goodput.py::test_scores_are_those_of_the_sheet",
        "controllers/test_controllers_goodput.py"
        "::test_accumulation_that_does_not_pay_is_not_chosen",
    ],
}
"""By recipe: the tests of what its sheet names as properties."""


def test_all_systems_are_there():
    assert set(SMALL) == SYSTEMS
    assert set(PROPERTIES) == SYSTEMS


@pytest.mark.parametrize("name", sorted(PROPERTIES))
def test_its_property_has_a_test(name):
    for found in PROPERTIES[name]:
        path, test = found.split("::")
        assert f"def {test}(" in (ROOT / "tests" / path).read_text(), found


@pytest.mark.parametrize("name", SMALL)
def test_both_forms_are_what_the_readme_says(name):
    small, large = load_recipe(name), load_recipe(f"{name}-imagenet")
    assert small.workers == 2
    assert small.data.kind == "digits"
    assert small.model.name == "resnet8_cifar"
    assert small.stop.epochs == 10  # equal for all: the table compares equal numbers of samples
    assert large.data.kind == "image_folder"
    assert large.data.image_size == 224
    assert large.model.name == "resnet50"
    for recipe in (small, large):
        assert 20 < len(recipe.description) < 120


@pytest.mark.parametrize("name", SMALL)
def test_its_card_has_every_section(name):
    path = FOLDER / f"{name.removesuffix('-small')}.md"
    text = path.read_text()
    places = [
        text.find(part)
        for part in (
            "# ", "**What it is.**", "**What we implement.**", "\n## Different from the paper\n",
            "\n## Published\n", "\n## Measured\n", "\n## On a cluster\n",
        )
    ]  # fmt: skip
    assert -1 not in places
    assert places == sorted(places)
    assert 25 <= len(text.splitlines()) <= 50
    assert f"train {name}-imagenet " in text
    assert "(README.md#the-table)" in text
    assert f"({path.name})" in (FOLDER / "README.md").read_text()


def rate(recipe: Recipe, epochs: float, noise: GradientSummary | None = None) -> float:
    """Learning rate after so many epochs of ImageNet, at the batch the recipe starts with."""
    batch = recipe.batch.start(Limits(dataset_size=IMAGENET)).global_batch
    rule = recipe.lr_rule
    progress = Progress(dataset_size=IMAGENET, samples=round(epochs * IMAGENET))
    factor = rule.factor(batch, rule.base_batch or batch, noise or GradientSummary(), progress)
    horizon = recipe.stop.horizon.value
    return recipe.optimizer.lr * factor * recipe.schedule.factor(epochs, horizon)


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("goyal-2017", {0: 0.1, 5: 3.2, 30: 0.32, 60: 0.032, 80: 0.0032}),
        ("akiba-2017", {0: 6.4, 40: 0.96, 70: 0.128, 85: 0.0128}),
        ("jin-2016-gossip", {0: 0.1, 30: 0.01, 60: 0.001}),
        ("ying-2018", {0: 0.0, 12: 34.0, 51: 34.0 / 4, 90: 0.0}),
        ("yamazaki-2019", {36: 13.0, 63: 13.0 * 0.2196, 90: 13.0 * 0.0025}),
        ("osawa-2020", {0: 0.03, 1.5: 0.03, 10: 0.0151659, 25.5: 0.00265165}),
        ("osawa-2018", {1: 0.025, 35: 0.025 * (1 - 34 / 52.5) ** 8}),
        ("smith-2017", {5: 3.2, 89: 3.2}),
        ("codreanu-2017", {5: 3.2, 59.9999: 0.0, 119.9999: 0.0}),
        ("firecaffe-2015", {0: 0.08, 45: 0.08 * math.sqrt(0.5)}),
    ],
)
def test_published_rates(name, rates):
    recipe = load_recipe(f"{name}-imagenet")
    for epochs, expected in rates.items():
        assert rate(recipe, epochs) == pytest.approx(expected, rel=2e-3, abs=1e-6), epochs


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("goyal-2017", 90 * 157),
        ("akiba-2017", 90 * 40),
        ("ying-2018", 90 * 40),
        ("yamazaki-2019", 1440),
        ("osawa-2018", 2737),
        ("osawa-2020", 1760),
        ("mikami-2018", 2010),
    ],
)
def test_published_number_of_steps(name, steps):
    recipe = load_recipe(f"{name}-imagenet")
    stages = [(0.0, recipe.batch.global_batch)]
    stages += [(s.at.value, s.batch) for s in getattr(recipe.batch, "stages", ())]
    ends = [start for start, _ in stages[1:]] + [recipe.stop.epochs]
    found = sum(
        (end - start) * math.ceil(IMAGENET / batch)
        for (start, batch), end in zip(stages, ends, strict=True)
    )
    # The natural-gradient papers count whole batches only and not the rest of an epoch.
    assert found == pytest.approx(steps, rel=0.03)


def test_a_checkpoint_ends_every_cycle():
    for name in ("codreanu-2017", "codreanu-2017-imagenet"):
        recipe = load_recipe(name)
        ends = recipe.schedule.cycle_ends(recipe.stop.epochs)
        every = recipe.checkpoint.every.value
        assert [end / every for end in ends] == pytest.approx([round(e / every) for e in ends])
        assert recipe.checkpoint.keep_last == len(ends) == recipe.schedule.cycles


def test_smith_doubles_once_and_the_rate_takes_the_rest():
    recipe = load_recipe("smith-2017-imagenet")
    assert recipe.batch.max_batch == 2 * recipe.batch.global_batch
    assert recipe.batch.factor == 10


# --- runs ------------------------------------------------------------------------------------


class Pictures(torch.utils.data.Dataset):
    """Coloured noise in four classes, one brightness each."""

    def __init__(self, size: int = 96) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(size) % 4
        self.images = torch.randn(size, 3, 6, 6, generator=generator)
        self.images += self.labels[:, None, None, None].float()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip


@cache
def shortened(name: str) -> Recipe:
    """The small form on tiny pictures; a large batch becomes all of them."""
    words = ["data={kind: python}", "reducer.timeout_seconds=20", "report.record_sample_ids=true"]
    return load_recipe(name, [*words, "checkpoint={every: 0 epochs}"])


@pytest.mark.parametrize("name", SMALL)
def test_it_runs_and_goes_on_with_another_number_of_workers(name, tmp_path):
    recipe, data = shortened(name), Pictures()
    classes = ("a", "b", "c", "d")
    first = train(
        recipe, world_size=2, data=data, model=network, run_dir=tmp_path, stop_after=4,
        eval_data=Pictures(20), classes=classes,
    )[0]  # fmt: skip
    assert first.run.interrupted
    assert first.run.progress.step == 4
    second = train(
        recipe, world_size=3, data=data, model=network, run_dir=tmp_path, must_resume=True,
        eval_data=Pictures(20), classes=classes,
    )  # fmt: skip
    for outcome in second:
        assert all(
            torch.isfinite(w).all() for w in outcome.weights.values() if w.is_floating_point()
        )
        for key, value in second[0].weights.items():
            torch.testing.assert_close(outcome.weights[key], value, rtol=0, atol=0)
    assert second[0].run.progress.epochs == pytest.approx(10)
    records = [*first.watcher.steps, *second[0].watcher.steps]
    assert not any(record.skipped for record in records)
    seen = [i for ids in (first.ids, second[0].ids) for step in ids for i in step]
    assert sorted(seen) == sorted(list(range(96)) * 10)
    losses = [record.loss for record in records]
    assert losses[-1] < losses[0]


def test_two_workers_take_the_single_workers_steps():
    """Das et al.: nothing about the numbers changes; without batch norm, which sees its share."""
    recipe = load_recipe("das-2016", ["data={kind: python}", "stop.epochs=2"])

    def plain() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Flatten(), nn.Linear(108, 8), nn.Tanh(), nn.Linear(8, 4))

    one, two = (
        train(recipe, world_size=workers, data=Pictures(), model=plain)[0] for workers in (1, 2)
    )
    assert two.lrs == one.lrs
    for name in one.weights:
        torch.testing.assert_close(two.weights[name], one.weights[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["osawa-2020", "sync={kind: gossip}"], r"optimizer\.kind = sp_ngd shares its curvature"),
        (["lin-2018", "vr={}"], "so vr has no variance"),
        (["smith-2017", "lr_rule.kind=linear"], "would undo that"),
        (["mccandlish-2018", "sync={kind: easgd}"], "is not measured"),
    ],
)
def test_what_does_not_compose_is_refused_with_the_reason(words, reason):
    with pytest.raises(ValueError, match=reason):
        load_recipe(words[0], words[1:])
