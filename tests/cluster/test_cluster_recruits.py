"""How many workers are looked for, and where they are started."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from adaptive_platform.cluster import recruits
from adaptive_platform.cluster.membership import MembershipStatus
from adaptive_platform.cluster.recruits import Recruiter
from adaptive_platform.cluster.vacancies import room_outside, vacancies, vacant_places


def test_a_lost_worker_is_replaced_in_its_own_place_first():
    assert vacancies(wanted=4, present=3, coming=0, vacant=1, free=5) == (1, 0)
    assert vacancies(wanted=4, present=2, coming=0, vacant=1, free=5) == (1, 1)
    assert vacancies(wanted=4, present=2, coming=0, vacant=0, free=1) == (0, 1)
    assert vacancies(wanted=4, present=4, coming=0, vacant=2, free=5) == (0, 0)


def test_who_is_on_the_way_is_not_looked_for_again():
    assert vacancies(wanted=3, present=2, coming=1, vacant=1, free=9) == (0, 0)
    assert vacancies(wanted=3, present=1, coming=1, vacant=1, free=9) == (1, 0)


@given(*[st.integers(0, 6)] * 5)
def test_never_more_than_wanted_nor_than_there_is_room_for(wanted, present, coming, vacant, free):
    inside, outside = vacancies(
        wanted=wanted, present=present, coming=coming, vacant=vacant, free=free
    )
    assert 0 <= inside <= vacant
    assert 0 <= outside <= free
    assert inside + outside <= max(wanted - present - coming, 0)


def test_a_place_is_vacant_where_nobody_lives_and_the_machine_stays():
    bundles = ("a", "a", "b")
    assert vacant_places(bundles, ("a", "a", "b"), set()) == 0
    assert vacant_places(bundles, ("b",), set()) == 2
    assert vacant_places(bundles, ("b",), {"a"}) == 0
    assert vacant_places(bundles, (), {"a"}) == 1
    assert vacant_places((), ("a",), set()) == 0


def test_who_lives_where_the_group_was_before_holds_no_place_of_it():
    assert vacant_places(("c", "c", "b"), ("a", "a", "b"), set()) == 2


def test_two_halves_of_a_place_are_none():
    free = {"a": {"CPU": 3.0}, "b": {"CPU": 3.0}, "c": {}}
    assert room_outside(free, {"CPU": 2.0, "GPU": 0.0}, set()) == 2
    assert room_outside(free, {"CPU": 1.0}, {"b"}) == 3
    assert room_outside(free, {"CPU": 1.0, "GPU": 1.0}, set()) == 0


class Actors:
    """Stands in for Ray: recruits live or wait, by the name of their `ready`."""

    def __init__(self, monkeypatch: Any, bundles: Sequence[str]) -> None:
        self.killed: list[str] = []
        monkeypatch.setattr(recruits.ray, "kill", self.killed.append)
        monkeypatch.setattr(recruits.ray, "wait", self._wait)
        monkeypatch.setattr(recruits, "_bundles", lambda group: tuple(bundles))

    def _wait(self, refs: list[str], timeout: float) -> tuple[list[str], list[str]]:
        return (refs, []) if refs[0] in ("lives", "ended") else ([], refs)


class Mailbox:
    """Keeps whom it was told to be lost."""

    def __init__(self) -> None:
        self.lost: list[tuple[str, str, str]] = []
        self.lose = SimpleNamespace(remote=lambda *told: self.lost.append(told))


def recruit(name: str, ready: str, *, inside: bool = True) -> recruits._Recruit:
    return recruits._Recruit(name, "one", name, "goes on", inside, ready)


def test_of_those_that_wait_in_a_broken_group_only_the_living_go_on(monkeypatch):
    actors = Actors(monkeypatch, bundles=())
    recruiter = Recruiter(None, b"", {"CPU": 1.0}, print)
    recruiter._recruits = [
        recruit("a", "lives"),
        recruit("b", "has no place"),
        recruit("c", "has no place", inside=False),
        recruit("d", "has no place"),
    ]
    status = MembershipStatus(attempt="one", waiting=("d",))
    assert recruiter._vacant(status, set()) == 0
    assert actors.killed == ["b"]
    assert [recruit.name for recruit in recruiter._recruits] == ["a", "c", "d"]


def test_nobody_waits_for_a_place_on_a_machine_that_is_about_to_go(monkeypatch):
    actors = Actors(monkeypatch, bundles=("x", "x", "y"))
    recruiter = Recruiter(None, b"", {"CPU": 1.0}, print)
    recruiter._recruits = [recruit("a", "lives"), recruit("b", "has no place")]
    status = MembershipStatus(
        attempt="one", present=("a", "first"), nodes=("y", "x"), housed=("x",)
    )
    assert recruiter._vacant(status, set()) == 0
    assert actors.killed == []
    assert recruiter._vacant(status, {"x"}) == 0
    assert actors.killed == ["b"]


def test_members_that_are_killed_do_not_delay_their_replacement(monkeypatch):
    Actors(monkeypatch, bundles=())
    monkeypatch.setattr(recruits.ray, "get", lambda done: _raise(recruits.ray.exceptions.RayError))
    told: list[str] = []
    mailbox = Mailbox()
    recruiter = Recruiter(mailbox, b"", {"CPU": 1.0}, told.append)
    worked = recruit("a", "lives")
    recruiter._recruits = [worked]
    recruiter._bury(MembershipStatus(attempt="one", present=("a",), nodes=("x",)))
    worked.done = "ended"
    recruiter._bury(MembershipStatus(attempt="one"))
    assert recruiter._not_before == 0.0
    assert len(told) == 1

    recruiter._recruits = [recruit("b", "lives"), recruit("c", "lives")]
    for each in recruiter._recruits:
        each.done = "ended"
    pause = recruiter._pause
    recruiter._bury(MembershipStatus(attempt="one"))
    assert [name for _, name, _ in mailbox.lost] == ["a", "b", "c"], "nobody asks who waits"
    assert recruiter._not_before > 0.0
    assert recruiter._pause == 2.0 * pause


def _raise(error: type[Exception]) -> None:
    raise error
