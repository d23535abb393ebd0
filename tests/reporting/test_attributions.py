"""What attributions look like as text, HTML, JSON, data frames and run directories, and how those are read back."""

import json
import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import load_file, save_file

import hookscope
from hookscope.commands.attribute.describe import _CHECKS, describe_attributions, finding_of
from hookscope.errors import InputError, OutputError, UsageError
from hookscope.reporting.overviews.document import draw_document
from hookscope.reporting.overviews.sheet import AMBER, PAPER
from hookscope.results.attributions import AttributionMap, Attributions, Target
from hookscope.results.inputs import Photograph, Region
from hookscope.results.runs.reading import read_run
from hookscope.results.runs.store import ARRAYS
from tests.reporting.attributed import CAT, ONE, RESULT, SANITY, corner, photographs


def test_the_finding_says_where_half_of_the_map_lies() -> None:
    place = "half of the grad-cam heat is in 6% of the crop, at the upper left."
    assert finding_of(RESULT.maps[0], RESULT) == f"cat.jpg, Egyptian cat (softmax 0.40): {place}"
    nowhere = replace(RESULT.maps[0], values=-corner())
    assert finding_of(nowhere, RESULT) == (
        "cat.jpg, Egyptian cat (softmax 0.40): nothing in the picture speaks for it, "
        "the grad-cam map is nowhere above 0."
    )
    unknown = replace(RESULT.maps[0], values=np.full((4, 4), np.nan, np.float32))
    assert finding_of(unknown, RESULT).endswith("(softmax 0.40): the grad-cam map holds NaN or infinite values.")
    even = replace(RESULT.maps[0], values=np.ones((4, 4), np.float32))
    assert finding_of(even, RESULT).endswith("heat is spread over 50% of the crop.")
    layers = replace(RESULT, layers=(*RESULT.layers, replace(RESULT.layers[0], label="layer3")))
    assert finding_of(RESULT.maps[0], layers) == f"cat.jpg, Egyptian cat (softmax 0.40) at layer4: {place}"


def test_every_check_has_its_number_its_verdict_and_its_meaning() -> None:
    rows = [[column.cell(check) for column in _CHECKS] for check in SANITY]
    assert rows == [
        ["weights shuffled", "rank correlation 0.07", "limit 0.85", SANITY[0].meaning, "ok"],
        ["class (runner-up)", "rank correlation 0.91", "limit 0.99", SANITY[1].meaning, "failed"],
        ["deletion", "probability 0.41 → 0.06", "random places 0.38", SANITY[2].meaning, "ok"],
    ]
    text = " ".join(str(RESULT).split())
    assert "class (runner-up) rank correlation 0.91 limit 0.99 failed" in text
    assert "Checks of the maps" not in str(replace(RESULT, sanity=()))


def test_many_maps_are_folded() -> None:
    many = replace(RESULT, maps=RESULT.maps * 20)
    assert "… 80 rows not shown, the result has all" in str(many)


def test_a_notebook_shows_the_overviews() -> None:
    html = RESULT._repr_html_()
    assert html.count("data:image/png;base64,") == 3
    assert "Where demo looks in cat.jpg: grad-cam. cat.jpg, Egyptian cat (softmax 0.40): half of the grad-cam" in html


def test_json_has_everything_but_the_values() -> None:
    document = json.loads(RESULT.to_json())
    assert document["maps"][1] == {
        "input_index": 0,
        "target": {"label": "tabby - tiger cat", "score": -0.5, "index": None}
        | {
            "probability": None,
            "box": None,
            "reading": "softmax",
        },
        "layer": "layer4",
        "extent": [0, 0, 1, 1],
        "pixels": None,
        "size": [],
        "shape": [4, 4],
        "range": [-0.125, 0.25],
    }
    assert document["halves"][1] == {
        "share": 1 / 16,
        "region": {"top": 0, "left": 20, "bottom": 15, "right": 35, "height": 60, "width": 100},
        "words": "upper left",
    }
    assert [check["passed"] for check in document["sanity"]] == [True, False, True]


def test_a_data_frame_has_a_row_a_map() -> None:
    frame = RESULT.to_pandas()
    assert list(frame["target"][:2]) == ["Egyptian cat", "tabby - tiger cat"]
    assert list(frame["score"][:2]) == [8.75, -0.5]
    assert set(frame["half_where"]) == {"upper left"}


def test_a_run_is_read_back_as_it_was(tmp_path: Path) -> None:
    pixels = replace(RESULT.maps[0], pixels=np.ones((3, 8, 8), np.float32))
    result = replace(RESULT, maps=(pixels, *RESULT.maps[1:]))
    assert result.save(tmp_path / "run") == tmp_path / "run"
    stored = read_run(tmp_path / "run")
    for ours, theirs in zip(result.maps, stored.result.maps, strict=True):
        assert np.array_equal(theirs.values, ours.values)
        assert (theirs.input_index, theirs.target, theirs.layer) == (ours.input_index, ours.target, ours.layer)
    assert stored.result == replace(RESULT, maps=stored.result.maps, provenance=None, unchanged=stored.result.unchanged)
    assert dict(stored.result.unchanged) == RESULT.unchanged
    assert [picture.remark for picture in stored.record.pictures] == ["", "", "This is what the network saw."]
    assert np.array_equal(load_file(tmp_path / "run" / ARRAYS)["maps.0.pixels"], pixels.pixels)


def test_targets_of_one_name_have_files_of_their_own(tmp_path: Path) -> None:
    hostile = [Target(name, 1.0) for name in ("cat", "CAT", "cat", "../../cat", "c\x00a/t", "", "ü" * 300)]
    maps = tuple(AttributionMap(0, target, "", corner(8, 8)) for target in hostile)
    replace(ONE, maps=maps).save(tmp_path / "run")
    names = [each.name for each in (tmp_path / "run/overlays").iterdir()]
    assert len({name.casefold() for name in names}) == len(hostile)


def test_a_run_that_did_not_finish_is_not_saved_and_nothing_foreign_is_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did not finish"):
        replace(ONE, provenance=None).save(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.txt").write_text("words")
    with pytest.raises(OutputError, match="not a hookscope run"):
        ONE.save(tmp_path / "run")
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_a_failure_on_the_way_leaves_no_trace(tmp_path: Path) -> None:
    def breaks(_inputs: object, index: int) -> Photograph:
        if index == 1:
            raise KeyboardInterrupt
        return photographs(RESULT.inputs, index)

    with pytest.raises(KeyboardInterrupt):
        replace(RESULT, provenance=replace(RESULT.provenance, photographs=breaks)).save(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_one_photograph_is_in_memory_at_a_time(tmp_path: Path) -> None:
    def large(_inputs: object, _index: int) -> Photograph:
        return Photograph(np.zeros((1500, 1500, 3), np.uint8), Region(0, 0, 1500, 1500, 1500, 1500))

    def peak(count: int) -> int:
        result = replace(
            ONE,
            inputs=(CAT,) * count,
            maps=tuple(replace(ONE.maps[0], input_index=index) for index in range(count)),
            provenance=replace(ONE.provenance, photographs=large),
        )
        tracemalloc.start()
        result.save(tmp_path / str(count))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert peak(1) > 1500 * 1500 * 3
    assert peak(5) < 1.3 * peak(1)


def change(name: str, edit: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        document = json.loads((run / name).read_bytes())
        edit(document)
        (run / name).write_text(json.dumps(document), encoding="utf-8")

    return apply


def other_map(values: NDArray[Any]) -> Callable[[Path], None]:
    return lambda run: save_file({**load_file(run / ARRAYS), "maps.0.values": values}, run / ARRAYS)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no result.json": (lambda run: (run / "result.json").unlink(), "'result.json' is missing"),
    "another version": (change("result.json", lambda it: it.update(schema_version=9)), "has schema version 9"),
    "no maps": (change("result.json", lambda it: it.pop("maps")), "result.json is not as hookscope writes"),
    "text as index": (
        change("result.json", lambda it: it["maps"][0].update(input_index="0")),
        "maps.0.input_index",
    ),
    "an input that is not there": (
        change("result.json", lambda it: it["maps"][0].update(input_index=7)),
        "not those of its inputs",
    ),
    "an array that is not there": (
        change("result.json", lambda it: it["maps"][0].update(values="../a.npy")),
        "maps.0.values",
    ),
    "none of it in the picture": (
        change("result.json", lambda it: it["maps"][0].update(extent=[-2, 0, -1, 1])),
        "is not the one listed",
    ),
    **{
        f"a picture with {name} {value}": (
            change("run.json", lambda it, name=name, value=value: it["pictures"][0]["region"].update({name: value})),
            "the part of a picture",
        )
        for name, value in {"left": 1e20, "right": "-Infinity", "top": "NaN", "bottom": -1, "height": 0}.items()
    },
    "an input without area": (
        change("result.json", lambda it: it["inputs"][0]["region"].update(bottom=it["inputs"][0]["region"]["top"])),
        "the part of a picture",
    ),
    "a pickle": (lambda run: (run / ARRAYS).write_bytes(pickle.dumps({})), "cut short or damaged"),
    "whole numbers": (other_map(np.ones((4, 4), np.int32)), "is not the one listed"),
    "longer than any picture": (other_map(np.ones((1, 2**17), np.float32)), "is not the one listed"),
    "another number of axes": (other_map(np.ones((4, 4, 4, 4), np.float32)), "is not the one listed"),
    "cut off": (lambda run: (run / ARRAYS).write_bytes((run / ARRAYS).read_bytes()[:-1]), "cut short or damaged"),
    "no pictures": (change("run.json", lambda it: it.pop("pictures")), "not those of its inputs"),
    "too few overlays": (change("run.json", lambda it: it.update(overlays=[])), "not those of its maps"),
    "too few pictures": (change("run.json", lambda it: it.update(pictures=[])), "not those of its inputs"),
    "no method": (change("result.json", lambda it: it.update(method="guess")), "result.json is not as hookscope"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE)
@pytest.mark.sample("no result.json", "an input that is not there", "whole numbers", "too few pictures")
def test_a_damaged_run_is_refused_in_one_line(tmp_path: Path, damage: Callable[[Path], object], said: str) -> None:
    run = ONE.save(tmp_path / "run")
    damage(run)
    with pytest.raises(InputError) as caught:
        hookscope.report(run)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_photograph_that_is_no_picture_is_refused(tmp_path: Path) -> None:
    run = ONE.save(tmp_path / "run")
    (run / "inputs" / "000.jpg").write_bytes(b"GIF89a")
    with pytest.raises(InputError, match="no picture of a run"):
        hookscope.report(run)


def overview(result: Attributions, photograph: Photograph) -> Image.Image:
    return draw_document(describe_attributions(result, 0, photograph))


SHAPES = {"photograph": (300, 451), "panorama": (200, 600), "portrait": (451, 300), "tiny": (3, 5), "strip": (900, 20)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("targets", [1, 2, 5])
@pytest.mark.sample("1-1-photograph", "1-3-panorama", "2-3-portrait", "5-1-tiny", "5-3-strip")
def test_an_overview_is_1200_pixels_wide_and_shows_every_map(shape: tuple[int, int], layers: int, targets: int) -> None:
    maps = tuple(
        AttributionMap(0, Target(f"class {target}", 1.0), f"layer{layer}", corner(signed=target == 1))
        for target in range(targets)
        for layer in range(layers)
    )
    height, width = shape
    region = Region(0, 0, height, width, height, width)
    ground = Photograph(np.full((*shape, 3), 128, np.uint8), region)
    drawn = overview(replace(ONE, maps=maps), ground)
    assert drawn.width == 1200
    # The strongest colour stands in each map's upper left cell, and in each colour bar once more.
    pixels = np.asarray(drawn).astype(int)
    strong = (pixels[..., 0] > 200) & (pixels[..., 2] < 170) & (pixels[..., 1] > 150)
    signed = (pixels[..., 0] > 140) & (pixels[..., 1] < 70) & (pixels[..., 2] < 90)
    assert strong.any() or targets == 2
    assert signed.any() == (targets > 1)
    assert (pixels[0] == PAPER).all()


def test_an_overview_says_what_failed() -> None:
    plain = overview(replace(ONE, warnings=()), photographs(ONE.inputs, 0))
    failed = overview(ONE, photographs(ONE.inputs, 0))
    assert failed.height > plain.height
    assert (np.asarray(failed)[plain.height - 30 :] == AMBER).all(axis=2).any()


def test_a_map_without_a_finite_value_is_not_said_to_be_0(tmp_path: Path) -> None:
    unknown = replace(ONE, maps=(replace(ONE.maps[0], values=np.full((4, 4), np.nan, np.float32)),))
    page = hookscope.report(unknown, tmp_path / "a.html").read_text(encoding="utf-8")
    assert "no finite value" in page
    assert "0 everywhere" not in page
