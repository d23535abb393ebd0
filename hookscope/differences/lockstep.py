"""Run several functions side by side, each in a thread that runs from one pause to its next.

A forward pass cannot be left and entered again; a thread that waits inside a hook can. What torch keeps by thread
(whether gradients are recorded, autocast, modes, the count of threads) each function sets for itself. All threads share
the random generators: threads that run one at a time have their states swapped; for others see `resume_together`.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.random import mtrand

Stop = TypeVar("Stop")

# How often a caller that waits looks whether the thread is still there. Our choice.
_LOOKS_AFTER_SECONDS = 1.0


class AbandonedError(BaseException):
    """Raised where a function waits that is not to go on: no `Exception`, so that a network does not swallow it."""


class Strand(Generic[Stop]):
    """A function in a thread that runs from one pause to its next while the caller waits.

    Attributes:
        done: Whether the function has returned or raised.
        breaks_off: Every breakable pause raises, until the function itself takes this back.
        result: What it returned.
        error: What it raised.
        random: The states that random generators have for it, where it runs while no other one does.
    """

    def __init__(self, function: Callable[["Strand[Stop]"], object]) -> None:
        """Be ready to run a function, which is given this strand to pause at."""
        self.done = False
        self.result: object = None
        self.error: BaseException | None = None
        self._function = function
        self._stop: Stop | None = None
        self._task: Callable[[], object] | None = None
        self._outcome: tuple[object, BaseException | None] = (None, None)
        self._abandoned = self.breaks_off = False
        self._go: SimpleQueue[None] = SimpleQueue()
        self._stopped: SimpleQueue[None] = SimpleQueue()
        self.random = RandomStates()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def resume(self) -> Stop | None:
        """Let it run to its next pause; return what it pauses with, None once it has ended."""
        self.random.enter()
        try:
            self.start()
            return self.wait()
        finally:
            self.random.leave()

    def start(self) -> None:
        """Let it go on, while the caller does as well."""
        self._stop = None
        self._go.put(None)

    def wait(self) -> Stop | None:
        """Wait for its next pause, once it has been started; return as `resume` does."""
        while True:
            try:
                self._stopped.get(timeout=_LOOKS_AFTER_SECONDS)
            except Empty:
                if not self._thread.is_alive() and self._stopped.empty():
                    raise RuntimeError("a strand has ended without saying so") from None
            else:
                return self._stop

    def finish(self) -> None:
        """Let it run to its end, past every pause.

        Raises:
            BaseException: What the function raised.
        """
        while not self.done:
            self.resume()
        if self.error is not None:
            raise self.error

    def call(self, task: Callable[[], Any]) -> Any:
        """Call a function in the thread, at the pause that it is at, and return what it returns or raise its error."""
        self._task = task
        self.resume()
        result, error = self._outcome
        self._outcome = (None, None)
        if error is not None:
            raise error
        return result

    def pause(self, stop: Stop, *, breakable: bool = True) -> None:
        """Wait, inside the function, until the strand is resumed.

        Raises:
            AbandonedError: If it never will be, or `breaks_off` and the pause is `breakable`.
        """
        if self._abandoned or (breakable and self.breaks_off):
            raise AbandonedError
        self._stop = stop
        self._stopped.put(None)
        self._go.get()
        while self._task is not None:
            task, self._task = self._task, None
            try:
                self._outcome = (task(), None)
            except BaseException as error:  # noqa: BLE001 - it is raised where the task came from
                self._outcome = (None, error)
            self._stopped.put(None)
            self._go.get()
        if self._abandoned or (breakable and self.breaks_off):
            raise AbandonedError

    def abandon(self) -> None:
        """End the function where it waits, by an error, and wait until it has ended."""
        self._abandoned = True
        if self._thread.is_alive():
            self._go.put(None)
            self._thread.join()

    def _run(self) -> None:
        self._go.get()
        try:
            if not self._abandoned:
                self.result = self._function(self)
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            self.error = error
        finally:
            self.done = True
            self._stopped.put(None)


@contextmanager
def strands(functions: Sequence[Callable[[Strand[Stop]], object]]) -> Iterator[list[Strand[Stop]]]:
    """Make a strand of each function; whatever happens in the block, all have ended after it.

    Each draws the random numbers that it would draw alone, from the states that the generators have now, and which they
    have again after the block.
    """
    started: list[Strand[Stop]] = []
    states = RandomStates()
    numpys = mtrand.get_bit_generator()
    try:
        started += map(Strand, functions)
        yield started
    finally:
        for strand in started:
            strand.abandon()
        states.enter()
        mtrand.set_bit_generator(numpys)


def resume_together(strands: Sequence[Strand[Stop]]) -> list[Stop | None]:
    """Let all of them run at the same time, each to its next pause; return what each of them pauses with.

    Which of them draws which random number is left to chance: the caller sees by `RandomStates` whether any has.
    """
    for strand in strands:
        strand.start()
    return [strand.wait() for strand in strands]


class RandomStates:
    """The states of the random generators of torch (on the CPU and CUDA), Python and NumPy, at one time."""

    def __init__(self) -> None:
        """Take the states as they are now."""
        # NumPy's takes longer to copy than a small layer to run: its generator is exchanged instead.
        self._numpy = np.random.MT19937()
        self._numpy.state = np.random.get_state(legacy=False)  # type: ignore[assignment]
        self.leave()

    def enter(self) -> None:
        """Go on with them."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        mtrand.set_bit_generator(self._numpy)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def __eq__(self, other: object) -> bool:
        """Tell whether the same random numbers follow; those of CUDA are not looked at."""
        if not isinstance(other, RandomStates):
            return NotImplemented
        states = self._numpy.state["state"], other._numpy.state["state"]
        return (
            torch.equal(self._torch, other._torch)
            and self._python == other._python
            and states[0]["pos"] == states[1]["pos"]
            and np.array_equal(states[0]["key"], states[1]["key"])
        )

    __hash__ = None  # type: ignore[assignment]  # they change

    def leave(self) -> None:
        """Remember what they have come to."""
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
