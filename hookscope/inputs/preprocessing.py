"""Turn a decoded picture into a network's input: resize, crop, scale and normalise it as torchvision's presets do.

`thumbnails` goes back from inputs to pictures of what the network saw.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from hookscope.errors import ImageError, UsageError
from hookscope.parameters import arg
from hookscope.results.inputs import Preprocessing, Region
from hookscope.text import counted

_RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def prepare_picture(
    picture: Image.Image, white: float, preprocessing: Preprocessing, name: str, steps: list[str]
) -> tuple[torch.Tensor, Region]:
    """Resize, crop, scale to 0-1 and normalise an upright picture in Pillow's mode "RGB", "L" or "F".

    `white` is the value that means white; `steps` gets a sentence for each thing done. Returns float32, (C, H, W) or
    (C, T, H, W) for a clip, and the region it covers. Raises ImageError if the picture is too small or gets too large.
    """
    pixels = _resize(picture, white, preprocessing, name, steps)  # (C, H, W), 0 to white
    whole = Region(0, 0, picture.height, picture.width, picture.height, picture.width)
    resized = pixels.shape[1:]
    top = left = 0
    if preprocessing.channels == 3 and pixels.shape[0] == 1:
        pixels = pixels.expand(3, -1, -1)
        steps.append("greyscale repeated in 3 channels")
    if preprocessing.crop is not None:
        pixels, top, left = _centre_crop(pixels, preprocessing.crop, steps)
    pixels, further_top, further_left = _crop_to_multiple(pixels, preprocessing.multiple, name, steps)
    region = _covered(whole, resized, (top + further_top, left + further_left), pixels.shape[1:])
    scaled = pixels.to(torch.float32, copy=True, memory_format=torch.contiguous_format).div_(white)
    _normalise_(scaled, preprocessing, steps)
    if preprocessing.kind == "video":
        if preprocessing.frames > 1:
            steps.append(f"repeated in {preprocessing.frames} frames")
        scaled = scaled.unsqueeze(1).repeat(1, preprocessing.frames, 1, 1)  # (C, T, H, W)
    return scaled, region


def _covered(whole: Region, resized: Sequence[int], corner: tuple[int, int], cropped: Sequence[int]) -> Region:
    """Return the part of the whole picture that a crop of the resized one covers; `corner` is its top and left."""
    # Pillow and torch map outer edges to outer edges. Multiplying before dividing keeps the outer edges exact.
    top, bottom = (whole.height * edge / resized[0] for edge in (corner[0], corner[0] + cropped[0]))
    left, right = (whole.width * edge / resized[1] for edge in (corner[1], corner[1] + cropped[1]))
    return replace(whole, top=top, left=left, bottom=bottom, right=right)


def _resize(
    picture: Image.Image, white: float, preprocessing: Preprocessing, name: str, steps: list[str]
) -> torch.Tensor:
    width, height = picture.size
    new_height, new_width = _target_size(height, width, preprocessing.resize)
    if (new_height, new_width) == (height, width):
        return _to_tensor(picture)
    if new_height * new_width > preprocessing.max_pixels:
        raise ImageError(
            f"Cannot resize {name} from {height}x{width} to {new_height}x{new_width} (height x width): over the "
            f"limit of {preprocessing.max_pixels} pixels. Crop it first, or give {arg('resize')} HEIGHTxWIDTH."
        )
    antialiased, mode = preprocessing.kind != "video", preprocessing.interpolation
    steps.append(
        f"resized from {height}x{width} to {new_height}x{new_width} (height x width), {mode}, "
        f"{'antialiased' if antialiased else 'not antialiased'}"
    )
    if antialiased:
        pixels = _to_tensor(picture.resize((new_width, new_height), _RESAMPLING[mode]))
    else:
        before, target = _to_tensor(picture), (new_height, new_width)
        wide = before[None].to(torch.float32)
        pixels = torch.nn.functional.interpolate(wide, target, mode=mode, align_corners=False)[0]
        if before.dtype == torch.uint8:
            pixels = pixels.clamp(0, white).round().to(torch.uint8)
    # Bicubic interpolation overshoots; Pillow clips 8-bit pictures itself.
    return pixels.clamp(0, white) if pixels.is_floating_point() else pixels


def _target_size(height: int, width: int, resize: int | tuple[int, int] | None) -> tuple[int, int]:
    if resize is None:
        return height, width
    if isinstance(resize, tuple):
        return resize
    # The longer side is rounded down, as torchvision does it.
    return (resize, int(resize * width / height)) if height <= width else (int(resize * height / width), resize)


def _to_tensor(picture: Image.Image) -> torch.Tensor:
    pixels = torch.from_numpy(np.array(picture))  # (H, W) or (H, W, C)
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def _centre_crop(pixels: torch.Tensor, crop: tuple[int, int], steps: list[str]) -> tuple[torch.Tensor, int, int]:
    height, width = pixels.shape[1:]
    crop_height, crop_width = crop
    missing_height, missing_width = max(crop_height - height, 0), max(crop_width - width, 0)
    if (height, width) == crop:
        return pixels, 0, 0
    padded = ""
    above, before = missing_height // 2, missing_width // 2
    if missing_height or missing_width:
        pixels = torch.nn.functional.pad(pixels, (before, missing_width - before, above, missing_height - above))
        padded = f", padded with black from {height}x{width}"
    steps.append(f"centre crop {crop_height}x{crop_width} (height x width){padded}")
    # Halves are rounded to even, as torchvision does it.
    top, left = round((pixels.shape[1] - crop_height) / 2), round((pixels.shape[2] - crop_width) / 2)
    return pixels[:, top : top + crop_height, left : left + crop_width], top - above, left - before


def _crop_to_multiple(
    pixels: torch.Tensor, multiple: int, name: str, steps: list[str]
) -> tuple[torch.Tensor, int, int]:
    height, width = pixels.shape[1:]
    new_height, new_width = height - height % multiple, width - width % multiple
    if not new_height or not new_width:
        raise ImageError(
            f"Cannot use {name}: {height}x{width} pixels (height x width), and the network needs at least "
            f"{multiple}x{multiple}. Give a larger picture, or {arg('resize')}."
        )
    if (new_height, new_width) == (height, width):
        return pixels, 0, 0
    steps.append(f"centre crop {new_height}x{new_width} (height x width), to multiples of {multiple}")
    top, left = (height - new_height) // 2, (width - new_width) // 2
    return pixels[:, top : top + new_height, left : left + new_width], top, left


def _normalise_(scaled: torch.Tensor, preprocessing: Preprocessing, steps: list[str]) -> None:
    # In place: a picture at the limit takes 1 GB here.
    mean, std = preprocessing.mean, preprocessing.std
    for factors, apply in ((mean, scaled.sub_), (std, scaled.div_)):
        if factors:
            apply(torch.tensor(factors, dtype=torch.float32)[:, None, None])
    if mean or std:
        means, stds = (", ".join(f"{value:g}" for value in values) for values in (mean or (0,), std or (1,)))
        steps.append(f"normalised by mean {means}, std {stds}")


def check_suits_pictures(preprocessing: Preprocessing) -> None:
    """Raise UsageError unless the network takes 1 or 3 channels, with as many means and deviations or none."""
    channels = preprocessing.channels
    if channels not in {1, 3}:
        raise UsageError(f"The network takes {channels} channels; a picture has 1 or 3. Give tensor files instead.")
    for name, values in (("mean", preprocessing.mean), ("std", preprocessing.std)):
        if len(values) not in {0, channels}:
            held = f"Preprocessing from {preprocessing.source} has {counted(len(values), f'{name} value')}"
            raise UsageError(f"{held} for {channels} channels. Give {arg(name)}.")


def thumbnails(values: NDArray[np.floating], preprocessing: Preprocessing) -> list[NDArray[np.uint8]]:
    """Return the pictures in a batch, (H, W, 3) or (H, W), resized and cropped as the network got them.

    Normalisation is undone: value x std + mean, which gives 0 to 1 again; values outside are clipped, and values that
    are not finite are black. For a clip the first frame is shown. There are none if `values`, (N, C, H, W) or
    (N, C, T, H, W) as handed to the network, are no pictures of 1 or 3 channels.
    """
    if values.ndim == 5:
        values = values[:, :, 0]
    if values.ndim != 4 or values.shape[1] not in {1, 3} or 0 in values.shape:
        return []
    channels = np.asarray(values, np.float32)
    for factors, undo in ((preprocessing.std, np.multiply), (preprocessing.mean, np.add)):
        if len(factors) == values.shape[1]:
            channels = undo(channels, np.array(factors, np.float32)[:, None, None])
    shades = np.clip(np.nan_to_num(channels, nan=0.0, posinf=0.0, neginf=0.0), 0, 1) * 255 + 0.5
    pixels = shades.astype(np.uint8).transpose(0, 2, 3, 1)  # (N, H, W, C)
    return [picture[:, :, 0] if picture.shape[2] == 1 else picture for picture in pixels]
