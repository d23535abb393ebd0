"""`hookscope.activations` over the plain forward pass, beside hooks by hand and tools that return or list activations.

A tool that hands out tensors is timed with four statistics of each, taken at the end and fetched together: less than
hookscope reports.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import hookscope
from benchmarks.comparing import UNCHECKED, Layerwise, Way
from benchmarks.findings import Section
from benchmarks.networks import Row, label, layers_of, statistics_of
from benchmarks.same_work import Found, Rows
from hookscope.results.network import row_label

_NOTE = """\
A module and noise of 224 × 224, with hookscope's defaults. Hooks by hand compute the same statistics and nothing else.
Tools that return tensors are timed with mean, std, min and max of each, without preparation such as tracing; a row is
wrong if one of the four differs from hookscope's, which are checked against the hooks by hand. torchinfo finds
shapes, torchlens traces every operation. Limits are without the self-check, a second forward pass."""


def four(tensor: Tensor) -> Tensor:
    """Return mean, std, min and max, (4,), where the tensor is."""
    std, mean = torch.std_mean(tensor, correction=0)
    low, high = torch.aminmax(tensor)
    return torch.stack([mean, std, low, high])


def fetched(actual: Mapping[str, Tensor]) -> Rows:
    """Bring the statistics of all rows over in one piece."""
    return dict(zip(actual, torch.stack(list(actual.values())).tolist(), strict=True)) if actual else {}


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


def plain(model: nn.Module, batch: Tensor) -> Tensor:
    """Run the network."""
    with torch.no_grad():
        output: Tensor = model(batch)
    return output


def _hookscope(model: nn.Module, batch: Tensor, _rows: Sequence[Row], **options: Any) -> Callable[[], Found]:
    return lambda: partial(statistics_of, hookscope.activations(model, batch, **options))


def _hand_written(model: nn.Module, batch: Tensor, rows: Sequence[Row]) -> Callable[[], Rows]:
    def run() -> Rows:
        actual: dict[str, tuple[float, ...]] = {}
        calls: dict[str, int] = defaultdict(int)

        def hook(name: str) -> Callable[..., None]:
            def look(_module: nn.Module, _inputs: object, output: object) -> None:
                actual[row_label(name, calls[name], "")] = by_hand(first_tensor(output))[:4]
                calls[name] += 1

            return look

        handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in layers_of(rows)]
        plain(model, batch)
        for handle in handles:
            handle.remove()
        return actual

    return run


def _torchinfo(model: nn.Module, batch: Tensor, _rows: Sequence[Row]) -> Callable[[], Found]:
    summary = import_module("torchinfo").summary
    names = {id(module): name for name, module in model.named_modules()}

    def run() -> Found:
        return partial(shapes, summary(model, input_data=batch, depth=50, mode="eval", verbose=0).summary_list)

    def shapes(layers: Sequence[Any]) -> Rows:
        actual: dict[str, tuple[int, ...]] = {}
        calls: dict[str, int] = defaultdict(int)
        for layer in layers:
            if layer.executed:
                name = names[id(layer.module)]
                actual[row_label(name, calls[name], "")] = tuple(layer.output_size)
                calls[name] += 1
        return actual

    return run


def _timm(model: nn.Module, batch: Tensor, rows: Sequence[Row]) -> Callable[[], Rows]:
    hooks = import_module("timm.models._features").FeatureHooks(layers_of(rows), model.named_modules())

    def run() -> Rows:
        plain(model, batch)
        return fetched({name: four(tensor) for name, tensor in hooks.get_output(batch.device).items()})

    return run


def _torchextractor(model: nn.Module, batch: Tensor, rows: Sequence[Row]) -> Callable[[], Rows]:
    extractor = import_module("torchextractor").Extractor(model, layers_of(rows))

    def run() -> Rows:
        with torch.no_grad():
            _, kept = extractor(batch)
        return fetched({name: four(first_tensor(value)) for name, value in kept.items()})

    return run


def _torchvision(model: nn.Module, batch: Tensor, rows: Sequence[Row]) -> Callable[[], Rows]:
    """Take the tensors from torchvision's feature extractor, which traces the network and runs its copy."""
    extraction = import_module("torchvision.models.feature_extraction")
    nodes = extraction.get_graph_node_names(model)[1]
    ends: dict[str, str] = {}  # by label: a module returns what its last node does
    for row in rows:
        name = f"{row.layer}_{row.call}" if row.call else row.layer
        inside = [node for node in nodes if node == name or node.startswith(f"{name}.")]
        if inside:
            ends[label(row)] = inside[-1]
    extractor = extraction.create_feature_extractor(model, list(dict.fromkeys(ends.values())))

    def run() -> Rows:
        with torch.no_grad():
            kept = {node: first_tensor(value) for node, value in extractor(batch).items()}
        actual = fetched({node: four(value) for node, value in kept.items() if isinstance(value, Tensor)})
        return {name: actual[node] for name, node in ends.items() if node in actual}

    return run


def _nnsight(model: nn.Module, batch: Tensor, rows: Sequence[Row]) -> Callable[[], Rows]:
    library = import_module("nnsight")
    wrapped = library.NNsight(model)
    asked = [(label(row), row.layer, row.call) for row in rows]

    def run() -> Rows:
        with torch.no_grad():  # noqa: SIM117 - nnsight reads the inner block's source, and runs it itself
            with wrapped.trace(batch) as tracer:
                actual = {}
                for name, layer, call in asked:
                    for _ in tracer.iter[call : call + 1]:
                        actual[name] = four(first_tensor(wrapped.get(layer).output))
                library.save(actual)
        return fetched(actual)

    return run


def _torchlens(model: nn.Module, batch: Tensor, _rows: Sequence[Row]) -> Callable[[], Rows]:
    trace = import_module("torchlens").trace

    def run() -> Rows:
        with torch.no_grad():
            calls = trace(model, batch).module_calls
            return fetched({row_label(call.address, call.call_index - 1, ""): four(call.outs[0]) for call in calls})

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


_BY_HAND = "hooks by hand, .item()"
# With the rows of modules that return what an operation made, which are folded into that of the operation otherwise.
_WITH_OPERATIONS = f"{UNCHECKED}, ops=True, repeats=True"

ACTIVATIONS = Layerwise(
    plain=plain,
    rows=lambda model, batch: tuple(hookscope.activations(model, batch)),
    ways={
        "hookscope": Way(_hookscope, rounds=0),
        UNCHECKED: Way(partial(_hookscope, verify=False), rounds=0),
        _WITH_OPERATIONS: Way(partial(_hookscope, verify=False, ops=True, repeats=True), rounds=0),
        _BY_HAND: Way(_hand_written),
        "torchinfo": Way(_torchinfo, shapes_only=True),
        "torchextractor": Way(_torchextractor),
        "timm FeatureHooks": Way(_timm),
        "torchvision feature extractor": Way(_torchvision),
        "nnsight": Way(_nnsight),
        "torchlens": Way(_torchlens, rounds=2, around=wrapped_by_torchlens),
    },
    by_hand=_BY_HAND,
    limits={
        "resnet34": 1.35,
        "vit_b_16": 1.15,
        "densenet121": 2.0,
        "efficientnet_b0": 2.5,
        "timm mobilenetv2_050": 3.5,
    },
)


def measure(device: str = "cpu") -> Section:
    """Measure all ways on every network."""
    return Section("hookscope.activations, over the plain forward pass", _NOTE, ACTIVATIONS.measure(device))
