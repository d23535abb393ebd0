"""The environment that the commands of the documentation run in."""

import sys
from pathlib import Path

import pytest

# Fixtures of the command line's tests.
from tests.cli.conftest import environment, networks, run  # noqa: F401


@pytest.fixture(scope="session")
def docs_environment(environment: dict[str, str]) -> dict[str, str]:  # noqa: F811 - a fixture is its name
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"  # where `python` is, which a page may call
    return environment | {"COLUMNS": "80", "LINES": "40", "PATH": path}
