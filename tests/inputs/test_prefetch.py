"""Files read in threads give what they give without, in order, and no thread outlives its work."""

import os
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

import hookscope
from hookscope.errors import ImageError
from hookscope.inputs.batches import load_batches
from hookscope.inputs.loading import is_quiet, load_input, load_quietly
from hookscope.results.inputs import InputRecord, Preprocessing
from tests.inputs.written import PLAIN, join_readers, random_pixels, readers, save, write_all, write_tensor
from tests.inspections import inspect

# Its first directory has 65535 entries, and ends at once.
BROKEN_EXIF = b"Exif\0\0II*\0\x08\0\0\0\xff\xff"


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    join_readers()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> dict[str, Path]:
    """One file of each kind, by name."""
    root = tmp_path_factory.mktemp("kinds")
    pixels, grey = random_pixels(9, 8), random_pixels(9, 8)[..., 0]
    files = {
        "jpeg": save(root / "a.jpg", pixels),
        "other jpeg": save(root / "b.jpg", random_pixels(9, 8, seed=1)),
        "grey jpeg": save(root / "grey.jpg", grey),
        "png": save(root / "a.png", pixels),
        "larger png": save(root / "larger.png", random_pixels(12, 12)),
        "png with alpha": save(root / "alpha.png", random_pixels(9, 8, 4)),
        "webp": save(root / "a.webp", pixels, lossless=True),
        "avif": save(root / "a.avif", pixels),
        "jpeg 2000": save(root / "a.jp2", pixels),
        "turned jpeg": save(root / "turned.jpg", pixels, exif=_orientation(6)),
        "jpeg with broken exif": save(root / "broken.jpg", pixels, exif=BROKEN_EXIF),
        "png with broken exif": save(root / "broken.png", pixels, exif=BROKEN_EXIF),
        "webp with broken exif": save(root / "broken.webp", pixels, exif=BROKEN_EXIF, lossless=True),
        "tiff": save(root / "a.tif", pixels),
        "gif": save(root / "a.gif", grey),
        "deep png": save(root / "deep.png", grey.astype(np.uint16)),
        "array": write_tensor(root / "a.npy", torch.ones(3, 9, 8)),
        "stored tensor": write_tensor(root / "a.pt", torch.ones(3, 9, 8)),
        "missing": root / "missing.png",
        "folder": root,
    }
    Image.fromarray(grey).convert("P").save(root / "palette.png")
    files["palette png"] = root / "palette.png"
    for kind in ("jpeg", "png"):
        files[f"cut {kind}"] = root / f"cut {kind}"
        files[f"cut {kind}"].write_bytes(files[kind].read_bytes()[:-30])
    still = files["png"].read_bytes()
    late = {
        "png with late broken exif": (b"eXIf", BROKEN_EXIF[6:]),
        "png with late text": (b"tEXt", b"date\0today"),
        "png with late exif in text": (b"tEXt", b"exif\0" + BROKEN_EXIF),
        "png with late animation": (b"acTL", bytes(8)),
    }
    for name, (kind, content) in late.items():
        files[name] = root / f"{name}.png"
        files[name].write_bytes(still[:-12] + _chunk(kind, content) + still[-12:])
    return files


def _orientation(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


@pytest.mark.parametrize("readers", [0, 3])
def test_as_many_threads_read_as_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers: int) -> None:
    busiest = 0

    def slowly(path: Path, preprocessing: Preprocessing) -> tuple[Tensor, InputRecord]:
        nonlocal busiest
        time.sleep(0.02)
        busiest = max(busiest, sum(thread.name == "hookscope-reader" for thread in threading.enumerate()))
        return load_quietly(path, preprocessing)

    monkeypatch.setattr("hookscope.inputs.batches.load_quietly", slowly)
    paths = write_all(tmp_path, [(4, 4)] * 12)
    batches = [*load_batches(paths, PLAIN, 4, None, readers)]
    assert [record.name for batch in batches for record in batch.records] == [*map(str, paths)]
    assert busiest == readers


def _chunk(kind: bytes, content: bytes) -> bytes:
    """Return a chunk of a PNG, by section 5.3 of its specification."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


QUIET = {
    "jpeg",
    "other jpeg",
    "grey jpeg",
    "png",
    "larger png",
    "png with alpha",
    "webp",
    "avif",
    "jpeg 2000",
    "turned jpeg",
    "png with late text",
}
CUT = {"cut jpeg", "cut png"}  # their headers are sound


def test_common_sound_pictures_are_quiet_and_others_are_not(folder):
    assert {name for name, path in folder.items() if is_quiet(path)} == QUIET | CUT


def test_the_kinds_that_are_not_quiet_are_those_that_warn(folder):
    warning = {name for name, path in folder.items() if "warning while reading" in _outcome(path)}
    assert {"jpeg with broken exif", "png with broken exif", "webp with broken exif"} < warning
    assert {"png with late broken exif", "png with late animation"} < warning


def _outcome(path: Path) -> str:
    try:
        return "; ".join(load_input(path, PLAIN)[1].steps)
    except ImageError as error:
        return str(error)


@given(
    kind=st.sampled_from(sorted(QUIET)),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
    cut=st.floats(0.3, 1),
)
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_quiet_warns_of_nothing_however_it_is_damaged(folder, kind, changes, cut):
    content = bytearray(folder[kind].read_bytes())
    for place, value in changes:
        content[int(place * len(content))] = value
    path = folder["folder"] / "damaged"
    path.write_bytes(content[: int(cut * len(content)) + 1])
    if not is_quiet(path):
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            tensor, record = load_quietly(path, PLAIN)
        except ImageError:
            tensor = None
    assert caught == []
    if tensor is not None:
        alone, same_record = load_input(path, PLAIN)
        assert torch.equal(tensor, alone)
        assert record == same_record


@pytest.mark.parametrize("kind", ["jpeg", "turned jpeg", "avif", "png with late text"])
def test_what_is_quiet_is_read_without_touching_what_all_threads_share(folder, monkeypatch, kind):
    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError

    with monkeypatch.context() as patch:  # pytest itself needs these
        for place, name in ((warnings, "catch_warnings"), (os, "dup2"), (os, "fork")):
            patch.setattr(place, name, refuse)
        load_quietly(folder[kind], Preprocessing(resize=6, crop=(5, 5)))


@given(data=st.data(), batch_size=st.integers(1, 5))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.exhaustive
def test_batches_and_errors_are_those_of_reading_one_file_after_the_other(folder, data, batch_size):
    kinds = data.draw(st.lists(st.sampled_from(sorted(folder)), max_size=12))
    paths = [folder[kind] for kind in kinds]
    alone, wanted_errors, positions = [], [], []
    for position, path in enumerate(paths):
        try:
            alone.append(load_input(path, PLAIN))
            positions.append(position)
        except ImageError as error:
            wanted_errors.append(str(error))
    groups = [list(group) for _, group in groupby(alone, key=lambda item: item[0].shape)]
    wanted = [group[at : at + batch_size] for group in groups for at in range(0, len(group), batch_size)]

    errors: list[str] = []
    batches = list(load_batches(paths, PLAIN, batch_size, lambda error: errors.append(str(error))))
    assert errors == wanted_errors
    assert [list(batch.records) for batch in batches] == [[record for _, record in chunk] for chunk in wanted]
    for batch, chunk in zip(batches, wanted, strict=True):
        assert torch.equal(batch.args[0], torch.stack([tensor for tensor, _ in chunk]))
    assert [index for batch in batches for index in batch.indices] == positions
    join_readers()


def test_errors_come_in_their_turn(folder):
    paths = [folder[kind] for kind in ("jpeg", "png", "cut jpeg", "missing", "webp")]
    seen: list[object] = []
    batches = load_batches(paths, PLAIN, 2, lambda error: seen.append(str(error).split("'")[1]))
    seen.extend(batch.indices for batch in batches)
    assert seen == [(0, 1), str(folder["cut jpeg"]), str(folder["missing"]), (4,)]


class Held:
    """Readers that wait until they are let go, except with `free` files, and note what they read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.read = set[Path](), list[Path]()
        self.go, self.begun = threading.Event(), threading.Semaphore(0)
        monkeypatch.setattr("hookscope.inputs.batches.load_quietly", self._load)

    def _load(self, path: Path, preprocessing: Preprocessing) -> tuple:
        self.begun.release()
        assert path in self.free or self.go.wait(60)
        self.read.append(path)
        return load_quietly(path, preprocessing)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    holding = Held(monkeypatch)
    yield holding
    holding.go.set()


def test_four_files_at_most_are_read_at_once(tmp_path, monkeypatch, held):
    paths = write_all(tmp_path, [(4, 4)] * 16)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    held.free = set(paths[:8])
    batches = load_batches(paths, PLAIN, 8)
    next(batches)
    for _ in range(7 + 4):
        assert held.begun.acquire(timeout=60)
    assert len(readers()) == 4
    assert len(held.read) == 7
    held.go.set()
    assert next(batches).indices == tuple(range(8, 16))
    assert sorted(held.read) == sorted(paths[1:])


def test_closing_early_leaves_unread_what_no_thread_has_begun_with(tmp_path, monkeypatch, held):
    paths = write_all(tmp_path, [(4, 4)] * 12)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    held.free = set(paths[:6])
    batches = load_batches(paths, PLAIN, 6)
    next(batches)
    for _ in range(5 + 2):
        assert held.begun.acquire(timeout=60)
    batches.close()
    held.go.set()
    join_readers()
    assert sorted(held.read) == sorted(paths[1:8])


class _Failing(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.flatten, self.error, self.calls = nn.Flatten(), error, 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            raise self.error
        return self.flatten(batch)


@pytest.mark.parametrize(
    ("error", "raised"), [(ValueError("no"), hookscope.ForwardError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_no_thread_outlives_a_model_that_raises(tmp_path, error, raised):
    paths = write_all(tmp_path, [(4, 4)] * 12)
    with pytest.raises(raised) as caught:
        inspect(_Failing(error), load_batches(paths, PLAIN, 2))
    assert caught.tb is not None, "which keeps the batches alive"
    join_readers()


def test_what_a_thread_cannot_read_is_read_again_when_its_turn_comes(tmp_path, monkeypatch):
    paths = write_all(tmp_path, [(4, 4)] * 4)

    def refuse(_path: Path, _preprocessing: Preprocessing) -> None:
        raise MemoryError

    monkeypatch.setattr("hookscope.inputs.batches.load_quietly", refuse)
    together = torch.cat([batch.args[0] for batch in load_batches(paths, PLAIN, 2)])
    assert torch.equal(together, torch.stack([load_input(path, PLAIN)[0] for path in paths]))


def test_other_files_are_read_while_no_thread_reads(folder, monkeypatch):
    """Because that forks, or closes stderr for a moment, which is the whole process's."""
    reading: list[Path] = []
    beside: list[list[Path]] = []

    def load_slowly(path: Path, preprocessing: Preprocessing) -> tuple:
        reading.append(path)
        time.sleep(0.05)
        loaded = load_quietly(path, preprocessing)
        reading.remove(path)
        return loaded

    def load(path: Path, preprocessing: Preprocessing) -> tuple:
        beside.append(list(reading))
        return load_input(path, preprocessing)

    monkeypatch.setattr("hookscope.inputs.batches.load_quietly", load_slowly)
    monkeypatch.setattr("hookscope.inputs.batches.load_input", load)
    kinds = ("jpeg", "jpeg", "tiff", "jpeg", "png", "stored tensor")
    list(load_batches([folder[kind] for kind in kinds], PLAIN, 2))
    assert beside == [[]] * 3


def test_warnings_of_a_model_and_of_a_file_keep_apart(folder):
    class Warning_(nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            warnings.warn("of the model", UserWarning, stacklevel=1)
            return batch

    paths = [folder[kind] for kind in ("jpeg", "png", "png with broken exif", "jpeg", "jpeg with broken exif")]
    model = Warning_()
    filters = list(warnings.filters)
    actual: list[bool] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in load_batches(paths, PLAIN, 1):
            model(*batch.args)
            actual += ["warning while reading" in "; ".join(record.steps) for record in batch.records]
    assert actual == [False, False, True, False, True]
    assert [str(finding.message) for finding in caught] == ["of the model"] * 5
    assert warnings.filters == filters
