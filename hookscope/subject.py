"""Who is inspected, and with what: the network behind what a caller gave, and its inputs as batches."""

from collections.abc import Iterable, Mapping
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
        modules: Every module once, by its first dotted name.
        aliases: Further names of those that have several.
    """

    network: nn.Module
    info: ModelInfo
    warnings: tuple[str, ...]
    modules: Mapping[str, nn.Module]
    aliases: Mapping[str, tuple[str, ...]]

    @property
    def placed(self) -> tuple[str, str]:
        """Device and dtype of the first floating parameter: ("cuda:0", "float32"); ("cpu", "none") without one."""
        parameter = next((p for p in self.network.parameters() if p.is_floating_point()), None)
        if parameter is None:
            return "cpu", "none"
        return str(parameter.device), str(parameter.dtype).removeprefix("torch.")


def subject_of(model: nn.Module | LoadedModel) -> Subject:
    """Return the network that is meant.

    Raises:
        UsageError: If a module of it is lazy.
    """
    network = unwrap(model.module if isinstance(model, LoadedModel) else model)
    modules, aliases = module_index(network)
    refuse_lazy(modules)
    if isinstance(model, LoadedModel):
        return Subject(network, model.info, model.warnings, modules, aliases)
    return Subject(network, _anonymous(network, modules), (), modules, aliases)


def as_batches(inputs: Tensor | Batch | Iterable[Batch]) -> Iterable[Batch]:
    """Return inputs as batches; a tensor is one, with the inputs on axis 0."""
    if isinstance(inputs, Tensor):
        shape = tuple(inputs.shape[1:])
        count = inputs.shape[0] if inputs.dim() else 1
        record = InputRecord("tensor", None, None, shape, ())
        return [Batch((inputs,), tuple(range(count)), (record,) * count)]
    return [inputs] if isinstance(inputs, Batch) else inputs


def refuse_lazy(modules: Mapping[str, nn.Module]) -> None:
    """Refuse lazy modules: their first input would give them parameters, so nothing could be restored."""
    for name, module in modules.items():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and is_lazy(tensor):
                raise UsageError(
                    f"{name or 'The model'} ({type(module).__name__}) is lazy: it has no parameters before its first "
                    f"input. Run the model once where it is built."
                )


def _anonymous(network: nn.Module, modules: Mapping[str, nn.Module]) -> ModelInfo:
    """Describe a module that came without a description."""
    kind = type(network).__name__
    parameters = {
        id(each): each for module in modules.values() for each in module._parameters.values() if each is not None
    }
    parameter_count = sum(each.numel() for each in parameters.values())
    return ModelInfo(kind, kind, "as given", random=False, sha256=None, parameter_count=parameter_count)
