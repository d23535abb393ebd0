"""A network saved in any kind of weights file, and loaded with nothing but that file, gives the same output."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from hookscope.models import architecture
from hookscope.models.construction import silenced_known_warnings
from hookscope.models.spec import load_model
from tests.models.saved import tensors_of

from .test_zoo import build

pytestmark = pytest.mark.exhaustive

State = Mapping[str, Tensor]


def picture(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(5))


# One of each kind, with the smallest input it takes.
INPUTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "squeezenet1_1": lambda: (picture(1, 3, 64, 64),),
    "shufflenet_v2_x0_5": lambda: (picture(1, 3, 32, 32),),
    "googlenet": lambda: (picture(1, 3, 64, 64),),
    "lraspp_mobilenet_v3_large": lambda: (picture(1, 3, 64, 64),),  # segmentation
    "ssdlite320_mobilenet_v3_large": lambda: ([picture(3, 64, 64)],),  # detection
    "mc3_18": lambda: (picture(1, 3, 4, 16, 16),),  # video
    "raft_small": lambda: (picture(1, 3, 128, 128), 1 - picture(1, 3, 128, 128)),  # optical flow
    "timm:mobilevit_xxs": lambda: (picture(1, 3, 64, 64),),  # attention
}


def in_two(state: State) -> dict[str, dict[str, Tensor]]:
    """Deal the tensors out to two files."""
    half = len(state) // 2
    parts = list(state.items())
    return {"model-00001-of-00002": dict(parts[:half]), "model-00002-of-00002": dict(parts[half:])}


def write_shards(state: State, folder: Path, suffix: str, save: Callable[[dict[str, Tensor], Path], None]) -> Path:
    shards = in_two(state)
    for name, part in shards.items():
        save(part, folder / f"{name}{suffix}")
    weight_map = {key: f"{name}{suffix}" for name, part in shards.items() for key in part}
    index = folder / f"{'model' if suffix == '.safetensors' else 'pytorch_model'}{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return index


def write(content: object, path: Path, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def write_safetensors(state: State, folder: Path) -> Path:
    safetensors.torch.save_file(dict(state), folder / "model.safetensors")
    return folder / "model.safetensors"


WRITERS: dict[str, Callable[[State, Path], Path]] = {
    "torch zip": lambda s, d: write(s, d / "model.pt"),
    "legacy torch": lambda s, d: write(s, d / "model.pth", _use_new_zipfile_serialization=False),
    "safetensors": write_safetensors,
    "sharded safetensors": lambda s, d: write_shards(s, d, ".safetensors", safetensors.torch.save_file),
    "sharded torch": lambda s, d: write_shards(s, d, ".bin", torch.save),
    "training checkpoint": lambda s, d: write({"state_dict": s, "epoch": 3, "optimizer": {"lr": 0.1}}, d / "last.ckpt"),
    "data parallel": lambda s, d: write({f"module.{name}": tensor for name, tensor in s.items()}, d / "ddp.pt"),
}


@pytest.fixture(scope="module", autouse=True)
def _recognised_once() -> Iterator[None]:
    """Recognise the same names and shapes once, not for every kind of file; a prefix makes them others."""
    recognise, expected = architecture.recognise, {}

    def remember(shapes: Mapping[str, tuple[int, ...]]) -> Any:
        key = frozenset(shapes.items())
        if key not in expected:
            expected[key] = recognise(shapes)
        return expected[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "recognise", remember)
        yield


def output_of(network: nn.Module, name: str) -> list[Tensor]:
    with torch.no_grad():
        return tensors_of(network.eval()(*INPUTS[name]()))


@pytest.fixture(scope="module")
def original(request: pytest.FixtureRequest) -> tuple[str, State, list[Tensor]]:
    """A network's name, its state dict with statistics of its own, and what it makes of its input."""
    name = request.param
    with silenced_known_warnings():
        torch.manual_seed(1)
        network = timm.create_model(name.removeprefix("timm:")) if ":" in name else build(name)
    for tensor in network.buffers():
        if tensor.is_floating_point() and tensor.dim() == 1:
            tensor.add_((torch.rand(tensor.shape) - 0.5) / 100)
    output = output_of(network, name)
    assert all(tensor.numel() and tensor.isfinite().all() for tensor in output)
    assert any(tensor.float().std() > 0 for tensor in output)
    return name, network.state_dict(), output


# One network in each kind of file, the others in one.
FIRST, *OTHERS = INPUTS


@pytest.mark.parametrize(
    ("original", "kind"),
    [
        *((FIRST, kind) for kind in WRITERS),
        *((name, "safetensors") for name in OTHERS),
    ],
    indirect=["original"],
)
def test_network_of_a_file_gives_the_output_of_the_one_that_was_saved(
    original: tuple[str, State, list[Tensor]], kind: str, tmp_path: Path
) -> None:
    name, state, expected = original
    path = WRITERS[kind](state, tmp_path)
    loaded = load_model(str(path))
    assert loaded.info.name == f"{path.name} ({name})"
    assert not loaded.info.random
    for ours, theirs in zip(output_of(loaded.module, name), expected, strict=True):
        assert torch.equal(ours, theirs)
