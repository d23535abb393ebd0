import doctest
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import hookscope

README = Path(__file__).parents[1] / "README.md"
CAT = README.parent / "sample_images" / "cat.jpg"


def in_a_fresh_process(script: str) -> str:
    """Run a script and return what it prints."""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_importing_hookscope_does_not_import_torch() -> None:
    script = "import sys, hookscope; print('torch' in sys.modules, 'numpy' in sys.modules); hookscope.UsageError"
    assert in_a_fresh_process(script + "; print('torch' in sys.modules)") == "False False\nFalse\n"


def test_all_is_sorted_complete_and_without_repetition() -> None:
    assert hookscope.__all__ == sorted(set(hookscope.__all__))
    assert set(hookscope.__all__) == set(hookscope._HOME_BY_NAME)
    assert set(hookscope.__all__) <= set(dir(hookscope))


def test_every_error_is_public() -> None:
    errors = vars(import_module("hookscope.errors")).values()
    defined = {error.__name__ for error in errors if isinstance(error, type) and issubclass(error, Exception)}
    assert defined <= set(hookscope.__all__)


@pytest.mark.parametrize("name", hookscope.__all__)
def test_every_public_name_is_what_its_home_defines(name: str) -> None:
    home = import_module(f"hookscope.{hookscope._HOME_BY_NAME[name]}")
    assert getattr(hookscope, name) is getattr(home, name)
    assert callable(getattr(hookscope, name))
    assert getattr(hookscope, name).__doc__


def test_names_stay_functions_whatever_submodule_is_imported_when() -> None:
    script = """
import importlib, pkgutil, types
import hookscope
before = hookscope.inspect
for module in pkgutil.walk_packages(hookscope.__path__, "hookscope."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert hookscope.inspect is before
for name in hookscope.__all__:
    assert not isinstance(getattr(hookscope, name), types.ModuleType), name
from hookscope import capture, inspect
assert callable(capture) and callable(inspect)
"""
    assert in_a_fresh_process(script) == ""


def test_names_are_functions_also_when_submodules_come_first() -> None:
    script = (
        "import hookscope.inspection.forward, hookscope; print(hookscope.capture.__name__, hookscope.inspect.__name__)"
    )
    assert in_a_fresh_process(script) == "capture inspect\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'captured'"):
        _ = hookscope.captured


def test_the_library_does_what_the_command_does(tmp_path: Path) -> None:
    model = hookscope.load_model("demo")
    assert model.info.random is False
    batches = hookscope.load_batches([CAT], model.preprocessing)
    inspection = hookscope.inspect(model, batches, ["name:/^_conv_stem$/", "_fc"], grids_for=1)

    assert [(row.label, row.activation.shape) for row in inspection.rows] == [
        ("_conv_stem", (1, 32, 112, 112)),
        ("_fc", (1, 1000)),
    ]
    assert inspection.predictions[0].class_names[0] == "Egyptian cat"
    assert [maps.label for maps in inspection.feature_maps] == ["_conv_stem", "_fc"]
    hookscope.draw_grid(inspection.feature_maps[0]).save(tmp_path / "stem.png")
    with Image.open(tmp_path / "stem.png") as picture:
        assert min(picture.size) > 300
    assert hookscope.rows_to_csv(inspection).count("\n") == 3
    assert '"Egyptian cat"' in hookscope.inspection_to_json(inspection)
    assert hookscope.layer_table(inspection, width=80) is not None


def test_the_readmes_python_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sample_images").symlink_to(CAT.parent)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    exec("".join(blocks), {})
    assert (tmp_path / "first-convolution.png").stat().st_size > 10_000


def test_the_packages_own_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sample_images").symlink_to(CAT.parent)
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(hookscope)
    assert result.attempted >= 4
    assert result.failed == 0


def test_any_network_can_be_captured_in_a_with_block() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    layers = hookscope.select_layers(network, ["type:linear"])
    with hookscope.capture(network, layers, lambda _call, _slot, output: output.clone()) as captured:
        result = network(torch.ones(2, 3))
    assert list(layers) == ["0", "2"]
    first, last = captured.observations
    assert first.value is not None
    assert last.value is not None
    assert torch.equal(first.value, network[0](torch.ones(2, 3)))  # before the ReLU overwrote it
    assert torch.equal(last.value, result)
    assert not network[0]._forward_hooks


def test_an_inspection_of_a_tensor_needs_no_files() -> None:
    values = np.random.default_rng(1).normal(3, 2, (2, 3, 5, 7)).astype(np.float32)
    inspection = hookscope.inspect(nn.Sequential(nn.Identity()), torch.from_numpy(values))
    [row] = inspection.rows
    assert row.activation.mean == pytest.approx(values.astype(np.float64).mean())
    assert row.activation.std == pytest.approx(values.astype(np.float64).std())
    assert hookscope.tensor_statistics(torch.from_numpy(values), 1).mean == pytest.approx(row.activation.mean)


def test_modules_can_be_listed_without_computing_anything() -> None:
    with torch.device("meta"):
        network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    rows, failure = hookscope.list_modules(network, [torch.zeros(1, 3, 9, 9, device="meta")], ["conv"])
    assert failure is None
    assert [(row.layer, row.output_shapes, row.selected) for row in rows] == [
        ("", ((1, 8, 7, 7),), False),
        ("0", ((1, 8, 7, 7),), True),
        ("1", ((1, 8, 7, 7),), False),
    ]
