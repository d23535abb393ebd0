"""Run several functions side by side, each in a thread that runs from one pause to its next.

A forward pass cannot be left and entered again; a thread that waits inside a hook can. What torch keeps by thread
(whether gradients are recorded, autocast, modes, the count of threads) each function sets for itself. All threads share
the random generators: threads that run one at a time have their states swapped; for others see `next_stopped`.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.random import mtrand

Stop = TypeVar("Stop")
T = TypeVar("T")

# How often a caller that waits looks whether the thread is still there. Our choice.
_LOOKS_AFTER_SECONDS = 1.0


class AbandonedError(BaseException):
    """Raised where a function waits that is not to go on: no `Exception`, so that a network does not swallow it."""


class Strand(Generic[Stop]):
    """A function in a thread that runs from one pause to its next.

    Attributes:
        done: Whether the function has returned or raised.
        breaks_off: Every breakable pause raises, until the function itself takes this back.
        result: What it returned.
        error: What it raised.
        random: The states that random generators have for it, where it runs while no other one does.
        arrive: Called in the thread at every breakable pause, with what it pauses with, in place of telling the caller;
            the function waits until it is started, unless this returns True.
    """

    def __init__(
        self, function: Callable[["Strand[Stop]"], object], stopped: "SimpleQueue[Strand[Stop]] | None" = None
    ) -> None:
        """Be ready to run a function, which is given this strand to pause at; `stopped` is told of each pause."""
        self.done = False
        self.result: object = None
        self.error: BaseException | None = None
        self.arrive: Callable[[Stop], bool] | None = None
        self._function = function
        self._stop: Stop | None = None
        self._abandoned = self.breaks_off = False
        self._go: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._stopped: SimpleQueue[Strand[Stop]] = SimpleQueue() if stopped is None else stopped
        self._outcomes: SimpleQueue[tuple[object, BaseException | None]] = SimpleQueue()
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
        return next_stopped([self])[1]

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
        if current_thread() is self._thread:
            return task()
        self._go.put(task)
        result, error = _get(self._outcomes, [self])
        if error is not None:
            raise error
        return result

    def pause(self, stop: Stop, *, breakable: bool = True) -> None:
        """Wait, inside the function, until the strand is started again.

        Raises:
            AbandonedError: If it never will be, or `breaks_off` and the pause is `breakable`.
        """
        self._go_on(breakable=breakable)
        if breakable and self.arrive is not None:
            waits = not self.arrive(stop)
        else:
            self._stop = stop
            self._stopped.put(self)
            waits = True
        while waits and (task := self._go.get()) is not None:
            try:
                outcome: tuple[object, BaseException | None] = (task(), None)
            except BaseException as error:  # noqa: BLE001 - it is raised where the task came from
                outcome = (None, error)
            self._outcomes.put(outcome)
            del task, outcome  # which may hold tensors
        self._go_on(breakable=breakable)

    def abandon(self) -> None:
        """End the function where it waits, by an error, and wait until it has ended."""
        self._abandoned = True
        if self._thread.is_alive():
            self._go.put(None)
            self._thread.join()

    def _go_on(self, *, breakable: bool) -> None:
        if self._abandoned or (breakable and self.breaks_off):
            raise AbandonedError

    def _run(self) -> None:
        self._go.get()
        try:
            if not self._abandoned:
                self.result = self._function(self)
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            self.error = error
        finally:
            self.done = True
            self._stopped.put(self)


@contextmanager
def strands(functions: Sequence[Callable[[Strand[Stop]], object]]) -> Iterator[list[Strand[Stop]]]:
    """Make a strand of each function; whatever happens in the block, all have ended after it.

    Each draws the random numbers that it would draw alone, from the states that the generators have now, and which they
    have again after the block.
    """
    started: list[Strand[Stop]] = []
    stopped: SimpleQueue[Strand[Stop]] = SimpleQueue()
    states = RandomStates()
    numpys = mtrand.get_bit_generator()
    try:
        started += [Strand(function, stopped) for function in functions]
        yield started
    finally:
        for strand in started:
            strand.abandon()
        states.enter()
        mtrand.set_bit_generator(numpys)


def next_stopped(strands: Sequence[Strand[Stop]]) -> tuple[Strand[Stop], Stop | None]:
    """Wait until one of the strands that run, which were made together, pauses or ends; return it, and its stop.

    Of strands that run at the same time it is left to chance which draws which random number: the caller sees by
    `RandomStates` whether any has.
    """
    strand = _get(strands[0]._stopped, strands)
    return strand, strand._stop


def _get(queue: "SimpleQueue[T]", strands: Sequence[Strand[Stop]]) -> T:
    """Wait for what the threads of strands put into a queue."""
    while True:
        try:
            return queue.get(timeout=_LOOKS_AFTER_SECONDS)
        except Empty:
            if not all(strand._thread.is_alive() for strand in strands) and queue.empty():
                raise RuntimeError("a strand has ended without saying so") from None


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
