"""What a step of a training costs that is watched, beside the step alone and beside what else looks at it."""

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

import hookscope
from benchmarks import processes
from benchmarks.comparing import Ready, over_first, ready, timeable
from benchmarks.findings import Measurement, Section, Spread, Work
from benchmarks.timing import Run, interleaved, spread

_BATCH, _SIDE, _CLASSES = 16, 64, 10
STEPS = 10  # in one timed run
ROUNDS = 9
TURNS, PROCESSES = 200, 3  # of steps that are not watched
COMPARED = 3  # steps after which weights are compared

_NEVER = 10**9
_OFF_STEP_MS = 0.2
_START_UP_SECONDS, _DISCOVERY_SECONDS = 1.0, 0.2
_STARTS = 7  # of either process

_LIMITS = {"every=100": 1.02, "every step, no activations": 1.35, "every step": 1.80}

_NOTE = f"""\
resnet18 with {_CLASSES} classes, {_BATCH} pictures of {_SIDE} × {_SIDE}, SGD with momentum, in turns of {STEPS} steps:
with "every=100" one turn in ten has a watched step. Weights equal the plain loop's after {COMPARED} steps, bit for bit.
wandb.watch, offline, logs histograms of parameters and gradients; torch-module-monitor mean, standard deviation and
norm of activations, gradients and parameters; DebugUnderflowOverflow the extremes of activations and weights."""


_NOTE_OF_TWO = """\
The same training under DistributedDataParallel on two processes (gloo) with one thread each; the first is watched."""


_NOTE_OFF_STEP = f"""\
`hookscope watch SCRIPT --every {_NEVER}`: what loss, norms and rules add to a step of which no layer is measured, in
CPU time of the training thread; median of {TURNS} turns. Batch 16, SGD with momentum, one thread."""


_NOTE_START = f"""\
A script that trains resnet18 for one step, {_STARTS} times: CPU time until the end of the step, and of `optimizer.step`
alone, in which the watch finds the network."""


class Loop:
    """A training that can be gone on with."""

    def __init__(
        self,
        begin: Callable[[nn.Module, torch.optim.Optimizer], Callable[[Tensor], None]],
        wrap: Callable[[nn.Module], nn.Module] = lambda network: network,
    ) -> None:
        """Make a network and its optimiser, and begin to watch them."""
        torch.manual_seed(0)
        self.network = wrap(resnet18(num_classes=_CLASSES))
        self._pictures = torch.randn(_BATCH, 3, _SIDE, _SIDE)
        self._labels = torch.randint(0, _CLASSES, (_BATCH,))
        self._optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3, momentum=0.9)
        self._after_step = begin(self.network, self._optimizer)

    def go_on(self, steps: int) -> None:
        """Train for some steps."""
        for _ in range(steps):
            loss = cross_entropy(self.network(self._pictures), self._labels)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._after_step(loss)


def measure() -> Section:
    """Measure every way."""
    ways = {"plain": Ready(None, partial(Loop(plain).go_on, STEPS), ROUNDS)}
    ways |= {name: ready(ROUNDS, partial(_prepared, begin)) for name, begin in _WAYS.items()}
    actual = over_first(f"resnet18, {_BATCH} pictures", ways, interleaved(*timeable(ways)), _LIMITS)
    return Section("hookscope.watch, over a plain training step", _NOTE, tuple(actual))


def measure_two_processes() -> Section:
    """Measure DistributedDataParallel on two processes of this machine, of which the first is watched."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = processes.run([sys.executable, *command, "-m", "benchmarks.children.data_parallel"])
    record = json.loads(printed.strip().splitlines()[-1])
    work = Work("differs" if record["differing"] else "same", record["count"], record["differing"])
    ways = {name: Ready(work if name != "plain" else None, None, ROUNDS) for name in record["seconds"]}
    figures = over_first(f"resnet18, {_BATCH} pictures on each", ways, record["seconds"], {"every=100": 1.03})
    return Section("hookscope.watch on two processes", _NOTE_OF_TWO, tuple(figures))


def measure_off_step() -> Section:
    """Measure what a step costs that is not watched in full, as `hookscope watch` runs a script."""
    actual = []
    for network in ("mlp", "resnet"):
        for way in ("without a file", "with a file"):
            records = [_off_step(network, with_file=way == "with a file") for _ in range(PROCESSES)]
            added, plain = (spread([record[name] for record in records], "ms") for name in ("added", "plain"))
            subject = f"{network}, {records[0]['tensors']:.0f} tensors"
            if way == "without a file":
                actual.append(Measurement(subject, "plain step", plain.median, "ms", plain))
            actual.append(Measurement(subject, f"added {way}", added.median, "ms", added, None, _OFF_STEP_MS))
    return Section("hookscope watch, steps that are not measured in full", _NOTE_OFF_STEP, tuple(actual))


def measure_start() -> Section:
    """Measure what `hookscope watch` adds until the first step of a script has ended."""
    script = str(processes.ROOT / "benchmarks" / "children" / "first_step.py")
    ways = [[sys.executable, script], [sys.executable, "-m", "hookscope", "watch", script]]
    turns = [[json.loads(processes.run(way)) for way in ways] for _ in range(_STARTS + 1)][1:]  # the first compiles
    actual = [Measurement("resnet18", "plain script", *_spread_of([plain["until"] for plain, _ in turns]))]
    for name, key, limit in (
        ("added until the first step has ended", "until", _START_UP_SECONDS),
        ("of it in the step", "step", _DISCOVERY_SECONDS),
    ):
        added = [watched[key] - plain[key] for plain, watched in turns]
        actual.append(Measurement("resnet18", name, *_spread_of(added), None, limit))
    return Section("hookscope watch, the start of a script", _NOTE_START, tuple(actual))


def _spread_of(seconds: list[float]) -> tuple[float, str, Spread]:
    actual = spread(seconds, "s")
    return actual.median, "s", actual


def _off_step(network: str, *, with_file: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        script = str(processes.ROOT / "benchmarks" / "children" / "off_step.py")
        out = ["--out", f"{folder}/run"] if with_file else []
        watch = [sys.executable, "-m", "hookscope", "watch", script, "--every", str(_NEVER), *out]
        actual: dict[str, float] = json.loads(processes.run([*watch, "--", network, str(TURNS)]))
        return actual


def _prepared(begin: Callable[[nn.Module, torch.optim.Optimizer], Callable[[Tensor], None]]) -> tuple[Run, Work]:
    loops = [Loop(plain), Loop(begin)]
    for loop in loops:
        loop.go_on(COMPARED)
    return partial(loops[1].go_on, STEPS), same_weights(loops[0].network, loops[1].network)


def same_weights(first: nn.Module, second: nn.Module) -> Work:
    """Compare weights and buffers, bit for bit."""
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    equal = [torch.equal(one, other) for one, other in pairs]
    return Work("same" if all(equal) else "differs", len(equal), equal.count(False))


def plain(_network: nn.Module, _optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    """Watch nothing."""
    return lambda _loss: None


def watched(
    network: nn.Module, optimizer: torch.optim.Optimizer, *, every: int, activations: bool = True
) -> Callable[[Tensor], None]:
    """Watch with hookscope; return what is called after each step."""
    return hookscope.watch(network, optimizer, every=every, activations=activations, on_line=lambda _: None).step


def _debugged(network: nn.Module, _optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    from transformers.debug_utils import DebugUnderflowOverflow  # noqa: PLC0415 - a peer that may be absent

    DebugUnderflowOverflow(network)  # type: ignore[no-untyped-call]
    return lambda _loss: None


def _logged(network: nn.Module, _optimizer: torch.optim.Optimizer, *, every: int) -> Callable[[Tensor], None]:
    import wandb  # noqa: PLC0415 - a peer that may be absent

    settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True)
    # Its hooks log to the latest run of the process, so there is one for all.
    run: Any = wandb.run or wandb.init(mode="offline", dir=tempfile.mkdtemp(), settings=settings)
    run.watch(network, log="all", log_freq=every, idx=every)
    return lambda loss: run.log({"loss": loss.item()})


def _monitored(network: nn.Module, optimizer: torch.optim.Optimizer, *, every: int) -> Callable[[Tensor], None]:
    from torch_module_monitor import ModuleMonitor  # noqa: PLC0415 - a peer that may be absent

    monitor: Any = ModuleMonitor(monitor_step_fn=lambda step: step % every == 0)
    monitor.set_module(network)
    for name, metric in _METRICS.items():
        monitor.add_activation_metric(name, metric)
        monitor.add_gradient_metric(name, metric)
        monitor.add_parameter_metric(name, metric)

    def before_step(*_: object) -> None:
        monitor.monitor_gradients()
        monitor.monitor_parameters()

    optimizer.register_step_pre_hook(before_step)
    step = 0
    monitor.begin_step(step)

    def after_step(_loss: Tensor) -> None:
        nonlocal step
        monitor.end_step()
        monitor.get_step_metrics()
        step += 1
        monitor.begin_step(step)

    return after_step


_METRICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda values: values.float().mean(),
    "std": lambda values: values.float().std(),
    "norm": lambda values: values.float().norm(),
}

_WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Callable[[Tensor], None]]] = {
    "never in full": partial(watched, every=_NEVER),
    "every=100": partial(watched, every=100),
    "every step, no activations": partial(watched, every=1, activations=False),
    "every step": partial(watched, every=1),
    "wandb.watch, log_freq=100": partial(_logged, every=100),
    "wandb.watch, every step": partial(_logged, every=1),
    "torch-module-monitor, every 100": partial(_monitored, every=100),
    "torch-module-monitor, every step": partial(_monitored, every=1),
    "transformers' DebugUnderflowOverflow": _debugged,
}
