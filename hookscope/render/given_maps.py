"""Inputs that are no pictures, and maps of them, drawn from the numbers that the network was given."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.render.signal_maps import channel_remark, draw_signal, draw_signal_map
from hookscope.render.volume_maps import draw_volume, draw_volume_map, volume_remark
from hookscope.results.attributions import AttributionMap


def draw_given(given: NDArray[np.float32], width: int) -> Image.Image:
    """Draw a signal (C, L) as curves, or the middle slices of a volume (C, D, H, W)."""
    return draw_signal(given, width) if given.ndim == 2 else draw_volume(given, width)


def draw_given_map(given: NDArray[np.float32] | None, each: AttributionMap, width: int) -> Image.Image:
    """Draw a map of a signal or a volume over it; by itself where the input is not known."""
    return draw_signal_map(given, each, width) if each.values.ndim == 1 else draw_volume_map(given, each, width)


def given_remark(given: NDArray[np.float32]) -> str:
    """Return a sentence about channels that are not drawn; "" if all are."""
    return channel_remark(given) if given.ndim == 2 else volume_remark(given)
