"""Attributions made by hand, over photographs that are kept in memory."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hookscope.results.attributions import AttributionMap, Attributions, LayerChoice, SanityCheck, Target
from hookscope.results.inputs import InputRecord, Photograph, Preprocessing, Provenance, Region
from hookscope.results.network import ModelInfo

REGION = Region(0, 20, 60, 80, 60, 100)
CAT = InputRecord("photos/cat.jpg", "ab" * 32, (100, 60), (3, 8, 8), ("resized", "centre crop 8x8"), REGION)
DOG = replace(CAT, name="photos/dog.jpg", sha256="cd" * 32)
NOISE = InputRecord("tensor", None, None, (3, 8, 8), ())

TARGETS = (Target("Egyptian cat", 8.75, 285, 0.4), Target("tabby - tiger cat", -0.5))
SANITY = (
    SanityCheck("weights", 0.07, True, (), "It depends on the weights."),
    SanityCheck(
        "class", 0.91, False, (), "It is nearly the same for the runner-up class: it says little about this one."
    ),
    SanityCheck("deletion", 0.06, True, (0.41, 0.38), "What it marks matters."),
)


def corner(height: int = 4, width: int = 4, signed: bool = False) -> np.ndarray:
    """Return a map with one cell, the upper left, and where signed another one at the lower right."""
    values = np.zeros((height, width), np.float32)
    values[0, 0] = 0.25
    if signed:
        values[-1, -1] = -0.125
    return values


def photographs(inputs: Sequence[InputRecord], index: int) -> Photograph:
    if inputs[index].region is None:
        return Photograph(np.full((8, 8, 3), 99, np.uint8), Region(0, 0, 8, 8, 8, 8), "This is what the network saw.")
    return Photograph(np.random.default_rng(index).integers(0, 255, (60, 100, 3), np.uint8), REGION)


MODEL = ModelInfo("demo", "EfficientNet", "ImageNet", random=False, sha256="ef" * 32, parameter_count=4_652_008)

RESULT = Attributions(
    model=MODEL,
    inputs=(CAT, DOG, NOISE),
    method="grad-cam",
    layers=(
        LayerChoice("layer4", "Sequential", (1, 512, 4, 4), (4, 4), "last spatial output that reaches the target"),
    ),
    maps=tuple(
        AttributionMap(index, target, "layer4", corner(signed=target is TARGETS[1]))
        for index in range(3)
        for target in TARGETS
    ),
    sanity=SANITY,
    unchanged={"features.3.act": "SiLU is no ReLU"},
    warnings=("A warning.", f"The sanity check 'class' failed. {SANITY[1].meaning}"),
    notes=("A note.",),
    timings={"load": 0.5, "maps": 0.25},
    provenance=Provenance(("layer4",), Preprocessing(), versions={"hookscope": "0"}, photographs=photographs),
)
ONE = replace(RESULT, inputs=(CAT,), maps=RESULT.maps[:1])
