"""Which rows of embeddings and codebooks a network looks up: `nn.Embedding`, `F.embedding`, or `codebook[argmin]`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hookscope.hooks.operations import run_networks

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class RowsUsed(TorchFunctionMode):
    """Notes the rows of a network's matrices that are looked up by index, and adds a batch once it went well.

    Attributes:
        used: By name of the matrix, without ".weight": whether each row was looked up, (R,).
    """

    def __init__(self, network: nn.Module) -> None:
        """See the look-ups in a network's parameters and buffers."""
        super().__init__()
        tensors = [*network.named_parameters(), *network.named_buffers()]
        self._names = {_place(each): name.removesuffix(".weight") for name, each in tensors if each.dim() == 2}
        self._stored = {each.untyped_storage().data_ptr() for _, each in tensors}
        self._latest: list[tuple[str, Tensor]] = []
        self.used: dict[str, NDArray[np.bool_]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function, and look at its indices if it looks up rows."""
        given = kwargs or {}
        output = run_networks(func, args, given)
        looked_up = None if torch.compiler.is_dynamo_compiling() else _LOOK_UPS.get(func)
        if looked_up is not None:
            self._note(*looked_up(args, given))
        return output

    def _note(self, weight: object, indices: object) -> None:
        if not isinstance(weight, Tensor) or not isinstance(indices, Tensor) or weight.dim() != 2:
            return
        if indices.dtype not in (torch.int64, torch.int32) or indices.is_meta or indices.is_nested:
            return
        name = self._names.get(_place(weight))
        if name is None or indices.untyped_storage().data_ptr() in self._stored:  # a fixed table of places
            return
        rows = torch.zeros(weight.shape[0], dtype=torch.bool, device=indices.device)
        rows[indices.detach().reshape(-1).long()] = True
        self._latest.append((name, rows))

    def keep(self) -> None:
        """Add what was seen of a batch that went through the network."""
        for name, rows in self._latest:
            found = rows.cpu().numpy()
            known = self.used.get(name)
            self.used[name] = found if known is None else known | found
        self._latest.clear()

    def forget(self) -> None:
        """Drop what was seen of a batch that the network raised on."""
        self._latest.clear()


def looks_up_rows(network: nn.Module) -> bool:
    """Tell whether a network has embeddings, or matrices of its own code, which may be codebooks."""
    return any(isinstance(each, _EMBEDDINGS) for each in network.modules()) or any(_own_matrices(network))


def _own_matrices(network: nn.Module) -> Iterator[bool]:
    for module in network.modules():
        if not type(module).__module__.startswith("torch."):
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            yield any(each.dim() == 2 and each.is_floating_point() for each in own)


def merge_rows(known: dict[str, NDArray[np.bool_]], other: Mapping[str, NDArray[np.bool_]]) -> None:
    """Take in the rows used in another chunk."""
    for name, rows in other.items():
        before = known.get(name)
        known[name] = rows if before is None or before.size != rows.size else before | rows


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return where the values of a tensor lie; a transposed view of it lies there too."""
    return tensor.data_ptr(), tensor.numel()


def _argument(args: Any, kwargs: Mapping[str, Any], at: int, name: str) -> object:
    return args[at] if len(args) > at else kwargs.get(name)


def _of_embedding(args: Any, kwargs: Mapping[str, Any]) -> tuple[object, object]:
    return _argument(args, kwargs, 1, "weight"), _argument(args, kwargs, 0, "input")


def _of_torch_embedding(args: Any, kwargs: Mapping[str, Any]) -> tuple[object, object]:
    return _argument(args, kwargs, 0, "weight"), _argument(args, kwargs, 1, "indices")


def _of_item(args: Any, _: Mapping[str, Any]) -> tuple[object, object]:
    index = args[1]
    if isinstance(index, tuple) and index and all(each in (slice(None), ...) for each in index[1:]):
        index = index[0]
    return args[0], index


def _of_selection(args: Any, kwargs: Mapping[str, Any]) -> tuple[object, object]:
    along_rows = _argument(args, kwargs, 1, "dim") in (0, -2)
    return args[0] if args else kwargs.get("input"), _argument(args, kwargs, 2, "index") if along_rows else None


_LOOK_UPS: Mapping[object, Callable[[Any, Mapping[str, Any]], tuple[object, object]]] = {
    functional.embedding: _of_embedding,
    functional.embedding_bag: _of_embedding,
    torch.embedding: _of_torch_embedding,
    Tensor.__getitem__: _of_item,
    torch.index_select: _of_selection,
    Tensor.index_select: _of_selection,
}
