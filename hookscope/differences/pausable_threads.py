"""Run several functions, each in a thread that runs from one pause to the next.

A forward pass cannot be suspended, but a thread can wait inside a hook. Each function sets torch's thread-local state
(grad mode, autocast, modes, the number of threads) itself. All threads share the random generators: for threads that
run one at a time, their states are swapped; for concurrent ones see `next_stopped`.
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

# How often a waiting caller checks that the thread is alive.
_LOOKS_AFTER_SECONDS = 1.0


class AbandonedError(BaseException):
    """Raised at a pause to end the function; not an `Exception`, so that a network does not catch it."""


class PausableThread(Generic[Stop]):
    """A function in a thread that runs from one pause to the next.

    Attributes:
        done: Whether the function has returned or raised.
        breaks_off: Whether breakable pauses raise; the function resets this itself.
        result: Its return value.
        error: The exception it raised.
        random: Its states of the random generators, if threads run one at a time.
        goes_on: Called in the thread with the stop of every breakable pause; if it returns True, there is no pause.
    """

    def __init__(
        self,
        function: Callable[["PausableThread[Stop]"], object],
        stopped: "SimpleQueue[tuple[PausableThread[Stop], Stop | None]] | None" = None,
    ) -> None:
        """Prepare to run a function, called with this thread; each pause is reported to `stopped`."""
        self.done = False
        self.result: object = None
        self.error: BaseException | None = None
        self.goes_on: Callable[[Stop], bool] | None = None
        self._function = function
        self._abandoned = self.breaks_off = False
        self._go: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._stopped: SimpleQueue[tuple[PausableThread[Stop], Stop | None]] = (
            SimpleQueue() if stopped is None else stopped
        )
        self._outcomes: SimpleQueue[tuple[object, BaseException | None]] = SimpleQueue()
        self.random = RandomStates()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def resume(self) -> Stop | None:
        """Run to the next pause and return its stop; None once the function has ended."""
        self.random.enter()
        try:
            self.start()
            return self.wait()
        finally:
            self.random.leave()

    def start(self) -> None:
        """Continue, concurrently with the caller."""
        self._go.put(None)

    def wait(self) -> Stop | None:
        """Wait for the next pause after `start`; return as `resume` does."""
        return next_stopped([self])[1]

    def finish(self) -> None:
        """Run to the end, ignoring pauses.

        Raises:
            BaseException: The exception that the function raised.
        """
        while not self.done:
            self.resume()
        if self.error is not None:
            raise self.error

    def call(self, task: Callable[[], Any]) -> Any:
        """Call a function in the paused thread; return its result or raise its error."""
        if current_thread() is self._thread:
            return task()
        self._go.put(task)
        result, error = _get(self._outcomes, [self])
        if error is not None:
            raise error
        return result

    def pause(self, stop: Stop, *, breakable: bool = True) -> None:
        """Pause, inside the function, until the thread is started again.

        Raises:
            AbandonedError: If the thread is abandoned, or `breaks_off` is set and the pause is `breakable`.
        """
        self._go_on(breakable=breakable)
        waits = not breakable or self.goes_on is None or not self.goes_on(stop)
        if waits:
            self._stopped.put((self, stop))
        while waits and (task := self._go.get()) is not None:
            try:
                outcome: tuple[object, BaseException | None] = (task(), None)
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                outcome = (None, error)
            self._outcomes.put(outcome)
            del task, outcome  # which may hold tensors
        self._go_on(breakable=breakable)

    def abandon(self) -> None:
        """End the paused function by raising in it, and wait until it has ended."""
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
            self._stopped.put((self, None))


@contextmanager
def pausable_threads(
    functions: Sequence[Callable[[PausableThread[Stop]], object]],
) -> Iterator[list[PausableThread[Stop]]]:
    """Make a thread of each function; all have ended after the block, also after an exception.

    Each draws the random numbers that it would draw alone, from the current states of the generators, which are
    restored after the block.
    """
    started: list[PausableThread[Stop]] = []
    stopped: SimpleQueue[tuple[PausableThread[Stop], Stop | None]] = SimpleQueue()
    states = RandomStates()
    numpys = mtrand.get_bit_generator()
    try:
        started += [PausableThread(function, stopped) for function in functions]
        yield started
    finally:
        for thread in started:
            thread.abandon()
        states.enter()
        mtrand.set_bit_generator(numpys)


def next_stopped(threads: Sequence[PausableThread[Stop]]) -> tuple[PausableThread[Stop], Stop | None]:
    """Wait until one of the running threads, which were made together, pauses or ends; return it and its stop.

    Which concurrent thread draws which random number is undefined: the caller can tell by `RandomStates` whether any
    was drawn.
    """
    return _get(threads[0]._stopped, threads)


def _get(queue: "SimpleQueue[T]", threads: Sequence[PausableThread[Stop]]) -> T:
    while True:
        try:
            return queue.get(timeout=_LOOKS_AFTER_SECONDS)
        except Empty:
            if not all(thread._thread.is_alive() for thread in threads) and queue.empty():
                raise RuntimeError("a thread has ended without reporting it") from None


class RandomStates:
    """A snapshot of the random generators of torch (CPU and CUDA), Python and NumPy."""

    def __init__(self) -> None:
        """Save the current states."""
        # Copying NumPy's state takes longer than running a small layer: its generator is swapped instead.
        self._numpy = np.random.MT19937()
        self._numpy.state = np.random.get_state(legacy=False)  # type: ignore[assignment]
        self.leave()

    def enter(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        mtrand.set_bit_generator(self._numpy)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def __eq__(self, other: object) -> bool:
        """Tell whether the next random numbers are the same; CUDA is not compared."""
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
        """Save the states that the generators have now."""
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
