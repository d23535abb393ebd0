"""The contents of a weights file."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hookscope.results.json_form import in_json
from hookscope.results.renderers import RowContainer
from hookscope.text import counted


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a weights file.

    Statistics are over the finite elements, and over the moduli of complex numbers. They are None if the values could
    not be read: a view too scattered, a tensor without data, a dtype without arithmetic.

    Attributes:
        key: Its name in the part of the file that it is in: "conv1.weight", "state.0.exp_avg".
        dtype: torch's name without the prefix: "float32".
        byte_count: Bytes of its elements; tied tensors each count theirs.
        nan_count: Elements that are NaN; None if they could not be counted. `inf_count` likewise, for Inf of either
            sign.
        tied_to: The first tensor that shares an element with this one, after its part's key if that is a different
            part; "" for none. Tensors side by side in one storage, as an LSTM's may be, are not tied.
        min: Smallest element, exactly; an int for integers. `max` is the largest.
        std: Standard deviation, with the number of elements as the divisor.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    byte_count: int
    nan_count: int | None
    inf_count: int | None
    tied_to: str = ""
    zero_count: int | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a weights file that holds tensors: a set of weights, or something else such as an optimiser's state.

    Attributes:
        key: Path in the file: "model"; "" for tensors at the top level.
        tensors: In the file's order.
        prefix: The prefix that all names share: "module"; "" for none.
        architectures: The known networks whose names and shapes fit, with remarks; empty for none.
        nearest: If none fits, the known network that differs least, with the differences; "" if none is near.
    """

    key: str
    is_weights: bool
    tensors: tuple[StoredTensor, ...]
    prefix: str = ""
    architectures: tuple[str, ...] = ()
    nearest: str = ""

    @property
    @in_json
    def nonfinite_count(self) -> int:
        """Elements that are NaN or Inf, over all tensors whose values could be counted."""
        return sum((tensor.nan_count or 0) + (tensor.inf_count or 0) for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One top-level entry of a checkpoint, such as a training script saves next to the weights.

    Attributes:
        kind: Its type: "dict", "int".
        summary: Its value if it is short, else a count: "3 entries, 2 tensors".
    """

    key: str
    kind: str
    summary: str


@dataclass(frozen=True, slots=True, repr=False)
class CheckpointContents(RowContainer[StoredTensor]):
    """The contents of a weights file.

    Attributes:
        kind: "torch", "legacy torch", "safetensors" and so on.
        producer: The program that wrote the file, as far as the file shows: "torch.save, zip format 3".
        byte_count: Size of the file in bytes; for an index, the size of all shards.
        parts: Every set of weights, then all other entries with tensors.
        entries: The top-level entries of a larger checkpoint; empty for a bare state dict.
        metadata: Text stored with the tensors.
    """

    name: str
    kind: str
    producer: str
    byte_count: int
    parts: tuple[StoredPart, ...]
    entries: tuple[StoredEntry, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    _noun = "tensor"

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """The tensors of all parts."""
        return tuple(tensor for part in self.parts for tensor in part.tensors)

    @property
    @in_json
    def nonfinite_count(self) -> int:
        """Elements that are NaN or Inf, over all tensors whose values could be counted."""
        return sum(part.nonfinite_count for part in self.parts)

    def _items(self) -> tuple[StoredTensor, ...]:
        return self.tensors

    def by_label(self) -> dict[str, StoredTensor]:
        """Return the tensors by name, "conv1.weight"; of tensors with one name, the first, so that weights win."""
        return {tensor.key: tensor for tensor in reversed(self.tensors)}

    def __repr__(self) -> str:
        return f"<CheckpointContents of {self.name}: {counted(len(self.tensors), 'tensor')}>"
