"""A run may go on with its work laid out otherwise, and says so."""

from pathlib import Path

import pytest
from support_runs import SIZES

from rl_core.config.compose import compose
from rl_core.errors import InputError
from tasks.runs.open_run import find_run, open_run
from tasks.runs.run import Run
from tasks.session.session import open_session


def opened(home: Path, *settings: str) -> Run:
    return open_run(compose("demo", [*SIZES, *settings]), home, "x")


def test_other_numbers_of_ranks_are_no_other_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_session(opened(tmp_path, "trainer.ranks_per_node=2")) as session:
        session.store.commit_folder("data", {}, [])
        session.run.lock.close()
    assert "since the run started" not in capsys.readouterr().out
    with open_session(opened(tmp_path, "trainer.max_attempts=1")) as session:
        session.run.lock.close()
    told = "trainer.ranks_per_node changed from 2 to 1 since the run started: results equal within rounding"
    assert told in capsys.readouterr().out


def test_settings_may_be_corrected_as_long_as_there_are_no_rows(tmp_path: Path) -> None:
    opened(tmp_path, "data.max_prompt_length=20").close()
    run = opened(tmp_path, "data.max_prompt_length=24")
    run.store.commit_folder("data", {}, [])
    run.close()
    assert opened(tmp_path, "data.max_prompt_length=24").composed.config.data.max_prompt_length == 24
    with pytest.raises(InputError, match="data.max_prompt_length was 24, now 20"):
        opened(tmp_path, "data.max_prompt_length=20")


def test_a_run_without_name_is_found_by_what_it_learns_not_by_its_ranks(tmp_path: Path) -> None:
    names = [find_run(compose("demo", [f"trainer.ranks_per_node={ranks}"]), tmp_path)[0] for ranks in (1, 2)]
    assert names[0] == names[1]
