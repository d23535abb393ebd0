"""Options of the test run."""

import signal

import pytest
from hypothesis import settings

# A busy machine must not fail a test.
settings.register_profile("hookscope", deadline=None)
settings.load_profile("hookscope")

# A job that a shell runs in the background ignores interrupts, and so would every command under test.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what is said now into tests/render/golden/ and configs/smoke.toml; read the difference",
    )
