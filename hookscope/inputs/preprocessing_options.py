"""Put the user's options over the preprocessing that a network's weights ask for."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hookscope.errors import UsageError
from hookscope.inputs.find_files import AUDIO_SUFFIXES, TENSOR_SUFFIXES
from hookscope.options import Numbers, PictureOptions, Sizes
from hookscope.parameters import arg
from hookscope.results.inputs import Preprocessing
from hookscope.text import number_in


def preprocessing_from_options(base: Preprocessing, option: PictureOptions) -> Preprocessing:
    """Put the user's options over the preprocessing `base`; UsageError if one is malformed or cannot be right."""
    changes: dict[str, Any] = {}
    # Neither this nor the next option changes what the network was trained with, so the source stays.
    if option.batch_axis is not None:
        base = replace(base, batch_axis=_axis(option.batch_axis))
    if option.max_pixels is not None:
        base = replace(base, max_pixels=option.max_pixels)
    if option.resize is not None:
        sizes = _sizes(arg("resize"), option.resize, base.max_pixels)
        changes["resize"] = sizes[0] if sizes is not None and len(sizes) == 1 else sizes
        if base.crop is not None and sizes is not None:
            changes["crop"] = tuple(map(min, base.crop, sizes * 2 if len(sizes) == 1 else sizes))
    if option.crop is not None:
        sizes = _sizes(arg("crop"), option.crop, base.max_pixels)
        changes["crop"] = sizes * 2 if sizes is not None and len(sizes) == 1 else sizes
    if option.mean is not None:
        changes["mean"] = _values(arg("mean"), option.mean, base.channels)
    if option.std is not None:
        changes["std"] = _values(arg("std"), option.std, base.channels)
        if (np.array(changes["std"], np.float32) <= 0).any():
            shown = f"{arg('std')} {option.std!r}"
            raise UsageError(f"{shown} has a value that is not above 0. Give the standard deviation per channel.")
    return replace(base, **changes, source=f"options over {base.source}") if changes else base


def assumed_preparation(base: Preprocessing, inputs: Iterable[object], option: PictureOptions) -> tuple[str, ...]:
    """Return a warning about assumed preprocessing of pictures, unless weights or options tell how training did it.

    There is none for tensor files and recordings.
    """
    others = TENSOR_SUFFIXES | AUDIO_SUFFIXES
    no_pictures = all(isinstance(source, Path) and source.suffix.lower() in others for source in inputs)
    if base.source != Preprocessing().source or no_pictures:
        return ()
    crop = "x".join(map(str, base.crop or ()))
    size = f"resized to {base.resize} and cropped to {crop} ({arg('resize')}, {arg('crop')})"
    values = f"normalised as for ImageNet ({arg('mean')}, {arg('std')})"
    assumed = [size] * (not (option.resize or option.crop)) + [values] * (option.mean is None and option.std is None)
    doubt = "The weights do not record how pictures were preprocessed in training; here they are"
    return (f"{doubt} {' and '.join(assumed)}.",) if assumed else ()


def _axis(axis: str | int) -> int | Literal["auto", "none"]:
    wanted = str(axis).strip().lower()
    if wanted == "auto":
        return "auto"
    if wanted == "none":
        return "none"
    if re.fullmatch(r"-?[0-9]{1,3}", wanted):
        return int(wanted)
    raise UsageError(f"{arg('batch_axis')} {axis!r} is not an axis. Give 0, another axis, auto or none.")


def _sizes(option: str, size: Sizes, max_pixels: int) -> tuple[int, ...] | None:
    if isinstance(size, str):
        if size.strip().lower() == "none":
            return None
        is_right = re.fullmatch(r"\s*[0-9]{1,9}(x[0-9]{1,9})?\s*", size)
        sizes = tuple(map(int, size.split("x"))) if is_right else ()
    else:
        try:
            several: Sequence[int] = [size] if isinstance(size, int) else size
            sizes = tuple(map(index, several))
        except TypeError:
            sizes = ()
    if len(sizes) not in (1, 2) or isinstance(size, bool):
        raise UsageError(f"{option} {size!r} is not a size. Give pixels like 224, HEIGHTxWIDTH like 224x288, or none.")
    if min(sizes) < 1:
        raise UsageError(f"{option} {size!r} leaves no pixel. Give a size of 1 or more.")
    if sizes[0] * sizes[-1] > max_pixels:
        raise UsageError(f"{option} {size!r} is over the limit of {max_pixels} pixels. Give a smaller size.")
    return sizes


def _values(option: str, value: Numbers, channels: int) -> tuple[float, ...]:
    if isinstance(value, str) and value.strip().lower() == "none":
        return ()
    several = value.split(",") if isinstance(value, str) else value if isinstance(value, Sequence) else [value]
    try:
        values = tuple(number_in(number, float) for number in several)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{option} {value!r} is not a list of numbers. Give values like 0.5 or 0.5,0.5,0.5."
        ) from error
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(np.array(values, np.float32)).all()  # normalisation runs in float32
    if not is_finite:
        raise UsageError(f"{option} {value!r} has a value that is not a finite number. Give values like 0.5.")
    if len(values) == 1:
        return values * channels
    if len(values) != channels:
        raise UsageError(f"{option} {value!r} has {len(values)} values. Give 1 for all channels, or {channels}.")
    return values
