"""Normalization policies in real runs: groups, ghosts, evaluation, resumes, odd batches."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from runs import Points, assert_same, recipe, train
from torch import nn
from torch.nn import functional as F

from adaptive_platform.errors import RunFailedError, UserError
from adaptive_platform.models import LocalNorm, NormalizationPolicy
from adaptive_platform.settings import variants_of


def normed_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8),
        nn.Tanh(), nn.Linear(8, 3),
    )  # fmt: skip


def policy(kind: str, **fields):
    return {"model": {"normalization": {"kind": kind} | fields}}


POLICIES = {
    "local": policy("local"),
    "last batch": policy("local", evaluation="last_batch"),
    "recomputed": policy("local", evaluation="recomputed", recompute_samples=24),
    "group": policy("group"),
    "ghost": policy("ghost", samples=2),
}
every_policy = pytest.mark.parametrize("content", POLICIES.values(), ids=list(POLICIES))


def test_every_kind_is_tried() -> None:
    tried = {each["model"]["normalization"]["kind"] for each in POLICIES.values()}
    assert tried == set(variants_of(NormalizationPolicy))


@pytest.mark.parametrize(("world", "words"), [(2, ()), (3, ()), (3, ("microbatch=2",))])
def test_a_group_of_all_workers_normalizes_the_whole_micro_batch(world, words) -> None:
    """Uneven shares and accumulation included: a plain loop over the joined micro-batches."""
    data = Points(40)
    config = recipe("stop.epochs=1", *words, **policy("group", workers=world))
    outcomes = train(config, world_size=world, data=data, model=normed_net)
    model = normed_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for record in outcomes[0].watcher.steps:
        optimizer.zero_grad()
        shares = record.sample_ids
        pieces = -(-max(map(len, shares)) // (2 if words else 40))
        total = sum(len(share) for share in shares)
        for piece in range(pieces):
            ids = [i for share in shares for i in _cut(share, pieces)[piece]]
            losses = F.cross_entropy(model(data.inputs[ids]), data.labels[ids], reduction="sum")
            (losses / total).backward()
        optimizer.step()
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    for outcome in outcomes:
        assert_same(outcome.weights, expected, 1e-4)


def _cut(share: list[int], pieces: int) -> list[list[int]]:
    """Recorded ids come micro-batch after micro-batch, the larger ones first."""
    size, larger = divmod(len(share), pieces)
    edges = [0]
    for piece in range(pieces):
        edges.append(edges[-1] + size + (piece < larger))
    return [share[a:b] for a, b in pairwise(edges)]


def test_groups_are_smaller_than_the_world_and_one_may_be_alone() -> None:
    config = recipe(**policy("group", workers=2))
    outcomes = train(config, world_size=3, model=normed_net)
    for outcome in outcomes[1:]:
        assert_same(outcome.weights, outcomes[0].weights, 0.0)
    local = train(recipe(**policy("local")), world_size=3, model=normed_net)
    assert not torch.equal(local[0].weights["0.weight"], outcomes[0].weights["0.weight"])


@pytest.mark.parametrize(("world", "size"), [(1, 2), (3, 2), (3, 3)])
def test_a_worker_that_is_a_group_of_its_own_gets_two_samples(world: int, size: int) -> None:
    config = recipe("batch.global_batch=6", "microbatch=1", **policy("group", workers=size))
    outcome = train(config, world_size=world, data=Points(20), model=normed_net)[0]
    least = 1 if size == world else 2
    shares = [len(ids) for record in outcome.watcher.steps for ids in record.sample_ids]
    assert min(shares) >= least
    assert outcome.run.progress.skipped_steps == 0
    assert sum(shares) == 40


@every_policy
def test_a_single_sample_left_over_joins_the_step_before(content) -> None:
    """F25: nine samples, four per worker; then a batch that leaves one over."""
    for batch in (8, 4):
        config = recipe(f"batch.global_batch={batch}", "stop.epochs=2", **content)
        outcomes = train(config, world_size=2, data=Points(9), model=normed_net)
        steps = outcomes[0].watcher.steps
        assert sum(record.global_batch for record in steps) == 18
        assert min(record.global_batch for record in steps) >= 2
        assert_same(outcomes[0].weights, outcomes[1].weights, 0.0)


@every_policy
def test_a_resumed_run_goes_on_bit_for_bit(content, tmp_path) -> None:
    config = recipe("stop.steps=12", "report.evaluate_every=0.5 epochs", **content)
    settings = {"world_size": 2, "data": Points(40), "eval_data": Points(12, seed=1),
                "model": normed_net}  # fmt: skip
    whole = train(config, **settings)[0]
    train(config, **settings, run_dir=tmp_path, stop_after=7)
    second = train(config, **settings, run_dir=tmp_path)[0]
    assert_same(second.weights, whole.weights, 0.0)
    assert second.watcher.evaluations[-1].loss == whole.watcher.evaluations[-1].loss


def test_a_group_resumes_with_another_number_of_workers(tmp_path) -> None:
    config = recipe("stop.steps=8", "batch.global_batch=12", **policy("group", workers=4))
    data = Points(40)
    whole = train(config, data=data, world_size=3, model=normed_net)[0]
    train(config, data=data, world_size=2, model=normed_net, run_dir=tmp_path, stop_after=4)
    second = train(config, data=data, world_size=3, model=normed_net, run_dir=tmp_path)[0]
    assert_same(second.weights, whole.weights, 1e-4)


def test_evaluation_sees_the_last_micro_batches_of_all_workers() -> None:
    data = Points(40)
    config = recipe("stop.steps=3", **policy("local", evaluation="last_batch"))
    outcome = train(config, world_size=2, data=data, eval_data=Points(8), model=normed_net)[0]
    shares = outcome.watcher.steps[-1].sample_ids
    # The first layer's input when the last step began is that of the weights before it.
    before = train(
        recipe("stop.steps=2", **policy("local", evaluation="last_batch")),
        world_size=2, data=data, model=normed_net,
    )[0].weights  # fmt: skip
    means = [
        F.linear(data.inputs[share], before["0.weight"], before["0.bias"]).mean(0)
        for share in shares
    ]
    torch.testing.assert_close(outcome.weights["1.running_mean"], torch.stack(means).mean(0))


def test_recomputed_statistics_are_those_of_the_training_samples() -> None:
    data = Points(40)
    content = policy("local", evaluation="recomputed", recompute_samples=40)
    config = recipe("stop.steps=5", "report.evaluate_every=0 epochs", **content)
    outcome = train(config, world_size=3, data=data, eval_data=Points(8), model=normed_net)[0]
    weights = outcome.weights
    features = F.linear(data.inputs, weights["0.weight"], weights["0.bias"])
    torch.testing.assert_close(weights["1.running_mean"], features.mean(0))
    torch.testing.assert_close(weights["1.running_var"], features.var(0))


class Broken(Points):
    """Two samples can't be read, both on the second of two workers' first share."""

    def __getitem__(self, index: int):
        if index in self.bad:
            raise OSError("can't be read")
        return super().__getitem__(index)


def test_a_step_for_which_a_member_lacks_samples_is_left_out_by_all() -> None:
    """Nobody waits for it; the others go on."""
    plain = train(recipe("stop.epochs=1", **policy("group")), world_size=2, model=normed_net)[0]
    second = plain.watcher.steps[1].sample_ids[1]
    data = Broken(40)
    data.bad = set(second)
    config = recipe("stop.epochs=1", "data.max_broken_share=0.5", **policy("group"))
    outcomes = train(config, world_size=2, data=data, model=normed_net)
    assert outcomes[0].run.progress.skipped_steps == 1
    assert len(outcomes[0].watcher.steps) == len(plain.watcher.steps)
    assert_same(outcomes[0].weights, outcomes[1].weights, 0.0)


class Cramped(nn.Module):
    """Memory runs out in the first passes, before the workers talk to each other."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.net = normed_net()
        self.passes = passes

    def forward(self, x):
        self.passes -= self.training
        if self.training and self.passes >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory. (a test)")
        return self.net(x)


def test_a_group_whose_memory_runs_out_goes_on_in_equally_many_passes() -> None:
    """Shares of 3 and 2 samples, in passes of at most 2: two for both workers."""
    words = ("batch.global_batch=5", "stop.epochs=1")
    config = recipe(*words, **policy("group"))
    cramped = train(config, world_size=2, model=lambda: Cramped(1))
    small = recipe(*words, "microbatch=2", **policy("group"))
    ample = train(small, world_size=2, model=lambda: Cramped(0))
    assert cramped[0].run.state.memory_limit == 2
    assert cramped[0].ids == ample[0].ids
    for one, other in zip(cramped, ample, strict=True):
        assert_same(one.weights, other.weights, 0.0)


def test_a_group_that_can_not_be_cut_further_says_so() -> None:
    """The share of 2 samples is in two passes, so that of 3 keeps one of 2 samples."""
    config = recipe("batch.global_batch=5", **policy("group"))
    with pytest.raises(RunFailedError, match="even 2 samples do not fit"):
        train(config, world_size=2, model=lambda: Cramped(99))


def test_statistics_of_a_group_are_not_recomputed() -> None:
    with pytest.raises(UserError, match=r"model\.normalization.*running_average or last_batch"):
        recipe(**policy("group", evaluation="recomputed"))


def test_a_policy_for_a_model_without_batch_norm_is_refused() -> None:
    for content in (policy("ghost"), policy("local", evaluation="last_batch")):
        with pytest.raises(UserError, match="no batch normalization"):
            train(recipe("stop.steps=1", **content))


def test_a_policy_changes_no_name_and_no_parameter() -> None:
    config = recipe("stop.steps=1", **policy("ghost", samples=2))
    outcome = train(config, model=normed_net)[0]
    assert list(outcome.weights) == list(normed_net().state_dict())
    assert LocalNorm().evaluation == "running_average"


@pytest.mark.parametrize("kind", ["kfac", "sp_ngd"])
def test_memory_traffic_and_the_hybrid_are_one_method(kind: str) -> None:
    """MEM-OPT, KAISA's half and COMM-OPT over the loop's own process groups."""
    found = []
    for fraction in (0.0, 0.5, 1.0):
        config = recipe(
            "stop.steps=6",
            optimizer={"kind": kind, "lr": 0.01, "gradient_worker_fraction": fraction},
        )
        found.append(train(config, world_size=4)[0].weights)
    for other in found[1:]:
        assert_same(other, found[0], 1e-5)
