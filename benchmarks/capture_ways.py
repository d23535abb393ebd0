"""Ways to see what every module of a network returns: hookscope, code by hand, and the peers.

Each is prepared with a network of its own, a batch, and the rows to find, and gives a function that runs once and
returns what it found. What a peer can prepare once, it prepares outside of the timing. A peer that hands out tensors is
timed with four statistics of each, taken at the end and fetched together: less than hookscope reports.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.networks import label, layers_of, statistics_of
from benchmarks.same_work import Found, Rows
from hookscope.inspection.forward import inspect
from hookscope.results.activations import LayerRow
from hookscope.results.network import row_label

Prepare = Callable[[nn.Module, Tensor, Sequence[LayerRow]], Callable[[], Found]]


@dataclass(frozen=True)
class Way:
    """One way.

    Attributes:
        prepare: Given a network, a batch and the rows to find, returns what runs once.
        percent: Of the turns, those it takes part in: the slow ones in few.
        shapes_only: It finds shapes, no values.
        around: Entered before it is prepared or run, and left afterwards, untimed: for what it changes in the process.
    """

    prepare: Prepare
    percent: int = 8
    shapes_only: bool = False
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def four(tensor: Tensor) -> Tensor:
    """Return mean, std, min and max, (4,), where the tensor is."""
    std, mean = torch.std_mean(tensor, correction=0)
    low, high = torch.aminmax(tensor)
    return torch.stack([mean, std, low, high])


def fetched(found: Mapping[str, Tensor]) -> Rows:
    """Bring the statistics of all rows over in one piece."""
    return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True)) if found else {}


def by_hand(tensor: Tensor) -> tuple[float, ...]:
    """Return hookscope's statistics of a tensor as a script takes them, a number at a time; the four come first."""
    if tensor.dim() > 1:
        (tensor == 0).transpose(0, 1).flatten(1).all(1).sum().item()
    return (
        tensor.mean().item(),
        tensor.std(correction=0).item(),
        tensor.min().item(),
        tensor.max().item(),
        tensor.abs().mean().item(),
        tensor.norm().item(),
        (tensor == 0).float().mean().item(),
        tensor.isnan().sum().item(),
        tensor.isinf().sum().item(),
    )


def first_tensor(value: Any) -> Tensor:
    """Return a module's output, or the first of several."""
    tensor: Tensor = value[0] if isinstance(value, tuple) else value
    return tensor


def hookscope_way(
    model: nn.Module, batch: Tensor, _rows: Sequence[LayerRow], *, distributions: bool = False
) -> Callable[[], Found]:
    """All statistics by `inspect`."""
    return lambda: partial(statistics_of, inspect(model, batch, ["*"], distributions=distributions).rows)


def hand_written(model: nn.Module, batch: Tensor, _rows: Sequence[LayerRow]) -> Callable[[], Rows]:
    """The same statistics by forward hooks with `.item()`."""

    def run() -> Rows:
        found: dict[str, tuple[float, ...]] = {}
        calls: dict[str, int] = defaultdict(int)

        def hook(name: str) -> Callable[..., None]:
            def look(_module: nn.Module, _inputs: object, output: object) -> None:
                found[row_label(name, calls[name], "")] = by_hand(first_tensor(output))[:4]
                calls[name] += 1

            return look

        handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
        with torch.no_grad():
            model(batch)
        for handle in handles:
            handle.remove()
        return found

    return run


def torchinfo(model: nn.Module, batch: Tensor, _rows: Sequence[LayerRow]) -> Callable[[], Found]:
    """Shapes by `torchinfo.summary`."""
    summary = import_module("torchinfo").summary
    names = {id(module): name for name, module in model.named_modules()}

    def run() -> Found:
        return partial(told, summary(model, input_data=batch, depth=50, mode="eval", verbose=0).summary_list)

    def told(layers: Sequence[Any]) -> Rows:
        found: dict[str, tuple[int, ...]] = {}
        calls: dict[str, int] = defaultdict(int)
        for layer in layers:
            if layer.executed:
                name = names[id(layer.module)]
                found[row_label(name, calls[name], "")] = tuple(layer.output_size)
                calls[name] += 1
        return found

    return run


def timm_hooks(model: nn.Module, batch: Tensor, rows: Sequence[LayerRow]) -> Callable[[], Rows]:
    """The tensors by timm's `FeatureHooks`."""
    hooks = import_module("timm.models._features").FeatureHooks(layers_of(rows), model.named_modules())

    def run() -> Rows:
        with torch.no_grad():
            output = model(batch)
        kept = hooks.get_output(batch.device)
        return fetched({name: four(tensor) for name, tensor in kept.items()} | {"(model)": four(output)})

    return run


def torchextractor(model: nn.Module, batch: Tensor, rows: Sequence[LayerRow]) -> Callable[[], Rows]:
    """The tensors by torchextractor's `Extractor`."""
    extractor = import_module("torchextractor").Extractor(model, layers_of(rows))

    def run() -> Rows:
        with torch.no_grad():
            output, kept = extractor(batch)
        found = {name: four(first_tensor(value)) for name, value in kept.items()}
        return fetched(found | {"(model)": four(output)})

    return run


def torchvision_graph(model: nn.Module, batch: Tensor, rows: Sequence[LayerRow]) -> Callable[[], Rows]:
    """The tensors by torchvision's feature extractor, which traces the network and runs its copy."""
    extraction = import_module("torchvision.models.feature_extraction")
    nodes = extraction.get_graph_node_names(model)[1]
    ends: dict[str, str] = {}  # by label: a container returns what its last node does
    for row in rows:
        name = f"{row.layer}_{row.call}" if row.call else row.layer
        inside = [node for node in nodes if node == name or node.startswith(f"{name}.")] if name else nodes
        if inside:
            ends[label(row)] = inside[-1]
    extractor = extraction.create_feature_extractor(model, list(dict.fromkeys(ends.values())))

    def run() -> Rows:
        with torch.no_grad():
            kept = {node: first_tensor(value) for node, value in extractor(batch).items()}
        found = fetched({node: four(value) for node, value in kept.items() if isinstance(value, Tensor)})
        return {name: found[node] for name, node in ends.items() if node in found}

    return run


def nnsight(model: nn.Module, batch: Tensor, rows: Sequence[LayerRow]) -> Callable[[], Rows]:
    """Four statistics inside an nnsight trace."""
    library = import_module("nnsight")
    wrapped = library.NNsight(model)
    asked = [(label(row), row.layer, row.call) for row in rows if row.layer]

    def run() -> Rows:
        with torch.no_grad():  # noqa: SIM117 - nnsight reads the inner block's source, and runs it itself
            with wrapped.trace(batch) as tracer:
                found = {}
                for name, layer, call in asked:
                    for _ in tracer.iter[call : call + 1]:
                        found[name] = four(first_tensor(wrapped.get(layer).output))
                found["(model)"] = four(wrapped.output)
                library.save(found)
        return fetched(found)

    return run


def torchlens(model: nn.Module, batch: Tensor, _rows: Sequence[LayerRow]) -> Callable[[], Rows]:
    """The tensors by `torchlens.trace`, which also records every operation."""
    trace = import_module("torchlens").trace

    def run() -> Rows:
        with torch.no_grad():
            log = trace(model, batch)
            found = {}
            for call in log.module_calls:
                name = "" if call.address == "self" else call.address
                found[row_label(name, call.call_index - 1, "")] = four(call.outs[0])
        return fetched(found)

    return run


@contextmanager
def wrapped_by_torchlens() -> Iterator[None]:
    """Let torchlens wrap torch's functions, and put them back: it leaves them wrapped, and all others would pay."""
    wrappers = import_module("torchlens.backends.torch.wrappers")
    wrappers.wrap_torch()
    try:
        yield
    finally:
        wrappers.unwrap_torch()


WITH_DISTRIBUTIONS = "hookscope, distributions"

WAYS: dict[str, Way] = {
    "hookscope": Way(hookscope_way, percent=100),
    WITH_DISTRIBUTIONS: Way(partial(hookscope_way, distributions=True), percent=100),
    "hand-written hooks, .item()": Way(hand_written),
    "torchinfo": Way(torchinfo, shapes_only=True),
    "torchextractor": Way(torchextractor),
    "timm FeatureHooks": Way(timm_hooks),
    "torchvision feature extractor": Way(torchvision_graph),
    "nnsight": Way(nnsight),
    "torchlens": Way(torchlens, percent=2, around=wrapped_by_torchlens),
}
