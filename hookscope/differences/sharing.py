"""Share the CPU's threads among networks that run at the same time, or let them take turns."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from hookscope.differences.meeting import Meeting
from hookscope.differences.party import Party


@contextmanager
def threads_kept() -> Iterator[None]:
    """Restore the thread count after the block: threads that start later inherit it."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def share_threads(parties: Sequence[Party]) -> int | None:
    """Give each party an equal share of the CPU's threads, so that all can run at the same time.

    If they took turns, the OpenMP threads of the one that waits would spin, and slow down the one that works. To end
    them at each turn (omp_pause_resource) is no way out: new ones may start on the core of the one that works.

    Returns:
        How many threads they share; None where they take turns: on an accelerator, with a single thread, and where
        `--threads-b` sets a number.
    """
    threads = torch.get_num_threads()
    if threads == 1 or any(party.threads is not None or party.inspected.placed[0] != "cpu" for party in parties):
        return None
    share = max(1, threads // len(parties))
    for party in parties:
        party.threads = share
    torch.set_num_threads(share)  # of this thread, which compares what they have
    return threads


def take_turns(meeting: Meeting) -> None:
    """Let parties that ran at the same time go back to before the batch, and take turns, each with all threads."""
    threads, meeting.shared_threads = meeting.shared_threads, None
    if threads is None:
        return
    torch.set_num_threads(threads)
    for party, strand in zip(meeting.parties, meeting.strands, strict=True):
        strand.call(partial(torch.set_num_threads, threads))
        party.rewinds = True
