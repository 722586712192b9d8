"""Time that the driver spends on one DP_COMPUTE_PROTO call, without the workers' own.

    python benchmarks/dispatch.py [--ranks 256] [--sequence-parallel 1] [--rows 4096] [--tokens 1024] [--calls 5]

The ranks are stand-ins: a call to one puts its arguments into Ray's object store, as Ray does for a real actor, and the
answer there (three float32 values a response token, as of `compute_log_prob`) is ready at once. All else is what a run
does.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flows.home import prepare_environment

HOME = Path(tempfile.mkdtemp(prefix="rfd"))
prepare_environment(HOME)

import numpy as np  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402

from rl_core.cluster import worker_group  # noqa: E402
from rl_core.cluster.dispatch import Dispatch, Layout  # noqa: E402
from rl_core.cluster.resources import ray_session  # noqa: E402
from rl_core.data.protocol import DataProto  # noqa: E402


class Rank:
    """Stands for the handle of a rank's actor."""

    def __init__(self) -> None:
        self.call, self.answer, self.sent = self, ray.put(None), 0.0

    def options(self, name: str) -> "Rank":
        """As of an actor's method."""
        return self

    def remote(self, method: str, answers: bool, *args: Any) -> ray.ObjectRef[Any]:
        """Puts what is not in the object store yet; returns the answer that is ready."""
        start = time.perf_counter()
        for arg in args:
            if isinstance(arg, DataProto):
                ray.put(arg)
        self.sent += time.perf_counter() - start
        return self.answer


def step_batch(rows: int, tokens: int) -> DataProto:
    """A step's batch before log-probs: half of a row's tokens are the prompt, and rows carry their facts."""
    prompt, response = tokens // 2, tokens - tokens // 2
    generator = torch.Generator().manual_seed(0)
    return DataProto.from_dict(
        {
            "prompts": torch.randint(0, 150_000, (rows, prompt), generator=generator),
            "responses": torch.randint(0, 150_000, (rows, response), generator=generator),
            "response_mask": torch.ones(rows, response),
            "rollout_log_probs": torch.randn(rows, response, generator=generator),
            "token_level_scores": torch.zeros(rows, response),
            "prompt_length": torch.full((rows,), prompt),
            "response_length": torch.full((rows,), response),
        },
        {
            "uid": [f"1-0-{row // 8}" for row in range(rows)],
            "row": [
                {"prompt": [{"role": "user", "content": "x" * 200}], "extra_info": {"index": row}}
                for row in range(rows)
            ],
            "seed": np.arange(rows).tolist(),
        },
    )


def measure(batch: DataProto, layout: Layout, calls: int) -> dict[str, list[float]]:
    """Seconds of each part of a call, for each call."""
    group: Any = SimpleNamespace(
        name="Rank", layout=layout, deadline=600.0, workers=[Rank() for _ in range(layout.world_size)]
    )
    method = worker_group.GroupMethod(group, "compute_log_prob", Dispatch.DP_COMPUTE_PROTO)
    answering = layout.answering(Dispatch.DP_COMPUTE_PROTO)
    width, share = batch.batch["responses"].shape[1], len(batch) // len(answering)
    for rank in answering:
        group.workers[rank].answer = ray.put(
            DataProto({name: torch.randn(share, width) for name in ("old_log_probs", "entropy", "sum_pi_squared")})
        )
    seconds: dict[str, list[float]] = {"split": [], "put": [], "collect": [], "whole call": []}
    put_shared = worker_group.put_shared
    sharing = 0.0

    def timed(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        nonlocal sharing
        start = time.perf_counter()
        stored = put_shared(calls)
        sharing = time.perf_counter() - start
        return stored

    worker_group.put_shared = timed
    for _ in range(calls):
        sharing = 0.0
        for rank in group.workers:
            rank.sent = 0.0
        start = time.perf_counter()
        call = method.submit(batch)
        submitted = time.perf_counter()
        call.get()
        end = time.perf_counter()
        put = sharing + sum(rank.sent for rank in group.workers)
        for name, value in zip(seconds, (submitted - start - put, put, end - submitted, end - start), strict=True):
            seconds[name].append(value)
    worker_group.put_shared = put_shared
    return seconds


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    for name, default in (("ranks", 256), ("sequence-parallel", 1), ("rows", 4096), ("tokens", 1024), ("calls", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    batch = step_batch(options.rows, options.tokens)
    size = sum(tensor.nbytes for tensor in batch.batch.values()) / 2**20
    with ray_session(HOME, 1, verbose=False):
        seconds = measure(batch, Layout(options.ranks, options.sequence_parallel), options.calls + 1)
    print(
        f"{options.ranks} ranks, {options.sequence_parallel} a sequence; {options.rows} rows of {options.tokens} tokens"
    )
    print(f"({size:,.0f} MiB of tensors); {os.cpu_count()} cores; median of {options.calls} calls after a first one\n")
    print("| part | ms |\n|---|---|")
    for name, values in seconds.items():
        print(f"| {name} | {1000 * statistics.median(values[1:]):,.0f} |")


if __name__ == "__main__":
    main()
