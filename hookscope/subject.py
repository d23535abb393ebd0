"""Who is inspected, and with what: the network behind what a caller gave, and its inputs as batches."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookscope.errors import UsageError
from hookscope.inputs import Batch
from hookscope.layers import module_index, unwrap
from hookscope.models import LoadedModel
from hookscope.results import InputRecord, ModelInfo


@dataclass(frozen=True, slots=True)
class Subject:
    """A network, ready to be inspected.

    Attributes:
        network: Without the wrappers it came in.
        info: Which network with which weights.
        warnings: Sentences a reader must see.
        notes: Sentences about how it was loaded that are no cause for alarm.
        modules: Every module once, by its first dotted name.
        aliases: Further names of those that have several.
        parameter_counts: Elements in the parameters that each module owns directly (not its children's), by its name.
    """

    network: nn.Module
    info: ModelInfo
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    modules: Mapping[str, nn.Module]
    aliases: Mapping[str, tuple[str, ...]]
    parameter_counts: Mapping[str, int]

    def parameters(self) -> list[nn.Parameter]:
        """List every parameter once, as `network.parameters()` does, but without making up names on the way."""
        return [*{id(each): each for each in self._held()}.values()]

    @property
    def placed(self) -> tuple[str, str]:
        """Device and dtype of the first floating parameter: ("cuda:0", "float32"); ("cpu", "none") without one."""
        parameter = next((each for each in self._held() if each.is_floating_point()), None)
        if parameter is None:
            return "cpu", "none"
        return str(parameter.device), str(parameter.dtype).removeprefix("torch.")

    def _held(self) -> Iterator[nn.Parameter]:
        for module in self.modules.values():
            for parameter in module._parameters.values():
                if parameter is not None:
                    yield parameter


def subject_of(model: nn.Module | LoadedModel) -> Subject:
    """Return the network that is meant.

    Raises:
        UsageError: If a module of it is lazy.
    """
    network = unwrap(model.module if isinstance(model, LoadedModel) else model)
    modules, aliases = module_index(network)
    counts, total = count_parameters(modules)
    if isinstance(model, LoadedModel):
        return Subject(network, model.info, model.warnings, model.notes, modules, aliases, counts)
    kind = type(network).__name__
    info = ModelInfo(kind, kind, "as given", random=False, sha256=None, parameter_count=total)
    return Subject(network, info, (), (), modules, aliases, counts)


def as_batches(inputs: Tensor | Batch | Iterable[Batch]) -> Iterable[Batch]:
    """Return inputs as batches; a tensor is one, with the inputs on axis 0."""
    if isinstance(inputs, Tensor):
        shape = tuple(inputs.shape[1:])
        count = inputs.shape[0] if inputs.dim() else 1
        record = InputRecord("tensor", None, None, shape, ())
        return [Batch((inputs,), tuple(range(count)), (record,) * count)]
    return [inputs] if isinstance(inputs, Batch) else inputs


def count_parameters(modules: Mapping[str, nn.Module]) -> tuple[dict[str, int], int]:
    """Count the elements of the parameters that each module owns directly, and of all; one that is shared counts once.

    Raises:
        UsageError: If a module is lazy: its first input would give it parameters, so nothing could be restored.
    """
    counts: dict[str, int] = {}
    elements: dict[int, int] = {}
    for name, module in modules.items():
        count = 0
        for parameter in module._parameters.values():
            if parameter is not None:
                if type(parameter) is not nn.Parameter and is_lazy(parameter):
                    raise _lazy(name, module)
                elements[id(parameter)] = own = parameter.numel()
                count += own
        counts[name] = count
        for buffer in module._buffers.values():
            if type(buffer) is not Tensor and buffer is not None and is_lazy(buffer):
                raise _lazy(name, module)
    return counts, sum(elements.values())


def _lazy(name: str, module: nn.Module) -> UsageError:
    return UsageError(
        f"{name or 'The model'} ({type(module).__name__}) is lazy: it has no parameters before its first input. "
        f"Run the model once where it is built."
    )
