"""How many workers are looked for, and where they are started."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adaptive_platform.cluster import recruits
from adaptive_platform.cluster.recruits import Recruiter, vacancies


def test_a_lost_worker_is_replaced_in_its_own_place_first():
    counts = {"wanted": 4, "coming": 0, "coming_inside": 0}
    assert vacancies(present=3, vacant=1, free=5, **counts) == (1, 0)
    assert vacancies(present=2, vacant=1, free=5, **counts) == (1, 1)
    assert vacancies(present=2, vacant=0, free=1, **counts) == (0, 1)
    assert vacancies(present=4, vacant=2, free=5, **counts) == (0, 0)


def test_who_is_on_the_way_is_not_looked_for_again():
    assert vacancies(wanted=3, present=2, coming=1, vacant=1, coming_inside=1, free=9) == (0, 0)
    assert vacancies(wanted=3, present=1, coming=1, vacant=2, coming_inside=1, free=9) == (1, 0)


@given(*[st.integers(0, 6)] * 6)
def test_never_more_than_wanted_nor_than_there_is_room_for(
    wanted, present, coming, vacant, coming_inside, free
):
    inside, outside = vacancies(
        wanted=wanted,
        present=present,
        coming=coming,
        vacant=vacant,
        coming_inside=coming_inside,
        free=free,
    )
    assert 0 <= inside <= max(vacant - coming_inside, 0)
    assert 0 <= outside <= free
    assert inside + outside <= max(wanted - present - coming, 0)


def test_of_those_that_wait_in_a_broken_group_only_the_living_go_on(monkeypatch):
    killed: list[str] = []
    monkeypatch.setattr(recruits.ray, "kill", killed.append)
    monkeypatch.setattr(
        recruits.ray, "wait", lambda refs, timeout: (refs, []) if refs[0] == "lives" else ([], refs)
    )
    recruiter = Recruiter(None, b"", {"CPU": 1.0}, print)
    for name, inside, ready in (
        ("a", True, "lives"),
        ("b", True, "has no place"),
        ("c", False, "has no place"),
        ("d", True, "has no place"),
    ):
        recruiter._recruits.append(recruits._Recruit(name, "one", name, None, inside, ready))
    recruiter._withdraw({"d"})
    assert killed == ["b"]
    assert [recruit.name for recruit in recruiter._recruits] == ["a", "c", "d"]
