"""A short form of the matrix: deaths at points of a step, and a result that is that of a run that nothing disturbed."""

import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from support_faults import FLOW, REWARD, WORKER, Kill
from support_trials import Trial, problems, shared_memory

STEPS = 8
PLAN = [
    Kill(REWARD, "score", "before", 1),
    Kill(WORKER, "actor update", "after", 3),
    Kill(FLOW, "manifest", "before", 5),
    Kill(FLOW, "alias move", "before", STEPS),
]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trial, Trial]:
    """A run that is killed, and the one that is not."""
    root = tmp_path_factory.mktemp("faults")
    pair = Trial(root / "killed", STEPS, [], PLAN), Trial(root / "whole", STEPS)
    before = shared_memory()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Trial.run, pair))
    # Runs of other tests have semaphores too, and the guardian of one that was killed takes a moment.
    end = time.monotonic() + 180
    while left := [name for name in shared_memory() - before if "loky" in name and not owner_lives(name)]:
        assert time.monotonic() < end, left
        time.sleep(0.5)
    return pair


def owner_lives(semaphore: str) -> bool:
    """Whether the process lives that made a semaphore `sem.loky-PID-…`."""
    return bool(psutil.pid_exists(int(semaphore.split("-")[1])))


def test_every_kill_happened_and_the_run_went_on(trials: tuple[Trial, Trial]) -> None:
    killed, whole = trials
    assert killed.kills_left() == [] and (killed.attempts, whole.attempts) == (3, 1)
    cells = killed.cells(whole)
    assert [Kill(cell.victim, cell.boundary, cell.when, cell.step) for cell in cells] == PLAN
    assert all(cell.equal for cell in cells)
    # Step 3 had been rolled out; of step 5 the checkpoint lacked its manifest, and step 6 had been rolled out.
    assert [bool(cell.tokens) for cell in cells] == [False, True, True, False]


def test_the_result_is_that_of_the_undisturbed_run_and_nothing_is_left(trials: tuple[Trial, Trial]) -> None:
    killed, _ = trials
    assert problems(*trials) == []
    assert (killed.home / "output.log").read_text().count("supervised step 20/20") == 1
