"""The actor's role on one rank, without a rollout engine: what it computes and what it trains on are one policy."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import LENGTHS, plain_log_probs, policy_engine, rows_of, weights_of
from torch import Tensor

from rl_core.cluster.base_worker import sampling_of
from rl_core.cluster.dispatch import Dispatch
from rl_core.cluster.reward_model import RewardModelWorker
from rl_core.cluster.training_workers import ActorRolloutRefWorker, TrainingWorker
from rl_core.config.schema import OptimConfig, RunConfig
from rl_core.data.protocol import DataProto
from rl_core.storage import run_files
from rl_core.storage.store import Store
from rl_core.training.losses import LOG_PROB_COLUMNS
from rl_core.training.mesh import RankMesh

TEMPERATURE = 0.7
PROTO, METRIC, UPDATE = Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_METRIC, Dispatch.DP_UPDATE
OPTIM = OptimConfig(lr=1e-3, grad_clip=1e9)


def actor(path: Path, rank_mesh: RankMesh, **sections: dict[str, object]) -> ActorRolloutRefWorker:
    """A worker that has joined the process group and loaded the model."""
    config = RunConfig.model_validate(
        {"rollout": {"temperature": TEMPERATURE, "n": 2}, "data": {"train_batch_size": 4}, **sections}
    )
    worker = ActorRolloutRefWorker(config)
    worker.rank_mesh, worker.device, worker.temperature = rank_mesh, rank_mesh.device, config.rollout.temperature
    lora = config.model.lora
    worker.actor = policy_engine(path, rank_mesh, OPTIM, lora=lora if lora.rank else None)
    if not lora.rank:
        worker.reference = policy_engine(path, rank_mesh)
    return worker


def on_policy(worker: ActorRolloutRefWorker, lengths: list[tuple[int, int]] = LENGTHS) -> DataProto:
    rows = rows_of(lengths)
    return rows.union(worker.compute_log_prob(rows)).union(worker.compute_ref_log_prob(rows))


@pytest.mark.parametrize(
    ("rollout", "log_probs"),
    [({}, True), ({"log_probs": False}, False), ({"top_p": 0.9}, False), ({"top_k": 5}, False)],
)
def test_log_probs_that_would_compare_with_nothing_are_not_asked_for(rollout: dict[str, Any], log_probs: bool) -> None:
    config = RunConfig.model_validate({"rollout": rollout})
    sampling = sampling_of(config, 0.5, (2,))
    assert sampling.log_probs is log_probs
    assert (sampling.top_p, sampling.top_k) == (rollout.get("top_p", 1.0), rollout.get("top_k", 0))


def test_log_probs_are_those_of_the_sampling_temperature(tiny_model: Path, rank_mesh: RankMesh) -> None:
    rows = on_policy(actor(tiny_model, rank_mesh))
    for i, (p, r) in enumerate(LENGTHS[:3]):
        ids = rows.batch["prompts"][i, :p].tolist(), rows.batch["responses"][i, :r].tolist()
        wanted = plain_log_probs(tiny_model, *ids, TEMPERATURE)
        torch.testing.assert_close(rows.batch["old_log_probs"][i, :r], wanted, rtol=0, atol=5e-6)
    torch.testing.assert_close(rows.batch["ref_log_prob"], rows.batch["old_log_probs"], rtol=0, atol=1e-6)


def test_with_adapters_the_reference_is_the_actors_base(tiny_model: Path, rank_mesh: RankMesh) -> None:
    worker = actor(tiny_model, rank_mesh, model={"lora": {"rank": 4}}, actor={"kl_loss_coef": 0.1})
    rows = on_policy(worker)
    assert torch.equal(rows.batch["ref_log_prob"], rows.batch["old_log_probs"])
    _, metrics = worker.update_actor(rows)
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["kl_loss"] == pytest.approx(0, abs=1e-6)
    assert torch.equal(worker.compute_ref_log_prob(rows).batch["ref_log_prob"], rows.batch["ref_log_prob"])
    assert worker.update_actor(rows)[1]["kl_loss"] > 1e-6


def test_the_sum_of_squared_probabilities_is_that_of_the_distribution(tiny_model: Path, rank_mesh: RankMesh) -> None:
    batch = on_policy(actor(tiny_model, rank_mesh)).batch
    on = torch.arange(batch["responses"].shape[1]) < batch["response_length"][:, None]
    # Between that of a uniform distribution and 1, and never below the square of the token's own probability.
    assert (batch["sum_pi_squared"][on] >= 1 / 64).all() and (batch["sum_pi_squared"][on] <= 1).all()
    assert (batch["sum_pi_squared"][on] >= (2 * batch["old_log_probs"][on]).exp() - 1e-6).all()
    assert not batch["sum_pi_squared"][~on].any()


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "kl_cov", "clip_cov", "dppo_tv"])
def test_the_first_update_is_on_policy(tiny_model: Path, rank_mesh: RankMesh, loss: str) -> None:
    """Training computes the very log-probs that advantages came with: nothing is clipped, and the KL is 0."""
    worker = actor(tiny_model, rank_mesh, actor={"policy_loss": loss, "kl_loss_coef": 0.1, "cov_ratio": 0.1})
    columns, metrics = worker.update_actor(on_policy(worker))
    assert not columns
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["kl_loss"] == pytest.approx(0, abs=1e-6)
    assert metrics.get("clip_frac", 0.0) == 0 and metrics["grad_norm"] > 0


def test_an_update_gives_the_log_probs_of_a_pass_of_its_own(tiny_model: Path, rank_mesh: RankMesh) -> None:
    """And trains the same weights with them, bit by bit; prompts come twice, and micro-batches are several."""
    apart, merged = (actor(tiny_model, rank_mesh, actor={"entropy_coef": 0.01}) for _ in range(2))
    apart.actor.max_tokens = merged.actor.max_tokens = 24
    rows = on_policy(apart, LENGTHS)
    rows = rows[torch.arange(len(rows)).repeat_interleave(2)]
    rows.batch["responses"][1::2] = rows.batch["responses"][1::2].roll(1, 1)
    columns = apart.compute_log_prob(rows.select(rows.columns - set(LOG_PROB_COLUMNS)))
    rows = rows.select(rows.columns - set(LOG_PROB_COLUMNS))
    nothing, wanted = apart.update_actor(rows.union(columns))
    found, metrics = merged.update_actor(rows)
    assert not nothing and found.columns == columns.columns == set(LOG_PROB_COLUMNS)
    for name, column in columns.batch.items():
        assert torch.equal(found.batch[name], column), name
    assert metrics == wanted and metrics["grad_norm"] > 0
    for name, tensor in weights_of(apart.actor).items():
        assert torch.equal(weights_of(merged.actor)[name], tensor), name


# Value of the estimate of KL(policy ‖ reference) and its derivative, by x = log-prob − log-prob of the reference.
KL: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "k1": (lambda x: x, torch.ones_like),
    "k2": (lambda x: x**2 / 2, lambda x: x),
    "k3": (lambda x: (-x).exp() - 1 + x, lambda x: 1 - (-x).exp()),
}


@pytest.mark.parametrize("kind", KL)
def test_the_kl_loss_is_that_to_the_reference_in_value_and_gradient(
    tiny_model: Path, rank_mesh: RankMesh, kind: str
) -> None:
    """Its gradient is that of the plain loss −A · log π with the advantages −coefficient · dKL/d(log-prob)."""
    plain: dict[str, object] = {"policy_loss": "gpg"}
    coefficient = 0.5
    worker = actor(tiny_model, rank_mesh, actor={**plain, "kl_loss_coef": coefficient, "kl_loss_type": kind})
    rows = on_policy(worker)
    mask_BR = rows.batch["response_mask"]
    x_BR = 0.5 * torch.randn(mask_BR.shape, generator=torch.Generator().manual_seed(0)) * mask_BR
    rows.batch["ref_log_prob"] = rows.batch["old_log_probs"] - x_BR
    rows.batch["advantages"] = torch.zeros_like(mask_BR)
    _, metrics = worker.update_actor(rows)
    value, slope = KL[kind]
    assert metrics["kl_loss"] == pytest.approx(float((value(x_BR) * mask_BR).sum() / mask_BR.sum()), rel=1e-4)
    assert metrics["first_loss"] == pytest.approx(coefficient * metrics["kl_loss"], rel=1e-4)

    other = actor(tiny_model, rank_mesh, actor=plain)
    rows.batch["advantages"] = -coefficient * slope(x_BR) * mask_BR
    assert other.update_actor(rows)[1]["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-3)
    after_BR, wanted_BR = (each.compute_log_prob(rows).batch["old_log_probs"] for each in (worker, other))
    torch.testing.assert_close(after_BR, wanted_BR, rtol=0, atol=1e-4)
    assert (after_BR - rows.batch["old_log_probs"]).abs().max() > 1e-3


def test_an_update_makes_good_tokens_likelier_and_bad_ones_less(tiny_model: Path, rank_mesh: RankMesh) -> None:
    worker = actor(tiny_model, rank_mesh)
    rows = on_policy(worker)
    good_BR = rows.batch["response_mask"] * (torch.arange(len(rows)) % 2 == 0)[:, None]
    rows.batch["advantages"] = 2 * good_BR - rows.batch["response_mask"]
    worker.update_actor(rows)
    gain_BR = worker.compute_log_prob(rows).batch["old_log_probs"] - rows.batch["old_log_probs"]
    gain_B = (gain_BR * rows.batch["advantages"]).sum(-1)
    assert (gain_B[:-1] > 0).all(), gain_B  # the last row has no token of the policy's


def test_rollouts_go_over_all_ranks_and_training_over_data_parallel_groups() -> None:
    """With sequence parallelism every rank has its own engine, but shares the rows that it trains on."""
    methods = {name: getattr(method, "dispatch_mode", None) for name, method in vars(ActorRolloutRefWorker).items()}
    over_all = [name for name, mode in methods.items() if mode is Dispatch.ROLLOUT_COMPUTE_PROTO]
    over_groups = [name for name, mode in methods.items() if mode in (PROTO, METRIC, UPDATE)]
    assert over_all == ["generate_sequences"]
    assert over_groups == ["compute_log_prob", "compute_ref_log_prob", "update_actor", "update_supervised"]
    assert vars(RewardModelWorker)["compute_rm_score"].dispatch_mode is Dispatch.ROLLOUT_COMPUTE_PROTO


def test_every_sampled_token_moves_the_gradient_and_no_other_does(tiny_model: Path, rank_mesh: RankMesh) -> None:
    """Row by row and token by token: an advantage on it alone gives a gradient exactly where the mask is 1."""
    worker = actor(tiny_model, rank_mesh, data={"train_batch_size": 1}, actor={"policy_loss": "gpg"})  # never clips
    rows = on_policy(worker, [(5, 4), (3, 3)])
    rows.batch["response_mask"] = torch.ones(2, 8) * (torch.arange(8) < torch.tensor([[4], [3]]))
    rows.batch["response_mask"][0, 1:3] = 0  # what a tool wrote
    for token in [(0, t) for t in range(4)] + [(1, t) for t in range(3)]:
        rows.batch["advantages"] = torch.zeros(2, 8)
        rows.batch["advantages"][token] = 1.0
        norm = worker.update_actor(rows)[1]["grad_norm"]
        assert (norm > 1e-4) == bool(rows.batch["response_mask"][token]), token


def test_sequences_of_which_nothing_trains_leave_the_denominators(rank_mesh: RankMesh) -> None:
    config = RunConfig.model_validate(
        {"data": {"train_batch_size": 4}, "actor": {"mini_batch_size": 4}, "rollout": {"n": 2}}
    )
    mask_BR = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 0.0], *[[0.0, 0.0]] * 4])
    seen: list[tuple[float, float]] = []
    rows = DataProto({"response_mask": mask_BR})
    engine = SimpleNamespace(train_mini_batch=lambda mini, loss, keep: {"skipped_updates": 0.0})

    def loss_of(mini: DataProto, tokens: float, sequences: float) -> tuple[DataProto, None]:
        seen.append((tokens, sequences))
        return mini, None

    worker: Any = SimpleNamespace(config=config, device=torch.device("cpu"))
    TrainingWorker._train(worker, engine, rows, 1, loss_of)  # type: ignore[arg-type]
    assert seen == [(4.0, 3.0)]


def test_a_profile_covers_the_calls_between_its_start_and_its_end(
    tiny_model: Path, rank_mesh: RankMesh, tmp_path: Path
) -> None:
    worker, store = actor(tiny_model, rank_mesh), Store(str(tmp_path))
    rows = on_policy(worker)
    for step in (1, 2):  # that of step 1 is abandoned
        worker.start_profile()
        if step == 2:
            worker.update_actor(rows)
    worker.write_profile(store, run_files.profile(2))
    worker.write_profile(store, run_files.profile(3))
    assert store.listdir(run_files.PROFILE) == ["step_000002"]
    assert store.listdir(run_files.profile(2)) == ["ActorRolloutRefWorker_0.json.gz"]
    trace = gzip.decompress(store.read_bytes(f"{run_files.profile(2)}/ActorRolloutRefWorker_0.json.gz"))
    names = {event["name"] for event in json.loads(trace)["traceEvents"]}
    assert {"aten::mm", "aten::_fused_adamw_"} <= names
