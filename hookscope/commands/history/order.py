"""The order of a series of files: by the epoch or the step that they store, else by their names."""

import os
from collections.abc import Mapping, Sequence


def order_of(counters: Sequence[Mapping[str, int] | None]) -> tuple[list[int], str]:
    """Return positions in the order of training, and what that goes by, in words.

    Args:
        counters: For each file in natural order of names, its numbers of epochs and steps by name, the preferred ones
            first; None for a file that could not be read, which stays behind the file before it.
    """
    stored = [counter for counter in counters if counter is not None]
    shared = [name for name in (stored[0] if stored else {}) if all(name in counts for counts in stored)]
    distinct = {name: len({counts[name] for counts in stored}) for name in shared}
    chosen = max(shared, key=lambda name: distinct[name], default="")  # of several, the first
    if not chosen or distinct[chosen] < 2:
        return [*range(len(counters))], "their names, as no epoch or step is stored in each"
    places: list[int] = []
    for counter in counters:
        places.append(counter[chosen] if counter is not None else places[-1] if places else -1)
    return sorted(range(len(counters)), key=lambda at: places[at]), f"the '{chosen}' that each file stores"


def labels_of(names: Sequence[str]) -> list[str]:
    """Return the files' names without the folders that all of them share."""
    folders = {os.path.dirname(name) for name in names}  # noqa: PTH120 - keeps "." and ".." as given
    if len(folders) == 1:
        return [os.path.basename(name) or name for name in names]  # noqa: PTH119 - likewise
    absolute = [os.path.abspath(name) for name in names]  # noqa: PTH100 - links stay as they are
    try:
        shared = os.path.commonpath(absolute)
    except ValueError:  # on different drives
        return [*names]
    return [os.path.relpath(path, shared) for path in absolute]
