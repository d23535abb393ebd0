"""Find the partner of each layer: by a map, by name with and without wrapping prefixes, by order, type and shapes."""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import add, attrgetter

import numpy as np

from hookscope.checkpoints.wrapped_names import stripped_forms
from hookscope.errors import LayerNotFoundError, UsageError, nearest
from hookscope.parameters import arg
from hookscope.results.differences import Match
from hookscope.text import safe_text

Shape = tuple[int, ...]

Shapes = Mapping[str, tuple[Shape, ...]]
"""Shapes of the parameters that each module of a network owns, by its dotted name."""

CallKey = tuple[str, int]
"""(layer, call)."""

# Scores of a pair of calls with equal shapes: of the same type, and of different types. One pair of the same type
# outweighs two of different types.
_SAME_KIND, _OTHER_KIND = 5, 2


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one layer, or of one operation, in the order in which they finish.

    Attributes:
        key: (layer, call).
        kind: Class name of the module, or the operation's name.
        shapes: Shapes of its outputs.
        parameters: Shapes of the parameters that the module owns.
        is_unchanged: Whether it returned its input. Such a call is paired by name only, never by order.
    """

    key: CallKey
    kind: str
    shapes: tuple[Shape, ...]
    parameters: tuple[Shape, ...]
    is_unchanged: bool = False


@dataclass(frozen=True, slots=True)
class Pairing:
    """The partner in B of each call of A.

    Attributes:
        names: For a layer of A, its partner in B and how it was found. Applies to calls that are not in `calls`.
        calls: For a call of A that was aligned by order, the call of B.
    """

    names: Mapping[str, tuple[str, Match]]
    calls: Mapping[CallKey, CallKey] = field(default_factory=dict)
    _aligned: Collection[CallKey] = field(init=False, repr=False)  # calls of B

    def __post_init__(self) -> None:
        object.__setattr__(self, "_aligned", frozenset(self.calls.values()))

    def partner(self, key: CallKey) -> tuple[CallKey, Match] | None:
        """Return the call of B that is the partner of a call of A, and how it was found; None without one."""
        if key in self.calls:
            return self.calls[key], "order"
        named = self.namesake(key[0])
        if named is None or (named[0], key[1]) in self._aligned:
            return None
        return (named[0], key[1]), named[1]

    def namesake(self, layer: str) -> tuple[str, Match] | None:
        """Return the partner by name of a layer or operation of A, and how it was found; None without one."""
        if layer in self.names:
            return self.names[layer]
        owner, colon, operation = layer.rpartition(":")
        if not colon or (owner := "" if owner == "(model)" else owner) not in self.names:
            return None
        partner, how = self.names[owner]
        return f"{partner or '(model)'}:{operation}", how

    def inverse(self) -> "Pairing":
        """Return the partner in A of each call of B."""
        return Pairing(
            {partner: (name, how) for name, (partner, how) in self.names.items()},
            {partner: key for key, partner in self.calls.items()},
        )


def match_names(a: Shapes, b: Shapes, maps: Sequence[str] = ()) -> dict[str, tuple[str, Match]]:
    """Pair layers of A and B whose names are equal, also after `maps` or without prefixes of wrappers.

    Equal names go before names without prefixes, unless more layers without prefixes have parameters of equal shapes.

    Args:
        a: The modules of A.
        b: The modules of B.
        maps: As for `--map`: "encoder.*=backbone.*", with as many stars on both sides.

    Returns:
        For each layer of A that has one, its partner in B and how it was found.

    Raises:
        UsageError: If a map is malformed.
        LayerNotFoundError: If a map matches nothing.
    """
    matched: dict[str, tuple[str, Match]] = {}
    taken: set[str] = set()

    def pair(name: str, partner: str, how: Match) -> None:
        if name not in matched and partner not in taken and name in a and partner in b:
            matched[name] = (partner, how)
            taken.add(partner)

    for text in maps:
        for name, partner in _pairs_of_map(text, a, b):
            pair(name, partner, "map")
    equal = [(name, name) for name in a if name in b]
    stripped = max(_pairs_without_prefixes(a, b), key=partial(_agreeing, a, b)) if a.keys() != b.keys() else []
    if _agreeing(a, b, stripped) > _agreeing(a, b, equal):
        for name, partner in _plausible(a, b, stripped):
            pair(name, partner, "prefix")
    for name, partner in equal:
        pair(name, partner, "name")
    rest_a, rest_b = [name for name in a if name not in matched], [name for name in b if name not in taken]
    for name, partner in _plausible(a, b, max(_pairs_without_prefixes(rest_a, rest_b), key=len)):
        pair(name, partner, "prefix")
    return matched


def _agreeing(a: Shapes, b: Shapes, pairs: Sequence[tuple[str, str]]) -> int:
    """Return how many pairs have parameters, of equal shapes."""
    return sum(bool(a[name]) and a[name] == b[partner] for name, partner in pairs)


def _plausible(a: Shapes, b: Shapes, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the pairs that have parameters of equal shapes, or of which one is a wrapper of the other."""
    around_a, around_b = containers_of(a), containers_of(b)
    for name, partner in pairs:
        if (name in around_a) == (partner in around_b):
            is_partner = a[name] == b[partner]
        else:
            is_partner = _wraps_layer(b, partner, a[name]) or _wraps_layer(a, name, b[partner])
        if is_partner:
            yield name, partner


def _wraps_layer(layers: Shapes, module: str, shapes: tuple[Shape, ...]) -> bool:
    """Tell whether a module has no parameters of its own, and a layer inside it has parameters of these shapes."""
    inside = (sizes for name, sizes in layers.items() if is_inside(name, module))
    return bool(shapes) and not layers[module] and shapes in inside


def containers_of(layers: Iterable[str]) -> set[str]:
    """Return the names of the modules around layers: "", "a" and "a.b" for "a.b.c"."""
    around: set[str] = set()
    for name in layers:
        while name and (name := name.rpartition(".")[0]) not in around:
            around.add(name)
    return around


def is_inside(layer: str, module: str) -> bool:
    """Tell by its name whether a layer or an operation is inside a module."""
    return layer != module and (not module or layer.startswith((f"{module}.", f"{module}:")))


def _pairs_of_map(text: str, a: Collection[str], b: Collection[str]) -> list[tuple[str, str]]:
    left, equals, right = text.partition("=")
    if not (left and equals and right) or left.count("*") != right.count("*"):
        raise UsageError(f"{arg('map')} {safe_text(text)!r} is not A=B with as many stars on both sides: 'a.*=b.*'.")
    matching = {name: parts for name in a if (parts := _star_parts(left, name)) is not None}
    between = right.split("*")
    partners = [(name, "".join(map(add, between, (*parts, "")))) for name, parts in matching.items()]
    pairs = [(name, partner) for name, partner in partners if partner in b]
    if not pairs:
        side, names, wanted = ("B", b, right) if matching else ("A", a, left)
        raise LayerNotFoundError(
            f"{arg('map')} {safe_text(text)!r} matches no layer of {side}.{nearest(wanted.replace('*', ''), names)}"
        )
    return pairs


def _star_parts(pattern: str, name: str) -> Sequence[str] | None:
    """Return the parts of a name that the stars of a pattern match, as short as possible; None without a match."""
    match = re.fullmatch("(.*?)".join(map(re.escape, pattern.split("*"))), name, re.DOTALL)
    return None if match is None else match.groups()


def matching_names(a: Sequence[str], b: Sequence[str]) -> list[int | None]:
    """Return the index in A of the partner of each tensor of B: by name, else A's next tensor whose name B lacks."""
    others = iter([at for at, name in enumerate(a) if name not in b])
    return [a.index(name) if name in a else next(others, None) for name in b]


def _pairs_without_prefixes(a: Collection[str], b: Collection[str]) -> Iterator[list[tuple[str, str]]]:
    """For each prefix of a wrapper in A or B, yield the pairs of names that are equal without it."""
    for _, form in stripped_forms(a):
        names = {read: name for name, read in form.items()}
        yield [(names[name], name) for name in b if name in names]
    for _, form in stripped_forms(b):
        names = {read: name for name, read in form.items()}
        yield [(name, names[name]) for name in a if name in names]


def align(a: Sequence[Call], b: Sequence[Call], names: Mapping[str, tuple[str, Match]]) -> dict[CallKey, CallKey]:
    """Pair the calls without a match by name, in order, between calls that have one.

    Only calls with equal output shapes and parameter shapes are aligned. The alignment has the highest score, by
    dynamic programming (S. B. Needleman and C. D. Wunsch, 1970, without a penalty for gaps).

    Args:
        a: Calls of A in the order in which they finish.
        b: Calls of B.
        names: What `match_names` returned.

    Returns:
        For each aligned call of A, the call of B.
    """
    pairing = Pairing(names)
    places = {call.key: place for place, call in enumerate(b)}
    fixed: list[tuple[int, int]] = []
    for place, call in enumerate(a):
        partner = pairing.partner(call.key)
        if partner is not None and partner[0] in places:
            fixed.append((place, places[partner[0]]))
    aligned: dict[CallKey, CallKey] = {}
    named_a, named_b = {index for index, _ in fixed}, {other for _, other in fixed}
    start_a = start_b = 0
    for end_a, end_b in [*_longest_sorted(fixed), (len(a), len(b))]:
        rest_a, rest_b = (
            [call for at, call in enumerate(calls[start:end], start) if at not in named and not call.is_unchanged]
            for calls, start, end, named in ((a, start_a, end_a, named_a), (b, start_b, end_b, named_b))
        )
        aligned |= {first.key: other.key for first, other in _best_pairs(rest_a, rest_b)}
        start_a, start_b = end_a + 1, end_b + 1
    return aligned


def _longest_sorted(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest subsequence of pairs that is sorted by both numbers; `pairs` is sorted by the first."""
    sequences: list[list[tuple[int, int]]] = []  # for each length, the one that ends with the smallest second number
    for pair in pairs:
        length = bisect_left(sequences, pair[1], key=lambda sequence: sequence[-1][1])
        sequences[length : length + 1] = [[*sequences[length - 1], pair] if length else [pair]]
    return sequences[-1] if sequences else []


def _best_pairs(a: Sequence[Call], b: Sequence[Call]) -> list[tuple[Call, Call]]:
    numbers: dict[object, int] = {}
    forms_a, forms_b, kinds_a, kinds_b = (
        np.array([numbers.setdefault(part(call), len(numbers)) for call in calls])
        for part in (attrgetter("shapes", "parameters"), attrgetter("kind"))
        for calls in (a, b)
    )
    scores = np.zeros((len(a) + 1, len(b) + 1), np.int32)
    for at, (form, kind) in enumerate(zip(forms_a, kinds_a, strict=True)):
        added = np.where(forms_b == form, np.where(kinds_b == kind, _SAME_KIND, _OTHER_KIND), 0)
        scores[at + 1, 1:] = np.maximum.accumulate(np.maximum(scores[at, 1:], scores[at, :-1] + added))
    pairs = []
    at, other = len(a), len(b)
    while at and other:
        score = scores[at, other]
        if score == scores[at - 1, other]:
            at -= 1
        elif score == scores[at, other - 1]:
            other -= 1
        else:
            at, other = at - 1, other - 1
            pairs.append((a[at], b[other]))
    return pairs[::-1]
