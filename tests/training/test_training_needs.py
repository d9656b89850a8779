"""What controllers need and the loop supplies: layers, curvature, speed, adversaries, momentum."""

from __future__ import annotations

import json

import pytest
import torch
from runs import Points, assert_same, linear_net, recipe, sample_loss, train
from torch import nn
from torch.nn import functional as F

from adaptive_platform.collectives import Membership
from adaptive_platform.controllers import ControllerConfig, Need
from adaptive_platform.data import PythonConfig, wrap_dataset
from adaptive_platform.errors import UserError
from adaptive_platform.settings import variants_of
from adaptive_platform.statistics.hessian import hessian_vector_product, power_iteration
from adaptive_platform.training.curvature import PROBE_SAMPLES
from adaptive_platform.training.measuring import refuse_unmet_needs
from adaptive_platform.training.run import TrainingRun


def test_layers_add_up_to_the_whole_and_change_nothing():
    config = ["stop.steps=6", "microbatch=2"]
    plain = train(recipe(*config, "statistics.layers=false"), world_size=2)[0]
    both = train(recipe(*config), world_size=2)
    assert_same(plain.weights, both[0].weights, 0.0)
    state = both[0].run.state.estimator.state_dict()
    assert both[1].run.state.estimator.state_dict() == state
    assert len(state["layer_noise"]) == 4
    assert sum(state["layer_noise"]) == pytest.approx(state["noise_trace"], rel=1e-5)
    assert sum(state["layer_signal"]) == pytest.approx(state["signal_sqnorm"], rel=1e-4)
    last = both[0].watcher.steps[-1]
    assert last.gsnr is not None
    assert plain.watcher.steps[-1].gsnr is None
    assert (last.noise_trace, last.signal_sqnorm) == pytest.approx(
        (plain.watcher.steps[-1].noise_trace, plain.watcher.steps[-1].signal_sqnorm), rel=1e-4
    )


@pytest.mark.parametrize("bucket_mib", [0.0001, 25])
def test_layers_come_in_the_order_of_the_model(bucket_mib):
    """Each layer's S of the first step, from gradients taken one micro-batch at a time."""
    data = Points(40)
    outcome = train(
        recipe("stop.steps=1", "microbatch=2",
               f"reducer.bucket_mib={bucket_mib}"),
        world_size=2,
        data=data,
    )[0]  # fmt: skip
    model = linear_net()
    ids = outcome.watcher.steps[0].sample_ids
    parts = [share[i : i + 2] for share in ids for i in (0, 2)]
    gradients = []
    for part in parts:
        loss = F.cross_entropy(model(data.inputs[part]), data.labels[part])
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    noise = outcome.run.state.estimator.state_dict()
    for layer, of_layer in enumerate(zip(*gradients, strict=True)):
        stacked = torch.stack(of_layer)
        spread = stacked.square().flatten(1).sum(1).mean() - stacked.mean(0).square().sum()
        expected = float(spread) / (1 / 2 - 1 / 8)
        assert noise["layer_noise"][layer] / noise["weight"] == pytest.approx(expected, rel=1e-4)


def exact_top_eigenvalue(model, data, ids):
    parameters = list(model.parameters())
    loss = F.cross_entropy(model(data.inputs[ids]), data.labels[ids])
    first = torch.cat(
        [g.reshape(-1) for g in torch.autograd.grad(loss, parameters, create_graph=True)]
    )
    rows = [
        torch.cat(
            [r.reshape(-1) for r in torch.autograd.grad(entry, parameters, retain_graph=True)]
        )
        for entry in first
    ]
    values = torch.linalg.eigvalsh(torch.stack(rows).double())
    return float(max(values, key=abs))


@pytest.mark.parametrize(("world_size", "words"), [(1, ()), (3, ()), (3, ("microbatch=4",))])
def test_the_eigenvalue_at_the_end_of_an_epoch_is_that_of_the_probe(world_size, words):
    """Also in passes no larger than those of training."""
    data = Points(40)
    outcomes = train(
        recipe("stop.epochs=2", *words, batch={"kind": "abs", "global_batch": 10}),
        world_size=world_size,
        data=data,
    )
    assert len(data) < PROBE_SAMPLES  # so the probe is all of the data
    exact = exact_top_eigenvalue(outcomes[0].run.model, data, list(range(40)))
    assert [o.run.state.hessian for o in outcomes] == [outcomes[0].run.state.hessian] * world_size
    assert outcomes[0].run.state.hessian == pytest.approx(exact, rel=0.05)
    considered = [json.loads(d.inputs) for d in outcomes[0].watcher.decisions]
    assert [d["hessian_top_eigenvalue"] is not None for d in considered] == [True, True]
    measured = [r.hessian_top_eigenvalue for r in outcomes[0].watcher.steps]
    assert measured[:3] == [None] * 3
    assert measured[3:7] == [considered[0]["hessian_top_eigenvalue"]] * 4
    assert measured[7] == considered[1]["hessian_top_eigenvalue"]


def test_where_copies_differ_the_eigenvalue_is_that_of_the_agreed_weights():
    """The run ends with the epoch, so what it leaves is what was measured."""
    data = Points(40)
    config = recipe(
        "stop.epochs=1", "optimizer.lr=1.0", sync={"kind": "local_sgd", "period": 100},
        batch={"kind": "abs", "global_batch": 10},
    )  # fmt: skip
    outcomes = train(config, world_size=3, data=data)
    model = outcomes[0].run.model
    product = hessian_vector_product(
        lambda: F.cross_entropy(model(data.inputs), data.labels), list(model.parameters())
    )
    size = sum(p.numel() for p in model.parameters())
    start = torch.randn(size, generator=torch.Generator().manual_seed(config.seed))
    for outcome in outcomes:
        assert_same(outcome.weights, outcomes[0].weights, 0.0)
        assert outcome.run.state.hessian == pytest.approx(
            power_iteration(product, start).value, rel=1e-3
        )


def test_measuring_curvature_leaves_the_model_in_training_mode():
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    config = recipe("stop.epochs=2", batch={"kind": "abs", "global_batch": 10})
    outcome = train(config, world_size=2, model=net)[0]
    plain = train(recipe("stop.epochs=2", "batch.global_batch=10"), world_size=2, model=net)[0]
    # Counted once per forward in training mode.
    assert outcome.weights["1.num_batches_tracked"] == plain.weights["1.num_batches_tracked"]


def test_attention_has_a_curvature_though_its_fast_kernels_have_none():
    class Attentive(nn.Linear):
        def forward(self, x):
            heads = x.view(len(x), 1, 2, 3)
            mixed = F.scaled_dot_product_attention(heads * self.weight[0, :3], heads, heads)
            return super().forward(mixed.reshape(len(x), 6))

    config = recipe("stop.epochs=1", batch={"kind": "abs", "global_batch": 10})
    assert train(config, model=lambda: Attentive(6, 3))[0].run.state.hessian > 0


def test_a_model_that_has_no_second_derivative_is_named_as_the_reason():
    class Net(nn.Linear):
        def forward(self, x):
            scores = super().forward(x)
            one = torch.tensor([1])
            spelled = F.ctc_loss(scores.log_softmax(1), one, torch.tensor([len(x)]), one)
            return scores + 0.01 * spelled

    config = recipe("stop.epochs=2", batch={"kind": "abs", "global_batch": 10})
    with pytest.raises(UserError, match=r"batch\.kind: it needs the Hessian.*differentiated twice"):
        train(config, model=lambda: Net(6, 3))


def test_the_throughput_model_is_rank_0s_and_the_same_everywhere():
    outcomes = train(
        recipe(
            "stop.steps=40",
            batch={
                "kind": "goodput",
                "global_batch": 8,
                "max_batch": 40,
                "decide_every": "40 samples",
                "min_observations": 2,
            },
        ),
        world_size=2,
        data=Points(200),
        seconds_of=lambda b: 0.02 + 0.001 * b,
    )
    models = [o.run.state.speed.model for o in outcomes]
    assert models[0] == models[1]
    predicted = models[0].step_seconds(2, 1, 10, 1)
    assert predicted == pytest.approx(0.02 + 0.01, rel=0.1)
    weighed = [json.loads(d.inputs) for d in outcomes[0].watcher.decisions]
    assert any("throughput_fit_error" in w for w in weighed)
    assert {r.global_batch for r in outcomes[0].watcher.steps} != {8}


def test_a_step_without_own_samples_says_nothing_about_speed():
    """The left-over sample of each epoch goes to one worker; the others would time a wait."""
    outcomes = train(recipe("stop.epochs=3"), world_size=3, data=Points(9))
    assert any(not share for record in outcomes[0].watcher.steps for share in record.sample_ids)
    for outcome in outcomes:
        timings = outcome.run.state.speed.state_dict()["timings"]["seen"]
        assert timings
        assert all(microbatch > 0 for _, _, microbatch, *_ in timings)


def test_adversaries_take_the_share_that_the_controller_asks_for():
    seen = []

    class Watching(nn.Sequential):
        def forward(self, x):
            if self.training:
                seen.append(x.detach().clone())
            return super().forward(x)

    def net():
        torch.manual_seed(0)
        return Watching(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))

    data = Points(40)
    batch = {"kind": "absa", "global_batch": 8, "adversarial_fraction": 0.5}
    outcome = train(recipe("stop.steps=1", "microbatch=8", batch=batch), data=data, model=net)[0]
    for given, ids in zip(seen, (outcome.ids[0][:4], outcome.ids[0][4:]), strict=True):
        moved = (given - data.inputs[ids]).abs().amax(dim=1)
        assert [bool(m > 0) for m in moved] == [True, True, False, False]
        assert float(moved.max()) <= 0.005 + 1e-6


def test_adversaries_raise_the_loss():
    data = Points(40)
    batch = {"kind": "absa", "global_batch": 40, "adversarial_fraction": 1.0}
    moved = train(recipe("stop.steps=1", batch=batch), data=data)[0]
    plain = train(recipe("stop.steps=1", "batch.global_batch=40"), data=data)[0]
    assert moved.watcher.steps[0].loss > plain.watcher.steps[0].loss


def test_adversaries_of_words_are_refused():
    class Words(torch.utils.data.Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, index):
            return torch.tensor(index % 5), index % 3

    batch = {"kind": "absa", "global_batch": 10, "adversarial_fraction": 1.0}
    with pytest.raises(UserError, match=r"inputs are torch\.int64.*batch\.kind=abs"):
        train(recipe(batch=batch), data=Words(), model=lambda: nn.Embedding(5, 3))


def test_a_persons_own_loop_is_told_at_once_that_it_makes_no_adversaries():
    config = recipe(batch={"kind": "absa", "global_batch": 8})
    source = wrap_dataset(Points(20), None)
    with pytest.raises(UserError, match=r"batch\.kind = absa: .*library's own loop.*kind=abs"):
        TrainingRun(config, linear_net(), source, PythonConfig(), Membership(None, 0, 1))


@pytest.mark.parametrize("kind", sorted(variants_of(ControllerConfig)))
def test_the_librarys_loop_meets_the_needs_of_every_controller(kind):
    needed = {
        "schedule": {"stages": [{"at": "1 epochs", "batch": 12}]},
        "smith": {"decays": ["1 epochs"]},
    }
    config = recipe(batch={"kind": kind, "global_batch": 8} | needed.get(kind, {}))
    refuse_unmet_needs(config, adversarial=True)


def test_a_need_that_nobody_meets_is_refused_by_name(monkeypatch):
    config = recipe()
    unheard: frozenset[Need] = frozenset({"telepathy"})  # type: ignore[arg-type]
    monkeypatch.setattr(type(config.batch), "needs", unheard)
    with pytest.raises(UserError, match=r"batch\.kind = fixed: it needs telepathy"):
        refuse_unmet_needs(config, adversarial=True)


def momentum_of(outcome):
    return outcome.run._parts.optimizer.param_groups[0]["momentum"]


def test_momentum_holds_the_noise_when_the_batch_grows():
    """Smith et al.: 1 - m falls as 1/B where the learning rate stays; B 8 -> 16, m 0.9 -> 0.95."""
    batch = {"kind": "schedule", "global_batch": 8, "stages": [{"at": "1 epochs", "batch": 16}]}
    config = ["stop.epochs=2", "momentum_rule.kind=hold_noise"]
    outcome = train(recipe(*config, batch=batch), data=Points(32))[0]
    assert momentum_of(outcome) == pytest.approx(0.95)
    kept = train(recipe("stop.epochs=2", batch=batch), data=Points(32))[0]
    assert momentum_of(kept) == 0.9
    linear = train(recipe(*config, batch=batch, lr_rule={"kind": "linear"}), data=Points(32))[0]
    assert momentum_of(linear) == pytest.approx(0.9)


def test_momentum_is_corrected_where_the_rate_jumps_also_after_a_resume(tmp_path):
    """Goyal et al.: m times new rate over old; the old one is in the checkpoint."""
    config = {
        "optimizer": {"kind": "lars", "lr": 1.0, "momentum": 0.9, "weight_decay": 0.0},
        "momentum_rule": {"kind": "correct"},
        "schedule": {"kind": "step", "milestones": ["4 steps"], "decay": 0.5},
    }
    whole = train(recipe("stop.steps=5", **config))[0]
    assert momentum_of(whole) == pytest.approx(0.45)
    train(recipe("stop.steps=5", **config), run_dir=tmp_path, stop_after=4)
    resumed = train(recipe("stop.steps=5", **config), run_dir=tmp_path)[0]
    assert momentum_of(resumed) == pytest.approx(0.45)
    assert_same(resumed.weights, whole.weights, 0.0)


def test_one_micro_batch_a_step_gives_a_biased_estimate_that_survives_a_resume(tmp_path):
    """Checked against gradients of consecutive steps; batch 1 can't be split."""
    data = Points(60)
    config = recipe("stop.steps=9", "optimizer.lr=1e-9", batch={"kind": "fixed", "global_batch": 1})
    whole = train(config, data=data)[0]
    model = linear_net()
    flat = []
    for chosen in (i for ids in whole.ids for i in ids):
        loss = F.cross_entropy(model(data.inputs[[chosen]]), data.labels[[chosen]])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        flat.append(torch.cat([g.reshape(-1) for g in grads]))
    steps = whole.watcher.steps
    assert [r.biased for r in steps] == [False] + [True] * 8
    apart = float((flat[1] - flat[0]).square().sum())
    assert steps[1].noise_trace == pytest.approx(apart / 2, rel=1e-4)
    assert steps[1].signal_sqnorm == pytest.approx(float(flat[1] @ flat[0]), rel=1e-3)
    train(config, data=data, run_dir=tmp_path, stop_after=4)
    second = train(config, data=data, run_dir=tmp_path)[0]
    assert [r.noise_trace for r in second.watcher.steps] == [r.noise_trace for r in steps[4:]]


def test_unbiased_estimates_take_the_place_of_biased_ones():
    batch = {"kind": "schedule", "global_batch": 1, "stages": [{"at": "4 steps", "batch": 8}],
             "boundaries": "step"}  # fmt: skip
    outcome = train(recipe("stop.steps=8", batch=batch), data=Points(60))[0]
    assert [r.biased for r in outcome.watcher.steps] == [False, *[True] * 3, *[False] * 4]
    assert outcome.run.state.previous_gradient.state_dict()["gradients"] == {}


def test_sample_loss_is_what_the_recipe_trains_on():
    outputs, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    assert torch.equal(recipe().loss.build()(outputs, targets), sample_loss(outputs, targets))
