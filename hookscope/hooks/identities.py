"""Know a tensor of a forward pass again, also where another tensor of ours has taken its place.

A module that returns its input shows a tensor that was shown before. To watch gradients, that tensor is replaced by one
of ours after the call, so for what follows it is another object with the same values: it still counts as the same.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

Place = tuple[str, int, str]
"""(layer, call, slot)."""

_Known = tuple[weakref.ref[Tensor], int, list[Place]]
"""A tensor, its version, and where it was shown first, if it was; that list is shared with what stands for it."""


@dataclass(slots=True)
class Identities:
    """The tensors of one forward pass, each as long as nothing writes to it. Inference tensors are not known again."""

    _known: dict[int, _Known] = field(default_factory=dict)

    def show(
        self, place: Place, tensor: Tensor, inputs: Sequence[tuple[str, Tensor]], *, in_place: bool
    ) -> tuple[bool, Place | None]:
        """Note where a call shows a tensor.

        Args:
            place: Of the output.
            tensor: The output.
            inputs: What the call was given.
            in_place: Whether it overwrote an input.

        Returns:
            Whether the output is an input, unchanged; and if so, where it was shown first, None if that is here.
        """
        if tensor.is_inference():
            return False, None
        shown = self._find(tensor)
        passed_through = False
        if not in_place:
            for _, given in inputs:  # not any(): this runs at every call of every module
                passed_through |= given is tensor or (shown is not None and self._find(given) is shown)
        if shown is None:
            self._add(tensor, [place])
        elif not shown:
            shown.append(place)
        elif passed_through:
            return True, shown[0]
        return passed_through, None

    def replaced(self, before: Sequence[tuple[str, Tensor]], after: Sequence[tuple[str, Tensor]]) -> None:
        """Note that tensors of ours take the place of others from here on.

        Args:
            before: (path, tensor) as a module had them.
            after: As the network goes on with them; some may be the same objects.
        """
        replacements = dict(after)
        for path, original in before:
            ours = replacements.get(path, original)
            if ours is not original and not (original.is_inference() or ours.is_inference()):
                shown = self._find(original)
                if shown is None:
                    self._add(original, shown := [])
                self._add(ours, shown)

    def _find(self, tensor: Tensor) -> list[Place] | None:
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != tensor._version:
            return None
        return known[2]

    def _add(self, tensor: Tensor, shown: list[Place]) -> None:
        self._known[id(tensor)] = (weakref.ref(tensor), tensor._version, shown)
