"""What the tests of whole checks share."""

from tests.cli.conftest import command, environment, networks, run

__all__ = ["command", "environment", "networks", "run"]  # fixtures
