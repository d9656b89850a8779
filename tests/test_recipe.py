"""Recipes: read, overridden, refused and written back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_platform.errors import UserError
from adaptive_platform.optimizers import OptimizerConfig
from adaptive_platform.progress import Duration, Progress, Unit
from adaptive_platform.recipe import Recipe, load_recipe, shipped_recipes
from adaptive_platform.settings import variants_of


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_is_valid_and_survives_yaml(name):
    import yaml

    recipe = load_recipe(name)
    assert recipe.name == name
    assert load_recipe(yaml.safe_load(recipe.to_yaml())) == recipe


def test_choosing_a_kind_drops_the_fields_of_the_old_one():
    recipe = load_recipe("quickstart", ["batch.kind=fixed", "batch.global_batch=100"])
    assert recipe.batch.kind == "fixed"
    assert recipe.batch.global_batch == 100


@pytest.mark.parametrize("kind", sorted(variants_of(OptimizerConfig)))
def test_every_optimizer_can_be_chosen_by_its_kind_alone(kind):
    assert load_recipe("quickstart", [f"optimizer.kind={kind}"]).optimizer.kind == kind


def test_numbers_of_the_old_kind_do_not_stay():
    """AdamW must not inherit SGD's learning rate; the batch and its bounds mean the same to all."""
    chosen = load_recipe("quickstart", ["optimizer.kind=adamw"]).optimizer
    assert chosen == type(chosen)()
    batch = load_recipe("quickstart", ["batch.kind=gsnr"]).batch
    assert (batch.global_batch, batch.max_batch) == (32, 128)


def test_kind_wins_wherever_it_stands_among_the_words():
    words = ["optimizer.momentum=0.5", "optimizer.kind=lars"]
    for order in (words, words[::-1]):
        optimizer = load_recipe("quickstart", order).optimizer
        assert (optimizer.kind, optimizer.momentum) == ("lars", 0.5)


def test_one_length_takes_the_place_of_the_other():
    assert load_recipe("quickstart", ["stop.steps=7"]).stop.horizon == Duration(7, Unit.STEPS)
    both = ["stop.steps=7", "stop.epochs=1"]
    assert load_recipe("quickstart", both).stop.horizon == Duration(1.0)
    with pytest.raises(UserError, match="either epochs or steps"):
        load_recipe("quickstart", ["stop={steps: 7, epochs: 1}"])


def test_recipes_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load_recipe("quickstart").seed = 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["batch.global_batch=0"], r"batch\.global_batch = 0: .*greater than or equal to 1"),
        (["batch.globl_batch=8"], r"batch\.globl_batch: .*Did you mean `batch\.global_batch`"),
        (["seed=x"], r"seed = 'x'"),
        (["optimizer.lr=.nan"], r"optimizer\.lr = nan"),
        (["data={kind: parquet}"], r"data\.train is missing"),
        (["batch=5"], r"batch"),
        (["workers.x=5"], r"workers"),
        (["precision.dtype=int8"], r"precision\.dtype = 'int8'"),
        (["reducer.kind=taurus"], r"reducer\.kind = taurus: must be one of .*torus"),
    ],
)
def test_what_is_wrong_is_said(words, message):
    with pytest.raises(UserError, match=message):
        load_recipe("quickstart", words)


@given(st.text(max_size=30))
def test_any_word_is_read_or_refused_by_name(text):
    try:
        load_recipe("quickstart", [text])
    except UserError as error:
        assert str(error)


@given(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.lists(st.integers(), max_size=3),
        st.dictionaries(st.text(max_size=3), st.integers()),
    ),
    st.sampled_from(sorted(Recipe.model_fields)),
)
def test_any_value_of_any_field_is_read_or_refused(value, name):
    try:
        load_recipe({"name": "x", "stop": {"epochs": 1}, name: value})
    except UserError as error:
        assert str(error)


def test_durations():
    assert Duration.parse(2) == Duration(2.0, Unit.EPOCHS)
    assert Duration.parse("100 steps") == Duration(100.0, Unit.STEPS)
    assert str(Duration.parse("1e3 samples")) == "1000 samples"
    for bad in ("-1 epochs", "soon", "5 parsecs", True, None, [1], "1e400 steps", "5e-324"):
        with pytest.raises(ValueError, match="write a number"):
            Duration.parse(bad)
    with pytest.raises(TypeError, match="units differ"):
        Duration(1, Unit.STEPS) - Duration(1, Unit.EPOCHS)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=40))
def test_progress_keeps_its_books(steps):
    progress = Progress(dataset_size=30)
    consumed_in_all = trained = 0
    for batch, counts in steps:
        consumed = min(batch, 30 - progress.cursor)
        progress = (
            progress.committed(consumed, consumed, 1.5) if counts else progress.skipped(consumed)
        )
        consumed_in_all += consumed
        trained += consumed if counts else 0
    assert progress.epoch * 30 + progress.cursor == consumed_in_all
    assert progress.samples == trained
    assert progress.step + progress.skipped_steps == len(steps)
    assert progress.scale_invariant_steps == pytest.approx(1.5 * progress.step)
    assert Progress(**progress.state_dict()) == progress


@given(st.floats(1e-5, 1e12), st.sampled_from(list(Unit)))
def test_durations_keep_all_digits_in_a_recipe(value, unit):
    """A milestone that moved on the way through recipe.yaml would be another learning rate."""
    assert Duration.parse(str(Duration(value, unit))) == Duration(value, unit)


def test_paths_are_text():
    for text in ("/tmp/run #1", "/tmp/a: b", "2024", "yes"):
        assert load_recipe("quickstart", [f"out={text}"]).out == text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: Stra\xdfe".encode("latin-1"), "can't be read as UTF-8"),
        ("name: x".encode("utf-16"), "can't be read as UTF-8"),
        (b"a: &x {b: *x}", "contains itself"),
        (b"- 1\n- 2", "a YAML mapping"),
        (b"name: [", "not valid YAML"),
    ],
)
def test_files_that_are_no_recipes_are_refused(tmp_path, content, message):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_recipe(path)
    with pytest.raises(UserError, match="no file of that name"):
        load_recipe("x" * 5000)
