"""Find the files that folders and globs stand for."""

import re
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

from hookscope.checkpoints.fileformat import nearest_file
from hookscope.checkpoints.folders import HEIF_SUFFIXES, PICTURE_SUFFIXES, files_of
from hookscope.errors import ImageError, NothingMatchedError
from hookscope.inputs.pictures import looks_like_picture
from hookscope.parameters import arg
from hookscope.text import counted, one_line, printable

TENSOR_SUFFIXES = frozenset({".npy", ".pt", ".pth", ".safetensors"})

AUDIO_SUFFIXES = frozenset({".wav", ".flac"})

_NUMBERS = re.compile(r"[-+\d.eE ]+(?:[,x][-+\d.eE ]+)+")  # numbers or a shape, given in place of a file
_NAMED_KINDS = 5  # kinds that a sentence names
MAX_FILE_BYTES = 2 * 1024**3  # three times the largest picture that MAX_PIXELS allows (16-bit RGBA, 0.7 GB)

DEMO_PICTURE = Path(__file__).with_name("cat.jpg")
"""The input of the model "demo" if none is given: Chelsea the cat, CC0, by Stefan van der Walt."""


def find_inputs(sources: Sequence[str], on_skip: Callable[[str], None] | None = None) -> list[Path]:
    """Expand files, folders and globs into the files to read, in the order of `sources`, as `files_of` does.

    A folder stands for the image, tensor and audio files in it and below it: by their suffixes, or by the content of a
    file without a suffix. HEIC counts if a plugin of Pillow reads it. A name that does not exist is kept, so that
    reading it fails and the others are finished. `on_skip` gets a sentence for each source that holds other files too.
    Raises NothingMatchedError if a folder holds no image, tensor or recording, or a glob matches nothing.
    """
    reads_heif = "HEIF" in Image.OPEN or find_spec("pillow_heif") is not None
    suffixes = PICTURE_SUFFIXES | TENSOR_SUFFIXES | AUDIO_SUFFIXES | (HEIF_SUFFIXES if reads_heif else frozenset())
    paths: list[Path] = []
    for source in sources:
        skipped: list[Path] = []
        paths += _expand(source, suffixes, skipped)
        if skipped and on_skip is not None:
            on_skip(_skipped_text(source, skipped))
    return paths


def _expand(source: str, suffixes: frozenset[str], skipped: list[Path]) -> list[Path]:
    def also(path: Path) -> bool:
        if not path.suffix and looks_like_picture(path):
            return True
        skipped.append(path)
        return False

    files = files_of(source, suffixes, also)
    if files is None:  # a file, or a missing one: reading it reports what is wrong
        return [Path(source)]
    if not files:
        endings = ", ".join(sorted(suffixes))
        held = f" {_skipped_text(source, skipped)}" if skipped else ""
        raise NothingMatchedError(f"No image or tensor in folder {source!r}.{held} Looked for {endings}.")
    return files


def _skipped_text(source: str, skipped: Sequence[Path]) -> str:
    """Return "photos: 4 files skipped: 3 .txt, 1 without a suffix."."""
    counts = Counter(path.suffix.lower() for path in skipped)
    kinds = sorted(counts.items(), key=lambda kind: (-kind[1], kind[0]))
    named = [f"{count} {printable(suffix, 20) or 'without a suffix'}" for suffix, count in kinds[:_NAMED_KINDS]]
    if rest := sum(count for _, count in kinds[_NAMED_KINDS:]):
        named.append(f"{rest} of other kinds")
    hint = " HEIC needs pillow-heif." if any(suffix in HEIF_SUFFIXES for suffix, _ in kinds) else ""
    return f"{printable(source)}: {counted(len(skipped), 'file')} skipped: {', '.join(named)}.{hint}"


def check_input_file(path: Path, name: str, *, arguments: bool = True) -> None:
    """Raise ImageError, with `name` for people, unless a file is there, is a regular one and is not too large.

    The error names the options for `arguments` where the path looks like numbers.
    """
    # Before opening: opening a pipe would wait for a writer, and reading a device may never end.
    try:
        status = path.stat()
    except FileNotFoundError as error:
        reason = "it is a link to a file that does not exist" if path.is_symlink() else "no such file"
        by_name = f"{arg('input')} NAME=1,2,3, and a shape of noise is {arg('input_shape')} 1,3,224,224"
        are_numbers = arguments and _NUMBERS.fullmatch(str(path))
        remedy = f"Numbers go by name, {by_name}." if are_numbers else f"Check the path.{nearest_file(path)}"
        raise ImageError(f"Cannot read {name}: {reason}. {remedy}") from error
    except (OSError, ValueError) as error:  # a ValueError for a NUL in the name
        reason = one_line(getattr(error, "strerror", None) or error)
        raise ImageError(f"Cannot read {name}: {reason}. Check the path.") from error
    if stat.S_ISDIR(status.st_mode):
        raise ImageError(f"Cannot read {name}: it is a folder whose files cannot be listed. Name the files in it.")
    if not stat.S_ISREG(status.st_mode):
        raise ImageError(f"Cannot read {name}: it is a pipe, socket or device. Save it to a file first.")
    if status.st_size > MAX_FILE_BYTES:
        raise ImageError(f"Cannot read {name}: {status.st_size} bytes, over the limit of {MAX_FILE_BYTES}. Split it.")
