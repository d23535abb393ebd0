"""Names of classes, from files and out of checkpoints: what every form means, and what is refused or passed over."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from hookscope.checkpoints.class_names import read_classes, stored_classes
from hookscope.errors import InputError
from hookscope.models.construction import LoadedModel
from hookscope.models.spec import load_model

NAMES = ("ant", "bee", "crane")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("windows.txt", "\ufeffant\r\nbee \r\ncrane\r\n\r\n"),
        ("list.txt", json.dumps(NAMES)),
        ("index.json", '{"1": "bee", "0": "ant", "2": "crane"}'),
        ("keras.json", '{"0": ["n01", "ant"], "1": ["n02", "bee"], "2": ["n03", "crane"]}'),
        ("folders.json", '{"crane": 2, "ant": 0, "bee": 1}'),
        ("config.json", '{"model_type": "vit", "id2label": {"0": "ant", "1": "bee", "2": "crane"}}'),
        ("meta.json", '{"meta": {"CLASSES": ["ant", "bee", "crane"]}}'),
    ],
)
def test_every_form_of_a_file_gives_the_names_by_index(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_bytes(text.encode())
    assert read_classes(tmp_path / name) == NAMES


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "class 0 has no name"),
        ("gap.txt", b"ant\n\nbee", "class 1 has no name"),
        ("gap.json", b'{"0": "ant", "2": "bee"}', "class 1 of 2 has no name"),
        ("twice.json", b'{"ant": 0, "bee": 0}', "class 1 of 2 has no name"),
        ("numbers.json", b"[1, 2]", "class 0 has no name"),
        ("words.json", b'{"ant": "bee"}', "'ant' is no index"),
        ("cut.json", b'["ant", ', "Expecting value"),
        ("deep.json", b"[" * 100_000, "recursion"),
        ("latin.txt", b"caf\xe9", "not UTF-8"),
        ("many.txt", b"a\n" * 100_001, "over the limit of 100,000"),
        ("large.txt", b"a" * (2**24 + 1), "over the limit of 16777216 bytes"),
    ],
)
def test_a_file_that_does_not_name_classes_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=says) as caught:
        read_classes(tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1
    assert name in str(caught.value)


def test_a_pipe_or_a_folder_in_place_of_class_names_is_refused_as_such(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "names.txt")
    with pytest.raises(InputError, match=r"a named pipe \(FIFO\), not a regular file; give a file of class names"):
        read_classes(tmp_path / "names.txt")
    with pytest.raises(InputError, match="is a folder; give a file of class names"):
        read_classes(tmp_path)


def test_names_are_made_safe_and_cut(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_bytes(b"\x1b[31mred\n::error::x\n" + b"y" * 1000 + b"\n")
    red, error, long = read_classes(tmp_path / "names.txt")
    assert (red, len(long)) == (r"\x1b[31mred", 200)
    assert not error.startswith("::")


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ({"class_to_idx": {"crane": 2, "ant": 0, "bee": 1}}, "class_to_idx"),
        ({"idx_to_class": {0: "ant", 1: "bee", 2: "crane"}}, "idx_to_class"),
        ({"classes": ["ant", "bee", "crane"]}, "classes"),
        ({"classes": 3, "class_names": NAMES}, "class_names"),
        ({"hyper_parameters": {"class_names": [*NAMES]}}, "hyper_parameters.class_names"),
        ({"classes": torch.ones(3)}, ""),
        ({"classes": [0, 1, 2]}, ""),
        ({"classes": []}, ""),
        ({"classes": ["a"] * 100_001}, ""),
        ({"id2label": {0: "ant", 2: "bee"}}, ""),
        ([*NAMES], ""),
    ],
)
def test_a_checkpoint_tells_its_classes_under_the_usual_keys_or_not_at_all(content: Any, where: str) -> None:
    assert stored_classes(content) == (where, NAMES if where else ())


def loaded(tmp_path: Path, content: Any, **options: Any) -> LoadedModel:
    torch.save(content, tmp_path / "w.pt")
    return load_model(str(tmp_path / "w.pt"), **options)


def resnet(classes: int) -> dict[str, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        return torchvision.models.resnet18(num_classes=classes).state_dict()


def test_names_come_out_of_the_checkpoint_of_a_recognised_network(tmp_path: Path) -> None:
    actual = loaded(tmp_path, {"state_dict": resnet(3), "classes": [*NAMES]})
    assert actual.info.categories == NAMES
    assert any("3 class names taken from its key 'classes'" in note for note in actual.notes)
    other = loaded(tmp_path, {"state_dict": resnet(5), "classes": [*NAMES]})
    assert other.info.categories == ()  # nothing in the file has three rows
    of_its_own = loaded(tmp_path, {"state_dict": resnet(1000), "classes": [f"c{number}" for number in range(1000)]})
    assert of_its_own.info.categories[285] == "c285"


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        ({"format": "pt", "classes": json.dumps(NAMES)}, NAMES),
        ({"config": json.dumps({"id2label": {"0": "ant", "1": "bee", "2": "crane"}})}, NAMES),
        ({"classes": json.dumps(NAMES[:2])}, ()),
        ({"classes": "[" * 100_000}, ()),
        (None, ()),
    ],
)
@pytest.mark.sample("metadata0-names0", "metadata2-names2")
def test_names_come_out_of_the_metadata_of_a_safetensors_file(
    tmp_path: Path, metadata: dict[str, str] | None, names: tuple[str, ...]
) -> None:
    (tmp_path / "net.py").write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(4, 3)\n", "utf-8")
    save_file(nn.Linear(4, 3).state_dict(), tmp_path / "w.safetensors", metadata)
    actual = load_model(str(tmp_path / "w.safetensors"), arch=f"{tmp_path / 'net.py'}:build")
    assert actual.info.categories == names
    assert any("3 class names taken from its key" in note for note in actual.notes) == bool(names)


@pytest.mark.exhaustive
def test_a_recognised_network_with_imagenets_classes_has_their_names(tmp_path: Path) -> None:
    expected = tuple(torchvision.models.ResNet18_Weights.DEFAULT.meta["categories"])
    actual = loaded(tmp_path, resnet(1000))
    assert actual.info.categories == expected
    assert any("takes ImageNet's class names" in note for note in actual.notes)
    assert loaded(tmp_path, resnet(1000), arch="resnet18").info.categories == expected
    assert loaded(tmp_path, resnet(999)).info.categories == ()
    assert load_model("resnet18", weights="none").info.categories == ()


def test_timms_classifiers_have_imagenets_names_in_a_file_too(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    with torch.random.fork_rng(devices=[]):
        state = timm.create_model("mobilenetv3_small_050").state_dict()
        ten = timm.create_model("mobilenetv3_small_050", num_classes=10).state_dict()
    actual = loaded(tmp_path, state, arch="timm:mobilenetv3_small_050")
    assert "Egyptian cat" in actual.info.categories[285]
    assert loaded(tmp_path, ten, arch="timm:mobilenetv3_small_050").info.categories == ()
