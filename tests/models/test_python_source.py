import os
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn

from hookscope.errors import InputError, ModelError, ModelNotFoundError, UsageError
from hookscope.models.construction import LoadedModel
from hookscope.models.python_source import parse_arguments
from hookscope.models.spec import build_on_meta, load_model

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4, channels=3):
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3)

    def forward(self, x):
        return self.conv(x)

def build(width=4, channels=3):
    return Net(width, channels)

def needs(depth):
    return Net(depth)

ready = Net(2)
number = 5
"""


def write(folder: Path, text: str, name: str = "net.py") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return str(path)


def load(source: str, factory: str = "build", **options: Any) -> LoadedModel:
    return load_model(f"{source}:{factory}", **options)


def test_arguments_are_literals_or_else_text() -> None:
    texts = ["width=2", "rate=1e-3", "sizes=[1, 2]", "pool=None", "flag=True", "name=relu", "equation=a=b", "empty="]
    texts += ["code=__import__('os')", "spaced = relu "]
    assert parse_arguments(texts) == {
        "width": 2,
        "rate": 1e-3,
        "sizes": [1, 2],
        "pool": None,
        "flag": True,
        "name": "relu",
        "equation": "a=b",
        "spaced": "relu",
        "empty": "",
        "code": "__import__('os')",
    }


@pytest.mark.parametrize("texts", [["width"], ["=2"], ["a b=2"], ["width=2", "width=3"], ["a-b=1"]])
def test_malformed_and_repeated_arguments_are_usage_errors(texts: list[str]) -> None:
    with pytest.raises(UsageError, match="--model-arg"):
        parse_arguments(texts)


@pytest.mark.parametrize("factory", ["build", "Net"])
def test_function_and_class_are_called_with_the_arguments(tmp_path: Path, factory: str) -> None:
    loaded = load(write(tmp_path, NET), factory, model_arguments=["width=2", "channels=1"])
    assert loaded.module.conv.weight.shape == (2, 1, 3, 3)
    assert loaded.info.name == f"net.py:{factory}"
    assert loaded.info.kind == "Net"
    assert loaded.info.parameter_count == 2 * 9 + 2
    assert loaded.info.arguments == {"width": 2, "channels": 1}
    assert loaded.info.weights == f"as built by net.py:{factory}"
    assert loaded.info.random is False
    assert loaded.info.sha256 is None
    assert loaded.preprocessing.channels == 1
    assert loaded.warnings == ()
    assert loaded.module.training


def test_a_module_in_the_file_is_taken_as_it_is_and_a_dotted_factory_followed(tmp_path: Path) -> None:
    source = write(tmp_path, NET + "class Zoo:\n    small = staticmethod(lambda: Net(1))\n")
    assert load(source, "ready").module.conv.out_channels == 2
    assert load(source, "Zoo.small").module.conv.out_channels == 1


def test_weights_are_those_of_the_users_own_seeded_script(tmp_path: Path) -> None:
    source = write(tmp_path, NET)
    torch.manual_seed(5)
    expected = torch.nn.Conv2d(3, 4, 3).weight
    assert torch.equal(load(source, seed=5).module.conv.weight, expected)
    assert not torch.equal(load(source, seed=6).module.conv.weight, expected)


def test_file_imports_its_siblings_and_leaves_no_trace_in_the_path(tmp_path: Path) -> None:
    write(
        tmp_path / "a", "import blocks\ndef build():\n    import late_block\n    return blocks.make(late_block.WIDTH)\n"
    )
    write(tmp_path / "a", "import torch\ndef make(width): return torch.nn.Linear(1, width)\n", "blocks.py")
    write(tmp_path / "a", "WIDTH = 3\n", "late_block.py")
    path, bytecode = list(sys.path), sys.dont_write_bytecode
    assert load(str(tmp_path / "a" / "net.py")).module.out_features == 3
    assert sys.path == path
    assert sys.dont_write_bytecode == bytecode
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["blocks.py", "late_block.py", "net.py"]


def test_module_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "mypackage_here", NET, "inner.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])  # as in a console script
    loaded = load("mypackage_here.inner", model_arguments=["width=6"])
    assert loaded.module.conv.out_channels == 6
    assert loaded.info.name == "mypackage_here.inner:build"


def test_state_dict_file_goes_into_the_network(tmp_path: Path) -> None:
    source = write(tmp_path, NET)
    trained = load(source, seed=9).module
    torch.save({"state_dict": trained.state_dict(), "epoch": 1}, tmp_path / "trained.pt")
    for loaded in (
        load(source, weights=str(tmp_path / "trained.pt")),
        load_model(str(tmp_path / "trained.pt"), arch=f"{source}:build"),
    ):
        assert torch.equal(loaded.module.conv.weight, trained.conv.weight)
        assert loaded.info.weights == "trained.pt"
        assert loaded.info.sha256
        assert "'state_dict'" in loaded.notes[0]
    assert loaded.info.name == "trained.pt (net.py:build)"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("import torch\ndef build(:\n    pass\n", "net.py:2: SyntaxError"),
        ("x = 1\ny = 1 / 0\n", "net.py:2: ZeroDivisionError: division by zero"),
        ("import no_such_package_anywhere\n", "net.py:1: ModuleNotFoundError"),
        ("def build():\n    raise RuntimeError('first\\nsecond')\n", "net.py:2: RuntimeError: first"),
        ("import torch\ndef build():\n    return torch.nn.Linear(-1, 2)\n", "net.py:3: RuntimeError"),
        ("import sys\nsys.exit(3)\n", "net.py:2: SystemExit: 3"),
        ("def build():\n    raise KeyError\n", "net.py:2: KeyError"),
    ],
)
def test_error_in_the_users_code_is_named_with_its_place(tmp_path: Path, text: str, place: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(write(tmp_path, text))
    assert place in str(caught.value)
    assert str(caught.value).isprintable()


def test_missing_factory_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no 'biuld'\. Nearest: 'build'"):
        load(write(tmp_path, NET), "biuld")
    with pytest.raises(ModelNotFoundError, match=r"has no 'zzz'\. It defines ready, needs, build, Net"):
        load(write(tmp_path, NET), "zzz")


def test_a_module_that_raises_while_a_name_is_looked_up_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "package_of_parts", "def __getattr__(name): raise ImportError('needs foo')", "__init__.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"its 'Net' was looked up: __init__\.py:1: ImportError: needs foo"):
        load("package_of_parts", "Net")


def test_missing_file_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    for name, subject in {
        "absent": "absent.py does not exist",
        "folder": "a folder; give FILE.py:NAME",
        "pipe": r"a named pipe \(FIFO\), not a regular file; give FILE.py:NAME",
        "a\0": "not a path",
    }.items():
        with pytest.raises(InputError, match=subject):
            load(str(tmp_path / f"{name}.py"))


@pytest.mark.parametrize(
    "source", ["no_such_package_anywhere", "no_such_package_anywhere.inner", "torch.no_such_inner"]
)
def test_missing_module_is_not_found(source: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"No module 'no_such_package_anywhere|No module 'torch\.no_such"):
        load(source)


@pytest.mark.parametrize("arguments", [[], ["depth=1", "other=2"], ["width=1"]])
def test_arguments_that_the_factory_does_not_take_are_usage_errors(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(UsageError, match=r"net\.py:needs\(depth\) cannot be called"):
        load(write(tmp_path, NET), "needs", model_arguments=arguments)


@pytest.mark.parametrize(
    ("source", "factory", "arguments", "subject"),
    [
        ("def build(): return [1]\n", "build", [], "returned a value of type list"),
        ("def build(): pass\n", "build", [], "returned a value of type NoneType"),
        (NET, "number", [], "is an int"),
        (NET, "ready", ["width=2"], "takes no --model-arg"),
    ],
)
def test_factory_that_makes_something_else_is_a_usage_error(
    tmp_path: Path, source: str, factory: str, arguments: list[str], subject: str
) -> None:
    with pytest.raises(UsageError, match=subject):
        load(write(tmp_path, source), factory, model_arguments=arguments)


def test_network_is_made_on_the_meta_device(tmp_path: Path) -> None:
    loaded = build_on_meta(f"{write(tmp_path, NET)}:build", model_arguments=["width=2"])
    assert loaded.module.conv.weight.is_meta
    assert loaded.info.weights == "not loaded"
    assert loaded.info.parameter_count == 2 * 27 + 2
    assert loaded.module(torch.zeros(1, 3, 5, 5, device="meta")).shape == (1, 2, 3, 3)


@pytest.mark.parametrize(
    "body",
    [
        "return Net(int(torch.tensor([4.0]).item()))",  # needs values
        "if torch.empty(()).is_meta:\n        raise SystemExit\n    return Net()",
    ],
)
def test_factory_that_fails_on_the_meta_device_is_run_again_and_moved_there(tmp_path: Path, body: str) -> None:
    module = build_on_meta(f"{write(tmp_path, NET + f'def other():{chr(10)}    {body}{chr(10)}')}:other").module
    assert module.conv.weight.is_meta
    assert module.conv.out_channels == 4


DROPS = """
import torch
from torch import nn


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))


def drops():
    net = network()
    state = {f"model.{name}": value for name, value in torch.load("pub.pt").items()}
    net.load_state_dict(state, strict=False)
    return net


def drops_some():
    net = network()
    state = {name.replace("2.", "head."): value for name, value in torch.load("pub.pt").items()}
    net.load_state_dict(state, strict=False)
    return net


def loads():
    net = network()
    net.load_state_dict(torch.load("pub.pt"))
    return net
"""


def test_a_builder_that_loads_weights_may_have_lazy_and_sparse_tensors(tmp_path: Path) -> None:
    text = """
        import torch
        from torch import nn

        def build():
            net = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2))
            net.register_buffer("edges", torch.eye(3).to_sparse())
            net.load_state_dict(net.state_dict())
            return net
    """
    assert load(write(tmp_path, text)).module.edges.is_sparse


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("drops", "as built, 0 of its 4 parameters equal the file's, and not 0.weight, 0.bias, 2.weight and 1 more."),
        ("drops_some", "as built, 2 of its 4 parameters equal the file's, and not 2.weight, 2.bias."),
        ("loads", "as built, 4 of its 4 parameters equal the file's."),
        ("network", ""),
    ],
)
def test_a_builder_that_loads_weights_is_compared_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drops.py").write_text(DROPS, encoding="utf-8")
    torch.save(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).state_dict(), "pub.pt")
    load = nn.Module.load_state_dict
    loaded = load_model("pub.pt", arch=f"drops.py:{factory}")
    assert nn.Module.load_state_dict is load
    notes = [note for note in loaded.notes if "loads weights itself" in note]
    assert notes == ([f"drops.py:{factory} loads weights itself; {said}"] if said else [])
