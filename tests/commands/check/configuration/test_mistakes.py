"""Every mistake in a configuration is one line that says where, what and what would be right."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hookscope.commands.check.configuration.default_file import default_text
from hookscope.commands.check.configuration.reading import read_settings
from hookscope.errors import UsageError
from hookscope.rules.settings import CheckSettings
from tests.commands.check.configuration.conftest import Read


def _message(read: Read, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        read(text)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.usefixtures("limited_rule")
@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("\nmodle = 3\n", 2, "unknown key 'modle' at the top level. Nearest: 'model'."),
        ("seed = 3\n", 1, "unknown key 'seed' at the top level. It belongs in [input]."),
        ("[model]\nshape = [1]\n", 2, "unknown key 'shape' in [model]. It belongs in [input] or [output]."),
        ("[output]\nzzzz = 3\n", 2, "unknown key 'zzzz' in [output]. Known: 'shape', 'dtype', 'key', 'multi-label'."),
        ("[input]\nseed = 3\n# so\nbatch_size = 8\n", 4, "unknown key 'batch_size' in [input]. Nearest: 'batch-size'."),
        ("[rules]\n\ndead-chanels = 'off'\n", 3, "unknown key 'dead-chanels' in [rules]. Nearest: 'dead-channels'."),
        ("[rules]\nx = 'off'\n", 2, "unknown key 'x' in [rules]. `hookscope check --rules` lists the rules."),
        (
            "[[layers]]\npattern = 'a'\nforward = 'off'\n[[layers]]\npatern = 'b'\n",
            5,
            "unknown key 'patern' in [[layers]]. Nearest: 'pattern'.",
        ),
        (
            "[rules]\nbright-channels = { max_fraction = 0.5 }\n",
            2,
            "unknown key 'max_fraction' in [rules.bright-channels]. Nearest: 'max-fraction'.",
        ),
        ("[rules.forward]\nseverity = 'off'\n", 2, "unknown key 'severity' in [rules.forward]. Known: 'level'."),
        (
            "expect = [\n  { image = 'a.png', top1 = 1 },\n  { image = 'b.png', topl = 1 },\n]\n",
            1,
            "unknown key 'topl' in [[expect]]. Nearest: 'top1'.",
        ),
    ],
)
def test_an_unknown_key_is_named_with_its_line_and_the_nearest(read: Read, text: str, line: int, problem: str) -> None:
    assert _message(read, text) == f"hookscope.toml, line {line}: {problem}"


@pytest.mark.usefixtures("limited_rule")
@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("model = 3", "model at the top level must be a table, not 3."),
        ("layers = [1]", "item 1 of layers at the top level must be a table, not 1."),
        ("model.arch = ''", "arch in [model] must be a string that is not empty, not ''."),
        ("model.arguments = ['width=2']", "arguments in [model] must be a table, not a list."),
        ("model.arguments = { 'a b' = 1 }", "a b in [model.arguments] cannot be the name of an argument."),
        (
            "model.arguments = { a = nan }",
            "a in [model.arguments] must be a string, finite number, true, false, or a list of these, not nan.",
        ),
        (
            f"model.arguments = {{ a = 0x{'f' * 5000} }}",
            "a in [model.arguments] must be a string, finite number, true, false, or a list of these, not a huge one.",
        ),
        (
            "model.allow-missing = ['a', 2]",
            "item 2 of allow-missing in [model] must be a string that is not empty, not 2.",
        ),
        (
            'input.images = ["a\\u0000"]',
            "item 1 of images in [input] must be a string that is not empty, not 'a\\x00'.",
        ),
        (
            "input.shape = 3",
            "shape in [input] is wrong: '3' is not a shape. Give sizes like 1,3,224,224, or tokens=4,20:int64<1000.",
        ),
        (
            "input.shape = [2, 3, 'x']",
            "shape in [input] is wrong: 'x' is not a size. Give sizes like 1,3,224,224, or tokens=4,20:int64<1000.",
        ),
        (
            "input.shape = [0, 3]",
            (
                "shape in [input] is wrong: '0,3' has a size below 1. Give sizes like 1,3,224,224, or "
                "tokens=4,20:int64<1000."
            ),
        ),
        (
            "input.shape = [65536, 4097]",
            "shape in [input] is wrong: '65536,4097' has more than 268435456 values. Give a smaller shape.",
        ),
        (
            "input.shape = { tokens = '2,3:int46' }",
            (
                "shape in [input] is wrong: 'tokens=2,3:int46': there is no dtype 'int46'. Nearest: 'int64', 'int16', "
                "'int8'."
            ),
        ),
        (
            "input.resize = '240*320'",
            "resize in [input] must be pixels like 224, 'HEIGHTxWIDTH' like '192x256', or 'none', not '240*320'.",
        ),
        ("input.crop = 0", "crop in [input] must be pixels like 224, 'HEIGHTxWIDTH' like '192x256', or 'none', not 0."),
        ("input.mean = [0.5, '0.5']", "item 2 of mean in [input] must be a valid number, not '0.5'."),
        ("input.mean = []", "mean in [input] must be a valid number, a list that is not empty or 'none', not a list."),
        ("input.mean = inf", "mean in [input] must be a finite number, a list or 'none', not inf."),
        ("input.std = [1, 0]", "std in [input] must be above 0: it is the standard deviation of each channel."),
        ("input.batch-size = 8.0", "batch-size in [input] must be a valid integer, not 8.0."),
        ("input.seed = -1", "seed in [input] must be greater than or equal to 0, not -1."),
        (
            "input.seed = 0x8000000000000000",
            "seed in [input] must be less than 9223372036854775808, not 9223372036854775808.",
        ),
        (
            "output.shape = ['B', 10]",
            "item 1 of shape in [output] must be a size, 'N' for the number of inputs, or '*' for any size, not 'B'.",
        ),
        ("gradients.target = -1", "target in [gradients] must be a class, by name or index, not -1."),
        ("rules.forward = 'error'", "forward in [rules] must be 'fail', 'warn' or 'off', not 'error'."),
        (
            "rules.forward = false",
            "forward in [rules] must be a level ('fail', 'warn' or 'off') or a table of level and limits, not false.",
        ),
        (
            "rules.bright-channels.max-fraction = 1.5",
            "max-fraction in [rules.bright-channels] must be less than or equal to 1, not 1.5.",
        ),
        ("rules.bright-channels.factor = nan", "factor in [rules.bright-channels] must be a finite number, not nan."),
        (
            f"rules.bright-channels.factor = 0x{'f' * 5000}",
            "factor in [rules.bright-channels] must be a valid number, not a huge one.",
        ),
        (
            "layers = [{ forward = 'off' }]",
            "[[layers]] lacks a pattern. Name the layers, for example pattern = 'layer4.*'.",
        ),
        ("layers = [{ pattern = 'a' }]", "[[layers]] changes no rule. Add one, for example dead-channels = 'off'."),
        (
            "layers = [{ pattern = 'conv@3', forward = 'off' }]",
            "pattern in [[layers]] is 'conv@3', which picks by position. Name the layers instead.",
        ),
        (
            "layers = [{ pattern = 'conv', output-shape = 'off' }]",
            "output-shape in [[layers]] is about the whole checkpoint, not about layers. Set it in [rules].",
        ),
        (
            "layers = [{ pattern = 'conv', vanishing-gradient = { min-ratio = 0.5 } }]",
            "vanishing-gradient in [[layers]] has min-ratio, a limit for the whole network. Set it in [rules].",
        ),
        (
            "layers = [{ pattern = 'conv', untrained-norm = { min-trained-fraction = 0.5 } }]",
            "untrained-norm in [[layers]] has min-trained-fraction, a limit for the whole network. Set it in [rules].",
        ),
        (
            "layers = [{ pattern = 'name:', forward = 'off' }]",
            (
                "pattern in [[layers]] is wrong: 'name:' is empty: give a part of a layer's name or type, "
                "e.g. --layer conv."
            ),
        ),
        ("expect = [{ top1 = 1 }]", "[[expect]] lacks an image. Name the picture, for example image = 'cat.jpg'."),
        ("expect = [{ image = 'a.png', k = 2 }]", "[[expect]] expects nothing. Add top1, contains or min-probability."),
        (
            "expect = [{ image = 'a.png', contains = [] }]",
            "[[expect]] expects nothing. Add top1, contains or min-probability.",
        ),
        (
            "expect = [{ image = 'a.png', top1 = 1, k = 2 }]",
            "[[expect]] has k, which is how many places 'contains' looks at, but no contains. Add it.",
        ),
        (
            "expect = [{ image = 'a.png', contains = [1, 2, 3], k = 2 }]",
            "contains in [[expect]] names 3 classes, more than the first 2 can hold. Raise k.",
        ),
        (
            "input = { images = ['a.png'], shape = [1, 3, 8, 8] }",
            "shape in [input] is for noise, but pictures are named. Drop one.",
        ),
    ],
)
def test_a_value_that_cannot_be_right_is_named_with_what_would_be(read: Read, statement: str, problem: str) -> None:
    assert _message(read, f"# A comment.\n\n{statement}\n") == f"hookscope.toml, line 3: {problem}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "[input]\nshape = [1, 3, 8, 8]\n[[expect]]\nimage = 'a.png'\ntop1 = 1\n",
            r"shape in \[input\] is for noise, but .*",
        ),
        ("[[layers]]\npattern = '/(/'\nforward = 'off'\n", r"pattern in .*: '/\(/' is not a regular expression: .*"),
        ("[output]\ndtype = 'flaot32'\n", r"dtype in \[output\] must be 'float16', 'bfloat16', .*, not 'flaot32'\."),
    ],
)
def test_a_picture_beside_noise_no_expression_and_an_unknown_dtype_are_named(
    read: Read, text: str, problem: str
) -> None:
    assert re.fullmatch(rf"hookscope\.toml, line 2: {problem}", _message(read, text))


def test_tables_of_pyproject_toml_are_called_by_their_full_name(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n[tool.hookscope.rules]\nforwrd = 'off'\n")
    with pytest.raises(UsageError) as caught:
        read_settings(None, tmp_path)
    assert str(caught.value) == (
        "pyproject.toml, line 4: unknown key 'forwrd' in [tool.hookscope.rules]. Nearest: 'forward'."
    )


def test_a_pyproject_toml_that_is_asked_for_must_have_the_table_as_one(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    with pytest.raises(UsageError, match=re.escape("has no table [tool.hookscope].")):
        read_settings(tmp_path / "pyproject.toml", tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool]\nhookscope = 3\n")
    with pytest.raises(UsageError, match=re.escape("line 2: hookscope in [tool] must be a table, not 3.")):
        read_settings(None, tmp_path)


@pytest.mark.parametrize("name", ["missing.toml", "", "a\0b"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"Cannot read the configuration .*: .*\. Give a TOML file;") as caught:
        read_settings(tmp_path / name, tmp_path)
    assert str(caught.value).isprintable()


def test_a_link_to_nowhere_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "hookscope.toml").symlink_to("missing.toml")
    with pytest.raises(UsageError, match=r"Cannot read the configuration hookscope\.toml: No such file or directory\."):
        read_settings(None, tmp_path)


def test_what_is_not_toml_is_said_with_its_line(read: Read) -> None:
    assert _message(read, "[input]\nseed = \n") == "hookscope.toml is not TOML: Invalid value (at line 2, column 8)."
    assert _message(read, "[input]\n# \0\n") == (
        "hookscope.toml is not TOML: Found invalid character '\\x00' (at line 2, column 3)."
    )


def test_lines_of_windows_files_are_counted_the_same(read: Read) -> None:
    text = '[model]\r\nkey = """\r\n\r\n"""\r\n\r\n[input]\r\nseeed = 1\r\n'
    assert _message(read, text) == "hookscope.toml, line 7: unknown key 'seeed' in [input]. Nearest: 'seed'."


def test_what_is_not_utf8_is_said_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "hookscope.toml").write_bytes(b"[input]\nseed = 1\n# caf\xe9\n")
    with pytest.raises(UsageError, match=r"^hookscope\.toml, line 3: this is not UTF-8\. Save the file as UTF-8\.$"):
        read_settings(None, tmp_path)


def test_a_huge_file_is_refused_and_the_largest_is_read(read: Read) -> None:
    assert read("#" * 2**20) == CheckSettings(source="hookscope.toml")
    assert "is over the limit of 1048576 bytes" in _message(read, "#" * (2**20 + 1))


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no endless file here")
def test_an_endless_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a device, not a regular file"):
        read_settings(Path("/dev/zero"), Path())
    with (tmp_path / "hookscope.toml").open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(UsageError, match="is over the limit"):
        read_settings(tmp_path / "hookscope.toml", Path())


@pytest.mark.parametrize("depth", [10, 100, 250, 500, 1000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ("{a=", "}")])
def test_a_value_of_any_depth_is_one_line(read: Read, depth: int, opening: str, closing: str) -> None:
    for key in ("model.key", "model.arguments.x", "unknown"):
        text = f"{key} = {opening * depth}1{closing * depth}\n"
        try:
            assert read(text).model_arg  # a list of lists is a literal
        except UsageError as error:
            assert re.search("line 1: |is nested too deeply", str(error))  # noqa: PT017 - each depth may go either way


def test_steering_sequences_in_names_and_values_are_spelled_out(tmp_path: Path, read: Read) -> None:
    assert _message(read, '"\\u001b[31mx\\u202e" = 1\n').startswith(
        "hookscope.toml, line 1: unknown key '\\x1b[31mx\\u202e' at the top level."
    )
    assert "not '\\x1b]0;x\\x07\\n'." in _message(read, 'model.arguments = "\\u001b]0;x\\u0007\\n"\n')
    assert "unknown key '\\x3a:error::x'" in _message(read, '[rules]\n"::error::x" = "off"\n')
    assert len(_message(read, f"{'k' * 100_000} = 1\n")) < 500
    path = tmp_path / "\x1b[31m\n.toml"
    for content in (None, "x", "x = 1\n", "#" * 2**21):  # missing, not TOML, an unknown key, too large
        if content is not None:
            path.write_text(content)
        with pytest.raises(UsageError) as caught:
            read_settings(path, tmp_path)
        assert str(caught.value).isprintable()


_MANGLED = st.tuples(
    st.integers(0, len(default_text())), st.integers(0, 40), st.text("=[]{}\"'\n#.-,01aé\\", max_size=6), st.booleans()
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "x.toml"


def _reads_or_says_why(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        read_settings(path, path.parent)
    except UsageError as error:
        assert str(error).isprintable()  # noqa: PT017 - valid configurations are right as well
        assert str(error).endswith(".")  # noqa: PT017


@given(_MANGLED)
@hypothesis_settings(max_examples=40)
@pytest.mark.exhaustive
def test_a_mangled_configuration_is_read_or_is_one_line(hostile: Path, mangled: tuple[int, int, str, bool]) -> None:
    at, cut, inserted, uncommented = mangled
    text = default_text()
    text = text[:at] + inserted + text[at + cut :]
    if uncommented:
        text = re.sub(r"^#(?=\S)", "", text, flags=re.MULTILINE)
    _reads_or_says_why(hostile, text.encode())


@given(st.binary())
def test_any_bytes_are_read_or_are_one_line(hostile: Path, content: bytes) -> None:
    _reads_or_says_why(hostile, content)


@given(st.data())
@hypothesis_settings(max_examples=30)
@pytest.mark.exhaustive
def test_an_unknown_key_among_others_is_found_on_its_line(hostile: Path, data: st.DataObject) -> None:
    lines = default_text().splitlines()
    sections = [number for number, line in enumerate(lines) if line.startswith("[")]
    after = data.draw(st.integers(sections[0], len(lines) - 1))
    section = max((number for number in sections if number <= after), default=0)
    lines.insert(after + 1, "plantd = 3")
    hostile.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        read_settings(hostile, hostile.parent)
    assert str(caught.value).startswith(f"{hostile}, line {after + 2}: unknown key 'plantd' in {lines[section]}.")
