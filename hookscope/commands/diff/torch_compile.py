"""B through `torch.compile`: in one piece for its output, and in blocks for its rows.

A compiled graph has no boundaries between modules, and torch skips hooks that are added after compiling. So for rows
the network itself runs uncompiled, the `forward` of its blocks is compiled, and hooks are on the blocks.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from hookscope.commands.diff.alignment import is_inside, match_names
from hookscope.commands.diff.first_differences import exceeds, rounding_limit
from hookscope.commands.diff.hooked_network import NEVER_CALLED, HookedNetwork, layers_to_hook, parameter_shapes
from hookscope.errors import HookscopeError, ModelError, UsageError
from hookscope.hooks.selection import default_layers
from hookscope.inputs.batches import Batch
from hookscope.inspection.network import InspectedNetwork
from hookscope.inspection.run import Break
from hookscope.models.construction import copied_results
from hookscope.parameters import arg
from hookscope.results.differences import DifferenceRow, OutputDifference
from hookscope.text import counted, exception_line, printable, some_of

_WHOLE = ""

# Blocks of one class recompile its code, and beyond a limit of 8 torch silently runs them uncompiled. Random numbers
# are drawn as in uncompiled code, so that dropout makes no difference.
_DYNAMO = {
    "recompile_limit": 2**20,
    "accumulated_recompile_limit": 2**20,
    "fail_on_recompile_limit_hit": True,
    "suppress_errors": False,
}
_INDUCTOR = {"fallback_random": True}

# With donated buffers, a compiled backward pass cannot keep its graph, and so cannot be repeated.
_AUTOGRAD = {"donated_buffer": False}


@dataclass(slots=True)
class Compiled:
    """B, compiled.

    Attributes:
        network: B, whose blocks are compiled one by one.
        whole: A copy of B with the same parameters, compiled in one piece.
        blocks: Of B, by name.
        sizes: Number of layers in a block, by its name in A.
    """

    network: HookedNetwork
    whole: HookedNetwork
    blocks: Mapping[str, nn.Module]
    sizes: Mapping[str, int]
    _graphs: Counter[str] = field(default_factory=Counter)
    _failure: HookscopeError | None = None

    @contextmanager
    def forwards(self) -> Iterator[None]:
        """Compile the blocks and the whole network inside a `with` block.

        Raises:
            UsageError: If a compiler is missing, or torch.compile finds nothing to compile.
            ModelError: If torch cannot compile the network.
        """
        places = {**self.blocks, _WHOLE: self.whole.inspected.network}
        before = {name: vars(module).get("forward") for name, module in places.items()}
        try:
            for name, module in places.items():
                module.forward = self._compiled(name, module.forward)
            yield
        except Exception as error:
            if self._failure is not None:
                raise self._failure from error
            raise
        finally:
            for name, module in places.items():
                if before[name] is None:
                    vars(module).pop("forward", None)
                else:
                    vars(module)["forward"] = before[name]
        if not self._graphs[_WHOLE] and self._ran():
            raise UsageError(f"{self.whole.title}: torch.compile compiles nothing of it. Leave out {arg('compile_b')}.")

    def _compiled(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` compiled. It has no frame of hookscope, so its errors count as the model's."""
        import torch._dynamo.config  # noqa: PLC0415 - they take a second
        import torch._functorch.config  # noqa: PLC0415
        import torch._inductor.config  # noqa: PLC0415

        def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
            self._graphs[name] += 1
            try:
                return lower(graph, inputs)
            except Exception as error:
                self._failure = self._failure or _failed(self.whole.title, name, error)
                raise

        compiled = torch.compile(forward, backend=backend)
        settings = (torch._dynamo.config, _DYNAMO), (torch._inductor.config, _INDUCTOR)
        for config, changes in (*settings, (torch._functorch.config, _AUTOGRAD)):
            compiled = config.patch(changes)(compiled)
        return cast("Callable[..., Any]", torch.compiler.set_stance("default")(compiled))

    def check(self, broken: Break | None) -> None:
        """Raise as `forwards` does: a failed compilation is no fault of the batch."""
        if self._failure is not None:
            raise self._failure from None if broken is None else broken.error

    def note(self) -> str:
        """Return a note about how B ran."""
        rows = f"its rows are of {counted(len(self._ran()), 'block')}, each compiled by itself"
        return (
            f"B is compiled by torch.compile: its output is that of the whole network, compiled in one piece; {rows}."
        )

    def _ran(self) -> list[str]:
        seen = {layer for layer, *_ in self.network.rows}
        return [name for name in self.blocks if name in seen]

    def warnings(self, rows: Sequence[DifferenceRow], outputs: Sequence[OutputDifference], eps: float) -> list[str]:
        """Return warnings: which blocks were not compiled, and that only the whole differs."""
        messages = []
        as_written = [name for name in self._ran() if not self._graphs[name] and [*self.blocks[name].parameters()]]
        if as_written:
            names = some_of([printable(name, 80) for name in as_written], 3)
            messages.append(f"B: torch.compile compiles nothing of {names}: these blocks run uncompiled.")
        limit = rounding_limit(eps, sum(self.sizes.get(row.layer, 1) for row in rows))
        blocks_agree = all(row.origin in ("equal", "rounding") for row in rows)
        if blocks_agree and any(exceeds(output.relative_l2, limit) for output in outputs):
            messages.append(
                "The whole network, compiled in one piece, differs beyond rounding, though no block does that is "
                "compiled by itself: the difference arises in what torch.compile makes of several blocks together."
            )
        return messages


def lower(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile a graph with torch.compile's default backend."""
    from torch._inductor.compile_fx import compile_fx  # noqa: PLC0415 - as above

    compiled: Any = compile_fx(graph, inputs)
    return cast("Callable[..., Any]", compiled)


def _failed(title: str, block: str, error: BaseException) -> HookscopeError:
    causes: list[BaseException] = [error]
    for cause in causes:  # the list grows in the loop
        inner = (getattr(cause, "inner_exception", None), cause.__cause__, cause.__context__)
        causes += [nested for nested in inner if isinstance(nested, BaseException) and nested not in causes]
    kinds = {type(cause).__name__ for cause in causes}
    for kind, tool in (("InvalidCxxCompiler", "a C++ compiler (g++, or what CXX names)"), ("TritonMissing", "Triton")):
        if kind in kinds:
            return UsageError(
                f"torch.compile needs {tool} and finds none: install it, or leave out {arg('compile_b')}."
            )
    where = f" at {printable(block, 80)}" if block else ""
    return ModelError(f"{title} cannot be compiled{where}: {exception_line(causes[-1])}. Leave out {arg('compile_b')}.")


def compile_in_blocks(
    networks: Sequence[HookedNetwork], batch: Batch, maps: Sequence[str], *, chosen: bool
) -> Compiled:
    """Prepare B to be compiled in blocks, and observe these blocks in all networks.

    Without chosen layers, blocks are the modules that the network itself calls, and the called modules in containers
    that are not called. Otherwise a block is a chosen layer without chosen layers inside, or a module beside one.

    Args:
        networks: A, B and the optional reference.
        batch: The first batch.
        maps: As for `--map`.
        chosen: Whether `--layer` has chosen the layers that A has selected.

    Raises:
        UsageError: If B cannot be copied.
    """
    a, b = networks[:2]
    modules_a, modules_b = a.inspected.modules, b.inspected.modules
    shapes_a, shapes_b = (
        {name: parameter_shapes(module) for name, module in side.items()} for side in (modules_a, modules_b)
    )
    named = match_names(shapes_a, shapes_b, maps)
    called_a, called_b = (side.trial(batch, side.inspected.modules).called for side in (a, b))
    blocks_a = partition(modules_a, called_a, a.selected if chosen else ())
    blocks_b = partition(modules_b, called_b, {named[name][0] for name in blocks_a if name in named})
    for network, blocks in zip(networks, (blocks_a, blocks_b, blocks_a), strict=False):
        modules = network.inspected.modules
        network.hooked = layers_to_hook(network.inspected, {name: modules[name] for name in blocks}, chosen=False)
        shown = network.selected if chosen and network is not b else blocks
        network.selected = {name: module for name, module in network.hooked.items() if name in shown}
    layers = default_layers(modules_a) & called_a
    sizes = {name: sum(name == layer or is_inside(layer, name) for layer in layers) or 1 for name in blocks_a}
    return Compiled(b, _whole(b), {name: modules_b[name] for name in blocks_b}, sizes)


def partition(
    modules: Mapping[str, nn.Module], called: Collection[str], wanted: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the names of the blocks of a network: together they hold all of its modules, and no block holds another.

    Args:
        modules: All modules of the network by name, the network itself as "".
        called: Modules that run.
        wanted: Layers that are blocks, unless another wanted layer is inside.
    """
    blocks: list[str] = []
    waiting = [*_children("", modules)]
    if len(waiting) == 1 and not wanted:
        waiting = [*_children(waiting[0], modules)] or waiting
    while waiting:
        name = waiting.pop(0)
        inside = [module for module in modules if is_inside(module, name)]
        runs_inside = name not in called and any(child in called for child in inside)
        if runs_inside or any(child in wanted for child in inside):
            waiting[:0] = _children(name, modules)
        elif not isinstance(modules[name], NEVER_CALLED):
            blocks.append(name)
    return tuple(blocks)


def _children(name: str, modules: Mapping[str, nn.Module]) -> list[str]:
    return [module for module in modules if module and module.rpartition(".")[0] == name]


def _whole(network: HookedNetwork) -> HookedNetwork:
    """Return a network without hooks that runs a copy of the module with the same parameters."""
    module = network.inspected.network
    memo: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
    try:
        copy = deepcopy(module, copied_results(module) | memo)
    except Exception as error:
        raise UsageError(
            f"{network.title} cannot be copied to be compiled in one piece: {exception_line(error)}. Leave out "
            f"{arg('compile_b')}."
        ) from error
    modules = dict(copy.named_modules())
    inspected: InspectedNetwork = replace(network.inspected, network=copy, modules=modules)
    return replace(network, inspected=inspected, selected={}, hooked={}, operations=None)
