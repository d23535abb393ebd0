"""Write the tables of names and shapes out of which networks are recognised: `python -m tests.models.network_tables`.

It builds every network of torchvision and timm several times, which takes timm three quarters of an hour of one core.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.resources import files
from pathlib import Path

import torch

from hookscope.models.architecture import installed_version
from hookscope.models.known_networks import pattern_of, timm_network, torchvision_networks
from hookscope.models.network_table import Library, NetworkPattern, Sizes, packed, pattern, table_name
from hookscope.models.timm_zoo import timm_names

Row = tuple[str, dict[str, object], Sizes]

LIBRARIES: tuple[Library, ...] = ("torchvision", "timm")


def described(library: Library, part: int, parts: int) -> list[Row]:
    """Return every network of a library whose turn it is, but for those that cannot be built."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    known = [*torchvision_networks()] if library == "torchvision" else [*map(timm_network, timm_names())]
    found = map(pattern_of, known[part::parts])
    return [(each.model, dict(each.facts), dict(each.sizes)) for each in found if each is not None]


def patterns_of(library: Library, names: list[str], run: Callable[..., Iterator[list[Row]]]) -> list[NetworkPattern]:
    """Return the networks of a library in the order of `names`."""
    parts = os.cpu_count() or 1
    rows = [row for found in run(partial(described, library, parts=parts), range(parts)) for row in found]
    return sorted((pattern(*row) for row in rows), key=lambda each: names.index(each.model))


def main(libraries: list[str]) -> None:
    for library in [each for each in LIBRARIES if each in libraries or not libraries]:
        timm = [f"timm:{name}" for name in timm_names()]
        names = timm if library == "timm" else [network.model for network in torchvision_networks()]
        with ProcessPoolExecutor() as pool:
            table = packed(installed_version(library) or "", patterns_of(library, names, pool.map))
        Path(str(files("hookscope.models").joinpath(table_name(library)))).write_bytes(table)


if __name__ == "__main__":
    main(sys.argv[1:])
