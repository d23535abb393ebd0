"""Write the tables of names and shapes out of which networks are recognised: `python -m tests.models.network_tables`.

It builds every network of torchvision and timm several times, which takes timm three quarters of an hour of one core.
"""

import json
import os
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torchvision.models import list_models

from hookscope.models.architecture import installed_version
from hookscope.models.names import DEMO, timm_names
from hookscope.models.network_table import Free, Library, NetworkPattern, Sizes, network_pattern
from hookscope.models.zoo import build_demo
from tests.models.known_networks import KnownNetwork, pattern_of, timm_network, torchvision_network

Row = tuple[str, dict[str, object], Sizes]

LIBRARIES: tuple[Library, ...] = ("torchvision", "timm")


def described(library: Library, part: int, parts: int) -> list[Row]:
    """Return every network of a library whose turn it is, but for those that cannot be built."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    expected = [*torchvision_networks()] if library == "torchvision" else [*map(timm_network, timm_names())]
    actual = map(pattern_of, expected[part::parts])
    return [(each.model, dict(each.facts), dict(each.sizes)) for each in actual if each is not None]


def patterns_of(library: Library, names: list[str], run: Callable[..., Iterator[list[Row]]]) -> list[NetworkPattern]:
    """Return the networks of a library in the order of `names`."""
    parts = os.cpu_count() or 1
    rows = [row for actual in run(partial(described, library, parts=parts), range(parts)) for row in actual]
    return sorted((network_pattern(*row) for row in rows), key=lambda each: names.index(each.model))


def packed(version: str, networks: Iterable[NetworkPattern]) -> bytes:
    """Return a table as a file holds it: compressed JSON.

    A tensor is the list of its sizes. A module is the index of the parts of names in it, and of each how many nodes
    back it is. A network is its name, its root, and its facts.
    """
    indices: dict[object, int] = {}
    parts: dict[tuple[str, ...], int] = {}
    nodes: list[Any] = []

    def added(level: Mapping[str, Any] | tuple[int | Free, ...]) -> int:
        key: object = level
        if isinstance(level, Mapping):
            inner = [added(child) for child in level.values()]
            index = parts.setdefault(tuple(level), len(parts))
            key = (("module", index), *inner)
        if key not in indices:
            indices[key] = at = len(nodes)
            if isinstance(level, Mapping):
                nodes.append({"": [index, *(at - each for each in inner)]})
            else:
                nodes.append([each if isinstance(each, int) else f"{each.of}{each.number}" for each in level])
        return indices[key]

    rows = [[network.model, added(_nested(network.sizes)), dict(network.facts)] for network in networks]
    document = {"version": version, "parts": list(parts), "nodes": nodes, "networks": rows}
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 9)


def _nested(sizes: Sizes) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for name, shape in sizes.items():
        *modules, last = name.split(".")
        level = root
        for part in modules:
            level = level.setdefault(part, {})
        level[last] = shape
    return root


def torchvision_networks() -> Iterator[KnownNetwork]:
    """Yield torchvision's networks, and `demo` if its package is there."""
    for name in list_models():
        yield torchvision_network(name)
    if find_spec("efficientnet_lite_pytorch"):
        yield KnownNetwork(DEMO, build_demo, build_demo, 1000)


def main(libraries: list[str]) -> None:
    for library in [library for library in LIBRARIES if library in libraries or not libraries]:
        timm = [f"timm:{name}" for name in timm_names()]
        names = timm if library == "timm" else [network.model for network in torchvision_networks()]
        with ProcessPoolExecutor() as pool:
            table = packed(installed_version(library) or "", patterns_of(library, names, pool.map))
        Path(str(files("hookscope.models").joinpath(f"{library}_networks.json.z"))).write_bytes(table)


if __name__ == "__main__":
    main(sys.argv[1:])
