"""Recognise torchvision's networks as published by a digest of their names and shapes: no torch, nothing is built."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

COUNTER = "num_batches_tracked"  # old files do not have it, and evaluation does not use it

TABLE = "torchvision_digests.json"
"""The file beside this one: torchvision's version, and the networks by digest."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A network, as MODEL would name it, whose names and shapes are those of a file with these arguments.

    `input_channels` is C of the pictures, if it is not the network's own; `remarks` say how sure this is, and what
    differs from the network as published, for people.
    """

    model: str
    arguments: Mapping[str, Any]
    input_channels: int | None
    remarks: tuple[str, ...]


def published_networks(shapes: Shapes) -> tuple[Candidate, ...]:
    """Return the networks of torchvision that have exactly these names and shapes as published, as `recognise` does.

    All `num_batches_tracked` may be missing, not some. The result is empty if there is none, or if another version of
    torchvision is installed than the table is of: then `recognise` has to build networks to say more.
    """
    table_version, networks = _table()
    if _installed() != table_version:
        return ()
    found = [
        Candidate(name, {}, None, (all_fit(len(shapes)), *missing_counters(count)))
        for name, count in networks.get(digest(shapes), ())
    ]
    return with_ties(found, "torchvision")


def digest(shapes: Shapes) -> str:
    """Return what is the same for the same names and shapes in any order: 64 bits of SHA-256, in hex digits."""
    text = json.dumps(sorted((name, list(shape)) for name, shape in shapes.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def table_of(torchvision: str, networks: Iterable[tuple[str, Shapes]]) -> str:
    """Return the table as a file holds it.

    Each digest has the names of the networks in the given order, and how many `num_batches_tracked` they have that the
    digest leaves out.
    """
    by_digest: dict[str, list[tuple[str, int]]] = {}
    for name, shapes in networks:
        bare = {each: shape for each, shape in shapes.items() if not each.endswith(COUNTER)}
        for given in [shapes, bare] if len(bare) < len(shapes) else [shapes]:
            by_digest.setdefault(digest(given), []).append((name, len(shapes) - len(given)))
    rows = ",\n".join(f"  {json.dumps(each)}: {json.dumps(found)}" for each, found in sorted(by_digest.items()))
    return f'{{"torchvision": {json.dumps(torchvision)}, "networks": {{\n{rows}\n}}}}\n'


@cache
def _table() -> tuple[str, dict[str, list[tuple[str, int]]]]:
    document = json.loads(files("hookscope.models").joinpath(TABLE).read_text(encoding="utf-8"))
    return document["torchvision"], document["networks"]


def _installed() -> str | None:
    """Return torchvision's version without what its builds add, as in "0.25.0+cpu"; None if it has none."""
    try:
        return version("torchvision").partition("+")[0]
    except PackageNotFoundError:
        return None


def with_ties(found: Sequence[Candidate], library: str) -> tuple[Candidate, ...]:
    """Return the candidates with a remark each on the others."""
    told = []
    for candidate in found:
        others = [other.model for other in found if other is not candidate]
        alone = f"no other {library} network's do"
        also = f"so do those of {', '.join(others[:3])}{', …' if len(others) > 3 else ''}"
        fits, *rest = candidate.remarks
        told.append(replace(candidate, remarks=(f"{fits}; {also if others else alone}", *rest)))
    return tuple(told)


def all_fit(count: int, which: str = "names and shapes") -> str:
    """Return the remark that everything in a file fits."""
    return f"all {count} {which} fit"


def missing_counters(count: int) -> tuple[str, ...]:
    """Return the remark on counters that a file does not have; none if it has all of them."""
    return (f"{count} {COUNTER} are missing, as in old files and with frozen BatchNorm",) if count else ()
