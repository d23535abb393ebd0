"""What becomes of a checkpoint as a whole, and which rules are judged at which level, by which limits."""

import subprocess
import sys
from dataclasses import replace

import pytest

from hookscope.errors import (
    CheckpointError,
    HookscopeError,
    ImageError,
    MisfitError,
    ModelError,
    ModelNotFoundError,
    UntrustedFileError,
    UsageError,
    most_severe,
)
from hookscope.options import Check
from hookscope.reporting.check_report import level_counts
from hookscope.results.check import RuleOutcome
from hookscope.results.findings import Finding
from hookscope.results.network import Failure
from hookscope.rules import RULES, check_limits
from hookscope.rules.baseline import baseline_of
from hookscope.rules.judging import judge, judged_by, refused, wanted_rules
from hookscope.rules.settings import CheckSettings, Expectation, LayerSettings, RuleSettings
from tests.commands.check.measurements import (
    EVERYTHING,
    FORWARD,
    HEALTHY,
    chain,
    findings,
    inspection,
    judged,
    numbered,
    outcomes,
    row,
    stored,
    with_gradients,
    with_output,
    with_row,
    with_stored,
)

DEFAULTS = CheckSettings()
DEFAULT = wanted_rules(DEFAULTS)


@pytest.mark.parametrize(("codes", "code"), [((1, 6, 3), 3), ((0, 1, 6), 6), ((3, 4), 4), ((1, 5), 5), ((), 0)])
def test_the_most_severe_of_the_exit_codes_decides(codes: tuple[int, ...], code: int) -> None:
    assert most_severe(codes) == code


def test_every_rule_has_an_outcome_in_the_order_of_the_rules() -> None:
    assert [outcome.rule for outcome in judged(HEALTHY).outcomes] == [*RULES]
    assert [outcome.rule for outcome in refused("net.pt", CheckpointError("no"), DEFAULT).outcomes] == [*RULES]


def test_what_is_not_wanted_is_off() -> None:
    report = judged(with_output(input_difference=0.0), wanted=frozenset({"forward"}))
    assert [outcome.rule for outcome in report.outcomes if outcome.status != "off"] == ["forward"]
    assert report.exit_code == 0


def test_what_was_measured_beside_is_passed_on() -> None:
    message = replace(HEALTHY, warnings=("Recognised as net.",), seconds={"load": 0.5})
    report = judged(message)
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
    assert (findings(moved), moved.exit_code) == ([("drift", "fail", "relu")], 1)


@pytest.mark.parametrize("wanted", [set(), {"drift"}, {"drift", "expectation"}])
def test_a_check_of_nothing_does_not_pass(wanted: set[str]) -> None:
    with pytest.raises(UsageError, match="No rule is left to check"):
        judged(HEALTHY, CheckSettings(), frozenset(wanted))


def test_what_was_not_measured_is_skipped_never_passed() -> None:
    report = outcomes(judged(replace(HEALTHY, forward=None, gradients=None)))
    for name, rule in RULES.items():
        if rule.needs not in ("file", "network", "stored", "baseline") and name != "accuracy-drop":
            first_asked_for = name in ("non-finite-loss", "constant-activation")  # off by default
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
    return report.exit_code, list(report.findings), {name: outcome.status for name, outcome in outcomes(report).items()}


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
        "import sys, hookscope.rules; print('numpy' in sys.modules, 'torch' in sys.modules);"
        " import hookscope.rules.judging; print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout == "False False\nFalse\n"


def test_every_rule_says_what_it_means_and_every_limit_what_it_rests_on() -> None:
    for rule in RULES.values():
        assert rule.meaning.endswith("."), rule.identifier
        assert rule.explanation.endswith("."), rule.identifier
        for name, limit in rule.limits.items():
            assert name.isidentifier()
            assert limit.meaning, rule.identifier
            assert limit.basis or name == "min_values", rule.identifier


DEAD = replace(
    HEALTHY,
    forward=replace(
        FORWARD,
        rows=numbered(
            [row("early.relu", "ReLU", dead_channel_count=4), row("late.relu", "ReLU", dead_channel_count=4)]
        ),
    ),
)
"""Two rectifiers, all of whose channels are dead."""


def dead_where(*layers: tuple[str, RuleSettings], rule: RuleSettings | None = None) -> list[tuple[str, str]]:
    """Return the level and place of each dead rectifier under these settings."""
    some = tuple(LayerSettings(pattern, {"dead-channels": each}) for pattern, each in layers)
    settings = CheckSettings(rules={} if rule is None else {"dead-channels": rule}, layers=some)
    actual = judged(DEAD, settings, wanted_rules(settings, ["dead-channels"])).findings
    return [(each.level, ", ".join(each.places)) for each in actual]


def test_by_default_all_rules_are_wanted_but_those_that_are_off() -> None:
    on = {name for name, rule in RULES.items() if rule.level != "off"}
    assert wanted_rules(DEFAULTS) == on
    assert {name for name in RULES.keys() - on if RULES[name].needs != "gradients"} == {
        "float8-range",
        "constant-activation",
        "massive-activation",
    }


def test_the_settings_turn_rules_on_and_off() -> None:
    settings = CheckSettings(
        rules={"zero-parameter": RuleSettings("off"), "zero-gradient": RuleSettings("warn"), "forward": RuleSettings()}
    )
    assert wanted_rules(settings) == wanted_rules(DEFAULTS) - {"zero-parameter"} | {"zero-gradient"}


def test_select_leaves_nothing_else() -> None:
    assert wanted_rules(DEFAULTS, ["forward", "*-headroom"]) == {"forward", "fp16-headroom", "bf16-headroom"}


def test_ignore_goes_over_select() -> None:
    assert wanted_rules(DEFAULTS, ["*-headroom"], ["bf16-*"]) == {"fp16-headroom"}
    assert wanted_rules(DEFAULTS, ignore=["forward"]) == wanted_rules(DEFAULTS) - {"forward"}


def test_a_selected_rule_that_is_off_fails() -> None:
    settings = CheckSettings(rules={"dead-channels": RuleSettings("off")})
    report = judged(with_row("relu", dead_channel_count=4), settings, wanted_rules(settings, ["dead-channels"]))
    assert findings(report) == [("dead-channels", "fail", "relu")]
    assert report.exit_code == 1


def test_a_selected_rule_that_is_on_keeps_its_level() -> None:
    assert dead_where() == [("warn", "early.relu, late.relu")]
    assert dead_where(rule=RuleSettings("fail")) == [("fail", "early.relu, late.relu")]


@pytest.mark.parametrize("option", ["--select", "--ignore"])
def test_an_unknown_rule_is_refused_with_the_nearest(option: str) -> None:
    with pytest.raises(UsageError, match=rf"{option} 'dead-chanels' is no rule\. Nearest: 'dead-channels'") as caught:
        wanted_rules(DEFAULTS, **{option.strip("-"): ["dead-chanels"]})
    assert "hookscope check --rules" in str(caught.value)


def test_a_glob_that_matches_no_rule_and_no_rule_at_all_are_refused() -> None:
    with pytest.raises(UsageError, match="'fp32-\\*' is no rule"):
        wanted_rules(DEFAULTS, ["forward", "fp32-*"])
    with pytest.raises(UsageError, match="No rule is left"):
        wanted_rules(DEFAULTS, ignore=["*"])


def test_a_limit_that_the_settings_move_is_kept_to() -> None:
    some = with_row("relu", dead_channel_count=2)
    assert judged(some).findings == ()
    settings = CheckSettings(rules={"dead-channels": RuleSettings(limits={"max_fraction": 0.49})})
    (finding,) = judged(some, settings).findings
    assert "50.0% of its 4 channels are 0 over all 2 inputs (limit 49%)" in finding.message


def test_a_limit_may_differ_for_some_layers() -> None:
    accepted = RuleSettings(limits={"max_fraction": 1.0})
    assert dead_where(("early", accepted)) == [("warn", "late.relu")]
    assert dead_where(("type:ReLU", accepted)) == []
    assert dead_where(("!early", accepted)) == [("warn", "early.relu")]


def test_a_level_may_differ_for_some_layers_and_failures_come_first() -> None:
    fail, off = RuleSettings("fail"), RuleSettings("off")
    assert dead_where(("late*", fail)) == [("fail", "late.relu"), ("warn", "early.relu")]
    assert dead_where(("/^late/", off)) == [("warn", "early.relu")]


def test_the_later_layer_settings_go_over_the_earlier() -> None:
    off, fail = RuleSettings("off"), RuleSettings("fail")
    first, second = ("relu", off), ("late", fail)
    assert dead_where(first, second) == [("fail", "late.relu")]
    assert dead_where(second, first) == []


def test_one_cause_is_one_finding_that_names_the_first_and_counts_what_follows() -> None:
    names = [f"conv{number}.weight" for number in range(5)]
    broken = replace(HEALTHY, stored=tuple(stored(name, nan_count=2) for name in names))
    report = judged(broken, wanted=frozenset({"non-finite-parameter"}))
    (finding,) = report.findings
    assert (finding.where, finding.followed_by) == (names[0], tuple(names[1:]))
    assert finding.message == (
        "'conv0.weight' (Conv2d) has 2 NaN and 0 Inf in 48 values (limit 0). 4 more tensors follow: 'conv1.weight',"
        " 'conv2.weight', 'conv3.weight' and 1 more."
    )
    assert level_counts(report.findings) == "1 failure"


def test_what_is_to_mend_in_each_weight_is_a_finding_each() -> None:
    empty = replace(HEALTHY, stored=tuple(stored(name, zero_count=48) for name in ("a.weight", "b.weight")))
    assert [finding.where for finding in judged(empty, wanted=frozenset({"zero-parameter"})).findings] == [
        "a.weight",
        "b.weight",
    ]


def test_dead_filters_of_a_pruned_network_are_one_finding() -> None:
    names = [f"{at}.weight" for at in range(5)]
    pruned = replace(HEALTHY, stored=tuple(stored(name, filter_count=4, zero_filters=(0, 2)) for name in names))
    (finding,) = judged(pruned, wanted=frozenset({"dead-filter"})).findings
    assert (finding.where, finding.followed_by) == (names[0], tuple(names[1:]))
    assert finding.message.endswith(" 4 more weights follow: '1.weight', '2.weight', '3.weight' and 1 more.")


def test_a_later_limit_keeps_an_earlier_level() -> None:
    layers = [("relu", RuleSettings("fail")), ("relu", RuleSettings(limits={"max_fraction": 0.9}))]
    assert dead_where(*layers) == [("fail", "early.relu, late.relu")]


def test_a_rule_that_is_on_for_some_layers_only_is_wanted_and_silent_elsewhere() -> None:
    settings = CheckSettings(
        rules={"dead-channels": RuleSettings("off")},
        layers=(LayerSettings("late", {"dead-channels": RuleSettings("fail")}),),
    )
    assert "dead-channels" in wanted_rules(settings)
    assert findings(judged(DEAD, settings, wanted_rules(settings))) == [("dead-channels", "fail", "late.relu")]


@pytest.mark.parametrize("pattern", ["conv.bias", "name:conv", "type:Conv2d", "/^conv$/"])
def test_a_pattern_may_mean_a_parameter_by_its_layer_its_type_or_itself(pattern: str) -> None:
    settings = CheckSettings(layers=(LayerSettings(pattern, {"non-finite-parameter": RuleSettings("off")}),))
    assert judged(with_stored("conv.bias", nan_count=1), settings).findings == ()
    assert len(judged(with_stored("head.weight", nan_count=1), settings).findings) == 1


def test_a_pattern_may_mean_an_alias() -> None:
    tied = replace(HEALTHY, stored=(stored("embedding.weight", "Embedding", aliases=("decoder.weight",), nan_count=1),))
    settings = CheckSettings(layers=(LayerSettings("decoder", {"non-finite-parameter": RuleSettings("off")}),))
    assert judged(tied, settings).findings == ()


def test_a_layer_without_the_rule_does_not_count_as_the_worst() -> None:
    settings = CheckSettings(layers=(LayerSettings("conv", {"fp16-headroom": RuleSettings("off")}),))
    both = replace(with_row("conv", max=60000.0), stored=with_stored("head.weight", max_abs=50000.0).stored)
    assert findings(judged(both, settings)) == [("fp16-headroom", "warn", "head.weight")]


def test_a_pattern_that_matches_everything_says_nothing_about_the_whole_checkpoint() -> None:
    settings = CheckSettings(
        expectations=(Expectation("cat.jpg", "crane"),),  # type: ignore[arg-type]
        layers=(LayerSettings("!nothing", {"dead-gradient": RuleSettings("off")}),),
    )
    assert outcomes(judged(HEALTHY, settings))["expectation"].status == "fail"


def test_a_pattern_that_cannot_be_read_is_refused() -> None:
    settings = CheckSettings(layers=(LayerSettings("/(/", {"dead-channels": RuleSettings("off")}),))
    with pytest.raises(UsageError, match="not a regular expression"):
        judged(HEALTHY, settings)


def test_limits_are_put_over_those_of_the_configuration_and_keep_levels_and_layers() -> None:
    layers = (LayerSettings("head", {"dead-filter": RuleSettings(limits={"max_fraction": 0.9})}),)
    settings = CheckSettings(
        rules={"dead-filter": RuleSettings("fail", {"max_fraction": 0.5, "min_chance": 1e-9})}, layers=layers
    )
    texts = ["dead-filter.max-fraction=0.1", "outlier-weight.max_ratio=7", "accuracy.min-fraction=0"]
    changed, _ = judged_by(settings, Check(limit=texts), None, renews_baseline=True)
    assert changed.rules == {
        "dead-filter": RuleSettings("fail", {"max_fraction": 0.1, "min_chance": 1e-9}),
        "outlier-weight": RuleSettings(None, {"max_ratio": 7.0}),
        "accuracy": RuleSettings(None, {"min_fraction": 0.0}),
    }
    assert changed.layers == layers
    assert judged_by(settings, Check(), None)[0] == settings


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.limits])
def test_every_limit_can_be_given_by_name(rule: str) -> None:
    for name in RULES[rule].limits:
        assert check_limits([f"{rule}.{name.replace('_', '-')}=0.25"]) == {rule: {name: 0.25}}
