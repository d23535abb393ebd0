"""Statistics on every module call, over the plain forward pass."""

from copy import deepcopy
from functools import partial

import torch

from benchmarks.capture_ways import WAYS, WITH_DISTRIBUTIONS, Way, hand_written
from benchmarks.comparing import Budget, Ready, over_first, ready, timeable
from benchmarks.findings import Measurement, Section, Work
from benchmarks.networks import NETWORKS, layer_rows, seeded, shapes_of, statistics_of
from benchmarks.same_work import TOLERANCES, judge
from benchmarks.timing import CLOCKS, Run, interleaved

# By device and network, of hookscope's ways: the design's, and the next.
_BUDGETS: dict[tuple[str, str], dict[str, Budget]] = {
    ("cpu", "resnet34"): {"hookscope": (1.30, 1.20), WITH_DISTRIBUTIONS: (1.45, None)},
    ("cuda", "resnet34"): {"hookscope": (1.10, None)},
}
_ROUNDS = {"resnet34": 180}  # where a budget is: medians of 60 still differ by 2% from one measurement to the next
_OTHER_ROUNDS = 12

_NOTE = """\
The output of every module call is reduced to statistics. hookscope and the hand-written hooks compute all that
hookscope reports except distributions; "hookscope, distributions" also counts every value in bins, for quantiles and
histograms. Tools that return tensors are timed with mean, std, min and max of each tensor, fetched together;
preparation such as tracing is not timed. A row is wrong if one of these four numbers differs from hookscope's, which
are compared with those of the hand-written hooks. Bringing the results of hookscope and torchinfo into this form is not
timed. Every tool, and the plain pass, has its own copy of the network. torchlens leaves torch's functions wrapped; they
are restored after each run, untimed."""


def measure(device: str) -> Section:
    """Measure every network on a device; values found on CUDA are compared with those found on the CPU."""
    found = [each for network in NETWORKS for each in _measure_network(network, device)]
    return Section("Statistics on every module call, over the plain forward pass", _NOTE, tuple(found))


def _measure_network(network: str, device: str) -> list[Measurement]:
    model, batch = seeded(network, device)
    own = deepcopy(model)  # as each way has one: what ran last finds its weights in the cache

    def settle() -> None:
        with torch.no_grad():
            model(batch)

    def plain() -> None:
        with torch.no_grad():
            own(batch)

    on_cpu = seeded(network)
    rows = layer_rows(*on_cpu)
    by_hand = hand_written(*on_cpu, rows)()

    def prepare(name: str, way: Way) -> tuple[Run, Work]:
        ours = name in ("hookscope", WITH_DISTRIBUTIONS)
        wanted = shapes_of(rows) if way.shapes_only else by_hand if ours else statistics_of(rows)
        with way.around():
            run = way.prepare(deepcopy(model), batch, rows)
            return run, judge(run(), wanted, shapes_only=way.shapes_only, tolerance=TOLERANCES[device])

    turns = _ROUNDS.get(network, _OTHER_ROUNDS)
    ways = {"plain forward": Ready(None, plain, turns)}
    for name, way in WAYS.items():
        ways[name] = ready(max(2, turns * way.percent // 100), partial(prepare, name, way))
    around = {name: way.around for name, way in WAYS.items()}
    seconds = interleaved(*timeable(ways), CLOCKS[device], settle, warm=True, around=around)
    return over_first(network, ways, seconds, _BUDGETS.get((device, network), {}))
