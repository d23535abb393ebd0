"""What a weights file is said to hold, against what the tests put into it."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from hookscope.errors import CheckpointError, NothingMatchedError, UntrustedFileError, UsageError
from hookscope.models.checkpoint import read_checkpoint
from hookscope.models.contents import list_contents
from hookscope.results.contents import CheckpointContents, StoredPart, StoredTensor
from tests.models.hostile import Call

Kind = Literal["torch", "legacy torch", "safetensors"]
KINDS: tuple[Kind, ...] = ("torch", "legacy torch", "safetensors")

PLAIN = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
PLAIN += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
YOUNG = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.uint64]


@pytest.fixture(autouse=True)
def only_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recognise torchvision's networks alone: timm's take a while, and are another file's matter."""
    monkeypatch.setattr(
        "hookscope.models.architecture.find_spec", lambda name: None if name == "timm" else find_spec(name)
    )


def saved(path: Path, kind: Kind, state: dict[str, Any]) -> Path:
    if kind == "safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "torch")
    return path


def by_key(contents: CheckpointContents) -> dict[str, StoredTensor]:
    return {tensor.key: tensor for tensor in contents.tensors}


def by_part(contents: CheckpointContents) -> dict[str, list[str]]:
    return {part.key: [tensor.key for tensor in part.tensors] for part in contents.parts}


def whole(contents: CheckpointContents) -> StoredPart:
    [part] = contents.parts
    assert part.is_weights
    return part


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_listed_with_its_shape_dtype_and_bytes(tmp_path: Path, kind: Kind) -> None:
    # torch itself cannot read its own legacy files of the younger dtypes
    dtypes = PLAIN + ([] if kind == "legacy torch" else YOUNG)
    state = {str(dtype).removeprefix("torch."): torch.ones(2, 3).to(dtype) for dtype in dtypes}
    state |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}
    path = saved(tmp_path / "weights.any", kind, state)
    contents = list_contents(path)
    listed = by_key(contents)
    assert (contents.name, contents.kind, contents.byte_count) == ("weights.any", kind, path.stat().st_size)
    assert listed.keys() == state.keys()
    for name, tensor in state.items():
        expected = (tuple(tensor.shape), str(tensor.dtype)[6:], tensor.numel() * tensor.element_size(), 0, 0, "")
        actual = listed[name]
        facts = (actual.shape, actual.dtype, actual.byte_count, actual.nan_count, actual.inf_count, actual.tied_to)
        assert facts == expected, name


@pytest.mark.parametrize("kind", ["torch", "legacy torch"])
def test_views_count_their_own_values_and_name_whose_storage_they_share(tmp_path: Path, kind: Kind) -> None:
    table = torch.arange(24.0).reshape(4, 6)
    table[0, 0] = float("nan")  # outside of "rows", inside of all others
    table[3, 1] = float("inf")  # outside of "even"
    state = {"whole": table, "same": table, "rows": table[1:], "turned": table.t(), "even": table[:, ::2]}
    state |= {"other": table.clone(), "none": torch.empty(0), "nothing": torch.empty(0)}
    listed = by_key(list_contents(saved(tmp_path / "views.pt", kind, state)))
    assert {name: each.tied_to for name, each in listed.items()} == {
        "whole": "",
        **dict.fromkeys(("same", "rows", "turned", "even"), "whole"),
        **dict.fromkeys(("other", "none", "nothing"), ""),
    }
    assert {name: (each.nan_count, each.inf_count) for name, each in listed.items()} == {
        **dict.fromkeys(("whole", "same", "turned", "other"), (1, 1)),
        "rows": (0, 1),
        "even": (1, 0),
        **dict.fromkeys(("none", "nothing"), (0, 0)),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_the_values_that_were_saved(tmp_path: Path, kind: Kind) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {f"{at}": torch.randn(1000, 300, generator=generator) * 10.0**at - 1 for at in (-3, 0, 3)}
    state |= {"half": torch.randn(500, 3, generator=generator).bfloat16(), "double": torch.randn(70).double()}
    state |= {"count": torch.arange(-4, 9), "large": torch.full((1000,), 3e38)}  # whose sum overflows
    for name in ("0", "half", "double"):
        state[name].view(-1)[:3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    state["3"][5] = 0
    listed = by_key(list_contents(saved(tmp_path / "w", kind, state)))
    for name, tensor in state.items():
        values = tensor.double().numpy()
        finite, actual = values[np.isfinite(values)], listed[name]
        assert (actual.min, actual.max) == (finite.min(), finite.max())
        assert (actual.nan_count, actual.inf_count) == (np.isnan(values).sum(), np.isinf(values).sum())
        assert actual.zero_count == (values == 0).sum()
        assert actual.mean == pytest.approx(finite.mean(), rel=1e-6, abs=1e-7 * finite.std())
        assert actual.std == pytest.approx(finite.std(), rel=1e-6)
    assert isinstance(listed["count"].min, int)


@pytest.mark.parametrize("kind", ["torch", "legacy torch"])
def test_views_side_by_side_in_one_storage_are_not_tied(tmp_path: Path, kind: Kind) -> None:
    lstm = nn.LSTM(3, 4, 2).state_dict()
    flat = torch.cat([each.flatten() for each in lstm.values()])  # as cuDNN wants them
    pieces = zip(lstm, flat.split([tensor.numel() for tensor in lstm.values()]), strict=True)
    state = {name: piece.view(lstm[name].shape) for name, piece in pieces}
    table = torch.zeros(4, 6)
    state |= {"even": table[:, ::2], "odd": table[:, 1::2], "row": table[2], "end": table[2, 3:]}
    contents = list_contents(saved(tmp_path / "lstm.pt", kind, state))
    tied = {name: each.tied_to for name, each in by_key(contents).items() if each.tied_to}
    assert tied == {"row": "even", "end": "even"}
    assert sum(tensor.byte_count for tensor in contents.tensors if tensor.key in lstm) == flat.nbytes


def test_a_training_checkpoint_says_where_the_weights_are_and_what_else_is_there(tmp_path: Path) -> None:
    weights = {"model.conv.weight": torch.ones(4, 3), "model.conv.bias": torch.zeros(4)}
    moments = {0: {"exp_avg": torch.ones(4, 3)}}
    checkpoint = {"state_dict": weights, "epoch": 3, "note": "hi\x1b[31m", "lr": 0.5, "last": torch.ones(2, 2)}
    checkpoint |= {"optimizer": {"state": moments}, "pytorch-lightning_version": "2.1.0"}
    path = saved(tmp_path / "last.ckpt", "torch", checkpoint)
    contents = list_contents(path)
    assert [(part.key, part.is_weights, part.prefix) for part in contents.parts] == [
        ("state_dict", True, "model.conv"),
        ("", False, ""),
        ("optimizer", False, ""),
    ]
    assert by_part(contents) == {"state_dict": list(weights), "": ["last"], "optimizer": ["state.0.exp_avg"]}
    assert {entry.key: (entry.kind, entry.summary) for entry in contents.entries} == {
        "state_dict": ("dict", "2 entries, 2 tensors"),
        "epoch": ("int", "3"),
        "note": ("str", r"hi\x1b[31m"),
        "lr": ("float", "0.5"),
        "last": ("Tensor", "2x2 float32"),
        "optimizer": ("dict", "1 entry, 1 tensor"),
        "pytorch-lightning_version": ("str", "2.1.0"),
    }
    assert contents.producer == "torch.save, zip format 3, Lightning 2.1.0"
    assert contents.warnings == ()


def test_every_set_of_weights_is_listed_and_the_key_chooses(tmp_path: Path) -> None:
    weights = {"a.w": torch.ones(2), "a.b": torch.zeros(1)}
    checkpoint: dict[str, Any] = {
        "model": weights,
        "ema": {"a.w": torch.full((2,), float("nan")), "a.b": weights["a.b"]},
    }
    checkpoint |= {"teacher": {"v": torch.ones(3)}, "metrics": {"best": torch.tensor(0.5)}, "epoch": 3}
    path = saved(tmp_path / "several.pt", "torch", checkpoint)
    contents = list_contents(path)
    assert by_part(contents) == {"model": ["a.w", "a.b"], "ema": ["a.w", "a.b"], "teacher": ["v"], "metrics": ["best"]}
    assert [part.is_weights for part in contents.parts] == [True, True, True, False]
    assert [part.prefix for part in contents.parts] == ["a", "a", "", ""]
    assert [tensor.tied_to for tensor in contents.parts[1].tensors] == ["", "model.a.b"]
    assert [list_contents(path, key).nonfinite_count for key in ("model", "ema", "teacher")] == [0, 2, 0]
    assert by_part(list_contents(path, "ema.a")) == {"ema.a": ["w", "b"]}
    with pytest.raises(NothingMatchedError, match="nowhere"):
        list_contents(path, "nowhere")


def test_what_is_not_finite_in_the_optimiser_is_counted(tmp_path: Path) -> None:
    layer = nn.Linear(2, 1)
    optimiser = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimiser.step()
    optimiser.state[layer.weight]["exp_avg_sq"][0, 1] = float("nan")
    checkpoint = {"model": layer.state_dict(), "optimizer_states": [optimiser.state_dict()]}
    contents = list_contents(saved(tmp_path / "training.pt", "torch", checkpoint))
    assert contents.nonfinite_count == 1
    weights, beside = contents.parts
    assert (weights.nonfinite_count, beside.nonfinite_count, beside.key) == (0, 1, "optimizer_states")
    assert [tensor.key for tensor in beside.tensors if tensor.nan_count] == ["[0].state.0.exp_avg_sq"]
    alone = list_contents(saved(tmp_path / "optimizer.pt", "torch", optimiser.state_dict()))
    assert [(part.key, part.is_weights, part.nonfinite_count) for part in alone.parts] == [("state", False, 1)]


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (torch.ones(2), ["(tensor)"]),
        ({0: torch.ones(1), 1: torch.ones(2), (2, "a"): torch.ones(3)}, ["0", "1", "(2, a)"]),
        ({"w": torch.ones(1), "more": [{"b": torch.ones(1)}]}, ["w", "more[0].b"]),
        ({"w": torch.ones(1), "inner": {"b": torch.ones(1)}}, ["w", "inner.b"]),
        ({f"layer{at}": {"w": torch.ones(1)} for at in range(20)}, [f"layer{at}.w" for at in range(20)]),
    ],
    ids=["a tensor", "keys that are no names", "a list of dicts", "a dict inside", "a tree"],
)
def test_tensors_are_listed_however_they_are_kept(tmp_path: Path, content: Any, names: list[str]) -> None:
    assert by_part(list_contents(saved(tmp_path / "file.pt", "torch", content))) == {"": names}


def test_weights_in_a_list_are_parts_by_position(tmp_path: Path) -> None:
    content = {"models": [{"w": torch.ones(1)}, {"w": torch.ones(1), "b": torch.ones(1)}]}
    contents = list_contents(saved(tmp_path / "file.pt", "torch", content))
    assert by_part(contents) == {"models.0": ["w"], "models.1": ["w", "b"]}


def test_a_tensor_without_data_and_one_that_is_expanded_are_listed(tmp_path: Path) -> None:
    state = {"shape": torch.ones(3, device="meta"), "wide": torch.ones(1).expand(1000, 1000), "w": torch.zeros(2)}
    contents = list_contents(saved(tmp_path / "odd.pt", "torch", state))
    listed = by_key(contents)
    assert [(name, each.byte_count, each.nan_count, each.max) for name, each in listed.items()] == [
        ("shape", 12, None, None),
        ("wide", 4, 0, 1),
        ("w", 8, 0, 0),
    ]
    without_data, repeating = contents.warnings
    assert without_data == "odd.pt: 1 tensor without data, only a shape (saved on the meta device)."
    assert repeating.startswith("odd.pt: 1 tensor with more elements than stored, such as 'wide'")


@pytest.mark.parametrize(("place", "count"), [("the weights", 2**34), ("the optimiser", 2**62)])
def test_a_tensor_that_claims_more_than_its_storage_is_listed_with_a_warning_and_loaded_by_nothing(
    tmp_path: Path, count: int, place: str
) -> None:
    wide = torch.tensor([float("nan")]).expand(count)
    content = {
        "model": {"w": torch.ones(2)},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []},
    }
    (content["model"] if place == "the weights" else content["optimizer"]["state"][0])["wide"] = wide
    path = saved(tmp_path / "odd.pt", "torch", content)
    contents = list_contents(path)
    listed = next(tensor for tensor in contents.tensors if tensor.key.endswith("wide"))
    assert (listed.shape, listed.byte_count, listed.nan_count) == ((count,), 4, count)
    assert "more elements than stored" in contents.warnings[0]
    with pytest.raises(CheckpointError, match="claims"):
        read_checkpoint(path)


def sharded(folder: Path, kind: Literal["safetensors", "torch"], listed: dict[str, int]) -> Path:
    """Save `a` in a first file, `b` and `c` in a second, and an index of the names that it is to list."""
    ending = "safetensors" if kind == "safetensors" else "bin"
    first, second = (f"model-{number}-of-2.{ending}" for number in (1, 2))
    saved(folder / first, kind, {"net.a": torch.ones(2, 3)})
    saved(folder / second, kind, {"net.b": torch.tensor([1.0, float("inf")]), "net.c": torch.ones(5).half()})
    index = folder / f"model.{ending}.index.json"
    weight_map = {name: (first, second)[number] for name, number in listed.items()}
    index.write_text(json.dumps({"metadata": {"total_size": 42}, "weight_map": weight_map}), "utf-8")
    return index


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_shards_are_listed_as_one(tmp_path: Path, kind: Literal["safetensors", "torch"]) -> None:
    index = sharded(tmp_path, kind, {"net.a": 0, "net.b": 1, "net.c": 1})
    contents = list_contents(index)
    assert contents.kind == f"{kind} index"
    assert contents.byte_count == sum(path.stat().st_size for path in tmp_path.glob("model-*"))
    assert {tensor.key: (tensor.byte_count, tensor.inf_count) for tensor in contents.tensors} == {
        "net.a": (24, 0),
        "net.b": (8, 1),
        "net.c": (10, 0),
    }
    assert (whole(contents).prefix, contents.nonfinite_count, contents.warnings) == ("net", 1, ())
    with pytest.raises(UsageError, match="index of several"):
        list_contents(index, "net")


def test_a_tensor_that_the_index_does_not_list_is_told(tmp_path: Path) -> None:
    contents = list_contents(sharded(tmp_path, "safetensors", {"net.a": 0, "net.b": 1}))
    assert contents.warnings == ("model-2-of-2.safetensors: the index does not list net.c.",)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_the_packed_weights_of_a_quantised_network_are_listed_too(tmp_path: Path) -> None:
    packed = torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 0, torch.qint8)
    bias = torch.tensor([1.0, float("nan"), 2.0])
    state = {"fc.scale": torch.tensor(1.0), "fc._packed": (packed, bias), "fc.dtype": torch.qint8}
    listed = by_key(list_contents(saved(tmp_path / "quantised.pt", "torch", state)))
    assert {name: (tensor.dtype, tensor.byte_count, tensor.nan_count) for name, tensor in listed.items()} == {
        "fc.scale": ("float32", 4, 0),
        "fc._packed[0]": ("qint8", 12, 0),
        "fc._packed[1]": ("float32", 12, 1),
    }


@pytest.mark.parametrize("content", [Call(exec, "1"), [], 5, {}, {"epoch": 3}], ids=lambda it: type(it).__name__)
@pytest.mark.sample("Call", "dict0", "int")
def test_what_holds_no_tensors_or_runs_code_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(UntrustedFileError if isinstance(content, Call) else CheckpointError, match=r"w\.pt"):
        list_contents(tmp_path / "w.pt")
