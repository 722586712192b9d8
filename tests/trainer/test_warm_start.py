import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_core.config.compose import compose
from rl_core.config.schema import RunConfig
from rl_core.data.dataset import RLHFDataset, encode_prompt
from rl_core.data.prepare import prepare_data
from rl_core.data.protocol import DataProto
from rl_core.errors import InputError
from rl_core.models.load import load_tokenizer, stop_tokens
from rl_core.models.tiny import save_tiny_model
from rl_core.rollout.agent.agent_loop import roll_out
from rl_core.rollout.agent.responders import ToolResponders, chat_template
from rl_core.rollout.agent.tool_runner import tool_schemas
from rl_core.rollout.engine.protocol import Completion, Sampling
from rl_core.storage.store import Store
from rl_core.trainer.warm_start import conversation, supervised_batch, warm_start

CALL, RESULT, ANSWER = '[calculator(x="12*34")]', "408", "=408"
TURNS = [
    {"role": "assistant", "content": CALL},
    {"role": "tool", "content": RESULT},
    {"role": "assistant", "content": ANSWER},
]
MASK = [1] * 24 + [0] * 6 + [1] * 5


class Recorded:
    """Plays the turns of the policy."""

    follows, version = False, 0

    def __init__(self, turns: list[list[int]]) -> None:
        self.turns = iter(turns)

    async def generate(self, token_ids: list[int], seed: int, sampling: Sampling) -> Completion:
        turn = next(self.turns)
        return Completion(token_ids, turn, [0.0] * len(turn), [0] * len(turn), "stop")

    def finish_batch(self) -> None:
        pass


@pytest.fixture
def config() -> RunConfig:
    return compose("tools").config


@pytest.fixture
def model(tmp_path: Path, config: RunConfig) -> Path:
    save_tiny_model(tmp_path, config.model.tiny, config.max_length, 0)
    return tmp_path


def batch_of(answers: list[Any], model: Path, config: RunConfig) -> DataProto:
    tokenizer = load_tokenizer(model)
    chat = chat_template(tokenizer, tool_schemas(config.agent), config.agent, stop_tokens(model))
    return supervised_batch([prompt(model)] * len(answers), answers, tokenizer, chat, config)


def prompt(model: Path) -> list[int]:
    return encode_prompt(load_tokenizer(model), [{"role": "user", "content": "12 * 34"}], "here")


def test_what_a_tool_says_is_not_the_policys(model: Path, config: RunConfig) -> None:
    tokenizer = load_tokenizer(model)
    chat = chat_template(tokenizer, tool_schemas(config.agent), config.agent, stop_tokens(model))
    made = conversation(prompt(model), TURNS, tokenizer, chat)
    text = f"{CALL}<|end|><|tool|>{RESULT}<|end|><|assistant|>{ANSWER}<|end|>"
    assert tokenizer.decode(made.response_ids) == text
    assert made.response_mask == MASK


def test_a_text_and_a_conversation_share_a_batch(model: Path, config: RunConfig) -> None:
    batch = batch_of([ANSWER, TURNS], model, config).batch
    width = config.data.max_response_length
    assert batch["response_length"].tolist() == [5, len(MASK)]
    assert batch["response_mask"].tolist() == [[1] * 5 + [0] * (width - 5), MASK + [0] * (width - len(MASK))]


def test_a_reference_conversation_is_what_the_agent_loop_makes_of_its_turns(model: Path, config: RunConfig) -> None:
    made = batch_of([TURNS], model, config).batch
    ids, mask = made["responses"][0], made["response_mask"][0]
    engine = Recorded([ids[:24].tolist(), ids[30:35].tolist()])
    rows = DataProto.from_dict({}, {"prompt_ids": [prompt(model)], "seed": [0]})

    async def run() -> DataProto:
        responders = ToolResponders(config, model)
        await responders.start()
        try:
            sampling = Sampling(1.0, config.data.max_response_length, responders.stop_token_ids)
            return await roll_out(engine, rows, sampling, config.agent, responders)  # type: ignore[arg-type]
        finally:
            await responders.runner.close()

    rolled = asyncio.run(run()).batch
    assert rolled["turns"].tolist() == [2]
    for name in ("prompts", "responses", "response_mask", "response_length"):
        assert rolled[name].tolist() == made[name].tolist(), name
    assert mask.sum() == MASK.count(1)


def test_a_conversation_that_is_too_long_says_what_to_set(model: Path) -> None:
    config = compose("tools", ["data.max_response_length=30"]).config
    with pytest.raises(InputError, match=r"(?s)an answer of 35 tokens: '\[calculator.*data.max_response_length=35"):
        batch_of([TURNS], model, config)


def test_each_row_of_a_mixture_has_the_reference_answer_of_its_source(model: Path, tmp_path: Path) -> None:
    mixture = "[{source: arithmetic, difficulty: 2, weight: 2}, {source: sort_digits, difficulty: 4}]"
    settings = ["data.source=sort_digits", "data.difficulty=5", f"data.mixture={mixture}", "warm_start.steps=3"]
    config = compose("tools", [*settings, "warm_start.batch_size=12", "warm_start.stop_loss=0"]).config
    tokenizer, store, batches = load_tokenizer(model), Store(str(tmp_path / "run")), list[DataProto]()
    prepare_data(config, store, tokenizer)
    actor = SimpleNamespace(
        # The last update is one that was skipped, as its gradient is not finite.
        update_supervised=lambda batch: batches.append(batch) or ({"loss": 1.0} if len(batches) < 3 else {}),  # type: ignore[func-returns-value]
        export=lambda store, folder: [[store.add_bytes(b"{}", folder, "model.json")]],
    )
    rows = RLHFDataset.load(store, "train", tokenizer)
    chat = chat_template(tokenizer, tool_schemas(config.agent), config.agent, stop_tokens(model))
    roles = SimpleNamespace(actor=actor)
    warm_start(config, rows, roles, tokenizer, store, chat, lambda step, loss: None)  # type: ignore[arg-type]
    assert (store.read_manifest("warm_start") or {})["meta"] == {"steps": 3, "loss": None}
    batch = DataProto.concat(batches).batch
    texts = [tokenizer.batch_decode(batch[name], skip_special_tokens=True) for name in ("prompts", "responses")]
    pairs = [["".join(text.split()) for text in pair] for pair in zip(*texts, strict=True)]
    assert sum("*" in prompt for prompt, _ in pairs) == 24 and len(pairs) == 36
    for prompt, answer in pairs:
        wanted = f"={product_of(prompt)}" if "*" in prompt else "".join(sorted(prompt))
        assert answer.endswith(wanted) and (answer[0] in "=[") == ("*" in prompt)


def product_of(text: str) -> int:
    first, second = text.split("*")
    return int(first) * int(second)
