"""The environment that the commands of the documentation run in."""

import pytest

# Fixtures of the command line's tests.
from tests.cli.conftest import environment, networks, run, without_plots  # noqa: F401


@pytest.fixture
def docs_environment(environment: dict[str, str]) -> dict[str, str]:  # noqa: F811 - a fixture is its name
    return environment | {"COLUMNS": "80", "LINES": "40"}
