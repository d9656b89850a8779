"""The error that every failed or overdue operation between workers ends in."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from adaptive_platform.errors import RunFailedError

__all__ = ["CollectiveError", "LinkError"]


class CollectiveError(RunFailedError):
    """An operation between workers failed or took too long; its process groups are closed.

    The worker itself is sound: build a new `Reducer` with the survivors and a higher generation.
    """

    def __init__(
        self,
        *,
        operation: str,
        group: str,
        rank: int,
        world_size: int,
        generation: int,
        timeout_seconds: float,
        after_seconds: float,
        peers: Sequence[int] = (),
        reason: str = "",
    ) -> None:
        self.operation = operation
        """What was being done, such as `reduce_scatter`."""
        self.group = group
        """Which group of workers, such as `row 0 (workers 0, 1)`."""
        self.rank = rank
        self.world_size = world_size
        self.generation = generation
        self.timeout_seconds = timeout_seconds
        self.after_seconds = after_seconds
        """From the beginning of the operation to the end of the roll call."""
        self.peers = tuple(peers)
        """Ranks that are lost, silent or on the other end of the broken link; may be empty."""
        self.reason = reason
        """What the backend said."""
        self._fields: dict[str, Any] = {
            "operation": operation,
            "group": group,
            "rank": rank,
            "world_size": world_size,
            "generation": generation,
            "timeout_seconds": timeout_seconds,
            "after_seconds": after_seconds,
            "peers": self.peers,
            "reason": reason,
        }
        who = ", ".join(str(peer) for peer in self.peers)
        lost = f"; no answer from worker{'s' if len(self.peers) > 1 else ''} {who}" if who else ""
        said = f". Cause: {_plain(reason)}" if reason else ""
        super().__init__(
            f"{operation} in {group} failed on worker {rank} of {world_size} (generation "
            f"{generation}) after {after_seconds:.1f} s, limit {timeout_seconds:g} s{lost}{said}."
        )

    def __reduce__(self) -> tuple[Callable[[], CollectiveError], tuple[()]]:
        # Keyword-only arguments do not survive the pickling that Ray does to every error.
        return partial(CollectiveError, **self._fields), ()


class LinkError(RuntimeError):
    """One operation of one group went wrong; inside this room only.

    The reducer turns it into a `CollectiveError` after asking who is still there.
    """

    def __init__(self, operation: str, group: str, peers: Sequence[int], reason: str) -> None:
        self.operation = operation
        self.group = group
        self.peers = tuple(peers)
        self.reason = reason
        super().__init__(f"{operation} in {group}: {reason}")

    def bare(self) -> LinkError:
        """The same error without tracebacks, whose frames hold process groups and buffers.

        Connections close when the last reference goes; only then do the other workers notice.
        """
        self.__context__ = None
        return self.with_traceback(None)


def _plain(reason: str) -> str:
    """Gloo's message without source position, advice and greetings."""
    first = (reason.strip().splitlines() or [""])[0]
    first = re.sub(r"\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*", "", first)
    return first.split(" This is typically")[0].strip().rstrip(".")
