"""Encode values, and moments of channels, as text for a baseline: fewer or coarser numbers than were measured."""

import base64
import hashlib
import struct
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

MOST_VALUES = 1024
"""The most values per output: all `kept_values` of four inputs, or evenly spaced values of more inputs."""

CHANNEL_SUMS = 64
"""The number of sums that replace more channels: they find four moved channels of 2,048 in 99 of 100 cases."""

_MOST_FOUND = 4  # moved channels; the sums are too few to find more
_UNEXPLAINED = 0.1  # share of the difference's norm that the channels found may leave unexplained
_ROUNDING = 1e-4  # a smaller remainder is rounding of float32


def values_text(values: NDArray[np.floating] | None) -> str | None:
    """Return up to `MOST_VALUES` values of (N, K), at least one per input, as little-endian float32 in base64."""
    if values is None:
        return None
    inputs, count = values.shape
    step = max(min(-(-values.size // MOST_VALUES), count), 1)
    kept = values[(np.arange(count) + np.arange(inputs)[:, None]) % step == 0]
    with np.errstate(over="ignore"):  # too large for float32
        return base64.b64encode((kept.astype("<f4") + np.float32(0)).tobytes()).decode("ascii")


def values_from_text(text: str) -> NDArray[np.float64]:
    """Return the values in a text of `values_text`, (n,); raises ValueError for other text."""
    content = base64.b64decode(text, validate=True)
    if len(content) % 4:
        raise ValueError("not whole numbers of four bytes")
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return np.frombuffer(content, "<f4").astype(np.float64)


def check_text(read: Callable[[str], object], text: str | None, place: str) -> None:
    """Raise ValueError, with the place, for text that `read` rejects."""
    try:
        if text is not None:
            read(text)
    except ValueError as error:
        raise ValueError(f"{place} is damaged: {error}") from error


def values_apart(before: str, now: str) -> float | None:
    """Return the root mean square difference of two texts of `values_text`; None if their counts differ or are 0.

    The difference is infinite if NaN or Inf are in different places.
    """
    was, current = values_from_text(before), values_from_text(now)
    if was.size != current.size or not was.size:
        return None
    with np.errstate(all="ignore"):
        differences = np.where((was == current) | (np.isnan(was) & np.isnan(current)), 0.0, was - current)
    apart = float(np.linalg.norm(differences) / np.sqrt(was.size))
    return apart if np.isfinite(apart) else np.inf


def root_mean_square(text: str) -> float:
    """Return the root mean square of the finite values in a text of `values_text`; 0 if there are none."""
    values = values_from_text(text)
    finite = values[np.isfinite(values)]
    return float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0


def channels_text(moments: NDArray[np.float64] | None) -> str | None:
    """Return a text in base64 for mean and standard deviation of channels, (2, C).

    The two are added: the sum moves if a channel is shifted or scaled, or if its sign is turned. Up to `CHANNEL_SUMS`
    sums are kept; more are replaced by that many signed sums over all channels, which show a few moved channels. C
    comes first, as little-endian uint32, then float32. None without moments, and if float32 overflows.
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
    """Return the change of mean plus standard deviation of each channel, (C,), between two texts of `channels_text`.

    With more than `CHANNEL_SUMS` channels, it finds the few that explain nearly all of the change; None if more moved.
    Raises ValueError for other text.
    """
    (count, was), (other, current) = (channels_from_text(text) for text in (before, now))
    if count != other:
        return None
    difference: NDArray[np.float64] = current - was
    return difference if count <= CHANNEL_SUMS else _few_moved(difference, _signs(count))


def channels_apart(before: str, now: str) -> float:
    """Return the root mean square difference of the channels in two texts of `channels_text`.

    If a channel's values differ by d (root mean square), its mean and standard deviation differ by m and s, with
    m^2 + s^2 <= d^2, and their sum by at most sqrt(2) d. So the result is at most sqrt(2) times the difference of all
    values. For more than `CHANNEL_SUMS` channels the signed sums estimate it, with a standard error of 9%.
    """
    (count, was), (other, current) = (channels_from_text(text) for text in (before, now))
    if count != other:
        return 0.0
    over = 1 if count <= CHANNEL_SUMS else count
    return float(np.sqrt(np.mean(np.square(current - was)) / over))


def _few_moved(sums: NDArray[np.float64], signs: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return numbers, (C,), with these signed sums, all but a few of them 0; None if no such numbers are found.

    The method is orthogonal matching pursuit: Tropp and Gilbert 2007.
    """
    solution: NDArray[np.float64] = np.zeros(signs.shape[1])
    chosen: list[int] = []
    left, norm = sums, np.linalg.norm(sums)
    while len(chosen) < _MOST_FOUND and np.linalg.norm(left) > _ROUNDING * norm:
        chosen.append(int(np.abs(signs.T @ left).argmax()))
        solution[chosen] = np.linalg.lstsq(signs[:, chosen], sums, rcond=None)[0]
        left = sums - signs @ solution
    return solution if np.linalg.norm(left) <= _UNEXPLAINED * norm else None


@cache
def _signs(count: int) -> NDArray[np.float64]:
    """Return reproducible signs, (`CHANNEL_SUMS`, C): the first bits of the SHA-256 of each channel's index."""
    digests = b"".join(hashlib.sha256(str(channel).encode()).digest()[: CHANNEL_SUMS // 8] for channel in range(count))
    bits = np.unpackbits(np.frombuffer(digests, np.uint8)).reshape(count, CHANNEL_SUMS)
    return 1.0 - 2.0 * bits.T.astype(np.float64)


def channels_from_text(text: str) -> tuple[int, NDArray[np.float64]]:
    """Return the number of channels, and the kept numbers; raises ValueError for other text."""
    content = base64.b64decode(text, validate=True)
    count = int.from_bytes(content[:4], "little")
    kept = np.frombuffer(content[4:], "<f4") if len(content) == 4 * (1 + min(count, CHANNEL_SUMS)) > 4 else None
    if kept is None or not np.isfinite(kept).all():
        raise ValueError("not as many finite numbers as channels")
    return count, kept.astype(np.float64)
