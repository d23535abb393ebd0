"""What is listed without torch, against what is listed with it; whatever is odd is left to the latter."""

import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
import torchvision
from efficientnet_lite_pytorch import EfficientNet
from torch import nn

from hookscope.errors import HookscopeError
from hookscope.models import contents
from hookscope.models.contents import list_contents
from hookscope.results.contents import CheckpointContents
from tests.byteorder import save_big_endian
from tests.models import hostile
from tests.models.hostile import ASSEMBLED, GOOD, PAYLOADS

State = dict[str, Any]


def with_planted(state: State) -> State:
    """Plant what is not finite, what float32 cannot square, and what varies little about a large mean."""
    first, second, third, *_ = state
    state[first].view(-1)[[0, 5, 70]] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    state[second].fill_(1e30)[0] = -3e25
    state[third].view(-1)[:].copy_(1000 + torch.rand(state[third].numel()))
    return state


CHANGES: dict[str, Callable[[State], State]] = {
    "as published": lambda state: state,
    "half precision": lambda state: {name: tensor.half() for name, tensor in state.items()},
    "bfloat16": lambda state: {name: tensor.bfloat16() for name, tensor in state.items()},
    "int8": lambda state: {name: (100 * tensor).to(torch.int8) for name, tensor in state.items()},
    "values that are rare": with_planted,
    "large float64": lambda state: {name: tensor.double() * 1e200 for name, tensor in state.items()},
}


def small_state() -> State:
    torch.manual_seed(0)
    return {name: tensor.clone() for name, tensor in torchvision.models.shufflenet_v2_x0_5().state_dict().items()}


def save(state: State, path: Path) -> Path:
    safetensors.torch.save_file(state, path, {"format": "pt"}) if path.suffix == ".safetensors" else torch.save(
        state, path
    )
    return path


def without_torch(path: Path, key: str | None = None) -> CheckpointContents | None:
    """Return what is listed of a file without torch; None if that needs torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "hookscope.models.tensor_contents", None)  # so that importing it fails
        try:
            return list_contents(path, key)
        except ImportError:
            return None


def with_torch(path: Path, key: str | None = None) -> CheckpointContents:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "_listed_plain", lambda *_: None)
        return list_contents(path, key)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("net.pt", change) for change in ("as published", "half precision", "int8", "values that are rare")),
        *(("net.safetensors", change) for change in ("bfloat16", "large float64")),
    ],
)
@pytest.mark.sample("net.pt-int8", "net.safetensors-bfloat16")
def test_weights_are_listed_as_with_torch(tmp_path: Path, change: str, name: str) -> None:
    path = save(CHANGES[change](small_state()), tmp_path / name)
    actual = without_torch(path)
    assert actual is not None
    assert actual.parts[0].architectures[0].startswith("shufflenet_v2_x0_5: all ")
    assert actual.to_json() == with_torch(path).to_json()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_pattern_of_float8_is_listed_as_with_torch(tmp_path: Path, dtype: torch.dtype) -> None:
    patterns = torch.arange(256, dtype=torch.uint8).view(dtype)
    path = save({"w": patterns, "half": patterns[::2].contiguous()}, tmp_path / "net.safetensors")
    actual = without_torch(path)
    assert actual is not None
    assert actual == with_torch(path)


def test_weights_in_another_order_of_axes_are_listed_as_with_torch(tmp_path: Path) -> None:
    network = torchvision.models.squeezenet1_1().to(memory_format=torch.channels_last)
    torch.save(network.state_dict(), tmp_path / "net.pt")  # an OrderedDict with torch's _metadata
    actual = without_torch(tmp_path / "net.pt")
    assert actual is not None
    assert actual == with_torch(tmp_path / "net.pt")


def tied(state: State) -> State:
    names = [name for name in state if name.endswith("running_mean")]
    half = state[names[0]][state[names[0]].numel() // 2 :]
    return state | {names[1]: state[names[0]][: state[names[1]].numel()], "again": state[names[0]], "half": half}


def trained(_state: State) -> State:
    """Return what training scripts save, with everything that pickles have words for."""
    network = torchvision.models.squeezenet1_1(num_classes=3)
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    network(torch.rand(1, 3, 32, 32)).sum().backward()
    optimiser.step()
    return {
        "epoch": 3,
        "state_dict": network.state_dict(),
        "optimizer": optimiser.state_dict(),
        "ema": {f"module.{name}": tensor.half() for name, tensor in network.state_dict().items()},
        "scale": nn.Parameter(torch.ones(2)),
        "args": {"lr": 1e-3, "names": ["a", None], "flags": (True, False), "steps": 10**12, "below": -3},
        "losses": [0.5, 0.25],
        "pytorch-lightning_version": "2.5",
        7: torch.ones(3),
    }


NESTED: dict[str, Callable[[State], object]] = {
    "tied tensors": tied,
    "a training checkpoint": trained,
    "weights far inside": lambda state: {"a": {"b": {"net": state}}},
    "numbers for names": lambda state: dict(enumerate(state.values())),
    "one tensor": lambda state: state["conv1.0.weight"],
    "a list": lambda state: [*[*state.values()][:3], (torch.zeros(0), {"x": torch.ones(())})],
    "an optimiser": lambda state: trained(state)["optimizer"],
    "unknown names": lambda state: {f"some.{name}": each for name, each in [*state.items()][:9]},
}


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.sample("a training checkpoint")
def test_what_is_around_weights_is_listed_as_with_torch(tmp_path: Path, kind: str) -> None:
    torch.save(NESTED[kind](small_state()), tmp_path / "net.pt")
    actual = without_torch(tmp_path / "net.pt")
    assert actual is not None
    assert actual.to_json() == with_torch(tmp_path / "net.pt").to_json()


@pytest.mark.parametrize("key", ["ema.module", "optimizer", "args"])
@pytest.mark.sample("ema.module", "optimizer")
def test_what_is_at_a_key_is_listed_as_with_torch(tmp_path: Path, key: str) -> None:
    path = tmp_path / "training.ckpt"
    torch.save(trained({}), path)
    if key == "args":
        assert without_torch(path, key) is None  # to say that it holds no tensors
        return
    actual = without_torch(path, key)
    assert actual is not None
    assert actual == with_torch(path, key)


def test_shards_are_listed_as_with_torch(tmp_path: Path) -> None:
    state = small_state()
    names = [*state]
    files = {"a.safetensors": names[:100], "b.safetensors": names[100:]}
    for name, held in files.items():
        save({each: state[each] for each in held}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {each: name for name, held in files.items() for each in held}}))
    actual = without_torch(index)
    assert actual is not None
    assert actual == with_torch(index)


LEFT: dict[str, Callable[[State, Path], object]] = {
    "views of larger storages": lambda state, path: torch.save(
        {name: torch.stack([tensor, tensor], -1)[..., 0] for name, tensor in state.items()}, path
    ),
    "legacy format": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "other byte order": save_big_endian,
    "later protocol": lambda state, path: torch.save(state, path, pickle_protocol=4),
    "class": lambda _state, path: torch.save(nn.Linear(2, 3), path),
    "complex numbers": lambda state, path: torch.save({n: v.to(torch.complex64) for n, v in state.items()}, path),
    "a set": lambda state, path: torch.save({"state_dict": state, "names": {"a"}}, path),
    "no tensors": lambda _state, path: torch.save({"epoch": 3}, path),
    "damage": lambda state, path: path.write_bytes(save(state, path).read_bytes()[:-500]),
}


@pytest.mark.parametrize("kind", [kind for kind in LEFT if kind != "damage"])
@pytest.mark.sample("views of larger storages", "later protocol", "a set")
def test_other_files_are_left_to_torch(tmp_path: Path, kind: str) -> None:
    LEFT[kind](small_state(), tmp_path / "net.pt")
    assert without_torch(tmp_path / "net.pt") is None


def listed_alike(path: Path) -> bool:
    """Say whether a file is listed without torch; then what is listed is what torch lists."""
    actual = without_torch(path)
    return actual is not None and actual == with_torch(path)


def test_no_hostile_file_is_listed_without_torch_or_run(tmp_path: Path) -> None:
    canary, path = tmp_path / "canary", tmp_path / "net.pt"
    for name, payload in PAYLOADS.items():
        path.write_bytes(hostile.torch_bytes({**GOOD, "w": payload(canary)}))
        assert without_torch(path) is None, name
    for name, assembled in ASSEMBLED.items():
        path.write_bytes(hostile.zip_bytes(hostile.torch_members(assembled(canary))))
        assert without_torch(path) is None, name
    assert not canary.exists()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.exhaustive
def test_a_file_with_one_byte_changed_is_listed_as_with_torch_or_left_to_it(tmp_path: Path, suffix: str) -> None:
    good = save(
        OrderedDict(a=torch.arange(6.0).view(2, 3), b=torch.ones(2, dtype=torch.int64)), tmp_path / f"g{suffix}"
    )
    assert listed_alike(good)
    content = good.read_bytes()
    changed = tmp_path / f"changed{suffix}"
    for at in range(0, len(content), max(1, len(content) // 25)):
        changed.write_bytes(hostile.flipped(content, at, at % 8))
        try:
            actual = without_torch(changed)
        except HookscopeError:  # by what the file starts with, which torch is not asked about
            continue
        assert actual is None or actual == with_torch(changed), f"listed differently with byte {at} changed"


COMMANDS: dict[str, tuple[Callable[[State], object], list[str], str]] = {
    "published": (lambda state: state, [], "fits shufflenet_v2_x0_5: all 338 names and shapes fit"),
    "a training checkpoint": (trained, [], "fits squeezenet1_1 (num_classes=3): all 52 names and shapes fit"),
    "a key": (trained, ["--key", "ema"], "fits squeezenet1_1 (num_classes=3): all 52 names and shapes fit"),
    "tied": (tied, [], "nearest: shufflenet_v2_x0_5: 338 of 338 names and shapes; unknown to it 'again', 'half'"),
    "near": (
        lambda state: {name: tensor for name, tensor in state.items() if name != "fc.bias"},
        [],
        "nearest: shufflenet_v2_x0_5: 337 of 338 names and shapes; missing 'fc.bias'",
    ),
    "demo": (
        lambda _state: EfficientNet.from_name("efficientnet-lite0", num_classes=3).state_dict(),
        [],
        "fits demo (num_classes=3): all 296 names and shapes fit",
    ),
    "timm": (
        lambda _state: timm.create_model("test_efficientnet", num_classes=3, in_chans=1).state_dict(),
        [],
        "fits timm:test_efficientnet (num_classes=3)",
    ),
    "unknown": (lambda _state: nn.Linear(2, 3).state_dict(), [], "fits no network known to hookscope"),
}


def test_the_command_imports_no_torch(tmp_path: Path) -> None:
    files = {}
    for name, (changed, _, _) in COMMANDS.items():
        files[name] = tmp_path / f"{name}.pt"
        torch.save(changed(small_state()), files[name])
    state = {name: tensor.clone() for name, tensor in timm.create_model("test_vit", num_classes=3).state_dict().items()}
    lines = [[str(files[name]), *options] for name, (_, options, _) in COMMANDS.items()]
    lines.append([str(save(state, tmp_path / "net.safetensors"))])
    said = [text for _, _, text in COMMANDS.values()] + ["fits timm:test_vit (num_classes=3): all"]
    script = (
        "import json, sys; from hookscope.cli.app import app\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    try: app(['checkpoint', *line])\n"
        "    except SystemExit: pass\n"
        "    print('imported:', *sorted({'torch', 'torchvision', 'timm'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", script, json.dumps(lines)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    *reports, rest = " ".join(ended.stdout.split()).split("imported:")
    assert rest == ""
    for report, text in zip(reports, said, strict=True):
        assert text in report
