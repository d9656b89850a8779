"""The table of trouble: what is done to a run on two nodes, and what is allowed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from adaptive_platform.bench.trouble import (
    AddNode,
    CutLink,
    Drain,
    FillDisk,
    FreeDisk,
    Freeze,
    Kill,
    KillAll,
    KillNode,
    Moment,
    Order,
    Slow,
    Trouble,
)

__all__ = ["Scenario", "random_trouble", "scenario_of", "scenarios"]

_WORKERS = 3
_GAP_SECONDS = 1.5
_PLANNED_SECONDS = 1.0
_NODE_SECONDS = 15.0
_RESIZE_SECONDS = 20.0
_REPLACED_SECONDS = 10.0
_NODES_SECONDS = 150.0
"""Of scenarios in which Ray has to notice that a node died, for which it takes half a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run in trouble."""

    name: str
    event: str
    """What happens, in words."""
    moments: tuple[Moment, ...]
    gap_seconds: float
    """Longest gap between two committed steps that is allowed after an event."""
    full_seconds: float | None = None
    """Until all workers are there again; None where that is not bounded."""
    workers: tuple[int, int] = (1, _WORKERS)
    workers_after: int | None = _WORKERS
    """Workers at the end; None for any number."""
    live: bool = True
    repeated: int = 0
    """Most steps that are made again."""
    unreadable: int = 0
    """Samples that are left out, as nobody can read them."""
    tells: str = ""
    """Kind of an event that has to be told after the last trouble."""
    tells_within: int | None = None
    """Steps until then."""
    small_disk: bool = False
    """The run directory lies on a small file system of its own."""
    hosts: bool = False
    """Each node has a network of its own, with a cable that can be cut."""
    soak_seconds: float | None = None
    """Random trouble for that long, instead of moments."""
    seed: int = 0
    """Of random trouble."""
    leave_seconds: float = 20.0
    """From the end of the run until the last process of a worker has ended."""
    limit_seconds: float = 100.0
    """All of it, the start and the end of the run included."""

    @property
    def expected(self) -> str:
        """What is allowed, in words."""
        parts = [f"gap up to {self.gap_seconds:g} s"]
        if self.full_seconds is not None:
            parts.append(f"all workers back within {self.full_seconds:g} s")
        if self.tells_within is not None:
            parts.append(f"`{self.tells}` told within {self.tells_within} steps")
        elif self.tells:
            parts.append(f"`{self.tells}` told")
        parts.append(f"up to {self.repeated} steps repeated" if self.repeated else "none repeated")
        lost = f"only the {self.unreadable} unreadable sample left out" if self.unreadable else ""
        parts.append(lost or "no sample lost")
        return ", ".join(parts)


def _killed(name: str, event: str, trouble: Trouble) -> Scenario:
    return Scenario(
        name=name,
        event=event,
        moments=(Moment(trouble=trouble, workers=_WORKERS, then="lost"),),
        gap_seconds=_GAP_SECONDS,
        full_seconds=_REPLACED_SECONDS,
    )


def scenarios() -> list[Scenario]:
    """Each of them, those that need nothing special first."""
    return [
        _killed("kill", "SIGKILL to a worker", Kill(1)),
        _killed("kill-first", "SIGKILL to the worker that records and saves", Kill(0)),
        _killed("kill-forward", "a worker is killed in its forward pass", Order("forward", 1)),
        _killed("kill-reduction", "a worker is killed in the reduction", Order("reduction", 1)),
        _killed(
            "kill-saving",
            "the first worker is killed in the middle of a checkpoint",
            Order("saving", 0),
        ),
        _killed("exception", "a worker's code raises in its forward pass", Order("exception", 2)),
        Scenario(
            name="nan",
            event="one worker's loss is NaN, then one's gradient",
            moments=(
                Moment(trouble=Order("nan-loss", 1), workers=_WORKERS),
                Moment(trouble=Order("nan-gradient", 2), workers=_WORKERS, heard="skip"),
            ),
            gap_seconds=_PLANNED_SECONDS,
            tells="skip",
        ),
        Scenario(
            name="data",
            event="a sample can't be read",
            moments=(Moment(trouble=Order("data", 2), workers=_WORKERS),),
            gap_seconds=_PLANNED_SECONDS,
            unreadable=1,
            tells="broken_sample",
        ),
        Scenario(
            name="straggler",
            event="a worker becomes three times slower",
            moments=(Moment(trouble=Slow(2, 3.0, 8.0), workers=_WORKERS),),
            gap_seconds=_PLANNED_SECONDS,
            tells="straggler",
            tells_within=20,
        ),
        Scenario(
            name="freeze",
            event="a worker stands still for 20 s (SIGSTOP), and wakes up",
            moments=(Moment(trouble=Freeze(2, 20.0), workers=_WORKERS, then="lost"),),
            gap_seconds=_NODE_SECONDS,
        ),
        Scenario(
            name="disk-full",
            event="the disk is full, and free again later",
            moments=(
                Moment(trouble=FillDisk(), workers=_WORKERS),
                Moment(trouble=FreeDisk(), workers=_WORKERS, heard="warning"),
            ),
            gap_seconds=_PLANNED_SECONDS,
            tells="checkpoint",
            small_disk=True,
        ),
        Scenario(
            name="drain",
            event="a node drains",
            moments=(Moment(trouble=Drain(0), workers=_WORKERS, then="left"),),
            gap_seconds=_PLANNED_SECONDS,
            workers_after=2,
        ),
        Scenario(
            name="drain-replaced",
            event="a killed worker was replaced, then its node drains and another one is added",
            moments=(
                Moment(trouble=Kill(0), workers=_WORKERS, then="lost"),
                Moment(trouble=Drain(0), workers=_WORKERS, then="left"),
                Moment(trouble=AddNode(), steps=0),
            ),
            gap_seconds=_GAP_SECONDS,
        ),
        Scenario(
            name="add-node",
            event="a node is killed, another one is added",
            moments=(
                Moment(trouble=KillNode(2), workers=_WORKERS, then="lost"),
                Moment(trouble=AddNode()),
            ),
            gap_seconds=_NODE_SECONDS,
            limit_seconds=_NODES_SECONDS,
        ),
        Scenario(
            name="kill-first-node",
            event="the node of the worker that records and saves is killed, another one is added",
            moments=(
                Moment(trouble=KillNode(0), workers=_WORKERS, then="lost"),
                Moment(trouble=AddNode()),
            ),
            gap_seconds=_NODE_SECONDS,
            limit_seconds=_NODES_SECONDS,
        ),
        Scenario(
            name="kill-node-resizing",
            event="a node is killed while a replacement for a killed worker is under way, another "
            "one is added",
            moments=(
                Moment(trouble=Kill(1), workers=4, then="lost"),
                Moment(trouble=KillNode(3), coming=True, steps=0, then="lost"),
                Moment(trouble=AddNode()),
            ),
            gap_seconds=_RESIZE_SECONDS,
            workers=(1, 4),
            workers_after=4,
            limit_seconds=_NODES_SECONDS,
        ),
        Scenario(
            name="kill-all",
            event="all workers are killed at once",
            moments=(Moment(trouble=KillAll(), workers=_WORKERS, then="resume"),),
            gap_seconds=30.0,
            repeated=20,
        ),
        Scenario(
            name="kill-restart",
            event="SIGKILL to a worker, with membership.live=false",
            moments=(Moment(trouble=Kill(1), then="resume"),),
            gap_seconds=30.0,
            live=False,
            workers_after=None,
            repeated=20,
        ),
        Scenario(
            name="cut-link",
            event="the link of a host is cut",
            moments=(Moment(trouble=CutLink(2), workers=_WORKERS, then="lost"),),
            gap_seconds=_NODE_SECONDS,
            workers_after=None,
            hosts=True,
            leave_seconds=90.0,
            limit_seconds=300.0,
        ),
    ]


def scenario_of(name: str) -> Scenario:
    """By its name; `soak:MINUTES:SEED` for random trouble."""
    kind, *numbers = name.split(":")
    if kind == "soak":
        return soak(float(numbers[0]), int(numbers[1]))
    (found,) = [each for each in scenarios() if each.name == name]
    return found


def soak(minutes: float, seed: int) -> Scenario:
    """Random trouble for some minutes."""
    return Scenario(
        name="soak",
        event=f"random trouble for {minutes:g} min (seed {seed})",
        moments=(),
        gap_seconds=_RESIZE_SECONDS,
        workers_after=None,
        repeated=10**6,
        soak_seconds=minutes * 60.0,
        seed=seed,
        limit_seconds=minutes * 60.0 + 200.0,
    )


def random_trouble(draw: random.Random) -> tuple[Trouble, ...]:
    """The next event of a soak, and what makes up for it."""
    rank = draw.randrange(_WORKERS)
    choices: list[tuple[Trouble, ...]] = [
        (Kill(rank),),
        (Kill(rank),),
        (Order("forward", rank),),
        (Order("reduction", rank),),
        (Order("saving", 0),),
        (Order("exception", rank),),
        (Order("nan-loss", rank),),
        (Order("nan-gradient", rank),),
        (Slow(rank, 3.0, 5.0),),
        (Freeze(rank, draw.uniform(1.0, 4.0)),),
        (KillNode(rank), AddNode()),
        (Drain(rank), AddNode()),
    ]
    return draw.choice(choices)
