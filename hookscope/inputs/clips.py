"""Frames of a video as pictures in a folder: one clip for networks that take clips."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL.Image import Image

from hookscope.inputs.find_files import AUDIO_SUFFIXES, TENSOR_SUFFIXES
from hookscope.regular_files import open_regular
from hookscope.results.inputs import Preprocessing


@dataclass(frozen=True, slots=True)
class Clip:
    """The pictures in a folder, which are the frames of one clip, in order."""

    folder: Path
    frames: tuple[Path, ...]

    @staticmethod
    def digest(frame_digests: Iterable[str]) -> str:
        """Return the SHA-256 of the clip from the digests of its frames."""
        return hashlib.sha256("".join(frame_digests).encode()).hexdigest()


Source = Path | Image | Clip
"""What an input is read from."""


def digest_of(source: Path | Clip) -> str:
    """Return the SHA-256 of a regular file or a clip; OSError if it cannot be read."""
    if isinstance(source, Clip):
        return Clip.digest(map(digest_of, source.frames))
    with open_regular(source) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def with_clips(source: str, files: Sequence[Path], preprocessing: Preprocessing) -> list[Source]:
    """Return the files of a source; if it is a folder and the network takes clips, each folder's pictures are a clip.

    A folder's only picture, and pictures named by a glob or by themselves, stay pictures: each is repeated as a clip of
    its own.
    """
    if preprocessing.kind != "video" or not Path(source).is_dir():
        return [*files]
    folders: defaultdict[Path, list[Path]] = defaultdict(list)
    for file in files:  # files of a folder may be listed before and after the files of a folder in it
        folders[file.parent].append(file)
    sources: list[Source] = []
    for folder, several in folders.items():
        frames = [file for file in several if file.suffix.lower() not in TENSOR_SUFFIXES | AUDIO_SUFFIXES]
        is_clip, in_clip = len(frames) > 1, {*frames}
        sources += [Clip(folder, tuple(frames))] if is_clip else []
        sources += [file for file in several if not is_clip or file not in in_clip]
    return sources
