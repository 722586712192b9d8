"""Problems of reasoning-gym: made from the seed, apart from the held-out ones, and scored by their tasks."""

import json

import pytest
from support_scoring import scored

from rl_core.config.compose import compose
from rl_core.config.schema import DataConfig
from rl_core.data.rows import Row
from rl_core.data.sources import reasoning_gym as source
from rl_core.errors import InputError

pytest.importorskip("reasoning_gym")
CONFIG = DataConfig(source="reasoning_gym", tasks=("leg_counting", "chain_sum"), train_rows=30, val_rows=10)


def prompts(rows: list[Row]) -> set[str]:
    return {row["prompt"][0]["content"] for row in rows}


def test_rows_follow_the_seed_and_no_prompt_is_in_both_splits() -> None:
    train, val = source.rows(CONFIG, 3)
    assert (len(train), len(val)) == (30, 10) and source.rows(CONFIG, 3) == (train, val)
    assert source.rows(CONFIG, 4)[1] != val
    assert not prompts(train) & prompts(val) and len(prompts(val)) == 10
    assert len(prompts(train)) == 30, "each row is a problem of its own where a task has many"
    assert [row["ability"] for row in val] == ["leg_counting", "chain_sum"] * 5
    assert json.loads(json.dumps(train)) == train
    few = DataConfig(source="reasoning_gym", tasks=("coin_flip",), train_rows=200, val_rows=200)
    assert not set.intersection(*map(prompts, source.rows(few, 0)))


def test_the_recipe_mixes_three_tasks() -> None:
    data = compose("reasoning", ["data.train_rows=96", "data.val_rows=6"]).config.data
    train, val = source.rows(data, 0)
    assert len(prompts(train)) == 96 and len(prompts(val)) == 6
    assert {row["ability"] for row in train} == set(data.tasks) and len(data.tasks) == 3


def test_the_task_scores_its_own_answer_and_no_other() -> None:
    _, val = source.rows(CONFIG, 0)
    right = [source.reference_response(row) for row in val]
    wrong = [f"<answer>{row['reward_model']['ground_truth']}</answer> no, <answer>x</answer>" for row in val]
    bare = [row["reward_model"]["ground_truth"] for row in val]
    results = scored([*right, *wrong, *bare], val * 3, timeout_s=60)
    assert [result.score for result in results] == [1.0] * 10 + [0.0] * 20


@pytest.mark.parametrize(
    ("tasks", "says"),
    [((), "names of tasks"), (("leg_countin",), "take leg_counting"), (("n_queens",), "whose code evaluates text")],
)
def test_tasks_that_cannot_be_had_are_named(tasks: tuple[str, ...], says: str) -> None:
    with pytest.raises(InputError, match=says):
        source.rows(DataConfig(source="reasoning_gym", tasks=tasks), 0)


def test_a_task_that_runs_answers_as_programs_scores_nothing() -> None:
    row = {"data_source": "reasoning_gym", "extra_info": {"task": "spiral_matrix", "entry": '{"answer": "1 2"}'}}
    (result,) = scored(["<answer>__import__('os').getcwd()</answer>"], [row], timeout_s=60)
    assert result.score is None and "may run an answer as a program" in result.detail
