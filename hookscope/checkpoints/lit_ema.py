"""Averaged weights as LitEma keeps them: in the state dict itself, under names without dots. No torch is needed.

Source: ldm/modules/ema.py of latent-diffusion and its descendants: a buffer for each parameter, called by the
parameter's name without its dots, beside `decay` and `num_updates`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from hookscope.text import printable

_COUNTERS = ("decay", "num_updates")

_PREFIXES_LIMIT = 20  # a file made to be slow could have any number

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class DotlessCopy:
    """An averaged copy in a state dict, whose names begin with `prefix`, "model_ema.".

    `names` maps its names to the names of the averaged weights, which begin with `around`, "model."; `counters` are its
    other names.
    """

    prefix: str
    names: Mapping[str, str]
    counters: tuple[str, ...]
    around: str

    def place(self, where: str) -> str:
        """Return where the copy is in a file that has the state dict at `where`."""
        return ".".join(filter(None, [where, printable(self.prefix.rstrip("."), 80)]))

    def left_out_of(self, state: Mapping[str, _Value]) -> dict[str, _Value]:
        """Return a state dict without the copy."""
        return {name: value for name, value in state.items() if name not in self.names and name not in self.counters}

    def taken_from(self, state: Mapping[str, _Value]) -> dict[str, _Value]:
        """Return the averages under the names of the weights, and the weights' buffers, which have no average."""
        averages = {name: state[copy] for copy, name in self.names.items()}
        weights = {name: value for name, value in state.items() if name.startswith(self.around)}
        return {name: averages.get(name, value) for name, value in self.left_out_of(weights).items()}


def dotless_copy(state: Iterable[str]) -> DotlessCopy | None:
    """Return the averaged copy among the names of a state dict; None if there is none, or its weights are unclear."""
    names = [*state]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    candidates = [head for head in groups if "ema" in head.rpartition(".")[2].lower()]
    for head in candidates[:_PREFIXES_LIMIT]:
        members = {name[len(head) + 1 :]: name for name in groups[head]}
        counters = tuple(members.pop(counter) for counter in _COUNTERS if counter in members)
        parent = f"{head}.".rpartition(f"{head.rpartition('.')[2]}.")[0]
        inside = [name for name in names if name.startswith(parent) and name not in groups[head]]
        children = dict.fromkeys(name[len(parent) :].partition(".")[0] for name in inside if "." in name[len(parent) :])
        for around in (parent, *[f"{parent}{child}." for child in [*children][:_PREFIXES_LIMIT]]):
            pairs = _paired(members, [name for name in inside if name.startswith(around)], around)
            # Without a dot to leave out it is no LitEma: "semantic.weight" beside "fc.weight".
            if pairs and (counters or any("." in name[len(around) :] for name in pairs.values())):
                return DotlessCopy(f"{head}.", pairs, counters, around)
    return None


def _paired(members: Mapping[str, str], names: Iterable[str], around: str) -> dict[str, str]:
    by_leaf: dict[str, list[str]] = {}
    for name in names:
        by_leaf.setdefault(name[len(around) :].replace(".", ""), []).append(name)
    pairs = {members[leaf]: by_leaf[leaf][0] for leaf in members if len(by_leaf.get(leaf, ())) == 1}
    return pairs if len(pairs) == len(members) else {}
