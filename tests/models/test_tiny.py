from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from rl_core.config.schema import DataConfig, TinyModelConfig
from rl_core.data.sources import sort_digits
from rl_core.models.load import load_tokenizer
from rl_core.models.tiny import build_tokenizer, save_tiny_model, tiny_config
from rl_core.models.tokenizer import CHARACTERS

SHAPE = TinyModelConfig(hidden_size=64, layers=1, heads=2)


def test_the_chat_template_marks_every_turn(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    talk = [{"role": "system", "content": "sort"}, {"role": "user", "content": "3 1"}]
    answered = [*talk, {"role": "assistant", "content": "1 3"}]

    def text(messages: list[dict[str, str]], **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))

    assert text(answered) == "<|system|>sort<|end|><|user|>3 1<|end|><|assistant|>1 3<|end|>"
    assert text(talk, add_generation_prompt=True) == "<|system|>sort<|end|><|user|>3 1<|end|><|assistant|>"
    # A conversation only grows at its end, also in tokens.
    start = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    assert tokenizer.apply_chat_template(answered, return_dict=False)[: len(start)] == start
    assert len(start) == 1 + 4 + 1 + 1 + 2 + 1 + 1


def test_every_prompt_and_answer_of_the_demo_round_trips() -> None:
    tokenizer = build_tokenizer()
    train, held_out = sort_digits.rows(DataConfig(difficulty=5, train_rows=200, val_rows=100), seed=0)
    for row in train + held_out:
        for line in (row["prompt"][0]["content"], sort_digits.reference_response(row)):
            ids = tokenizer.encode(line)
            assert tokenizer.unk_token_id not in ids and len(ids) == 5
            assert tokenizer.decode(ids, skip_special_tokens=True) == line.replace(" ", "")


def test_every_character_is_a_token_of_its_own_and_others_are_unknown() -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.encode(CHARACTERS)
    assert len(set(ids)) == len(CHARACTERS) and tokenizer.unk_token_id not in ids
    assert tokenizer.encode("ü") == [tokenizer.unk_token_id]


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        torch.manual_seed(hash(name) % 1000)
        save_tiny_model(tmp_path / name, SHAPE, 64, seed)
    torch.set_rng_state(state)
    a, b, c = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("a", "b", "c"))
    assert a == b
    assert a["model.safetensors"] != c["model.safetensors"]


def test_its_files_are_those_of_transformers(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Qwen3ForCausalLM(Qwen3Config(**tiny_config(SHAPE, 64)))
    model.save_pretrained(tmp_path / "theirs")
    save_tiny_model(tmp_path / "ours", SHAPE, 64, 3)
    for file in (tmp_path / "theirs").iterdir():
        assert file.read_bytes() == (tmp_path / "ours" / file.name).read_bytes(), file.name
    assert type(AutoTokenizer.from_pretrained(tmp_path / "ours")) is type(load_tokenizer(tmp_path / "ours"))


def test_making_a_model_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    save_tiny_model(tmp_path, SHAPE, 64, seed=3)
    assert torch.equal(state, torch.get_rng_state())


def test_it_is_an_ordinary_folder(tiny_model: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), load_tokenizer(tiny_model)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.config.max_position_embeddings == 64
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
