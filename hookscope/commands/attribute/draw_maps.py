"""Inputs that are no pictures, and maps of them, drawn from the numbers that the network was given."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.commands.attribute.signal_maps import channel_remark, draw_signal, draw_signal_map
from hookscope.commands.attribute.volume_maps import draw_volume, draw_volume_map, volume_remark
from hookscope.results.attributions import AttributionMap


def draw_given(data: NDArray[np.float32], width: int) -> Image.Image:
    """Draw a signal (C, L) as curves, or the middle slices of a volume (C, D, H, W)."""
    return draw_signal(data, width) if data.ndim == 2 else draw_volume(data, width)


def draw_given_map(data: NDArray[np.float32] | None, heat_map: AttributionMap, width: int) -> Image.Image:
    """Draw a map of a signal or a volume over it; by itself where the input is not known, or the map is of words."""
    data = data if data is not None and data.ndim == heat_map.values.ndim + 1 else None
    return (
        draw_signal_map(data, heat_map, width) if heat_map.values.ndim == 1 else draw_volume_map(data, heat_map, width)
    )


def given_remark(data: NDArray[np.float32]) -> str:
    """Return a sentence about channels that are not drawn; "" if all are."""
    return channel_remark(data) if data.ndim == 2 else volume_remark(data)
