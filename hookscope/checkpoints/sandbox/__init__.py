"""Run work in processes with limits: whatever happens there, this process goes on. No torch.

There is one way: `worker.fork_worker` forks this process; the child sets itself limits, does the work, and writes
one message to a pipe: its answer as JSON, or how it failed. Answers are never pickles, since a worker that has read a
hostile file may answer anything. Two functions use it:

`worker.run_forked` runs one function in a fork of this process: a checkpoint is read there first
(`hookscope.checkpoints.isolation`).

`jobs.run_jobs` runs a function over items (`hookscope check`), some at a time, from a process without torch. It starts
*hosts*: processes that import what the work needs, once, and then fork a worker for each item. A host outlives a worker
that crashes; a worker that hangs is killed with its host. All processes of a host are in one process group, so that one
signal ends them; a host whose parent is gone ends by itself. A worker of `check` forks again when it reads a file: the
limits follow from the file's size, and the fork costs 60 to 90 ms on two busy cores.

Where Python cannot fork safely (Windows, macOS), `run_forked` works in this process, without limits, and a host does
the work itself, for one item. `multiprocessing` would not do: its helper processes look for modules in the current
folder first, where files of unknown origin lie, and import the program's main module.
"""
