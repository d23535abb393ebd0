"""Networks and inputs, ready to be measured."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hookscope.commands.check.measuring.network_passes import measure
from hookscope.commands.check.measuring.preparing import Prepared
from hookscope.inputs.batches import Batch
from hookscope.inspection.network import inspected_network
from hookscope.models.construction import LoadedModel
from hookscope.results.check import CheckMeasurements
from hookscope.results.inputs import InputRecord, Preprocessing
from hookscope.rules.settings import CheckSettings


def prepared(network: nn.Module, *batches: tuple[Any, ...], categories: tuple[str, ...] = ()) -> Prepared:
    """Return a network with batches of arguments, counted by the first tensor or list in each."""

    def read() -> Iterator[Batch]:
        seen = 0
        for args in batches:
            count = len(args[0])
            copies = tuple([tensor.clone() for tensor in arg] if isinstance(arg, list) else arg.clone() for arg in args)
            records = tuple(InputRecord(f"input {seen + at}", None, None, (), ()) for at in range(count))
            yield Batch(copies, tuple(range(seen, seen + count)), records)
            seen += count

    info = replace(inspected_network(network).info, categories=categories)
    return Prepared(LoadedModel(network, info, Preprocessing()), read, sum(len(args[0]) for args in batches))


def measure_network(network: nn.Module, *batches: Tensor, wanted: set[str], **settings: Any) -> CheckMeasurements:
    """Measure a network on batches of one argument each."""
    return measure(prepared(network, *((batch,) for batch in batches)), CheckSettings(**settings), wanted)
