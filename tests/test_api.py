import ast
import doctest
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import hookscope
from hookscope import api
from hookscope.cli.app import app
from tests.fork_server import ForkServer

CAT = Path(__file__).parents[1] / "sample_images" / "cat.jpg"


def test_importing_hookscope_does_not_import_torch() -> None:
    script = "import sys, hookscope; print('torch' in sys.modules, 'numpy' in sys.modules); hookscope.UsageError"
    script += "; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "False False\nFalse\n", "")


@pytest.mark.parametrize("name", hookscope.__all__)
def test_every_public_name_is_what_its_home_defines(name: str) -> None:
    home = import_module(f"hookscope.{hookscope._HOMES[name]}")
    assert inspect.unwrap(getattr(hookscope, name)) is inspect.unwrap(getattr(home, name))
    assert callable(getattr(hookscope, name))
    assert getattr(hookscope, name).__doc__


@pytest.fixture(scope="module")
def run() -> hookscope.Activations:
    return hookscope.activations("demo", CAT, layer="name:/^(_conv_stem|_bn0|_fc)$/", grids_for=1, save_tensors=True)


@pytest.fixture(scope="module")
def gradients() -> hookscope.Gradients:
    return hookscope.grads(small(), pictures(), loss="sum", inputs=True)


def pictures(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 5))


# What only concerns terminals, files and pictures: the commands do that with the result.
OF_COMMANDS = {
    *("grids", "cmap", "scale", "show", "tensorboard", "page", "out", "json", "quiet", "full", "open", "strict"),
    *("update_baseline", "junit", "sarif", "report_format", "jobs", "timeout", "memory", "rules", "explain", "init"),
    *("fail_on", "csv"),  # an exit code; of functions the rows convert themselves
    *("merge", "crops"),  # of `survey`: functions resume, and `save` draws
}
OF_FUNCTIONS = {"on_progress", "on_error", "chunks"}
OTHER_NAMES = {"checkpoint": "checkpoints"}  # the function takes one
COMMANDS = [
    *("activations", "attention", "attribute", "check", "checkpoint", "diff", "grads", "history", "layers", "report"),
    "survey",
]


def options_of(name: str) -> dict[str, tuple[Any, Any, str]]:
    """The type, default and help of each option and argument of a command, by the name that its function has for it."""
    command = next(
        registered_command.callback for registered_command in app.registered_commands if registered_command.name == name
    )
    types = get_type_hints(command, include_extras=True)
    options = {}
    for option, parameter in signature(command).parameters.items():
        annotated, info = get_args(types[option])
        renamed = next((ours for ours, theirs in OTHER_NAMES.items() if theirs == option), option)
        options[renamed] = (str if renamed != option else annotated, parameter.default, info.help)
    return options


def types_of(function: Callable[..., object]) -> dict[str, Any]:
    """The types of a function's arguments, with the imports that `hookscope.api` makes for type checkers only."""
    tree = ast.parse(inspect.getsource(api))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    names = dict(vars(api))
    exec(compile(ast.Module(block.body, []), "api.py", "exec"), names)
    return get_type_hints(function, names)


def literals(annotation: Any) -> set[object]:
    """The values of every Literal in an annotation."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {value for part in get_args(annotation) for value in literals(part)}


def examples(annotation: Any) -> list[Any]:
    """Values that a command line may give for an option of this type."""
    if actual := literals(annotation):
        return [*actual]
    expected = {str: "a", bool: True, int: 1, float: 1.5, Path: Path("a"), list[str]: ["a", "b"], list[int]: [0, 2]}
    inputs = get_args(annotation) if get_origin(annotation) is UnionType else [annotation]
    return [expected[part] for part in inputs if part is not NoneType]


def admits(annotation: Any, value: object) -> bool:
    """Tell whether a value is of a type: a class, a union, a Literal or a sequence."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return value in parts
    if origin in (Union, UnionType):
        return any(admits(part, value) for part in parts)
    if origin is Sequence:
        return isinstance(value, list) and all(admits(parts[0], each) for each in value)
    return type(value) is annotation or (annotation is Path and isinstance(value, Path))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_function_and_its_command_have_the_same_options(name: str) -> None:
    function, options = getattr(api, name), options_of(name)
    types, parameters = types_of(function), signature(function).parameters
    expected = OF_COMMANDS - ({"out"} if name == "report" else set())
    assert set(parameters) - OF_FUNCTIONS == set(options) - expected
    assert all(help_text for _, _, help_text in options.values())

    described = (inspect.getdoc(function) or "") + (inspect.getdoc(api.activations) or "")
    assert [
        parameter
        for parameter in parameters
        if not re.search(rf"^ +{parameter}: |`{parameter}`", described, re.MULTILINE)
    ] == []

    for each in set(parameters) - OF_FUNCTIONS:
        inputs, default, _ = options[each]
        if literals(types[each]) and inputs is str:  # a sentence lists them: the help would not have room
            assert literals(types[each]) <= {*re.findall(r"[a-z+-]+", options[each][2])}, each
        else:
            assert all(admits(types[each], value) for value in examples(inputs)), each
            assert literals(types[each]) == literals(inputs), each
        if each != "grids_for":  # a command draws, a function does when it is asked to
            ours = parameters[each].default
            assert ours is Parameter.empty or (ours or None) == (default or None), each


def test_the_library_does_what_the_command_does(
    run: hookscope.Activations, fork_server: ForkServer, tmp_path: Path
) -> None:
    options = ["--layer", "name:/^(_conv_stem|_bn0|_fc)$/", "--grids-for", "1", "--save-tensors", "--json"]
    command = ("-m", "hookscope", "activations", "demo", CAT, *options, "--out", "by-command")
    ended = fork_server.run(*command, cwd=tmp_path, environment=os.environ | {"OMP_NUM_THREADS": "1"})  # as tests have
    document = json.loads(ended.stdout)
    assert document.pop("run") == "by-command"
    ours = json.loads(run.to_json())
    del document["timings"], ours["timings"]
    assert document == ours

    folder = run.save(tmp_path / "by-library")
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    theirs = tmp_path / "by-command"
    assert files == {path.relative_to(theirs).as_posix() for path in theirs.rglob("*") if path.is_file()}
    assert len(files) >= 8
    for name in files - {"run.json", "result.json"}:
        assert (folder / name).read_bytes() == (theirs / name).read_bytes(), name
    for name, of_run in (("run.json", "command"), ("result.json", "timings")):
        one, other = (json.loads((case / name).read_text()) for case in (folder, theirs))
        assert one.pop(of_run) != other.pop(of_run)
        assert one == other


def test_rows_are_found_by_their_label_and_wrong_ones_name_the_nearest(
    run: hookscope.Activations, gradients: hookscope.Gradients
) -> None:
    assert run["_conv_stem"].shape == (1, 32, 112, 112)
    assert run["_fc"].mean == pytest.approx(run.tensors["_fc"].double().mean().item())
    assert run["_fc"].l2 == pytest.approx(run.tensors["_fc"].double().norm().item())
    with pytest.raises(hookscope.LayerNotFoundError, match=r"No row is called '_conv_stm'.+Nearest: '_conv_stem'"):
        run["_conv_stm"]
    assert gradients["3"].shape == (2, 5)
    assert gradients["3.bias"].l2 == pytest.approx((5 * 2**2) ** 0.5)  # of a sum over two inputs
    with pytest.raises(hookscope.LayerNotFoundError, match=r"Nearest: '3.bias'"):
        gradients["3.bais"]


def test_results_are_containers_of_their_rows(run: hookscope.Activations, gradients: hookscope.Gradients) -> None:
    assert [row.label for row in run] == ["_conv_stem", "_bn0", "_fc"]
    assert len(run) == 3
    assert "_fc" in run
    assert "_conv_stm" not in run
    assert 0 not in run
    parameters = ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert [row.label for row in gradients] == ["0", "1", "2", "3", *parameters]  # as they are found by label
    assert len(gradients) == 8
    assert all(row.label in gradients for row in gradients)
    table = hookscope.layers(small(), layer="conv")
    assert len(table) == 5
    assert [row.layer for row in table if row.selected] == ["0"]
    assert bool(replace(run, rows=()))  # which may hold where the network raised


def test_results_become_data_frames(run: hookscope.Activations, gradients: hookscope.Gradients) -> None:
    frame = run.to_pandas()
    assert len(frame.columns) == 20
    assert frame.loc["_fc", "mean"] == run["_fc"].mean
    assert run.to_pandas(full=True).loc["_fc", "q99"] > frame.loc["_fc", "q50"]
    assert frame.loc["_fc", "q50"] == pytest.approx(run.tensors["_fc"].double().median().item(), rel=0.05)
    frame = gradients.to_pandas()
    assert [*frame["role"].unique()] == ["input", "output", "parameter"]
    assert frame[frame["role"] == "parameter"].index.tolist() == ["0.weight", "0.bias", "3.weight", "3.bias"]


def test_keys_are_completed_as_they_are_looked_up(run: hookscope.Activations, gradients: hookscope.Gradients) -> None:
    for result in (run, gradients, hookscope.layers(small())):
        keys = result._ipython_key_completions_()
        assert len(keys) == len({*keys}) >= 3
        assert all(key in result for key in keys)
    assert {"3", "3.weight"} <= {*gradients._ipython_key_completions_()}


def test_show_shows_the_picture_that_save_writes(
    gradients: hookscope.Gradients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Image.Image] = []

    def show(picture: Image.Image) -> None:
        shown.append(picture)

    monkeypatch.setattr(Image.Image, "show", show)
    gradients.show()
    with Image.open(gradients.save(tmp_path / "run") / "overview.png") as overview:
        assert shown[0].tobytes() == overview.convert("RGB").tobytes()


def test_a_module_and_a_tensor_are_run_as_they_are() -> None:
    network, values = small(), pictures(3)
    network.train()
    expected = torch.cat([network(values[:2]), network(values[2:])])
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    run = hookscope.activations(network, values, save_tensors=True, batch_size=2)
    assert network.training
    assert torch.equal(run.tensors["3"], expected)
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
    assert [record.name for record in run.inputs] == ["tensor[0]", "tensor[1]", "tensor[2]"]
    with pytest.raises(hookscope.UsageError, match="A module stays on its device"):
        hookscope.activations(network, values, weights="none")
    for layers in ({"3": 1}, {"3"}):  # which are collections of texts too
        with pytest.raises(hookscope.UsageError, match=r"^`layer` takes a text or a list of texts, not"):
            hookscope.activations(network, values, layer=layers)
    with pytest.raises(hookscope.UsageError, match=r"^`input` takes a mapping, a text or a list of texts"):
        hookscope.activations(network, values, input=3)
    with pytest.raises(hookscope.UsageError, match="The model is of type Tensor"):
        hookscope.activations(values, network)
    with pytest.raises(hookscope.UsageError, match="The model is of type ndarray"):  # which compares element by element
        hookscope.activations(values.numpy(), network)
    with pytest.raises(hookscope.UsageError, match="`model` is the class Linear"):
        hookscope.activations(nn.Linear, values)
    with pytest.raises(hookscope.LayerNotFoundError, match="No row is called 0"):
        run[0]
    with pytest.raises(hookscope.UsageError, match="There is no input"):
        hookscope.activations(network)
    remedies = "give paths and pictures, one tensor", "torch.stack makes one tensor"
    for wrong, remedy in ((3, remedies[0]), ((values, None), remedies[0]), ([values], remedies[1])):
        with pytest.raises(hookscope.UsageError, match=f"is not an input: {remedy}"):
            hookscope.activations(network, wrong)  # type: ignore[arg-type]


def test_a_picture_in_memory_counts_like_its_file(tmp_path: Path) -> None:
    network = small()
    with Image.open(CAT) as picture:
        in_memory = hookscope.activations(network, [picture, CAT], resize=8, crop=8, save_tensors=True)
    first, second = in_memory.tensors["3"]
    assert torch.equal(first, second)
    assert in_memory.inputs[0].sha256 is None
    in_memory.save(tmp_path / "run")
    assert len(list((tmp_path / "run" / "inputs").iterdir())) == 2


def test_a_loss_may_be_a_function_and_a_target_a_tensor() -> None:
    network, values, target = small(), pictures(4), torch.randn(4, 5)
    result = hookscope.grads(network, values, loss=lambda output, wanted: (output - wanted).abs().sum(), target=target)
    assert result.loss.value == pytest.approx((network(values) - target).abs().sum().item(), rel=1e-6)
    chosen = hookscope.grads(network, values, loss="ce", target=[0, 1, 2, 4])
    expected = nn.functional.cross_entropy(network(values), torch.tensor([0, 1, 2, 4])).item()
    assert chosen.loss.value == pytest.approx(expected, rel=1e-6)
    alone = hookscope.grads(network, values, loss="mse", target=target, per_image=True, batch_size=4).inputs_alone
    each = [nn.functional.mse_loss(network(values[at : at + 1]), target[at : at + 1]).item() for at in range(4)]
    assert [one.loss for one in alone] == pytest.approx(each, rel=1e-5)


def test_edits_are_compared_and_verdicts_given() -> None:
    result = hookscope.grads(small(), pictures(), loss="sum", edit="3:output:zero")
    assert result.comparison.losses[1] == 0
    assert "Effect of 3:output:zero" in str(result.comparison)
    assert {verdict.rule for verdict in result.verdicts} == {"zero-gradient"}
    assert result.comparison.to_pandas().set_index("quantity", append=True).loc[("3", "activation"), "l2_after"] == 0
    quiet = hookscope.grads(small(), pictures(), limit={"vanishing": 1e-30})
    assert quiet.provenance.settings["limits"]["vanishing"] == 1e-30
    with pytest.raises(hookscope.UsageError, match="Nearest: 'vanishing'"):
        hookscope.grads(small(), limit={"vanishin": 1})


def test_a_run_that_breaks_off_carries_what_was_seen(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(7, 7))
    with pytest.raises(hookscope.ForwardError) as caught:
        hookscope.activations(network, pictures(1))
    seen = caught.value.inspection
    assert [row.label for row in seen.rows] == ["0"]
    assert "The model raised" in str(seen)
    with pytest.raises(hookscope.UsageError, match="did not finish"):
        seen.save(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_inputs_that_cannot_be_used_are_left_out_if_somebody_is_told(tmp_path: Path) -> None:
    (tmp_path / "cut.jpg").write_bytes(CAT.read_bytes()[:3000])
    network, message = small(), []
    with pytest.raises(hookscope.InputError, match=r"cut.jpg"):
        hookscope.activations(network, [tmp_path / "cut.jpg", CAT], resize=8, crop=8)
    run = hookscope.activations(network, [tmp_path / "cut.jpg", CAT], resize=8, crop=8, on_error=message.append)
    assert [type(error).__name__ for error in message] == ["ImageError"]
    assert [record.name for record in run.inputs] == [str(CAT)]
    assert run.provenance.unusable_inputs == (str(message[0]),)


def test_layers_checkpoints_and_checks_are_looked_up_and_converted(tmp_path: Path) -> None:
    table = hookscope.layers(small(), input_shape=(2, 3, 8, 8))
    assert table["3"].output_shapes == ((2, 5),)
    assert str(table).splitlines()[1] == "Sequential"
    assert table.to_pandas().index.tolist() == ["", "0", "1", "2", "3"]
    with pytest.raises(hookscope.LayerNotFoundError):
        table["4"]

    torch.save(small().state_dict(), tmp_path / "small.pt")
    contents = hookscope.checkpoint(tmp_path / "small.pt")
    assert contents["0.weight"].shape == (4, 3, 3, 3)
    assert "0.weight" in str(contents)
    assert contents.to_pandas().index.tolist() == ["0.weight", "0.bias", "3.weight", "3.bias"]
    with pytest.raises(hookscope.HookscopeError, match=r"Nearest: '0.weight'"):
        contents["0.wieght"]

    network = small()
    with torch.no_grad():
        network.get_parameter("0.weight")[0, 0, 0, 0] = torch.nan
    report = hookscope.check(network, select="non-finite-parameter")
    assert not report.passed
    assert report.to_pandas()["where"].tolist() == ["0.weight"]
    assert "non-finite-parameter" in str(report)
    with_remark = str(replace(report, warnings=("the key 'model' is taken",)))
    assert with_remark.count("the key 'model' is taken") == 1
    assert report.to_dict()["checkpoints"][0]["passed"] is False
    with pytest.raises(AssertionError, match=r"0.weight"):
        report.raise_for_failure()


def test_a_check_takes_tensors_and_pictures_as_it_takes_files(tmp_path: Path) -> None:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.head(x.mul_(2).flatten(1))
            return scores / 0

    x = torch.rand(20, 3, 2, 2)
    inputs, network = x.clone(), Overwriting()
    reports = [hookscope.check(network, images=case) for case in (x, _saved(x, tmp_path / "x.npy"))]
    assert torch.equal(x, inputs)
    actual = [
        [(finding.rule, finding.level, finding.where, finding.message) for finding in report.findings]
        for report in reports
    ]
    assert actual[0] == actual[1]
    assert "non-finite-activation" in [rule for rule, *_ in actual[0]]
    reports = [hookscope.check("demo", images=case, select="repeatability") for case in (CAT, Image.open(CAT))]
    assert [report.passed for report in reports] == [True, True]


def _saved(x: Tensor, path: Path) -> Path:
    np.save(path, x.numpy())
    return path


@pytest.mark.parametrize("wrong", [5, object()])
def test_a_check_says_what_is_no_input(wrong: Any) -> None:
    with pytest.raises(hookscope.UsageError, match="is not an input: give paths and pictures, one tensor, or a tuple"):
        hookscope.check(small(), images=wrong)


def test_a_page_is_made_of_a_run_and_of_a_result(run: hookscope.Activations, tmp_path: Path) -> None:
    page = hookscope.report(run.save(tmp_path / "run"))
    assert page == tmp_path / "run.html"
    assert "_conv_stem" in page.read_text(encoding="utf-8")
    assert hookscope.report(run, tmp_path / "other.html").stat().st_size > 50_000
    with pytest.raises(hookscope.UsageError, match="give out"):
        hookscope.report(run)


@pytest.mark.exhaustive
def test_the_packages_own_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sample_images").symlink_to(CAT.parent)
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(hookscope)
    assert result.attempted >= 4
    assert result.failed == 0


def test_several_arguments_are_a_tuple_or_a_mapping() -> None:
    network, x, y = nn.Bilinear(3, 2, 4), torch.randn(12, 3), torch.randn(12, 2)
    expected = network(x, y)
    for inputs in ((x, y), {"input1": x, "input2": y}):
        run = hookscope.activations(network, inputs, batch_size=5)
        assert len(run.inputs) == 12
        assert run.rows[0].mean == pytest.approx(expected.mean().item(), abs=1e-6)
        gradients = hookscope.grads(network, inputs, loss="sum")
        assert gradients.parameters[1].gradient.l2 == pytest.approx((4 * 12**2) ** 0.5)
        assert hookscope.check(network, images=inputs).passed
        assert hookscope.diff(network, network, inputs).first_differences == ()
    with pytest.raises(hookscope.UsageError, match="given twice: as a mapping, and as texts with `input`"):
        hookscope.activations(network, {"input1": x}, input=["input2=1,2"])
