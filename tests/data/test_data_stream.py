import io
import multiprocessing
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from coloured_pictures import jpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from adaptive_platform.data import (
    BrokenLedger,
    PythonConfig,
    SampleStream,
    dealt,
    global_order,
    next_slice,
    wrap_dataset,
)
from adaptive_platform.data.image_folder import ImageFolderConfig
from adaptive_platform.data.parquet import ParquetConfig
from adaptive_platform.data.synthetic import SyntheticConfig
from adaptive_platform.errors import DataError, RunFailedError


def numbered(size):
    """Sample k is the number k, its label too."""
    rows = torch.arange(size, dtype=torch.float32)
    dataset = torch.utils.data.TensorDataset(rows[:, None], torch.arange(size))
    return wrap_dataset(dataset).train


def streams(samples, config, world, seed=0):
    return [SampleStream(samples, config, seed, rank, world) for rank in range(world)]


def run(workers, size, batches, epoch=0, cursor=0, stop=None, minimum=1, microbatch=4):
    """Shares of every worker, step by step, to the end of the epoch or to `stop`."""
    shares = []
    step = 0
    while cursor < (stop or size):
        count = next_slice(cursor, batches[step % len(batches)], size, minimum)
        shares += [w.take(epoch, cursor, count, minimum, microbatch) for w in workers]
        cursor += count
        step += 1
    return shares


def ids_of(shares):
    return [int(k) for share in shares for batch in share.microbatches for k in batch.ids]


@pytest.mark.parametrize("world", [2, 3])
def test_thirteen_samples_on_two_and_three_workers(world):
    workers = streams(numbered(13), PythonConfig(), world)
    for epoch in (0, 1):
        shares = run(workers, 13, [2 * world], epoch)
        assert sorted(ids_of(shares)) == list(range(13))


@pytest.mark.parametrize("world", [1, 3])
def test_resize_in_mid_epoch_covers_exactly_what_was_not_seen(world):
    samples = numbered(100)
    before = ids_of(run(streams(samples, PythonConfig(), 2), 100, [10], stop=40))
    workers = streams(samples, PythonConfig(), world)
    after = ids_of(run(workers, 100, [5 * world], cursor=40))
    assert len(before) == 40
    assert sorted(before + after) == list(range(100))
    following = ids_of(run(workers, 100, [5 * world], epoch=1))
    assert sorted(following) == list(range(100))
    assert not np.array_equal(global_order(0, 0, 100), global_order(0, 1, 100))


def test_slices_follow_the_global_order_and_items_stay_together():
    (worker,) = streams(numbered(50), PythonConfig(), 1, seed=9)
    share = worker.take(3, 20, 17, minimum=1, microbatch=5)
    order = global_order(9, 3, 50)[20:37]
    assert ids_of([share]) == order[dealt(17, 4)].tolist()
    assert [len(batch) for batch in share.microbatches] == [5, 4, 4, 4]
    for batch in share.microbatches:
        assert torch.equal(batch.inputs[:, 0].long(), batch.ids)
        assert torch.equal(batch.targets, batch.ids)
    assert len(share) == 17
    assert share.wait_seconds >= 0


@settings(max_examples=5, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=2, max_size=6), st.integers(1, 3), st.integers(1, 2))
def test_decode_processes_change_nothing_but_when(batches, world, minimum):
    size = 70
    options = {"samples": size, "augmentation": "crop_flip", "image_size": 8}
    samples = SyntheticConfig(**options).open().train
    direct = streams(samples, SyntheticConfig(**options), world)
    ahead = streams(samples, SyntheticConfig(**options, decode_workers=1, prefetch=1), world)
    try:
        for epoch in (0, 1):
            expected = run(direct, size, batches, epoch, minimum=minimum)
            actual = run(ahead, size, batches, epoch, minimum=minimum)
            for x, y in zip(expected, actual, strict=True):
                for a, b in zip(x.microbatches, y.microbatches, strict=True):
                    assert torch.equal(a.ids, b.ids)
                    assert torch.equal(a.inputs, b.inputs)
                    assert torch.equal(a.targets, b.targets)
    finally:
        for worker in ahead:
            worker.close()


class Counting:
    """Says in shared memory how often each sample was read."""

    def __init__(self, size):
        self.reads = multiprocessing.Array("i", size)

    def __len__(self):
        return len(self.reads)

    def __getitem__(self, index):
        with self.reads.get_lock():
            self.reads[index] += 1
        return torch.tensor([index]), index


def test_a_batch_change_neither_repeats_nor_discards_decoding():
    dataset = Counting(600)
    samples = wrap_dataset(dataset).train
    for k in range(len(dataset)):
        dataset.reads[k] = 0
    worker = SampleStream(samples, PythonConfig(decode_workers=2, prefetch=2), 0, 1, 2)
    shares = run([worker], 600, [4, 60, 10, 128, 6])
    seen = ids_of(shares)
    worker.close()
    assert len(seen) == 300
    first = [dataset.reads[k] for k in seen]
    assert set(first) <= {1, 2}, "a second read belongs to the next epoch's look-ahead"
    assert sum(dataset.reads) <= 300 + (2 * 2 + 1) * 16


def test_while_a_step_lasts_the_samples_of_the_next_ones_are_read():
    dataset = Counting(400)
    samples = wrap_dataset(dataset).train
    for k in range(len(dataset)):
        dataset.reads[k] = 0
    worker = SampleStream(samples, PythonConfig(decode_workers=1, prefetch=3), 0, 0, 1)
    order = global_order(0, 0, 400)
    cursor, step = 0, 16
    for _ in range(5):
        worker.take(0, cursor, step, minimum=1, microbatch=step)
        cursor += step
        deadline = time.monotonic() + 150
        # The step: nothing is asked for, and three chunks come all the same.
        while sum(dataset.reads) < cursor + 3 * 16:
            assert time.monotonic() < deadline, "nothing is read ahead"
            time.sleep(0.01)
        assert all(dataset.reads[k] == 1 for k in order[: cursor + 3 * 16])
    worker.close()
    assert max(dataset.reads) == 1
    assert sum(dataset.reads) <= cursor + 4 * 16, "and not more than prefetch says"


def test_after_an_unusual_step_the_stream_goes_on():
    samples = numbered(64)
    config = PythonConfig(decode_workers=1, prefetch=1)
    workers = streams(samples, config, 3)
    shares = run(workers, 64, [4, 12, 5, 3, 24], minimum=2)
    for worker in workers:
        worker.close()
    assert sorted(ids_of(shares)) == list(range(64))
    assert all(len(b) >= 2 for share in shares for b in share.microbatches)


def test_going_back_and_far_ahead_still_gives_the_right_samples():
    samples = numbered(400)
    (ahead,) = streams(samples, PythonConfig(decode_workers=1, prefetch=1), 1)
    for epoch, cursor in [(0, 0), (0, 8), (0, 0), (5, 200), (0, 8), (5, 208)]:
        share = ahead.take(epoch, cursor, 8, minimum=1, microbatch=8)
        assert ids_of([share]) == global_order(0, epoch, 400)[cursor : cursor + 8].tolist()
    ahead.close()


def test_close_ends_the_decode_processes():
    before = set(multiprocessing.active_children())
    (worker,) = streams(numbered(40), PythonConfig(decode_workers=2), 1)
    worker.take(0, 0, 8, minimum=1, microbatch=8)
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 2
    worker.close()
    for process in started:
        process.join(10)
        assert not process.is_alive()


def decoding(decode_workers=2):
    before = set(multiprocessing.active_children())
    config = PythonConfig(decode_workers=decode_workers, prefetch=1)
    (worker,) = streams(numbered(4000), config, 1)
    worker.take(0, 0, 8, minimum=1, microbatch=8)
    return worker, set(multiprocessing.active_children()) - before


def test_decode_processes_outlive_signals_to_the_group_so_that_a_step_can_finish():
    worker, processes = decoding()
    for process in processes:
        subprocess.run(["/bin/sh", "-c", f"kill -TERM {process.pid}; kill -INT {process.pid}"])
    shares = run([worker], 4000, [100], cursor=8, stop=1008)
    assert sorted(ids_of(shares)) == sorted(global_order(0, 0, 4000)[8:1008].tolist())
    worker.close()


def test_a_training_process_that_never_closes_its_stream_still_ends():
    code = (
        "from adaptive_platform.data import SampleStream\n"
        "from adaptive_platform.data.synthetic import SyntheticConfig\n"
        "config = SyntheticConfig(samples=99, decode_workers=2)\n"
        "kept = SampleStream(config.open().train, config, 0, 0, 1)\n"
        "kept.cycle = kept, kept.take(0, 0, 8, 1, 8)\n"
        "raise SystemExit(7)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=180).returncode == 7


KILL = """
import multiprocessing, threading
from adaptive_platform.data import SampleStream
from adaptive_platform.data.synthetic import SyntheticConfig
from adaptive_platform.errors import RunFailedError

def train():
    config = SyntheticConfig(samples=900, image_size=8, decode_workers=2, prefetch=1)
    stream = SampleStream(config.open().train, config, 0, 0, 1)
    stream.take(0, 0, 8, 1, 8)
    for process in multiprocessing.active_children():
        process.kill()
    try:
        stream.take(0, 8, 800, 1, 8)
    except RunFailedError as error:
        print(error)

thread = threading.Thread(target=train)  # as in a Ray Train worker: not the main thread
thread.start()
thread.join()
"""


def test_a_killed_decode_process_ends_the_run_with_a_cause_long_before_the_time_limit():
    done = subprocess.run([sys.executable, "-c", KILL], capture_output=True, text=True, timeout=100)
    assert "the decode processes failed: DataLoader worker" in done.stdout, done.stderr


def test_a_slow_read_ends_the_run_at_the_time_limit():
    class Stuck(Counting):
        def __getitem__(self, index):
            if torch.utils.data.get_worker_info() is not None:
                time.sleep(1.5)
            return super().__getitem__(index)

    config = PythonConfig(decode_workers=1, decode_timeout_seconds=0.2)
    (worker,) = streams(wrap_dataset(Stuck(20)).train, config, 1)
    with pytest.raises(
        RunFailedError, match=r"nothing came for 0\.2 s.*data\.decode_timeout_seconds"
    ):
        worker.take(0, 0, 8, minimum=1, microbatch=8)
    worker.close()


def mixed_images():
    """One image of each mode, of sizes from 8 x 300 to 300 x 8: (name, encoded)."""
    made = []
    sizes = [(8, 300), (300, 8), (20, 20), (64, 48), (33, 90), (8, 8)]
    for mode, size in zip(["L", "LA", "P", "RGBA", "CMYK", "1"], sizes, strict=True):
        form = "JPEG" if mode == "CMYK" else "PNG"
        options = {"transparency": 0} if mode == "P" else {}
        buffer = io.BytesIO()
        Image.new(mode, size).save(buffer, form, **options)
        made.append((f"{mode}.{form.lower()}", buffer.getvalue()))
    return made


@pytest.mark.parametrize("kind", ["image_folder", "parquet"])
def test_mixed_modes_and_sizes_need_no_setting(tmp_path, write_parquet, kind):
    images = mixed_images()
    if kind == "image_folder":
        (tmp_path / "train" / "a").mkdir(parents=True)
        for name, encoded in images:
            (tmp_path / "train" / "a" / name).write_bytes(encoded)
        config = ImageFolderConfig(train=str(tmp_path / "train"))
    else:
        rows = [(encoded, 0) for _, encoded in images]
        config = ParquetConfig(train=str(write_parquet(tmp_path / "t.parquet", rows)))
    (worker,) = streams(config.open().train, config, 1)
    share = worker.take(0, 0, 6, minimum=1, microbatch=6)
    assert not share.broken
    assert share.microbatches[0].inputs.shape == (6, 3, 224, 224)


def test_augmentation_belongs_to_the_sample_not_to_the_layout():
    config = SyntheticConfig(samples=30, augmentation="resized_crop", image_size=12)
    samples = config.open().train

    def pictures(world, batches, epoch=0, seed=0):
        torch.manual_seed(world)
        found = {}
        for share in run(streams(samples, config, world, seed), 30, batches, epoch):
            for batch in share.microbatches:
                found.update(zip(batch.ids.tolist(), batch.inputs, strict=True))
        return torch.stack([found[k] for k in range(30)])

    reference = pictures(1, [30])
    assert torch.equal(reference, pictures(2, [7]))
    assert torch.equal(reference, pictures(3, [4, 9]))
    assert not torch.equal(reference, pictures(1, [30], epoch=1))
    assert not torch.equal(reference, pictures(1, [30], seed=1))


@pytest.mark.parametrize("decode_workers", [0, 1])
def test_taking_samples_leaves_the_random_state_alone(decode_workers):
    config = SyntheticConfig(samples=30, augmentation="crop_flip", decode_workers=decode_workers)
    (worker,) = streams(config.open().train, config, 1)
    before = torch.get_rng_state()
    worker.take(0, 0, 10, minimum=1, microbatch=10)
    worker.close()
    assert torch.equal(before, torch.get_rng_state())


def broken_source(kind, tmp_path, write_folder, write_parquet, damage):
    """Forty images, three of them unreadable; the config, and where the three are."""
    if kind == "image_folder":
        train = write_folder(tmp_path / "train", {"a": 14, "b": 13, "c": 13})
        bad = [str(path) for path in damage(train / "b")]
        return ImageFolderConfig(train=str(train)), bad
    rows = [(jpeg(k % 3, k), k % 3) for k in range(40)]
    for k, image in ((5, rows[5][0][: len(rows[5][0]) // 2]), (6, b""), (30, b"text")):
        rows[k] = (image, rows[k][1])
    path = write_parquet(tmp_path / "t.parquet", rows)
    return ParquetConfig(train=str(path)), [f"{path} row {k}" for k in (5, 6, 30)]


@pytest.mark.parametrize("kind", ["image_folder", "parquet"])
@pytest.mark.parametrize("decode_workers", [0, 1])
def test_broken_files_are_skipped_named_and_counted(
    tmp_path, write_folder, write_parquet, damage, kind, decode_workers
):
    config, bad = broken_source(kind, tmp_path, write_folder, write_parquet, damage)
    config = config.model_copy(update={"decode_workers": decode_workers})
    source = config.open()
    ledger = BrokenLedger(len(source.train), config.max_broken_share)
    workers = streams(source.train, config, 2)
    reported = []
    for epoch in (0, 1):
        shares = run(workers, 40, [8], epoch, minimum=2)
        for share in shares:
            reported += ledger.record(share.broken)
            for batch in share.microbatches:
                assert len(batch) >= 2
                for image, label in zip(batch.inputs, batch.targets, strict=True):
                    assert image.float().mean((1, 2)).argmax() == label, "images and labels match"
        left_out = [int(k) for share in shares for k in share.left_out]
        assert len(set(ids_of(shares) + left_out)) == 37
    for worker in workers:
        worker.close()
    assert sorted(sample.where for sample in reported) == sorted(bad)
    assert ledger.skips == 6


@pytest.mark.parametrize("kind", ["image_folder", "parquet"])
def test_strict_policy_stops_and_names_the_place(
    tmp_path, write_folder, write_parquet, damage, kind
):
    config, bad = broken_source(kind, tmp_path, write_folder, write_parquet, damage)
    config = config.model_copy(update={"broken": "stop"})
    (worker,) = streams(config.open().train, config, 1)
    with pytest.raises(DataError, match="can't read") as caught:
        worker.take(0, 0, 40, minimum=1, microbatch=40)
    assert any(place in str(caught.value) for place in bad)


class Fragile:
    """Ten samples of which those with number >= `whole` can't be read."""

    def __init__(self, whole):
        self.whole = whole

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index >= self.whole:
            raise OSError("damaged")
        return torch.tensor([float(index)]), index


@pytest.mark.parametrize(
    ("whole", "sizes", "left_out"),
    [(10, [4, 3, 3], 0), (9, [3, 3, 3], 0), (5, [3, 2], 0), (1, [], 1), (0, [], 0)],
)
def test_micro_batches_are_balanced_anew_and_never_below_the_minimum(whole, sizes, left_out):
    (worker,) = streams(wrap_dataset(Fragile(whole)).train, PythonConfig(), 1)
    share = worker.take(0, 0, 10, minimum=2, microbatch=4)
    assert [len(batch) for batch in share.microbatches] == sizes
    assert (len(share.left_out), len(share.broken)) == (left_out, 10 - whole)


def test_nine_samples_with_batch_norm_leave_no_batch_of_one():
    workers = streams(numbered(9), PythonConfig(), 2)
    for batches in ([8], [4], [3], [2, 5]):
        shares = run(workers, 9, batches, minimum=2, microbatch=4)
        assert sorted(ids_of(shares)) == list(range(9))
        assert all(len(b) >= 2 for share in shares for b in share.microbatches)


def test_more_workers_than_samples_leaves_some_idle():
    workers = streams(numbered(3), PythonConfig(), 5)
    shares = run(workers, 3, [64], minimum=1)
    assert sorted(ids_of(shares)) == [0, 1, 2]
    assert [len(share) for share in shares] == [1, 1, 1, 0, 0]
