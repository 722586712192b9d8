import io
import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support import ALONE, loaded, rows_of
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.models import MAX_LENGTH, config_of
from rl_core.errors import InputError
from rl_core.models import log_probs
from rl_core.models.load import (
    PolicyModel,
    ValueModel,
    check_model_folder,
    check_sequence_parallel,
    check_shape,
    empty_causal_lm,
    load_tokenizer,
    same_shape,
    stop_tokens,
)
from rl_core.models.parity import narrow_model
from rl_core.models.tiny import build_tokenizer
from rl_core.models.tokenizer import SPECIAL_TOKENS
from rl_core.training.packing import MicroBatch

END = SPECIAL_TOKENS.index("<|end|>")


def test_a_sound_folder_passes(tiny_model: Path) -> None:
    assert check_model_folder(str(tiny_model)) == tiny_model


@pytest.mark.parametrize(
    ("files", "seen"),
    [
        (None, "no such folder"),
        ({"model.safetensors": ""}, "the folder has none"),
        ({"config.json": "{}", "model.bin": ""}, "the folder has none"),
        ({"config.json": '{"model_type": ', "model.safetensors": ""}, "line 1"),
    ],
    ids=["no folder", "no config", "no safetensors", "broken JSON"],
)
def test_a_folder_that_is_no_checkpoint_is_an_input_error(
    tmp_path: Path, files: dict[str, str] | None, seen: str
) -> None:
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    with pytest.raises(InputError) as raised:
        check_model_folder(str(folder))
    assert seen in raised.value.seen
    assert raised.value.where == f"model.path={folder}"
    assert "model.path=FOLDER" in raised.value.fix


CODE = """
from pathlib import Path
Path("{ran}").touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class Own(PretrainedConfig):
    model_type = "own"
class OwnTokenizer(PreTrainedTokenizerFast): ...
class OwnModel: ...
"""


def code_folder(tiny_model: Path, folder: Path, config: dict[str, object], tokenizer: dict[str, object]) -> Path:
    """A copy of the offline model whose config and tokenizer name classes of the folder; they leave the file `ran`."""
    shutil.copytree(tiny_model, folder)
    (folder / "own.py").write_text(CODE.format(ran=folder / "ran"))
    for name, changes in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))
    return folder


@pytest.mark.parametrize("part", ["config", "model", "tokenizer"])
@pytest.mark.parametrize("answer", ["y\n", ""], ids=["answered with y", "no input"])
def test_code_in_a_model_folder_is_refused_and_nobody_is_asked(
    tiny_model: Path, tmp_path: Path, part: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    parts: dict[str, tuple[dict[str, object], dict[str, object]]] = {
        "config": ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, {}),
        # CLIP is part of transformers, but not as a causal language model.
        "model": ({"model_type": "clip", "auto_map": {"AutoModelForCausalLM": "own.OwnModel"}}, {}),
        "tokenizer": (
            {"model_type": "vit"},
            {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}},
        ),
    }
    folder = code_folder(tiny_model, tmp_path / "model", *parts[part])

    def load() -> None:
        load_tokenizer(check_model_folder(str(folder)))
        empty_causal_lm(folder)

    with pytest.raises(InputError) as raised:
        load()
    assert "auto_map" in raised.value.seen and "never run" in raised.value.seen
    assert str(folder) in raised.value.where
    assert not (folder / "ran").exists()


def test_a_known_architecture_loads_without_the_code_that_the_folder_adds(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    own = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
    folder = code_folder(tiny_model, tmp_path / "model", {"auto_map": own}, {})
    load_tokenizer(check_model_folder(str(folder)))
    assert type(empty_causal_lm(folder)).__name__ == "Qwen3ForCausalLM"
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "ranks", "seen"),
    [
        ({"max_position_embeddings": 40}, 1, None),
        ({"max_position_embeddings": 39}, 1, "max_position_embeddings=39"),
        ({"max_position_embeddings": 20, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 1, None),
        ({"num_attention_heads": 4}, 2, None),
        ({"num_attention_heads": 3}, 2, "num_attention_heads=3"),
    ],
)
def test_a_model_that_cannot_hold_the_sequences_or_be_shared_out_is_an_input_error(
    tiny_model: Path, tmp_path: Path, changes: dict[str, object], ranks: int, seen: str | None
) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40} | changes))
    with nullcontext() if seen is None else pytest.raises(InputError, match=seen):
        check_shape(tmp_path, 40, ranks)


@pytest.mark.parametrize("tokenizer", [None, "{}", "{"], ids=["none", "empty", "broken JSON"])
def test_a_folder_without_a_sound_tokenizer_is_an_input_error(
    tiny_model: Path, tmp_path: Path, tokenizer: str | None
) -> None:
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    if tokenizer is not None:
        (tmp_path / "tokenizer.json").write_text(tokenizer)
    with pytest.raises(InputError) as raised:
        load_tokenizer(tmp_path)
    assert raised.value.where == f"model.path={tmp_path}"


def test_stop_tokens_are_those_of_generation_config_config_and_tokenizer(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    assert stop_tokens(tmp_path) == (END,)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 9}))
    assert stop_tokens(tmp_path) == (END, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert stop_tokens(tmp_path) == (END, 7, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert stop_tokens(tmp_path) == (END, 9)


def test_dropout_is_off_while_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    assert config.resid_pdrop > 0 and config.attn_pdrop > 0
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    policy = loaded(PolicyModel(empty_causal_lm(tmp_path)), tmp_path).train()
    micro = MicroBatch(rows_of([(4, 8), (3, 5)]), ALONE)
    first, second = (policy(micro.packed, micro.target_N, 1.0)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_chunks_of_logits_change_nothing(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = loaded(PolicyModel(empty_causal_lm(tiny_model)), tiny_model)
    micro = MicroBatch(rows_of([(4, 8), (3, 5), (2, 6)]), ALONE)
    whole = policy(micro.packed, micro.target_N, 1.0)
    monkeypatch.setattr(log_probs, "LOGIT_CHUNK", 4)
    chunked = policy(micro.packed, micro.target_N, 1.0)
    for a, b in zip(whole, chunked, strict=True):
        assert len(b) == 19
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_value_is_that_of_the_state_before_the_token(tiny_model: Path) -> None:
    value = loaded(ValueModel(empty_causal_lm(tiny_model)), tiny_model)
    micro = MicroBatch(rows_of([(4, 8), (3, 5)]), ALONE)
    assert value(micro.packed, micro.target_N).tolist() == [0.0] * 13
    torch.nn.init.normal_(value.value_head.weight)
    before = value(micro.packed, micro.target_N)
    micro.packed.input_ids[0, micro.target_N[3]] += 1
    after = value(micro.packed, micro.target_N)
    assert torch.equal(before[:4], after[:4])
    assert (before[4:8] != after[4:8]).all()
    assert torch.equal(before[8:], after[8:])


@pytest.mark.parametrize(
    ("file", "change", "same"),
    [
        ("config.json", {"dtype": "bfloat16", "_name_or_path": "elsewhere"}, True),
        ("model.safetensors", None, True),
        ("config.json", {"intermediate_size": 7}, False),
        ("tokenizer.json", {"added": 1}, False),
        ("chat_template.jinja", None, False),
    ],
)
def test_weights_may_change_places_between_models_of_one_shape(
    tiny_model: Path, tmp_path: Path, file: str, change: dict[str, object] | None, same: bool
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    if change is None:
        (other / file).write_bytes(b"other")
    else:
        (other / file).write_text(json.dumps(json.loads((other / file).read_text()) | change))
    assert same_shape(tiny_model, other) is same


def test_a_quantised_checkpoint_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(InputError) as raised:
        check_model_folder(str(folder))
    assert "mxfp4" in raised.value.seen and raised.value.where == f"model.path={folder}"


@pytest.mark.parametrize(("family", "seen"), [("qwen3", None), ("gpt_oss", "sinks"), ("lfm2", "padded rows")])
def test_ranks_share_the_sequences_of_families_that_can(family: str, seen: str | None, tmp_path: Path) -> None:
    narrow_model(config_of(family), MAX_LENGTH).config.save_pretrained(tmp_path)
    model = empty_causal_lm(tmp_path)
    check_sequence_parallel(model, 1)
    with nullcontext() if seen is None else pytest.raises(InputError, match=f"{family}.*{seen}"):
        check_sequence_parallel(model, 2)
