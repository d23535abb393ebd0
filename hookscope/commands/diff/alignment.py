"""Find the partner of each layer: by a map, by name with and without wrapping prefixes, by order, type and shapes."""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add, attrgetter

import numpy as np

from hookscope.errors import LayerNotFoundError, UsageError, nearest
from hookscope.models.wrapped_names import stripped_forms
from hookscope.parameters import arg
from hookscope.results.differences import Match
from hookscope.text import safe_text

Shape = tuple[int, ...]

CallKey = tuple[str, int]
"""(layer, call)."""

# Scores in an alignment of two calls with equal output shapes: of the same type, and of different types. One pair of
# the same type outweighs two of different types.
_SAME_KIND, _OTHER_KIND = 5, 2


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one layer, or of one operation, in the order in which they finish.

    Attributes:
        key: (layer, call).
        kind: Class name of the module, or the operation's name.
        shapes: Of its outputs.
        parameters: Shapes of the parameters that the module owns.
        is_unchanged: Whether it returned its input: such a call has a partner by name, and none by order.
    """

    key: CallKey
    kind: str
    shapes: tuple[Shape, ...]
    parameters: tuple[Shape, ...]
    is_unchanged: bool = False


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which call of A belongs to which of B.

    Attributes:
        names: Layers of B by those of A, and how they were matched, for every call that `calls` does not have.
        calls: Calls of B by those of A, where aligned by order.
        known: The calls of A that have a partner; None if only names tell.
        around: Layers of A that `known` does not cover.
    """

    names: Mapping[str, tuple[str, Match]]
    calls: Mapping[CallKey, CallKey] = field(default_factory=dict)
    known: frozenset[CallKey] | None = None
    around: frozenset[str] = frozenset()

    def partner(self, key: CallKey) -> tuple[CallKey, Match] | None:
        """Return the call of B that belongs to a call of A, and how it was matched."""
        if key in self.calls:
            return self.calls[key], "order"
        if self.known is not None and key not in self.known and key[0] not in self.around:
            return None
        named = self.namesake(key[0])
        return None if named is None else ((named[0], key[1]), named[1])

    def namesake(self, layer: str) -> tuple[str, Match] | None:
        """Return the layer or operation of B that has the name of one of A, and how it was matched."""
        if layer in self.names:
            return self.names[layer]
        owner, colon, operation = layer.rpartition(":")
        if not colon or (owner := "" if owner == "(model)" else owner) not in self.names:
            return None
        partner, how = self.names[owner]
        return f"{partner or '(model)'}:{operation}", how

    def inverse(self) -> "Pairing":
        """Return which call of B belongs to which of A."""
        keys = None if self.known is None else frozenset(pair[0] for pair in map(self.partner, self.known) if pair)
        return Pairing(
            {partner: (name, how) for name, (partner, how) in self.names.items()},
            {partner: key for key, partner in self.calls.items()},
            keys,
            frozenset(self.names[name][0] for name in self.around),
        )


def match_names(
    a: Mapping[str, tuple[Shape, ...]], b: Mapping[str, tuple[Shape, ...]], maps: Sequence[str] = ()
) -> dict[str, tuple[str, Match]]:
    """Return the layers of B by those of A that have the same name, after `maps` and without prefixes of wrappers.

    Args:
        a: Shapes of the parameters that each module of A owns, by its dotted name.
        b: The same for B.
        maps: As for `--map`: "encoder.*=backbone.*", with as many stars on both sides.

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
        for name, partner in _mapped(text, a, b):
            pair(name, partner, "map")
    for name in a:
        pair(name, name, "name")
    rest_a = [name for name in a if name not in matched]
    rest_b = [name for name in b if name not in taken]
    around_a, around_b = around(a), around(b)
    for name, partner in _without_prefixes(rest_a, rest_b):
        if (name in around_a) == (partner in around_b):
            is_partner = a[name] == b[partner]
        else:
            is_partner = _holds(b, partner, a[name]) or _holds(a, name, b[partner])
        if is_partner:
            pair(name, partner, "prefix")
    return matched


def _holds(layers: Mapping[str, tuple[Shape, ...]], module: str, shapes: tuple[Shape, ...]) -> bool:
    """Tell whether a module without parameters of its own is a wrapper of a layer with parameters of these shapes."""
    inside = (sizes for name, sizes in layers.items() if is_inside(name, module))
    return bool(shapes) and not layers[module] and shapes in inside


def around(layers: Iterable[str]) -> set[str]:
    """Return the names around layers: "a" and "a.b" for "a.b.c", and the network's, ""."""
    names = {name for name in layers if name}
    return {name[:at] for name in names for at, letter in enumerate(name) if letter == "."} | ({""} if names else set())


def is_inside(layer: str, module: str) -> bool:
    """Tell whether a layer or an operation belongs to a module, by their names."""
    return layer != module and (not module or layer.startswith((f"{module}.", f"{module}:")))


def inside_any(call: Call, modules: Collection[str]) -> bool:
    """Tell whether a call is that of a layer or an operation inside one of some modules."""
    return any(is_inside(call.key[0], module) for module in modules)


def _mapped(text: str, a: Collection[str], b: Collection[str]) -> list[tuple[str, str]]:
    left, equals, right = text.partition("=")
    if not (left and equals and right) or left.count("*") != right.count("*"):
        raise UsageError(f"{arg('map')} {safe_text(text)!r} is not A=B with as many stars on both sides: 'a.*=b.*'.")
    matching = {name: parts for name in a if (parts := _filled(left, name)) is not None}
    between = right.split("*")
    partners = [(name, "".join(map(add, between, (*parts, "")))) for name, parts in matching.items()]
    pairs = [(name, partner) for name, partner in partners if partner in b]
    if not pairs:
        side, names, wanted = ("B", b, right) if matching else ("A", a, left)
        raise LayerNotFoundError(
            f"{arg('map')} {safe_text(text)!r} matches no layer of {side}.{nearest(wanted.replace('*', ''), names)}"
        )
    return pairs


def _filled(pattern: str, name: str) -> Sequence[str] | None:
    """Return what each star of a pattern matches in a name, the first ones as short as possible; None for no match."""
    match = re.fullmatch("(.*?)".join(map(re.escape, pattern.split("*"))), name, re.DOTALL)
    return None if match is None else match.groups()


def matching_names(a: Sequence[str], b: Sequence[str]) -> list[int | None]:
    """Return which of A's tensors belongs to each of B's: its namesake, or else the next one without a namesake."""
    others = iter([at for at, name in enumerate(a) if name not in b])
    return [a.index(name) if name in a else next(others, None) for name in b]


def _without_prefixes(a: Sequence[str], b: Sequence[str]) -> list[tuple[str, str]]:
    """Return the most pairs of equal names that removing wrapper prefixes, on either side, can give."""
    pairs: list[list[tuple[str, str]]] = [[]]
    for _, form in stripped_forms(a):
        names = {read: name for name, read in form.items()}
        pairs.append([(names[name], name) for name in b if name in names])
    for _, form in stripped_forms(b):
        names = {read: name for name, read in form.items()}
        pairs.append([(name, names[name]) for name in a if name in names])
    return max(pairs, key=len)


def align(
    a: Sequence[Call], b: Sequence[Call], names: Mapping[str, tuple[str, Match]]
) -> tuple[dict[CallKey, CallKey], set[CallKey]]:
    """Align the calls that have no match by name, between those that have one, keeping both orders.

    Only calls with equal output shapes and parameter shapes are aligned. It is the alignment with the
    highest score, by dynamic programming (S. B. Needleman and C. D. Wunsch, 1970, without a penalty for gaps).

    Args:
        a: Calls of A in the order in which they finish.
        b: Those of B.
        names: What `match_names` returned.

    Returns:
        Calls of B by those of A, and the calls of A that match by name and needed no alignment.
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
    for end_a, end_b in [*_in_order(fixed), (len(a), len(b))]:
        rest_a = [call for at, call in enumerate(a[start_a:end_a], start_a) if _is_open(at, call, named_a)]
        rest_b = [call for at, call in enumerate(b[start_b:end_b], start_b) if _is_open(at, call, named_b)]
        aligned |= {first.key: other.key for first, other in _best(rest_a, rest_b)}
        start_a, start_b = end_a + 1, end_b + 1
    return aligned, {a[place].key for place in named_a}


def _is_open(at: int, call: Call, named: Collection[int]) -> bool:
    return at not in named and not call.is_unchanged


def _in_order(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest run of pairs that is in order on both sides; they are in order on the first."""
    runs: list[list[tuple[int, int]]] = []  # by length, the run of that length that ends first on the second side
    for pair in pairs:
        length = bisect_left(runs, pair[1], key=lambda run: run[-1][1])
        runs[length : length + 1] = [[*runs[length - 1], pair] if length else [pair]]
    return runs[-1] if runs else []


def _best(a: Sequence[Call], b: Sequence[Call]) -> list[tuple[Call, Call]]:
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
