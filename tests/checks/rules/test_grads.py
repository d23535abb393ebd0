import re
from dataclasses import replace

import pytest

from hookscope.checks.judging import judge_gradients
from hookscope.checks.rules import GRADS_RULES, RULES, grads_limits
from hookscope.results.findings import Finding
from hookscope.results.network import Failure
from tests.checks.rules.by_hand import (
    chain,
    inspection,
    layer_row,
    logistic_chain,
    output_row,
    parameter,
    rules,
    tensor,
)

EVERYTHING = inspection(
    [
        layer_row("stem", tensor(1.0, (1, 10, 8, 8), channel_axis=1, channel_count=10, dead_channel_count=10), "ReLU"),
        layer_row("act", tensor(1.0, nan_count=1), "Tanh"),
    ],
    [output_row("stem", tensor(1.0, inf_count=1)), output_row("act", tensor(1.0), "Tanh")],
    [parameter("aux.weight", None, status="not reached"), parameter("act.weight", 1.0)],
    loss=float("nan"),
)


def test_failures_come_first_then_the_order_of_the_rules() -> None:
    judged = judge_gradients(EVERYTHING)
    assert [(verdict.level, verdict.rule) for verdict in judged] == [
        ("fail", "non-finite-loss"),
        ("fail", "non-finite-activation"),
        ("fail", "non-finite-gradient"),
        ("warn", "unused-parameter"),
        ("warn", "dead-channels"),
    ]


@pytest.mark.parametrize("judged", [EVERYTHING, logistic_chain(30), chain([3.0] * 30)])
def test_every_message_is_one_sentence_with_the_measured_value_and_the_limit(judged: object) -> None:
    for verdict in judge_gradients(judged):  # type: ignore[arg-type]
        assert verdict.rule in RULES
        assert verdict.message.endswith(".")
        assert "\n" not in verdict.message
        assert re.search(r"limit|must be finite|never get", verdict.message)


def test_of_a_pass_that_broke_off_only_activations_are_judged() -> None:
    failure = Failure("act", "Tanh", (), "RuntimeError: no")
    for judged in (replace(EVERYTHING, failure=failure), replace(EVERYTHING, loss=None)):
        assert {verdict.rule for verdict in judge_gradients(judged)} <= {
            "non-finite-loss",
            "non-finite-activation",
            "dead-channels",
        }


def test_an_empty_inspection_has_no_verdict() -> None:
    assert judge_gradients(inspection()) == ()


def test_verdicts_already_there_are_not_looked_at() -> None:
    judged = replace(chain([1.0] * 30), verdicts=(Finding("zero-gradient", "fail", "", "Old."),))
    assert judge_gradients(judged) == ()


def test_what_makes_nan_is_a_guess_here_and_silences_nothing() -> None:
    dead = {"channel_axis": 1, "channel_count": 10, "dead_channel_count": 10}
    outputs = [
        layer_row("conv", tensor(1.0, nan_count=1)),
        layer_row("relu", tensor(1.0, (1, 10, 8, 8), **dead), "ReLU"),
    ]
    assert rules(inspection(outputs)) == ["non-finite-activation", "dead-channels"]


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
