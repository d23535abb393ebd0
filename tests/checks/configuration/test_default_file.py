"""The file that `--init` writes, and the configurations that ship."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from hookscope.checks.configuration import default_text, read_settings
from hookscope.checks.configuration.schema import SECTIONS
from hookscope.checks.rules import RULES, Limit
from hookscope.checks.settings import CheckSettings
from tests.checks.configuration.conftest import Read

CONFIGS = Path(__file__).parents[3] / "configs"


def _uncommented(text: str) -> str:
    """Turn every example on: "#key = value" is one, "# Words." are not."""
    return re.sub(r"^#(?=\S)", "", text, flags=re.MULTILINE)


def test_the_default_file_changes_nothing(read: Read) -> None:
    assert read(default_text()) == CheckSettings(source="hookscope.toml")


def test_the_default_file_states_every_rule_with_its_meaning_level_and_limits() -> None:
    text = default_text()
    stated = tomllib.loads(text)["rules"]
    assert list(stated) == list(RULES)
    one_line = " ".join(line.removeprefix("# ") for line in text.splitlines())
    for name, rule in RULES.items():
        assert rule.meaning in one_line
        limits = {limit.replace("_", "-"): rule.limits[limit].default for limit in rule.limits}
        assert stated[name] == ({"level": rule.level, **limits} if limits else rule.level)


def test_a_limit_is_stated_to_the_last_digit(monkeypatch: pytest.MonkeyPatch, read: Read) -> None:
    defaults = {"a_b": 1 / 3, "c": 1e-6, "d": 65504.0, "e": 1e22, "f": 0.0}
    limits = {name: Limit(value, "What is compared.", "Our choice.") for name, value in defaults.items()}
    rule = replace(RULES["forward"], identifier="x", level="warn", limits=limits)
    monkeypatch.setitem(RULES, "x", rule)  # type: ignore[arg-type]
    stated = tomllib.loads(default_text())["rules"]["x"]
    assert stated == {"level": "warn", "a-b": 1 / 3, "c": 1e-6, "d": 65504, "e": 1e22, "f": 0}
    assert read(default_text()).rules == {}


def test_the_lines_of_the_default_file_fit_a_screen() -> None:
    assert [line for line in default_text().splitlines() if line.startswith("#") and len(line) > 120] == []


def test_every_example_in_the_default_file_can_be_turned_on(read: Read) -> None:
    # A shape is for noise, and may not stand beside pictures.
    text = re.sub(r"^#shape = \[2, .*\n", "", default_text(), flags=re.MULTILINE)
    settings = read(_uncommented(text))
    left_alone = {"batch_size", "seed", "output_key", "loss", "mode", "rules", "source", "shape"}
    for name in CheckSettings.__dataclass_fields__.keys() - left_alone:
        assert getattr(settings, name) != getattr(CheckSettings(), name), name
    assert settings.output_key == "logits"
    assert read("[input]\nshape = [2, 3, 224, 224]\n").shape == (2, 3, 224, 224)


def test_the_default_file_shows_every_key() -> None:
    shown = tomllib.loads(_uncommented(default_text()))
    assert {(table, key) for table in SECTIONS for key in shown[table]} == {
        (table, key) for table, keys in SECTIONS.items() for key in keys
    }


def test_smoke_toml_is_the_default_file(request: pytest.FixtureRequest) -> None:
    path = CONFIGS / "smoke.toml"
    if request.config.getoption("--update-golden"):
        path.write_text(default_text(), encoding="utf-8", newline="\n")
    assert path.read_text(encoding="utf-8") == default_text(), "renew it with pytest --update-golden"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_a_shipped_configuration_works_from_any_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = read_settings(path, tmp_path)
    assert settings.source == str(path)
    # It names no file, so there is nothing that another folder could lack.
    assert (settings.images, settings.expectations, settings.baseline, settings.arch) == ((), (), None, None)


def _levels(name: str) -> dict[str, str]:
    settings = read_settings(CONFIGS / name, CONFIGS)
    levels: dict[str, str] = {rule.identifier: rule.level for rule in RULES.values()}
    levels.update({rule: changed.level for rule, changed in settings.rules.items() if changed.level is not None})
    return levels


def test_in_strict_toml_every_rule_fails() -> None:
    assert set(_levels("strict.toml").values()) == {"fail"}
    assert read_settings(CONFIGS / "strict.toml", CONFIGS).mode == "train"


def test_in_strict_toml_no_limit_is_looser_than_by_default() -> None:
    stated = tomllib.loads((CONFIGS / "strict.toml").read_text(encoding="utf-8"))["rules"]
    limits = [
        (RULES[rule].limits[key.replace("-", "_")], key, limit)
        for rule, value in stated.items()
        if isinstance(value, dict)
        for key, limit in value.items()
        if key != "level"
    ]
    assert limits
    for default, key, limit in limits:
        assert limit > default.default if key.startswith("min-") else limit < default.default, key


def test_gradients_toml_turns_on_the_rules_about_gradients_and_leaves_the_others() -> None:
    levels = _levels("gradients.toml")
    for name, rule in RULES.items():
        assert levels[name] in (("fail", "warn") if rule.needs == "gradients" else (rule.level,)), name
    settings = read_settings(CONFIGS / "gradients.toml", CONFIGS)
    assert settings.mode == "train"
    assert settings.layers == ()
