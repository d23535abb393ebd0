"""Messages name arguments in Python, and options on the command line."""

import ast
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch import nn

import hookscope
from hookscope import api
from hookscope.parameters import arg, listing

PACKAGE = Path(hookscope.__file__).parent
CAT = PACKAGE.parent / "sample_images" / "cat.jpg"


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


X = torch.zeros(2, 3, 8, 8)

WRONG: dict[str, tuple[Callable[..., object], str]] = {
    "layer": (partial(hookscope.activations, layer="/(/"), "`layer` '/(/' is not a regular expression"),
    "nothing": (partial(hookscope.activations, layer=""), "e.g. `layer` conv."),
    "resize": (partial(hookscope.activations, resize="wide"), "`resize` 'wide'"),
    "batch-axis": (partial(hookscope.activations, batch_axis="first"), "`batch_axis` 'first' is not an axis"),
    "input": (partial(hookscope.activations, input=["sr"]), "`input` 'sr' is not of the form NAME=VALUE"),
    "limit": (partial(hookscope.grads, limit="vanishing"), "`limit` 'vanishing' has no number"),
    "input-shape": (partial(hookscope.grads, input_shape=(1, 3, 8, 8)), "Give pictures or `input_shape`, not both"),
    "method": (partial(hookscope.attribute, method="gradient", layer="0"), "leave out `layer`"),
    "top": (partial(hookscope.attribute, top=0), "`top` 0 is not possible"),
    "loss": (lambda model, x: hookscope.diff(model, "same", x, loss="mse"), "`loss` and `target` need `grads`"),
    "threads": (lambda model, x: hookscope.diff(model, "same", x, threads_b=0), "`threads_b` 0 is not possible"),
    "fail-over": (lambda model, x: hookscope.diff(model, "same", x, fail_over="added>1"), "It needs `shadow`"),
    "check": (
        lambda model, x: hookscope.check(model, images=x, input_shape=(1, 3, 8, 8)),
        "Give pictures or `input_shape`, not both",
    ),
    "rule": (lambda model, x: hookscope.check(model, images=x, select="nothing"), "`select` 'nothing' is no rule"),
    "shape": (lambda model, _: hookscope.layers(model, input_shape="wide"), "`input_shape` 'wide' is not a shape"),
    "weights": (lambda model, _: hookscope.layers(model, weights="x.pt"), "`weights`, `arch`, `device`, `dtype` and"),
    "arch": (lambda _, __: hookscope.load_model("resnet18", arch="resnet18"), "`arch` needs a weights file"),
    "type": (partial(hookscope.activations, arch=nn.Linear), "`arch` takes a text or a path, not the class Linear."),
    "list": (partial(hookscope.activations, layer=["0", 1]), "`layer` takes a text or a list of texts, not type int"),
    "flag": (partial(hookscope.activations, verify="no"), "`verify` takes True or False, not type str"),
    "head": (
        partial(hookscope.attention, head="0"),
        "`head` takes a whole number or a list of whole numbers, not",
    ),
    "block": (partial(hookscope.attention, block=[0, 1.0]), "`block` takes texts and whole numbers, not type float"),
    "axis": (partial(hookscope.activations, batch_axis=0.0), "`batch_axis` takes a text or a whole number, not type"),
    "function": (partial(hookscope.attribute, target=len), "takes texts and whole numbers, not type builtin"),
    "limits": (partial(hookscope.grads, limit=5), "`limit` takes a mapping, a text or a list of texts, not type int"),
    "number": (partial(hookscope.grads, seed="x"), "`seed` takes a whole number, not type str"),
    "choice": (partial(hookscope.grads, mode="trian"), "`mode` takes eval or train, not 'trian'."),
    "choice of one": (partial(hookscope.diff, images=(), reference=3), "`reference` takes float64, not 3."),
    "config": (lambda model, _: hookscope.check(model, config=5), "`config` takes a path, not type int."),
    "out of a log": (partial(hookscope.watch, out=5), "`out` takes a path, not type int."),
    "out of a page": (lambda *_: hookscope.report("a", 5), "`out` takes a path, not type int."),
    "out of features": (partial(hookscope.features, out=5, layer="0"), "`out` takes a path, not type int."),
    "chunks": (partial(hookscope.survey, chunks=5), "`chunks` takes a path, not type int."),
    "file": (lambda *_: hookscope.checkpoint(5), "`file` takes a path, not type int."),
    "files": (lambda *_: hookscope.history(["a", 5]), "`files` takes a path, not type int."),
    "run directory": (lambda *given: hookscope.activations(*given).save(5), "`path` takes a path, not type int."),
    "log to resume": (partial(hookscope.watch, resume=True), "`resume` needs `out`, the folder of the training"),
    "chunks to resume": (partial(hookscope.survey, resume=True), "`resume` needs `chunks`, the folder"),
    "size": (partial(hookscope.activations, batch_size=0), "`batch_size` 0 is not possible: give 1 or more"),
    "tensor": (lambda model, x: hookscope.layers(model, input=x), "It gives arguments by name: {'meta': tensor}."),
    "array": (lambda model, x: hookscope.activations(model, x.numpy()), "torch.from_numpy makes a tensor"),
    "select": (lambda model, _: hookscope.select_layers(model, ["name:"]), "e.g. `layer` conv."),
}


@pytest.mark.parametrize("call", WRONG)
def test_an_error_of_a_function_names_its_arguments(call: str) -> None:
    function, words = WRONG[call]
    with pytest.raises(hookscope.HookscopeError) as caught:
        function(network(), X)
    assert words in str(caught.value)
    assert "--" not in re.sub(r"`hookscope [^`]*`", "", str(caught.value))  # a command to run stays one


def test_an_unknown_argument_is_named_with_the_function_and_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"^activations\(\) got an unexpected .*'batchsize'. Nearest: 'batch_size'.$"):
        hookscope.activations(network(), X, batchsize=2)
    with pytest.raises(TypeError, match=r"^activations\(\) missing a required argument: 'model'$"):
        hookscope.activations()


def test_why_a_checkpoint_could_not_be_checked_names_arguments(tmp_path: Path) -> None:
    torch.save(network().state_dict(), tmp_path / "unknown.pt")
    report = hookscope.check(tmp_path / "unknown.pt")
    assert "name it with `arch`" in report.error
    with pytest.raises(AssertionError) as caught:
        report.raise_for_failure()
    assert "--" not in str(caught.value)
    assert str(caught.value).count("`arch`") == report.error.count("`arch`")  # the finding does not say it again


@pytest.mark.parametrize("name", [each for each in hookscope.__all__ if each.islower()])
def test_a_function_can_be_pickled_and_is_the_one_that_is_documented(name: str) -> None:
    function = getattr(hookscope, name)
    assert pickle.loads(pickle.dumps(function)) is function
    assert function.__doc__
    assert function.__name__ == name


def texts(path: Path) -> Iterator[str]:
    """The strings in a file but its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def arguments() -> set[str]:
    functions = [getattr(api, name) for name, home in hookscope._HOMES.items() if home == "api"]
    return {name for function in functions for name in signature(function).parameters}


def messages() -> list[Path]:
    others = {"cli", "reporting", "options.py", "api.py", "parameters.py", "describe.py", "columns.py"}  # of both
    return [path for path in PACKAGE.rglob("*.py") if not others & {*path.relative_to(PACKAGE).parts}]


def test_no_message_names_an_argument_but_by_its_parameter() -> None:
    named = [text for path in messages() for text in texts(path) if path.name != "default_file.py"]
    options = {each for text in named for each in re.findall(r"(?<![\w-])--([a-z-]+)", re.sub(r"`[^`]*`", "", text))}
    assert options & {argument.replace("_", "-") for argument in arguments()} == set()


def test_every_parameter_that_a_message_names_is_an_argument() -> None:
    calls = [node for path in messages() for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    named = [
        node.args[0].value
        for node in calls
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "arg" and isinstance(node.args[0], ast.Constant)
    ]
    assert len(named) > 250
    assert {*named} - arguments() == set()


def test_each_caller_reads_its_own_names_also_at_the_same_time() -> None:
    message: list[str] = []

    class Asking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            message.append(arg("input_shape"))
            return super().forward(x)

    hookscope.activations(Asking(2, 2), torch.zeros(1, 2), on_error=lambda _: None)
    assert {*message} == {"`input_shape`"}
    assert (arg("input_shape"), listing(ops=True)) == ("--input-shape", "`hookscope layers MODEL --ops`")
    with pytest.raises(hookscope.UsageError):
        hookscope.activations(Asking(2, 2), torch.zeros(1, 2), batch_size=0)
    assert arg("input_shape") == "--input-shape"
