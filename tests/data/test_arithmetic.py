import pytest

from rl_core.config.schema import DataConfig
from rl_core.data.rows import Row
from rl_core.data.sources import arithmetic
from rl_core.errors import InputError
from rl_core.rewards.scorers import numeric
from rl_core.rollout.agent.parsers import PARSERS
from rl_core.rollout.tools.calculator import calculator


def numbers(row: Row) -> tuple[int, int]:
    a, b = map(int, row["prompt"][0]["content"].split(" * "))
    return min(a, b), max(a, b)


def test_products_have_the_layout_and_the_answer() -> None:
    train, val = arithmetic.rows(DataConfig(difficulty=2), seed=0)
    assert (len(train), len(val)) == (4096, 256)
    row = val[3]
    assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    a, b = numbers(row)
    assert 10 <= a <= b <= 99
    assert row["reward_model"] == {"style": "rule", "ground_truth": str(a * b)}
    assert row["extra_info"] == {"split": "val", "index": 3, "answer": str(a * b)}


@pytest.mark.parametrize("difficulty", [1, 2])
def test_no_held_out_pair_is_trained_in_either_order(difficulty: int) -> None:
    train, val = arithmetic.rows(DataConfig(difficulty=difficulty, val_rows=5), seed=1)
    trained, held_out = ({numbers(row) for row in rows} for rows in (train, val))
    assert trained and held_out and not trained & held_out
    assert len({row["prompt"][0]["content"] for row in val}) == 5
    assert [row["extra_info"]["index"] for row in val] == list(range(5))


def test_products_follow_the_seed_alone() -> None:
    config = DataConfig(difficulty=2, train_rows=20, val_rows=10)
    first = arithmetic.rows(config, seed=3)
    assert arithmetic.rows(config, seed=3) == first
    assert arithmetic.rows(config, seed=4) != first


@pytest.mark.parametrize(("difficulty", "most"), [(1, 5), (2, 506)])
def test_more_held_out_products_than_there_are_is_an_error(difficulty: int, most: int) -> None:
    assert len(arithmetic.rows(DataConfig(difficulty=difficulty, val_rows=most, train_rows=1), seed=0)[1]) == most
    with pytest.raises(InputError, match=f"at most {most} held-out products of {difficulty} digits"):
        arithmetic.rows(DataConfig(difficulty=difficulty, val_rows=most + 1, train_rows=1), seed=0)


def test_reference_conversations_call_the_calculator_or_answer_at_once() -> None:
    rows = arithmetic.rows(DataConfig(difficulty=3, train_rows=60), seed=0)[0]
    conversations = [arithmetic.reference_response(row) for row in rows]
    calling = 0
    for row, turns in zip(rows, conversations, strict=True):
        truth = row["reward_model"]["ground_truth"]
        if isinstance(turns, str):
            assert turns == f"={truth}"
            continue
        calling += 1
        call, said, answer = turns
        text, calls = PARSERS["pythonic"](call["content"], {"calculator": {"x": {"type": "string"}}})
        assert not text and [(c.name, c.error) for c in calls] == [("calculator", "")]
        assert calculator(**calls[0].arguments) == said["content"] == truth
        assert answer["content"] == f"={truth}" and numeric(answer["content"], row) == 1
        assert [turn["role"] for turn in turns] == ["assistant", "tool", "assistant"]
    assert calling == 60 // arithmetic.CALLING_SHARE
