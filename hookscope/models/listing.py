"""The listing of a weights file, as a worker process returns it in JSON. No torch is needed."""

from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from hookscope.checkpoints.deepspeed import model_parallel_remark, part_of_zero
from hookscope.checkpoints.fileformat import (
    FileKind,
    distributed_files,
    open_archive,
    open_regular,
    safetensors_metadata,
)
from hookscope.checkpoints.lit_ema import dotless_copy
from hookscope.checkpoints.nested import TensorLike, tensors_in
from hookscope.checkpoints.plain import PlainTensor
from hookscope.checkpoints.stand_ins import ModuleState, kind_of
from hookscope.checkpoints.weight_sets import Part, parts_of
from hookscope.models.array_values import Values
from hookscope.models.network_table import state_shapes
from hookscope.models.tied import Layout, tied_to
from hookscope.parameters import arg
from hookscope.results.contents import StoredTensor
from hookscope.text import counted, printable, shape_text

# Keys that training libraries leave at the top of their checkpoints, and the names of the libraries.
_SIGNATURES = {
    "pytorch-lightning_version": "Lightning",
    "transformers_version": "transformers",
    "ds_version": "DeepSpeed",
    "mmengine_version": "MMEngine",
    "mmcv_version": "MMCV",
}

_LONGEST_VALUE = 80  # a text that fits a line


class TensorFacts(NamedTuple):
    """A listing's facts about a tensor, apart from its name; `values` is None without data."""

    shape: Sequence[int]
    dtype: str
    byte_count: int
    layout: Layout | None
    values: Values | None


def file_listing(
    path: Path,
    kind: FileKind,
    content: object,
    key: str | None,
    facts_of: Callable[[list[tuple[str, TensorLike]]], tuple[list[TensorFacts], list[str]]],
) -> dict[str, Any]:
    """Return the listing of a file, as JSON can hold it; `facts_of` takes tensors with names, and may add warnings.

    Raises CheckpointError if there are no tensors, NothingMatchedError if there is nothing at `key`.
    """
    parts = parts_of(content, printable(str(path)), key)
    facts, warnings = facts_of([tensor for part in parts for tensor in part.tensors])
    places = [(part.key, name) for part in parts for name, _ in part.tensors]
    owners = tied_to(places, [tensor.layout for tensor in facts])
    waiting = iter(
        {
            "key": name,
            "shape": list(tensor.shape),
            "dtype": tensor.dtype,
            "byte_count": tensor.byte_count,
            "tied_to": owner,
            **({"nan_count": None, "inf_count": None} if tensor.values is None else tensor.values._asdict()),
        }
        for (_, name), tensor, owner in zip(places, facts, owners, strict=True)
    )
    name, part, parallel = printable(path.name), part_of_zero(content), model_parallel_remark(content)
    of_processes = [f"{name} {part}."] * bool(part) + [f"{name}: {parallel}."] * bool(parallel)
    metadata = safetensors_metadata(path) if kind == "safetensors" else {}
    return {
        "parts": [
            {
                "key": part.key,
                "is_weights": part.is_weights,
                "names": list(part.state) or [name for name, _ in part.tensors],
                "shapes": _own_shapes(part),
                "tensors": [next(waiting) for _ in part.tensors],
            }
            for part in parts
        ],
        "producer": _producer(path, kind, content),
        "entries": [] if any(part.is_weights and not part.key for part in parts) else _entries(content),
        "metadata": {str(name): str(value) for name, value in metadata.items()},
        "warnings": [*warnings, *of_processes, *_copy_remarks(path, parts)],
    }


def _own_shapes(part: Part) -> dict[str, tuple[int, ...]]:
    shapes = state_shapes(part.state)
    copy = dotless_copy(shapes)
    return copy.left_out_of(shapes) if copy else shapes


def _copy_remarks(path: Path, parts: Sequence[Part]) -> list[str]:
    remarks = []
    for part in parts:
        if copy := dotless_copy(part.state):
            place = printable(f"{part.key}.{copy.prefix}".strip("."), 80)
            whose = f"those of '{printable(copy.around, 80)}'" if copy.around else "the others"
            remarks.append(
                f"{printable(path.name)}: {counted(len(copy.names), 'tensor')} of '{place}' are averages of "
                f"{whose}, under their names without dots (LitEma); {arg('key')} {place} takes them."
            )
    return remarks


def shared_prefix(is_weights: bool, rows: Sequence[StoredTensor]) -> str:
    """Return the dotted parts that all names of weights start with; "" for none, and for a single name."""
    ordered = sorted(row.key.split(".") for row in rows)
    ends = zip(ordered[0], ordered[-1], strict=False) if is_weights and len(rows) > 1 else ()
    return ".".join(first for first, _ in takewhile(lambda pair: pair[0] == pair[1], ends))


def _entries(content: object) -> list[tuple[str, str, str]]:
    if not isinstance(content, dict):
        return []
    return [
        (
            printable(str(key), _LONGEST_VALUE),
            value.kind if isinstance(value, PlainTensor) else kind_of(value),
            _summary(value),
        )
        for key, value in dict.items(content)
        if isinstance(key, str | int)
    ]


def _summary(value: object) -> str:
    if isinstance(value, TensorLike):
        return f"{shape_text(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, dict | list | tuple):
        tensor_count = sum(1 for _ in tensors_in(value))
        return f"{counted(len(value), 'entry', 'entries')}, {counted(tensor_count, 'tensor')}"
    if isinstance(value, str | int | float | bool | None):
        return printable(str(value), _LONGEST_VALUE)
    return ""


def _producer(path: Path, kind: FileKind, content: object) -> str:
    top: dict[Any, Any] = content if isinstance(content, dict) else {}
    meta = dict.get(top, "meta")
    metadata = {**(meta if isinstance(meta, dict) else {}), **top}
    names = [
        f"{name} {printable(metadata[key], 40)}"
        for key, name in _SIGNATURES.items()
        if isinstance(metadata.get(key), str)
    ]
    if kind == "torch":
        with open_regular(path) as file, open_archive(file, printable(str(path))) as archive:
            versions = [member for member in archive.namelist() if member.endswith(("/version", "/.data/version"))]
            version = archive.read(versions[0])[:20].decode(errors="replace").strip() if versions else "?"
        names.insert(0, f"torch.save, zip format {printable(version)}")
    elif kind == "legacy torch":
        names.insert(0, "torch.save before torch 1.6, or its old format")
    elif kind == "distributed":
        names.insert(0, f"torch.distributed.checkpoint, {counted(len(distributed_files(path)), 'file')}")
    if isinstance(content, ModuleState):
        names.append(f"a pickled {printable(content.class_name, _LONGEST_VALUE)}, whose code was not run")
    return ", ".join(names)
