"""Functions that run side by side, one at a time and at the same time."""

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hookscope.differences.pausable_threads import (
    AbandonedError,
    PausableThread,
    RandomStates,
    next_stopped,
    pausable_threads,
)


def counting(*stops: int) -> object:
    def function(thread: PausableThread[int]) -> str:
        for stop in stops:
            thread.pause(stop)
        return "end"

    return function


def test_threads_stop_at_every_pause_and_end() -> None:
    with pausable_threads([counting(1, 2), counting(10)]) as (one, other):
        assert (one.resume(), other.resume(), one.resume()) == (1, 10, 2)
        assert not one.done
        assert one.resume() is None
        assert (one.done, one.result) == (True, "end")
        other.finish()
        assert other.result == "end"


def test_one_runs_at_a_time() -> None:
    running: list[int] = []
    most: list[int] = []

    def function(thread: PausableThread[int]) -> None:
        for _ in range(50):
            running.append(1)
            most.append(len(running))
            running.pop()
            thread.pause(0)

    with pausable_threads([function, function]) as each:
        for _ in range(50):
            for thread in each:
                thread.resume()
    assert max(most) == 1


def test_each_draws_the_random_numbers_that_it_would_alone() -> None:
    def draw(thread: PausableThread[list[float]]) -> None:
        for _ in range(4):
            thread.pause([float(torch.rand(())), random.random(), float(np.random.rand())])

    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    with pausable_threads([draw, draw]) as (one, other):
        pairs = [(one.resume(), other.resume()) for _ in range(4)]
    drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]
    assert all(first == second for first, second in pairs)
    assert pairs[0][0] == drawn  # nobody's draws have moved the generators on
    assert len({tuple(first or ()) for first, _ in pairs}) == 4


def test_functions_run_at_the_same_time_each_to_its_next_pause() -> None:
    meeting = threading.Barrier(2)

    def function(thread: PausableThread[int]) -> None:
        for stop in range(3):
            meeting.wait(timeout=60)
            thread.pause(stop)

    with pausable_threads([function, function]) as both:
        for expected in (0, 1, 2, None):
            for thread in both:
                thread.start()
            stopped = [next_stopped(both) for _ in both]
            assert {thread for thread, _ in stopped} == {*both}
            assert [stop for _, stop in stopped] == [expected] * 2
        assert all(thread.done for thread in both)


def test_one_that_is_received_goes_on_without_its_caller() -> None:
    received: list[int] = []

    def function(thread: PausableThread[int]) -> None:
        thread.pause(1)
        thread.pause(2)
        thread.pause(3, breakable=False)

    def receive(stop: int) -> bool:
        received.append(stop)
        return True

    with pausable_threads([function]) as (thread,):
        thread.goes_on = receive
        assert thread.resume() == 3
        assert received == [1, 2]


def test_one_that_is_received_may_wait_until_another_thread_starts_it() -> None:
    def function(thread: PausableThread[int]) -> None:
        thread.pause(1)

    arrived = threading.Event()

    def receive(_stop: int) -> bool:
        arrived.set()
        return False

    with pausable_threads([function]) as (thread,):
        thread.goes_on = receive
        thread.start()
        assert arrived.wait(timeout=60)
        assert not thread.done
        assert next_stopped([thread]) == (thread, 1)
        assert thread.call(threading.get_ident) != threading.get_ident()
        thread.start()
        assert next_stopped([thread]) == (thread, None)
        assert thread.done


@pytest.mark.parametrize("draw", [torch.rand, lambda _: random.random(), np.random.rand])
def test_states_of_generators_are_equal_until_a_number_is_drawn(draw: Callable[[int], object]) -> None:
    torch.manual_seed(3)
    before = RandomStates()
    assert RandomStates() == before
    draw(1)
    assert RandomStates() != before


def test_an_error_is_kept_for_the_caller() -> None:
    def function(_thread: PausableThread[int]) -> None:
        raise KeyError("odd")

    with pausable_threads([function]) as (thread,):
        assert thread.resume() is None
        assert isinstance(thread.error, KeyError)
        with pytest.raises(KeyError):
            thread.finish()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_function_that_waits_ends_when_the_block_does(error: type[BaseException]) -> None:
    ended: list[str] = []

    def function(thread: PausableThread[int]) -> None:
        try:
            thread.pause(1)
        except Exception:  # noqa: BLE001 - as a network may
            ended.append("swallowed")
        finally:
            ended.append("cleaned up")

    before = threading.active_count()

    def run() -> None:
        with pausable_threads([function, function]) as each:
            for thread in each:
                thread.resume()
            raise error

    with pytest.raises(error):
        run()
    assert ended == ["cleaned up"] * 2
    assert threading.active_count() == before


def test_a_function_that_has_not_begun_never_does() -> None:
    begun: list[int] = []
    with pausable_threads([lambda _thread: begun.append(1)]):
        pass
    assert begun == []


def test_a_task_runs_where_the_function_waits() -> None:
    def function(thread: PausableThread[int]) -> None:
        torch.set_grad_enabled(False)
        thread.pause(1)

    with pausable_threads([function]) as (thread,):
        thread.resume()
        assert thread.call(torch.is_grad_enabled) is False
        assert torch.is_grad_enabled()
        with pytest.raises(ZeroDivisionError):
            thread.call(lambda: 1 / 0)
        thread.finish()


def test_breaking_off_raises_at_every_pause_until_it_is_taken_back() -> None:
    seen: list[str] = []

    def function(thread: PausableThread[str]) -> None:
        for name in ("first", "second"):
            try:
                thread.pause(name)
            except AbandonedError:
                seen.append(name)
        thread.breaks_off = False
        thread.pause("third")

    with pausable_threads([function]) as (thread,):
        assert thread.resume() == "first"
        thread.breaks_off = True
        assert thread.resume() == "third"
        thread.finish()
    assert seen == ["first", "second"]
