"""Networks that a trusted file holds whole: TorchScript and exported programs, with what is known of their inputs."""

import io
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hookscope.checkpoints.class_names import packed_classes
from hookscope.checkpoints.reading import ReadingRules, read_verified
from hookscope.checkpoints.weights_files import WeightsFiles
from hookscope.models.architecture import recognise
from hookscope.models.construction import LoadedModel, loaded_module, packed_tensors, silenced_known_warnings
from hookscope.models.input_spec import with_channels
from hookscope.models.network_table import state_shapes
from hookscope.models.torchscript import hookable
from hookscope.models.trusted_files import read_program
from hookscope.models.weight_choice import IMAGENET_CLASSES
from hookscope.results.inputs import Preprocessing
from hookscope.text import counted, exception_line, printable

_FLAT_GRAPH = (
    "its graph calls operations and none of its layers, so rows are those of operations. Give the program of "
    "torch.export itself: its layers have rows."
)


def load_program(files: WeightsFiles) -> LoadedModel:
    """Load TorchScript, scripted or traced, or an exported program (.pt2) as a tree of modules with the original names.

    The modules have the original class names too. For TorchScript, the state dict also has the original's
    non-persistent buffers, because the file does not record which buffers these are. Raises as `read_verified` and
    `read_program`.
    """
    module, remarks, only = read_verified(files, lambda *_: None, ReadingRules("", read_program))[files.path].content
    sha256, packed = files.sha256(), packed_classes(files.path)
    name = printable(files.path.name)
    categories, note = _class_names(packed, module) if files.kind == "torchscript" else ((), "")
    loaded = loaded_module(module, name, sha256, categories)
    return _completed(replace(loaded, notes=(f"{name}: {note}",) if note else ()), remarks, only)


def given_program(program: Any) -> LoadedModel:
    """Return a caller's TorchScript, exported program or graph as a tree of modules on which hooks fire."""
    only = None
    if isinstance(program, torch.jit.ScriptModule):
        module, remarks = _copied_torchscript(program)
    elif isinstance(program, torch.fx.GraphModule):
        module, remarks = program, (_FLAT_GRAPH,) if _bypasses_layers(program) else ()
    else:
        from hookscope.models.unflattened import unflattened  # noqa: PLC0415 - only for such programs

        with silenced_known_warnings():
            module, remarks, only = unflattened(program)
    return _completed(loaded_module(module), remarks, only)


def _copied_torchscript(script: torch.jit.ScriptModule) -> tuple[nn.Module, tuple[str, ...]]:
    def load() -> Any:
        written.seek(0)
        return torch.jit.load(written)  # type: ignore[no-untyped-call] # torch's

    with silenced_known_warnings():
        written = io.BytesIO()
        try:
            torch.jit.save(script, written)
        except RuntimeError as error:
            return script, (f"no layer of it can be seen: it cannot be copied, {exception_line(error)}.",)
        return hookable(load)


def _class_names(packed: Mapping[str, tuple[str, ...]], script: nn.Module) -> tuple[tuple[str, ...], str]:
    from torchvision.models import get_model_weights, list_models  # noqa: PLC0415 - only for such files

    state = script.state_dict()
    packed_weights = [tensor for part in script.modules() for tensor in packed_tensors(part)]
    counts = {tensor.shape[0] for tensor in (*state.values(), *packed_weights) if tensor.dim()}
    for key, names in packed.items():
        if len(names) in counts:
            return names, f"{counted(len(names), 'class name')} taken from its extra file '{key}'."
    for candidate in recognise(state_shapes(state)):
        if "num_classes" not in candidate.arguments and candidate.model in list_models():
            categories = get_model_weights(candidate.model).DEFAULT.meta.get("categories", ())
            if len(categories) == IMAGENET_CLASSES:
                said = "as many classes as ImageNet, and takes ImageNet's class names."
                return tuple(categories), f"has names and shapes of {candidate.model}, {said}"
    return (), ""


def _bypasses_layers(graph: torch.fx.GraphModule) -> bool:
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    layer_parameters = [parameter for target in targets for parameter in graph.get_submodule(target).parameters()]
    own_count = sum(parameter.numel() for parameter in graph.parameters(recurse=False))
    return not layer_parameters and sum(parameter.numel() for parameter in graph.parameters()) > own_count


def _completed(loaded: LoadedModel, remarks: Iterable[str], only: tuple[tuple[int, ...], bool] | None) -> LoadedModel:
    loaded = replace(loaded, warnings=tuple(f"{loaded.info.name}: {remark}" for remark in remarks))
    if only is None:
        return loaded
    shape, takes_any_count = only
    if shape and shape[0] != 1 and not takes_any_count:
        remark = f"{loaded.info.name}: exported for inputs of shape {shape}, so it takes batches of exactly {shape[0]}."
        loaded = replace(loaded, warnings=(*loaded.warnings, remark))
    example = (1, *shape[1:]) if takes_any_count else shape
    return replace(loaded, preprocessing=_preprocessing_for(loaded, shape), example_shape=example or None)


def _preprocessing_for(loaded: LoadedModel, shape: tuple[int, ...]) -> Preprocessing:
    if len(shape) not in (4, 5) or shape[1] not in (1, 3):
        return loaded.preprocessing
    height, width = shape[-2:]
    return replace(
        with_channels(loaded.preprocessing, shape[1]),
        kind="image" if len(shape) == 4 else "video",
        frames=1 if len(shape) == 4 else shape[2],
        resize=height if height == width else (height, width),
        crop=(height, width),
        source=f"the input that {loaded.info.name} was exported for",
    )
