from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import CPU, save_grouped_model, save_sharp_model
from torch import nn
from transformers import AutoModelForCausalLM

from rl_core.errors import InputError
from rl_core.models.load import ValueModel, empty_causal_lm
from rl_core.models.weights import WeightFiles, check_weights, load_weights


@pytest.fixture(params=["tied qwen3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (save_sharp_model if request.param == "tied qwen3" else save_grouped_model)(tmp_path)
    return tmp_path


def test_a_model_is_built_without_memory_and_gets_the_checkpoints_values(folder: Path) -> None:
    model = empty_causal_lm(folder)
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}
    load_weights(model, model, folder, CPU)
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen, expected = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (model, wanted))
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[name], expected[name]) for name in seen)
    tied = wanted.lm_head.weight is wanted.model.embed_tokens.weight
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.generation_config.to_dict() == wanted.generation_config.to_dict()


def test_weights_in_several_files_and_of_half_precision(folder: Path) -> None:
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    (folder / "model.safetensors").unlink()
    wanted.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = empty_causal_lm(folder)
    load_weights(model, model, folder, CPU)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, wanted.get_parameter(name).float()), name


def test_only_the_rows_that_are_asked_for_are_read(folder: Path) -> None:
    name = "model.embed_tokens.weight"
    whole = load_file(folder / "model.safetensors")[name]
    assert torch.equal(WeightFiles(folder).read(name, slice(10, 13)), whole[10:13])


def test_a_value_model_takes_the_body_and_a_head_of_zeros(folder: Path) -> None:
    value = ValueModel(empty_causal_lm(folder))
    load_weights(value, value.hf, folder, CPU)
    assert not value.value_head.weight.any()
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).base_model
    assert all(torch.equal(value.hf.get_parameter(name), each) for name, each in wanted.named_parameters())


def test_a_folder_without_some_weights_is_an_error_that_names_them(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    removed = "model.layers.0.mlp.up_proj.weight"
    weights.pop(removed)
    save_file(weights, folder / "model.safetensors")
    model = empty_causal_lm(folder)
    with pytest.raises(InputError, match=f"no weights for 1 of them, such as {removed}"):
        load_weights(model, model, folder, CPU)
    assert isinstance(model, nn.Module) and next(model.parameters()).device.type == "meta"


@pytest.mark.parametrize("rows", [40, 90])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"])
def test_a_tensor_of_another_shape_is_an_error_that_names_file_and_tensor(folder: Path, name: str, rows: int) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[name] = torch.zeros(rows, weights[name].shape[1])
    save_file(weights, folder / "model.safetensors")
    model = empty_causal_lm(folder)
    for check in (lambda: check_weights(model, folder), lambda: load_weights(model, model, folder, CPU)):
        with pytest.raises(InputError) as raised:
            check()
        assert raised.value.where == f"{folder / 'model.safetensors'}, tensor {name}"
        assert f"[{rows}, " in raised.value.seen and "vocab_size" in raised.value.fix


def test_values_without_their_scales_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(InputError, match=rf"F8_E4M3 of shape .*\n *where: .*tensor {name}"):
        check_weights(empty_causal_lm(folder), folder)
