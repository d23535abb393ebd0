"""Inputs of equal shape share a batch, in order, one batch in memory at a time."""

import hashlib
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookscope.errors import ImageError, UsageError
from hookscope.inputs.batches import Batch, count_inputs, in_batches, load_batches, part_of, to_device
from hookscope.inputs.loading import load_input
from hookscope.inputs.noise import noise_batch
from hookscope.results.inputs import InputRecord, Preprocessing
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
    usable = [index for index, kind in enumerate(kinds) if kind != "bad"]
    assert [index for batch in batches for index in batch.indices] == usable, "so that targets go with their inputs"
    assert [Path(record.name).stem for batch in batches for record in batch.records] == good
    for batch in batches:
        assert 1 <= len(batch.indices) == len(batch.records) == len(batch.args[0]) <= batch_size
        assert len({record.shape for record in batch.records}) == 1


def test_only_one_batch_is_in_memory_and_the_inputs_of_the_next(tmp_path, monkeypatch):
    paths = write_all(tmp_path, [(4, 4)] * 9)
    singles: dict[Path, weakref.ref] = {}  # by file: threads end in any order
    stacked: list[weakref.ref] = []

    def observed(path: Path, how: Preprocessing) -> tuple:
        assert all(batch() is None for batch in stacked[:-1]), "of earlier batches the last is in use"
        tensor, record = load_input(path, how)
        singles[path] = weakref.ref(tensor)
        return tensor, record

    monkeypatch.setattr("hookscope.inputs.batches.load_input", observed)
    monkeypatch.setattr("hookscope.inputs.batches.load_quietly", observed)
    loaded = load_batches(paths, PLAIN, 3)
    for finished in (3, 6, 9):
        stacked.append(weakref.ref(next(loaded).args[0]))
        join_readers()
        assert len(singles) == min(finished + 3, 9)
        alive = sum(singles[path]() is not None for path in paths[:finished])
        assert alive <= 1, "not held once more beside their batch"


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
    assert torch.equal(first[0], image[0])
    assert torch.equal(second[0], image[1])


FLOW = replace(PLAIN, kind="flow")


def test_one_frame_for_optical_flow_is_both_and_several_are_paired_in_a_row(tmp_path):
    paths = write_all(tmp_path, [(8, 8)] * 4)
    frames = [load_input(path, PLAIN)[0] for path in paths]
    (alone,) = load_batches(paths[:1], FLOW)
    assert [torch.equal(frame[0], frames[0]) for frame in alone.args] == [True, True]
    assert alone.args[0].data_ptr() != alone.args[1].data_ptr(), "the network may overwrite one"
    assert alone.records[0].steps == ("the same picture is both frames",)
    (batch,) = load_batches(paths, FLOW)
    assert torch.equal(batch.args[0], torch.stack(frames[:3]))
    assert torch.equal(batch.args[1], torch.stack(frames[1:]))
    assert batch.records[0].name == f"{paths[0]} with 1.png"
    digest = hashlib.sha256(paths[1].read_bytes()).hexdigest()
    assert batch.records[0].steps == (f"second frame: {paths[1]}, sha256 {digest}",)
    clip = write_tensor(tmp_path / "frames.npy", torch.stack(frames))
    (batch,) = load_batches([clip], FLOW)
    assert torch.equal(batch.args[1], torch.stack(frames[1:]))
    assert batch.records[2].name == f"{clip}[2] with frames.npy[3]"
    assert count_inputs(paths, FLOW) == count_inputs([clip], FLOW) == 3
    assert count_inputs(paths[:1], FLOW) == 1


def test_frames_that_cannot_be_paired_leave_the_other_pairs(tmp_path):
    paths = write_all(tmp_path, [(8, 8), (8, 8), (8, 9), (8, 9), (8, 9), (8, 9)])
    paths[4].write_bytes(b"no picture")
    errors: list[ImageError] = []
    batches = list(load_batches(paths, FLOW, 4, errors.append))
    assert [batch.records[0].name for batch in batches] == [f"{paths[0]} with 1.png", f"{paths[2]} with 3.png"]
    assert [batch.indices for batch in batches] == [(0,), (2,)]
    assert [str(error).split(":")[0] for error in errors] == [
        f"Cannot pair {str(paths[1])!r} with {str(paths[2])!r}",
        f"Cannot read {str(paths[4])!r}",
    ]
    assert list(load_batches(paths[4:], FLOW, 4, errors.append)) == [], "half a pair is none"


@pytest.mark.parametrize(
    ("kind", "axis", "stored", "expected"),
    [
        ("image", "auto", (8, 3, 4, 4), [(8, 3, 4, 4)]),
        ("image", "auto", (3, 4, 4), [(1, 3, 4, 4)]),
        ("image", "auto", (5, 10), [(5, 10)]),
        ("image", "auto", (10,), [(1, 10)]),
        ("image", "auto", (2, 5, 3, 4, 4), [(2, 5, 3, 4, 4)]),
        ("image", "none", (8, 3, 4, 4), [(1, 8, 3, 4, 4)]),
        ("image", 0, (5, 10), [(5, 10)]),
        ("image", 0, (1, 3, 4), [(1, 3, 4)]),
        ("image", -1, (10, 5), [(5, 10)]),
        ("video", "auto", (8, 3, 2, 4, 4), [(8, 3, 2, 4, 4)]),
        ("video", "auto", (1, 2, 4, 4), [(1, 1, 2, 4, 4)]),
    ],
)
def test_a_tensor_file_of_several_inputs_is_that_many(tmp_path, kind, axis, stored, expected):
    values = torch.arange(torch.Size(stored).numel(), dtype=torch.float32).reshape(stored)
    path = write_tensor(tmp_path / "a.npy", values)
    preprocessing = Preprocessing(kind=kind, batch_axis=axis)
    batches = list(load_batches([path], preprocessing, 100))
    assert [tuple(batch.args[0].shape) for batch in batches] == expected
    ordered = values.movedim(axis, 0) if isinstance(axis, int) else values
    assert torch.equal(batches[0].args[0].reshape(ordered.shape), ordered)
    count = expected[0][0]
    assert count_inputs([path], preprocessing) == count
    names = [f"{path}[{index}]" for index in range(count)] if count > 1 else [str(path)]
    assert [record.name for record in batches[0].records] == names
    assert batches[0].records[-1].shape == expected[0][1:]


def test_inputs_of_one_file_are_batched_with_those_of_others(tmp_path):
    several = write_tensor(tmp_path / "a.npy", torch.rand(5, 3, 4, 4))
    paths = [several, tmp_path / "missing.npy", several, *write_all(tmp_path, [(4, 4)])]
    batches = list(load_batches(paths, PLAIN, 4, lambda _error: None))
    assert [batch.indices for batch in batches] == [(0, 1, 2, 3), (4, 6, 7, 8), (9, 10, 11)]
    assert count_inputs(paths, PLAIN) == 12
    steps = "tensor passed without preprocessing", "input 4 of 5 in the file (--batch-axis none for one)"
    assert batches[1].records[0].steps == steps


def test_an_axis_that_a_tensor_does_not_have_is_an_error_of_its_file(tmp_path):
    path = write_tensor(tmp_path / "a.npy", torch.ones(3, 4))
    with pytest.raises(ImageError, match=r"shape \(3, 4\) has no axis 2. Give another --batch-axis"):
        list(load_batches([path], replace(PLAIN, batch_axis=2)))


def test_a_batch_that_cannot_be_put_together_is_run_one_by_one(tmp_path, monkeypatch):
    paths = write_all(tmp_path, [(4, 4), (4, 4), (5, 5)])
    stack = torch.stack

    def poor(tensors):
        if len(tensors) > 1 or tensors[0].shape[-1] == 5:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return stack(tensors)

    monkeypatch.setattr(torch, "stack", poor)
    errors: list[ImageError] = []
    assert [batch.indices for batch in load_batches(paths, PLAIN, 4, errors.append)] == [(0,), (1,)]
    assert f"Cannot use {str(paths[2])!r}: [enforce fail]" in str(*errors)


def test_a_part_of_a_batch_takes_what_belongs_to_it():
    whole = Batch(
        (torch.tensor([[1.0], [2.0]]),),
        (0, 1),
        (InputRecord("a", None, None, (1,), ()), InputRecord("b", None, None, (1,), ())),
        {"rate": 3, "own": torch.tensor([5, 6]), "all": torch.tensor([7, 8]), "text": "x"},
        frozenset({"all"}),
    )
    part = part_of(whole, 1)
    assert (part.args[0].tolist(), part.indices, part.records[0].name) == ([[2.0]], (1,), "b")
    assert (part.kwargs["own"].tolist(), part.kwargs["all"].tolist()) == ([6], [7, 8])
    assert (part.kwargs["rate"], part.kwargs["text"]) == (3, "x")
    part.kwargs["all"].zero_()
    assert whole.kwargs["all"].tolist() == [7, 8]


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


def test_noise_for_detection_has_a_picture_for_each_input():
    batch = noise_batch({"m": (5, 2)} | {"": (1, 3, 8, 8)}, 0, "detection")
    assert [len(part.args[0]) for part in in_batches(batch, 2)] == [1]
    assert batch.shared == {"m"}


def test_a_tensor_without_values_is_refused() -> None:
    tensor = torch.ones(3, 4, device="meta")
    for batch in (Batch((tensor,), (0, 1, 2), ()), Batch((), (0, 1, 2), (), {"views": [tensor]})):
        with pytest.raises(UsageError, match=r"of shape \(3, 4\) is on the meta device"):
            to_device(batch, "cpu", torch.float32)
        assert to_device(batch, "meta", torch.float32).indices == batch.indices
