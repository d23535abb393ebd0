"""Options of the test run."""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings

from tests.fork_server import ForkServer

# A busy machine must not fail a test.
settings.register_profile("hookscope", deadline=None)
settings.load_profile("hookscope")

# Beside other test processes, torch's threads shall not keep a core busy while they wait. Read when torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A job that a shell runs in the background ignores interrupts, and so would every command under test.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what is said now into tests/reporting/golden/ and configs/smoke.toml; read the difference",
    )


# Files that take a minute or more: at the end, one of them would keep a process busy while the others wait.
LONG = {
    *("docs/test_site.py", "docs/test_pages.py", "frozen/test_frozen.py", "cli/test_survey.py"),
    *("cli/test_planted_bugs.py", "models/test_mutated_pickles.py", "watching/test_script_processes.py"),
    *("watching/test_script.py", "watching/test_frameworks.py", "inspection/test_interrupts.py"),
}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Leave the cases that a `sample` does not name to the exhaustive tests; hand out long files first."""
    run: dict[str, bool] = {}
    for item in items:
        marker = item.get_closest_marker("sample")
        if marker is not None:
            case = item.callspec.id
            named = any(f"-{name}-" in f"-{case}-" for name in marker.args)
            if not named:
                item.add_marker(pytest.mark.exhaustive)
            test = item.nodeid.partition("[")[0]
            run[test] = run.get(test, False) or named
    stale = [test for test, any_named in run.items() if not any_named]
    if stale and not any("::" in argument for argument in config.args):  # one case alone may have been asked for
        raise pytest.UsageError(f"a sample names no case that there is: {', '.join(stale)}")
    yield
    if "PYTEST_XDIST_WORKER" in os.environ:
        counts = Counter(item.path for item in items)
        items.sort(key=lambda item: ("/".join(item.path.parts[-2:]) not in LONG, -counts[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the million objects of imports and tests, which stay to the end, out of every search for garbage.

    Each process would spend a third of its start and a second after each file on them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Let Python find them when it ends: extensions report what they still hold then as leaks."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Small networks gain nothing from a second thread, and lose tenfold where other processes want the processor."""
    import torch  # after the environment is set

    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _memory_given_back() -> Iterator[None]:
    """Collect garbage after a file; keep what stays, mostly later imports, out of every further search for it.

    Freed memory returns to the system after a file of large networks: forks, which others test, take longer by it.
    """
    yield
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        large = resident_pages * os.sysconf("SC_PAGE_SIZE") > 2**30
        if large and hasattr(ctypes.CDLL(None), "malloc_trim"):
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session")
def elsewhere() -> Iterator[ProcessPoolExecutor]:
    """A process that has the device of tests/far_device.py."""
    import torch  # after the environment is set

    from tests import far_device

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), far_device.register) as pool:
        pool.submit(torch.set_num_threads, 1).result()
        yield pool


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """What runs commands in processes that need not import torch anew."""
    server = ForkServer()
    yield server
    server.close()
