"""Class names, from a file of names or from a checkpoint's other entries. All of it is unknown text."""

import json
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hookscope.checkpoints.fileformat import bounded_text, open_regular
from hookscope.errors import InputError
from hookscope.text import printable

Classes = str | Path | Sequence[str] | Mapping[int, str]
"""Class names: a file, names in order, or names by index."""

# Keys of training scripts, torchvision's ImageFolder, Hugging Face and OpenMMLab, the most reliable first.
_KEYS = (
    *("class_to_idx", "idx_to_class", "id2label", "label2id", "class_names", "classnames", "class_labels"),
    *("CLASSES", "classes", "categories"),
)
_FILES = frozenset(key.lower() for key in _KEYS) | {"labels", "index_to_name", "imagenet_classes", "imagenet_labels"}
_AROUND = ("meta", "config", "hyper_parameters", "hparams", "model_config", "extra")

# More classes than any classifier has, and a longer name; a file of that many names is smaller.
_MOST_CLASSES = 100_000
_LONGEST_NAME = 200
_MOST_BYTES = 2**24


def read_classes(path: Path) -> tuple[str, ...]:
    """Return the names of classes in a file, by index: a name on each line, or JSON.

    JSON is a list of names, names by index from 0 (each a text, or a list that ends in it, as Keras' ImageNet index has
    it), indices by name, or an object that holds one of these as `stored_classes` finds it. Raises InputError if the
    file cannot be read or holds no such thing.
    """
    text = bounded_text(path, "a file of class names", _MOST_BYTES)
    try:
        return _parsed(text, is_json=path.suffix.lower() == ".json")
    except (ValueError, RecursionError) as error:
        shown, reason = printable(str(path)), printable(str(error))
        raise InputError(f"{shown} does not name classes: {reason}. Give a name on each line, or JSON.") from error


def packed_classes(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the extra files of a TorchScript archive that name classes, with the names by index.

    `torch.jit.save(…, _extra_files=…)` stores texts beside the network. Only texts with a usual name, such as
    "labels.txt" and "index_to_name.json", and JSON objects are read.
    """
    names = {}
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            key = member.filename.partition("/extra/")[2]
            if not key or member.file_size > _MOST_BYTES:
                continue
            stem, _, suffix = key.rpartition("/")[2].lower().partition(".")
            with suppress(ValueError, RecursionError):  # not text, not JSON, or not names
                text = archive.read(member).decode("utf-8-sig")
                if stem in _FILES:
                    names[printable(key, _LONGEST_NAME)] = _parsed(text, is_json=suffix == "json")
                elif text.lstrip()[:1] == "{":
                    names[printable(key, _LONGEST_NAME)] = stored_classes(json.loads(text))[1]
    return names


def _parsed(text: str, *, is_json: bool) -> tuple[str, ...]:
    document: Any = None
    if is_json or text.lstrip()[:1] in ("{", "["):
        try:
            document = json.loads(text)
        except ValueError:
            if is_json:
                raise
    if isinstance(document, dict) and (names := stored_classes(document)[1]):
        return names
    return names_by_index(text.rstrip().split("\n") if document is None else document)


def stored_classes(content: object) -> tuple[str, tuple[str, ...]]:
    """Return where a checkpoint names its classes, "meta.CLASSES", and their names by index; ("", ()) if nowhere.

    Only the usual keys at the top, and in dicts of settings there, are read. Values that are not one name per index are
    passed over.
    """
    if not isinstance(content, dict):
        return "", ()
    around = [(f"{key}.", dict.get(content, key)) for key in _AROUND]
    meta = dict.get(content, "meta")
    if isinstance(meta, dict):  # MMEngine's
        around.append(("meta.dataset_meta.", dict.get(meta, "dataset_meta")))
    places = [("", content), *((prefix, entries) for prefix, entries in around if isinstance(entries, dict))]
    for prefix, entries in places:
        for key in _KEYS:
            classes = dict.get(entries, key)
            with suppress(ValueError):
                if isinstance(classes, dict | list | tuple) and (names := names_by_index(classes)):
                    return f"{prefix}{key}", names
    return "", ()


def names_by_index(classes: object) -> tuple[str, ...]:
    """Return class names in order or by index as a tuple; ValueError if there is not one name for each index."""
    if isinstance(classes, dict | list | tuple) and len(classes) > _MOST_CLASSES:
        raise ValueError(f"{len(classes):,} entries are over the limit of {_MOST_CLASSES:,} classes")
    if isinstance(classes, Mapping):
        pairs = [*dict.items(classes)] if isinstance(classes, dict) else [*classes.items()]
        if pairs and all(type(index) is int for _, index in pairs):
            pairs = [(index, name) for name, index in pairs]
        by_index = {_index(index): name for index, name in pairs}
        absent = next((index for index in range(len(pairs)) if index not in by_index), None)
        if absent is not None:
            raise ValueError(f"class {absent} of {len(pairs)} has no name")
        classes = [by_index[index] for index in range(len(pairs))]
    if not isinstance(classes, list | tuple) or not classes:
        raise ValueError("there are no names in it")
    names = [entry[-1] if isinstance(entry, list | tuple) and entry else entry for entry in classes]
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"class {index} has no name")
    return tuple(printable(name.strip(), _LONGEST_NAME) for name in names)


def _index(key: object) -> int:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10:
        return int(key)
    if type(key) is not int:
        raise ValueError(f"{printable(repr(key) if isinstance(key, str) else type(key).__name__, 80)} is no index")
    return key
