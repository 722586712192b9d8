"""Model families: exact in packed or padded rows, with their heads, or refused before a run."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import CPU, policy_engine
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from benchmarks.models import MAX_LENGTH, WORKING, config_of, examine
from rl_core.errors import InputError
from rl_core.models import load, parity
from rl_core.models.attention import Layout
from rl_core.models.conversion import Conversion
from rl_core.models.load import PolicyModel, empty_causal_lm
from rl_core.models.log_probs import ChunkedLogProbs, LogitTransform
from rl_core.models.parity import WINDOW, check_parity, narrow_model
from rl_core.models.weights import WeightFiles, check_weights, load_weights
from rl_core.storage.store import Store
from rl_core.training.mesh import RankMesh
from rl_core.training.sharded_checkpoint import export_model

EXACT = [
    *("qwen2", "gemma2", "gemma3_text", "granite", "cohere", "phi", "nemotron"),  # soft-caps, windows, scales, biases
    *("qwen3_moe", "mixtral", "olmoe", "glm4_moe", "gpt_oss"),  # experts, sinks
    *("qwen3_5_text", "lfm2"),  # recurrences, convolutions
]


@pytest.mark.parametrize("family", EXACT)
def test_a_family_computes_and_stores_what_transformers_does(family: str) -> None:
    row = examine(family)
    assert (row.verdict, row.round_trip) == ("exact", WORKING)


def saved(folder: Path, family: str) -> Path:
    """The config of a narrow model of the family, as a checkpoint's folder."""
    narrow_model(config_of(family), MAX_LENGTH).config.save_pretrained(folder)
    return folder


def _no_transform(_: object) -> LogitTransform:
    return LogitTransform()


def _wider(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda layout, window: right(layout, window and window + 1)


Plant = Callable[[pytest.MonkeyPatch], None]
PLANTED: dict[str, tuple[str, Plant]] = {
    "state leaks": ("lfm2", lambda patch: patch.setattr(load, "takes_packed_rows", lambda _: True)),
    "no soft-cap of logits": (
        "gemma2",
        lambda patch: patch.setattr(load, "logit_transform", lambda _: LogitTransform()),
    ),
    "no scale of logits": ("granite", lambda patch: patch.setattr(load, "logit_transform", lambda _: LogitTransform())),
    "a window of one more": (
        "mistral",
        lambda patch: patch.setattr(Layout, "visible", _wider(Layout.visible)),
    ),
    "a gradient that is not a number": (
        "qwen3",
        lambda patch: patch.setattr(LogitTransform, "gradient", lambda _, __, of: of * torch.nan),
    ),
    "a wrong gradient": ("qwen3", lambda patch: patch.setattr(LogitTransform, "gradient", lambda _, __, of: of * 1.01)),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_family_that_would_train_wrongly_is_refused_by_name(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, plant = PLANTED[fault]
    folder = saved(tmp_path / "model", family)
    plant(monkeypatch)
    with pytest.raises(InputError) as raised:
        check_parity(str(folder), MAX_LENGTH, tmp_path / "parity")
    assert family in raised.value.expected and str(folder) in raised.value.where
    assert not (tmp_path / "parity").exists()


def test_an_exact_config_is_computed_once_and_a_changed_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, computed = saved(tmp_path / "model", "qwen3"), list[int]()
    right = parity.parity

    def counted(config: PreTrainedConfig, max_length: int) -> parity.Parity:
        computed.append(max_length)
        return right(config, max_length)

    monkeypatch.setattr(parity, "parity", counted)
    for _ in range(2):
        check_parity(str(folder), 64, tmp_path / "parity")
    assert len(computed) == 1
    config = AutoConfig.from_pretrained(folder)
    config.rms_norm_eps = 1e-3
    config.save_pretrained(folder)
    check_parity(str(folder), 64, tmp_path / "parity")
    assert len(computed) == 2


def test_a_window_is_as_long_as_in_the_run() -> None:
    config = config_of("mistral")
    assert narrow_model(config, config.sliding_window + 1).config.sliding_window == WINDOW
    assert narrow_model(config, config.sliding_window).config.sliding_window == config.sliding_window


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.3), LogitTransform(2.0, 1.5)])
def test_the_head_of_a_family_in_chunks(transform: LogitTransform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_core.models.log_probs.LOGIT_CHUNK", 3)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(*shape, generator=generator) for shape in ((8, 5), (11, 5), (11,))]
    label_N = torch.randint(0, 11, (8,), generator=generator)
    own, wanted = ([each.clone().requires_grad_() for each in parts] for _ in range(2))
    hidden_ND, weight_VD, bias_V = own
    log_prob_N, entropy_N, square_N = ChunkedLogProbs(False)(hidden_ND, weight_VD, label_N, 0.7, bias_V, transform)
    hidden_ND, weight_VD, bias_V = wanted
    logits_NV = (hidden_ND @ weight_VD.T + bias_V) * transform.scale
    if transform.cap:
        logits_NV = torch.tanh(logits_NV / transform.cap) * transform.cap
    plain = torch.distributions.Categorical(logits=logits_NV / 0.7)
    torch.testing.assert_close(log_prob_N, plain.log_prob(label_N))
    torch.testing.assert_close(entropy_N, plain.entropy())
    torch.testing.assert_close(square_N, plain.probs.square().sum(-1))
    weight_N = torch.arange(8.0)
    (weight_N @ log_prob_N - entropy_N.sum()).backward()
    (weight_N @ plain.log_prob(label_N) - plain.entropy().sum()).backward()
    for a, b in zip(own, wanted, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_shard_of_experts_reads_its_own_experts_only(tmp_path: Path) -> None:
    narrow_model(config_of("qwen3_moe"), MAX_LENGTH).save_pretrained(tmp_path)
    policy = PolicyModel(empty_causal_lm(tmp_path))
    load_weights(policy, policy.hf, tmp_path, CPU)
    files, read = WeightFiles(tmp_path), set()

    def recorded(name: str, rows: slice) -> Tensor:
        read.add(name)
        return files.read(name, rows)

    name = "model.layers.0.mlp.experts.gate_up_proj"
    part = Conversion(policy.hf, files.file_of).read(name, slice(3, 5), recorded)
    assert torch.equal(part, policy.hf.get_parameter(name)[3:5])
    experts = {f"model.layers.0.mlp.experts.{i}.{half}_proj.weight" for i in (3, 4) for half in ("gate", "up")}
    assert read == experts


def test_routing_biases_keep_their_dtype_in_pushes_and_exports(tmp_path: Path, rank_mesh: RankMesh) -> None:
    source = narrow_model(config_of("glm4_moe"), MAX_LENGTH)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias_E = torch.linspace(0.1, 0.7, source.get_buffer(name).numel())
    source.get_buffer(name).copy_(bias_E)
    source.save_pretrained(tmp_path / "model")
    engine = policy_engine(tmp_path / "model", rank_mesh)
    pushed = dict(engine.in_dtype(engine.full_parameters(), torch.bfloat16))
    assert torch.equal(pushed[name], bias_E)
    assert pushed["model.norm.weight"].dtype == torch.bfloat16
    store = Store(str(tmp_path / "store"))
    export_model(engine, "bfloat16", tmp_path / "model", store, "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "store" / "export", dtype="auto")
    stored = WeightFiles(tmp_path / "store" / "export")
    assert torch.equal(stored.read(name, slice(None)), bias_E)
    names = {each for each, _ in source.named_parameters()}
    for each in names:
        assert torch.equal(exported.get_parameter(each), source.get_parameter(each).bfloat16()), each


def test_experts_that_are_missing_or_of_another_shape_are_refused(tmp_path: Path) -> None:
    narrow_model(config_of("qwen3_moe"), MAX_LENGTH).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights, model = load_file(file), empty_causal_lm(tmp_path)
    gate = "model.layers.0.mlp.experts.{}.gate_proj.weight"
    count = sum(name.startswith("model.layers.0.") and "gate_proj" in name for name in weights)
    names = [gate.format(i) for i in range(count)]
    without_last = {name: each for name, each in weights.items() if name != names[-1]}
    without_gates = {name: each for name, each in weights.items() if name not in names}
    other_shape = {**weights, names[1]: weights[names[1]][:1].clone()}
    seen = {f"{count - 1} tensors": without_last, "0 tensors": without_gates, "of the shapes": other_shape}
    for problem, changed in seen.items():
        save_file(changed, file)
        with pytest.raises(InputError) as raised:
            check_weights(model, tmp_path)
        assert problem in raised.value.seen and "model.layers.0.mlp.experts.gate_up_proj" in raised.value.where
