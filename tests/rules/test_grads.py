"""The rules of `hookscope grads`, there and under the levels and limits of the check."""

from dataclasses import replace

import pytest

from hookscope.results.check import NonFiniteOrigin
from hookscope.results.findings import Finding
from hookscope.results.gradients import Gradients, StepsRow
from hookscope.results.network import Failure
from hookscope.rules import GRADS_RULES, RULES, grads_limits
from hookscope.rules.judging import judge_gradients
from hookscope.rules.settings import CheckSettings, LayerSettings, RuleSettings
from tests.commands.check.measurements import (
    chain,
    findings,
    inspection,
    judged,
    layer_row,
    logistic_chain,
    outcomes,
    output_row,
    parameter,
    tensor,
    with_gradients,
)

ALL_BROKEN = inspection(
    [
        layer_row("stem", tensor(1.0, (1, 10, 8, 8), channel_axis=1, channel_count=10, dead_channel_count=10), "ReLU"),
        layer_row("act", tensor(1.0, nan_count=1), "Tanh"),
    ],
    [output_row("stem", tensor(1.0, inf_count=1)), output_row("act", tensor(1.0), "Tanh")],
    [parameter("aux.weight", None, status="not reached"), parameter("act.weight", 1.0)],
    loss=float("nan"),
)


def test_failures_come_first_then_the_order_of_the_rules() -> None:
    judged = judge_gradients(ALL_BROKEN)
    assert [(verdict.level, verdict.rule) for verdict in judged] == [
        ("fail", "non-finite-loss"),
        ("fail", "non-finite-activation"),
        ("fail", "non-finite-gradient"),
        ("warn", "unused-parameter"),
        ("warn", "dead-channels"),
    ]


def test_of_a_pass_that_broke_off_only_activations_are_judged() -> None:
    failure = Failure("act", "Tanh", (), "RuntimeError: no")
    for broken in (replace(ALL_BROKEN, failure=failure), replace(ALL_BROKEN, loss=None)):
        assert {verdict.rule for verdict in judge_gradients(broken)} <= {
            "non-finite-loss",
            "non-finite-activation",
            "dead-channels",
        }


def test_verdicts_already_there_are_not_looked_at() -> None:
    judged = replace(chain([1.0] * 30), verdicts=(Finding("zero-gradient", "fail", "", "Old."),))
    assert judge_gradients(judged) == ()


def test_every_rule_about_gradients_is_judged_and_every_limit_has_a_name() -> None:
    about_gradients = {name for name, rule in RULES.items() if rule.needs == "gradients"}
    activations = {"non-finite-activation", "saturated-activation", "dead-channels"}
    assert set(GRADS_RULES) == about_gradients | activations
    names = [limit.grads_name for name in GRADS_RULES for limit in RULES[name].limits.values()]
    assert all(names)
    assert len(set(names)) == len(names) == len(grads_limits())
    assert not any(limit.grads_name for name in RULES.keys() - GRADS_RULES for limit in RULES[name].limits.values())


def test_a_cause_is_judged_before_what_it_silences() -> None:
    order = [*RULES]
    for name, rule in RULES.items():
        assert all(order.index(cause) < order.index(name) for cause in rule.silenced_by)


GRADIENT_RULES = frozenset(name for name, rule in RULES.items() if rule.needs == "gradients")
NAN = tensor(1.0, nan_count=2)


def imbalanced(ratio: float) -> Gradients:
    """Return weights of size 1 with gradients 1, 1 and `ratio`: flat at the ends, so that nothing vanishes."""
    gradients = {"a.weight": 1.0, "b.weight": ratio, "c.weight": 1.0}
    return inspection(parameters=[parameter(name, l2) for name, l2 in gradients.items()])


BROKEN = {
    "non-finite-loss": inspection(loss=float("inf")),
    "non-finite-gradient": inspection(gradients=[output_row("a", NAN), output_row("b", tensor(1.0))]),
    "zero-gradient": inspection(parameters=[parameter("a.weight", 0.0)]),
    "dead-gradient": inspection(
        [layer_row("a", tensor(1.0)), layer_row("b", tensor(1.0))],
        [output_row("a", tensor(0.0)), output_row("b", tensor(1.0))],
    ),
    "vanishing-gradient": logistic_chain(9),
    "exploding-gradient": chain([5.0] * 8),
    "unused-parameter": inspection(
        parameters=[parameter("a.weight", 1.0), parameter("b.weight", None, status="not reached")]
    ),
    "gradient-imbalance": imbalanced(1.1e6),
    # Of 60 steps the last 25 are 2^-24 of the greatest and more.
    "gradient-over-time": inspection(
        [layer_row("lstm", tensor(1.0), "LSTM")],
        over_time=(StepsRow("lstm", "LSTM", "float32", tuple(0.5 ** (59 - step) for step in range(60))),),
    ),
}


def test_there_is_an_example_for_every_rule() -> None:
    assert BROKEN.keys() == GRADIENT_RULES


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_gradient_is_said_as_grads_says_it(rule: str) -> None:
    (verdict,) = judge_gradients(BROKEN[rule])
    (finding,) = judged(with_gradients(BROKEN[rule])).findings
    assert (verdict.rule, finding.rule) == (rule, rule)
    assert (finding.where, finding.message, finding.level) == (verdict.where, verdict.message, verdict.level)


def test_a_verdict_that_is_a_warning_stays_one_at_level_fail() -> None:
    settings = CheckSettings(rules={"unused-parameter": RuleSettings("fail")})
    assert findings(judged(with_gradients(BROKEN["unused-parameter"]), settings)) == [
        ("unused-parameter", "warn", "b.weight")
    ]


@pytest.mark.parametrize(
    ("rule", "limit", "accepted"),
    [
        # Eight logistic layers before the last, ‖g‖/‖w‖ is 0.25**8 = 1.526e-5 of the last.
        ("vanishing-gradient", "min_ratio", 1.5e-5),
        # The gradient of the first output passes seven factors of 5: 78125.
        ("exploding-gradient", "max_ratio", 78126.0),
        ("gradient-imbalance", "max_ratio", 1.2e6),
        ("gradient-over-time", "max_fraction", 35 / 60),
    ],
)
def test_limits_may_be_moved(rule: str, limit: str, accepted: float) -> None:
    settings = CheckSettings(rules={rule: RuleSettings(limits={limit: accepted})})
    assert judged(with_gradients(BROKEN[rule])).findings
    assert judged(with_gradients(BROKEN[rule]), settings).findings == ()
    assert judge_gradients(BROKEN[rule], {RULES[rule].limits[limit].grads_name: accepted}) == ()


def test_a_layer_may_be_left_out() -> None:
    dead = BROKEN["dead-gradient"]
    for pattern, count in (("name:a", 0), ("name:b", 1), ("type:Linear", 0)):
        settings = CheckSettings(layers=(LayerSettings(pattern, {"dead-gradient": RuleSettings("off")}),))
        settings = replace(settings, rules={"dead-gradient": RuleSettings("fail")})
        assert len(judged(with_gradients(dead), settings).findings) == count


def test_a_cause_skips_its_consequences() -> None:
    report = outcomes(judged(with_gradients(BROKEN["zero-gradient"])))
    for rule in ("dead-gradient", "vanishing-gradient", "exploding-gradient", "gradient-imbalance"):
        assert report[rule].status == "skipped"
        assert report[rule].reason == "the gradients fail zero-gradient, which causes the rest"
    assert report["unused-parameter"].status == "pass"


def test_a_backward_pass_is_not_blamed_for_what_the_forward_pass_made() -> None:
    spoilt = replace(with_gradients(BROKEN["non-finite-gradient"]), origin=NonFiniteOrigin("conv", "Conv2d", 1, 0, 9))
    report = outcomes(judged(spoilt))
    for rule in ("non-finite-gradient", "dead-gradient", "vanishing-gradient"):
        assert report[rule].reason == "a module makes NaN or Inf, which causes the rest"
    accepted = CheckSettings(rules={"non-finite-activation": RuleSettings("warn")})
    assert outcomes(judged(spoilt, accepted))["non-finite-gradient"].status == "fail"


def test_a_vanishing_gradient_is_not_called_imbalance_as_well() -> None:
    report = outcomes(judged(with_gradients(logistic_chain(12))))
    assert report["gradient-imbalance"].reason == ("the gradients fail vanishing-gradient, which causes the rest")


def test_a_cause_that_nobody_asks_for_is_said_by_the_rule_that_cannot_be_judged() -> None:
    wanted = frozenset({"vanishing-gradient"})
    report = judged(with_gradients(BROKEN["zero-gradient"]), wanted=wanted)
    assert findings(report) == [("vanishing-gradient", "fail", "")]
    assert report.findings[0].message.startswith("It could not run, because the gradients fail zero-gradient: Every")


def test_a_rule_that_is_on_for_one_layer_and_could_not_run_is_no_pass() -> None:
    settings = CheckSettings(layers=(LayerSettings("fc", {"dead-gradient": RuleSettings("fail")}),))
    unmeasured = {"dead-gradient": "The network is quantised."}
    report = judged(with_gradients(None, unmeasured=unmeasured), settings, wanted=frozenset({"dead-gradient"}))
    assert findings(report) == [("dead-gradient", "fail", "")]


def test_gradients_that_were_asked_for_and_not_taken_fail_once_with_the_reason() -> None:
    reason = dict.fromkeys(GRADIENT_RULES, "The network is quantised.")
    report = outcomes(judged(with_gradients(None, unmeasured=reason)))
    first, *others = [report[rule] for rule in RULES if rule in GRADIENT_RULES]
    assert first.status == "fail"
    assert [finding.message for finding in first.findings] == ["This rule could not run: The network is quantised."]
    assert {other.status for other in others} == {"skipped"}
    assert {other.reason for other in others} == {"The network is quantised."}
