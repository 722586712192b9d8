"""Whole conversations with tools and environments, some of which misbehave."""

import ast
from pathlib import Path
from typing import Any

import pytest
from support_conversations import PROMPT, talk

from rl_core.data.protocol import DataProto
from rl_core.models.load import load_tokenizer

CALL, ANSWER = '[calculator(x="12*34")]', "408"


def calls(data: DataProto, row: int = 0) -> list[tuple[str, str]]:
    return [(call["name"], call["status"]) for call in data.non_tensor_batch["calls"][row]]


def test_the_policy_reads_what_its_tool_says_and_goes_on(tiny_model: Path) -> None:
    data, engine = talk(tiny_model, [CALL, ANSWER], agent={"tools": ["calculator"]})
    tokenizer = load_tokenizer(tiny_model)
    length, start = data.batch["response_length"].item(), data.batch["answer_start"].item()
    whole = [*PROMPT, {"role": "assistant", "content": CALL}, {"role": "tool", "content": "408"}]
    whole.append({"role": "assistant", "content": ANSWER})
    ids = data.batch["prompts"][0].tolist() + data.batch["responses"][0, :length].tolist()
    assert ids == tokenizer.apply_chat_template(whole, return_dict=False)
    sampled = data.batch["responses"][0][data.batch["response_mask"][0] == 1].tolist()
    assert tokenizer.decode(sampled) == f"{CALL}<|end|>{ANSWER}<|end|>"
    assert tokenizer.decode(data.batch["responses"][0, start:length]) == f"{ANSWER}<|end|>"
    assert engine.read[1].endswith("<|tool|>408<|end|><|assistant|>")
    assert calls(data) == [("calculator", "ok")] and data.batch["turns"].tolist() == [2]
    assert data.non_tensor_batch["calls"][0][0]["arguments"] == {"x": "12*34"}
    assert data.non_tensor_batch["status"].tolist() == ["completed"]


def test_several_calls_of_a_turn_run_at_once_and_are_answered_in_order(tiny_model: Path) -> None:
    turn = '[calculator(x="1+1"), nap(seconds=2), nap(seconds=2), calculator(x="3*3")]'
    data, engine = talk(tiny_model, [turn, "9"], agent={"tools": ["calculator", "nap"], "tool_processes": 3})
    assert engine.read[1].index("<|tool|>2<|end|>") < engine.read[1].index("<|tool|>9<|end|>")
    assert [name for name, _ in calls(data)] == ["calculator", "nap", "nap", "calculator"]
    pids = {call["text"] for call in data.non_tensor_batch["calls"][0] if call["name"] == "nap"}
    assert len(pids) == 2, "the naps were taken one after the other"


@pytest.mark.parametrize(
    ("turn", "name", "status", "said"),
    [
        ('[search(x="1")]', "search", "unknown_tool", "there is no tool"),
        ('[calculator(y="1")]', "calculator", "bad_arguments", "y"),
        ('[calculator(x="1+")]', "calculator", "error", ""),
        ('[calculator(x=")]', "", "broken_call", "the tool call cannot be read"),
        ('[misbehave(how="raise")]', "misbehave", "error", "is broken"),
        ('[misbehave(how="loop")]', "misbehave", "timeout", "2 s"),
        ('[misbehave(how="exit")]', "misbehave", "error", ""),
    ],
)
def test_a_call_that_fails_is_a_message_with_a_status_and_the_conversation_goes_on(
    tiny_model: Path, turn: str, name: str, status: str, said: str
) -> None:
    data, _ = talk(tiny_model, [turn, "0"], ["408"], agent={"tools": ["calculator", "misbehave"]})
    assert calls(data) == [(name, status)] and said in data.non_tensor_batch["calls"][0][0]["text"]
    assert data.non_tensor_batch["status"].tolist() == ["completed"] * 2
    assert data.batch["turns"].tolist() == [2, 1]


def test_calls_turns_and_texts_have_limits(tiny_model: Path) -> None:
    two = '[calculator(x="1"), calculator(x="2")]'
    data, _ = talk(
        tiny_model, [two, CALL, "1"], agent={"tools": ["calculator"], "max_tool_calls": 2, "max_tool_tokens": 200}
    )
    assert [status for _, status in calls(data)] == ["ok", "ok", "too_many"]
    both = {"tools": ["calculator"], "environment": "tools_for_tests:Countdown", "max_tool_calls": 1}
    data, _ = talk(tiny_model, ["a", CALL, CALL, "b"], agent=both, row={"turns": 2})
    assert [status for _, status in calls(data)] == ["ok", "ok", "too_many", "ok"]
    data, _ = talk(tiny_model, [CALL, CALL, CALL], agent={"tools": ["calculator"], "max_turns": 2})
    assert data.non_tensor_batch["stop_reason"].tolist() == ["max_turns"] and data.batch["turns"].tolist() == [2]
    long = f'[calculator(x="{"9" * 40}")]'
    data, _ = talk(tiny_model, [long, "9"], agent={"tools": ["calculator"], "max_tool_tokens": 10})
    assert len(data.non_tensor_batch["calls"][0][0]["text"]) <= 10
    data, _ = talk(tiny_model, [CALL, ANSWER], agent={"tools": ["calculator"]}, room=28)
    assert data.non_tensor_batch["stop_reason"].tolist() == ["length"] and data.batch["turns"].tolist() == [1]
    assert data.batch["response_mask"][0, int(data.batch["response_length"].item()) - 1] == 1


def test_a_tool_lives_as_long_as_its_trajectory_and_gives_its_reward(tiny_model: Path, tmp_path: Path) -> None:
    kwargs = {
        "create_kwargs": {"a": 1},
        "execute_kwargs": {"b": 2},
        "calc_reward_kwargs": {"reward": 3},
        "release_kwargs": {"file": str(tmp_path / "diary")},
    }
    row = {"extra_info": {"tools_kwargs": {"diary": kwargs, "calculator": None}}}
    turns = ['[diary(entry="x")]', '[calculator(x="1")]', "1"]
    data, _ = talk(tiny_model, turns, agent={"tools": ["calculator", "Diary"]}, row=row)
    assert calls(data) == [("diary", "ok"), ("calculator", "unknown_tool")], "the row has chosen one tool"
    assert data.batch["turn_reward"].item() == 0.25 + 3
    entries = [entry[0] for entry in ast.literal_eval((tmp_path / "diary").read_text())]
    assert entries == ["create", "execute", "calc_reward", "release"]


def test_an_environment_opens_answers_rewards_and_ends(tiny_model: Path) -> None:
    agent = {"environment": "tools_for_tests:Countdown"}
    data, engine = talk(tiny_model, ["a", "b"], agent=agent, row={"turns": 2})
    tokenizer = load_tokenizer(tiny_model)
    prompt = data.batch["prompts"][0, : data.batch["prompt_length"].item()].tolist()
    assert str(tokenizer.decode(prompt)).startswith("<|user|>12*34<|end|><|user|>2turns")
    assert engine.read[1].endswith("a<|end|><|user|>1<|end|><|assistant|>")
    assert data.batch["turn_reward"].item() == 1.0 and data.batch["turns"].tolist() == [2]
    assert data.non_tensor_batch["status"].tolist() == ["completed"]


@pytest.mark.parametrize(
    ("turn", "row", "reason"),
    [
        ("sleep", {"turns": 2}, "environment_timeout"),
        ("exit", {"turns": 2}, "environment_error"),
        ("a", {"turns": "raise"}, "environment_error"),
        ("a", {"turns": 12345678901234567890}, "prompt_length"),
    ],
)
def test_an_environment_that_fails_fails_the_trajectory(
    tiny_model: Path, turn: str, row: dict[str, Any], reason: str
) -> None:
    data, _ = talk(tiny_model, [turn, "b"], agent={"environment": "tools_for_tests:Countdown"}, row=row)
    assert data.non_tensor_batch["status"].tolist() == ["failed"]
    assert data.non_tensor_batch["stop_reason"].tolist() == [reason] and data.non_tensor_batch["detail"][0]
    assert data.batch["prompt_length"].item() <= 24, "what is too long reaches no worker"


def test_a_tool_that_cannot_be_created_fails_its_trajectory_alone(tiny_model: Path) -> None:
    row = {"extra_info": {"tools_kwargs": {"diary": {"create_kwargs": {"fail": True}}}}}
    data, engine = talk(tiny_model, ["a"], agent={"tools": ["Diary"]}, row=row)
    assert data.non_tensor_batch["stop_reason"].tolist() == ["tool_error"] and engine.read == []
    assert "cannot be created" in data.non_tensor_batch["detail"][0]
