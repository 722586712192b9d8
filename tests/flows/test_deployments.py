"""The files of the folder deployments, and the page that explains them."""

import re
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import _parser
from flows.server.deploy import DEPLOYMENTS, FOLDER, read_automations, read_deployments
from flows.server.services import SETTINGS
from rl_core.errors import InputError

PAGE = (FOLDER.parent / "docs/operations.md").read_text()


def test_every_deployment_names_a_flow_and_parameters_that_it_takes() -> None:
    from prefect.flows import load_flow_from_entrypoint

    for spec in read_deployments(DEPLOYMENTS):
        flow: Any = load_flow_from_entrypoint(spec.entrypoint, use_placeholder_flow=False)
        assert set(spec.parameters) <= set(flow.parameters.properties)
        assert (
            f"| `{flow.name}/{spec.name}` | {', '.join(f'`{name}`' for name in flow.parameters.properties)} |" in PAGE
        )


def test_a_schedule_is_inactive_and_has_a_time_zone() -> None:
    (schedule,) = (schedule for spec in read_deployments(DEPLOYMENTS) for schedule in spec.schedules)
    assert schedule.cron and schedule.timezone and not schedule.active


def test_what_the_form_does_not_know_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(DEPLOYMENTS.read_text().replace("work_pool: *pool", "work_pol: *pool", 1))
    with pytest.raises(InputError, match="work_pol"):
        read_deployments(file)


def test_a_run_counts_as_lost_after_three_heartbeats() -> None:
    heartbeat = int(SETTINGS["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
    lost = next(one for one in read_automations() if one.name == "rollforward lost heartbeat")
    trigger: Any = lost.trigger
    assert trigger.within.total_seconds() == 3 * heartbeat
    for name in ("compose.yaml", "kuberay.yaml"):
        assert re.search(rf'HEARTBEAT_FREQUENCY(, value)?: "{heartbeat}"', (FOLDER / name).read_text())


def test_the_page_names_only_commands_that_exist() -> None:
    choices = next(action.choices for action in _parser()._actions if action.choices)
    assert set(re.findall(r"rollforward (up|down|deploy|promote|rollback|models|run)\b", PAGE)) <= set(choices)
