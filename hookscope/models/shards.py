"""Read the index of weights that are split into several files, and find those."""

from collections.abc import Container, Iterable
from pathlib import Path

from hookscope.checkpoints.fileformat import open_regular, read_weight_map
from hookscope.errors import CheckpointError
from hookscope.text import printable


def read_index(path: Path) -> dict[Path, list[str]]:
    """Return the tensors' names by the file that holds them, shards in the order of their names.

    Shards lie beside the index; where both are links (Hugging Face's cache), beside what the index links to.

    Raises:
        CheckpointError: If the index names anything else, a shard is missing, or a tensor is in two of them.
    """
    name = printable(str(path))
    with open_regular(path) as file:
        weight_map = read_weight_map(file, name)
    by_shard: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{name} names no file for '{printable(tensor, 80)}'; download it again.")
        by_shard.setdefault(shard, []).append(tensor)
    shards = {_beside(path, shard, name): tensors for shard, tensors in sorted(by_shard.items())}
    missing = [shard for shard in shards if not shard.exists()]
    if missing:
        raise CheckpointError(
            f"{name} lacks {len(missing)} of its {len(shards)} files, such as '{printable(missing[0].name, 80)}'; "
            "download them beside it."
        )
    return shards


def _beside(index: Path, shard: str, name: str) -> Path:
    """Return where a shard lies.

    Raises:
        CheckpointError: If it is not, or leads out of, the folder of its index.
    """
    plain = shard not in ("", ".", "..") and shard.isprintable() and not {"/", "\\"} & set(shard)
    if not plain:
        raise CheckpointError(f"{name} names '{printable(shard, 80)}', which is not a file beside it; refused.")
    path = index.with_name(shard)
    try:
        folder = path.resolve().parent
        folders = {index.parent.resolve(), index.resolve().parent}
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{name} names '{printable(shard, 80)}', a link that leads nowhere; refused.") from error
    if folder not in folders:
        raise CheckpointError(f"{name} names '{printable(shard, 80)}', a link out of its folder; refused.")
    return path


def check_names(index: str, shard: Path, listed: list[str], held: Iterable[str], others: Container[str]) -> list[str]:
    """Return the names of tensors in a shard that the index does not know of.

    Args:
        index: What to call the index in messages.
        shard: The shard's path.
        listed: Names that the index says it holds.
        held: Names that it holds.
        others: Names that the index says other shards hold.

    Raises:
        CheckpointError: If it lacks one of its own, or holds one of another shard's.
    """
    shown = printable(shard.name, 80)
    held = list(held)
    if missing := sorted(set(listed) - set(held)):
        raise CheckpointError(
            f"{shown} lacks '{printable(missing[0], 80)}', which {index} says it holds"
            f"{f' ({len(missing)} in all)' if missing[1:] else ''}; are both of the same download?"
        )
    surplus = [name for name in held if name not in set(listed)]
    if twice := [name for name in surplus if name in others]:
        raise CheckpointError(
            f"'{printable(twice[0], 80)}' is in {shown} and in another file of {index}; they contradict each other."
        )
    return surplus
