"""Whole runs against oracles: known gradients, per-sample gradients of a small net, fairscale."""

from __future__ import annotations

import math

import pytest
import torch
from runs import Points, linear_net, recipe, train
from scipy import stats
from torch import nn
from torch.func import functional_call, grad, hessian, vmap
from torch.nn import functional as F

from adaptive_platform.checkpoints.store import CheckpointStore, read_state

STANDING_STILL = {"kind": "sgd", "lr": 1e-12, "momentum": 0.0, "weight_decay": 0.0}


class Gradients(torch.utils.data.Dataset):
    """Rows whose mean and covariance are exactly `mean` and `root @ root.T`.

    Under the loss `w . x` a row is the gradient of its sample, whatever the weights are.
    """

    def __init__(self, size: int, mean: torch.Tensor, root: torch.Tensor, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        white = torch.randn(size, len(mean), generator=generator, dtype=torch.float64)
        white -= white.mean(0)
        spread = white.T @ white / (size - 1)
        white = torch.linalg.solve_triangular(torch.linalg.cholesky(spread), white.T, upper=False).T
        self.rows = (mean + white @ root.T).float()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], 0


def linear_loss(run, outputs, targets):
    return outputs[:, 0]


def interval(values: list[float], confidence: float = 0.999) -> tuple[float, float]:
    """Student's t interval of the mean."""
    seen = torch.tensor(values, dtype=torch.float64)
    half = stats.t.ppf(0.5 + confidence / 2, len(seen) - 1) * seen.std() / math.sqrt(len(seen))
    return float(seen.mean() - half), float(seen.mean() + half)


@pytest.mark.parametrize(("world_size", "microbatch"), [(1, 4), (3, 3)])
def test_known_mean_and_covariance_are_found_by_the_loop(world_size, microbatch):
    """Ten runs, each over other data in another order."""
    generator = torch.Generator().manual_seed(7)
    width, size, batch = 12, 600, 13
    mean = torch.randn(width, generator=generator, dtype=torch.float64)
    root = torch.randn(width, width, generator=generator, dtype=torch.float64)
    noise = float((root @ root.T).trace())
    # Batches are drawn without replacement, so that much of S/size is in |mean|^2 already.
    signal = float(mean.square().sum()) - noise / size
    found = []
    for seed in range(10):
        outcome = train(
            recipe(
                "stop.epochs=1",
                f"seed={seed}",
                f"microbatch={microbatch}",
                f"batch.global_batch={batch}",
                "statistics.half_life_samples=1000000000",
                optimizer=STANDING_STILL,
            ),
            world_size=world_size,
            data=Gradients(size, mean, root, seed),
            model=lambda: nn.Linear(width, 1, bias=False),
            loss=linear_loss,
        )[0]
        summary = outcome.run.state.estimator.summary()
        found.append((summary.noise_trace, summary.signal_sqnorm))
    for values, true in zip(map(list, zip(*found, strict=True)), (noise, signal), strict=True):
        low, high = interval(values)
        assert low <= true <= high
        assert high - low < 0.25 * true, "too wide to say anything"


@pytest.fixture(scope="module")
def points() -> Points:
    """Labels that can be learned, so that there is a signal in the noise."""
    found = Points(240)
    found.labels = found.inputs[:, :3].argmax(1)
    return found


@pytest.fixture(scope="module")
def per_sample(points: Points) -> list[torch.Tensor]:
    """Gradients of every sample's loss, one tensor samples x elements for each parameter."""
    net = linear_net()
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(values, x, y):
        return F.cross_entropy(functional_call(net, values, (x[None],)), y[None])

    found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, points.inputs, points.labels)
    return [g.flatten(1).double() for g in found.values()]


def exact(per_sample: list[torch.Tensor]) -> tuple[list[float], list[float]]:
    """S and what the loop's G2 estimates, of each layer, over batches without replacement."""
    noise = [float(g.var(0).sum()) for g in per_sample]
    signal = [
        float(g.mean(0).square().sum()) - s / len(g) for g, s in zip(per_sample, noise, strict=True)
    ]
    return noise, signal


@pytest.mark.parametrize("world_size", [1, 3])
def test_online_estimates_are_those_of_per_sample_gradients(world_size, points, per_sample):
    """S, G2 and every layer's noise scale of a net that stands still, over six orders."""
    noise, signal = exact(per_sample)
    found = []
    for seed in range(6):
        outcome = train(
            recipe(
                "stop.epochs=2",
                f"seed={seed}",
                "microbatch=3",
                "batch.global_batch=18",
                "statistics.half_life_samples=1000000000",
                optimizer=STANDING_STILL,
            ),
            world_size=world_size,
            data=points,
        )[0]
        state = outcome.run.state.estimator.state_dict()
        layers = [
            [value / state["weight"] for value in state[name]]
            for name in ("layer_noise", "layer_signal")
        ]
        found.append([sum(layers[0]), sum(layers[1]), *layers[0], *layers[1]])
        summary = outcome.run.state.summary()
        assert found[-1][:2] == pytest.approx([summary.noise_trace, summary.signal_sqnorm])
        ratios = [g / s for g, s in zip(layers[1], layers[0], strict=True)]
        assert summary.gsnr == pytest.approx(sum(sorted(ratios)[1:3]) / 2)
    truths = [sum(noise), sum(signal), *noise, *signal]
    for values, true in zip(map(list, zip(*found, strict=True)), truths, strict=True):
        low, high = interval(values)
        assert low <= true <= high
    low, high = interval([row[0] for row in found])
    assert high - low < 0.35 * truths[0]
    low, high = interval([row[1] for row in found])
    assert high - low < 0.5 * truths[1]


def test_elementwise_gsnr_of_a_step_is_that_of_its_microbatches(points, per_sample, tmp_path):
    """The ratios that VRGD keeps, from the per-sample gradients of the samples that it saw.

    Each worker holds some of them; all are together in a checkpoint.
    """
    outcome = train(
        recipe(
            "stop.steps=1", "microbatch=3", "batch.global_batch=24", vr={"gamma": 0.01},
            optimizer=STANDING_STILL,
        ),
        world_size=2,
        data=points,
        run_dir=tmp_path,
    )[0]  # fmt: skip
    shares = outcome.watcher.steps[0].sample_ids
    devices = [share[start : start + 3] for share in shares for start in range(0, 12, 3)]
    found = CheckpointStore(str(tmp_path)).load_newest()
    assert found is not None
    kept = read_state(found[1])["variance"]["averages"]
    names = [name for name, _ in linear_net().named_parameters()]
    for name, gradients in zip(names, per_sample, strict=True):
        means = torch.stack([gradients[ids].mean(0) for ids in devices])
        gsnr = means.mean(0).square() / means.var(0, correction=0)
        expected = (gsnr / gsnr.mean()).clamp(0.01, 1.0)
        torch.testing.assert_close(kept[name].flatten().double(), expected, rtol=1e-3, atol=1e-5)


def test_the_hessian_of_an_epoch_is_that_of_torch_func():
    small = Points(60)
    outcome = train(
        recipe(
            "stop.epochs=1", batch={"kind": "abs", "global_batch": 20}, optimizer=STANDING_STILL
        ),
        world_size=2,
        data=small,
    )[0]
    net = linear_net()
    shapes = {name: p.shape for name, p in net.named_parameters()}
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])

    def loss(vector):
        pieces = vector.split([shape.numel() for shape in shapes.values()])
        values = {n: v.view(s) for (n, s), v in zip(shapes.items(), pieces, strict=True)}
        return F.cross_entropy(functional_call(net, values, (small.inputs,)), small.labels)

    eigenvalues = torch.linalg.eigvalsh(hessian(loss)(flat).double())
    largest = float(eigenvalues[eigenvalues.abs().argmax()])
    assert outcome.run.state.hessian == pytest.approx(largest, rel=0.05)


@pytest.mark.parametrize("batch", [16, 32])
def test_the_gain_is_fairscales_on_the_same_gradients(points, batch):
    """Also its averages: its smoothing, said as a half-life in samples.

    The one deviation, clipping after averaging, plays no part: the signal is never below zero.
    """
    adascale = pytest.importorskip("fairscale.optim").AdaScale
    passes, base = batch // 4, 4
    smoothing = max(1 - passes / 1000, 0)
    outcome = train(
        recipe(
            "stop.epochs=1",
            "microbatch=4",
            f"batch.global_batch={batch}",
            f"statistics.half_life_samples={round(-batch / math.log2(smoothing))}",
            "optimizer.lr=0.01",
            lr_rule={"kind": "adascale", "base_batch": base, "clock": "samples"},
        ),
        data=points,
    )[0]
    net = linear_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    theirs = adascale(optimizer, world_size=1, num_gradients_to_accumulate=passes)
    gains = []
    for record in outcome.watcher.steps:
        (ids,) = record.sample_ids
        if len(ids) < batch:
            break
        theirs.zero_grad()
        for start in range(0, batch, 4):
            part = ids[start : start + 4]
            loss = F.cross_entropy(net(points.inputs[part]), points.labels[part])
            (loss / passes).backward()
        gains.append((record.gain, theirs.gain()))
        theirs.step()
    assert len(gains) >= 7
    assert max(ours for ours, _ in gains) > 1.5, "no noise, no test"
    for ours, gain in gains:
        assert ours == pytest.approx(gain, rel=1e-5)
