"""The names that MODEL accepts, and that listing them does not load torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from hookscope.errors import UsageError, nearest
from hookscope.models.names import parse_model


def test_listing_names_imports_neither_torch_nor_torchvision() -> None:
    script = (
        "import sys; from hookscope.cli.app import app\n"
        "try: app(['models', 'resnet1*'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'torchvision', 'numpy'} & sys.modules.keys())"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split()[0] == "resnet101"
    assert ended.stdout.splitlines()[-1] == "set()"


def test_a_name_in_full_width_letters_has_its_nearest_in_the_usual_ones() -> None:
    full_width = "".join(chr(ord(letter) + 0xFEE0) for letter in "resnet18")  # as an input method may write it
    assert nearest(full_width, ["resnet18", "vgg11"]) == " Nearest: 'resnet18'."


def test_a_file_without_a_name_is_answered_with_what_it_defines(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("raise SystemExit\nclass Block:\n    pass\ndef _own(): ...\ndef build(): ...\n", "utf-8")
    with pytest.raises(UsageError, match=r"net\.py:NAME; it defines build, Block\.$"):
        parse_model(str(file))
    file.write_text("def broken(:\n", "utf-8")
    with pytest.raises(UsageError, match=r"net\.py:NAME\.$"):
        parse_model(str(file))
    with pytest.raises(UsageError, match=r"missing\.py:NAME\.$"):
        parse_model(str(tmp_path / "missing.py"))
