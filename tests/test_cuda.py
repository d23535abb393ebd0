"""On a CUDA device: the numbers of the CPU, passes that never wait for the device, and training left as it is."""

import copy
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchvision.models import resnet18
from torchvision.models.vision_transformer import VisionTransformer

import hookscope
from hookscope.statistics import reducer
from hookscope.statistics.reduction import Reduction
from tests.inspection.test_accelerator import activations, differences, gradients, made
from tests.networks import NETWORKS
from tests.statistics.test_tiles import KINDS, values_of

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

ROOT = Path(__file__).parents[1]
# Not the same work there: kernels, states and random numbers of the CPU; another rounding, in bfloat16 and where boxes
# are chosen by scores that are nearly equal.
_OTHER_WORK = {
    *("quantized resnet18", "DataParallel", "unrolled recurrent", "autocast inside", "random noise"),
    *("bfloat16", "ssdlite320_mobilenet_v3_large"),
}
# Gradients that rounding changes, cuDNN's recurrent layers, which refuse them in eval mode, and an error of torch's
# that names a file of the CPU.
_OTHER_GRADIENTS = {"raft_small", "maskrcnn", "recurrent", "ragged and nothing"}
_NAMES = [name for name in NETWORKS if name not in _OTHER_WORK]


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU knows no TF32."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def sent(value: Any) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda tensor: tensor.detach().cuda().requires_grad_(tensor.requires_grad), value
    )


@pytest.mark.parametrize("name", _NAMES)
def test_activations_are_those_of_the_cpu(name: str) -> None:
    model, args = made(name)
    here = activations(model, args, distributions=True, keeps_values=True)
    there = activations(copy.deepcopy(model).cuda(), sent(args), distributions=True, keeps_values=True)
    assert [row.label for row in there.rows] == [row.label for row in here.rows]
    actual = []
    for ours, theirs in zip(here.rows, there.rows, strict=True):
        actual += differences(ours.label, ours.activation, theirs.activation)
        actual += [f"{ours.label}: flags"] * (ours.flags != theirs.flags)
    assert actual == []


@pytest.mark.parametrize("name", [name for name in _NAMES if name not in _OTHER_GRADIENTS])
def test_gradients_are_those_of_the_cpu(name: str) -> None:
    model, args = made(name)
    options = {"include_inputs": True, "distributions": True, "keeps_values": True}
    here = gradients(model, args, **options)
    there = gradients(copy.deepcopy(model).cuda(), sent(args), **options)
    if isinstance(here, str) or isinstance(there, str):
        assert here == there
        return
    assert there.loss.value == pytest.approx(here.loss.value, rel=1e-3, abs=1e-3, nan_ok=True)
    rounding = 1e-6 * max(abs(row.gradient.max or 0) for row in here.gradients)
    actual = []
    for ours, theirs in zip(here.gradients, there.gradients, strict=True):
        actual += [f"{ours.label}: {ours.status} {theirs.status}"] * (ours.status != theirs.status)
        actual += differences(ours.label, ours.gradient, theirs.gradient, rounding)
    for mine, other in zip(here.parameters, there.parameters, strict=True):
        actual += differences(mine.name, mine.gradient, other.gradient, rounding)
    assert actual == []


class Watched(nn.Module):
    """A network in whose forward pass waiting for the device is an error."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self.network(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_nobody_waits_for_the_device_while_a_pass_runs() -> None:
    inner = resnet18().eval()
    network = Watched(inner).cuda()
    pictures = torch.randn(2, 3, 224, 224, device="cuda")
    handle = inner.relu.register_forward_hook(lambda _module, _args, output: None if output.sum().item() else output)
    with pytest.raises(RuntimeError, match="synchroniz"):
        network(pictures)
    handle.remove()
    assert len(hookscope.activations(network, pictures).rows) == 60
    assert len(hookscope.grads(network, pictures, loss="sum").gradients) == 60


def test_statistics_take_no_memory_of_the_device_that_grows_with_the_network() -> None:
    network = resnet18().eval().cuda()
    pictures = torch.randn(8, 3, 224, 224, device="cuda")

    def peak(run: Any) -> int:
        run()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before

    def plain() -> None:
        with torch.no_grad():
            network(pictures)

    largest = 8 * 64 * 112 * 112 * 4  # conv1's output in bytes
    assert peak(lambda: hookscope.activations(network, pictures)) < peak(plain) + 20 * largest


@pytest.mark.parametrize("scaled", [False, True])
def test_training_is_the_same_watched_or_not(scaled: bool) -> None:
    def trained(watched: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
        ).cuda()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        scaler = torch.amp.GradScaler("cuda", enabled=scaled)
        watch = hookscope.watch(network, optimizer, every=3, on_line=lambda _: None) if watched else None
        for _ in range(10):
            with torch.autocast("cuda", torch.float16, enabled=scaled):
                loss = network(torch.randn(4, 3, 8, 8, device="cuda")).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if watch is not None:
                watch.step(loss)
        if watch is not None:
            watch.close()
        return [parameter.detach().clone() for parameter in network.parameters()], watch and watch.log

    plain, _ = trained(watched=False)
    watched, log = trained(watched=True)
    assert all(torch.equal(*pair) for pair in zip(plain, watched, strict=True))
    assert len(log.steps) == 10
    assert len(log.watched) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_of_a_fused_kernel_is_that_of_the_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    network = VisionTransformer(64, 16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=64).eval()
    pictures = torch.randn(2, 3, 64, 64)
    here = hookscope.attention(network, pictures)
    there = hookscope.attention(copy.deepcopy(network).to("cuda", dtype), pictures.to("cuda", dtype))
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert len(there.maps) == len(here.maps) > 0
    for ours, theirs in zip(here.maps, there.maps, strict=True):
        np.testing.assert_allclose(np.asarray(theirs.values), np.asarray(ours.values), atol=tolerance)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    torch.manual_seed(0)
    torch.save(resnet18().state_dict(), folder / "a.pt")
    torch.save(resnet18().state_dict(), folder / "b.pt")
    (folder / "pictures").mkdir()
    for picture in ("cat.jpg", "coffee.jpg"):
        shutil.copy(ROOT / "sample_images" / picture, folder / "pictures")
    return folder


_PICTURE = ROOT / "sample_images" / "cat.jpg"
_WEIGHTS = ("--weights", "a.pt")
_COMMANDS: dict[str, tuple[object, ...]] = {
    "activations": ("activations", "resnet18", _PICTURE, *_WEIGHTS),
    "half precision": ("activations", "resnet18", _PICTURE, *_WEIGHTS, "--dtype", "float16"),
    "grads": ("grads", "resnet18", _PICTURE, *_WEIGHTS, "--loss", "sum"),
    "attribute": ("attribute", "resnet18", _PICTURE, *_WEIGHTS),
    "diff": ("diff", "a.pt", "b.pt", _PICTURE, "--arch", "resnet18"),
    "attention": ("attention", "vit_b_16", _PICTURE),
    "survey": ("survey", "resnet18", "pictures", *_WEIGHTS, "--batch-size", "2"),
}


def on(device: str, *arguments: object, folder: Path) -> tuple[int, Any]:
    """Run a command; return its exit code and the JSON that it printed."""
    command = [sys.executable, "-m", "hookscope", *map(str, arguments), "--device", device]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("name", _COMMANDS)
def test_commands_run_there_and_say_so(name: str, files: Path) -> None:
    code, printed = on("cuda", *_COMMANDS[name], "--out", name, "--json", folder=files)
    assert code == 0
    assert '"device": "cuda' in json.dumps(printed)


def test_check_judges_there_as_on_the_cpu(files: Path) -> None:
    arguments = ("check", "a.pt", "--arch", "resnet18", "--images", _PICTURE, "--format", "json")
    verdicts = []
    for device in ("cpu", "cuda"):
        code, report = on(device, *arguments, folder=files)
        verdicts.append((code, {rule["rule"]: rule["status"] for rule in report["checkpoints"][0]["outcomes"]}))
    assert verdicts[0] == verdicts[1]


# --- the kernel, where Triton can compile it ---

_FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def exact_parts(reduction: Reduction) -> list[Any]:
    counts = (reduction.finite_count, reduction.nan_count, reduction.nonzero_count, reduction.min, reduction.max)
    bins = () if reduction.distribution is None else reduction.distribution.binned()
    return [counts, reduction.channel_nonzero, *bins, *(reduction.kept or ())]


def sums(reduction: Reduction) -> list[float]:
    return [reduction.mean, reduction.squared_deviations, reduction.abs_sum, reduction.square_sum]


@pytest.mark.parametrize("dtype", _FLOATS)
def test_the_kernel_compiles_and_agrees_with_the_cpu(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    assert reducer.agrees_with_cpu(torch.device("cuda", 0), dtype)


@pytest.mark.parametrize("uses_kernel", [True, False])
@pytest.mark.parametrize("dtype", _FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_reductions_are_those_of_the_cpu_with_the_kernel_and_without(
    kind: str, dtype: torch.dtype, uses_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not uses_kernel:
        monkeypatch.setattr(reducer, "agrees_with_cpu", lambda *_: False)
    shapes = [(2, 3, 50, 51), (5, 64, 7, 7), (1, 197, 768), (4, 33, 4097), (9,), (64, 8, 128, 130)]
    tensors = [values_of(shape, kind, dtype, seed) for seed, shape in enumerate(shapes)]
    tensors += [tensor.transpose(0, -1) for tensor in tensors] + [tensor[..., ::2] for tensor in tensors]
    used = reducer.Reducer(distributions=True, keeps_values=True)
    far = reducer.collect([used.reduce(tensor.cuda(), tensor.dim() - 1) for tensor in tensors])
    for tensor, there in zip(tensors, far, strict=True):
        (here,) = reducer.collect([used.reduce(tensor, tensor.dim() - 1)])
        for ours, theirs in zip(exact_parts(here), exact_parts(there), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        level = 1e-6 * math.sqrt(here.square_sum / max(here.finite_count, 1)) * 2.0**here.exponent
        assert there.mean == pytest.approx(here.mean, rel=1e-6, abs=level)
        assert here.exponent == there.exponent or dtype is torch.float64
        if here.exponent == there.exponent:
            np.testing.assert_allclose(sums(there)[1:], sums(here)[1:], rtol=3e-6, atol=0)


def test_nobody_waits_for_the_kernel() -> None:
    tensors = [torch.randn(1, 8, 30, 30 + index % 3, device="cuda") for index in range(9)]
    used = reducer.Reducer(distributions=True, keeps_values=True)
    used.reduce(tensors[0], 1)  # its first use is compared with the CPU
    torch.cuda.set_sync_debug_mode("error")
    try:
        measured = [used.reduce(tensor.clone(), 1) for tensor in tensors]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(row.finite_count == row.element_count for row in reducer.collect(measured))


def test_a_run_repeats_bit_for_bit() -> None:
    tensor = torch.randn(64, 8, 128, 130, device="cuda").relu()
    first, *others = (
        reducer.collect([reducer.Reducer(distributions=True, keeps_values=True).reduce(tensor, 1)])[0]
        for _ in range(20)
    )
    for other in others:
        assert sums(other) == sums(first)
        for one, same in zip(exact_parts(first), exact_parts(other), strict=True):
            np.testing.assert_array_equal(one, same)
