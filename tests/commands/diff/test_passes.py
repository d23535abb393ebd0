"""A's outputs wait in a spool, in memory or in a file, until B reaches them; both draw the same random numbers."""

import errno
import random
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.commands.diff import values
from hookscope.errors import OutputError
from hookscope.results.runs.tensors import Piece, TensorSpool


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out += x
        result: Tensor = self.relu(out)
        return result


def blocks(*, scaled: bool = False) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Sequential(Block(), nn.Hardswish()) for _ in range(4))).eval()
    if scaled:
        with torch.no_grad():
            network.get_parameter("2.0.conv.weight")[0] *= 2
    return network


def pictures() -> Tensor:
    return torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))


def by_channels_last(network: nn.Module) -> nn.Module:
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    ("form", "options"),
    [
        *((nn.Module.float, {"reference": "float64"}), (by_channels_last, {"shadow": True})),
        *((nn.Module.float, {"grads": True, "loss": "sum"}), (nn.Module.bfloat16, {})),
    ],
)
def test_what_waits_in_a_file_is_compared_as_what_waits_in_memory(
    form: Callable[[nn.Module], nn.Module], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = pictures().to(next(form(blocks()).parameters()).dtype)
    results = []
    for most in (2**30, 1000, 0):
        monkeypatch.setattr(values, "_MOST_IN_MEMORY", most)
        results.append(hookscope.diff(form(blocks()), form(blocks(scaled=True)), x, **options))
    for result in results:
        assert [difference.layer for difference in result.first_differences] == ["2.0.conv"]
        assert len(result.rows) == 4 * 4
        assert [row.layer for row in result.rows if row.origin == "equal"] == [row.layer for row in result.rows][:8]
        assert (result.rows, result.gradients) == (results[0].rows, results[0].gradients)


def test_what_is_held_in_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    class Counted(TensorSpool):
        def append(self, data: memoryview) -> Piece:
            written.append(data.nbytes)
            return super().append(data)

    monkeypatch.setattr(values, "TensorSpool", Counted)
    monkeypatch.setattr(values, "_MOST_IN_MEMORY", 4 * 2**20)
    network = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    x = torch.randn(1, 4096, 64)  # a megabyte, as all outputs are
    assert {row.origin for row in hookscope.diff(network, "same", x).rows} == {"equal"}
    assert written == [2**20] * 9  # 13 in all with the network's input
    written.clear()
    hookscope.diff(network, "same", x, shadow=True)
    assert written == [2**20] * 9  # inputs are outputs of the layer before, and kept once


def test_a_full_disk_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_spool: TensorSpool, _data: memoryview) -> Piece:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TensorSpool, "append", full)
    monkeypatch.setattr(values, "_MOST_IN_MEMORY", 0)
    with pytest.raises(OutputError, match=r"^Tensors cannot be kept in .*: no space left on device\. Free some space"):
        hookscope.diff(blocks(), "same", pictures())


@pytest.mark.parametrize("side", ["A", "B"])
def test_an_interrupt_leaves_nothing_behind(side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("hookscope.results.runs.tensors._MOST_IN_MEMORY", 0)
    monkeypatch.setattr(values, "_MOST_IN_MEMORY", 0)

    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            if self.raises:
                raise KeyboardInterrupt
            return x

        raises = False

    a, b = (blocks().append(Interrupted()).eval() for _ in range(2))
    (a if side == "A" else b)[4].raises = True  # type: ignore[index]
    before = threading.active_count(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(KeyboardInterrupt):
        hookscope.diff(a, b, pictures())
    after = threading.active_count(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert (after[0], *after[2:]) == (before[0], *before[2:])
    assert torch.equal(after[1], before[1])
    assert [*tmp_path.iterdir()] == []
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in (*a.modules(), *b.modules()))


class Turned(nn.Module):
    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts, self.order = nn.ModuleList(nn.Linear(4, 4) for _ in range(5)), order

    def forward(self, x: Tensor) -> Tensor:
        actual = {at: self.parts[at](x) for at in self.order}
        return torch.stack([actual[at] for at in sorted(actual)]).sum(0)


def test_b_may_call_a_layer_earlier_or_never() -> None:
    x = torch.randn(3, 4)
    result = hookscope.diff(Turned((0, 1, 2, 3, 4)), Turned((4, 2, 3, 1, 0)), x)
    assert {row.origin for row in result.rows} == {"equal"}
    assert len(result.rows) == 5
    result = hookscope.diff(Turned((0, 1, 2, 3, 4)), Turned((4, 2, 1, 0)), x)
    assert [(row.label, row.reason) for row in result.unmatched] == [("parts.3", "B does not call it")]
    assert len(result.rows) == 4


drawn: list[tuple[float, float, float]] = []


class Drawing(nn.Module):
    """Draws numbers from every generator, and notes them."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.fc, self.times = nn.Linear(2, 2), times

    def forward(self, x: Tensor) -> Tensor:
        drawn.extend((float(torch.rand(())), random.random(), float(np.random.rand())) for _ in range(self.times))
        result: Tensor = self.fc(x)
        return result


@pytest.mark.parametrize("times", [(1, 1), (1, 3), (0, 1)])
def test_both_networks_begin_each_batch_from_the_same_random_states(times: tuple[int, int]) -> None:
    drawn.clear()
    hookscope.diff(Drawing(times[0]), Drawing(times[1]), torch.randn(3, 2), batch_size=1)
    each = sum(times)
    batches = [drawn[at : at + each] for at in range(0, len(drawn), each)]
    assert len(batches) == 3
    for batch in batches:
        of_a, of_b = batch[: times[0]], batch[times[0] :]
        assert all(one == other for one, other in zip(of_a, of_b, strict=False))
    assert len({batch[0] for batch in batches}) == 3
