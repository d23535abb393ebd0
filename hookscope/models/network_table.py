"""Names and shapes of published networks, from the tables beside this file: no torch is needed.

`python -m tests.models.network_tables` writes the tables, of what the libraries build.
"""

import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from hookscope.checkpoints.nested import TensorLike
from hookscope.checkpoints.weight_sets import COUNTER

COLOURS = 3  # channels of the pictures that published networks take

Library = Literal["torchvision", "timm"]

Shapes = Mapping[str, tuple[int, ...]]


class Free(NamedTuple):
    """A size that follows an argument: `number` times the classes or input channels, or the patches plus `number`."""

    of: Literal["classes", "channels", "patches"]
    number: int


Sizes = Mapping[str, tuple[int | Free, ...]]


def state_shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a state dict by name, with those that packed int8 linear layers hold."""
    shapes = {}
    for name, value in state.items():
        tensor = value[0] if isinstance(value, tuple) and value else value
        if isinstance(tensor, TensorLike):
            shapes[name] = tuple(tensor.shape)
    return shapes


class NetworkPattern:
    """The names and sizes of a network's tensors, with all heads that it can have.

    Attributes:
        model: What MODEL calls it.
        counts: How many tensors there are, by the first part of their names.
        class_count: As published: None if it is not known, 0 without a classifier.
        grid: Side of a patch, and of the picture as published, in pixels; zeros where no number of patches is `Free`.
        size_argument: What its builder calls the side of the picture.
        is_int8: Whether its files hold int8 weights; its sizes are the floating-point ones.
        heads: The names that a class count of 0 takes away.
        auxiliary, switches: The names in auxiliary heads, and the builder's arguments that add or take them away.
        optional_count: How many tensors a file need not have, at most: `COUNTER`, and those in heads.
    """

    def __init__(
        self, model: str, facts: Mapping[str, Any], counts: Mapping[str, int], read: Callable[[], Sizes]
    ) -> None:
        """Take the facts as JSON has them; `read` returns names and sizes."""
        self.model, self.facts, self.counts, self._read = model, facts, counts, read
        self.class_count: int | None = facts.get("classes")
        patch, side = facts.get("grid", (0, 0))
        self.grid: tuple[int, int] = patch, side
        self.size_argument = "img_size" if model.startswith("timm:") else "image_size"
        self.is_int8 = model.startswith("quantized_")
        self.heads, self.auxiliary = frozenset(facts.get("heads", ())), frozenset(facts.get("auxiliary", ()))
        self.switches, self.has_auxiliary = tuple(facts.get("switches", ())), bool(facts.get("has_auxiliary"))
        self.optional_count = int(facts.get("counters", 0)) + len(self.heads) + len(self.auxiliary)

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of all its tensors."""
        return self._read()

    def published_shapes(self) -> Shapes:
        """Return names and shapes of the network built without arguments."""
        classes, (patch, side) = self.class_count or 0, self.grid
        counts = {"classes": classes, "channels": COLOURS}
        patches = (side // patch) ** 2 if patch else 0

        def size(dim: int | Free) -> int:
            if isinstance(dim, int):
                return dim
            return patches + dim.number if dim.of == "patches" else dim.number * counts[dim.of]

        left_out = set() if classes else {*self.heads}
        left_out |= set() if self.has_auxiliary else self.auxiliary
        return {name: tuple(map(size, sizes)) for name, sizes in self.sizes.items() if name not in left_out}


def network_pattern(model: str, facts: Mapping[str, Any], sizes: Sizes) -> NetworkPattern:
    """Return a network with these sizes."""
    counters = sum(name.endswith(COUNTER) for name in sizes)
    counts = Counter(name.partition(".")[0] for name in sizes)
    return NetworkPattern(model, {**facts, **({"counters": counters} if counters else {})}, counts, lambda: sizes)


@dataclass(frozen=True, slots=True)
class NetworkTable:
    """The networks of a version of a library, in its own order."""

    version: str
    networks: Mapping[str, NetworkPattern]


@cache
def network_table(library: Library) -> NetworkTable:
    """Return the table of a library's networks, by what MODEL calls them."""
    return unpacked(files("hookscope.models").joinpath(f"{library}_networks.json.z").read_bytes())


class _Nodes:
    """The names of all networks as trees of their parts: each distinct node is stored once, after its children."""

    def __init__(self, parts: Sequence[Sequence[str]], nodes: Sequence[Any]) -> None:
        self._parts, self._nodes = parts, nodes
        self._counts: dict[int, int] = {}

    def children(self, at: int) -> Iterator[tuple[str, int]]:
        parts, *distances = self._nodes[at][""]
        return zip(self._parts[parts], (at - distance for distance in distances), strict=True)

    def count(self, at: int) -> int:
        if isinstance(self._nodes[at], list):
            return 1
        if at not in self._counts:
            self._counts[at] = sum(self.count(child) for _, child in self.children(at))
        return self._counts[at]

    def tensors(self, at: int, name: str = "") -> Iterator[tuple[str, tuple[int | Free, ...]]]:
        node = self._nodes[at]
        if isinstance(node, list):
            yield name, tuple(dim if isinstance(dim, int) else _free(dim) for dim in node)
            return
        for part, child in self.children(at):
            yield from self.tensors(child, f"{name}.{part}" if name else part)


@cache
def _free(text: str) -> Free:
    of, number = re.fullmatch(r"(classes|channels|patches)(\d+)", text).groups()  # type: ignore[union-attr]  # our own
    return Free(of, int(number))  # type: ignore[arg-type]  # by the expression


def unpacked(content: bytes) -> NetworkTable:
    """Return the table that `tests.models.network_tables` has written."""
    document = json.loads(zlib.decompress(content))
    nodes = _Nodes(document["parts"], document["nodes"])
    networks = {}
    for model, root, facts in document["networks"]:
        counts = {part: nodes.count(child) for part, child in nodes.children(root)}
        networks[model] = NetworkPattern(model, facts, counts, partial(lambda at: dict(nodes.tensors(at)), root))
    return NetworkTable(document["version"], networks)
