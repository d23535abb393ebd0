import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from tests.cli.conftest import Run, assert_refused, names_below, table
from tests.docs.test_schemas import check


def modules_of(stdout: str) -> list[dict[str, Any]]:
    return json.loads(stdout)["rows"]


def plain_modules(network: nn.Module, *inputs: torch.Tensor) -> list[dict[str, Any]]:
    """List what a plain script sees of a network: names, types, parameters, and shapes out of forward hooks."""
    inputs_by_module: dict[nn.Module, list[list[int]]] = {}
    outputs_by_module: dict[nn.Module, list[list[int]]] = {}
    calls: dict[nn.Module, int] = {}

    def note(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        calls[module] = calls.get(module, 0) + 1
        inputs_by_module.setdefault(module, [list(arguments.shape) for arguments in args])
        outputs_by_module.setdefault(module, [list(output.shape)])

    for module in network.modules():
        module.register_forward_hook(note)
    with torch.no_grad():
        network.eval()(*inputs)
    return [
        {
            "layer": name,
            "kind": type(module).__name__,
            "parameter_count": sum(p.numel() for p in module.parameters(recurse=False)),
            "total_parameter_count": sum(p.numel() for p in module.parameters()),
            "call_count": calls.get(module, 0),
            "input_shapes": inputs_by_module.get(module, []),
            "output_shapes": outputs_by_module.get(module, []),
            "selected": isinstance(module, nn.Conv2d),
            "note": "",
            "owner": None,
        }
        for name, module in network.named_modules()
    ]


def test_modules_of_resnet34_are_what_a_plain_script_sees(run: Run, tmp_path: Path) -> None:
    ended = run("layers", "resnet34", "--layer", "conv", "--json")
    assert (ended.code, ended.stderr) == (0, "")
    assert modules_of(ended.stdout) == plain_modules(torchvision.models.resnet34(), torch.zeros(1, 3, 224, 224))
    assert sum(module["selected"] for module in modules_of(ended.stdout)) == 36
    assert names_below(tmp_path) == {"net.py"}


def test_the_table_fits_the_terminal_and_marks_in_words_what_is_selected(run: Run) -> None:
    ended = run("layers", "resnet34", "--layer", "conv", "--layer", "!downsample")
    lines = [line.rstrip() for line in ended.stdout.splitlines()]
    assert ended.code == 0
    assert max(map(len, lines)) <= 80
    assert sum("Conv2d" in line and "● selected" in line for line in lines) == 33
    assert lines[0] == "116 modules · 33 selected (33 Conv2d) · 21,797,672 parameters"  # torchvision's documented count
    assert lines[1] == "resnet34 (ResNet)"


def test_weights_of_a_file_must_fit_the_network_that_is_listed(run: Run, tmp_path: Path) -> None:
    torch.save(torchvision.models.resnet18(num_classes=7).state_dict(), tmp_path / "w.pt")
    (tmp_path / "w.py").write_text(
        "import torchvision\n\ndef build():\n    return torchvision.models.resnet18(num_classes=7)\n"
    )
    rows = modules_of(run("layers", "w.py:build", "--weights", "w.pt", "--json", "--input-shape", "1,3,64,64").stdout)
    assert [row["output_shapes"] for row in rows if row["layer"] == "fc"] == [[[1, 7]]]
    assert "w.pt does not fit resnet34" in run("layers", "resnet34", "--weights", "w.pt").stderr
    assert run("layers", "resnet18", "--weights", "nothing.pt").code != 0


@pytest.mark.parametrize("model", ["swin_t", "demo"])
@pytest.mark.sample("swin_t")
def test_shapes_come_from_the_meta_device_where_that_works(
    run: Run, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr("hookscope.models.spec.load_model", lambda *_, **__: pytest.fail("built for real"))
    ended = run("layers", model, "--json")
    assert ended.code == 0
    assert modules_of(ended.stdout)[0]["output_shapes"]


def test_without_a_telling_first_layer_the_modules_are_listed_without_shapes(run: Run) -> None:
    ended = run("layers", "net.py:nothing", "--json")
    assert ended.code == 0
    assert [module["output_shapes"] for module in modules_of(ended.stdout)] == [[], []]
    assert "No shapes" in ended.stderr
    assert "--input-shape" in ended.stderr


def test_what_a_network_prints_is_kept_out_of_the_json(run: Run) -> None:
    ended = run("layers", "net.py:Talks", "--json")
    assert [module["kind"] for module in modules_of(ended.stdout)] == ["Talks", "Conv2d"]
    assert "built" in ended.stderr


def test_a_network_that_raises_is_listed_up_to_there(run: Run) -> None:
    ended = run("layers", "net.py:raises_in_20th_layer", "--json")
    counts = [module["call_count"] for module in modules_of(ended.stdout)]
    assert ended.code == 6
    assert counts == [0, *[1] * 19, 0, 0]
    assert len(ended.errors) == 1
    assert "no such luck" in ended.stderr
    assert "19 (Raises)" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("resnet18", "--layer", "cnv1"), 5, ["'cnv1'", "'conv1'"]),
        (("resnet18", "--input-shape", "0,3,224,224"), 2, ["below 1"]),
        (("resnet18", "--input-shape", "1,3,100000,100000"), 2, ["smaller"]),
        (("net.py:raises_when_built",), 6, ["cannot be built"]),
        ((), 2, ["MODEL"]),
    ],
    ids=lambda value: " ".join(value) or "no model" if isinstance(value, tuple) else None,
)
@pytest.mark.sample(
    "resnet18 --layer cnv1-5-words0", "resnet18 --input-shape 1,3,100000,100000-2-words2", "no model-2-words4"
)
def test_what_cannot_be_is_one_line(run: Run, arguments: tuple[str, ...], code: int, words: list[str]) -> None:
    assert_refused(run("layers", *arguments), code, *words)


def test_costs_are_listed_down_to_a_depth_as_table_json_and_csv(run: Run, tmp_path: Path) -> None:
    """3x3 convolutions from 3 to 4 and from 4 to 4 channels; padding none."""
    (tmp_path / "pair.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    inner = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU())\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), inner).requires_grad_(True)\n",
        "utf-8",
    )
    arguments = ("layers", "pair.py:build", "--input-shape", "1,3,12,10", "--cost")
    ended = run(*arguments, "--json", "--csv", "rows.csv")
    assert (ended.code, ended.stderr) == (0, "")
    document = check("layers", ended.stdout)
    first, second = 4 * 10 * 8 * 27, 4 * 8 * 6 * 36
    costs = {module["layer"]: module for module in document["cost"]["modules"]}
    assert {layer: cost["total"]["multiply_adds"] for layer, cost in costs.items()} == {
        "": first + second,
        "0": first,
        "1": second,
        "1.0": second,
        "1.1": 0,
    }
    assert costs[""]["total"]["parameter_bytes"] == 4 * (108 + 148)
    assert costs["1"]["receptive_field"] == {"size": [5, 5], "stride": [1, 1], "centre": [2, 2], "at_least": False}
    assert costs["1"]["output_bytes"] == 4 * 4 * 8 * 6
    assert all(cost["seconds"] > 0 for cost in costs.values())
    assert document["cost"]["pass_count"] >= 3

    rows = {each["layer"]: each for each in table(tmp_path / "rows.csv")}
    assert {layer: int(row["multiply_adds"]) for layer, row in rows.items()} == {
        layer: cost["total"]["multiply_adds"] for layer, cost in costs.items()
    }
    assert (rows["1.0"]["receptive_field"], rows["1.0"]["output_shapes"]) == ("5x5", "1x4x8x6")

    shown = run(*arguments, "--depth", "1").stdout.splitlines()
    header = next(at for at, line in enumerate(shown) if line.startswith("module"))
    assert [line.split()[0] for line in shown[header + 2 : header + 5]] == ["(model)", "0", "1"]
    assert any("do not add up" in line for line in shown)
    assert "(1.02 kB)" in " ".join(shown), "the totals are those of the whole network"


def test_the_cost_of_what_cannot_be_run_is_missing_and_the_reason_is_given(run: Run) -> None:
    ended = run("layers", "net.py:nothing", "--cost", "--json")
    assert (ended.code, json.loads(ended.stdout)["cost"]) == (0, None)
    assert "No shapes" in ended.stderr
    ended = run("layers", "net.py:raises_in_20th_layer", "--cost", "--json")
    assert (ended.code, json.loads(ended.stdout)["cost"]) == (6, None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["ssdlite320_mobilenet_v3_large", "quantized_shufflenet_v2_x0_5"])
def test_a_detector_and_an_int8_network_have_a_cost(run: Run, model: str) -> None:
    ended = run("layers", model, "--cost", "--depth", "1", "--json")
    assert ended.code == 0, ended.stderr
    cost = json.loads(ended.stdout)["cost"]
    assert cost["modules"][0]["seconds"] > 0
    assert bool(cost["uncounted"]) == model.startswith("quantized_")
