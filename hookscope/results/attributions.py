"""Where a network looks: one map per input, target and layer, and whether it can be believed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hookscope.results.comparison import Reading
from hookscope.results.concentration import Concentration, Extent, MapValues, concentration
from hookscope.results.inputs import InputRecord
from hookscope.results.json_form import UNSTORED, in_json
from hookscope.results.network import NetworkResult
from hookscope.text import counted

Method = Literal[
    "grad-cam",
    "grad-cam++",
    "layer-cam",
    "hires-cam",
    "guided-backprop",
    "gradient",
    "input-x-gradient",
    "integrated-gradients",
    "smoothgrad",
    "occlusion",
]

SANITY_LIMITS: Mapping[str, float] = {
    # On single photographs methods to be trusted came to 0.62 at most, the others to 0.96 at least. On small networks
    # gradients came to 0.76, and LayerCAM, which looks at activations more than at what follows them, to 0.92.
    "weights": 0.85,
    # Grad-CAM came to 0.982 at most, and gradients to 0.974; guided backpropagation to 0.994 at least on photographs,
    # and LayerCAM to 0.996.
    "class": 0.99,
    "completeness": 0.01,
}
"""The largest values with which a check passes; the gap of completeness must be below its limit."""


def input_word(axes: int) -> str:
    """Return the word for an input with this many axes of place: "signal", "picture" or "volume"."""
    return {1: "signal", 3: "volume"}.get(axes, "picture")


@dataclass(frozen=True, slots=True)
class Target:
    """The number that a map explains, for one input.

    Attributes:
        label: For people: "Egyptian cat", "tabby - tiger cat", "dog in box 3", "file.py:function".
        score: Its value: the logit, a difference of logits, a box's score, a sum over pixels.
        index: Index of the class; None if the target is not a single class.
        probability: Probability of the class; None if the output is not one row of class scores.
        box: The box that a detector scores, (left, top, right, bottom) as shares of the network's input; else None.
        reading: How the probability was computed from the scores.
    """

    label: str
    score: float
    index: int | None = None
    probability: float | None = None
    box: tuple[float, float, float, float] | None = None
    reading: Reading = "softmax"


@dataclass(frozen=True, slots=True)
class AttributionMap(MapValues):
    """How much each place contributes to one input's target, as the method computes it: not smoothed, not scaled.

    Attributes:
        input_index: Of `Attributions.inputs`.
        layer: Label of the mapped output; "" for methods that map the input itself.
        values: (h, w) float32 of a picture, (l,) of a signal, (d, h, w) of a volume or a clip, at the layer's
            resolution, or the network input's for layer "". Signed if the method is signed. Row 0 is the top.
        extent: The area that the cells fill, in equal steps, each around the middle of its receptive field.
        pixels: (C, *size) float32, the contribution of each input value, for methods that map the input; else None.
        size: Positions of the network's input along each axis, (H, W), (L,) or (D, H, W); () if inputs are a list.
    """

    input_index: int
    target: Target
    layer: str
    values: NDArray[np.float32] = field(repr=False, compare=False)
    extent: Extent = (0.0, 0.0, 1.0, 1.0)
    pixels: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    size: tuple[int, ...] = ()

    @property
    def box(self) -> tuple[float, float, float, float] | None:
        """The target's box."""
        return self.target.box


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """A layer whose output is mapped.

    Attributes:
        label: As rows have it: "layer4", "blocks.10", "features#1".
        kind: Class name of the module.
        shape: Of its output, batch axis included.
        grid: Cells of the map along each axis: (h, w), (l,) or (d, h, w).
        reason: Why it was chosen, in a few words: "last spatial output that reaches the target"; "given".
    """

    label: str
    kind: str
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SanityCheck:
    """One test of whether the maps depend on the network and the target.

    Attributes:
        name: "weights": rank correlation of magnitudes with the map of randomised weights; "class": with the map of the
            runner-up class; "deletion": the target's probability after the most important tenth of the input was
            blurred; "completeness": how far integrated gradients fall short of the score's difference, as a share.
        value: The measured number.
        passed: Whether `value` is within the limit; None if blurring changes too little to tell.
        compared_with: For "deletion" the probability before, and after blurring as much at random; else ().
        meaning: A sentence: what the number means, and what to do if the check failed.
    """

    name: Literal["weights", "class", "deletion", "completeness"]
    value: float
    passed: bool | None
    compared_with: tuple[float, ...] = ()
    meaning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Attributions(NetworkResult[AttributionMap]):
    """Maps of where a network looks, with tests of the maps.

    Attributes:
        inputs: The inputs, one record each.
        method: The method's name: "grad-cam".
        layers: Labels of the layers that were mapped; () for methods that map the pixels.
        maps: By input, then target, then layer, in the order given.
        sanity: Checks over all maps of the run; () with `sanity="none"`.
        input_values: The first inputs as the network got them, (C, *size) float32, for drawing; signals and volumes
            only.
        unchanged: Activations to which guided backpropagation could not apply its rule, by label, with the reason.
    """

    inputs: tuple[InputRecord, ...]
    method: Method
    layers: tuple[LayerChoice, ...]
    maps: tuple[AttributionMap, ...]
    sanity: tuple[SanityCheck, ...] = ()
    unchanged: Mapping[str, str] = field(default_factory=dict)
    input_values: Mapping[int, NDArray[np.float32]] = field(default_factory=dict, repr=False, metadata=UNSTORED)

    _noun = "map"

    def __repr__(self) -> str:
        parts = (self.method, counted(len(self.maps), "map"), counted(len(self.inputs), "input"))
        return f"<{type(self).__name__} of {self.model.name}: {', '.join(parts)}>"

    @property
    @in_json
    def halves(self) -> tuple[Concentration | None, ...]:
        """For each map, the smallest box with half of its positive mass; None for a map without any."""
        return tuple(concentration(heat_map, self.inputs[heat_map.input_index]) for heat_map in self.maps)

    def _items(self) -> tuple[AttributionMap, ...]:
        return self.maps

    def by_label(self) -> dict[str, AttributionMap]:
        """Return the first map of each target: "Egyptian cat"."""
        return {heat_map.target.label: heat_map for heat_map in reversed(self.maps)}
