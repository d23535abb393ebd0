"""Let imports find a user's own modules, and leave nothing of it behind."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

# What a file's own folder gave to the last import. Another file's folder may have modules of the same names.
_siblings: set[str] = set()


@contextmanager
def importable(folder: Path, *, is_file: bool) -> Iterator[None]:
    """Let imports find what lies in `folder`, as if Python had been started there, and leave no bytecode in it."""
    if is_file:
        for sibling in _siblings:
            sys.modules.pop(sibling, None)
        _siblings.clear()
    before_path, before_bytecode, before_modules = list(sys.path), sys.dont_write_bytecode, set(sys.modules)
    folder = folder.resolve()
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before_path
        sys.dont_write_bytecode = before_bytecode
        if is_file:
            _siblings.update(name for name in sys.modules.keys() - before_modules if _is_sibling(name, folder))


def _is_sibling(name: str, folder: Path) -> bool:
    """Say whether an imported module lies in `folder` and is neither hookscope's own nor installed there."""
    module = sys.modules[name]
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    if not isinstance(file, str) or name.startswith("hookscope"):
        return False
    return Path(file).is_relative_to(folder) and not {"site-packages", "dist-packages"} & set(Path(file).parts)
