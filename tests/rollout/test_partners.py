"""Whole conversations with real tools and environments; the policy's turns are given."""

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_core.config.schema import RunConfig
from rl_core.data.dataset import encode_prompt
from rl_core.data.protocol import DataProto
from rl_core.models.load import load_tokenizer
from rl_core.rollout.agent_loop import roll_out
from rl_core.rollout.engine import Completion, Sampling
from rl_core.rollout.partners import ToolPartners

HERE = Path(__file__).parent
PROMPT = [{"role": "user", "content": "12*34"}]
CALL, ANSWER = '[calculator(x="12*34")]', "408"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        yield


class Script:
    """An engine whose turns are given, by the row's seed."""

    def __init__(self, tokenizer: Any, turns: list[list[str]]) -> None:
        self.tokenizer, self.turns = tokenizer, [list(each) for each in turns]
        self.read: list[str] = []

    async def generate(self, token_ids: list[int], seed: int, sampling: Sampling) -> Completion:
        self.read.append(self.tokenizer.decode(token_ids))
        number = next(i for i in range(len(self.turns)) if i * 100 <= seed < i * 100 + 100)
        text = self.turns[number].pop(0)
        ids = (self.tokenizer.encode(text) + [self.tokenizer.eos_token_id])[: sampling.max_tokens]
        stop = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        return Completion(token_ids, ids, [-0.5] * len(ids), [3] * len(ids), stop)  # type: ignore[arg-type]

    def finish_batch(self) -> None:
        pass


def talk(
    model: Path, *turns: list[str], agent: dict[str, Any], row: dict[str, Any] | None = None, room: int = 200
) -> tuple[DataProto, Script]:
    """The trajectories of rows with these turns, and what the engine read."""
    tools = [name if name == "calculator" else f"tools_for_tests:{name}" for name in agent.pop("tools", [])]
    settings = {"parser": "pythonic", "tool_timeout_s": 2.0, "tools": tools, **agent}
    config = RunConfig.model_validate({"agent": settings, "data": {"max_prompt_length": 24}})
    tokenizer = load_tokenizer(model)
    engine = Script(tokenizer, list(turns))
    ids = encode_prompt(tokenizer, PROMPT, "here")
    rows = [{"prompt": PROMPT, "extra_info": {}, **(row or {})}] * len(turns)
    seeds = [100 * i for i in range(len(turns))]
    prompts = DataProto.from_dict({}, {"prompt_ids": [ids] * len(turns), "seed": seeds, "row": rows})

    async def work() -> DataProto:
        partners = ToolPartners(config, model)
        async with partners.runner:
            await partners.start()
            return await roll_out(engine, prompts, Sampling(1.0, room, (2,)), config.agent, partners)  # type: ignore[arg-type]

    return asyncio.run(work()), engine


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
    turn = '[calculator(x="1+1"), nap(seconds=0.5), nap(seconds=0.5), calculator(x="3*3")]'
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
    data, _ = talk(tiny_model, [CALL, CALL, CALL], agent={"tools": ["calculator"], "max_turns": 2})
    assert data.non_tensor_batch["stop_reason"].tolist() == ["max_turns"] and data.batch["turns"].tolist() == [2]
    long = f'[calculator(x="{"9" * 40}")]'
    data, engine = talk(tiny_model, [long, "9"], agent={"tools": ["calculator"], "max_tool_tokens": 10})
    assert len(data.non_tensor_batch["calls"][0][0]["text"]) <= 10
    data, _ = talk(tiny_model, [CALL, ANSWER], agent={"tools": ["calculator"]}, room=28)
    assert data.non_tensor_batch["stop_reason"].tolist() == ["length"] and data.batch["turns"].tolist() == [1]
    assert data.batch["response_mask"][0, data.batch["response_length"].item() - 1] == 1


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
    assert tokenizer.decode(prompt).startswith("<|user|>12*34<|end|><|user|>2turns")
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


def test_a_tool_that_cannot_be_created_fails_its_trajectory_alone(tiny_model: Path) -> None:
    row = {"extra_info": {"tools_kwargs": {"diary": {"create_kwargs": {"fail": True}}}}}
    data, engine = talk(tiny_model, ["a"], agent={"tools": ["Diary"]}, row=row)
    assert data.non_tensor_batch["stop_reason"].tolist() == ["tool_error"] and engine.read == []
    assert "cannot be created" in data.non_tensor_batch["detail"][0]
