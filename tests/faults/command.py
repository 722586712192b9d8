"""The command `rollforward` with points that are noted as the run passes them: command.py run RECIPE …

The points are the calls that make up a step; the library has no hooks for them, so they are wrapped here.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from support_faults import END, FAULTS, FLOW, UNNOTICED, find, kills_left, last_step, note, passing

from flows.home import prepare_home
from rl_core.storage import run_files

Step = Callable[..., int]


def point(boundary: str, when: str, step: int, tokens: int = 0) -> None:
    """A point that the flow process passes; it is not left before Ray knows that a raylet has died."""
    if boundary in END:
        revive(boundary, when)
    passing(boundary, when, step, tokens)
    if (faults() / UNNOTICED).exists():
        import ray

        while any(node["Alive"] for node in ray.nodes()):
            time.sleep(0.1)
        (faults() / UNNOTICED).unlink()


def around(
    owner: Any, name: str, before: str | None, after: str | None, step: Step, tokens: Step = lambda _: 0
) -> None:
    """Wraps a function of a class or module: the points before it begins and after it has ended.

    `step` gets the arguments of the call, `tokens` what it returned.
    """
    function = getattr(owner, name)

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            point(before, "before", step(*args, **kwargs))
        result = function(*args, **kwargs)
        if after:
            point(after, "after", step(*args, **kwargs), tokens(result))
        return result

    setattr(owner, name, wrapped)


def only(condition: Callable[..., bool], owner: Any, name: str, boundary: str, step: Step) -> None:
    """Wraps a function for some of its calls."""
    plain = getattr(owner, name)
    around(owner, name, boundary, boundary, step)
    noted = getattr(owner, name)
    setattr(owner, name, lambda *args, **kw: (noted if condition(*args, **kw) else plain)(*args, **kw))


def prepare() -> None:
    """Wraps the parts of a run."""
    from rl_core.cluster.calls import Call
    from rl_core.cluster.roles import Roles
    from rl_core.cluster.rollout_handle import ColocatedRollouts
    from rl_core.cluster.rollout_pool import RolloutPool
    from rl_core.cluster.worker_group import GroupMethod
    from rl_core.storage.ledger import Ledger
    from rl_core.storage.store import Store
    from rl_core.trainer import trainer
    from rl_core.trainer.checkpoints import Checkpointer
    from rl_core.trainer.sampler import Sampler
    from tasks import evaluate
    from tasks.registry.registry import Registry
    from tasks.runs.run import committed_step
    from tasks.tracking.run_tracking import RunTracking

    now: Step = lambda *_, **__: last_step()  # noqa: E731
    begins(Sampler, "batch")
    around(Sampler, "batch", "rollout", "rollout", lambda _self, step, _phase: step, tokens_of)
    around(trainer, "compute_advantages", "advantage", "advantage", now)
    for method, boundary in (("update_critic", "critic update"), ("update_actor", "actor update")):
        only(lambda self, *_, m=method: self.name == m, GroupMethod, "submit", boundary, now)
        only(lambda self, m=method: self.method == m, Call, "get", boundary, now)
    for pushes in (ColocatedRollouts, RolloutPool):
        around(pushes, "push_weights", "weight push", "weight push", lambda _self, version: version)
    around(Checkpointer, "begin", "checkpoint shards", None, lambda _self, step, _meta: step)
    around(Roles, "finish_checkpoint", None, "checkpoint shards", now)
    only(lambda _self, rel, *_: rel.startswith(run_files.CHECKPOINTS), Store, "commit_folder", "manifest",
         lambda _self, rel, *_: int(rel.rpartition("_")[2]))  # fmt: skip
    around(Ledger, "write", "ledger record", "ledger record", lambda _self, step, _record: step)
    around(RunTracking, "flush_paced", "metric flush", "metric flush", lambda _self, step: step)
    around(evaluate, "_cached", "evaluation", "evaluation", lambda session, *_: committed_step(session.store))
    around(Registry, "register", "registration", "registration", now)
    around(Registry, "promote", "alias move", "alias move", now)
    starts(Roles)


def begins(owner: Any, name: str) -> None:
    """Notes which step begins."""
    function = getattr(owner, name)

    def wrapped(self: Any, step: int, phase: Any) -> Any:
        (faults() / "step").write_text(str(step))
        return function(self, step, phase)

    setattr(owner, name, wrapped)


def starts(owner: Any) -> None:
    """Notes the numbers of the actors' processes once they are there."""
    function = owner.meet

    def wrapped(self: Any) -> None:
        function(self)
        from ray._private.state import actors

        note_processes({actor["Name"]: actor["Pid"] for actor in actors().values() if actor["State"] == "ALIVE"})
        note(faults(), boundary="start", when="after", step=last_step(), tokens=0)

    owner.meet = wrapped


def note_processes(actors: dict[str, int]) -> None:
    (faults() / "processes.json").write_text(json.dumps({FLOW: os.getpid(), **actors}))


def revive(boundary: str, when: str) -> None:
    """Where the plan kills a process that has ended by then, it is started again first."""
    from tasks.session.session import current_session

    left = kills_left(faults())
    if left and (left[0].boundary, left[0].when) == (boundary, when):
        try:
            find(faults(), left[0].victim)
        except LookupError:
            current_session().workers.drop()
            current_session().workers.start_trainer()


def tokens_of(result: Any) -> int:
    """Tokens that a step's rollouts have sampled."""
    batch, _ = result
    return int(batch.batch["response_mask"].sum())


def faults() -> Path:
    return Path(os.environ[FAULTS])


if __name__ == "__main__":
    prepare_home(verbose=False)
    note_processes({})  # a process that finds every step done starts no workers
    prepare()
    from flows.cli.main import main

    code = main()
    note(faults(), boundary="end", when="after", step=last_step(), tokens=0)
    sys.exit(code)
