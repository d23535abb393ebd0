"""Folders and globs stand for the files that a reader would expect, in natural order."""

import os
import re
from pathlib import Path
from random import Random

import pytest
import torch
from PIL import Image

import hookscope
from hookscope.checkpoints.folders import natural_order
from hookscope.errors import NothingMatchedError
from hookscope.inputs.find_files import find_inputs
from tests.inputs.written import failure


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in (
        "photos/img10.png",
        "photos/img2.PNG",
        "photos/Img1.jpg",
        "photos/notes.txt",
        "photos/.hidden.png",
        "photos/.cache/x.png",
        "photos/dogs/b.webp",
        "photos/dogs/a.safetensors",
        "empty/readme.md",
        "odd[1].jpg",
        "odd1.jpg",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(paths: list[Path]) -> list[str]:
    return [path.as_posix() for path in paths]


@pytest.mark.usefixtures("tree")
def test_what_earlier_runs_have_written_below_a_folder_is_no_input():
    photo = Path("photos/dogs/b.webp").absolute()
    Image.new("RGB", (8, 8)).save(photo)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.ReLU())
    hookscope.activations(network, [str(photo)]).save("photos/hookscope-runs/first")
    written = {path.name for path in Path("photos/hookscope-runs/first").iterdir()}
    assert {"overview.png", "run.json", "arrays.safetensors"} <= written
    assert not [name for name in names(find_inputs(["."])) if "hookscope-runs" in name]
    assert not [name for name in names(find_inputs(["phot*"])) if "hookscope-runs" in name]
    run = names(find_inputs(["photos/hookscope-runs/first"]))  # named itself, it is meant
    assert "photos/hookscope-runs/first/overview.png" in run
    Path("photos/hookscope-runs/first/run.json").write_text('{"tool": "mine"}')
    assert "photos/hookscope-runs/first/overview.png" in names(find_inputs(["."]))


@pytest.mark.usefixtures("tree")
def test_a_folder_stands_for_its_pictures_and_tensors_in_natural_order():
    expected = [
        "photos/dogs/a.safetensors",
        "photos/dogs/b.webp",
        "photos/Img1.jpg",
        "photos/img2.PNG",
        "photos/img10.png",
    ]
    assert names(find_inputs(["photos"])) == expected
    assert names(find_inputs(["photos/"])) == expected


def test_globs_are_expanded_in_natural_order(tree):
    assert names(find_inputs(["photos/*.[pP]*"])) == ["photos/img2.PNG", "photos/img10.png"]
    assert names(find_inputs(["photos/?mg1.jpg"])) == ["photos/Img1.jpg"]
    assert names(find_inputs(["photos/d*"])) == ["photos/dogs/a.safetensors", "photos/dogs/b.webp"]
    assert names(find_inputs(["photos/**/*.webp"])) == ["photos/dogs/b.webp"]
    assert names(find_inputs([f"{tree}/odd*.jpg"])) == [f"{tree}/odd1.jpg", f"{tree}/odd[1].jpg"]
    everything = names(find_inputs(["photos/**"]))
    assert len(everything) == len(set(everything)) == 6  # notes.txt too: a glob was asked for by name


def test_a_literal_name_goes_before_a_glob(tree):
    assert names(find_inputs(["odd[1].jpg"])) == ["odd[1].jpg"]
    (tree / "odd[1].jpg").unlink()
    assert names(find_inputs(["odd[1].jpg"])) == ["odd1.jpg"]


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize("source", ["empty", "*.bmp", "photos/*/nothing", "empty*"])
def test_nothing_found_is_an_error(source):
    with pytest.raises(NothingMatchedError) as caught:
        find_inputs(["odd1.jpg", source])
    assert repr(source) in str(caught.value)
    assert caught.value.exit_code == 5


def test_a_folder_says_in_one_line_what_it_skipped(tree):
    for name in ("b.TXT", "c.mov", "clip.mov", "README", "a.xyz", "a.csv", "a.json", "a.md"):
        (tree / "photos/dogs" / name).touch()
    sentences: list[str] = []
    assert len(find_inputs(["photos", "odd1.jpg"], sentences.append)) == 6
    assert sentences == [
        "photos: 9 files skipped: 2 .mov, 2 .txt, 1 without a suffix, 1 .csv, 1 .json, 2 of other kinds."
    ]
    sentences.clear()
    find_inputs(["photos/d*"], sentences.append)
    assert sentences[0].startswith("photos/d*: 8 files skipped: 2 .mov, ")


@pytest.mark.usefixtures("tree")
def test_a_folder_without_inputs_says_what_it_holds():
    with pytest.raises(
        NothingMatchedError, match=r"in folder 'empty'. empty: 1 file skipped: 1 .md. Looked for .avif, "
    ):
        find_inputs(["empty"])


@pytest.mark.parametrize("kind", ["JPEG", "AVIF", "JPEG2000"])
def test_a_file_without_a_suffix_is_a_picture_if_it_begins_like_one(tmp_path, kind):
    Image.new("RGB", (8, 8)).save(tmp_path / "photo", kind)
    (tmp_path / "notes").write_text("no picture")
    os.mkfifo(tmp_path / "pipe")
    assert [path.name for path in find_inputs([str(tmp_path)])] == ["photo"]


def test_a_subfolder_that_cannot_be_listed_is_not_passed_over(tree, monkeypatch):
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("dogs"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    paths = find_inputs(["photos"])
    assert "photos/dogs" in names(paths)
    assert "cannot be listed" in failure(tree / "photos/dogs")


def test_natural_order_compares_part_by_part_text_with_text_and_number_with_number() -> None:
    def parts(path: Path) -> tuple[list[list[str | int]], str]:
        split = ([*re.split(r"(\d+)", part)] for part in path.parts)
        return [[int(each) if each.isdecimal() else each.casefold() for each in part] for part in split], str(path)

    random = Random(0)
    pieces = [*("a", "B", "1", "02", "10", "9", "/", " ", "-", "\x01", "\x02", "é", "٣", "1" * 40, "Z")]
    made = {Path("x" + "".join(random.choices(pieces, k=random.randint(1, 9)))) for _ in range(3000)}
    assert sorted(made, key=natural_order) == sorted(made, key=parts)
