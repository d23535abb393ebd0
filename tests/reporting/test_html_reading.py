import json
import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hookscope.errors import InputError
from hookscope.results.history import History, HistoryFile, WeightPoint
from hookscope.results.inputs import Provenance
from hookscope.results.json_form import SCHEMA_VERSION
from hookscope.results.runs.reading import read_run
from tests.reporting.stored import drawn, maps, report_html, row, write_run

GRID = drawn(maps())


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [row(0, "conv"), row(1, "relu", "ReLU")], grids={"000-conv.png": GRID})


def refused(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        report_html(read_run(folder))
    message = str(caught.value)
    assert message.startswith("Cannot read ")
    assert len(message.splitlines()) == 1
    assert message.isprintable()
    assert caught.value.exit_code == 3
    return message


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    assert "there is no such folder" in refused(tmp_path / "nothing")
    (tmp_path / "file").touch()
    assert "it is not a folder" in refused(tmp_path / "file")
    (tmp_path / "photos\x1b").mkdir()
    assert "photos\\x1b': without run.json it is not a hookscope run" in refused(tmp_path / "photos\x1b")
    (tmp_path / "photos\x1b" / "run").mkdir()
    (tmp_path / "photos\x1b" / "run" / "run.json").touch()
    assert "of a finished run, such as" in refused(tmp_path / "photos\x1b")


def test_a_run_cut_short_is_refused(run: Path) -> None:
    whole = (run / "result.json").read_text()
    (run / "result.json").write_text(whole[: len(whole) // 2])
    assert "its result.json is cut short or damaged" in refused(run)
    (run / "result.json").unlink()
    assert "its file 'result.json' is missing" in refused(run)
    (run / "run.json").unlink()
    assert "without run.json it is not a hookscope run, or an unfinished one" in refused(run)


@pytest.mark.parametrize("name", ["run.json", "result.json"])
@pytest.mark.parametrize("version", [0, 2, 4, None, "1", 1.5, True, [1], "\x1b" * 999])
def test_another_schema_version_is_refused(run: Path, name: str, version: object) -> None:
    changed(run / name, lambda document: document.update(schema_version=version))
    message = refused(run)
    assert f"its {name} has schema version " in message
    assert f"and this hookscope reads {SCHEMA_VERSION}" in message
    assert len(message) < 400 + len(str(run))


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"[" * 100_000, b"null", b'{"a":' + b"9" * 5000 + b"}"])
def test_what_is_no_json_of_ours_is_refused(run: Path, content: bytes) -> None:
    (run / "run.json").write_bytes(content)
    refused(run)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(tool="another"),
        lambda record: record.update(grids={"a": 1}),
        lambda record: record.update(grids=[["grids/000-conv.png"]]),
        lambda record: record.update(grids=["grids/000-conv.png"]),
        lambda record: record["grids"][0].update(row=9),
        lambda record: record["grids"][0].update(row=-1),
        lambda record: record["grids"][0].update(input_index=1),
        lambda record: record["grids"][0].update(input_index=-1),
        lambda record: record["grids"][0].update(caption="x"),
        lambda record: record["grids"][0].pop("tiles"),
        lambda record: record["grids"][0]["tiles"].update(left=1.5),
        lambda record: record["grids"][0]["tiles"].update(left=-1),
        lambda record: record["grids"][0]["tiles"].update(left=10**9),
        lambda record: record["grids"][0]["tiles"].update(columns=0),
        lambda record: record.update(verb="<script>"),
        lambda record: record.update(thumbnails=["run.json"]),
        lambda record: record.update(thumbnails=[None, None]),
    ],
)
def test_a_record_that_does_not_fit_is_refused(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    changed(run / "run.json", change)
    refused(run)


@pytest.mark.parametrize(
    "change",
    [
        lambda result: result.pop("model"),
        lambda result: result.update(inputs="cat.jpg"),
        lambda result: result.update(inputs=[]),  # its grid is of one
        lambda result: result.update(warnings=[{}]),
        lambda result: result["model"].update(parameter_count=-1),
        lambda result: result["model"].update(parameter_count="<script>"),
    ],
)
def test_a_result_that_does_not_fit_is_refused(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    changed(run / "result.json", change)
    refused(run)


@pytest.mark.parametrize(
    "change",
    [
        lambda first: first.pop("activation"),
        lambda first: first.update(layer=3),
        lambda first: first.update(index=-1),
        lambda first: first["activation"].update(mean="0.5"),
        lambda first: first["activation"].update(quantiles=[1, 2]),
        lambda first: first["activation"].update(distribution={"low": 0.0}),
        lambda first: first["activation"].update(kept_values="rows.0.values"),
        lambda first: first["activation"].update(kept_values=[1.0]),
        lambda first: first["activation"].update(shape=["<b>"]),
    ],
)
def test_a_row_that_does_not_fit_is_refused_and_named(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    changed(run / "result.json", lambda document: change(document["rows"][0]))
    assert "its result.json is not as hookscope writes it: rows.0." in refused(run)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_quantiles_that_cannot_be_are_refused(run: Path, value: object) -> None:
    changed(run / "result.json", lambda result: result["rows"][0]["activation"]["quantiles"].update(q25=value))
    assert "quantiles of 'conv' of its rows cannot be" in refused(run)


def test_numbers_that_json_does_not_have_are_read_as_they_are_written(run: Path) -> None:
    text = (
        (run / "result.json").read_text().replace('"mean": 0.5', '"mean": 1e999').replace('"std": 1.25', '"std": NaN')
    )
    (run / "result.json").write_text(text)
    first = read_run(run).result.rows[0].activation
    assert first.mean == math.inf
    assert math.isnan(first.std)


@pytest.mark.parametrize(
    "path",
    [
        "../secret/000-x.png",
        "grids/../../secret/000-x.png",
        "{there}/000-x.png",
        "grids/000-..\\x.png",
        "grids/000-\0.png",
    ],
)
def test_no_file_outside_the_run_is_read(run: Path, path: str) -> None:
    secret = run.parent / "secret"
    secret.mkdir()
    (secret / "000-x.png").write_bytes(GRID[0])
    named = path.format(there=secret)
    changed(run / "run.json", lambda record: record["grids"][0].update(path=named))
    assert "is not inside the folder" in refused(run)


def test_no_link_is_followed(run: Path) -> None:
    secret = run.parent / "secret"
    secret.mkdir()
    (secret / "000-conv.png").write_bytes(GRID[0])
    grid = run / "grids/000-conv.png"
    grid.unlink()
    grid.symlink_to(secret / "000-conv.png")
    assert "is a link, or behind one" in refused(run)
    grid.unlink()
    (run / "grids").rmdir()
    (run / "grids").symlink_to(secret)
    assert "is a link, or behind one" in refused(run)


def test_a_run_may_itself_be_reached_through_a_link(run: Path) -> None:
    (run.parent / "latest").symlink_to(run)
    assert "conv" in report_html(read_run(run.parent / "latest"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_in_place_of_a_file_holds_nobody_up(run: Path) -> None:
    (run / "grids/000-conv.png").unlink()
    os.mkfifo(run / "grids/000-conv.png")
    assert "is not a regular file" in refused(run)


def test_a_missing_or_damaged_picture_is_refused(run: Path) -> None:
    grid = run / "grids/000-conv.png"
    grid.write_bytes(GRID[0][:-40])
    assert "'grids/000-conv.png'" in refused(run)
    grid.write_bytes(b"<svg onload=alert(1)>")
    assert "it is no picture of a run" in refused(run)
    grid.unlink()
    assert "its file 'grids/000-conv.png' is missing" in refused(run)


def test_a_picture_with_too_many_pixels_is_refused_before_it_is_unpacked(run: Path) -> None:
    header = bytearray(GRID[0])
    header[16:24] = (60_000).to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    (run / "grids/000-conv.png").write_bytes(header)
    assert "it is no picture of a run" in refused(run)


@pytest.mark.parametrize(("dead", "filters"), [(1, None), (None, 4)])
def test_a_history_that_counts_dead_filters_of_no_filters_is_refused(
    tmp_path: Path, dead: int | None, filters: int | None
) -> None:
    file = HistoryFile(index=0, name="a.pt", label="a.pt", status="read")
    weight = WeightPoint(0, "0.weight", "0", "parameter", (4, 3), "float32", 12, 1.0, 0.0, 1.0, 0, 0.0, 4, 4)
    result = History(files=(file,), order="their names", verdicts=(), rows=(weight,), provenance=Provenance((), None))
    folder = result.save(tmp_path / "run")
    assert read_run(folder).result.rows == (weight,)
    counts = {"dead_filter_count": dead, "filter_count": filters}
    changed(folder / "result.json", lambda document: document["rows"][0].update(counts))
    with pytest.raises(InputError, match=r"counts either filters or dead ones of '0\.weight'"):
        read_run(folder)
