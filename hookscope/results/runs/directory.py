"""The run directory: written atomically, and never over anything that hookscope did not write.

A run is built in a hidden folder next to its target and renamed into place, `run.json` written last. A rename cannot
replace a folder that is not empty, so an earlier run is renamed first, and deleted when the new run is in place. A
process that is killed leaves hidden folders behind; the next run to the same target cleans up. The process that builds
a run holds a lock on the run's folder, which ends with the process: a folder without a lock is a leftover. A second
lock, on the folder around the target, is held only while targets are examined or changed.
"""

import errno
import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from hookscope.errors import UsageError
from hookscope.regular_files import NotRegularError, read_bounded
from hookscope.results.grids import Grid
from hookscope.results.json_form import SCHEMA_VERSION
from hookscope.results.runs.atomic import check_writable, new_token, refusal, reported, sync
from hookscope.text import slug, strict_json

if sys.platform != "win32":
    import fcntl

RUNS = Path("hookscope-runs")
"""The folder for runs without `--out`."""

LATEST = "latest"
"""The link in `RUNS` to the newest run."""

OVERVIEW = "overview.png"
"""The summary picture of every run."""

_RECORD = "run.json"
_MARK = {"schema_version": SCHEMA_VERSION, "tool": "hookscope"}

# A larger run.json was not written by hookscope: a run of a thousand inputs needs far less.
_MAX_RECORD_BYTES = 64 * 2**20

# Bytes of a run's folder name. Hidden folders next to it have longer names, and most file systems allow 255.
_MOST_BYTES = 200

# Files that desktops create in folders that they show.
_LITTER = frozenset({".DS_Store", "Thumbs.db", "desktop.ini"})

# How long to wait for another process to finish with a target: a suspended process would block for ever. Without the
# lock no data are lost: at worst the write fails.
_LOCK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory that is being written.

    Attributes:
        path: The folder to write into until `finish`.
        previous: The path of an earlier run at `target` while this run replaces it.
        user_path: The target as the user gave it, relative or not.
        option: The option that named the target, for errors; "" for none.
        numbered: Whether the run goes to `target-2` and so on if the target holds a run of a different command.
    """

    path: Path
    target: Path
    previous: Path
    user_path: Path
    option: str
    numbered: bool

    def finish(self, metadata: Mapping[str, Any]) -> Path:
        """Write `run.json`, move the run to its target and return its path, relative if `user_path` is.

        `run.json` has `metadata`, the mark and the list of files. Nothing can be written into `path` afterwards. Raises
        OutputError if something cannot be written, or if the target is no longer a hookscope run.
        """
        user_path, target = self.user_path, self.target
        with reported(self.target, self.option, "folder"):
            files = sorted(_files(self.path))
            for path in self.path.rglob("*"):
                sync(path)
            record = strict_json(_MARK | dict(metadata) | _MARK | {"files": files})
            (self.path / _RECORD).write_text(record, encoding="utf-8")
            sync(self.path / _RECORD)
            sync(self.path)
            with _locked(self.target.parent):
                if self.numbered and command_of(target) not in (None, metadata.get("command")):
                    target = next(candidate for candidate in _numbered(target) if not os.path.lexists(candidate))
                    self.path.rename(target)
                    user_path = user_path.with_name(target.name)
                else:
                    self._replace_target()
            sync(self.target.parent)
        return user_path

    def _replace_target(self) -> None:
        _refuse_foreign(self.target, self.option)
        try:
            self.path.rename(self.target)  # works if the target is missing or an empty folder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            self.target.rename(self.previous)
            self.path.rename(self.target)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files that a command wrote into its run directory in addition to the result.

    Attributes:
        listed: Descriptions that the command prints: "3 overlays", "layers.csv".
        pictures: Fields of `RunRecord` with pictures.
        remarks: Notes about the pictures.
    """

    listed: Sequence[str]
    pictures: Mapping[str, Any]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun(RunFiles):
    """A run directory that was written."""

    folder: Path

    @property
    def grids(self) -> Sequence[Grid]:
        """The grids of feature maps."""
        drawn: Sequence[Grid] = self.pictures.get("grids", ())
        return drawn

    def files_line(self, *first: str, hint: str = "") -> str:
        """Return a command's last line: the contents of its folder, without the overview."""
        return f"Same folder: {', '.join([*first, *self.listed, _RECORD])}{hint}"


@contextmanager
def new_run(path: str | Path, option: str = "", *, numbered: bool = False) -> Iterator[Run]:
    """Yield a hidden folder to write a run into. `Run.finish` moves it to the target; without `finish` it is deleted.

    The target may be missing, an empty folder, or an earlier run, which is replaced only by `finish`. If `numbered`, a
    run of a different command is not replaced, even if it was written after this block began.

    Raises:
        OutputError: If the target is something else or cannot be written, or the block failed to write into the run's
            folder or onto a full disk.
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"`path` takes a path, not type {type(path).__name__}.")
    path = Path(path)
    check_target(path, option)
    target = _absolute(path)
    token = new_token()
    run = Run(_beside(target, "partial", token), target, _beside(target, "previous", token), path, option, numbered)
    absent = [folder for folder in target.parents if not folder.exists()]
    try:
        with _claimed(run), reported(target, option, "folder", within=run.path):
            yield run
    finally:
        try:
            _clean_up(run, absent)
        except BaseException:  # Ctrl-C during the clean-up
            _clean_up(run, absent)
            raise


def check_target(target: Path, option: str = "") -> None:
    """Refuse a target that a run cannot be written to; change nothing.

    Raises:
        OutputError: If `target` is a file, a link, a mount point, the current folder or one above it, holds something
            that hookscope did not write, lies where nothing can be written, or has too long a name.
    """
    with reported(target, option, "folder"):
        target = _absolute(target)
        with _locked(target.parent):
            _refuse_foreign(target, option)
        check_writable(target, option, "folder", beside=_beside(target, "previous", new_token()))


def default_run_path(verb: str, *names: str) -> Path:
    """Return `hookscope-runs/<verb>-<model>-<input>`, each part safe in a file name."""
    return RUNS / "-".join(slug(part, _MOST_BYTES // (len(names) + 1)) for part in (verb, *names))


def free_run_path(target: Path, command: str) -> Path:
    """Return the first of `target`, `target-2`, `target-3`, … that holds no run of a different command."""
    return next(path for path in chain([target], _numbered(target)) if command_of(path) in (None, command))


def point_latest(folder: Path) -> None:
    """Make `latest` a link to a run next to it, or a text file with the run's name where links cannot be made.

    A user's folder or file with that name is kept. Nothing is raised: runs do not depend on `latest`.
    """
    latest = folder.with_name(LATEST)
    waiting = _beside(latest, "partial", new_token())
    with suppress(OSError):
        if os.path.lexists(latest) and not latest.is_symlink() and os.name != "nt":
            return
        try:
            waiting.symlink_to(folder.name, target_is_directory=True)
        except OSError:
            waiting.write_text(folder.name + "\n", encoding="utf-8")
        try:
            waiting.replace(latest)
        finally:
            waiting.unlink(missing_ok=True)


def followed(folder: Path) -> Path:
    """Return the run that `latest` names, see `point_latest`; any other folder unchanged."""
    if folder.name == LATEST:
        with suppress(OSError, ValueError):
            text = str(folder.readlink()) if folder.is_symlink() else read_bounded(folder, 2 * _MOST_BYTES).decode()
            return folder.with_name(text.rstrip("\n"))
    return folder


def command_of(target: Path) -> str | None:
    """Return the command line of the run at `target`, "" if it cannot be read; None if there is no run."""
    try:
        record = _read_record(target)
    except OSError:  # it belongs to a different user
        return ""
    return None if record is None else str(record.get("command", ""))


def _numbered(target: Path) -> Iterator[Path]:
    return (target.with_name(f"{target.name}-{number}") for number in count(2))


def _absolute(target: Path) -> Path:
    """Return `target` with its folder resolved; a link at `target` itself is not followed."""
    if target.name in ("", ".."):
        return Path(os.path.realpath(target))
    return Path(os.path.realpath(target.parent), target.name)


def _beside(target: Path, role: str, token: str) -> Path:
    return target.with_name(f".{target.name}.{role}-{token}")


def _refuse_foreign(target: Path, option: str) -> None:
    """Raise unless `target` is missing, an empty folder, or an earlier run without foreign files in it."""
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise refusal(target, "it is a symbolic link", option, "folder")
    if not stat.S_ISDIR(mode):
        raise refusal(target, "it exists and is not a folder", option, "folder")
    reason = "it is a mount point, which cannot be replaced" if target.is_mount() else ""
    with suppress(FileNotFoundError):  # the current folder may have been deleted
        if not reason and Path.cwd().is_relative_to(target):
            reason = "it is the current folder, or above it, and cannot be replaced"
    if reason:
        raise refusal(target, reason, option, remedy="Name a folder inside it")
    if all(path.name in _LITTER for path in target.iterdir()):
        return
    record = _read_record(target)
    if record is None:
        raise refusal(target, "the folder holds something that is not a hookscope run", option, "folder")
    foreign = sorted(_files(target) - {_RECORD, *record["files"]})
    if foreign:
        raise refusal(target, f"besides a hookscope run it holds '{foreign[0]}'", option, "folder")


def _read_record(folder: Path) -> dict[str, Any] | None:
    """Return the contents of a run's `run.json`; None if the folder is not a finished run."""
    path = folder / _RECORD
    try:
        content = read_bounded(path, _MAX_RECORD_BYTES, follow_links=False)
        record = json.loads(content) if len(content) <= _MAX_RECORD_BYTES else None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotRegularError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("tool") != _MARK["tool"]:
        return None
    files = record.get("files")
    return record if isinstance(files, list) and all(isinstance(name, str) for name in files) else None


def _files(folder: Path) -> set[str]:
    """Return the paths of all files below `folder`, relative to it, links to folders included."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.name not in _LITTER and (path.is_symlink() or not path.is_dir())
    }


@contextmanager
def _claimed(run: Run) -> Iterator[None]:
    """Clean up leftovers of dead processes next to the target, make the hidden folder and hold its lock."""
    with ExitStack() as stack:
        with reported(run.target, run.option, "folder"):
            run.target.parent.mkdir(parents=True, exist_ok=True)
            with _locked(run.target.parent):
                _settle_leftovers(run.target)
                run.path.mkdir()
                stack.enter_context(_locked(run.path))
        yield


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`; continue without one if the file system has no locks. A process must not nest it."""
    with ExitStack() as stack:
        if sys.platform != "win32":
            with suppress(OSError):  # some network file systems cannot lock a folder
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                patience = time.monotonic() + _LOCK_SECONDS
                while not _got_lock(descriptor) and time.monotonic() < patience:
                    time.sleep(0.002)
        yield


def _got_lock(descriptor: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _is_abandoned(folder: Path) -> bool:
    """Tell whether the process that built `folder` is gone; False if that cannot be known."""
    if sys.platform == "win32":
        return False
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        return _got_lock(descriptor)
    except OSError:  # this file system has no locks
        return False
    finally:
        os.close(descriptor)


def _settle_leftovers(target: Path) -> None:
    leftover = re.compile(re.escape(f".{target.name}.") + r"(?:partial|previous)-(\d+-[0-9a-f]{8})")
    tokens = {match[1] for path in target.parent.iterdir() if (match := leftover.fullmatch(path.name))}
    for token in tokens:
        if _is_abandoned(_beside(target, "partial", token)):
            _settle(target, _beside(target, "previous", token))
            _discard(_beside(target, "partial", token))


def _clean_up(run: Run, absent: Iterable[Path]) -> None:
    """Delete an unfinished run, and the run that a finished one replaced. Calling it twice does no harm."""
    with _locked(run.target.parent):
        _settle(run.target, run.previous)
    _discard(run.path)
    for folder in absent:
        with suppress(OSError):
            folder.rmdir()


def _settle(target: Path, previous: Path) -> None:
    """Move the earlier run back if its place is empty; delete it if there is a new run in its place."""
    with suppress(OSError):
        whole = _read_record(previous) is not None
        if whole and not os.path.lexists(target):
            previous.rename(target)
        if not whole or _read_record(target) is not None:
            _discard(previous)


def _discard(folder: Path) -> None:
    """Delete a folder as far as possible, its record first, so that leftovers never count as a run."""
    with suppress(OSError):
        (folder / _RECORD).unlink()
    shutil.rmtree(folder, ignore_errors=True)
