"""Which tensors of a file share memory, by how they lie in their storages. No torch is needed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

_OVERLAP_WORK = 10_000  # how long to search whether two views share an element; after that they count as sharing

_BASE = 4096  # an address for NumPy, which reads nothing there


@dataclass(frozen=True, slots=True)
class Layout:
    """How a strided tensor lies in its storage; offset and strides in elements.

    `storage` is equal for tensors of one storage. `bits` is what else must be equal for equal elements: the dtype.
    """

    storage: object
    bits: object
    item_bytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def tied_to(places: Sequence[tuple[str, str]], layouts: Sequence[Layout | None]) -> list[str]:
    """Return for each tensor the name of the first other tensor that shares an element with it; "" for none.

    `places` are the parts and names of the tensors. The layout of a tensor that shares nothing is None.
    """
    storages: dict[object, dict[int, Layout]] = {}
    for at, layout in enumerate(layouts):
        if layout is not None:
            storages.setdefault(layout.storage, {})[at] = layout
    owners = {at: owner for members in storages.values() for at, owner in _owners(members).items()}
    names = []
    for at, (part, _) in enumerate(places):
        where, name = places[owners.get(at, at)]
        names.append("" if at not in owners else name if where == part else ".".join(filter(None, [where, name])))
    return names


def _owners(layouts: Mapping[int, Layout]) -> dict[int, int]:
    owners: dict[int, int] = {}
    first: dict[Layout, int] = {}
    for at, layout in layouts.items():
        if (earlier := first.setdefault(layout, at)) != at:
            owners[at] = earlier
    spans = []
    for layout, at in first.items():
        axes = zip(layout.shape, layout.strides, strict=True)
        begin = layout.offset * layout.item_bytes
        spans.append((begin, begin + (1 + sum((size - 1) * stride for size, stride in axes)) * layout.item_bytes, at))
    open_spans: list[tuple[int, int]] = []
    for begin, end, at in sorted(spans):
        open_spans = [span for span in open_spans if span[0] > begin]
        for _, other in open_spans:
            if _share_an_element(layouts[at], layouts[other]):
                earlier, later = sorted((at, other))
                owners[later] = min(owners.get(later, earlier), earlier)
        open_spans.append((end, at))
    return owners


def _share_an_element(first: Layout, second: Layout) -> bool:
    try:
        return bool(np.shares_memory(_array_of(first), _array_of(second), max_work=_OVERLAP_WORK))  # type: ignore[arg-type]  # NumPy's stub knows no limits
    except np.exceptions.TooHardError:
        return True


def _array_of(layout: Layout) -> Any:
    size = layout.item_bytes
    interface = {
        "data": (_BASE + layout.offset * size, True),
        "shape": layout.shape,
        "strides": tuple(stride * size for stride in layout.strides),
        "typestr": f"|V{size}",
        "version": 3,
    }
    return SimpleNamespace(__array_interface__=interface)
