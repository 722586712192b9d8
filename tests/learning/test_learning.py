"""Each algorithm teaches an untrained model to repeat four digits, within about the steps that five seeds took."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_pages import page, write_files

from benchmarks.learner import CASES, Case, Learner, learner

# Five seeds do not show the whole range, and other processors round otherwise.
WIDER = 1.25


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the page's files of an estimator and a loss of one's own."""
    folder = tmp_path_factory.mktemp("own")
    write_files("algorithms", folder)
    return folder


@pytest.fixture(scope="module")
def shared(own: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learner]:
    """One Ray session, one set of workers and of scorers for all algorithms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(own)
        patch.setenv("PYTHONPATH", str(own), prepend=os.pathsep)  # for the workers
        with learner(tmp_path_factory.mktemp("learning")) as made:
            yield made


@pytest.mark.parametrize("name", CASES)
def test_it_learns_within_its_band(shared: Learner, name: str) -> None:
    case = CASES[name]
    steps, metrics = shared.steps(case, seed=0)
    scores = [round(each["score/mean"], 2) for each in metrics]
    fewest, most = case.band
    fewest, most = int(fewest / WIDER), int(most * WIDER)
    assert scores[0] < 0.2, "an untrained model can only guess"
    assert steps is not None and fewest <= steps <= most, f"{steps} steps, expected {fewest} to {most}; scores {scores}"


@pytest.mark.parametrize("name", CASES)
def test_the_page_has_the_measured_range(name: str) -> None:
    fewest, most = CASES[name].band
    assert any(f"`{name}`" in line and f"({fewest}–{most})" in line for line in page("algorithms").splitlines())


def test_an_estimator_and_a_loss_of_ones_own_are_used(shared: Learner, own: Path) -> None:
    case = Case(str(own / "mine.yaml"), ("trainer.steps=1", "algorithm.gamma=0.5"))
    _, (metrics,) = shared.steps(case, seed=0)
    assert {metrics["advantage/max"], metrics["advantage/min"]} == {0.5, -0.5}
    assert 0 < metrics["actor/positive"] < 1
    assert metrics["actor/pg_loss"] == pytest.approx(0, abs=1e-6)  # the log-ratio is 0; no other loss is
