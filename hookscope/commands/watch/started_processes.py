"""Count the processes that a script starts with multiprocessing: they are not watched."""

import functools
import os
from multiprocessing.process import BaseProcess

# The functions of processes that train nothing: workers of a DataLoader, and servers of shared objects.
_HELPERS = ("torch.utils.data.", "multiprocessing.managers")


class StartedProcesses:
    """Counts started processes from now on, for the life of this process.

    Attributes:
        count: Processes started so far, without helpers such as the workers of a DataLoader.
    """

    def __init__(self) -> None:
        """Start to count."""
        self.count = 0
        start, pid = BaseProcess.start, os.getpid()

        @functools.wraps(start)
        def observed(process: BaseProcess) -> None:
            module = getattr(getattr(process, "_target", None), "__module__", None) or ""
            start(process)
            if os.getpid() == pid and not module.startswith(_HELPERS):
                self.count += 1

        BaseProcess.start = observed  # type: ignore[method-assign, assignment]
