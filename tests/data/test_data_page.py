"""What docs/data.md shows works as it says, and the sources, layouts, kinds and settings that it names exist."""

import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import get_args

import pytest
from support_pages import page, table, write_files

from flows.cli.main import main
from rl_core.config.compose import compose, flatten, recipe_names
from rl_core.config.data import DropReason
from rl_core.data.layouts import LAYOUTS
from rl_core.data.sources import source_names


def test_the_command_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_files("data", tmp_path)
    runpy.run_path("make_problems.py")
    [(command, shown)] = re.findall(r"```\n\$ rollforward (data check .*?)\n(.*?)```", page("data"), re.DOTALL)
    assert main(shlex.split(command)) == 2

    def plain(text: str) -> str:
        return re.sub(r"\n  time .*", "", text.replace(f"{tmp_path}/", "")).strip()

    assert plain(capsys.readouterr().out) == plain(shown)


def test_settings_of_the_page_exist_and_its_commands_are_accepted() -> None:
    settings = flatten(compose("grpo").config)
    named = re.findall(r"\b((?:data|agent|model|reward)\.[a-z_.]*[a-z_])(?=[`=])", page("data"))
    assert len(named) > 10 and [key for key in named if key not in settings] == []
    commands = re.findall(r"\nrollforward run (.*?)\n```", page("data").replace("\\\n", " "), re.DOTALL)
    assert len(commands) == 3
    for command in commands:
        recipe, *overrides = shlex.split(command.replace("…", ""))
        assert recipe in recipe_names() and compose(recipe, overrides)


def test_tables_of_the_page_name_all_there_are() -> None:
    def names(section: str) -> list[tuple[str, ...]]:
        return [tuple(re.findall(r"`(\w+)`", cells[0])) for cells in table("data", section)]

    assert sorted(name for (name,) in names("Sources")) == source_names()
    assert names("Layouts") == list(LAYOUTS)
    assert {name for (name,) in names("What is checked")} == set(get_args(DropReason))
