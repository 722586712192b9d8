"""Each algorithm teaches an untrained model to repeat four digits, and one a model to call its tool, within about the
steps that five seeds took."""

from collections.abc import Iterator

import pytest
from support_pages import page

from benchmarks.learner import CASES, TARGET, Learner, learner

# Five seeds do not show the whole range, and other processors round otherwise.
WIDER = 1.5


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learner]:
    """One Ray session, one set of scorers, and one of workers for all cases of a task."""
    with learner(tmp_path_factory.mktemp("learning")) as made:
        yield made


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.band])
def test_it_learns_within_its_band(shared: Learner, name: str) -> None:
    case = CASES[name]
    assert case.band
    steps, metrics = shared.steps(case, seed=0)
    scores = [round(each["score/mean"], 2) for each in metrics]
    assert scores[0] < TARGET / 2, "an untrained model can only guess, one after the warm start seldom calls its tool"
    assert steps is not None, f"not in {len(scores)} steps; scores {scores}"
    fewest, most = case.band
    assert fewest / WIDER <= steps <= most * WIDER, f"five seeds took {fewest} to {most}; scores {scores}"


@pytest.mark.parametrize(("name", "band"), [(name, case.band) for name, case in CASES.items() if case.band])
def test_the_page_has_the_measured_range(name: str, band: tuple[int, int]) -> None:
    assert any(f"`{name}`" in line and f"({band[0]}–{band[1]})" in line for line in page("algorithms").splitlines())


def test_the_page_has_the_settings_of_each_case() -> None:
    settings = {setting for case in CASES.values() for setting in case.settings}
    assert [setting for setting in settings if f"`{setting}`" not in page("algorithms")] == []
