"""The list of workers as a pure state machine: who goes on with whom."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_platform.cluster.roster import Roster, Verdict


def roster(*members: str, most: int = 9, losses: int = 9) -> Roster:
    made = Roster(most, losses)
    made.begin(members)
    return made


def test_survivors_keep_their_order_and_nobody_goes_on_before_all_have_stopped():
    r = roster("a", "b", "c", "d")
    r.stop("d")
    r.lose("b", "killed")
    assert r.next() is None
    assert r.awaited == ("a", "c")
    r.stop("a")
    r.stop("c")
    found = r.next()
    assert found is not None
    assert (found.number, found.members, found.joined) == (1, ("a", "c", "d"), ())
    assert found.lost == ("worker 1 (killed)",)
    assert r.awaited == ()


def test_a_loss_that_is_known_before_anyone_stopped_closes_nothing_by_itself():
    r = roster("a", "b")
    r.lose("b", "killed")
    assert r.next() is None
    r.stop("a")
    assert r.next().members == ("a",)


def test_joiners_come_last_and_only_as_many_as_there_is_room_for():
    r = roster("a", "b", most=3)
    assert not r.change_wanted
    r.join("x")
    r.join("y")
    assert r.change_wanted
    r.stop("b")
    r.stop("a")
    found = r.next()
    assert (found.members, found.joined) == (("a", "b", "x"), ("x",))
    assert r.waiting == ("y",)
    assert not r.change_wanted
    r.lose("a", "killed")
    assert r.change_wanted


def test_who_leaves_is_told_apart_from_who_is_lost_and_the_last_one_stays():
    r = roster("a", "b")
    r.ask_to_leave("a", "its node drains")
    assert r.change_wanted
    r.stop("a")
    r.stop("b")
    found = r.next()
    assert (found.members, found.lost) == (("b",), ())
    assert found.left == ("worker 0 (its node drains)",)
    r.ask_to_leave("b", "its node drains")
    assert not r.change_wanted, "nobody would have the state"
    r.join("x")
    assert r.change_wanted
    r.stop("b")
    assert r.next().members == ("b", "x")
    assert r.change_wanted, "now that another one has the state, b may go"
    r.stop("b")
    r.stop("x")
    assert r.next().members == ("x",)


def test_one_that_was_taken_for_lost_joins_again():
    r = roster("a", "b")
    r.stop("a")
    r.lose("b", "no answer")
    assert r.next().members == ("a",)
    r.stop("b")
    assert r.waiting == ("b",)
    r.stop("a")
    found = r.next()
    assert (found.members, found.joined) == (("a", "b"), ("b",))


def lose_and_go_on(r: Roster, *lost: str) -> None:
    """A generation loses `lost`; the others stop and go on."""
    for member in lost:
        r.lose(member, f"{member}'s sample")
    for member in r.present:
        r.stop(member)
    r.next()


def test_losses_count_only_while_no_step_is_committed():
    r = roster(*"abcde", losses=1)
    lose_and_go_on(r, "a")
    r.commit(1)
    lose_and_go_on(r, "b")
    assert r.verdict is Verdict.GO_ON
    r.commit(1)  # the news of it was late
    r.lose("c", "its sample")
    assert r.verdict is Verdict.GIVE_UP
    assert r.last_loss == "its sample"
    r.stop("d")
    r.stop("e")
    assert r.next() is None


def test_a_node_is_one_loss_however_many_workers_it_takes_along():
    r = roster(*"abcdefgh", losses=3)
    lose_and_go_on(r, *"efgh")
    assert r.generation.members == tuple("abcd")
    lose_and_go_on(r, *"cd")
    lose_and_go_on(r, "b")
    assert r.verdict is Verdict.GO_ON
    r.lose("a", "x")
    assert r.verdict is Verdict.GIVE_UP, "the fourth time without a step in between"


def test_when_all_are_lost_at_once_ray_train_decides_about_a_restart():
    r = roster(*"abcd", losses=3)
    for member in "abcd":
        r.lose(member, "its node ended")
    assert r.verdict is Verdict.RESTART


def test_steps_that_a_new_attempt_makes_again_count():
    r = roster("a", "b", losses=1)
    r.commit(500)
    for member in "ab":
        r.lose(member, "its node ended")
    r.begin("cd")
    r.commit(101)
    lose_and_go_on(r, "d")
    assert r.verdict is Verdict.GO_ON


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_a_sample_that_kills_whoever_reads_it_ends_the_run(workers):
    """Whether somebody is left each time or nobody is."""
    r, attempts = Roster(workers, 3), 0
    while r.verdict is not Verdict.GIVE_UP:
        if r.verdict is Verdict.RESTART:
            attempts += 1
            r.begin(f"{attempts}.{n}" for n in range(workers))
        lose_and_go_on(r, r.present[0])
        assert attempts <= 4


@pytest.mark.parametrize(("ends", "verdict"), [("lose", Verdict.RESTART), ("finish", Verdict.OVER)])
def test_what_becomes_of_the_run_when_nobody_is_left(ends, verdict):
    r = roster("a", "b")
    for member in "ab":
        assert r.verdict is Verdict.GO_ON
        if ends == "lose":
            r.lose(member, "killed")
        else:
            r.conclude()
            r.finish(member)
    assert r.verdict is verdict
    r.begin(("c",))
    assert (r.verdict, r.generation.number) == (Verdict.GO_ON, 0)


def test_a_run_whose_last_checkpoint_was_not_written_is_not_over():
    """The others have finished; the first one is lost before it told how the run ended."""
    r = roster("a", "b")
    r.finish("b")
    r.lose("a", "killed while it saved")
    assert r.verdict is Verdict.RESTART
    r.begin(("c",))
    r.conclude()
    r.finish("c")
    assert r.verdict is Verdict.OVER


def test_those_that_finished_are_waited_for_by_nobody():
    r = roster("a", "b", "c")
    r.finish("a")
    r.lose("b", "killed")
    r.stop("c")
    found = r.next()
    assert (found.members, found.lost) == (("c",), ("worker 1 (killed)",))


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["stop", "join", "lose", "leave", "finish"]), st.sampled_from("abcdef")
        ),
        max_size=60,
    ),
    st.integers(1, 4),
)
def test_whatever_happens_lists_are_sound(events, most):
    r = roster("a", "b", most=most, losses=99)
    state = {"a", "b"}
    """Who has the state of the run."""
    for what, who in events:
        before = r.generation
        gone = set(before.members) - set(r.present)
        if what == "stop" and who in before.members:
            r.stop(who)
        elif what == "join":
            r.join(who)
        elif what == "lose":
            r.lose(who, "killed")
        elif what == "leave":
            r.ask_to_leave(who, "drained")
        elif what == "finish":
            r.finish(who)
        stopped_all = not r.awaited
        found = r.next()
        if found is None:
            assert r.generation == before
            continue
        assert stopped_all
        assert found.number == before.number + 1
        assert len(set(found.members)) == len(found.members)
        staying = [m for m in found.members if m not in found.joined]
        assert staying, "somebody must have the state"
        assert set(staying) <= state - gone
        assert staying == [m for m in before.members if m in staying]
        assert found.members == (*staying, *found.joined)
        assert len(found.members) <= max(most, len(staying))
        assert not set(found.joined) & set(r.waiting)
        state = set(found.members)
