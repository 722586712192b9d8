"""Signals while steps are made."""

import signal
import threading
import time

import pytest

from tasks.runs.signals import GracefulStop


class Terminated(BaseException):
    pass


def terminate(*_: object) -> None:
    raise Terminated


@pytest.fixture(autouse=True)
def handled() -> object:
    before = signal.signal(signal.SIGTERM, terminate)
    yield
    signal.signal(signal.SIGTERM, before)


def made(grace_s: float = 20.0) -> tuple[GracefulStop, list[str]]:
    told: list[str] = []
    return GracefulStop(grace_s, told.append), told


def settle(told: list[str]) -> None:
    end = time.monotonic() + 60
    while not told and time.monotonic() < end:  # it is told by another thread
        time.sleep(0.005)


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_the_step_ends_first(number: signal.Signals, kind: type[BaseException]) -> None:
    stopping, told = made()
    done = False
    with pytest.raises(kind), stopping.defer_signals():
        stopping.step_began(7.0)
        assert not stopping.requested() and stopping.grace_left_s == 0
        signal.raise_signal(number)
        assert stopping.requested() and 10 < stopping.grace_left_s < 20
        done = True
    settle(told)
    assert done and "(about 7.0s); a second signal abandons it" in told[0]
    assert signal.getsignal(signal.SIGTERM) is terminate


def test_a_second_signal_abandons_the_step() -> None:
    stopping, _ = made()
    with pytest.raises(KeyboardInterrupt), stopping.defer_signals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the step went on")


def test_a_step_that_takes_longer_than_the_grace_period_is_abandoned() -> None:
    for grace_s, seconds in ((20.0, 30.0), (0.0, 0.0)):
        stopping, told = made(grace_s)
        with pytest.raises(Terminated), stopping.defer_signals():
            stopping.step_began(seconds)
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("the step went on")
        assert not stopping.requested() and not told


def test_the_grace_period_ends_also_a_wait() -> None:
    stopping, _ = made(0.3)
    start = time.monotonic()
    with pytest.raises(Terminated), stopping.defer_signals():
        signal.raise_signal(signal.SIGTERM)
        threading.Event().wait(120)
    assert time.monotonic() - start < 60


def test_a_stage_that_fails_after_the_signal_is_not_tried_again() -> None:
    stopping, _ = made()
    with pytest.raises(Terminated), stopping.defer_signals():
        signal.raise_signal(signal.SIGTERM)
        raise ValueError


def test_nothing_is_changed_around_the_steps() -> None:
    stopping, _ = made()
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stopping.defer_signals():
            signal.raise_signal(signal.SIGINT)
            assert not stopping.requested()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(Terminated):
        signal.raise_signal(signal.SIGTERM)


def test_steps_of_another_thread_are_made_without_signals() -> None:
    stopping, done = made()[0], []

    def steps() -> None:
        with stopping.defer_signals():
            done.append(1)

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    assert done == [1]
