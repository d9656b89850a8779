"""Encoded images cached over all workers: each keeps its share and gives from it to the others.

The global order deals every epoch anew, so a worker meets other samples each time. A cache of its
own would therefore miss, or hold everything. Here sample i lies with worker `i % world_size`, and
whoever needs it first reads it from storage and hands it over: together the workers read each file
once, and hold it once (Ying et al. 2018, arXiv 1811.06992, shards and caches the input likewise).

Who trains on which sample is not touched, and neither is what a sample is. Not promised: that a
file is read only once where two ask for it at the same time (one at the end of an epoch, one that
is ahead in the next), and where workers come, go or do not answer, since then storage is read.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any

from adaptive_platform.data.samples import EncodedImages
from adaptive_platform.data.shelf import Shelf, ShelfLink, ShelfServer

__all__ = ["ShardedCache"]

_MIB = 2**20


class ShardedCache(EncodedImages):
    """The images of `samples`, from memory where one of the workers holds them.

    Make a new one when rank or world size change, with the shelf of the old: both decide who owns
    what. Decode processes may hold a copy; they ask the worker that started them.

    Args:
        samples: Where to read from.
        limit_mib: Most that this worker holds, in MiB.
        rank: This worker.
        world_size: Number of workers.
        gather: The values of all workers by rank, as `Reducer.all_gather_object` gives them; called
            once, here.
        one_machine: All workers are on one, so that nobody else need be able to connect.
        shelf: What this worker held under another rank or world size; of that it keeps what is its
            own now. An empty one where None.
    """

    def __init__(
        self,
        samples: EncodedImages,
        limit_mib: int,
        rank: int,
        world_size: int,
        gather: Callable[[Any], list[Any]],
        *,
        one_machine: bool,
        shelf: Shelf | None = None,
    ) -> None:
        self._samples = samples
        self._rank = rank
        self._limit_mib = limit_mib
        self.background = samples.background
        self.image_size = samples.image_size
        self._shelf: Shelf | None = Shelf(0) if shelf is None else shelf
        self._shelf.keep(lambda sample: sample % world_size == rank, limit_mib * _MIB)
        self._home = os.getpid()
        self._links: dict[int, ShelfLink | None] = {}
        self._links_of = self._home
        self._token = secrets.token_bytes(32)
        self._server: ShelfServer | None = None
        try:
            host = "127.0.0.1" if one_machine else socket.gethostbyname(socket.gethostname())
            self._server = ShelfServer(self._shelf, host, self._token)
        except OSError:
            pass  # nobody can ask this worker, so the others read its share from storage
        own = (self._server.address, self._token) if self._server else None
        self._peers: Sequence[tuple[tuple[str, int], bytes] | None] = ()
        try:
            self._peers = gather(own)
        except BaseException:
            self.close()
            raise
        assert len(self._peers) == world_size

    def __len__(self) -> int:
        return len(self._samples)

    def label(self, index: int) -> int:
        """Class number of image `index`."""
        return self._samples.label(index)

    def where(self, index: int) -> str:
        """Path, or file and row."""
        return self._samples.where(index)

    @property
    def held_bytes(self) -> int:
        """Bytes of images that this worker holds."""
        return self._shelf.held_bytes if self._shelf else 0

    def describe(self) -> str:
        """One line for people."""
        return (
            f"encoded images are kept in memory: up to {self._limit_mib} MiB on each of "
            f"{len(self._peers)} workers"
        )

    def encoded(self, index: int) -> bytes:
        """Image `index`, from its owner's memory or from storage."""
        owner = index % len(self._peers)
        if owner == self._rank and self._shelf is not None and os.getpid() == self._home:
            held = self._shelf.get(index)
            if held is None:
                held = self._samples.encoded(index)
                self._shelf.offer(index, held)
            return held
        try:
            link = self._link_to(owner)
            held, wanted = link.get(index) if link else (None, False)
        except OSError:
            self._give_up(owner)
            link, held, wanted = None, None, False
        if held is not None:
            return held
        read = self._samples.encoded(index)
        if link is not None and wanted:
            try:
                link.put(index, read)
            except OSError:
                self._give_up(owner)
        return read

    def close(self) -> None:
        """Answer and ask no more; later reads go to storage. Safe to call twice."""
        if self._server is not None:
            self._server.close()
        for link in self._links.values():
            if link is not None:
                link.close()
        self._shelf = None
        self._server = None
        self._links = dict.fromkeys(range(len(self._peers)))

    def _link_to(self, owner: int) -> ShelfLink | None:
        """The connection to a worker; None for one that did not answer."""
        if self._links_of != os.getpid():  # a decode process does not speak on its parent's line
            self._links, self._links_of = {}, os.getpid()
        if owner not in self._links:
            peer = self._peers[owner]
            self._links[owner] = ShelfLink(*peer) if peer else None
        return self._links[owner]

    def _give_up(self, owner: int) -> None:
        link = self._links.get(owner)
        if link is not None:
            link.close()
        self._links[owner] = None

    def __getstate__(self) -> dict[str, Any]:
        """For decode processes that are started afresh: what asks, without what holds."""
        kept: dict[str, Any] = {"_shelf": None, "_server": None, "_links": {}, "_links_of": -1}
        return self.__dict__ | kept
