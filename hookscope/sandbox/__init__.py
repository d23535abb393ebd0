"""Run work over items, each in a separate process with limits: whatever happens to one, the others finish. No torch.

A *host* is a process that imports what the work needs, once, and then forks a *worker* for each item. The host runs
nothing of an item's, so it outlives a worker that crashes; a worker that hangs is killed with its host. Everything runs
in the host's process group, so that one signal ends all of it; a host whose parent is gone ends by itself. Where Python
cannot fork safely (Windows, macOS), the host does the work itself, and serves one item.

`multiprocessing` would not do: its helper processes look for modules in the current folder first, where files of
unknown origin lie, and import the program's main module.
"""

from hookscope.sandbox.machine import machine_memory_bytes, usable_cores
from hookscope.sandbox.memory import CAN_LIMIT_MEMORY, is_lack_of_memory, limit_memory
from hookscope.sandbox.running import Limits, WorkerFailure, run_jobs

__all__ = [
    "CAN_LIMIT_MEMORY",
    "Limits",
    "WorkerFailure",
    "is_lack_of_memory",
    "limit_memory",
    "machine_memory_bytes",
    "run_jobs",
    "usable_cores",
]
