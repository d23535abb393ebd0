"""Labelled pictures, found in folders and CSV files."""

from pathlib import Path

import numpy as np
import pytest

from hookscope.errors import InputError, NothingMatchedError
from hookscope.inputs.labelled_files import find_labelled


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.zeros(1)) if path.suffix == ".npy" else path.write_bytes(b"")


def test_the_first_folder_below_is_the_label(tmp_path: Path) -> None:
    touch(tmp_path / "cat" / "2.png", tmp_path / "cat" / "10.png", tmp_path / "dog" / "more" / "1.jpg")
    touch(tmp_path / ".hidden" / "1.png", tmp_path / "beside.png", tmp_path / "dog" / "notes.txt")
    labelled = find_labelled(tmp_path)
    assert [(Path(path).relative_to(tmp_path).as_posix(), label) for path, (label,) in labelled.labels.items()] == [
        ("cat/2.png", "cat"),
        ("cat/10.png", "cat"),
        ("dog/more/1.jpg", "dog"),
    ]
    assert labelled.in_folders
    assert len(labelled.notes) == 2
    assert labelled.notes[1] == f"{tmp_path}: 1 picture outside the class folders left out."


def test_a_folder_without_class_folders_or_pictures_is_refused(tmp_path: Path) -> None:
    touch(tmp_path / "flat" / "1.png")
    with pytest.raises(InputError, match="has no class folders"):
        find_labelled(tmp_path / "flat")
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    with pytest.raises(NothingMatchedError, match="No image or tensor in folder"):
        find_labelled(tmp_path / "empty")


@pytest.mark.parametrize(
    "text",
    [
        "a.png,cat\nsub/b.png, dog\n",
        "\ufeffpath,label\na.png,cat\n\nsub/b.png,dog\n",
        'Label,width,PATH\r\ncat,10,a.png\r\ndog,12,"sub/b.png"\r\n',
        "a.png,cat\rsub/b.png,dog\r",
    ],
)
def test_a_csv_file_has_a_path_and_a_label_on_each_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "labels.csv").write_text(text, encoding="utf-8", newline="")
    labelled = find_labelled(tmp_path / "labels.csv")
    assert labelled.labels == {str(tmp_path / "a.png"): ("cat",), str(tmp_path / "sub/b.png"): ("dog",)}
    assert not labelled.in_folders


def test_only_a_newline_ends_a_line_of_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("a.png,one\u2028two\nb\x85.png,cat\n", encoding="utf-8", newline="")
    labels = {str(tmp_path / "a.png"): ("one\u2028two",), str(tmp_path / "b\x85.png"): ("cat",)}
    assert find_labelled(tmp_path / "labels.csv").labels == labels


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a.png,cat\nb.png\n", r"labels\.csv, line 2: 1 field, not a path and a label"),
        (b"a.png,cat,1\n", "line 1: 3 fields, .* or --multi-label for several labels of a picture"),
        (b"a.png,cat\nb.png,dog\na.png,dog\n", r"line 3: '.*a\.png' is listed twice"),
        (b"", "lists no picture"),
        (b"a.png,\xff\n", "is not UTF-8; give a folder of class folders, or a CSV"),
        (b'a.png,"cat\n', "is not a CSV of labels: unexpected end of data"),
    ],
)
def test_what_is_wrong_with_a_csv_file_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "labels.csv").write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        find_labelled(tmp_path / "labels.csv")
    assert "\n" not in str(caught.value)


def test_one_of_several_inputs_in_a_file_has_the_label_of_the_file(tmp_path: Path) -> None:
    touch(tmp_path / "cat" / "[1].npy", tmp_path / "dog" / "x.npy")
    labelled = find_labelled(tmp_path)
    assert labelled.labels_of(str(tmp_path / "cat" / "[1].npy")) == ("cat",)
    assert labelled.labels_of(f"{tmp_path / 'dog' / 'x.npy'}[2]") == ("dog",)


def test_a_few_are_spread_over_all(tmp_path: Path) -> None:
    touch(*(tmp_path / label / f"{number}.png" for label in ("a", "b") for number in range(8)))
    labelled = find_labelled(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in labelled.spread(4)] == [
        *("a/0.png", "a/4.png", "b/0.png", "b/4.png")
    ]
    assert len(labelled.spread(100)) == 16


# Several labels for each picture


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels.csv", "a.png,cat,dog\nb.png,\nc.png,dog\n"),
        ("labels.csv", "path,label\na.png,cat|dog\nb.png,\nc.png,dog\n"),
        ("labels.csv", "path,label\na.png,cat,dog\nb.png,\nc.png,dog,\n"),
        ("labels.csv", "a.png,cat; dog\nb.png\nc.png,dog\n"),
        ("labels.csv", "label,path\ncat,a.png\n,b.png\ndog,c.png\ndog,a.png\ndog,a.png\n"),
        ("labels.csv", "cat,Path,dog,bird\n1,a.png,1,0\n0,b.png,0,0\n0.0,c.png,1.0,0\n"),
        ("labels.json", '{"a.png": ["cat", "dog"], "b.png": [], "c.png": "dog"}'),
    ],
)
def test_a_picture_has_several_labels_or_none(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    labelled = find_labelled(tmp_path / name, multi_label=True)
    labels = {"a.png": ("cat", "dog"), "b.png": (), "c.png": ("dog",)}
    assert labelled.labels == {str(tmp_path / path): label for path, label in labels.items()}
    assert labelled.columns == (("cat", "dog", "bird") if "bird" in text else ())


def test_equal_files_in_several_class_folders_are_one_picture(tmp_path: Path) -> None:
    for name, content in (("cat/1.png", b"one"), ("dog/7.png", b"one"), ("cat/2.png", b"two"), ("dog/2.png", b"2")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    labelled = find_labelled(tmp_path, multi_label=True)
    relative = {Path(path).relative_to(tmp_path).as_posix(): labels for path, labels in labelled.labels.items()}
    assert relative == {"cat/1.png": ("cat", "dog"), "cat/2.png": ("cat",), "dog/2.png": ("dog",)}
    assert labelled.notes == (f"{tmp_path}: 1 picture in several class folders, by equal content.",)
    assert len(find_labelled(tmp_path).labels) == 4


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.csv", "path,cat,dog\na.png,1,yes\n", "line 2: 'yes' for the label 'dog', not 0 or 1"),
        ("l.csv", "path,cat,dog\na.png,1\n", "line 2: 2 fields, not a path and 2 labels"),
        ("l.csv", "path,cat,cat\na.png,1,0\n", "two columns of the first line have one name"),
        ("l.csv", "path,cat,\na.png,1,0\n", "or a column has none"),
        ("l.csv", "path,cat\na.png,1\n./a.png,0\n", r"line 3: '.*a\.png' is listed twice"),
        ("l.csv", "label,path\ncat\n", "line 2: 1 field, fewer than the first line"),
        ("l.csv", ",cat\n", "line 1: no path"),
        ("l.csv", "a.png,\nb.png\n", "lists no labels. Give lines of path,label"),
        ("l.json", "{}", "lists no picture. Give an object of labels by path"),
        ("l.json", "[1]", "is not a JSON object of labels by path"),
        ("l.json", '{"a.png": ["cat"], "a.png": []}', r"'.*a\.png' is listed twice\. Give"),
        ("l.json", '{"a.png": {"cat": 1}}', r"'a\.png' has no label"),
        ("l.json", "{", "is not JSON of labels"),
        ("l.json", '{"a.png": [1.5]}', r"'a\.png' has no label"),
    ],
)
def test_what_is_wrong_with_several_labels_is_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        find_labelled(tmp_path / name, multi_label=True)
    assert "\n" not in str(caught.value)


def test_a_json_file_of_one_label_each_needs_no_option(tmp_path: Path) -> None:
    (tmp_path / "l.json").write_text('{"a.png": "cat", "b.png": 3}', encoding="utf-8")
    assert [*find_labelled(tmp_path / "l.json").labels.values()] == [("cat",), ("3",)]
    (tmp_path / "l.json").write_text('{"a.png": ["cat", "dog"]}', encoding="utf-8")
    with pytest.raises(InputError, match=r"has 2 labels\..*, or --multi-label for several labels of a picture"):
        find_labelled(tmp_path / "l.json")
