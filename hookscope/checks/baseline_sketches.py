"""Sketches and moments of channels as a baseline keeps them: fewer or coarser numbers than were measured, as text."""

import base64
import hashlib
import struct
from functools import cache

import numpy as np
from numpy.typing import NDArray

SKETCH_WIDTH = 64
"""Numbers of a sketch that are kept: sums that are this far apart in that of `hookscope.statistics.sketch` are added.

The relative standard error of a distance is then sqrt(2/64)/2, 9%: twice the error for a quarter of the
bytes, and limits are a power of ten away from what they divide."""

CHANNEL_SUMS = 64
"""Numbers that are kept of a layer's channels, of more of them: of 2,048 channels four that moved are
found in 99 of 100 cases."""

# With more, sums of so many channels are too few to tell.
_MOST_FOUND = 4

# Share of what differs, in its norm, that the few channels may leave unexplained.
_UNEXPLAINED = 0.1
_ROUNDING = 1e-4  # what is left is that of float32


def sketch_text(sketch: NDArray[np.float64] | None) -> str | None:
    """Return a sketch, (256,), as a baseline keeps it: `SKETCH_WIDTH` sums, little-endian float32, in base64.

    None for none, and for sums that float32 does not hold.
    """
    if sketch is None:
        return None
    with np.errstate(over="ignore"):
        sums = sketch.reshape(-1, SKETCH_WIDTH).sum(0).astype("<f4") + np.float32(0)
    return base64.b64encode(sums.tobytes()).decode("ascii") if np.isfinite(sums).all() else None


def sketch_from_text(text: str) -> NDArray[np.float32]:
    """Return what `sketch_text` wrote, (`SKETCH_WIDTH`,); raises ValueError if it is something else."""
    content = base64.b64decode(text, validate=True)
    sums = np.frombuffer(content, "<f4") if len(content) == 4 * SKETCH_WIDTH else None
    if sums is None or not np.isfinite(sums).all():
        raise ValueError(f"not {SKETCH_WIDTH} finite numbers")
    return sums


def check_sketch(text: str | None, place: str) -> None:
    """Raise ValueError, with the place, for text that `sketch_from_text` does not read."""
    try:
        if text is not None:
            sketch_from_text(text)
    except ValueError as error:
        raise ValueError(f"{place} is damaged: {error}") from error


def channels_text(moments: NDArray[np.float64] | None) -> str | None:
    """Return mean and standard deviation of channels, (2, C), as a baseline keeps them, in base64.

    The two are added: the sum moves when a channel is shifted or scaled, or when its sign is turned. Of up to
    `CHANNEL_SUMS` channels each is kept, for more channels as many signed sums over all of them, from which a few that
    moved can be found. First comes C, little-endian uint32, then float32. None for none, and for what float32 does not
    hold.
    """
    if moments is None:
        return None
    edges = moments.sum(0)
    with np.errstate(all="ignore"):
        kept = (_signs(edges.size) @ edges if edges.size > CHANNEL_SUMS else edges).astype("<f4") + np.float32(0)
    if not np.isfinite(kept).all():
        return None
    return base64.b64encode(struct.pack("<I", edges.size) + kept.tobytes()).decode("ascii")


def channel_differences(before: str, now: str) -> NDArray[np.float64] | None:
    """Return by how much mean plus standard deviation of each channel differ, (C,), of two that `channels_text` wrote.

    Of more than `CHANNEL_SUMS` channels those few are found that explain nearly all that differs; None if more do.
    Raises ValueError for other text.
    """
    (count, was), (other, given) = (_channels_from_text(text) for text in (before, now))
    if count != other:
        return None
    difference: NDArray[np.float64] = given - was
    return difference if count <= CHANNEL_SUMS else _few(difference, _signs(count))


def _few(sums: NDArray[np.float64], signs: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return the few numbers, (C,), of which these are the sums; None if no few are.

    This is orthogonal matching pursuit: Tropp and Gilbert 2007.
    """
    found: NDArray[np.float64] = np.zeros(signs.shape[1])
    chosen: list[int] = []
    left, norm = sums, np.linalg.norm(sums)
    while len(chosen) < _MOST_FOUND and np.linalg.norm(left) > _ROUNDING * norm:
        chosen.append(int(np.abs(signs.T @ left).argmax()))
        found[chosen] = np.linalg.lstsq(signs[:, chosen], sums, rcond=None)[0]
        left = sums - signs @ found
    return found if np.linalg.norm(left) <= _UNEXPLAINED * norm else None


@cache
def _signs(count: int) -> NDArray[np.float64]:
    """Return signs that are the same everywhere, (`CHANNEL_SUMS`, C): the first bits of the SHA-256 of a number."""
    digests = b"".join(hashlib.sha256(str(channel).encode()).digest()[: CHANNEL_SUMS // 8] for channel in range(count))
    bits = np.unpackbits(np.frombuffer(digests, np.uint8)).reshape(count, CHANNEL_SUMS)
    return 1.0 - 2.0 * bits.T.astype(np.float64)


def _channels_from_text(text: str) -> tuple[int, NDArray[np.float64]]:
    content = base64.b64decode(text, validate=True)
    count = int.from_bytes(content[:4], "little")
    kept = np.frombuffer(content[4:], "<f4") if len(content) == 4 * (1 + min(count, CHANNEL_SUMS)) > 4 else None
    if kept is None or not np.isfinite(kept).all():
        raise ValueError("not as many finite numbers as channels")
    return count, kept.astype(np.float64)


def check_channels(text: str | None, place: str) -> None:
    """Raise ValueError, with the place, for text that `channels_text` does not write."""
    try:
        if text is not None:
            _channels_from_text(text)
    except ValueError as error:
        raise ValueError(f"{place} is damaged: {error}") from error
