"""A pool of two real engines beside one actor, against engines on the actor's place, in float32."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from support import LENGTHS, rows_of

from rl_core.cluster.resources import ray_session, resource_pools
from rl_core.cluster.roles import Roles
from rl_core.cluster.rollout_pool import RolloutPool, split_rows
from rl_core.config.compose import compose
from rl_core.config.schema import RunConfig
from rl_core.data.protocol import DataProto
from rl_core.errors import TrainingError, TransientError

HOME = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parents[1]
SETTINGS = [
    "data.max_prompt_length=16",
    "data.max_response_length=40",
    "data.train_batch_size=8",
    "actor.max_tokens_per_micro_batch=1024",
    "actor.optim.lr=3e-2",
    "rollout.max_num_seqs=256",
    "rollout.kv_cache_gb=0.125",
]
TOLERANCE = 1e-5


def prompts(groups: int = 5, n: int = 3) -> DataProto:
    """`n` rows to each of some prompts of different lengths."""
    generator = torch.Generator().manual_seed(1)
    columns: dict[str, Any] = {
        "prompt_ids": [torch.randint(3, 64, (4 + i % 9,), generator=generator).tolist() for i in range(groups)],
        "uid": [f"group {i}" for i in range(groups)],
    }
    rows = DataProto.from_dict({}, columns).repeat(n)
    return rows.union(DataProto.from_dict({}, {"seed": list(range(100, 100 + groups * n))}))


def start(roles: Roles, model: Path) -> None:
    """The policy at the saved weights, served as version 0."""
    roles.init_models(str(model), 100)
    assert roles.rollout.push_weights(0) < TOLERANCE


def train(roles: Roles) -> None:
    """One large step, after which the policy is clearly another one."""
    roles.actor.update_supervised(rows_of(LENGTHS))


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    with ray_session(HOME, 3, False):
        yield


@pytest.fixture(scope="module")
def colocated(ray_here: None, tiny_model: Path) -> list[DataProto]:
    """Responses of the engine on the actor's place, of weights versions 0 and 1."""
    with closing(Roles(compose("grpo", SETTINGS).config, "colocated")) as roles:
        start(roles, tiny_model)
        before = roles.rollout.generate_sequences(prompts(), 0.7)
        roles.rollout.sleep()
        train(roles)
        assert roles.rollout.push_weights(1) < TOLERANCE
        assert (roles.rollout.engines, roles.rollout.redispatched) == (1, 0)
        return [before, roles.rollout.generate_sequences(prompts(), 0.7)]


@pytest.fixture(scope="module")
def roles(ray_here: None, colocated: list[DataProto], tiny_model: Path) -> Iterator[Roles]:
    config = compose("grpo", [*SETTINGS, "rollout.ranks_per_node=2"]).config
    with closing(Roles(config, "separate")) as roles:
        start(roles, tiny_model)
        yield roles


@pytest.fixture
def pool(roles: Roles) -> RolloutPool:
    """The pool with both engines alive."""
    assert roles.pool
    if roles.pool.engines < 2:
        roles.pool.push_weights(50)
    return roles.pool


def kill(pool: RolloutPool, number: int) -> None:
    """Kills an engine's process between two steps."""
    group = pool._engines[number].group
    group.pause()
    os.kill(ray.get(group.workers[0].__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)


def same_responses(a: DataProto, b: DataProto) -> bool:
    assert a.non_tensor_batch["seed"].tolist() == b.non_tensor_batch["seed"].tolist()
    assert torch.equal(a.batch["prompts"], b.batch["prompts"])
    return torch.equal(a.batch["responses"], b.batch["responses"])


def test_responses_are_those_of_engines_on_the_actors_place(
    roles: Roles, pool: RolloutPool, colocated: list[DataProto], tiny_model: Path
) -> None:
    before = pool.generate_sequences(prompts(), 0.7)
    assert same_responses(before, colocated[0])
    train(roles)
    assert not same_responses(before, colocated[1])
    assert pool.push_weights(1) < TOLERANCE
    after = pool.generate_sequences(prompts(), 0.7)
    assert same_responses(after, colocated[1])
    torch.testing.assert_close(
        after.batch["rollout_log_probs"], colocated[1].batch["rollout_log_probs"], rtol=0, atol=TOLERANCE
    )
    for version, batch in enumerate((before, after)):
        sampled = batch.batch["version"][batch.batch["response_mask"].bool()]
        assert set(sampled.tolist()) == {version}
    loaded = roles.actor.workers[0].__ray_call__.remote(lambda self: "vllm" in sys.modules)
    assert not ray.get(loaded), "the actor's process has loaded an engine that it does not need"


def test_a_turn_goes_on_over_a_push_and_several_batches_are_under_way_at_once(roles: Roles, pool: RolloutPool) -> None:
    pool.push_weights(2)
    calls = [pool.submit(prompts(80, 16), temperature) for temperature in (1.0, 0.7)]
    time.sleep(0.2)
    assert not any(share.call.settled() for call in calls for share in call._shares)
    train(roles)
    assert pool.push_weights(3) < TOLERANCE
    first, second = calls[1].get(), calls[0].get()
    versions: set[float] = set()
    for batch in (first, second):
        assert batch.non_tensor_batch["seed"].tolist() == prompts(80, 16).non_tensor_batch["seed"].tolist()
        on = batch.batch["response_mask"].bool()
        versions |= set(batch.batch["version"][on].tolist())
        assert (batch.batch["version"].diff()[on[:, 1:]] >= 0).all()
    assert versions == {2, 3}
    assert not torch.equal(first.batch["responses"], second.batch["responses"])


def test_an_engine_that_is_killed_loses_nothing_and_comes_back_at_the_next_push(
    roles: Roles, pool: RolloutPool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.push_weights(4)
    wanted = pool.generate_sequences(prompts(80, 16), 1.0)
    sent_again = pool.redispatched
    call = pool.submit(prompts(80, 16), 1.0)
    time.sleep(0.1)
    kill(pool, 0)
    seen = call.get()
    assert same_responses(seen, wanted)
    assert pool.engines == 1 and pool.redispatched - sent_again == 640
    assert same_responses(pool.generate_sequences(prompts(80, 16), 1.0), wanted)
    (note,) = [record.message for record in caplog.records if "lost rollout engine" in record.message]
    assert "lost rollout engine 0, continuing with 1: rank 0 of RolloutWorker-0 was lost during" in note
    train(roles)
    assert pool.push_weights(5) < TOLERANCE
    assert pool.engines == 2
    shares = pool.submit(prompts(2), 1.0)._shares
    assert [set(share.call.get().batch["version"].flatten().tolist()) - {-1} for share in shares] == [{5}, {5}]


def test_engines_that_serve_other_weights_than_the_actors_stop_the_run(
    roles: Roles, pool: RolloutPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = roles.actor.canary()
    train(roles)
    with monkeypatch.context() as patch:
        patch.setattr(roles.actor, "canary", lambda: stale, raising=False)
        with pytest.raises(TrainingError, match="push of weights version 6.*canary_tolerance"):
            pool.push_weights(6)
    assert pool.push_weights(7) < TOLERANCE


def test_a_pool_goes_on_without_engines_that_do_not_start_again_until_none_is_left(
    roles: Roles, pool: RolloutPool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(pool, 0)
    assert len(pool.generate_sequences(prompts(), 1.0)) == 15
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_path", "/nowhere")
        for version in (10, 11):
            assert pool.push_weights(version) < TOLERANCE
    assert pool.engines == 1
    (note,) = [record.message for record in caplog.records if "start" in record.message]
    assert note.startswith("rollout engine 0 failed to restart: ")
    call = pool.submit(prompts(80, 16), 1.0)
    kill(pool, 1)
    with pytest.raises(TransientError, match="no rollout engine is left; .* was lost during"):
        call.get()
    with pytest.raises(TransientError, match="no rollout engine is left"):
        pool.submit(prompts(), 1.0)
    pool._engines[0].may_restart = True


def test_what_an_engine_raises_stays_what_it_is(pool: RolloutPool) -> None:
    broken = DataProto.from_dict({}, {"prompt_ids": [[4]]})
    with pytest.raises(TrainingError, match=r"RolloutWorker-\d.*generate_sequences on rank 0 raised KeyError: 'seed'"):
        pool.generate_sequences(broken, 1.0)
    assert pool.engines == 2


@pytest.mark.parametrize(
    ("uids", "parts", "wanted"),
    [
        ("aabbccdd", 2, [4, 4]),
        ("aaabbbccc", 2, [3, 6]),
        ("aaaaaabc", 3, [6, 2]),
        ("aaaa", 3, [4]),
        ("abcdefg", 3, [2, 3, 2]),
        ("abab", 4, [1, 1, 1, 1]),
    ],
)
def test_rows_of_a_group_stay_together_and_parts_are_even(uids: str, parts: int, wanted: list[int]) -> None:
    found = split_rows(list(uids), parts)
    assert [len(part) for part in found] == wanted
    assert [row for part in found for row in part] == list(range(len(uids)))


def test_the_pool_stands_between_the_actors_and_the_reward_models() -> None:
    sections = {
        "rollout": {"nodes": 2, "ranks_per_node": 4},
        "reward": {"model": {"path": "somewhere", "ranks_per_node": 1}},
        "trainer": {"device": "cpu"},
    }
    pools = resource_pools(RunConfig.model_validate(sections))
    assert [(pool.setting, pool.nodes, pool.ranks_per_node) for pool in pools] == [
        ("trainer", 1, 1),
        ("rollout", 2, 4),
        ("reward.model", 1, 1),
    ]
