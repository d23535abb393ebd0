"""Keep the tensors of a run, for `--save-tensors`."""

from collections.abc import Callable

import torch
from torch import Tensor


class TensorCollector:
    """Copies tensors to the CPU, batch by batch; those of a batch that the model raised on are dropped."""

    def __init__(self, total: int, on_progress: Callable[[int, int], None] | None) -> None:
        """Start with nothing; `on_progress` is called with the number of inputs finished, and `total`."""
        self._on_progress = on_progress
        self._total = total
        self._tensors: dict[str, list[Tensor]] = {}
        self._latest: list[tuple[str, Tensor]] = []
        self._finished = 0

    def collect(self, label: str, tensor: Tensor) -> None:
        """Copy a tensor, for as long as its batch may still fail."""
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        elif tensor.is_sparse or tensor.is_nested:
            return  # safetensors holds strided tensors only
        self._latest.append((label, tensor.detach().to("cpu", copy=True).contiguous()))

    def end_batch(self, finished: int) -> None:
        """Keep what came since the last call if inputs have been finished since: `finished` counts them."""
        if finished > self._finished:
            self.end()
        self._latest.clear()
        self._finished = finished
        if self._on_progress is not None:
            self._on_progress(finished, self._total)

    def end(self) -> None:
        """Keep what came since the last batch."""
        for label, tensor in self._latest:
            self._tensors.setdefault(label, []).append(tensor)
        self._latest.clear()

    def joined(self, labels: set[str]) -> dict[str, Tensor]:
        """Join each label's tensors over the batches along axis 0; where shapes differ, number the batches instead."""
        joined: dict[str, Tensor] = {}
        for label, parts in self._tensors.items():
            if label not in labels:
                continue
            if len(parts) == 1:
                joined[label] = parts[0]
            elif parts[0].dim() and len({part.shape[1:] for part in parts}) == 1:
                joined[label] = torch.cat(parts)
            else:
                joined.update({f"{label}@{number}": part for number, part in enumerate(parts)})
        return joined
