"""Put the user's options over the preprocessing that a network's weights ask for."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hookscope.errors import UsageError
from hookscope.inputs.find_files import AUDIO_SUFFIXES, TENSOR_SUFFIXES
from hookscope.results.inputs import Preprocessing


def preprocessing_from_options(
    base: Preprocessing,
    *,
    resize: str | None = None,
    crop: str | None = None,
    mean: str | None = None,
    std: str | None = None,
    max_pixels: int | None = None,
    batch_axis: str | None = None,
) -> Preprocessing:
    """Put the user's options over preprocessing that comes from elsewhere.

    Args:
        base: The preprocessing where no option is given.
        resize: "256" (shorter side), "256x320" (height x width), or "none".
        crop: "224" (square), "224x288" (height x width), or "none".
        mean: One value for all channels, one per channel ("0.485,0.456,0.406"), or "none".
        std: Like `mean`, above 0.
        max_pixels: Most pixels of a picture, before and after resizing.
        batch_axis: "0", another axis, "auto" or "none".

    Raises:
        UsageError: If an option is not of that form, or cannot be right.
    """
    changes: dict[str, Any] = {}
    # Neither this nor the next is part of what the network was trained with: the source stays.
    if batch_axis is not None:
        base = replace(base, batch_axis=_parse_axis(batch_axis))
    if max_pixels is not None:
        if max_pixels < 1:
            raise UsageError(f"--max-pixels {max_pixels} leaves no pixel. Give 1 or more.")
        base = replace(base, max_pixels=max_pixels)
    if resize is not None:
        sizes = _parse_sizes("--resize", resize, base.max_pixels)
        changes["resize"] = sizes[0] if sizes is not None and len(sizes) == 1 else sizes
        changes["crop"] = _within(base.crop, sizes)
    if crop is not None:
        sizes = _parse_sizes("--crop", crop, base.max_pixels)
        changes["crop"] = sizes * 2 if sizes is not None and len(sizes) == 1 else sizes
    if mean is not None:
        changes["mean"] = _parse_values("--mean", mean, base.channels)
    if std is not None:
        changes["std"] = _parse_values("--std", std, base.channels)
        if (np.array(changes["std"], np.float32) <= 0).any():
            raise UsageError(f"--std {std!r} has a value that is not above 0. Give the standard deviation per channel.")
    if not changes:
        return base
    return replace(base, **changes, source=f"options over {base.source}")


def _within(crop: tuple[int, int] | None, resized: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return a crop that nobody asked for no larger than the resized picture, which it would pad."""
    if crop is None or resized is None:
        return crop
    return tuple(map(min, crop, resized * 2 if len(resized) == 1 else resized))


def assumed_preparation(
    base: Preprocessing, inputs: Iterable[object], options: Mapping[str, object]
) -> tuple[str, ...]:
    """Warn how pictures are prepared where neither the weights nor an option has the preprocessing of training.

    Args:
        base: The preprocessing where no option is given.
        inputs: Paths and pictures; nothing is said of tensor files and recordings.
        options: As `preprocessing_from_options` takes them.

    Returns:
        A sentence, or none.
    """
    others = TENSOR_SUFFIXES | AUDIO_SUFFIXES
    no_pictures = all(isinstance(each, Path) and each.suffix.lower() in others for each in inputs)
    if base.source != Preprocessing().source or no_pictures:
        return ()
    size = f"resized to {base.resize} and cropped to {'x'.join(map(str, base.crop or ()))} (--resize, --crop)"
    assumed = [
        *([] if options.get("resize") or options.get("crop") else [size]),
        *([] if options.get("mean") or options.get("std") else ["normalised as for ImageNet (--mean, --std)"]),
    ]
    if not assumed:
        return ()
    return (
        f"The weights do not record how pictures were preprocessed in training; here they are {' and '.join(assumed)}.",
    )


def _parse_axis(text: str) -> int | Literal["auto", "none"]:
    wanted = text.strip().lower()
    if wanted == "auto":
        return "auto"
    if wanted == "none":
        return "none"
    if not re.fullmatch(r"-?[0-9]{1,3}", wanted):
        raise UsageError(f"--batch-axis {text!r} is not an axis. Give 0, another axis, auto or none.")
    return int(wanted)


def _parse_sizes(option: str, text: str, max_pixels: int) -> tuple[int, ...] | None:
    if text.strip().lower() == "none":
        return None
    if not re.fullmatch(r"\s*[0-9]{1,9}(x[0-9]{1,9})?\s*", text):
        raise UsageError(f"{option} {text!r} is not a size. Give pixels like 224, HEIGHTxWIDTH like 224x288, or none.")
    sizes = tuple(int(number) for number in text.split("x"))
    if min(sizes) < 1:
        raise UsageError(f"{option} {text!r} leaves no pixel. Give a size of 1 or more.")
    if sizes[0] * sizes[-1] > max_pixels:
        raise UsageError(f"{option} {text!r} is over the limit of {max_pixels} pixels. Give a smaller size.")
    return sizes


def _parse_values(option: str, text: str, channels: int) -> tuple[float, ...]:
    if text.strip().lower() == "none":
        return ()
    try:
        values = tuple(float(number) for number in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} {text!r} is not a list of numbers. Give values like 0.5 or 0.5,0.5,0.5.") from error
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(np.array(values, np.float32)).all()  # normalisation runs in float32
    if not is_finite:
        raise UsageError(f"{option} {text!r} has a value that is not a finite number. Give values like 0.5.")
    if len(values) == 1:
        return values * channels
    if len(values) != channels:
        raise UsageError(f"{option} {text!r} has {len(values)} values for {channels} channels. Give 1 or {channels}.")
    return values
