"""The values, memory, sizes and strides of tensors, kept so that they can be restored to the last bit."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hookscope.hooks.memory import PLAIN_TENSORS, missing_memory, parts_of
from hookscope.inspection.state.object_states import Problem, attempt

# Tensors of these dtypes, up to this size, are copied and compared together: BatchNorm has three to a layer, and each
# call costs more than the copy.
_JOINED_DTYPES = frozenset({torch.float32, torch.int64})
_JOINED_ELEMENTS = 2**14

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class HeldValues:
    """Tensors, and their values when this was made.

    Attributes:
        tensors: The strided ones.
        aliases: For each, an alias that shares its memory and keeps its size and strides.
        joined: Places in `tensors` of small ones of one dtype, device and number of axes, and their values joined.
        single: Places of other copied tensors, and the copies. Tensors without a copy are `growing` if they may be
            written to, else `bare`.
        special: Sparse, nested and quantised tensors, and those of subclasses that compute in their own way: copy, None
            if none can be made, and version.
    """

    def __init__(
        self, tensors: Sequence[Tensor], copied: AbstractSet[int], added_to: AbstractSet[int] = frozenset()
    ) -> None:
        """Copy the tensors whose ids are in `copied`; keep only the memory address of the others.

        In-place writes to the others are noticed, except writes through `.data` and writes to tensors in `added_to`,
        which a backward pass may change. Each tensor is given once.
        """
        self.joined: list[tuple[list[int], Tensor]] = []
        self.single: list[tuple[int, Tensor]] = []
        self.bare: list[int] = []
        self.growing: set[int] = set()
        self.special: list[tuple[Tensor, Tensor | None, int]] = []
        with _plainly():
            if _are_dense(tensors):
                self.tensors, self.aliases = [*tensors], [tensor.data for tensor in tensors]
            else:
                pairs = [(tensor, _alias(tensor)) for tensor in tensors]
                self.tensors = [tensor for tensor, alias in pairs if alias is not None]
                self.aliases = [alias for _, alias in pairs if alias is not None]
                for tensor in [tensor for tensor, alias in pairs if alias is None and id(tensor) not in added_to]:
                    self.special.append((tensor, _copy(tensor) if id(tensor) in copied else None, _version(tensor)))
            self.addresses = [*map(Tensor.data_ptr, self.tensors)]
            self.storage_bytes = [*map(_storage_bytes, self.tensors)]
            self.versions = _versions(self.tensors)
            alike: defaultdict[tuple[torch.dtype, torch.device, int], list[int]] = defaultdict(list)
            keys = [(alias.dtype, alias.device, alias.dim()) for alias in self.aliases]
            for place, (tensor, key, address) in enumerate(zip(self.tensors, keys, self.addresses, strict=True)):
                if not address or missing_memory(tensor):  # it holds nothing that could be read
                    continue
                if id(tensor) in copied:
                    alike[key].append(place)
                elif id(tensor) in added_to:
                    self.growing.add(place)
                else:
                    self.bare.append(place)
            for (dtype, _, _), places in alike.items():
                small = {place for place in places if self.aliases[place].numel() <= _JOINED_ELEMENTS}
                if dtype not in _JOINED_DTYPES or len(small) < 2:
                    small = set()
                else:
                    self.joined.append(([*small], _join([self.aliases[place] for place in small])))
                self.single += [(place, self.aliases[place].clone()) for place in places if place not in small]

    def changed(self) -> bool:
        """Tell whether a tensor has other values or, without a copy, was written to."""
        with _plainly():
            return bool(
                self._moved()
                or next(self._rewritten(), None)
                or any(_version(self.tensors[place]) != self.versions[place] for place in self.bare)
                or not all(_is_same(*entry) for entry in self.special)
            )

    def put_back(self) -> list[Problem]:
        """Put everything back; return each tensor for which that fails, with the reason."""
        failed: list[Problem] = []
        with _plainly():
            for place in self._moved():
                failed += self._move_back(place)
            for place, before in self._rewritten():
                failed += _write(self.tensors[place], self.aliases[place], before)
            versions = _versions(self.tensors)
            if versions != self.versions:
                failed += self._rewind_versions(versions)
            for tensor, values, version in self.special:
                if not _is_same(tensor, values, version):
                    failed += _put_back_special(tensor, values, version)
        return failed

    def _moved(self) -> list[int]:
        """List the places of tensors whose memory, size or strides have changed."""
        if (
            [*map(Tensor.data_ptr, self.tensors)] == self.addresses
            and [*map(Tensor.size, self.tensors)] == [*map(Tensor.size, self.aliases)]
            and [*map(Tensor.stride, self.tensors)] == [*map(Tensor.stride, self.aliases)]
            and [*map(_storage_bytes, self.tensors)] == self.storage_bytes
        ):
            return []
        pairs = enumerate(zip(self.tensors, self.aliases, self.addresses, self.storage_bytes, strict=True))
        return [
            place
            for place, (tensor, alias, address, byte_count) in pairs
            if not tensor.data_ptr() == alias.data_ptr() == address
            or (tensor.size(), tensor.stride()) != (alias.size(), alias.stride())
            or _storage_bytes(tensor) < byte_count  # memory that shrinks may keep its address
        ]

    def _move_back(self, place: int) -> list[Problem]:
        tensor, alias, storage = self.tensors[place], self.aliases[place], self.aliases[place].untyped_storage()
        problems: list[Problem] = []
        is_lost = storage.nbytes() < self.storage_bytes[place]
        if self.addresses[place] == 0:
            # Its memory was freed before the run, and is freed again.
            problems = attempt(tensor, partial(storage.resize_, 0))
        elif is_lost:
            problems = attempt(tensor, partial(storage.resize_, self.storage_bytes[place]))
        problems = problems or attempt(tensor, partial(setattr, tensor, "data", alias))
        if not problems:
            self.addresses[place] = alias.data_ptr()
            if is_lost and place in {*self.bare, *self.growing}:
                problems = [(tensor, "its memory was freed, and it was too large to be copied before")]
        return problems

    def _rewritten(self) -> Iterator[tuple[int, Tensor]]:
        for places, values in self.joined:
            aliases = [self.aliases[place] for place in places]
            if same_bits(_join(aliases), values):
                continue
            parts = torch.split_with_sizes(values, [alias.numel() for alias in aliases])
            for place, alias, part in zip(places, aliases, parts, strict=True):
                if not same_bits(alias, part.view(alias.shape)):
                    yield place, part.view(alias.shape)
        for place, values in self.single:
            if not same_bits(self.aliases[place], values):
                yield place, values

    def _rewind_versions(self, versions: list[int]) -> list[Problem]:
        """Set back how often tensors have been modified: graphs that saved them can then still be differentiated."""
        counted = [place for place, _ in enumerate(self.tensors) if versions[place] != self.versions[place]]
        counted = [place for place in counted if place not in self.growing]
        bare = set(self.bare)
        copied = [place for place in counted if place not in bare and not self.tensors[place].is_inference()]
        torch._C._autograd._unsafe_set_version_counter(
            tuple(self.tensors[place] for place in copied), tuple(self.versions[place] for place in copied)
        )
        reason = "it was written to, and was too large to be copied before"
        return [(self.tensors[place], reason) for place in counted if place in bare]


@contextmanager
def _plainly() -> Iterator[None]:
    """Read and write without the overrides of subclasses, gradients and inference mode."""
    with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False), torch.no_grad():
        yield


def storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the memory of a tensor, or of each of its parts."""
    parts = parts_of(tensor)
    for part in parts or ():
        yield from storages_of(part)
    if parts is None:
        with suppress(NotImplementedError, RuntimeError):  # inside a `torch.func` transform for one
            yield tensor.untyped_storage()


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _are_dense(tensors: Sequence[Tensor]) -> bool:
    """Tell whether all are plain tensors that lie in memory by strides: nearly always."""
    return (
        PLAIN_TENSORS.issuperset(map(type, tensors))
        and not any(map(attrgetter("is_nested"), tensors))
        and not any(map(attrgetter("is_quantized"), tensors))
        and {torch.strided}.issuperset(map(attrgetter("layout"), tensors))
    )


def _alias(tensor: Tensor) -> Tensor | None:
    """Return a plain dense tensor that shares the memory of this one; None if there is none."""
    try:
        alias = tensor.data
        plain = type(alias) is Tensor and alias.layout is torch.strided and not (alias.is_nested or alias.is_quantized)
    except Exception:  # noqa: BLE001 - a subclass may raise anything
        return None
    return alias if plain else None


def _copy(tensor: Tensor) -> Tensor | None:
    try:
        return None if missing_memory(tensor) else tensor.detach().clone()
    except Exception:  # noqa: BLE001 - as above
        return None


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [*map(attrgetter("_version"), tensors)]
    except RuntimeError:
        return [*map(_version, tensors)]


def _version(tensor: Tensor) -> int:
    try:
        return int(tensor._version)
    except Exception:  # noqa: BLE001 - inference tensors count nothing, and a subclass may raise anything
        return -1


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Join the values of tensors with equally many axes, (n,)."""
    if tensors[0].dim() == 0:
        return torch.stack([*tensors])
    return torch.cat([*tensors] if tensors[0].dim() == 1 else [tensor.reshape(-1) for tensor in tensors])


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Tell whether two dense tensors hold the same bits: NaN equals NaN, and 0 is not -0."""
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    if first.is_meta:
        return True
    return torch.equal(_integers(first), _integers(second))


def _integers(tensor: Tensor) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.itemsize])


def _write(tensor: Tensor, alias: Tensor, values: Tensor) -> list[Problem]:
    """Write a tensor's values through its alias, which counts as no modification; an expanded axis is written once."""
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in alias.stride())
    with torch.inference_mode(alias.is_inference()):
        return attempt(tensor, partial(alias[once].copy_, values[once]))


def _is_same(tensor: Tensor, values: Tensor | None, version: int) -> bool:
    """Tell whether a special tensor holds what it held, as far as that can be told."""
    if values is not None and missing_memory(tensor):
        return False
    if values is not None and PLAIN_TENSORS.issuperset((type(tensor), type(values))):
        first, second = dense_parts(tensor), dense_parts(values)
        return len(first) == len(second) and all(map(same_bits, first, second))
    if values is not None:
        with suppress(Exception):  # a subclass may raise anything
            return torch.equal(tensor, values)
    return _version(tensor) == version


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that hold the values of a sparse, nested or quantised one."""
    if tensor.is_nested:
        return [*tensor.unbind()]
    if tensor.is_quantized:
        return [tensor.int_repr()]
    return [*(parts_of(tensor) or [tensor.to_dense()])]


def _put_back_special(tensor: Tensor, values: Tensor | None, version: int) -> list[Problem]:
    if values is None:
        return [(tensor, "no copy of it could be made")]
    problems: list[Problem] = []
    writes: tuple[Callable[[Any], object], ...] = (tensor.copy_, partial(setattr, tensor, "data"))
    for write in writes:
        with torch.inference_mode(tensor.is_inference()):
            failed = attempt(tensor, partial(write, _copy(values)))
        if not failed and _is_same(tensor, values, version):
            return []
        problems += failed
    return problems[:1] or [(tensor, "its previous values could not be set")]
