import pytest
import torch

from adaptive_platform.data import evaluation_batches
from adaptive_platform.data.image_folder import ImageFolderConfig
from adaptive_platform.data.synthetic import SyntheticConfig
from adaptive_platform.errors import DataError


@pytest.mark.parametrize("world", [1, 2, 3, 20])
@pytest.mark.parametrize("decode_workers", [0, 1])
def test_each_sample_once_over_all_workers(world, decode_workers):
    config = SyntheticConfig(
        samples=2, eval_samples=13, augmentation="crop_flip", decode_workers=decode_workers
    )
    samples = config.open().eval
    plain = SyntheticConfig(samples=2, eval_samples=13)
    (whole,) = evaluation_batches(samples, plain, 0, 1, 13)
    ids = []
    for rank in range(world if decode_workers == 0 else min(world, 2)):
        for batch in evaluation_batches(samples, config, rank, world, 4):
            assert 1 <= len(batch) <= 4
            assert torch.equal(batch.inputs, whole.inputs[batch.ids]), "never augmented"
            assert torch.equal(batch.targets, whole.targets[batch.ids])
            ids += batch.ids.tolist()
    if decode_workers == 0:
        assert sorted(ids) == list(range(13))


def test_broken_samples_are_left_out_and_counted_or_stop(tmp_path, write_folder, damage):
    train = write_folder(tmp_path / "train", {"a": 8, "b": 4})
    bad = damage(train / "a")
    config = ImageFolderConfig(train=str(train), eval=str(train))
    samples = config.open().eval
    batches = evaluation_batches(samples, config, 0, 1, 3)
    assert sum(len(batch) for batch in batches) == 9
    assert [sample.where for sample in batches.broken] == [str(path) for path in bad]
    strict = config.model_copy(update={"broken": "stop"})
    with pytest.raises(DataError, match=str(bad[0])):
        list(evaluation_batches(samples, strict, 0, 1, 3))
