"""Hold Ctrl-C back while a context manager is entered or left: an interrupt there would leave state half restored."""

import _thread
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

# An interrupt is held this long at most, so that code that hangs can be ended: restoring takes milliseconds. Ours.
_HELD_SECONDS = 5.0
# A held interrupt is sent again after this time. Ours.
_TRIED_AGAIN_SECONDS = 0.001

_BOUNDARIES = frozenset({"__enter__", "__exit__", "enter_context", "close"})
_RESTORERS = ("hookscope", "torch")


@contextmanager
def interrupts_between_blocks() -> Iterator[None]:
    """Let SIGINT interrupt the block only where no `with` statement of hookscope or torch is being entered or left.

    Python runs signal handlers between any two calls, also in an `__exit__` that has just begun. The previous handler
    is called once the boundary is passed, after the block at the latest. Outside the main thread, and for handlers that
    are not Python's, there is nothing to hold.
    """
    previous = signal.getsignal(signal.SIGINT)
    if current_thread() is not main_thread() or not callable(previous) or isinstance(previous, _Holding):
        yield
        return
    holding = _Holding(previous)
    try:
        signal.signal(signal.SIGINT, holding)
        yield
    finally:
        held = holding.end()
        # A handler that the block has set stays. `signal.signal` first runs `holding` for a pending interrupt.
        if signal.getsignal(signal.SIGINT) is holding:
            signal.signal(signal.SIGINT, previous)
        if held or holding.since is not None:
            previous(signal.SIGINT, None)


def finished(restore: Callable[[], T]) -> T:
    """Call a function that restores state; if Ctrl-C ends it, call it again before raising the interrupt.

    An interrupt need not come as a signal: debuggers and time limits raise it at any line.

    Args:
        restore: The function; it may be called again after any part of it has run.
    """
    try:
        return restore()
    except KeyboardInterrupt:
        restore()
        raise


class _Holding:
    """A handler of SIGINT that calls the previous one later if the interrupted code must finish first."""

    def __init__(self, previous: Callable[[int, FrameType | None], object]) -> None:
        self.previous = previous
        self.since: float | None = None  # when the interrupt came that is held
        self._ended = self._sent_again = False
        self._lock = _thread.allocate_lock()

    def end(self) -> bool:
        """Send no interrupt again from now on; return whether one is held."""
        with self._lock:
            held, self.since, self._ended = self.since is not None, None, True
        return held

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        sent_again, self._sent_again = self._sent_again, False
        if self._ended:
            # An interrupt that was sent again has been counted: `end` has returned it.
            self.since = self.since if sent_again else now
            return
        self.since = now if self.since is None else self.since
        if now - self.since < _HELD_SECONDS and _at_boundary(frame):
            # Not `threading.Thread`: the interrupted code may hold the locks of `threading`.
            _thread.start_new_thread(self._try_again, ())
            return
        self.since = None
        self.previous(number, frame)

    def _try_again(self) -> None:
        time.sleep(_TRIED_AGAIN_SECONDS)
        with self._lock:
            if self.since is not None:
                self._sent_again = True
                _thread.interrupt_main(signal.SIGINT)


def _at_boundary(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is _OWN:  # `interrupts_between_blocks` itself, which is not on the stack while its block runs
            return True
        # A frame of contextlib belongs to the code that calls it.
        if frame.f_code.co_name in _BOUNDARIES and (_restores(frame) or _restores(frame.f_back)):
            return True
        frame = frame.f_back
    return False


_OWN = interrupts_between_blocks.__wrapped__.__code__  # type: ignore[attr-defined] # set by `contextmanager`


def _restores(frame: FrameType | None) -> bool:
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _RESTORERS
