"""docs/algorithms.md has every algorithm, and what it names exists."""

import re
from pathlib import Path
from typing import Any

import pytest
from support_pages import page, table, write_files

from rl_core.algorithms.advantages import ESTIMATORS
from rl_core.algorithms.policy_losses import POLICY_LOSSES
from rl_core.algorithms.registry import Registry
from rl_core.config.compose import compose, flatten, recipe_names

PAGE = "algorithms"
TASKS = {"demo", "gsm8k", "learn_copy", "reasoning", "tools"}
FAMILIES = sorted(set(recipe_names()) - TASKS)
SECTIONS: dict[str, Registry[Any]] = {"Advantage estimators": ESTIMATORS, "Policy losses": POLICY_LOSSES}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_name_has_a_row_and_its_recipes_use_it(section: str) -> None:
    registry = SECTIONS[section]
    rows = {cells[0].strip("` "): cells for cells in table(PAGE, section)}
    assert rows.keys() == registry.entries.keys()
    for name, cells in rows.items():
        for recipe in re.findall(r"`(\w+)`", cells[4]):
            config = compose(recipe).config
            used = config.algorithm.estimator if registry is ESTIMATORS else config.actor.policy_loss
            assert used == name, recipe


def test_every_recipe_of_an_algorithm_is_named() -> None:
    assert FAMILIES and [name for name in FAMILIES if f"`{name}`" not in page(PAGE)] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_goes_with_the_learning_task(tmp_path: Path, name: str) -> None:
    file = tmp_path / "both.yaml"
    file.write_text(f"defaults: [learn_copy, {name}]\n")
    assert compose(str(file)).config.data.source == "copy_digits"


def test_settings_and_files_of_the_page_exist(tmp_path: Path) -> None:
    keys = flatten(compose("grpo").config)
    named = re.findall(r"`((?:actor|algorithm|correction|data|rollout|trainer)\.\w+)", page(PAGE))
    assert named and [key for key in named if key not in keys] == []
    write_files(PAGE, tmp_path)
    assert compose(str(tmp_path / "demo_dapo.yaml")).config.algorithm.max_generated_batches > 0
    assert ":" in compose(str(tmp_path / "mine.yaml")).config.actor.policy_loss
