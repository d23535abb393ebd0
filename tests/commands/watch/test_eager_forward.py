"""Activations of compiled networks, from one more forward pass; and that no bit of the training changes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookscope
from hookscope.commands.watch.training_log import read_training
from tests.commands.watch.conftest import Forked
from tests.commands.watch.test_script import said
from tests.commands.watch.training_scripts import SCRIPTS

pytestmark = pytest.mark.exhaustive


class Counting(nn.Module):
    """Has buffers, draws random numbers, and writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.head = nn.Linear(16, 3)
        self.register_buffer("drawn", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        inputs.mul_(2)
        self.drawn.add_(torch.rand(1))
        return self.head(self.first(inputs))


def trained(compiling: str, *, every: int | None) -> tuple[list[Tensor], list[str]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Counting()
    network: nn.Module = plain
    if compiling.startswith("in place "):
        plain.compile(backend=compiling.removeprefix("in place "))
    else:
        network = torch.compile(plain, backend=compiling)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    watch = None
    lines: list[str] = []
    if every is not None:
        watch = hookscope.watch(network, optimizer, every=every, eager_forward=True, on_line=lines.append)
    for _ in range(20):
        inputs = torch.randn(16, 8)
        before = inputs.clone()
        loss = F.cross_entropy(network(inputs), torch.randint(0, 3, (16,)))
        assert torch.equal(inputs, 2 * before)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if watch is not None:
            watch.step(loss)
    if watch is not None:
        watch.close()
        assert watch.log.ends[0].reason == "closed"
        labels = [[layer.label for layer in step.layers] for step in watch.log.watched]
        assert len(labels) == 4
        expected = ["first.0", "first.1", "first.2", "first.3", "head"]
        assert all([each for each in actual if each in expected] == expected for actual in labels), labels
    return [*plain.state_dict().values(), torch.get_rng_state()], lines


@pytest.mark.parametrize("compiling", ["aot_eager", "in place aot_eager"])
def test_weights_buffers_and_random_numbers_are_those_of_the_plain_run(compiling: str) -> None:
    plain, _ = trained(compiling, every=None)
    watched, lines = trained(compiling, every=5)
    assert all(map(torch.equal, watched, plain))
    assert lines == []


class Unwilling(nn.Linear):
    """Runs only while gradients are recorded."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch has it
        if not torch.is_grad_enabled():
            raise ValueError("gradients are needed")
        return super().forward(input)


@pytest.mark.parametrize("fault", ["SyncBatchNorm", "error"])
def test_an_eager_forward_pass_that_fails_ends_only_the_watch_of_activations(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hookscope.commands.watch.activations._process_count", lambda: 2)
    first = Unwilling(4, 8) if fault == "error" else nn.Linear(4, 8)
    network = nn.Sequential(first, nn.SyncBatchNorm(8) if fault != "error" else nn.ReLU(), nn.Linear(8, 2))
    compiled = torch.compile(network, backend="aot_eager")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    lines: list[str] = []
    with hookscope.watch(compiled, optimizer, every=2, eager_forward=True, on_line=lines.append) as watch:
        for _ in range(6):
            compiled(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
        assert not watch.is_closed
    why = (
        "RuntimeError: SyncBatchNorm waits for the other processes, which do not run eagerly"
        if fault == "SyncBatchNorm"
        else "ValueError: gradients are needed"
    )
    assert lines == [f"Activations of Sequential are not watched, because its eager forward pass fails: {why}."]
    assert [(watched_step.step, len(watched_step.layers)) for watched_step in watch.log.watched] == [
        (2, 0),
        (4, 0),
        (6, 0),
    ]


def test_activations_are_those_of_the_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    network = torch.compile(plain, backend="aot_eager")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    inputs = torch.randn(32, 4)
    with hookscope.watch(network, optimizer, every=2, eager_forward=True, out=tmp_path, on_line=print) as watch:
        for _ in range(2):
            network(inputs).sum().backward()
            optimizer.step()
            watch.step()
    (step,) = read_training(tmp_path).watched
    expected = [plain[:end](inputs) for end in (1, 2, 3)]
    assert [layer.label for layer in step.layers] == ["0", "1", "2"]
    for layer, output in zip(step.layers, expected, strict=True):
        assert layer.mean == pytest.approx(output.mean().item(), rel=1e-5)
        assert layer.std == pytest.approx(output.std(correction=0).item(), rel=1e-5)
        assert layer.zero_fraction == pytest.approx((output == 0).float().mean().item())


def test_a_script_is_watched_with_them(tmp_path: Path, forked: Forked) -> None:
    (tmp_path / "train.py").write_text(SCRIPTS["compiled"])
    forked("train.py", "plain.pt", 0, "aot_eager")
    arguments = ["--every", 4, "--out", "run", "--eager-forward", "--", "watched.pt", 0, "aot_eager"]
    done = forked("-m", "hookscope", "watch", "train.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert not any("not watched" in line for line in said(done))
    assert all(map(torch.equal, torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "watched.pt")))
    watched = read_training(tmp_path / "run").watched
    assert [watched_step.step for watched_step in watched] == [4, 8, 12]
    assert all(watched_step.layers for watched_step in watched)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("eager_forward", [False, True])
def test_torchscript_is_watched_and_its_activations_are_said_not_to_be(eager_forward: bool) -> None:
    network = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    lines: list[str] = []
    with hookscope.watch(network, optimizer, every=2, eager_forward=eager_forward, on_line=lines.append) as watch:
        for _ in range(4):
            loss = network(torch.randn(16, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            gradients = [weight.grad.clone() for weight in network.parameters()]
            optimizer.step()
            watch.step(loss)
    assert watch.log.ends[0].reason == "closed"
    assert watch.log.steps[-1].gradient_norm == pytest.approx(torch.cat([*map(torch.flatten, gradients)]).norm().item())
    assert [len(step.parameters) for step in watch.log.watched] == [4, 4]
    why = (
        "Activations of RecursiveScriptModule are not watched, because its eager forward pass fails: RuntimeError: "
        "TorchScript is always compiled."
        if eager_forward
        else "RecursiveScriptModule is compiled, where hooks do not fire: activations are not watched, parameters, "
        "gradients and updates are."
    )
    assert lines == [why]
