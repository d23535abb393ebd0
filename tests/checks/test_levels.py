"""Which rules are judged, at which level, and by which limits: for all layers, and for some."""

from dataclasses import replace

import pytest

from hookscope.checks.judging import wanted_rules
from hookscope.checks.rules import RULES
from hookscope.checks.settings import CheckSettings, Expectation, LayerSettings, RuleSettings
from hookscope.errors import UsageError
from tests.checks.measurements import (
    FORWARD,
    HEALTHY,
    judged,
    numbered,
    objections,
    outcomes,
    row,
    stored,
    with_output,
    with_row,
    with_stored,
)

DEFAULTS = CheckSettings()
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


def for_layers(pattern: str, rule: str, settings: RuleSettings) -> LayerSettings:
    return LayerSettings(pattern, {rule: settings})


def dead_where(*layers: LayerSettings, rule: RuleSettings | None = None) -> list[tuple[str, str]]:
    """Return the level and place of each dead rectifier under these settings."""
    settings = CheckSettings(rules={} if rule is None else {"dead-channels": rule}, layers=layers)
    found = objections(judged(DEAD, settings, wanted_rules(settings, ["dead-channels"])))
    return [(level, where) for _, level, where in found]


def test_by_default_all_rules_are_wanted_but_those_that_are_off() -> None:
    on = {name for name, rule in RULES.items() if rule.level != "off"}
    assert wanted_rules(DEFAULTS) == on
    assert all(RULES[name].needs == "gradients" for name in RULES.keys() - on)


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
    assert objections(report) == [("dead-channels", "fail", "relu")]
    assert report.exit_code == 1


def test_a_selected_rule_that_is_on_keeps_its_level() -> None:
    assert dead_where() == [("warn", "early.relu"), ("warn", "late.relu")]
    assert dead_where(rule=RuleSettings("fail")) == [("fail", "early.relu"), ("fail", "late.relu")]


@pytest.mark.parametrize("option", ["--select", "--ignore"])
def test_an_unknown_rule_is_refused_with_the_nearest(option: str) -> None:
    with pytest.raises(UsageError, match=rf"{option} 'dead-chanels' is no rule\. Nearest: 'dead-channels'") as caught:
        wanted_rules(DEFAULTS, **{option.strip("-"): ["dead-chanels"]})
    assert "hookscope check --rules" in str(caught.value)


def test_a_glob_that_matches_no_rule_is_refused() -> None:
    with pytest.raises(UsageError, match="'fp32-\\*' is no rule"):
        wanted_rules(DEFAULTS, ["forward", "fp32-*"])


def test_no_rule_at_all_is_refused() -> None:
    with pytest.raises(UsageError, match="No rule is left"):
        wanted_rules(DEFAULTS, ignore=["*"])


def test_settings_may_not_name_rules_or_limits_that_do_not_exist() -> None:
    with pytest.raises(UsageError, match=r"'dead-chanels'\. Nearest: 'dead-channels'"):
        wanted_rules(CheckSettings(rules={"dead-chanels": RuleSettings("off")}))
    layer = for_layers("relu", "dead-channels", RuleSettings(limits={"max_fractions": 0.5}))
    with pytest.raises(UsageError, match=r"dead-channels has no limit 'max_fractions'\. Nearest: 'max_fraction'"):
        wanted_rules(CheckSettings(layers=(layer,)))


def test_a_limit_that_the_settings_move_is_kept_to() -> None:
    some = with_row("relu", dead_channel_count=2)
    assert judged(some).findings == ()
    settings = CheckSettings(rules={"dead-channels": RuleSettings(limits={"max_fraction": 0.49})})
    (finding,) = judged(some, settings).findings
    assert "50.0% of its 4 channels are 0 over all 2 inputs (limit 49%)" in finding.message


def test_a_limit_may_differ_for_some_layers() -> None:
    accepted = RuleSettings(limits={"max_fraction": 1.0})
    assert dead_where(for_layers("early", "dead-channels", accepted)) == [("warn", "late.relu")]
    assert dead_where(for_layers("type:ReLU", "dead-channels", accepted)) == []
    assert dead_where(for_layers("!early", "dead-channels", accepted)) == [("warn", "early.relu")]


def test_a_level_may_differ_for_some_layers_and_failures_come_first() -> None:
    fail, off = RuleSettings("fail"), RuleSettings("off")
    assert dead_where(for_layers("late*", "dead-channels", fail)) == [("fail", "late.relu"), ("warn", "early.relu")]
    assert dead_where(for_layers("/^late/", "dead-channels", off)) == [("warn", "early.relu")]


def test_the_later_layer_settings_go_over_the_earlier() -> None:
    off, fail = RuleSettings("off"), RuleSettings("fail")
    first, second = for_layers("relu", "dead-channels", off), for_layers("late", "dead-channels", fail)
    assert dead_where(first, second) == [("fail", "late.relu")]
    assert dead_where(second, first) == []


def test_what_the_network_returns_is_a_layer_by_its_type() -> None:
    changed = with_output(repeat_difference=0.5)
    accepted = RuleSettings(limits={"max_difference": 0.5})
    for pattern, count in (("type:Net", 0), ("type:Linear", 1)):
        settings = CheckSettings(layers=(for_layers(pattern, "repeatability", accepted),))
        assert len(judged(changed, settings).findings) == count


def test_a_later_limit_keeps_an_earlier_level() -> None:
    layers = (
        for_layers("relu", "dead-channels", RuleSettings("fail")),
        for_layers("relu", "dead-channels", RuleSettings(limits={"max_fraction": 0.9})),
    )
    assert dead_where(*layers) == [("fail", "early.relu"), ("fail", "late.relu")]


def test_a_rule_that_is_on_for_some_layers_only_is_wanted_and_silent_elsewhere() -> None:
    settings = CheckSettings(
        rules={"dead-channels": RuleSettings("off")},
        layers=(for_layers("late", "dead-channels", RuleSettings("fail")),),
    )
    assert "dead-channels" in wanted_rules(settings)
    assert objections(judged(DEAD, settings, wanted_rules(settings))) == [("dead-channels", "fail", "late.relu")]


@pytest.mark.parametrize("pattern", ["conv.bias", "name:conv", "type:Conv2d", "/^conv$/"])
def test_a_pattern_may_mean_a_parameter_by_its_layer_its_type_or_itself(pattern: str) -> None:
    settings = CheckSettings(layers=(for_layers(pattern, "non-finite-parameter", RuleSettings("off")),))
    assert judged(with_stored("conv.bias", nan_count=1), settings).findings == ()
    assert len(judged(with_stored("head.weight", nan_count=1), settings).findings) == 1


def test_a_pattern_may_mean_an_alias() -> None:
    tied = replace(HEALTHY, stored=(stored("embedding.weight", "Embedding", aliases=("decoder.weight",), nan_count=1),))
    settings = CheckSettings(layers=(for_layers("decoder", "non-finite-parameter", RuleSettings("off")),))
    assert judged(tied, settings).findings == ()


def test_a_layer_without_the_rule_does_not_count_as_the_worst() -> None:
    settings = CheckSettings(layers=(for_layers("conv", "fp16-headroom", RuleSettings("off")),))
    both = replace(with_row("conv", max=60000.0), stored=with_stored("head.weight", max_abs=50000.0).stored)
    assert objections(judged(both, settings)) == [("fp16-headroom", "warn", "head.weight")]


def test_a_pattern_that_matches_everything_says_nothing_about_the_whole_checkpoint() -> None:
    settings = CheckSettings(
        expectations=(Expectation("cat.jpg", "crane"),),  # type: ignore[arg-type]
        layers=(for_layers("!nothing", "dead-gradient", RuleSettings("off")),),
    )
    assert outcomes(judged(HEALTHY, settings))["expectation"].status == "fail"


def test_a_pattern_that_cannot_be_read_is_refused() -> None:
    settings = CheckSettings(layers=(for_layers("/(/", "dead-channels", RuleSettings("off")),))
    with pytest.raises(UsageError, match="not a regular expression"):
        judged(HEALTHY, settings)
