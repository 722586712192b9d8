"""CONTRIBUTING.md, CHANGELOG.md, the hosted checks and the hooks name what exists."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
DRY = subprocess.run(["make", "--dry-run", "check"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
CHECK = re.findall(r"^(\.venv/bin/(?!python).*?)(?: \.)?$", DRY, re.MULTILINE)
SECTIONS = dict(re.findall(r"^### (.*)\n((?:(?!^##).*\n)*)", PAGE, re.MULTILINE))
PATH = re.compile(r"`([\w.{}-]+/[\w./-]*|\w+\.(?:py|md|toml|txt))`")


def paths(text: str) -> list[str]:
    """The files and folders that a text names; those with a part in capitals are for the reader to name."""
    return [path for path in PATH.findall(text) if not re.search(r"\b[A-Z]{3,}\b(?!\.md)", path)]


def test_every_file_of_the_page_exists() -> None:
    named = paths(PAGE)
    assert len(named) > 40
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_command_of_the_page_exists() -> None:
    commands = re.findall(r"`make ([a-z]+)`", PAGE) + re.findall(r"^make ([a-z]+)", PAGE, re.MULTILINE)
    assert {"quick", "check", "test", "mutation", "faults", "soak"} <= set(commands) <= TARGETS
    [row] = re.findall(r"^\| `make check` \| (.*?) \|", PAGE, re.MULTILINE)
    assert re.findall(r"`([\w -]+)`", row) == [command.removeprefix(".venv/bin/") for command in CHECK]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_name_of_a_section_is_in_one_of_its_files(section: str) -> None:
    text = SECTIONS[section]
    files = [ROOT / path for path in paths(text) if path.endswith((".py", ".md", ".toml"))]
    assert text.count("\n") <= 10 + 2 and files
    sources = "\n".join(file.read_text(encoding="utf-8") for file in files)
    names = re.findall(r"`@?(?!NAME)([A-Za-z_]\w*)(?:[.(=][^`]*)?`", PATH.sub("", text))
    assert [name for name in names if not re.search(rf"\b{name}\b", sources)] == []


def test_sections_say_how_to_register() -> None:
    calls = ("@ESTIMATORS.register(", "@POLICY_LOSSES.register(", "@stage(")
    for call in calls:
        assert call in PAGE
        assert any(call in file.read_text() for room in ("rl_core", "tasks") for file in (ROOT / room).rglob("*.py"))


def test_the_hosted_checks_call_what_exists_and_may_only_read() -> None:
    workflow: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [step["run"].split() for step in steps if "run" in step]
    assert {command[1] for command in commands} == {"check", "quick", "test"} <= TARGETS
    assert all(command[0] == "make" for command in commands)
    for step in steps:
        assert "run" in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
        if "cache" in step.get("with", {}):
            assert (ROOT / step["with"]["cache-dependency-path"]).is_file()
    supported = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert supported == ">=3.11,<3.13" and workflow["jobs"]["quick"]["strategy"]["matrix"]["python"] == ["3.11", "3.12"]


def test_the_hooks_are_the_checks_of_make_check() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    called = [hook["entry"].removesuffix(" --force-exclude") for hook in hooks]
    assert called == CHECK
    for entry in called:
        assert (Path(sys.prefix) / "bin" / Path(entry.split()[0]).name).exists()


def test_the_changelog_has_the_version_of_the_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == ["Unreleased", version]
