"""Write the folders of distributed checkpoints: by torch itself, or piece by piece out of its own dataclasses."""

import io
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)


def save(content: Mapping[str, Any], folder: Path) -> Path:
    """Write a folder in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        torch.distributed.checkpoint.save(dict(content), checkpoint_id=folder, no_dist=True)
    return folder


def torch_reads(folder: Path) -> Any:
    """What torch's own converter makes of a folder."""
    converted = folder.with_suffix(".converted")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, converted)
    content = torch.load(converted, weights_only=False)
    converted.unlink()
    return content


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def size(*sizes: int) -> torch.Size:
    return torch.Size(sizes)


@dataclass
class Folder:
    """A checkpoint in the making: what `.metadata` holds, and the files beside it."""

    metadata: Metadata = field(default_factory=lambda: Metadata({}, {}, {}, StorageMeta(Path("/x"), "id"), "1.0.0"))
    files: dict[str, bytes] = field(default_factory=dict)

    def place(self, value: object, file: str = "__0_0.distcp") -> _StorageInfo:
        """Append a value to a file."""
        content = value if isinstance(value, bytes) else saved(value)
        begin = len(self.files.get(file, b""))
        self.files[file] = self.files.get(file, b"") + content
        return _StorageInfo(file, begin, len(content))

    def object(self, name: str, value: object, *, keys: tuple[str | int, ...] | None = None) -> None:
        self.metadata.state_dict_metadata[name] = BytesStorageMetadata()
        self.metadata.storage_data[MetadataIndex(name)] = self.place(value)
        self.metadata.planner_data[name] = keys or (name,)

    def tensor(
        self,
        name: str,
        tensor: torch.Tensor,
        *chunks: tuple[tuple[int, ...], tuple[int, ...]],
        keys: tuple[str | int, ...] | None = None,
    ) -> None:
        """Add a tensor, whole or in chunks of offsets and sizes, each in a file of its own."""
        parts = chunks or ((tuple(0 for _ in tensor.shape), tuple(tensor.shape)),)
        described = [ChunkStorageMetadata(size(*offsets), size(*sizes)) for offsets, sizes in parts]
        self.metadata.state_dict_metadata[name] = TensorStorageMetadata(
            TensorProperties(tensor.dtype), tensor.shape, described
        )
        for rank, (offsets, sizes) in enumerate(parts):
            region = tuple(slice(at, at + count) for at, count in zip(offsets, sizes, strict=True))
            self.metadata.storage_data[MetadataIndex(name, offsets)] = self.place(
                tensor[region].clone(), f"__{rank}_0.distcp"
            )
        self.metadata.planner_data[name] = keys or (name,)

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        (folder / ".metadata").write_bytes(pickle.dumps(self.metadata))
        return folder
