"""For every rule a checkpoint that breaks exactly it, and a near miss that passes all rules: `pairs.py` lists them.

Each pair is two real files, of one seeded network with one thing changed. All rules are on, at level "fail": a
checkpoint that broke another rule besides would show.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hookscope.checks.baseline import Baseline, baseline_of
from hookscope.checks.checkpoint import check_checkpoint
from hookscope.checks.judging import wanted_rules
from hookscope.checks.rules import RULES
from hookscope.checks.settings import CheckSettings, Expectation, RuleSettings
from hookscope.results.check import CheckMeasurements, CheckReport
from tests.checks.checkpoints import networks
from tests.checks.checkpoints.pairs import NETWORKS, PAIRS, PICTURE, Change, Pair, nothing


@pytest.fixture(autouse=True)
def picture(tmp_path: Path) -> Path:
    """Half red, half blue."""
    path = tmp_path / PICTURE
    image = Image.new("RGB", (16, 16), "red")
    image.paste("blue", (8, 0, 16, 16))
    image.save(path)
    return path


def settings_of(pair: Pair, folder: Path) -> CheckSettings:
    """Return settings under which every rule is on, and fails."""
    given: dict[str, Any] = {"shape": (2, 3, 16, 16)}
    if pair.expects:
        given = {"expectations": (Expectation(folder / PICTURE, **pair.expects),), "resize": "none", "crop": "none"}
    rules = {name: RuleSettings("fail") for name in RULES}
    return CheckSettings(arch=f"{NETWORKS}:{pair.network}", rules=rules, **given, **pair.settings)


def write(pair: Pair, change: Change, path: Path, *, lost: int = 0) -> None:
    """Write a checkpoint of the pair's network, seeded, and then changed; leave out the last bytes of the file."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = dict(getattr(networks, pair.network)().state_dict())
    change(state)
    torch.save(state, path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - lost])


def baseline_for(pair: Pair, folder: Path, settings: CheckSettings) -> Baseline | None:
    """Return what the unchanged network gives, if the rule compares with it."""
    if pair.rule != "drift":
        return None
    write(pair, nothing, folder / "before.pt")
    seen: list[CheckMeasurements] = []
    check_checkpoint(str(folder / "before.pt"), settings, wanted_rules(settings), on_measured=seen.append)
    return baseline_of(seen[0])


def checked(pair: Pair, change: Change, folder: Path, *, lost: int = 0) -> CheckReport:
    """Write a checkpoint and check it, with every rule on."""
    settings = settings_of(pair, folder)
    baseline = baseline_for(pair, folder, settings)
    path = folder / "model.pt"
    write(pair, change, path, lost=lost)
    return check_checkpoint(str(path), settings, wanted_rules(settings), baseline=baseline)


def test_every_rule_has_a_pair() -> None:
    assert list(dict.fromkeys(pair.rule for pair in PAIRS)) == [*RULES]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.rule)
def test_a_checkpoint_that_breaks_one_rule_fails_that_rule_and_names_the_place(pair: Pair, tmp_path: Path) -> None:
    report = checked(pair, pair.sides[0], tmp_path, lost=pair.bytes_lost)
    assert {finding.rule for finding in report.findings} == {pair.rule} | pair.consequences
    finding, *more = (finding for finding in report.findings if finding.rule == pair.rule)
    assert finding.where.rpartition("/")[2] == pair.where
    assert (pair.named or pair.where) in finding.message
    assert not more or pair.rule == "drift"  # which shows in later layers too


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.rule)
def test_a_near_miss_passes_every_rule(pair: Pair, tmp_path: Path) -> None:
    report = checked(pair, pair.sides[1], tmp_path)
    assert {finding.rule for finding in report.findings} == pair.missed
    assert report.exit_code == bool(pair.missed)
    status = next(outcome.status for outcome in report.outcomes if outcome.rule == pair.rule)
    assert status == "pass"
