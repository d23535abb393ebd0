"""Scripts in forked processes, alone or under torchrun."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.fork_server import Finished, ForkServer

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
Forked = Callable[..., Finished]


@pytest.fixture
def forked(tmp_path: Path, fork_server: ForkServer) -> Forked:
    """Run Python in the test's folder, in a process that has imported torch."""
    return partial(fork_server.run, cwd=tmp_path, environment=ENVIRONMENT)


@pytest.fixture
def torchrun(forked: Forked) -> Forked:
    """Run a script under torchrun, whose processes are forked too; it must end well unless `code` says otherwise."""

    def run(*arguments: object, processes: int = 2, code: int = 0) -> Finished:
        done: Finished = forked(*TORCHRUN, processes, *arguments)
        assert done.returncode == code, done.stderr
        return done

    return run
