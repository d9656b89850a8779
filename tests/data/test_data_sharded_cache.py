import multiprocessing
import pickle
import threading
import time

import pytest
import torch
from coloured_pictures import jpeg
from ranks import as_threads

from adaptive_platform.data import SampleStream, ShardedCache, global_order, next_slice
from adaptive_platform.data.image_folder import ImageFolderConfig
from adaptive_platform.data.images import BrokenImageError
from adaptive_platform.data.samples import EncodedImages
from adaptive_platform.data.shelf import Shelf, ShelfLink, ShelfServer

SIZE = 60
MIB = 2**20


class Storage(EncodedImages):
    """Pictures made from their number; counts in shared memory how often each is read."""

    image_size = 16

    def __init__(self, broken=(), pad=0):
        self.reads = multiprocessing.Array("i", SIZE)
        self._broken = broken
        self._pad = pad

    def __len__(self):
        return SIZE

    def encoded(self, index):
        with self.reads.get_lock():
            self.reads[index] += 1
        if index in self._broken:
            raise BrokenImageError("damaged")
        return jpeg(index % 3, index, (16, 16)) + bytes(self._pad)

    def label(self, index):
        return index % 3

    def where(self, index):
        return f"picture {index}"


class Workers:
    """Streams of some workers in one process, each with its part of one cache."""

    def __init__(self, storage, world, decode_workers=0, shelves=None):
        config = ImageFolderConfig(
            train=".", augmentation="resized_crop", decode_workers=decode_workers, prefetch=1
        )
        self.shelves = [*(shelves or ()), *(Shelf(0) for _ in range(world))][:world]
        barrier = threading.Barrier(world)
        addresses = [None] * world

        def begin(rank):
            def gather(own):
                addresses[rank] = own
                barrier.wait()
                return list(addresses)

            return ShardedCache(
                storage, 1, rank, world, gather, one_machine=True, shelf=self.shelves[rank]
            )

        self.caches = as_threads(world, begin)
        self.streams = [SampleStream(c, config, 7, r, world) for r, c in enumerate(self.caches)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in (*self.streams, *self.caches):
            each.close()

    def epoch(self, epoch, batch=8, cursor=0, stop=SIZE):
        """Pictures by number, as [C, H, W], of positions [cursor, stop)."""
        found = {}
        while cursor < stop:
            count = next_slice(cursor, batch, SIZE, 1)
            for stream in self.streams:
                share = stream.take(epoch, cursor, count, 1, count)
                for b in share.microbatches:
                    for sample, image in zip(b.ids.tolist(), b.inputs, strict=True):
                        assert sample not in found
                        found[sample] = image
            cursor += count
        return found


def without_cache(epoch):
    config = ImageFolderConfig(train=".", augmentation="resized_crop")
    stream = SampleStream(Storage(), config, 7, 0, 1)
    (batch,) = stream.take(epoch, 0, SIZE, 1, SIZE).microbatches
    return dict(zip(batch.ids.tolist(), batch.inputs, strict=True))


def alike(found, expected):
    assert sorted(found) == sorted(expected)
    return all(torch.equal(found[sample], expected[sample]) for sample in expected)


@pytest.mark.parametrize(("world", "decode_workers"), [(1, 0), (3, 0), (1, 1)])
def test_each_file_is_read_once_over_epochs_and_the_samples_are_the_same(world, decode_workers):
    storage = Storage()
    with Workers(storage, world, decode_workers=decode_workers) as workers:
        for epoch in (0, 1, 2):
            assert alike(workers.epoch(epoch), without_cache(epoch))
        assert list(storage.reads) == [1] * SIZE


def test_several_decode_processes_share_it_and_reading_ends_with_the_first_epoch():
    storage = Storage()
    with Workers(storage, 2, decode_workers=2) as workers:
        for epoch in (0, 1):
            assert alike(workers.epoch(epoch), without_cache(epoch))
        reads = list(storage.reads)
        assert set(reads) <= {1, 2}, "twice where two asked at once, around the epoch's end"
        for epoch in (2, 3):
            workers.epoch(epoch)
        assert list(storage.reads) == reads


def test_each_worker_holds_its_share_once_and_tells_how_much():
    storage = Storage()
    with Workers(storage, 3) as workers:
        workers.epoch(0)
        sizes = [len(storage.encoded(k)) for k in range(SIZE)]
        for rank, cache in enumerate(workers.caches):
            assert cache.held_bytes == sum(sizes[rank::3])
        share = workers.streams[1].take(1, 0, 6, 1, 6)
        assert share.cached_bytes == workers.caches[1].held_bytes
        assert "1 MiB on each of 3 workers" in workers.caches[0].describe()
    assert [cache.held_bytes for cache in workers.caches] == [0, 0, 0], "closed"


@pytest.mark.parametrize("world", [1, 3])
def test_after_a_resize_the_right_samples_come_whoever_owns_them_now(world):
    storage = Storage()
    with Workers(storage, 2) as before:
        seen = before.epoch(0, stop=24)
    with Workers(storage, world) as after:
        rest = after.epoch(0, batch=9, cursor=24)
        assert alike(seen | rest, without_cache(0))
        assert len(seen) + len(rest) == SIZE
        assert alike(after.epoch(1), without_cache(1))
        reads = list(storage.reads)
        assert alike(after.epoch(2), without_cache(2))
        assert list(storage.reads) == reads


@pytest.mark.parametrize("world", [1, 2, 4])
def test_survivors_of_a_resize_keep_what_is_still_theirs(world):
    storage = Storage()
    with Workers(storage, 3) as before:
        before.epoch(0)
    shelves = before.shelves
    with Workers(storage, world, shelves=shelves) as after:
        kept = [k for k in range(SIZE) if k % world < 3 and k % world == k % 3]
        assert sum(len(shelf) for shelf in after.shelves) == len(kept)
        assert alike(after.epoch(1), without_cache(1))
        assert [k for k in range(SIZE) if storage.reads[k] == 1] == kept
        for rank, cache in enumerate(after.caches):
            held = [len(storage.encoded(k)) for k in range(SIZE) if k % world == rank]
            assert cache.held_bytes == sum(held)


def test_the_limit_is_kept_and_what_does_not_fit_is_read_again():
    storage = Storage(pad=MIB // 8)
    with Workers(storage, 2) as workers:
        for epoch in (0, 1):
            workers.epoch(epoch)
        for cache in workers.caches:
            assert 0.8 * MIB < cache.held_bytes <= MIB
        assert sorted(set(storage.reads)) == [1, 2]
        assert list(storage.reads).count(1) == 14


def test_a_broken_file_is_broken_in_every_epoch():
    storage = Storage(broken=(4, 5))
    with Workers(storage, 2) as workers:
        for epoch in (0, 1):
            broken = [
                sample
                for stream in workers.streams
                for sample in stream.take(epoch, 0, SIZE, 1, SIZE).broken
            ]
            assert sorted(sample.where for sample in broken) == ["picture 4", "picture 5"]


def test_a_lost_worker_costs_reads_and_no_samples():
    storage = Storage()
    with Workers(storage, 2) as workers:
        workers.epoch(0)
        workers.caches[1].close()
        remaining = workers.streams[0]
        order = global_order(7, 1, SIZE)
        share = remaining.take(1, 0, SIZE, 1, SIZE)
        assert sorted(k for b in share.microbatches for k in b.ids.tolist()) == sorted(order[::2])
        assert not share.broken
        lost = [k for k in order[::2] if k % 2 == 1]
        assert sum(storage.reads) == SIZE + len(lost)


class Listed(EncodedImages):
    """Notes in a list, which every copy has for itself, what is read."""

    image_size = 16

    def __init__(self):
        self.read = []

    def __len__(self):
        return 8

    def encoded(self, index):
        self.read.append(index)
        return bytes([index])

    def label(self, index):
        return 0

    def where(self, index):
        return str(index)


def test_a_decode_process_that_starts_afresh_asks_the_worker_it_came_from():
    cache = ShardedCache(Listed(), 1, 0, 1, lambda own: [own], one_machine=True)
    for index in range(4):
        cache.encoded(index)
    copy = pickle.loads(pickle.dumps(cache))
    assert [copy.encoded(index) for index in range(8)] == [bytes([index]) for index in range(8)]
    # Its list as it was when it was copied, and then what no one held.
    assert copy._samples.read == [0, 1, 2, 3, 4, 5, 6, 7]
    assert copy.held_bytes == 0
    deadline = time.monotonic() + 120
    while cache.held_bytes < 8:  # handed over without waiting for an answer
        assert time.monotonic() < deadline
        time.sleep(0.01)
    copy.close()
    cache.close()


def test_a_caller_without_the_token_is_not_answered():
    shelf = Shelf(MIB)
    shelf.offer(3, b"picture")
    server = ShelfServer(shelf, "127.0.0.1", b"right")
    try:
        link = ShelfLink(server.address, b"right")
        assert link.get(3) == (b"picture", False)
        assert link.get(4) == (None, True)
        link.close()
        stranger = ShelfLink(server.address, b"wrong")
        with pytest.raises(OSError, match=r"hung up|reset|roken pipe"):
            stranger.get(3)
        stranger.close()
    finally:
        server.close()
