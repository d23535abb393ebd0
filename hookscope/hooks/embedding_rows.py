"""Which rows of embeddings and codebooks a network looks up: `nn.Embedding`, `F.embedding`, or `codebook[argmin]`."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hookscope.hooks.attributes import argument
from hookscope.hooks.observed import physical
from hookscope.hooks.operations import forwards, run_networks, take_off

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class RowsUsed(TorchFunctionMode):
    """Notes the rows of a network's matrices that are looked up by index; a batch is added after it has run.

    Attributes:
        used: By name of the matrix, without ".weight": whether each row was looked up, (R,).
    """

    def __init__(self, network: nn.Module, failed: Callable[[Exception], None] | None = None) -> None:
        """See the look-ups in a network's parameters and buffers; `failed` gets hookscope's own errors."""
        super().__init__()
        self._failed = failed
        tensors = [*network.named_parameters(), *network.named_buffers()]
        held = [(name, tensor, place) for name, tensor in tensors if (place := _place(tensor)) is not None]
        self._names = {place: name.removesuffix(".weight") for name, tensor, place in held if tensor.dim() == 2}
        self._stored = {tensor.untyped_storage().data_ptr() for _, tensor, _ in held}
        self._latest: dict[tuple[str, torch.device], Tensor] = {}
        self.used: dict[str, NDArray[np.bool_]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function, and look at its indices if it looks up rows."""
        keywords = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **keywords)
        output = run_networks(func, args, keywords)
        looked_up = _LOOK_UPS.get(func)
        if looked_up is not None:
            try:
                with temporarily_clear_interpreter_stack():
                    self._note(*looked_up(args, keywords))
            except Exception as error:
                if self._failed is None:
                    raise
                self._failed(error)
        return output

    def _note(self, weight: object, indices: object) -> None:
        if isinstance(indices, np.ndarray) or (isinstance(indices, list) and {int} == {*map(type, indices)}):
            indices = torch.from_numpy(np.array(indices))
        if not isinstance(weight, Tensor) or not isinstance(indices, Tensor):
            return
        weight, indices = physical(weight)[0], physical(indices)[0]
        if weight.dim() != 2 or indices.dtype not in (torch.int64, torch.int32) or _place(indices) is None:
            return
        place = _place(weight)
        name = None if place is None else self._names.get(place)
        if name is None or indices.untyped_storage().data_ptr() in self._stored:  # a fixed table of places
            return
        rows = self._latest.get((name, indices.device))
        if rows is None or rows.numel() != weight.shape[0]:
            rows = self._latest[name, indices.device] = indices.new_zeros(weight.shape[0], dtype=torch.bool)
        rows[indices.detach().reshape(-1).long()] = True

    def keep(self) -> None:
        """Add the rows of a batch that has run."""
        for (name, _), rows in self._latest.items():
            merge_rows(self.used, {name: rows.cpu().numpy()})
        self._latest.clear()

    def enter(self) -> None:
        """Enter the mode, up to `leave`: hooks have no `with` block."""
        torch._C._push_on_torch_function_stack(self)

    def leave(self) -> Mapping[tuple[str, torch.device], Tensor]:
        """Leave the mode, below any that lie above it; return what was seen, still on its device."""
        take_off(self)
        return self._latest

    def forget(self) -> None:
        """Drop what was seen of a batch that the network raised on."""
        self._latest.clear()


forwards(RowsUsed.__torch_function__)


def looks_up_rows(network: nn.Module) -> bool:
    """Tell whether a network has embeddings, or matrices in modules of its own, which may be codebooks."""
    own = [module for module in network.modules() if not type(module).__module__.startswith("torch.")]
    held = (tensor for module in own for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    return any(isinstance(module, _EMBEDDINGS) for module in network.modules()) or any(
        tensor.dim() == 2 and tensor.is_floating_point() for tensor in held
    )


def merge_rows(merged: dict[str, NDArray[np.bool_]], other: Mapping[str, NDArray[np.bool_]]) -> None:
    """Add the rows used in another chunk."""
    for name, rows in other.items():
        before = merged.get(name)
        merged[name] = rows if before is None or before.size != rows.size else before | rows


def _place(tensor: Tensor) -> tuple[int, int] | None:
    """Return address and number of a tensor's values, which a transposed view shares; None without memory."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    address = tensor.data_ptr()
    return (address, tensor.numel()) if address else None


def _of_embedding(args: Any, kwargs: Mapping[str, Any]) -> tuple[object, object]:
    return argument(args, kwargs, 1, "weight"), argument(args, kwargs, 0, "input")


def _of_torch_embedding(args: Any, kwargs: Mapping[str, Any]) -> tuple[object, object]:
    return argument(args, kwargs, 0, "weight"), argument(args, kwargs, 1, "indices")


def _of_item(args: Any, _: Mapping[str, Any]) -> tuple[object, object]:
    index = args[1]
    if isinstance(index, tuple) and index:
        rest = (part is ... or (type(part) is slice and part == slice(None)) for part in index[1:])
        index = index[0] if all(rest) else index
    return args[0], index


def _of_selection(args: Any, kwargs: Mapping[str, Any]) -> tuple[object, object]:
    along_rows = argument(args, kwargs, 1, "dim") in (0, -2)
    return argument(args, kwargs, 0, "input"), argument(args, kwargs, 2, "index") if along_rows else None


_LOOK_UPS: Mapping[object, Callable[[Any, Mapping[str, Any]], tuple[object, object]]] = {
    functional.embedding: _of_embedding,
    functional.embedding_bag: _of_embedding,
    torch.embedding: _of_torch_embedding,
    Tensor.__getitem__: _of_item,
    torch.index_select: _of_selection,
    Tensor.index_select: _of_selection,
}
