"""A worker's side of live membership: lists whose first one is out of reach, and old wishes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from adaptive_platform.cluster import link as link_module
from adaptive_platform.cluster.link import MembershipLink
from adaptive_platform.cluster.membership import Assignment
from adaptive_platform.collectives import CollectiveError


class Mailbox:
    """Answers with one assignment after the other, and keeps what it was asked."""

    def __init__(self, *answers: Assignment) -> None:
        self._answers = list(answers)
        self.asked: list[bool] = []
        self.next = SimpleNamespace(remote=self._next)

    def _next(self, attempt: str, member: Any, join: bool) -> Assignment:
        self.asked.append(join)
        return self._answers.pop(0)


@pytest.fixture
def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]  # bound, and nobody listens


@pytest.fixture
def link_to(monkeypatch):
    context = SimpleNamespace(get_node_id=lambda: "here", current_actor=None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "get", lambda answer, timeout=None: answer)
    monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: None)
    monkeypatch.setattr(link_module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")

    def make(
        mailbox: Mailbox, *, joining: bool, changing: Callable[[], int | None] = lambda: None
    ) -> MembershipLink:
        return MembershipLink(
            mailbox,
            "one",
            "w1",
            timeout_seconds=0.5,
            changing=changing,
            joining=joining,
        )

    return make


def place(rank: int, port: int, number: int) -> Assignment:
    return Assignment(
        verdict="go on", rank=rank, number=number, nodes=("a", "b"), address=("127.0.0.1", port)
    )


@pytest.mark.parametrize("joining", [False, True])
def test_it_asks_again_when_the_first_one_is_gone(link_to, free_port, joining):
    mailbox = Mailbox(place(1, free_port, 1), place(0, 0, 2))
    found = link_to(mailbox, joining=joining).next(None)
    assert (found.membership.rank, found.membership.generation) == (0, 2)
    assert mailbox.asked == [joining, False], "it has a place since the first answer"


def test_one_that_reaches_nobody_gives_up_and_says_whom_it_missed(link_to, free_port):
    mailbox = Mailbox(*(place(1, free_port, number) for number in range(1, 9)))
    with pytest.raises(CollectiveError) as raised:
        link_to(mailbox, joining=False).next(None)
    assert raised.value.peers == (0,)
    assert raised.value.operation == "rendezvous"
    assert len(mailbox.asked) == 3


def test_one_that_the_list_does_not_answer_knows_that_it_is_cut_off(link_to, monkeypatch):
    def silent(answer: object, timeout: float | None = None) -> None:
        raise ray.exceptions.GetTimeoutError

    link = link_to(Mailbox(place(0, 0, 1), place(0, 0, 1)), joining=False)
    assert not link.cut_off
    monkeypatch.setattr(ray, "get", silent)
    lost = CollectiveError(
        operation="all_reduce",
        group="world",
        rank=1,
        world_size=2,
        generation=0,
        timeout_seconds=1,
        after_seconds=1,
    )
    for failure in (lost, None):  # a loss, and a planned change
        with pytest.raises(CollectiveError, match="ask for the list of workers"):
            link.next(failure)
        assert link.cut_off


def test_a_wish_for_change_that_is_older_than_the_change_is_not_followed(link_to):
    heard: list[int | None] = [None]
    mailbox = Mailbox(place(0, 0, 1))
    link = link_to(mailbox, joining=False, changing=lambda: heard[0])
    assert not link.change_wanted()
    heard[0] = 0
    assert link.change_wanted()
    link.next(None)
    assert not link.change_wanted(), "the wish was for the generation before"
    heard[0] = 1
    assert link.change_wanted()
