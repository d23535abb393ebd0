"""Options of the test run."""

import os
import signal

import pytest
from hypothesis import settings

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
        help="write what is said now into tests/render/golden/ and configs/smoke.toml; read the difference",
    )
