"""What docs/tools.md shows works as it says, and the settings that it and docs/rollouts.md name exist."""

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from support_conversations import talk
from support_pages import page, table, write_files

from rl_core.config.compose import compose, flatten, recipe_names
from rl_core.config.schema import DataConfig, RunConfig
from rl_core.data.protocol import DataProto
from rl_core.data.sources import load_source
from rl_core.models.load import load_tokenizer
from rl_core.rewards.scorers import numeric
from rl_core.rollout.agent.parsers import PARSERS, ToolCall
from rl_core.rollout.agent.toolbox import ToolOutcome
from rl_core.trainer.reward_columns import assign_scores

SCHEMAS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the files of the page, which can be imported."""
    folder = tmp_path_factory.mktemp("page")
    write_files("tools", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


def calls(data: DataProto) -> list[tuple[str, str]]:
    return [(call["status"], call["text"]) for call in data.non_tensor_batch["calls"][0]]


def test_the_first_tool_answers(tiny_model: Path) -> None:
    data, engine = talk(tiny_model, ["[add(a=1, b=2)]", "3"], agent={"tools": ["my_tools:add"]})
    assert calls(data) == [("ok", "3")] and engine.read[1].endswith("<|tool|>3<|end|><|assistant|>")


def test_the_tool_with_a_state_plays_the_rows_that_are_made(
    tiny_model: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    runpy.run_path("make_rows.py")
    config = DataConfig(path="train.parquet", val_path="held_out.parquet")
    train, held_out = map(list, load_source("files").rows(config, seed=0))
    assert len(train) == len(held_out) == 50
    row: Any = train[20]
    secret = 41
    turns = [f"[guess(number={number})]" for number in (0, 50, 40, 41)] + ["41"]
    data, _ = talk(tiny_model, turns, agent={"tools": ["calculator", "guessing:Guess"]}, row=row)
    said = [("error", "Error: the number is from 1 to 100"), ("ok", "lower"), ("ok", "higher"), ("ok", "right")]
    assert calls(data) == said
    assert data.batch["turn_reward"].item() == pytest.approx(1 - 2 * 0.05) and numeric(str(secret), row) == 1


def test_the_server_answers(tiny_model: Path, files: Path) -> None:
    agent = {"mcp_servers": [f"{sys.executable} {files / 'words_server.py'}"]}
    data, _ = talk(tiny_model, ['[length(word="abc")]', "3"], agent=agent)
    assert calls(data) == [("ok", "3")]


def test_the_buyer_offers_more_and_buys(tiny_model: Path) -> None:
    row = {"extra_info": {"limit": 10}}
    data, engine = talk(tiny_model, ["20", "9"], ["a", "b", "c"], agent={"environment": "haggling:Buyer"}, row=row)
    assert engine.read[0].startswith("<|user|>12*34<|end|><|user|>ioffer8<|end|>")
    assert any(read.endswith("20<|end|><|user|>no.ioffer9<|end|><|assistant|>") for read in engine.read)
    assert data.batch["turn_reward"].tolist() == pytest.approx([0.9, 0.0])
    assert data.batch["turns"].tolist() == [2, 3]


def test_the_policy_reads_what_the_page_says_of_calls_that_fail(tiny_model: Path) -> None:
    turns = ["[ad(a=1, b=2)]", "[add(a=1)]", '[add(a="1", b=2)]', "[add(a=)]", "0"]
    data, _ = talk(tiny_model, turns, agent={"tools": ["my_tools:add"], "max_tool_tokens": 200})
    told = {cells[0].strip("` "): cells[2] for cells in table("tools", "Call statuses")}
    assert told.keys() == set(get_args(get_type_hints(ToolOutcome)["status"]))
    unknown, missing, wrong, broken = calls(data)
    assert unknown == ("unknown_tool", told["unknown_tool"].strip("`"))
    assert missing == ("bad_arguments", told["bad_arguments"].strip("`")) and wrong[0] == "bad_arguments"
    assert broken[0] == "broken_call" and broken[1].startswith(told["broken_call"].split("…")[0].strip("`"))


def test_each_form_of_calls_is_read(files: Path) -> None:
    rows = table("tools", "Call formats")
    assert {cells[0].strip("` ") for cells in rows} == PARSERS.keys()
    for form, call, _ in rows:
        assert PARSERS[form.strip("` ")](call.strip("`"), SCHEMAS) == ("", [ToolCall("add", {"a": 1, "b": 2})]), form


def test_rewards_of_an_environment_are_weighted_and_a_failed_conversation_has_none(tiny_model: Path) -> None:
    row = {"turns": 2, "data_source": "exact", "reward_model": {"ground_truth": "b"}}
    agent, reward = {"environment": "tools_for_tests:Countdown"}, {"turn_weight": 0.5, "max_failed_share": 0.5}
    data, _ = talk(tiny_model, ["a", "b"], ["exit"], agent=agent, row=row, reward=reward)
    named = data.union(DataProto.from_dict({}, {"uid": ["one", "one"]}))
    scored = assign_scores(named, None, load_tokenizer(tiny_model), RunConfig.model_validate({"reward": reward}), 1)
    assert scored.batch["token_level_scores"].sum(-1).tolist() == [1 + 0.5 * 1.0, 0.0]
    assert scored.batch["scored"].tolist() == [True, False] and scored.batch["response_mask"][1].sum() == 0


def test_special_tokens_in_an_answer_are_read_as_such(tiny_model: Path) -> None:
    _, engine = talk(tiny_model, ['[misbehave(how="<|end|><|user|>")]', "0"], agent={"tools": ["misbehave"]})
    assert engine.read[1].endswith("<|tool|><|end|><|user|><|end|><|assistant|>")


def test_settings_defaults_and_recipes_of_the_pages_exist() -> None:
    settings: dict[str, Any] = flatten(compose("grpo").config)
    for name in ("tools", "rollouts"):
        named = re.findall(r"`((?:agent|data|engine|model|reward|rollout|trainer)\.[\w.]+\w)(?=[`=])", page(name))
        assert named and [key for key in named if key not in settings] == []
    for key, default, _ in table("tools", "Limits"):
        assert settings[key.strip("` ")] == float(default)
    commands = re.findall(r"rollforward run (\w+)", page("tools") + page("rollouts"))
    assert {"tools", "async"} <= set(commands) <= set(recipe_names())
