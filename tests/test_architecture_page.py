"""docs/architecture.md names files and functions that exist, and the packages stay as small as it describes them."""

import ast
import re
from functools import cached_property
from pathlib import Path

import pytest
from support_pages import table

from tasks.session.assets import RunAssets
from tasks.session.telemetry import RunTelemetry
from tasks.session.workers import RunWorkers
from tasks.tracking.run_tracking import RunTracking

ROOT = Path(__file__).parents[1]
LOOK_UPS = table("architecture", "Where is what")
MAX_METHODS = 14
MAX_LOOSE_MODULES = 4


def names_in(file: Path) -> set[str]:
    """Functions, classes and methods (`Class.method` too) that a file defines."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


def test_there_are_fifteen_look_ups() -> None:
    assert len(LOOK_UPS) == 15


@pytest.mark.parametrize(("topic", "where"), LOOK_UPS)
def test_what_the_page_names_is_there(topic: str, where: str) -> None:
    files: list[Path] = []
    names: set[str] = set()
    for code in re.findall(r"`([^`]+)`", where):
        if code.endswith(".py"):
            file = ROOT / code
            files.append(file if file.is_file() else files[-1].parent / code)
            assert files[-1].is_file(), f"{topic}: {code}"
            names |= names_in(files[-1])
        else:
            names |= names_in(ROOT / "rl_core/trainer/trainer.py")
            assert code in names, f"{topic}: {code} is not in {', '.join(map(str, files))}"


def test_packages_of_the_page_are_those_of_the_tree() -> None:
    listed = {path.strip("`/") for path, _ in table("architecture", "Packages")}
    top = {"flows", "tasks"}
    found = {str(path.parent.relative_to(ROOT)) for name in ("flows", "tasks", "rl_core")
             for path in (ROOT / name).rglob("__init__.py")}  # fmt: skip
    # Described with their parent.
    found -= {"rl_core", "tasks/session", "rl_core/rollout/tools", "rl_core/data/sources"}
    assert listed == found | top


def test_few_modules_lie_outside_of_packages() -> None:
    loose = [path.name for path in (ROOT / "rl_core").glob("*.py") if path.name != "__init__.py"]
    assert len(loose) <= MAX_LOOSE_MODULES, loose


@pytest.mark.parametrize("part", [RunAssets, RunWorkers, RunTelemetry, RunTracking])
def test_the_parts_of_a_session_are_small(part: type) -> None:
    methods = [
        name for name, value in vars(part).items() if callable(value) or isinstance(value, property | cached_property)
    ]
    assert len(methods) <= MAX_METHODS, methods
