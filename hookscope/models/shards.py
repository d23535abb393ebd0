"""The files that weights are in: one, or the shards that an index names. No torch is needed."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from hookscope.checkpoints.fileformat import FileKind, file_kind, open_regular, path_beside, read_weight_map
from hookscope.errors import CheckpointError
from hookscope.parameters import arg
from hookscope.text import printable

# How Hugging Face's libraries name shards.
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?P<suffix>safetensors|bin)")

_MOST_SHARDS = 10_000  # looking for this many takes two seconds. The largest networks have a few hundred

RESAVE_REMEDY = "save `model.state_dict()` where it was made"
"""Advice for messages about a file that runs code, where it must not run."""


def trust_remedy() -> str:
    """Return what to do with a file that runs code, where it can be trusted."""
    return f"{RESAVE_REMEDY}, or give {arg('trust')} if you trust its author"


def files_of(path: Path) -> tuple[FileKind, dict[Path, FileKind]]:
    """Return what kind of file `path` is, and the kinds of the files that hold its tensors: itself, or its shards."""
    kind = file_kind(path)
    if kind not in ("safetensors index", "torch index"):
        return kind, {path: kind}
    kinds = {shard: file_kind(shard) for shard in read_index(path)}
    for shard, shard_kind in kinds.items():
        if shard_kind in ("safetensors index", "torch index"):
            named = printable(shard.name)
            raise CheckpointError(f"{printable(str(path))} names '{named}', which is an index itself; refused.")
    return kind, kinds


def shard_remark(path: Path) -> str:
    """Return a sentence about a file that is one shard of several by its name, "model-00001-of-00002.bin"; else ""."""
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match["count"]) < 2:
        return ""
    index = f"{match['stem']}.{match['suffix']}.index.json"
    there = "; give that" if path.with_name(index).is_file() else ", which is not next to it"
    position = f"{int(match['number'])} of {int(match['count'])}"
    return (
        f"{printable(path.name)} is file {position}, with some of the tensors; the index is {printable(index)}{there}."
    )


def read_index(path: Path) -> dict[Path, list[str]]:
    """Return the tensors' names by the file that holds them, shards in the order of their names.

    Shards lie beside the index; where both are links (Hugging Face's cache), beside what the index links to. Raises
    CheckpointError if the index names anything else or too many, a shard is missing, or a tensor is in two of them.
    """
    name = printable(str(path))
    with open_regular(path) as file:
        weight_map = read_weight_map(file, name)
    by_shard: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{name} lists no file for '{printable(tensor, 80)}'; download it again.")
        by_shard.setdefault(shard, []).append(tensor)
    if len(by_shard) > _MOST_SHARDS:
        raise CheckpointError(f"{name} names {len(by_shard)} files, over the limit of {_MOST_SHARDS}; refused.")
    shards = {path_beside(path, shard, name): tensors for shard, tensors in sorted(by_shard.items())}
    missing = [shard for shard in shards if not shard.exists()]
    if missing:
        raise CheckpointError(
            f"{name} lacks {len(missing)} of its {len(shards)} files, such as '{printable(missing[0].name, 80)}'; "
            "download them next to it."
        )
    return shards


def surplus_names(
    index: str, listed: Mapping[Path, list[str]], held: Mapping[Path, Iterable[str]]
) -> dict[Path, list[str]]:
    """Return the names of tensors that each shard holds and its index does not list.

    Messages call the index `index`. Raises CheckpointError if a shard lacks a tensor that the index lists, or holds a
    tensor that the index lists for another shard.
    """
    every = {name for names in listed.values() for name in names}
    surplus = {}
    for shard, names in listed.items():
        shown, wanted, there = printable(shard.name, 80), set(names), [*held[shard]]
        if missing := sorted(wanted - set(there)):
            raise CheckpointError(
                f"{shown} lacks '{printable(missing[0], 80)}', which {index} lists for it"
                f"{f' ({len(missing)} in all)' if missing[1:] else ''}; are both of the same download?"
            )
        surplus[shard] = [name for name in there if name not in wanted]
        if twice := [name for name in surplus[shard] if name in every]:
            raise CheckpointError(
                f"'{printable(twice[0], 80)}' is in {shown} and in another file of {index}; they contradict each other."
            )
    return surplus
