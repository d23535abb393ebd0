"""The run directory: written whole or not at all, and never over anything that hookscope did not write.

A run is built in a hidden folder beside its target and renamed into place, `run.json` written last. A rename cannot
replace a folder with something in it, so an earlier run is renamed aside first, and deleted when the new one stands.
A process that is killed leaves hidden folders behind; the next run to the same target puts them right. The process that
builds a run holds a lock on its folder, which dies with the process: that tells a leftover from work in progress. A
second lock, on the folder around the target, is held for the moments in which targets are looked at or changed.
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
"""Where commands write their runs, unless `--out` names a folder."""

LATEST = "latest"
"""The name in `RUNS` that leads to the newest run."""

OVERVIEW = "overview.png"
"""The picture to look at first, of every run."""

_RECORD = "run.json"
_MARK = {"schema_version": SCHEMA_VERSION, "tool": "hookscope"}

# A larger run.json was not written by hookscope; far above what a run of a thousand inputs needs.
_MAX_RECORD_BYTES = 64 * 2**20

# The length of a folder's name, over all names that it is made of: hidden folders beside it have longer ones, and most
# disks take 255.
_MOST_BYTES = 200

# Files that desktops drop into folders they show.
_LITTER = frozenset({".DS_Store", "Thumbs.db", "desktop.ini"})

# How long to wait for another process to finish looking at a target; a suspended one would block for ever.
# Going on costs no data: at worst the write fails.
_LOCK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory in the making.

    Attributes:
        path: The folder to write into until `finish`.
        previous: Where an earlier run at `target` waits while this one takes its place.
        user_path: The target as the user gave it, relative or not.
        option: The option that named the target, for errors; "" for none.
        numbered: Whether the run goes to `target-2` and so on where the target holds a run of another command.
    """

    path: Path
    target: Path
    previous: Path
    user_path: Path
    option: str
    numbered: bool

    def finish(self, metadata: Mapping[str, Any]) -> Path:
        """Write `run.json`, move the run to its target. Nothing can be written into `path` afterwards.

        Besides `metadata`, `run.json` has the mark and the list of files. Raises OutputError if something cannot be
        written, or the target has become something else than a hookscope run. Returns the run's path, like `user_path`.
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
                    self._take_place()
            sync(self.target.parent)
        return user_path

    def _take_place(self) -> None:
        _refuse_foreign(self.target, self.option)
        try:
            self.path.rename(self.target)  # succeeds over nothing and over an empty folder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            self.target.rename(self.previous)
            self.path.rename(self.target)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What a command wrote into its run directory beside the result.

    Attributes:
        listed: What the command says of them: "3 overlays", "layers.csv".
        pictures: Entries of `RunRecord`.
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
        """Those of feature maps."""
        drawn: Sequence[Grid] = self.pictures.get("grids", ())
        return drawn

    def files_line(self, *first: str, hint: str = "") -> str:
        """Return a command's last line: what its folder holds beside the overview."""
        return f"Same folder: {', '.join([*first, *self.listed, _RECORD])}{hint}"


@contextmanager
def new_run(path: str | Path, option: str = "", *, numbered: bool = False) -> Iterator[Run]:
    """Give a hidden folder to write a run into; `Run.finish` puts it at `target`, anything else leaves no trace.

    The target is nothing yet, an empty folder, or an earlier run, which is replaced, and else stays as it was. If
    `numbered`, a run of another command is not replaced: it may have come while this one was made.

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
        except BaseException:  # Ctrl-C in the middle of it
            _clean_up(run, absent)
            raise


def check_target(target: Path, option: str = "") -> None:
    """Refuse a target that a run could not be written to, without changing anything.

    Raises:
        OutputError: If `target` is a file, a link, a mount point, the current folder or one above it, holds something
            that hookscope did not write, lies where nothing can be written, or has too long a name.
    """
    with reported(target, option, "folder"):
        target = _absolute(target)
        with reported(target, option, "folder"):
            with _locked(target.parent):
                _refuse_foreign(target, option)
            check_writable(target, option, "folder", beside=_beside(target, "previous", new_token()))


def default_run_path(verb: str, *names: str) -> Path:
    """Return `hookscope-runs/<verb>-<model>-<input>`, each part fit for a file name."""
    return RUNS / "-".join(slug(part, _MOST_BYTES // (len(names) + 1)) for part in (verb, *names))


def free_run_path(target: Path, command: str) -> Path:
    """Return `target`, or the first of `target-2`, `target-3`, … where no run of another command would be replaced."""
    return next(path for path in chain([target], _numbered(target)) if command_of(path) in (None, command))


def point_latest(folder: Path) -> None:
    """Let `latest` lead to a run beside it: a link, or a text file of its name where there are no links.

    A folder or file of the user with that name stays, and a run is no worse without it: nothing is raised.
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
    """Return where `latest` leads if it is a text file, see `point_latest`; any other folder as it is."""
    if folder.name == LATEST:
        with suppress(OSError, ValueError):
            return folder.with_name(read_bounded(folder, 2 * _MOST_BYTES).decode().rstrip("\n"))
    return folder


def command_of(target: Path) -> str | None:
    """Return the command line of the run at `target`; None if there is none."""
    record = _read_record(target)
    return None if record is None else str(record.get("command", ""))


def _numbered(target: Path) -> Iterator[Path]:
    return (target.with_name(f"{target.name}-{number}") for number in count(2))


def _absolute(target: Path) -> Path:
    """Return `target` with its folder resolved, but not a link that stands at its own place."""
    if target.name in ("", ".."):
        return Path(os.path.realpath(target))
    return Path(os.path.realpath(target.parent), target.name)


def _beside(target: Path, role: str, token: str) -> Path:
    return target.with_name(f".{target.name}.{role}-{token}")


def _refuse_foreign(target: Path, option: str) -> None:
    """Raise unless there is nothing at `target`, an empty folder, or an earlier run without foreign files in it."""
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
    """Return the contents of a run's `run.json`; None if the folder is not a whole run."""
    path = folder / _RECORD
    try:
        content = read_bounded(path, _MAX_RECORD_BYTES, follow_links=False)
        record = json.loads(content) if len(content) <= _MAX_RECORD_BYTES else None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotRegularError, ValueError, RecursionError):
        return None
    ours = isinstance(record, dict) and record.get("tool") == _MARK["tool"] and isinstance(record.get("files"), list)
    return record if ours else None


def _files(folder: Path) -> set[str]:
    """Return the paths of all files below `folder`, relative to it, links to folders included."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.name not in _LITTER and (path.is_symlink() or not path.is_dir())
    }


@contextmanager
def _claimed(run: Run) -> Iterator[None]:
    """Clean up after dead processes beside the target, make the hidden folder and hold its lock."""
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
    """Hold the lock of `folder`, or go on without one if the file system has none. A process must not nest it."""
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
    """Tell whether `folder` has lost the process that built it; where that cannot be known, it has not."""
    if sys.platform == "win32":
        return False
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        return _got_lock(descriptor)
    except OSError:  # no locks here
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
    """Leave no trace of an unfinished run, nor of what a finished one replaced. Does no harm when done twice."""
    with _locked(run.target.parent):
        _settle(run.target, run.previous)
    _discard(run.path)
    for folder in absent:
        with suppress(OSError):
            folder.rmdir()


def _settle(target: Path, previous: Path) -> None:
    """Put the run that was set aside back if nothing stands in its place, or delete it if another run does."""
    with suppress(OSError):
        whole = _read_record(previous) is not None
        if whole and not os.path.lexists(target):
            previous.rename(target)
        if not whole or _read_record(target) is not None:
            _discard(previous)


def _discard(folder: Path) -> None:
    """Delete a folder as far as possible, its record first, so that what is left can never pass for a run."""
    with suppress(OSError):
        (folder / _RECORD).unlink()
    shutil.rmtree(folder, ignore_errors=True)
