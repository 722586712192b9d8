"""A reward model's scores are those of plain transformers, whatever it is batched with."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support import save_reward_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rl_core.errors import InputError
from rl_core.rewards.model import RewardModel, batches, check_reward_model

PROMPTS = [[{"role": "user", "content": f"sort {n} 1 0"}] for n in range(5)]
PROMPTS.append([{"role": "system", "content": "be brief"}, {"role": "user", "content": "sort 3 2"}])
RESPONSES = ["0 1 2", "", "7" * 9, "0 1 3", "what?", "2 3"]


@pytest.fixture(scope="module", params=["template", "no template", "no padding token"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    save_reward_model(folder, template=request.param != "no template", pad=request.param != "no padding token")
    return folder


def plain_scores(folder: Path) -> torch.Tensor:
    """Each conversation alone through transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for messages, response in zip(PROMPTS, RESPONSES, strict=True):
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(
                [*messages, {"role": "assistant", "content": response}], tokenize=False
            )
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        else:
            ids = tokenizer("".join(m["content"] for m in messages) + response, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores.append(model(ids).logits[0, 0])
    return torch.stack(scores)


@pytest.mark.parametrize("max_tokens", [1, 60, 10_000], ids=["one by one", "some", "all at once"])
def test_scores_are_those_of_plain_transformers(folder: Path, max_tokens: int) -> None:
    check_reward_model(str(folder))
    model = RewardModel(str(folder), torch.float32, max_tokens)
    conversations = [model.encode(*pair) for pair in zip(PROMPTS, RESPONSES, strict=True)]
    scores = model.score(conversations)
    torch.testing.assert_close(scores, plain_scores(folder), rtol=0, atol=1e-5)
    assert scores.std() > 0.05 and not scores.requires_grad
    assert torch.equal(model.score(conversations), scores), "scores of the same texts differ"
    torch.testing.assert_close(model.score(conversations[::-1]), scores.flip(0), rtol=0, atol=1e-5)


def test_its_own_tokenizer_reads_the_texts(folder: Path, tiny_model: Path) -> None:
    model = RewardModel(str(folder), torch.float32, 100)
    theirs = AutoTokenizer.from_pretrained(tiny_model)
    assert len(model.encode([], "sort")) < len(model.encode([], "trso")), "'sort' is one token of its vocabulary"
    assert len(theirs("sort")["input_ids"]) == 4


def test_a_conversation_that_is_too_long_has_no_score(folder: Path) -> None:
    model = RewardModel(str(folder), torch.float32, 1000)
    scores = model.score([[9] * 48, [9] * 49, [9]])
    assert torch.isfinite(scores).tolist() == [True, False, True]


def test_messages_that_the_template_refuses_are_an_input_error(tmp_path: Path) -> None:
    save_reward_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system message, please') }}")
    model = RewardModel(str(tmp_path), torch.float32, 100)
    with pytest.raises(InputError, match="no system message, please") as raised:
        model.encode(PROMPTS[-1], "0")
    assert "['system', 'user', 'assistant']" in raised.value.where


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_batches_hold_the_budget_with_their_padding(lengths: list[int], max_tokens: int) -> None:
    made = batches(lengths, max_tokens)
    assert sorted(row for batch in made for row in batch) == list(range(len(lengths)))
    for batch in made:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= max_tokens
    if max_tokens >= sum(lengths) + 50 * len(lengths):
        assert len(made) <= 1


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_cannot_judge_is_refused_before_anything_starts(tmp_path: Path, tiny_model: Path) -> None:
    def refused(path: Path) -> InputError:
        with pytest.raises(InputError) as raised:
            check_reward_model(str(path))
        assert raised.value.where == f"reward.model.path={path}"
        return raised.value

    assert refused(tmp_path / "nowhere").seen == "no such folder"
    assert refused(tiny_model).seen == "architectures ['Qwen3ForCausalLM']"
    two, bare, odd = (tmp_path / name for name in ("two", "bare", "odd"))
    for folder in (two, bare, odd):
        save_reward_model(folder)
    edit_config(two, id2label={"0": "bad", "1": "good"}, label2id={"bad": 0, "good": 1})
    assert refused(two).seen == "2 labels"
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in refused(bare).expected and "reward.model.path=FOLDER" in refused(bare).fix
    edit_config(odd, model_type="unheard_of")
    assert "architecture" in refused(odd).expected


def test_a_checkpoint_without_its_head_is_refused(tmp_path: Path) -> None:
    save_reward_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"no score\.weight"):
        RewardModel(str(tmp_path), torch.float32, 100)


def test_an_ordinary_language_model_would_have_been_loaded_with_random_scores(tiny_model: Path) -> None:
    """Why the head is looked for: transformers itself only warns."""
    AutoModelForCausalLM.from_pretrained(tiny_model)
    with pytest.raises(InputError, match=r"no score\.weight"):
        RewardModel(str(tiny_model), torch.float32, 100)


def test_weights_of_another_shape_are_an_input_error(tmp_path: Path) -> None:
    save_reward_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 2 * config["intermediate_size"]}))
    with pytest.raises(InputError, match="shapes in config.json") as raised:
        RewardModel(str(tmp_path), torch.float32, 100)
    assert raised.value.where == f"reward.model.path={tmp_path}" and "_proj.weight of shape [" in raised.value.seen
