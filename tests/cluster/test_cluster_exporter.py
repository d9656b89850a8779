"""What the exporter hands to Ray, with Ray's metrics replaced by lists."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import ray.util.metrics

from adaptive_platform.cluster.exporter import Exporter
from adaptive_platform.cluster.mailbox import Mailbox, MailboxClient
from adaptive_platform.report.records import StepRecord

LABELS = {"run": "r", "recipe": "q", "sweep": ""}


class Answer:
    """Of an actor's call, and there already."""

    def __init__(self, value):
        self._value = value

    def future(self):
        made = Future()
        made.set_result(self._value)
        return made


class Told:
    """Stands in for a metric of Ray's."""

    all: dict[str, list] = {}  # noqa: RUF012

    def __init__(self, name, *_):
        self.calls = self.all.setdefault(name, [])

    def set(self, value, labels):
        self.calls.append((value, labels))

    inc = observe = set


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(Told, "all", {})
    for name in ("Gauge", "Counter", "Histogram"):
        monkeypatch.setattr(ray.util.metrics, name, Told)
    return lambda name: [value for value, _ in Told.all[f"adaptive_{name}"]]


def step(number: int, **changes) -> dict:
    values = {
        "step": number, "epoch": 0, "samples_seen": 8 * number, "scale_invariant_step": 1.0,
        "world_size": 2, "global_batch": 8, "microbatch": 4, "accumulation": 1, "lr": 0.1,
        "gain": 1.0, "loss": 1.0, "grad_sqnorm": 1.0, "step_seconds": 0.1, "time": 100.0,
    }  # fmt: skip
    return asdict(StepRecord(**(values | changes)))


def test_counters_count_what_is_made_again_once(told):
    exporter = Exporter(LABELS)
    for number in (3, 5, 4, 5, 6):  # the second attempt begins at step 4 again
        exporter.take([("step", step(number), 0.5)])
    assert sum(told("steps")) == 6
    assert sum(told("samples")) == 48
    assert told("global_batch")[-1] == 8
    assert told("progress")[-1] == 0.5


def test_attempts_after_the_first_are_recoveries(told):
    exporter = Exporter(LABELS)
    exporter.take(
        [("started", {"workers": 1.0, "met": 2.0}, 0.0), ("started", {"built": 3.0}, 0.0)]
    )
    assert told("recoveries")[-1] == 0
    exporter.take([("started", {"workers": 9.0, "met": 9.0}, 0.4)])
    assert told("recoveries")[-1] == 1
    exporter.take([("event", {"kind": "lost", "text": "worker 1"}, 0.5)])
    assert told("recoveries")[-1] == 2


def test_every_step_is_in_the_histogram_though_posts_are_thinned(told, monkeypatch):
    mailbox = Mailbox(LABELS)
    posted = []

    class Handle:
        class post:  # noqa: N801
            @staticmethod
            def remote(messages):
                posted.append(messages)
                return Answer(mailbox.post(messages))

    client = MailboxClient(Handle)
    for number in range(1, 8):
        made = StepRecord(
            **step(number, skipped=number == 3, step_seconds=0.1 * number) | {"sample_ids": [[1]]}
        )
        client.send("step", made, 0.1)
    client._post()
    assert len(told("step_duration_seconds")) == 7
    assert told("skipped_steps")[-1] == 1
    kept = mailbox.collect()
    assert [fields["step"] for _, fields, _ in kept] == [1, 7]  # posted at once, and at the end
    assert all(kind == "step" and "sample_ids" not in fields for kind, fields, _ in kept)


def test_steps_between_two_posts_are_not_taken_apart(monkeypatch):
    """A step of a millisecond must not pay for a dictionary that nobody is sent."""
    taken = []

    class Watched(StepRecord):
        def __getattribute__(self, name):
            taken.append(name)
            return super().__getattribute__(name)

    class Handle:
        class post:  # noqa: N801
            @staticmethod
            def remote(messages):
                return Answer((False, None))

    client = MailboxClient(Handle)
    client.send("step", Watched(**step(1)), 0.1)
    assert "loss" in taken
    taken.clear()
    client.send("step", Watched(**step(2)), 0.2)
    assert set(taken) <= {"step_seconds", "skipped"}


def test_an_answer_on_its_way_is_not_waited_for_and_a_dead_mailbox_costs_nothing():
    answers = []

    class Handle:
        class post:  # noqa: N801
            @staticmethod
            def remote(messages):
                answers.append(Future())
                return SimpleNamespace(future=lambda: answers[-1])

    client = MailboxClient(Handle)
    client.send("event", {"kind": "note"}, 0.1)
    assert (client.stop_requested, client.changing) == (False, None)
    answers[-1].set_result((True, 3))
    assert (client.stop_requested, client.changing) == (True, 3)
    client.flush(0.0)
    answers[-1].set_exception(ray.exceptions.RayActorError())
    assert client.stop_requested
    client.flush(0.0)
    assert len(answers) == 3


def test_events_are_counted_by_kind_and_decisions_in_all(told):
    exporter = Exporter(LABELS)
    event = {"kind": "checkpoint", "text": "saved", "time": 5.0, "seconds": None}
    exporter.take([("event", event, 0.1), ("event", event, 0.2), ("decision", {}, 0.2)])
    assert told("checkpoint_seconds") == []  # not timed
    value, labels = Told.all["adaptive_events"][-1]
    assert (value, labels["kind"]) == (2, "checkpoint")
    assert told("decisions")[-1] == 1


def test_checkpoints_evaluations_and_slow_workers(told):
    exporter = Exporter(LABELS)
    exporter.take([("evaluation", {"loss": 2.0, "accuracy": None, "seconds": 1.5}, 0.1)])
    assert told("eval_seconds") == [1.5]
    assert told("stragglers") == [0.0]
    saved = {"kind": "checkpoint", "text": "saved", "time": 70.0, "seconds": 0.25}
    slow = {"kind": "straggler", "text": "worker 1 takes 3.0 times as long", "time": 71.0}
    exporter.take([("event", saved, 0.2), ("event", slow, 0.2)])
    assert told("checkpoint_seconds") == [0.25]
    assert told("last_checkpoint_time") == [70.0]
    assert told("stragglers")[-1] == 1.0


def test_no_labels_no_metrics(told):
    mailbox = Mailbox()
    assert mailbox.post([("step", step(1), 0.1)]) == (False, None)
    assert Told.all == {}
