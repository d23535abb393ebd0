"""How packages are added where hookscope is installed: by pip, or by what made the environment and owns it."""

import re
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Installer = Literal["pip", "uv", "uvx", "uv tool", "pipx", "pipx run"]

_REINSTALL: dict[Installer, str] = {
    "pip": "pip install --force-reinstall {package}",
    "uv": "uv pip install --reinstall {package}",
    "uvx": "uvx --refresh …",
    "uv tool": "uv tool install --reinstall …",
    "pipx": "pipx reinstall {environment}",
    "pipx run": "pipx run --no-cache …",
}


def installer(prefix: Path | None = None) -> Installer:
    """Return what made the environment at `prefix`, by default this one, by the files that each leaves in it.

    pipx writes `pipx_metadata.json`, into `venvs` for good or for `pipx run` into a cache; `uv tool install` writes
    `uv-receipt.toml`; uvx makes environments in folders of uv's cache, "archive-v0" and "environments-v2", and uv notes
    itself in `pyvenv.cfg`. Variables are no sign: programs that are started from such an environment inherit them.
    """
    prefix = Path(sys.prefix) if prefix is None else prefix
    if (prefix / "pipx_metadata.json").is_file():
        return "pipx" if prefix.parent.name == "venvs" else "pipx run"
    if (prefix / "uv-receipt.toml").is_file():
        return "uv tool"
    try:
        by_uv = re.search(r"^uv\s*=", (prefix / "pyvenv.cfg").read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, ValueError):
        by_uv = None
    if by_uv and re.fullmatch(r"(archive|environments)-v\d+", prefix.parent.name):
        return "uvx"
    return "uv" if by_uv and find_spec("pip") is None else "pip"


def install_command(extra: str) -> str:
    """Return the command that adds an extra of hookscope; "…" stands for the rest of the command as it was given."""
    whole = [f"hookscope[{extra}]"]
    return _command(whole if installer() in ("pip", "uv") else _packages(extra) or whole)


def package_command(package: str) -> str:
    """Return the command that adds a package; "…" stands for the rest of the command as it was given."""
    return _command([package])


def _command(packages: Sequence[str]) -> str:
    by = installer()
    quoted = [shlex.quote(each) for each in packages]
    if by in ("pip", "uv"):
        return f"{'uv ' if by == 'uv' else ''}pip install {' '.join(quoted)}"
    if by == "pipx":
        return f"pipx inject {shlex.quote(Path(sys.prefix).name)} {' '.join(quoted)}"
    return f"{'uv tool install' if by == 'uv tool' else by} {' '.join(f'--with {each}' for each in quoted)} …"


def reinstall_command(package: str) -> str:
    """Return the command that installs a package again which is damaged."""
    return _REINSTALL[installer()].format(package=package, environment=shlex.quote(Path(sys.prefix).name))


def _packages(extra: str) -> list[str]:
    """Return what an extra asks for: "timm>=1.0.20"."""
    try:
        asked = [each.partition(";") for each in requires("hookscope") or ()]
    except PackageNotFoundError:
        return []
    return [name.strip() for name, _, marker in asked if re.search(rf"""extra == ['"]{extra}['"]""", marker)]
