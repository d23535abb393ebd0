"""Every key of a configuration reaches its setting; what --init writes, and the configurations that ship."""

import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from hookscope.commands.check.configuration.default_file import default_text
from hookscope.commands.check.configuration.reading import read_settings
from hookscope.commands.check.configuration.schema import SECTIONS
from hookscope.options import Check
from hookscope.results.noise_shapes import NoiseShape
from hookscope.rules import RULES
from hookscope.rules.rule import Limit
from hookscope.rules.settings import CheckSettings, Expectation, LayerSettings, RuleSettings, with_options
from tests.commands.check.configuration.conftest import Read

_NAMED_NOISE = (NoiseShape((2, 5), "m"), NoiseShape((2, 9), "t", "int64", 7))

# Each line: table, key, value in TOML, the setting and what it comes to.
_KEYS: list[tuple[str, str, str, str, Any]] = [
    ("model", "arch", "'resnet18'", "arch", "resnet18"),
    ("model", "arch", "'package.module:build'", "arch", "package.module:build"),
    (
        "model",
        "arguments",
        "{ width = 2, name = '2', on = true, sizes = [1, 2.5] }",
        "model_arg",
        {"width": 2, "name": "2", "on": True, "sizes": [1, 2.5]},
    ),
    ("model", "key", "'ema'", "key", "ema"),
    ("model", "allow-missing", "['fc.*', 'head']", "allow_missing", ("fc.*", "head")),
    ("model", "allow-unexpected", "['aux.*']", "allow_unexpected", ("aux.*",)),
    ("model", "allow-global", "['vendornet.*']", "allow_global", ("vendornet.*",)),
    ("model", "classes", "'classes.txt'", "classes", Path("classes.txt")),
    ("input", "images", "['cat.jpg', 'pictures/']", "images", (Path("cat.jpg"), Path("pictures"))),
    ("input", "images", "['/data/cat.jpg']", "images", (Path("/data/cat.jpg"),)),
    ("input", "data", "'val'", "data", Path("val")),
    ("input", "survey", "'run'", "survey", Path("run")),
    ("input", "shape", "[2, 3, 224, 224]", "input_shape", (NoiseShape((2, 3, 224, 224)),)),
    ("input", "shape", "'2,9:int64<7'", "input_shape", (NoiseShape((2, 9), "", "int64", 7),)),
    ("input", "shape", "[[2, 9], 'm=2,5']", "input_shape", (NoiseShape((2, 9)), NoiseShape((2, 5), "m"))),
    ("input", "shape", "{ m = [2, 5], t = '2,9<7' }", "input_shape", _NAMED_NOISE),
    ("input", "resize", "256", "resize", 256),
    ("input", "resize", "'240x320'", "resize", "240x320"),
    ("input", "crop", "'none'", "crop", "none"),
    ("input", "mean", "[0.485, 0.456, 0.406]", "mean", (0.485, 0.456, 0.406)),
    ("input", "mean", "'none'", "mean", "none"),
    ("input", "std", "0.5", "std", 0.5),
    ("input", "max-pixels", "1000", "max_pixels", 1000),
    ("input", "batch-axis", "0", "batch_axis", 0),
    ("input", "batch-axis", "'none'", "batch_axis", "none"),
    ("input", "named", "{ sr = 16000, b = 'in/b.npy' }", "input", {"sr": 16000, "b": Path("in/b.npy")}),
    ("input", "batch-size", "3", "batch_size", 3),
    ("input", "seed", "7", "seed", 7),
    ("output", "shape", "['N', 1000, '*']", "output_shape", ("N", 1000, "*")),
    ("output", "shape", "[]", "output_shape", ()),
    ("output", "dtype", "'float32'", "output_dtype", "float32"),
    ("output", "key", "'logits'", "output_key", "logits"),
    ("output", "multi-label", "true", "multi_label", True),
    ("gradients", "loss", "'ce'", "loss", "ce"),
    ("gradients", "target", "'zeros'", "target", "zeros"),
    ("gradients", "target", "285", "target", "285"),
    ("gradients", "mode", "'train'", "mode", "train"),
    ("baseline", "file", "'baseline.json'", "baseline", Path("baseline.json")),
]


@pytest.mark.parametrize(("table", "key", "value", "setting", "expected"), _KEYS)
def test_a_key_changes_its_setting_and_no_other(
    read: Read, table: str, key: str, value: str, setting: str, expected: Any
) -> None:
    settings = read(f"[{table}]\n{key} = {value}\n")
    assert settings == CheckSettings(**{setting: expected}, source="hookscope.toml")
    assert with_options(settings, Check()) == settings  # options that are not given change nothing


def test_no_key_and_no_setting_is_left_out_of_these_tests() -> None:
    assert {(table, key) for table, key, *_ in _KEYS} == {
        (table, key) for table, section in SECTIONS.items() for key in [*section.keys()]
    }
    elsewhere = {"rules", "layers", "expectations", "source"}
    assert {setting for *_, setting, _ in _KEYS} == {field.name for field in fields(CheckSettings)} - elsewhere


def test_what_an_argument_comes_to_is_what_the_model_is_built_with(read: Read) -> None:
    from hookscope.models.python_source import parse_arguments

    settings = read("[model.arguments]\na = 1\nb = '1'\nc = \"x='\\\"\"\nd = [true, 1e-3]\n")
    expected = {"a": 1, "b": "1", "c": "x='\"", "d": [True, 1e-3]}
    assert parse_arguments(settings.model_arg) == expected


@pytest.mark.usefixtures("limited_rule")
def test_a_rule_takes_a_level_or_a_table_of_level_and_limits(read: Read) -> None:
    settings = read("[rules]\nforward = 'warn'\nbright-channels = { level = 'fail', max-fraction = 0.5 }\n")
    assert settings.rules == {
        "forward": RuleSettings("warn"),
        "bright-channels": RuleSettings("fail", {"max_fraction": 0.5}),
    }


@pytest.mark.usefixtures("limited_rule")
def test_limits_alone_keep_the_level(read: Read) -> None:
    settings = read("[rules.bright-channels]\nmax-fraction = 1\nfactor = 2e6\n")
    assert settings.rules == {"bright-channels": RuleSettings(None, {"max_fraction": 1.0, "factor": 2e6})}


@pytest.mark.usefixtures("limited_rule")
def test_what_repeats_the_defaults_is_no_change(read: Read) -> None:
    text = "[rules]\nforward = 'fail'\nbright-channels = { level = 'warn', max-fraction = 0.5, factor = 10000 }\n"
    assert read(text).rules == {"bright-channels": RuleSettings(None, {"max_fraction": 0.5})}


@pytest.mark.usefixtures("limited_rule")
def test_layers_keep_their_order_and_what_repeats_the_defaults(read: Read) -> None:
    settings = read(
        "[[layers]]\npattern = 'layer4.*'\nbright-channels = 'off'\n"
        "[[layers]]\npattern = '!/4[.]0$/'\nexploding-gradient = 'off'\ndead-channels = 'warn'\n"
        "bright-channels = { max-fraction = 0.9 }\n"
    )
    assert settings.layers == (
        LayerSettings("layer4.*", {"bright-channels": RuleSettings("off")}),
        LayerSettings(
            "!/4[.]0$/",
            {
                "exploding-gradient": RuleSettings("off"),
                "dead-channels": RuleSettings("warn"),
                "bright-channels": RuleSettings(None, {"max_fraction": 0.9}),
            },
        ),
    )


def test_expectations_about_pictures(read: Read) -> None:
    settings = read(
        "[[expect]]\nimage = 'cat.jpg'\ntop1 = 'Egyptian cat'\ncontains = ['tabby', 282]\n"
        "k = 2\nmin-probability = 0.3\n"
        "[[expect]]\nimage = 'dog.jpg'\ntop1 = 207\n"
    )
    assert settings.expectations == (
        Expectation(Path("cat.jpg"), "Egyptian cat", ("tabby", 282), 2, 0.3),
        Expectation(Path("dog.jpg"), 207),
    )


def test_paths_begin_at_the_folder_of_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    config = folder / "mine.toml"
    config.write_text(
        "model.arch = 'nets/net.py:build'\ninput.images = ['cat.jpg']\n"
        "gradients = { loss = 'loss.py:mine', target = 'target.npy' }\n"
        "baseline.file = '../baseline.json'\nexpect = [{ image = 'dog.jpg', top1 = 1 }]\n",
        encoding="utf-8",
    )
    settings = read_settings(config, tmp_path)
    assert settings.arch == f"{folder}/nets/net.py:build"
    assert settings.images == (folder / "cat.jpg",)
    assert settings.loss == f"{folder}/loss.py:mine"
    assert settings.target == f"{folder}/target.npy"
    assert settings.baseline == folder / "../baseline.json"
    assert settings.expectations[0].image == folder / "dog.jpg"
    assert settings.source == str(config)


def test_without_a_file_the_defaults_hold(tmp_path: Path) -> None:
    assert read_settings(None, tmp_path) == CheckSettings()


def test_hookscope_toml_comes_before_pyproject_toml(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.hookscope.input]\nseed = 1\n")
    assert read_settings(None, tmp_path).seed == 1
    assert read_settings(None, tmp_path).source == "pyproject.toml"
    (tmp_path / "hookscope.toml").write_text("[input]\nseed = 2\n")
    assert read_settings(None, tmp_path).seed == 2
    assert read_settings(None, tmp_path).source == "hookscope.toml"


def test_the_file_that_is_asked_for_comes_before_what_is_found(tmp_path: Path) -> None:
    (tmp_path / "hookscope.toml").write_text("[input]\nseed = 2\n")
    (tmp_path / "pyproject.toml").write_text("[tool.hookscope.input]\nseed = 1\n")
    assert read_settings(tmp_path / "pyproject.toml", tmp_path).seed == 1


@pytest.mark.parametrize("text", ["", "[project]\nname = 'x'\n", "[tool.ruff]\n", "tool = 3\n"])
def test_a_pyproject_toml_of_other_things_is_no_configuration(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert read_settings(None, tmp_path) == CheckSettings()


def test_only_a_file_of_that_very_name_is_a_pyproject_toml(tmp_path: Path) -> None:
    folder = tmp_path / "pyproject.toml"
    folder.mkdir()
    (folder / "my-pyproject.toml").write_text("[input]\nseed = 1\n")
    assert read_settings(folder / "my-pyproject.toml", tmp_path).seed == 1


def test_every_rule_can_be_set(read: Read) -> None:
    text = "".join(f"{name} = '{'off' if rule.level == 'fail' else 'fail'}'\n" for name, rule in RULES.items())
    assert read(f"[rules]\n{text}").rules.keys() == RULES.keys()


def test_a_byte_order_mark_and_windows_line_ends_are_passed_over(read: Read) -> None:
    assert read("\ufeff[input]\r\nseed = 2\r\n").seed == 2


CONFIGS = Path(__file__).parents[4] / "configs"


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
    limits = {name: Limit(value, "What is compared.", "") for name, value in defaults.items()}
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
    left_alone = {"batch_size", "seed", "output_key", "loss", "mode", "rules", "source", "input_shape"}
    for name in CheckSettings.__dataclass_fields__.keys() - left_alone:
        assert getattr(settings, name) != getattr(CheckSettings(), name), name
    assert settings.output_key == "logits"
    assert read("[input]\nshape = [2, 3, 224, 224]\n").input_shape == (NoiseShape((2, 3, 224, 224)),)


def test_the_default_file_shows_every_key() -> None:
    shown = tomllib.loads(_uncommented(default_text()))
    assert {(table, key) for table in SECTIONS for key in shown[table]} == {
        (table, key) for table, section in SECTIONS.items() for key in [*section.keys()]
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


def test_in_strict_toml_every_rule_fails_but_the_one_for_networks_that_are_to_be_in_float8() -> None:
    assert {rule for rule, level in _levels("strict.toml").items() if level != "fail"} == {"float8-range"}
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
