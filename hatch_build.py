"""Compile the C files of hookscope into the wheel, with the C compiler that the `ziglang` package brings.

Nothing of the user's machine is used but its kind. Where the library cannot be compiled the package is installed
without it: NumPy then computes the same statistics, more slowly.
"""

import os
import platform
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

LIBRARY = Path("hookscope", "native.bin")
SOURCES = Path("hookscope", "statistics")  # its .c and .h files

# Kinds of machine that they are known to serve, as Python and as the compiler call them.
TARGETS = {
    ("linux", "x86_64"): "x86_64-linux-gnu",
    ("linux", "aarch64"): "aarch64-linux-gnu",
    ("darwin", "x86_64"): "x86_64-macos.11.0",
    ("darwin", "arm64"): "aarch64-macos.11.0",
}
# The oldest systems that the library runs on: it needs nothing of theirs. torch has no wheels for older ones.
OLDEST = {"linux": "manylinux_2_17", "darwin": "macosx_11_0"}
# The library needs no C library, nor may the compiler put calls to one into it.
FLAGS = ("-O3", "-ffreestanding", "-fno-builtin", "-nostdlib", "-shared", "-fPIC", "-s", "-Wall", "-Wextra", "-Werror")


class FusedKernelHook(BuildHookInterface[Any]):
    """Adds the compiled library to wheels, and to the source folder for editable installations."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is put together."""
        target = TARGETS.get((sys.platform, platform.machine()))
        if target is None:
            self._say_left_out(f"they are not known to work for {sys.platform} on {platform.machine()}")
            return
        sources = sorted(Path(self.root, SOURCES).glob("*.[ch]"))
        # Compared by library.py where the sources lie beside it: in a checkout.
        digest = sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self.root, LIBRARY) if version == "editable" else Path(self._folder.name, LIBRARY.name)
        command = [
            sys.executable,
            "-m",
            "ziglang",
            "cc",
            "-target",
            target,
            *FLAGS,
            f"-DSOURCES_HASH={digest}",
            "-o",
            str(library),
            *(str(source) for source in sources if source.suffix == ".c"),
        ]
        caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), self._folder.name)
        compiled = subprocess.run(  # noqa: S603 - every part of it is stated above
            command, check=False, capture_output=True, text=True, env=os.environ | caches
        )
        if compiled.returncode:
            self._say_left_out(compiled.stderr.strip())
            return
        if version != "editable":
            build_data["force_include"][str(library)] = LIBRARY.as_posix()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"

    def _say_left_out(self, reason: str) -> None:
        self.app.display_warning(
            f"Compiled statistics are left out: {reason}. NumPy computes the same ones, more slowly."
        )

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - as called
        """Remove what the wheel has taken in."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _platform_tag() -> str:
    """Return the platform of the wheel: the oldest systems, or this one where it is of another kind (musl)."""
    tags = list(platform_tags())
    oldest = f"{OLDEST[sys.platform]}_{platform.machine()}"
    return oldest if oldest in tags else tags[0]
