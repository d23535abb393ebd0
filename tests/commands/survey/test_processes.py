"""Any number of processes, killed and resumed ones too, give the same bits; what is damaged or foreign is redone."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from torch import nn

import hookscope
from hookscope.commands.survey.plan import ChunkFolder, parse_share
from hookscope.commands.survey.run_survey import merge_survey
from hookscope.commands.survey.signature import differing
from hookscope.errors import InputError, LayerNotFoundError, OutputError, UsageError
from hookscope.results.json_form import json_form
from hookscope.results.survey import Survey
from hookscope.text import strict_json

SIZE = {"batch_size": 4, "chunk_size": 8}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Fifty inputs in two folders, one of them unreadable."""
    folder = tmp_path / "data"
    torch.manual_seed(7)
    for number in range(50):
        path = folder / "ab"[number % 2] / f"{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, torch.randn(3, 8, 8).numpy())
    (folder / "a" / "7.npy").write_bytes(b"\x93NUMPY, and no more")
    return folder


def figures(survey: Survey | None) -> dict[str, Any]:
    """Return everything that a survey measures, as bytes and numbers."""
    assert survey is not None
    arrays: dict[str, NDArray[Any]] = {}
    json_form(survey, arrays)
    actual: dict[str, Any] = {name: array.tobytes() for name, array in arrays.items()}
    for row in survey:
        spread = row.activation.distribution
        assert spread is not None
        assert spread.keys is not None
        assert spread.counts is not None
        actual[row.label] = (row.activation, spread.keys.tobytes(), spread.counts.tobytes(), row.headroom, row.massive)
    return actual | {"classes": survey.classes, "unusable": survey.unusable, "inputs": survey.input_count}


@pytest.fixture
def whole(data: Path) -> dict[str, Any]:
    """The figures of one process that was not disturbed."""
    return figures(hookscope.survey(network(), data, by_class=True, **SIZE))


def test_shards_merge_to_what_one_process_finds(data: Path, tmp_path: Path, whole: dict[str, Any]) -> None:
    for share in ("2/3", "3/3", "1/3"):
        assert hookscope.survey(network(), data, by_class=True, **SIZE, chunks=tmp_path / "c", shard=share) is None
    assert figures(merge_survey(ChunkFolder(tmp_path / "c"))) == whole


def test_a_missing_shard_is_named(data: Path, tmp_path: Path) -> None:
    hookscope.survey(network(), data, **SIZE, chunks=tmp_path / "c", shard="1/2")
    with pytest.raises(InputError, match=r"of 7 chunks these are missing or damaged: 1, 3, 5\. Run their shards"):
        merge_survey(ChunkFolder(tmp_path / "c"))


def flip_a_bit(folder: Path) -> None:
    path = folder / "000001.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def cut_sidecar(folder: Path) -> None:
    path = folder / "000001.json"
    path.write_bytes(path.read_bytes()[:-9])


def lose_arrays(folder: Path) -> None:
    (folder / "000001.safetensors").unlink()


def of_another_model(folder: Path) -> None:
    path = folder / "000001.json"
    document = json.loads(path.read_bytes())
    document["signature"]["model"] = "0" * 64
    del document["sha256"]
    digest = hashlib.sha256(strict_json(document).encode()).hexdigest()
    path.write_text(strict_json({**document, "sha256": digest}), encoding="utf-8")


def change_a_digit(folder: Path) -> None:
    path = folder / "000001.json"
    document = json.loads(path.read_bytes())
    document["inputs"][0]["label"] ^= 1
    path.write_text(json.dumps(document), encoding="utf-8")


DAMAGES = (flip_a_bit, cut_sidecar, lose_arrays, of_another_model, change_a_digit)


@pytest.fixture
def forge(tmp_path: Path) -> Callable[..., None]:
    """Return a function that changes arrays or features of chunk 0 in "c", whose digests fit them again."""

    def change(name: str, values: NDArray[Any], kind: str = "arrays") -> None:
        path = tmp_path / "c" / ("000000.safetensors" if kind == "arrays" else "000000.features.safetensors")
        sidecar = tmp_path / "c" / "000000.json"
        document = json.loads(sidecar.read_bytes())
        save_file({**load_file(path), name: np.ascontiguousarray(values)}, path)
        document[f"{kind}_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        del document["sha256"]
        digest = hashlib.sha256(strict_json(document).encode()).hexdigest()
        sidecar.write_text(strict_json({**document, "sha256": digest}), encoding="utf-8")

    return change


def test_forged_arrays_are_refused(data: Path, tmp_path: Path, forge: Callable[..., None]) -> None:
    usual = {"by_class": True, "batch_size": 32, "chunk_size": 50, "layer": "0", "chunks": tmp_path / "c"}
    hookscope.survey(network(), data, **usual, features=tmp_path / "f.safetensors")
    files = ("000000.safetensors", "000000.features.safetensors")
    arrays, features = (load_file(tmp_path / "c" / name) for name in files)
    changed = [(name, values, wrong) for name, values in arrays.items() for wrong in (values[None], values > 0)]
    for name, values, wrong in changed:
        forge(name, wrong)
        with pytest.raises(InputError, match=r"Cannot merge chunk 0 of .*: 000000\.json is damaged"):
            merge_survey(ChunkFolder(tmp_path / "c"))
        forge(name, values)
    for wrong in (features["0"][1:], features["0"][:, 1:], features["0"].astype(np.float64)):
        forge("0", wrong, "features")
        with pytest.raises(InputError, match=r"000000\.features\.safetensors is damaged"):
            merge_survey(ChunkFolder(tmp_path / "c"))
    forge("0", features["0"], "features")
    assert merge_survey(ChunkFolder(tmp_path / "c")).input_count == 50
    (tmp_path / "f.json").write_text("mine", encoding="utf-8")
    with pytest.raises(OutputError, match="it exists and is no file of features"):
        merge_survey(ChunkFolder(tmp_path / "c"))


class Ragged(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor([x[0, 0], x[1, 0, :2]], layout=torch.jagged)


class Padded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to_padded_tensor(0.0)


class Tiny(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double() * 1e-200


def test_values_whose_squares_float64_cannot_hold_and_ragged_rows_go_through_a_file() -> None:
    inputs = torch.full((2, 3, 4, 4), 3.0)
    tiny = hookscope.survey(nn.Sequential(Tiny()), inputs)
    assert tiny is not None
    assert tiny["0"].activation.mean == pytest.approx(3e-200)
    ragged = hookscope.survey(nn.Sequential(Ragged(), Padded()), inputs)
    assert ragged is not None
    assert [row.activation.shape for row in ragged.rows] == [(2, -1, 4), (2, 4, 4)]


@pytest.mark.sample("flip_a_bit", "of_another_model", "change_a_digit")
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
def test_what_is_damaged_is_measured_again(
    data: Path, tmp_path: Path, whole: dict[str, Any], damage: Callable[[Path], None]
) -> None:
    chunks = tmp_path / "c"
    hookscope.survey(network(), data, by_class=True, **SIZE, chunks=chunks)
    damage(chunks)
    is_read = damage not in (cut_sidecar, change_a_digit)
    with pytest.raises(InputError, match="Cannot merge chunk 1 of" if is_read else "missing or damaged: 1"):
        merge_survey(ChunkFolder(chunks))
    resumed = hookscope.survey(network(), data, by_class=True, **SIZE, chunks=chunks, resume=True)
    assert figures(resumed) == whole
    assert resumed is not None
    assert resumed.resumed_count == 6


def test_chunks_of_another_network_settings_or_inputs_do_not_count(
    data: Path, tmp_path: Path, whole: dict[str, Any]
) -> None:
    chunks = tmp_path / "c"
    hookscope.survey(network(1), data, by_class=True, **SIZE, chunks=chunks)
    assert figures(hookscope.survey(network(), data, by_class=True, **SIZE, chunks=chunks, resume=True)) == whole
    other = hookscope.survey(network(), data, by_class=True, **SIZE, top=2, chunks=chunks, resume=True)
    assert other is not None
    assert other.resumed_count == 0
    assert "Chunk 0 was measured again: made with other top (9, here 2)." in other.warnings
    assert differing({"features": "avg float32"}, {"features": ""}) == ["features (avg float32, here none)"]
    changed = data / "a" / "2.npy"
    np.save(changed, np.load(changed) + 1)  # as long as it was
    last = hookscope.survey(network(), data, by_class=True, **SIZE, top=2, chunks=chunks, resume=True)
    assert last is not None
    assert last.resumed_count == 6
    assert figures(last) != figures(other)


def test_a_label_that_was_corrected_since_is_counted_after_resuming(data: Path, tmp_path: Path) -> None:
    paths = sorted((data / "b").glob("*.npy"))[:4]
    counts = []
    for labels, resumes in ((("0", "0", "1", "1"), False), (("0", "1", "1", "1"), True)):
        text = "".join(f"{path},{label}\n" for path, label in zip(paths, labels, strict=True))
        (tmp_path / "labels.csv").write_text(text, encoding="utf-8")
        files = tmp_path / "labels.csv"
        result = hookscope.survey(network(), files, by_class=True, chunks=tmp_path / "c", resume=resumes)
        assert result is not None
        counts.append(result.classes)
    assert counts == [{"0": 2, "1": 2}, {"0": 1, "1": 3}]


def test_files_of_the_user_stay_in_the_folder_of_the_chunks(tmp_path: Path) -> None:
    kept = [tmp_path / "c" / name for name in ("20240131-config.json", "000001-weights.safetensors", "a-of-b.alive")]
    kept[0].parent.mkdir()
    for path in kept:
        path.write_text("mine", encoding="utf-8")
    ChunkFolder(tmp_path / "c").remove()
    assert all(path.read_text(encoding="utf-8") == "mine" for path in kept)


def test_names_that_are_no_text_are_surveyed_and_resumed(tmp_path: Path) -> None:
    for folder in (b"a", b"\xff"):
        for number in range(3):
            path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/data/" + folder + b"/\xe9%d.npy" % number))
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, np.random.default_rng(number).normal(size=(3, 8, 8)).astype(np.float32))
    usual: dict[str, Any] = {"by_class": True, "chunk_size": 2, "chunks": tmp_path / "c"}
    usual |= {"features": tmp_path / "f.safetensors", "layer": "name:4"}
    first = hookscope.survey(network(), tmp_path / "data", **usual)
    assert json.loads((tmp_path / "f.json").read_bytes())["inputs"][-1]["class"] == r"\udcff"
    np.save(path, np.ones((3, 8, 8), np.float32))
    resumed = hookscope.survey(network(), tmp_path / "data", **usual, resume=True)
    assert first is not None
    assert resumed is not None
    assert (first.input_count, resumed.resumed_count) == (6, 2)


def test_chunks_inside_the_data_are_no_inputs(data: Path, whole: dict[str, Any]) -> None:
    chunks = data / "survey.chunks"
    hookscope.survey(network(), data, by_class=True, **SIZE, chunks=chunks, shard="1/2")
    resumed = hookscope.survey(network(), data, by_class=True, **SIZE, chunks=chunks, resume=True)
    assert resumed is not None
    assert resumed.resumed_count == 4
    assert figures(resumed) == whole


def test_files_that_changed_places_are_measured_again(data: Path, tmp_path: Path) -> None:
    chunks, first, second = tmp_path / "c", data / "a" / "2.npy", data / "a" / "4.npy"
    hookscope.survey(network(), data, by_class=True, **SIZE, chunks=chunks)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    resumed = hookscope.survey(network(), data, by_class=True, **SIZE, chunks=chunks, resume=True)
    assert resumed is not None
    assert resumed.resumed_count == 6
    assert resumed.warnings[-1] == "Chunk 0 was measured again: its inputs have changed."
    for changed in (first, data / "b" / "49.npy"):
        changed.write_bytes(content)
    resumed = hookscope.survey(network(), data, by_class=True, **SIZE, chunks=chunks, resume=True)
    assert resumed is not None
    assert resumed.warnings[-1] == "So was 1 more chunk."


def test_a_file_that_can_be_read_by_now_is_measured(data: Path, tmp_path: Path) -> None:
    good = (data / "a" / "2.npy").read_bytes()
    (data / "b" / "3.npy").write_bytes(bytes(len(good)))  # a download that had only reserved its place
    usual: dict[str, Any] = {"by_class": True, **SIZE, "chunks": tmp_path / "c"}
    first = hookscope.survey(network(), data, **usual)
    again = hookscope.survey(network(), data, **usual, resume=True)
    (data / "b" / "3.npy").write_bytes(good)
    last = hookscope.survey(network(), data, **usual, resume=True)
    counts = [(made.input_count, made.resumed_count) for made in (first, again, last) if made is not None]
    assert counts == [(49, 0), (49, 7), (50, 6)]


def test_finished_chunks_are_not_lost_by_a_run_without_resume(data: Path, tmp_path: Path) -> None:
    hookscope.survey(network(), data, **SIZE, chunks=tmp_path / "c", shard="1/2")
    with pytest.raises(OutputError, match=r"holds 4 finished chunks of an unfinished survey\. Go on with `resume`"):
        hookscope.survey(network(), data, **SIZE, chunks=tmp_path / "c")


def test_a_folder_that_cannot_be_written_is_refused_before_any_pass(data: Path, tmp_path: Path) -> None:
    chunks, subject, passes = tmp_path / "c", network(), []
    chunks.touch()
    subject.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(OutputError, match=r"c' is not a folder\. Name another folder\."):
        hookscope.survey(subject, data, **SIZE, chunks=chunks)
    assert not passes


def test_a_survey_that_measures_nothing_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    chunks, data = tmp_path / "c", tmp_path / "data.npy"
    chunks.mkdir()
    for name in ("weights.safetensors", "notes.json"):
        (chunks / name).write_text("mine", encoding="utf-8")
    data.write_bytes(b"\x93NUMPY, and no more")
    with pytest.raises(InputError, match="None of the inputs could be measured"):
        hookscope.survey(network(), data, **SIZE, chunks=chunks)
    with pytest.raises(LayerNotFoundError):
        hookscope.survey(network(), torch.randn(2, 3, 8, 8), layer="nope", **SIZE, chunks=chunks)
    for name in ("000000.json", "000000.safetensors", "plan.json"):
        path = chunks / name
        path.write_text("mine", encoding="utf-8")
        for resumes in (True, False):
            with pytest.raises(OutputError, match=r"c': its plan.json or chunk files are not those of a survey"):
                hookscope.survey(network(), torch.randn(2, 3, 8, 8), **SIZE, chunks=chunks, resume=resumes)
        assert {path.name for path in chunks.iterdir()} == {"weights.safetensors", "notes.json", name}
        assert {path.read_text() for path in chunks.iterdir()} == {"mine"}
        path.unlink()


def test_an_interrupt_keeps_finished_chunks_and_resuming_gives_the_same_bits(
    data: Path, tmp_path: Path, whole: dict[str, Any]
) -> None:
    chunks = tmp_path / "c"

    def interrupt(finished: int, _total: int) -> None:
        if finished > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hookscope.survey(network(), data, by_class=True, **SIZE, chunks=chunks, on_progress=interrupt)
    assert len(list(chunks.glob("*[0-9].json"))) == 2
    resumed = hookscope.survey(network(), data, by_class=True, **SIZE, chunks=chunks, resume=True)
    assert figures(resumed) == whole
    assert resumed is not None
    assert resumed.resumed_count == 2


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2", f"1/{'9' * 5000}"])
def test_a_share_that_cannot_be_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--shard"):
        parse_share(text)


def test_a_network_with_an_expanded_number_is_surveyed(data: Path) -> None:
    model = network()
    model.register_buffer("scale", torch.ones(()).expand(1))
    assert figures(hookscope.survey(model, data, **SIZE)) == figures(hookscope.survey(network(), data, **SIZE))
