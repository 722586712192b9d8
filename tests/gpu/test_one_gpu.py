"""The training engine on one GPU: values, neighbours, memory, offload and compiling."""

from pathlib import Path

import pytest
import torch
from support import LENGTHS, off_policy, policy_engine, rows_of, save_grouped_model, save_sharp_model, update_alone
from torch import Tensor

from benchmarks.models import MAX_LENGTH, config_of
from rl_core.config.schema import FSDPConfig, LoraConfig, OptimConfig
from rl_core.data.protocol import DataProto
from rl_core.models.attention import Layout, packed_attention
from rl_core.models.log_probs import LOGIT_CHUNK, ChunkedLogProbs
from rl_core.models.parity import parity
from rl_core.training.engine import TrainEngine
from rl_core.training.mesh import RankMesh

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
OPTIM = OptimConfig(lr=1e-3, grad_clip=0.5)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (save_sharp_model if request.param == "qwen3" else save_grouped_model)(folder)
    return folder


def engine_of(
    model: Path,
    rank_mesh: RankMesh,
    config: FSDPConfig | None = None,
    dtype: str = "float32",
    lora: LoraConfig | None = None,
) -> TrainEngine:
    return policy_engine(model, rank_mesh, OPTIM, config=config, dtype=dtype, lora=lora)


def weights(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in engine.full_parameters()}


def test_bfloat16_log_probs_are_near_those_of_float32(model: Path, gpu: RankMesh) -> None:
    """bfloat16 takes the varlen kernel over the packed row, float32 the padded view."""
    rows = rows_of(LENGTHS)
    exact, rounded = (engine_of(model, gpu, dtype=dtype).compute(rows, 0.7)[0] for dtype in ("float32", "bfloat16"))
    difference = (exact - rounded).abs()
    assert 0 < difference.mean() < 0.03 and difference.max() < 0.3


def test_a_neighbour_moves_nothing(model: Path, gpu: RankMesh) -> None:
    engine = engine_of(model, gpu, dtype="bfloat16")
    rows = rows_of(LENGTHS)
    changed = rows[:]
    changed.batch["responses"] = rows.batch["responses"].clone()
    changed.batch["responses"][1] = (changed.batch["responses"][1] + 7) % 64
    before, after = (engine.compute(each, 1.0)[0] for each in (rows, changed))
    others = [0, *range(2, len(rows))]
    assert torch.equal(before[others], after[others]) and not torch.equal(before[1], after[1])


@pytest.mark.parametrize(
    "config",
    [
        FSDPConfig(compile=True),
        FSDPConfig(activation_checkpointing=True),
        FSDPConfig(compile=True, activation_checkpointing=True),
        FSDPConfig(offload="idle"),
        FSDPConfig(offload="always"),
    ],
    ids=["compile", "checkpointing", "compile+checkpointing", "idle", "always"],
)
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
def test_no_setting_changes_what_is_learned(
    model: Path, gpu: RankMesh, config: FSDPConfig, lora: LoraConfig | None
) -> None:
    outcomes = []
    for each in (FSDPConfig(), config):
        engine = engine_of(model, gpu, each, lora=lora)
        rows = off_policy(engine, rows_of(LENGTHS))
        metrics = []
        for _ in range(2):
            metrics.append(update_alone(engine, rows))
            engine.offload()
        outcomes.append((metrics, weights(engine)))
    (wanted_metrics, wanted), (seen_metrics, seen) = outcomes
    for one, other in zip(seen_metrics, wanted_metrics, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    for name in wanted:
        torch.testing.assert_close(seen[name], wanted[name], rtol=1e-3, atol=2e-4, msg=name)


def test_what_is_offloaded_leaves_the_device(model: Path, gpu: RankMesh) -> None:
    engine = engine_of(model, gpu, FSDPConfig(offload="idle"))
    rows = off_policy(engine, rows_of(LENGTHS))
    update_alone(engine, rows)
    held = torch.cuda.memory_allocated()
    engine.offload()
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    assert held - torch.cuda.memory_allocated() >= 3 * 4 * parameters  # weights and two moments in float32
    assert {p.device.type for p in engine.module.parameters()} == {"cpu"}
    update_alone(engine, rows)
    assert {p.device.type for p in engine.module.parameters()} == {"cuda"}
    always = engine_of(model, gpu, FSDPConfig(offload="always"))
    update_alone(always, rows)
    assert {p.device.type for p in always.module.parameters()} == {"cpu"}
    reference = policy_engine(model, gpu, config=FSDPConfig(reference_offload=True))
    assert {p.device.type for p in reference.module.parameters()} == {"cpu"}
    torch.testing.assert_close(reference.compute(rows, 1.0)[0], engine_of(model, gpu).compute(rows, 1.0)[0])


def test_a_gradient_that_is_not_finite_is_left_out(model: Path, gpu: RankMesh) -> None:
    engine = engine_of(model, gpu)
    rows = off_policy(engine, rows_of(LENGTHS))
    update_alone(engine, rows)
    before = weights(engine)
    poisoned = rows.union(DataProto({}))
    poisoned.batch["advantages"] = rows.batch["advantages"].clone()
    poisoned.batch["advantages"][2, 1] = float("nan")
    assert update_alone(engine, poisoned) == {"skipped_updates": 1.0} and engine.updates == 1
    after = weights(engine)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("compiled", [False, True])
def test_logits_of_all_tokens_never_exist(compiled: bool) -> None:
    tokens, width, vocabulary = 16 * LOGIT_CHUNK, 64, 100_000
    hidden_ND = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_VD = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    label_N = torch.randint(0, vocabulary, (tokens,), device="cuda")
    log_probs = ChunkedLogProbs(compiled)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    log_prob_N, entropy_N, _ = log_probs(hidden_ND, weight_VD, label_N, 1.0)
    (log_prob_N.sum() + entropy_N.sum()).backward()
    peak = torch.cuda.max_memory_allocated() - before
    # A chunk's logits in bfloat16 and what is computed of them; eager passes keep some of these in float32.
    assert peak < (2 if compiled else 8) * LOGIT_CHUNK * vocabulary * 4 < tokens * vocabulary * 4 / 2 + 1


def test_memory_does_not_grow_over_steps(model: Path, gpu: RankMesh) -> None:
    engine = engine_of(model, gpu, dtype="bfloat16")
    rows = off_policy(engine, rows_of(LENGTHS))
    allocated, reserved = [], []
    for _ in range(20):
        update_alone(engine, rows)
        engine.compute(rows, 1.0)
        allocated.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
    for held in (allocated, reserved):  # it may shrink
        assert max(held[10:]) <= max(held[3:10])


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gemma3_text", "gpt_oss", "lfm2", "qwen3_5_text", "qwen3_moe"])
def test_a_family_is_exact_on_the_device(family: str) -> None:
    assert parity(config_of(family), MAX_LENGTH, torch.device("cuda")).is_exact


@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_windows_of_the_packed_kernel(window: int | None) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (torch.randn(1, 4, 50, 64, device="cuda", generator=generator) for _ in range(3))
    layout = Layout([37, 13], torch.device("cuda"))
    module = torch.nn.Identity()
    exact = packed_attention(module, query, key, value, None, 0.125, layout, window)[0]
    query, key, value = (x.bfloat16() for x in (query, key, value))
    rounded = packed_attention(module, query, key, value, None, 0.125, layout, window)[0]
    torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=3e-2)
