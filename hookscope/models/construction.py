"""Shared by all ways of building a network: the result type, seeded randomness, skipped initialisation."""

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from hookscope.checkpoints.training_entries import TrainingEntries
from hookscope.errors import ModelError, UsageError
from hookscope.hooks.interrupts import finished, interrupts_between_blocks
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.selection import module_index
from hookscope.models.input_spec import default_preprocessing
from hookscope.results.inputs import Preprocessing
from hookscope.results.network import ModelInfo
from hookscope.text import exception_line


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A network in the mode its builder left it in, with its origin and the input that it expects.

    `warnings` are sentences a reader must see, such as that trained weights could not be had; `notes` need no action.
    `example_shape` is the shape of a valid input, batch axis first; None if unknown. `training` has the entries of the
    weights file other than the weights. With `multi_label`, classes are independent labels, scored by sigmoids.
    """

    module: nn.Module
    info: ModelInfo
    preprocessing: Preprocessing
    warnings: tuple[str, ...] = ()
    example_shape: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()
    training: TrainingEntries | None = None
    multi_label: bool = False


def loaded_module(
    model: object, name: str = "", sha256: str | None = None, categories: tuple[str, ...] = ()
) -> LoadedModel:
    """Return a module that was built elsewhere, with what its first layer implies about its input.

    `name`, `sha256` and `categories` describe the file that holds it. A LoadedModel is returned as it is. Raises
    UsageError for anything else, as where arguments are swapped or a class is given.
    """
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, type):
        raise UsageError(f"`model` is the class {model.__name__}. Give a network built from it: {model.__name__}(…).")
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"The model is of type {type(model).__name__}. Give a torch.nn.Module or the name of a network."
        )
    kind, count = type(model).__name__, parameter_count(model)
    info = ModelInfo(name or kind, kind, name or "as given", False, sha256, count, categories)
    return LoadedModel(model, info, default_preprocessing(model))


def copied(loaded: LoadedModel) -> LoadedModel:
    """Return a network with a copy of its module, to be run beside it; UsageError if the module cannot be copied."""
    try:
        module = copy.deepcopy(loaded.module, copied_results(loaded.module))
        for parameter in (parameter for parameter in module.parameters() if not parameter.is_leaf):
            parameter.detach_().requires_grad_()  # TorchScript's copies are results of their originals
        if not {*map(id, module.modules())}.isdisjoint(map(id, loaded.module.modules())):
            raise TypeError("its __deepcopy__ returns the module itself")  # noqa: TRY301 - the sentence is below
        return replace(loaded, module=module)
    except Exception as error:
        raise UsageError(
            f"{loaded.info.name} cannot be copied, so it cannot be compared with itself: {exception_line(error)}. "
            "Give two separate models."
        ) from error


def copied_results(module: nn.Module) -> dict[int, Any]:
    """Return copies of the tensors with a graph in a network's attributes, by id: `deepcopy` takes them as its memo.

    `deepcopy` refuses to copy such tensors; the older weight normalisation and pruning keep such a weight. Raises
    RuntimeError if the memory of a parameter, buffer or attribute was freed: copying would read it.
    """
    held = [value for part in module.modules() for value in vars(part).values() if isinstance(value, torch.Tensor)]
    others = (("a tensor in an attribute", tensor) for tensor in held)
    for name, value in (*module.named_parameters(), *module.named_buffers(), *others):
        if missing := missing_memory(value):
            raise RuntimeError(f"{name}: {missing}")
    return {id(value): value.detach().clone() for value in held if value.grad_fn is not None}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the random number generators of PyTorch (CPU), NumPy and Python, and put them back afterwards.

    Accelerators' generators are left alone: networks are built on the CPU, and seeding an accelerator starts it.
    """
    with interrupts_between_blocks():
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            seed_generators(seed)
            yield
        finally:

            def put_back() -> None:
                torch.set_rng_state(states[0])
                random.setstate(states[1])
                np.random.set_state(states[2])

            finished(put_back)


def seed_generators(seed: int) -> None:
    """Seed the random number generators of PyTorch (CPU), NumPy and Python."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


# Not copy_: builders use it to load the state dict.
_FILLS = frozenset({torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.fill_, torch.Tensor.zero_})


class _SkippedInitialisation(TorchFunctionMode):
    """Leave parameters unwritten by `torch.nn.init` and in-place fills; buffers and everything else are untouched."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS or getattr(func, "__module__", None) == "torch.nn.init":
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, nn.Parameter):
                return target
        return func(*args, **kwargs)


@contextmanager
def skipped_initialisation() -> Iterator[None]:
    """Let new parameters keep whatever their memory held.

    Only for building a network whose every parameter is overwritten, or discarded, before anybody reads it: filling
    them takes most of the building time of a large network.
    """
    with ExitStack() as stack:
        # A function mode does not see all of these, and its dispatch takes longer than the fill itself.
        for name, fill in vars(nn.init).copy().items():
            if name.endswith("_") and name[0] != "_":
                stack.enter_context(replaced(nn.init, name, _unless_parameter(fill)))
        stack.enter_context(_SkippedInitialisation())
        yield


def built_of_zeros(build: Callable[[], LoadedModel]) -> LoadedModel:
    """Build a network whose values do not matter, its parameters 0: nothing initialises them, which is faster.

    Zeros never become the subnormal numbers that make arithmetic slow.
    """
    try:
        with skipped_initialisation():
            loaded = build()
    except ModelError:  # the builder computes with the parameters
        return build()
    for parameter in loaded.module.parameters():
        parameter.detach().zero_()
    return loaded


def _unless_parameter(fill: Callable[..., Any]) -> Callable[..., Any]:
    def skip(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if isinstance(tensor, nn.Parameter) else fill(tensor, *args, **kwargs)

    return skip


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute, and put back what was there."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# Warnings of torch and torchvision about their own deprecations, or about how a file was made, on which a user of a
# network cannot act.
_KNOWN_WARNINGS = (
    ("torch.ao.quantization is deprecated", DeprecationWarning),
    ("torch.quantize_per_tensor, torch.quantize_per_channel and other quantized", UserWarning),
    ("must run observer before calling calculate_qparams", UserWarning),  # heads that evaluation does not reach
    ("TypedStorage is deprecated", UserWarning),
    ("The default weight initialization of", FutureWarning),
    (r"`?torch\.jit\.", Warning),
    ("This version of file is deprecated", UserWarning),
    ("Attempted to insert a get_attr Node with no underlying reference", UserWarning),
)


@contextmanager
def silenced_known_warnings() -> Iterator[None]:
    """Silence the known warnings of torch and torchvision about themselves, and nothing else."""
    with warnings.catch_warnings():
        for message, category in _KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category)
        yield


def parameter_count(module: nn.Module) -> int:
    """Return the number of elements over all parameters of `module`; a tied parameter counts once.

    The weights and biases that quantised modules keep packed count as well, those of lazy modules that have not seen
    an input do not.
    """
    # `modules()` and `parameters()` take as long as a tenth of a small network's pass.
    parts = [*module_index(module)[0].values()]
    parameters = {id(tensor): tensor for part in parts for tensor in part._parameters.values() if tensor is not None}  # noqa: SLF001
    count = sum(tensor.numel() for tensor in parameters.values() if type(tensor) is nn.Parameter or not is_lazy(tensor))
    return count + sum(tensor.numel() for part in parts for tensor in packed_tensors(part))


def packed_tensors(part: nn.Module) -> list[torch.Tensor]:
    """Return the weight and bias that a module of an int8 network keeps packed, in Python or in TorchScript."""
    own = vars(part)
    script: Any = own.get("_script", own.get("_c"))  # of a layer of ours, or of torch's
    is_script = isinstance(script, torch._C.ScriptModule)  # noqa: SLF001 - the class has no public name
    for name in ("_packed_params", "_packed_weight"):
        held = script.getattr(name) if is_script and script.hasattr(name) else own.get(name)
        if isinstance(held, torch.ScriptObject) and hasattr(held, "unpack"):
            unpacked = held.unpack()
            parts = unpacked if isinstance(unpacked, tuple) else (unpacked,)
            return [tensor for tensor in parts if isinstance(tensor, torch.Tensor)]
    return []
