"""One network ahead of the other, which compares with copies."""

import time
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.differences import lockstep


@pytest.fixture(autouse=True, params=[1, 2], ids=["in turns", "at the same time"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out += x
        result: Tensor = self.relu(out)
        return result


class Pause(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x * 1


def blocks(seconds: float = 0.0, *, scaled: bool = False) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Sequential(Block(), Pause(seconds)) for _ in range(4))).eval()
    if scaled:
        with torch.no_grad():
            network.get_parameter("2.0.conv.weight")[0] *= 2
    return network


@pytest.mark.parametrize("most", [0, 1000, 2**30])
@pytest.mark.parametrize("seconds", [(0.0, 0.0), (0.02, 0.0), (0.0, 0.02)])
@pytest.mark.parametrize("reference", [None, "float64"])
@pytest.mark.sample("None-seconds0-0", "float64-seconds1-1000", "None-seconds2-1073741824")
def test_rows_are_the_same_however_far_one_is_ahead(
    most: int, seconds: tuple[float, float], reference: Literal["float64"] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep, "_MOST_HELD", most)
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    result = hookscope.diff(blocks(seconds[0]), blocks(seconds[1], scaled=True), x, reference=reference)
    assert [each.layer for each in result.first_differences] == ["2.0.conv"]
    assert len(result.rows) == 4 * 4
    assert [row.layer for row in result.rows if row.origin == "equal"] == [row.layer for row in result.rows][:8]
    again = hookscope.diff(blocks(), blocks(scaled=True), x, reference=reference)
    assert [(row.measures, row.input_relative_l2, row.error) for row in result.rows] == [
        (row.measures, row.input_relative_l2, row.error) for row in again.rows
    ]


@pytest.mark.parametrize(("most", "ahead"), [(2**21, 4), (2**30, 12)])
@pytest.mark.sample("in turns-2097152-4", "at the same time-1073741824-12")
def test_copies_are_bounded(most: int, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "_MOST_HELD", most)
    done: list[str] = []
    found: list[int] = []

    class Layer(nn.Linear):
        side, is_first = "A", False

        def forward(self, x: Tensor) -> Tensor:
            if self.side == "B" and self.is_first:
                time.sleep(0.5)
                found.append(done.count("A"))
            done.append(self.side)
            return super().forward(x)

    a, b = (nn.Sequential(*(Layer(64, 64) for _ in range(12))) for _ in range(2))
    for each in b:
        each.side = "B"  # type: ignore[assignment]
    b[0].is_first = True  # type: ignore[assignment]
    result = hookscope.diff(a, b, torch.randn(1, 4096, 64))  # a megabyte each
    assert len(result.rows) == 12
    assert found[0] <= ahead
    assert most < 2**30 or found[0] == ahead


def test_both_go_on_where_each_waits_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "_MOST_HELD", 0)

    class Turned(nn.Module):
        def __init__(self, order: tuple[int, ...]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.parts, self.order = nn.ModuleList(nn.Linear(4, 4) for _ in range(5)), order

        def forward(self, x: Tensor) -> Tensor:
            found = {at: self.parts[at](x) for at in self.order}
            return torch.stack([found[at] for at in sorted(found)]).sum(0)

    result = hookscope.diff(Turned((0, 1, 2, 3, 4)), Turned((4, 2, 3, 1, 0)), torch.randn(3, 4))
    assert {row.origin for row in result.rows} == {"equal"}
    assert len(result.rows) == 5
