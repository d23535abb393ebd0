"""What becomes of a checkpoint as a whole: exit codes, what is skipped, and what could not be loaded."""

import subprocess
import sys
from dataclasses import replace

import pytest

from hookscope.checks.baseline import baseline_of
from hookscope.checks.judging import judge, refused, wanted_rules
from hookscope.checks.rules import RULES
from hookscope.checks.settings import CheckSettings
from hookscope.errors import (
    CheckpointError,
    HookscopeError,
    ImageError,
    MisfitError,
    ModelError,
    ModelNotFoundError,
    UntrustedFileError,
    UsageError,
)
from hookscope.results.check import RuleOutcome
from hookscope.results.findings import Finding
from hookscope.results.network import Failure
from tests.checks.measurements import (
    EVERYTHING,
    HEALTHY,
    judged,
    objections,
    outcomes,
    with_gradients,
    with_output,
    with_row,
)
from tests.checks.rules.by_hand import chain, inspection

DEFAULT = wanted_rules(CheckSettings())


def test_every_rule_has_an_outcome_in_the_order_of_the_rules() -> None:
    assert [each.rule for each in judged(HEALTHY).outcomes] == [*RULES]
    assert [each.rule for each in refused("net.pt", CheckpointError("no"), DEFAULT).outcomes] == [*RULES]


def test_what_is_not_wanted_is_off() -> None:
    report = judged(with_output(input_difference=0.0), wanted=frozenset({"forward"}))
    assert [each.rule for each in report.outcomes if each.status != "off"] == ["forward"]
    assert report.exit_code == 0


def test_warnings_do_not_fail() -> None:
    report = judged(with_row("relu", dead_channel_count=4))
    assert (report.exit_code, [each.level for each in report.findings]) == (0, ["warn"])


def test_what_was_measured_beside_is_passed_on() -> None:
    told = replace(HEALTHY, warnings=("Recognised as net.",), seconds={"load": 0.5})
    report = judged(told)
    assert (report.checkpoint, report.model, report.warnings) == ("net.pt", HEALTHY.model, ("Recognised as net.",))
    assert [each.name for each in report.inputs] == ["cat.jpg", "dog.jpg"]
    assert report.seconds == {"load": 0.5}


def test_without_a_baseline_or_expectations_their_rules_are_off() -> None:
    report = outcomes(judged(HEALTHY, CheckSettings()))
    assert (report["drift"], report["expectation"]) == (RuleOutcome("drift", "off"), RuleOutcome("expectation", "off"))


def test_a_baseline_is_held_against_what_was_measured() -> None:
    wanted = frozenset({"drift", "forward"})
    baseline = baseline_of(HEALTHY)
    assert outcomes(judge("net.pt", HEALTHY, CheckSettings(), wanted, baseline))["drift"].status == "pass"
    moved = judge("net.pt", with_row("relu", dead_channel_count=4), CheckSettings(), wanted, baseline)
    assert (objections(moved), moved.exit_code) == ([("drift", "fail", "relu")], 1)


def test_a_baseline_of_another_network_is_refused() -> None:
    other = replace(HEALTHY, model=replace(HEALTHY.model, kind="OtherNet"))
    with pytest.raises(UsageError, match="The baseline does not fit"):
        judge("net.pt", other, CheckSettings(), frozenset({"drift"}), baseline_of(HEALTHY))


@pytest.mark.parametrize("wanted", [set(), {"drift"}, {"drift", "expectation"}])
def test_a_check_of_nothing_does_not_pass(wanted: set[str]) -> None:
    with pytest.raises(UsageError, match="No rule is left to check"):
        judged(HEALTHY, CheckSettings(), frozenset(wanted))


def test_what_was_not_measured_is_skipped_never_passed() -> None:
    report = outcomes(judged(replace(HEALTHY, forward=None, gradients=None)))
    for name, rule in RULES.items():
        if rule.needs not in ("file", "network", "stored", "baseline"):
            first_asked_for = name == "non-finite-loss"  # off by default
            assert report[name].status == ("fail" if first_asked_for else "skipped"), name
            assert report[name].reason or first_asked_for


def test_a_backward_pass_that_raises_is_an_error() -> None:
    broken = replace(chain([0.9] * 4), failure=Failure("conv", "Conv2d", (), "RuntimeError: no derivative"))
    reasons = {name: "It raised." for name, rule in RULES.items() if rule.needs == "gradients"}
    report = judged(with_gradients(broken, unmeasured=reasons))
    assert report.exit_code == 6
    assert report.error == "The backward pass raised in 'conv' (Conv2d), given no tensor: RuntimeError: no derivative"
    assert {outcomes(report)[name].status for name in reasons} == {"skipped"}


def test_a_forward_pass_in_train_mode_that_raises_is_called_so() -> None:
    broken = replace(inspection(), loss=None, failure=Failure("bn", "BatchNorm1d", ("1x4",), "ValueError: one value"))
    assert judged(with_gradients(broken)).error.startswith("The forward pass raised in 'bn'")


def refusal(error: HookscopeError, wanted: frozenset[str] = DEFAULT) -> tuple[int, list[Finding], dict[str, str]]:
    report = refused("net.pt", error, wanted)
    assert not report.passed
    assert report.error == str(error)
    return report.exit_code, list(report.findings), {name: each.status for name, each in outcomes(report).items()}


@pytest.mark.parametrize(
    ("error", "code"), [(CheckpointError("net.pt is empty."), 3), (UntrustedFileError("net.pt runs code."), 4)]
)
def test_a_file_that_cannot_be_read_fails_integrity_and_skips_the_rest(error: HookscopeError, code: int) -> None:
    exit_code, findings, status = refusal(error)
    assert exit_code == code
    assert findings == [Finding("integrity", "fail", "", str(error))]
    assert {status[name] for name in DEFAULT - {"integrity"}} == {"skipped"}
    assert {status[name] for name in EVERYTHING - DEFAULT} == {"off"}


def test_weights_that_do_not_fit_fail_architecture() -> None:
    exit_code, findings, status = refusal(MisfitError("net.pt does not fit Net: 1 missing (conv.bias)."))
    assert exit_code == 1
    assert findings == [Finding("architecture", "fail", "", "net.pt does not fit Net: 1 missing (conv.bias).")]
    assert status["integrity"] == "pass"
    assert {status[name] for name in DEFAULT - {"integrity", "architecture"}} == {"skipped"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("no such class"), 2),
        (ImageError("no picture"), 3),
        (ModelNotFoundError("fits no network"), 5),
        (ModelError("net.py raised"), 6),
    ],
)
def test_any_other_error_keeps_its_exit_code_and_passes_nothing(error: HookscopeError, code: int) -> None:
    exit_code, findings, status = refusal(error)
    assert (exit_code, findings) == (code, [])
    assert {status[name] for name in DEFAULT} == {"skipped"}


@pytest.mark.parametrize("error", [CheckpointError("damaged"), MisfitError("another network's")])
def test_ignoring_the_rule_does_not_make_a_checkpoint_pass_that_cannot_be_loaded(error: HookscopeError) -> None:
    exit_code, findings, status = refusal(error, DEFAULT - {"integrity", "architecture"})
    assert (exit_code, findings) == (3, [])
    assert (status["integrity"], status["architecture"]) == ("off", "off")


def test_naming_rules_loads_neither_torch_nor_numpy_and_judging_no_torch() -> None:
    script = (
        "import sys, hookscope.checks.rules; print('numpy' in sys.modules, 'torch' in sys.modules);"
        " import hookscope.checks.judging; print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout == "False False\nFalse\n"


def test_every_rule_says_what_it_means_and_every_limit_where_it_comes_from() -> None:
    for rule in RULES.values():
        assert rule.meaning.endswith("."), rule.identifier
        assert rule.explanation.endswith("."), rule.identifier
        for name, limit in rule.limits.items():
            assert name.isidentifier()
            assert limit.meaning, rule.identifier
            assert "our choice" in limit.source or "after" in limit.source, rule.identifier
