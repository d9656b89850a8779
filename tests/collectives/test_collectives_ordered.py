"""Operations in call order: long ones on the thread, short ones on whoever waits."""

from __future__ import annotations

import threading

import pytest

from adaptive_platform.collectives.ordered import OrderedThread


def here() -> str:
    return threading.current_thread().name


def test_short_ones_are_done_by_who_waits_in_the_order_of_the_calls() -> None:
    thread = OrderedThread("background", short=10)
    seen: list[tuple[int, str]] = []
    jobs = [thread.submit(lambda i=i: seen.append((i, here())), 3) for i in range(3)]
    assert not any(job.done for job in jobs)
    jobs[1].wait()
    assert seen == [(0, here()), (1, here())]
    assert [job.done for job in jobs] == [True, True, False]
    thread.close()
    assert seen[2] == (2, "background"), "what is queued is finished on closing"


@pytest.mark.parametrize("lengths", [(None,), (11,), (6, 6), (1, None)])
def test_long_ones_do_not_wait_for_anyone(lengths: tuple[int | None, ...]) -> None:
    thread = OrderedThread("background", short=10)
    seen: list[str] = []
    over = threading.Event()
    for length in lengths:
        thread.submit(lambda: seen.append(here()), length)
    thread.submit(over.set, 0)
    assert over.wait(10)
    assert seen == ["background"] * len(lengths)
    thread.close()


def test_a_short_one_behind_a_long_one_waits_for_it() -> None:
    thread = OrderedThread("background", short=10)
    gate = threading.Event()
    seen: list[str] = []
    thread.submit(lambda: (gate.wait(10), seen.append("long"))[1])
    short = thread.submit(lambda: seen.append("short"), 1)
    threading.Timer(0.05, gate.set).start()
    short.wait()
    assert seen == ["long", "short"]
    thread.close()


def test_several_waiters_each_get_their_own_end() -> None:
    thread = OrderedThread("background", short=1000)
    seen: list[int] = []

    def fail() -> None:
        raise ValueError("three")

    jobs = [thread.submit(lambda i=i: seen.append(i), 1) for i in range(3)]
    jobs.append(thread.submit(fail, 1))
    errors: list[BaseException] = []

    def wait(job: object) -> None:
        try:
            job.wait()  # type: ignore[attr-defined]
        except ValueError as error:
            errors.append(error)

    waiters = [threading.Thread(target=wait, args=(job,)) for job in reversed(jobs)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join(10)
    assert seen == [0, 1, 2]
    assert [str(error) for error in errors] == ["three"]
    thread.close()


def test_the_thread_sleeps_again_after_a_long_one() -> None:
    thread = OrderedThread("background", short=10)
    thread.submit(lambda: None).wait()
    for _ in range(100):
        seen: list[str] = []
        thread.submit(lambda: seen.append(here()), 1).wait()  # noqa: B023
        if seen == [here()]:
            break
    assert seen == [here()], "short ones are handed over for ever"
    thread.close()
