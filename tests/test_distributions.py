"""What is published: the source, and the wheel of a machine without the compiler."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def build(target: str, source: Path, into: Path, environment: dict[str, str]) -> tuple[Path, str]:
    """Build without a network or anything that is not installed; return the file and what is said."""
    ended = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    [built] = into.iterdir()
    return built, ended.stdout + ended.stderr


@pytest.fixture
def without_compiler(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "missing").mkdir()
    (tmp_path / "missing" / "ziglang.py").write_text("raise ModuleNotFoundError('no ziglang')", encoding="utf-8")
    return os.environ | {"PYTHONPATH": str(tmp_path / "missing")}


@pytest.mark.exhaustive
def test_a_wheel_is_built_of_the_source_alone_and_without_the_compiler_says_what_is_slower(
    tmp_path: Path, without_compiler: dict[str, str]
) -> None:
    source, _ = build("sdist", ROOT, tmp_path / "source", without_compiler)
    (tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", "-xf", source, "-C", tmp_path / "unpacked"], check=True)
    [unpacked] = (tmp_path / "unpacked").iterdir()
    assert not list(unpacked.rglob("native.bin"))
    wheel, said = build("wheel", unpacked, tmp_path / "wheel", without_compiler)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "Compiled statistics are left out" in said
    assert "NumPy computes the same ones, more slowly" in said
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert "hookscope/native.bin" not in held
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hookscope").rglob("*.py")}
    assert package <= held
