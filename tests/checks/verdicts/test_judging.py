import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from hookscope.checks import verdicts
from hookscope.checks.verdicts import RULES, Limits, judge
from hookscope.results.gradients import Verdict
from hookscope.results.network import Failure
from tests.checks.verdicts.conftest import chain, inspection, layer_row, logistic_chain, output_row, parameter, tensor

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
    judged = judge(EVERYTHING)
    assert [(verdict.level, verdict.rule) for verdict in judged] == [
        ("fail", "non-finite-loss"),
        ("fail", "non-finite-activation"),
        ("fail", "non-finite-gradient"),
        ("warn", "unused-parameter"),
        ("warn", "dead-channels"),
    ]
    order = [("fail", "warn").index(verdict.level) for verdict in judged]
    assert all(first <= second for first, second in pairwise(order))


def test_a_sound_pass_has_no_verdict() -> None:
    assert judge(chain([1.0] * 30)) == ()


@pytest.mark.parametrize("judged", [EVERYTHING, logistic_chain(30), chain([3.0] * 30)])
def test_every_message_is_one_sentence_with_the_measured_value_and_the_limit(judged: object) -> None:
    for verdict in judge(judged):  # type: ignore[arg-type]
        assert verdict.rule in RULES
        assert verdict.message.endswith(".")
        assert "\n" not in verdict.message
        assert re.search(r"limit|must be finite|never get", verdict.message)


def test_of_a_pass_that_broke_off_only_activations_are_judged() -> None:
    failure = Failure("act", "Tanh", (), "RuntimeError: no")
    for judged in (replace(EVERYTHING, failure=failure), replace(EVERYTHING, loss=None)):
        assert {verdict.rule for verdict in judge(judged)} <= {
            "non-finite-loss",
            "non-finite-activation",
            "dead-channels",
        }


def test_an_empty_inspection_has_no_verdict() -> None:
    assert judge(inspection()) == ()


def test_verdicts_already_there_are_not_looked_at() -> None:
    judged = replace(chain([1.0] * 30), verdicts=(Verdict("zero-gradient", "fail", "", "Old."),))
    assert judge(judged) == ()


def test_every_rule_says_its_level_first_and_where_its_limit_comes_from() -> None:
    for meaning in RULES.values():
        assert meaning.startswith(("fail: ", "warn: "))
        assert meaning.endswith(".")
    assert sum("our choice" in meaning for meaning in RULES.values()) >= 6


def test_every_limit_is_documented() -> None:
    assert Limits.__doc__ is not None
    for name in Limits.__slots__:
        assert re.search(rf"^ +{name}: ", Limits.__doc__, re.MULTILINE)


def test_rules_and_limits_are_known_without_numpy() -> None:
    imports = "import sys; from hookscope.checks.verdicts import RULES, Limits"
    script = f"{imports}; assert not {{'numpy', 'torch'}} & set(sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'jugde'"):
        verdicts.jugde  # noqa: B018
