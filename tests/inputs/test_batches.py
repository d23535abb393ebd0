"""Inputs of equal shape share a batch, in order, one batch in memory at a time."""

import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hookscope.errors import ImageError, UsageError
from hookscope.inputs import Batch, ahead, load_batches, load_input, noise_batch, to_device
from hookscope.results import Preprocessing
from tests.inputs.written import PLAIN, join_readers, random_pixels, save, write_all, write_tensor


def test_batches_hold_equal_shapes_in_order(tmp_path):
    sizes = [(4, 4), (4, 4), (4, 4), (5, 4), (4, 4), (4, 4)]
    paths = write_all(tmp_path, sizes)
    batches = list(load_batches(paths, PLAIN, 2, pytest.fail))
    assert [batch.indices for batch in batches] == [(0, 1), (2,), (3,), (4, 5)]
    assert [tuple(batch.args[0].shape) for batch in batches] == [(2, 3, 4, 4), (1, 3, 4, 4), (1, 3, 5, 4), (2, 3, 4, 4)]
    singles = [load_input(path, PLAIN) for path in paths]
    assert [record for batch in batches for record in batch.records] == [record for _, record in singles]
    together = [tensor for batch in batches for tensor in batch.args[0]]
    assert all(torch.equal(one, other) for one, (other, _) in zip(together, singles, strict=True))


@given(
    kinds=st.lists(st.sampled_from(["small", "large", "bad"]), max_size=12),
    batch_size=st.integers(1, 5),
)
def test_bad_files_are_reported_and_the_others_are_finished(tmp_path_factory, kinds, batch_size):
    folder = tmp_path_factory.getbasetemp()
    small, large = save(folder / "small.png", random_pixels(2, 2)), save(folder / "large.png", random_pixels(3, 3))
    paths = [{"small": small, "large": large, "bad": folder / "missing.png"}[kind] for kind in kinds]
    errors = []
    batches = list(load_batches(paths, PLAIN, batch_size, errors.append))
    assert len(errors) == kinds.count("bad")
    good = [kind for kind in kinds if kind != "bad"]
    assert [index for batch in batches for index in batch.indices] == list(range(len(good)))
    assert [Path(record.name).stem for batch in batches for record in batch.records] == good
    for batch in batches:
        assert 1 <= len(batch.indices) == len(batch.records) == len(batch.args[0]) <= batch_size
        assert len({record.shape for record in batch.records}) == 1


@pytest.fixture
def read(monkeypatch) -> list[Path]:
    """What has been read, in whatever thread."""
    paths: list[Path] = []
    for name in ("load_input", "load_quietly"):
        load = getattr(ahead, name)
        monkeypatch.setattr(ahead, name, lambda path, how, load=load: paths.append(path) or load(path, how))
    return paths


def test_one_batch_at_most_is_read_before_it_is_asked_for(tmp_path, read):
    paths = write_all(tmp_path, [(4, 4)] * 7)
    loaded = load_batches(paths, PLAIN, 2, pytest.fail)
    assert read == []
    for finished in (2, 4, 6):
        next(loaded)
        join_readers()
        assert sorted(read) == paths[: finished + 2]


def test_no_more_than_that_is_read_where_every_input_is_a_batch(tmp_path, read):
    paths = write_all(tmp_path, [(4, 4), (5, 5)] * 5)
    for finished, _ in enumerate(load_batches(paths, PLAIN, 3, pytest.fail), start=1):
        join_readers()
        own = 1 if finished < len(paths) else 0  # of another shape, so it tells that the batch is complete
        assert sorted(read) == paths[: finished + own + 3]


def test_only_one_batch_is_in_memory_and_the_inputs_of_the_next(tmp_path, monkeypatch):
    paths = write_all(tmp_path, [(4, 4)] * 9)
    singles: dict[Path, weakref.ref] = {}  # by file: threads end in any order
    stacked: list[weakref.ref] = []

    def observed(path: Path, how: Preprocessing) -> tuple:
        assert all(batch() is None for batch in stacked[:-1]), "of earlier batches the last is in use"
        tensor, record = load_input(path, how)
        singles[path] = weakref.ref(tensor)
        return tensor, record

    monkeypatch.setattr(ahead, "load_input", observed)
    monkeypatch.setattr(ahead, "load_quietly", observed)
    loaded = load_batches(paths, PLAIN, 3)
    for finished in (3, 6, 9):
        stacked.append(weakref.ref(next(loaded).args[0]))
        join_readers()
        assert len(singles) == min(finished + 3, 9)
        alive = sum(singles[path]() is not None for path in paths[:finished])
        assert alive <= 1, "not held once more beside their batch"


def test_tensors_of_different_dtype_do_not_share_a_batch(tmp_path):
    paths = [
        write_tensor(tmp_path / "a.npy", torch.ones(3, 2, 2)),
        write_tensor(tmp_path / "b.npy", torch.ones(3, 2, 2).int()),
    ]
    assert [batch.args[0].dtype for batch in load_batches(paths, PLAIN, 4, pytest.fail)] == [torch.float32, torch.int32]


def test_arguments_suit_the_kind_of_network(tmp_path):
    paths = write_all(tmp_path, [(8, 8), (8, 8)])

    def args(kind: str) -> tuple:
        preprocessing = Preprocessing(kind=kind, resize=None, crop=None, mean=(), std=(), frames=2)
        (batch,) = load_batches(paths, preprocessing, 2, pytest.fail)
        return batch.args

    (image,) = args("image")
    assert image.shape == (2, 3, 8, 8)
    (pictures,) = args("detection")
    assert isinstance(pictures, list)
    assert [tuple(picture.shape) for picture in pictures] == [(3, 8, 8)] * 2
    (clip,) = args("video")
    assert clip.shape == (2, 3, 2, 8, 8)
    first, second = args("flow")
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_a_batch_size_below_one_is_refused(tmp_path):
    with pytest.raises(UsageError, match="batch of 0"):
        next(load_batches([tmp_path], PLAIN, 0, pytest.fail))


def test_noise_follows_its_seed_and_leaves_the_global_one_alone():
    before = torch.get_rng_state()
    first, again, other = noise_batch((2, 3, 4, 5), 7), noise_batch((2, 3, 4, 5), 7), noise_batch((2, 3, 4, 5), 8)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.args[0], again.args[0])
    assert not torch.equal(first.args[0], other.args[0])
    assert first.args[0].shape == (2, 3, 4, 5)
    assert first.args[0].dtype == torch.float32
    assert first.indices == (0, 1)
    assert [record.name for record in first.records] == ["noise", "noise"]
    assert first.records[0].shape == (3, 4, 5)
    values = noise_batch((1, 1, 100, 100), 0).args[0]
    assert abs(values.mean().item()) < 0.05  # five standard errors: 5 / sqrt(10000)
    assert abs(values.std().item() - 1) < 0.05


def test_noise_suits_the_kind_of_network_and_refuses_impossible_shapes():
    assert len(noise_batch((1, 3, 8, 8), 0, kind="flow").args) == 2
    assert [value.shape for value in noise_batch((2, 3, 8, 8), 0, kind="detection").args[0]] == [(3, 8, 8)] * 2
    for shape in ((), (0, 3), (1, -1)):
        with pytest.raises(UsageError, match="Noise of shape"):
            noise_batch(shape, 0)


def test_moving_a_batch_converts_floating_point_only():
    floats, whole = torch.ones(1, 3), torch.ones(1, 3, dtype=torch.int64)
    moved = to_device(Batch((floats, [floats, whole]), (0,), ()), "cpu", torch.float16)
    assert moved.args[0].dtype == torch.float16
    assert [value.dtype for value in moved.args[1]] == [torch.float16, torch.int64]
    assert moved.indices == (0,)
    assert to_device(moved, torch.device("meta"), torch.float32).args[1][1].device.type == "meta"


def test_raises_the_first_bad_file_where_nobody_asked_for_errors(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "good.png")
    with pytest.raises(ImageError, match=r"missing\.png"):
        list(load_batches([str(tmp_path / "good.png"), tmp_path / "missing.png"], Preprocessing()))
