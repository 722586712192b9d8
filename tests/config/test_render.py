import json
import struct
from pathlib import Path

import pytest

from rl_core.config.compose import compose
from rl_core.config.render import derived, parameter_count, render
from rl_core.config.schema import RunConfig, TinyModelConfig


def safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    header |= {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_the_table_shows_each_value_with_its_layer_and_marks_what_was_set() -> None:
    lines = render(compose("demo", ["trainer.seed=3"])).splitlines()
    rows = {
        line.split()[-4 if line.split()[-2] == "recipe" else -3]: line
        for line in lines
        if "trainer." in line or "actor." in line
    }
    assert rows["trainer.seed"].startswith("*") and rows["trainer.seed"].split()[-2:] == ["3", "override"]
    assert rows["actor.clip_ratio"].startswith("*") and rows["actor.clip_ratio"].endswith("recipe demo")
    assert rows["trainer.nodes"].startswith(" ") and rows["trainer.nodes"].endswith("default")
    assert (
        len(
            {
                line.index(word)
                for line, word in ((rows["trainer.seed"], "override"), (rows["trainer.nodes"], "default"))
            }
        )
        == 1
    )
    assert any("responses per step" in line and "512" in line for line in lines)


def test_a_long_value_does_not_move_the_others() -> None:
    paths = ", ".join(f"{{source: gsm8k, path: /data/{i}}}" for i in range(9))
    lines = render(compose("grpo", [f"data.mixture=[{paths}]"])).splitlines()
    assert sum('[{"source": "gsm8k", "path": "/data/0"' in line for line in lines) == 1
    assert max(len(line) for line in lines if "data.mixture" not in line and "judge.prompt" not in line) < 130


def test_sizes_follow_from_the_config() -> None:
    overrides = [
        "actor.mini_batch_size=16", "actor.ppo_epochs=2", "actor.kl_loss_coef=0", "trainer.ranks_per_node=2",
        "data.max_prompt_length=100", "data.max_response_length=28", "actor.max_tokens_per_micro_batch=1000",
        "trainer.steps=10",
    ]  # fmt: skip
    sizes = derived(compose("demo", overrides).config, parameters=1 << 20, train_rows=320)
    assert sizes["prompts per step"] == "64" and sizes["responses per step"] == "512"
    assert sizes["responses per rank per step"] == "256 (2 ranks)"
    assert sizes["mini-batches per step"] == "4"
    assert sizes["optimizer steps per step"] == "8" and sizes["optimizer steps in the run"] == "80"
    assert sizes["max tokens per step"] == "65,536" and sizes["max tokens per rank and micro-batch"] == "1,000"
    assert sizes["max micro-batches per mini-batch"] == "10", "64 responses a rank, 7 of 128 tokens fit in 1,000"
    assert sizes["steps per epoch"] == "5.0" and sizes["epochs in the run"] == "2.00"
    assert sizes["weights, gradients, Adam per rank"].startswith("8 MiB") and sizes["one checkpoint"].startswith(
        "12 MiB"
    )
    assert sizes["rollout engine weights"].startswith("4 MiB") and "reference model per rank" not in sizes


def test_a_critic_and_a_reference_count() -> None:
    sizes = derived(compose("ppo", ["model.dtype=bfloat16"]).config, parameters=1 << 30)
    assert sizes["weights, gradients, Adam per rank"].startswith("32.0 GiB")
    assert sizes["reference model per rank"].startswith("2.0 GiB") and sizes["one checkpoint"].startswith("24.0 GiB")


def test_nothing_is_said_of_what_is_not_known(tmp_path: Path) -> None:
    sizes = derived(RunConfig())
    assert not {"steps per epoch", "model parameters", "one checkpoint"} & set(sizes)
    assert "model parameters" not in render(compose("gsm8k", [f"model.path={tmp_path / 'nowhere'}"]))


def test_parameters_are_read_from_the_headers_of_a_checkpoint(tmp_path: Path) -> None:
    config = compose("gsm8k", [f"model.path={tmp_path}"]).config
    assert parameter_count(config) is None
    safetensors(tmp_path / "a.safetensors", {"w": [3, 4], "b": [4], "scale": []})
    assert parameter_count(config) == 17
    safetensors(tmp_path / "b.safetensors", {"w": [100]})
    assert parameter_count(config) == 117
    index = {"weight_map": {"w": "a.safetensors", "b": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert parameter_count(config) == 17, "a copy that the index does not name does not count"


@pytest.mark.parametrize("data", [b"", b"abc", struct.pack("<Q", 1 << 60), struct.pack("<Q", 2) + b"[]", b"\xff" * 64])
def test_a_damaged_checkpoint_only_leaves_the_estimate_out(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(data)
    assert parameter_count(compose("gsm8k", [f"model.path={tmp_path}"]).config) is None


@pytest.mark.parametrize("shape", [(64, 2, 1), (128, 3, 2)])
def test_the_tiny_model_is_counted_as_transformers_builds_it(shape: tuple[int, int, int]) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    hidden, layers, heads = shape
    qwen = transformers.Qwen3Config(
        vocab_size=32, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=64, intermediate_size=4 * hidden, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(qwen)
    config = RunConfig.model_validate(
        {"model": {"tiny": TinyModelConfig(hidden_size=hidden, layers=layers, heads=heads)}}
    )
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())
