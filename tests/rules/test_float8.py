"""Weights in float8: slips of conversions are named, sound conversions pass."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hookscope import load_model
from hookscope.commands.check.checkpoint import check_checkpoint
from hookscope.rules.settings import CheckSettings, RuleSettings
from tests.commands.check.measurements import HEALTHY, findings, judged, stored

NORMAL = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)) * 0.02
WANTED = frozenset({"float8-weight", "non-finite-parameter", "outlier-weight"})
State = dict[str, Tensor]


def by_tensor(weight: Tensor, times: float = 1.0) -> tuple[Tensor, Tensor]:
    scale = weight.abs().max() / 448 / times
    return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def by_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


def by_powers_of_two(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scale blocks of 32 by powers of two: OCP Microscaling Formats, 2023."""
    blocks = weight.reshape(-1, 32)
    scale = 2.0 ** (blocks.abs().amax(1, keepdim=True).log2().floor() - 8)
    return (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).reshape(weight.shape), scale


def found(path: Path, state: State, wanted: frozenset[str] = WANTED) -> list[tuple[str, str, str]]:
    torch.save(state, path / "net.pt")
    settings = CheckSettings(arch="none")
    return findings(check_checkpoint(str(path / "net.pt"), settings, wanted))


@pytest.mark.parametrize("scaled", [by_tensor, by_row, by_powers_of_two])
@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_inv", "scale_weight"])
@pytest.mark.sample("weight_scale-by_tensor", "weight_scale_inv-by_row", "scale_weight-by_powers_of_two")
def test_a_scaled_weight_with_its_scale_passes(
    tmp_path: Path, scaled: Callable[[Tensor], tuple[Tensor, Tensor]], leaf: str
) -> None:
    weight, scale = scaled(NORMAL)
    assert found(tmp_path, {"fc.weight": weight, f"fc.{leaf}": scale}) == []


def test_a_scaled_weight_without_its_scale_is_named(tmp_path: Path) -> None:
    weight, scale = by_tensor(NORMAL)
    state = {"fc.weight": weight, "other.weight": weight.clone(), "other.weight_scale": scale}
    assert found(tmp_path, state) == [("float8-weight", "warn", "fc.weight")]


def test_a_weight_scaled_twice_is_named(tmp_path: Path) -> None:
    weight, scale = by_tensor(NORMAL, times=100)
    assert float((weight.float().abs() == 448).float().mean()) > 0.9
    assert found(tmp_path, {"fc.weight": weight, "fc.weight_scale": scale}) == [("float8-weight", "warn", "fc.weight")]


def test_a_small_weight_without_any_scale_is_named_and_a_greater_one_passes(tmp_path: Path) -> None:
    state = {"small.weight": (NORMAL / 20).to(torch.float8_e4m3fn), "usual.weight": NORMAL.to(torch.float8_e4m3fn)}
    assert found(tmp_path, state) == [("float8-weight", "warn", "small.weight")]
    # The same in float8_e5m2, whose steps are 128 times finer, is well.
    assert found(tmp_path, {"small.weight": (NORMAL / 20).to(torch.float8_e5m2)}) == []


def test_nan_which_an_overflow_becomes_fails(tmp_path: Path) -> None:
    weight, scale = by_tensor(NORMAL)
    weight.view(torch.uint8)[3, 4] = 0x7F  # NaN in float8_e4m3fn
    outcome = found(tmp_path, {"fc.weight": weight, "fc.weight_scale": scale})
    assert outcome == [("non-finite-parameter", "fail", "fc.weight")]


def test_a_network_that_loads_float8_is_judged_by_its_values(tmp_path: Path) -> None:
    state = load_model("demo").module.state_dict()
    name = "_fc.weight"
    torch.save(state | {name: by_tensor(state[name])[0]}, tmp_path / "demo.pt")
    report = check_checkpoint(str(tmp_path / "demo.pt"), CheckSettings(arch="demo"), WANTED)
    assert findings(report) == [("float8-weight", "warn", name)]
    (finding,) = report.findings
    assert finding.message == (
        "'_fc.weight' (Linear) reaches 448, the greatest of float8_e4m3fn, as weights that are scaled for it do, and no"
        " scale is stored beside it."
    )


def test_whether_weights_fit_into_float8_is_said_where_it_is_asked(tmp_path: Path) -> None:
    state = {"large.weight": NORMAL * 1e5, "small.weight": NORMAL / 20, "usual.weight": NORMAL}
    torch.save(state, tmp_path / "net.pt")
    settings = CheckSettings(arch="none", rules={"float8-range": RuleSettings("warn")})
    report = check_checkpoint(str(tmp_path / "net.pt"), settings, frozenset({"float8-range"}))
    assert findings(report) == [("float8-range", "warn", "large.weight"), ("float8-range", "warn", "small.weight")]
    lost = (state["small.weight"].abs() <= 2**-10).float().mean()
    assert f"{lost:.1%} of its values other than 0 become 0" in report.findings[1].message


def test_nothing_is_said_where_it_is_not() -> None:
    tiny = replace(HEALTHY, stored=(stored("conv.weight", float8_zero_count=48),))
    assert findings(judged(tiny, wanted=frozenset({"float8-range"}))) == [("float8-range", "fail", "conv.weight")]
    few = replace(HEALTHY, stored=(stored("conv.weight", float8_zero_count=4),))
    assert findings(judged(few, wanted=frozenset({"float8-range"}))) == []
