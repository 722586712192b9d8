"""Measures the driver's time for one DP_COMPUTE_PROTO call, excluding the workers' time.

    python benchmarks/dispatch.py [--ranks 256] [--sequence-parallel 1] [--rows 4096] [--tokens 1024] [--calls 5]

The ranks are stubs: a call puts its arguments into Ray's object store, as Ray does for a real actor, and the answer
(three float32 values per response token, as for `compute_log_prob`) is available there immediately. Everything else is
the code of a run.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
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
    """Stub of the handle of a rank's actor."""

    def __init__(self) -> None:
        self.call, self.answer, self.sent = self, ray.put(None), 0.0

    def options(self, name: str) -> "Rank":
        """Ignores the options; interface of an actor's method."""
        return self

    def remote(self, method: str, answers: bool, *args: Any) -> ray.ObjectRef[Any]:
        """Puts arguments into the object store unless they are there; returns the prepared answer."""
        start = time.perf_counter()
        for arg in args:
            if isinstance(arg, DataProto):
                ray.put(arg)
        self.sent += time.perf_counter() - start
        return self.answer


def step_batch(rows: int, tokens: int) -> DataProto:
    """A step's batch before log-probs: half of each row's tokens are the prompt; rows include their data row."""
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
    """Seconds of each part of every call."""
    group: Any = SimpleNamespace(
        name="Rank",
        layout=layout,
        deadline=600.0,
        workers=[Rank() for _ in range(layout.world_size)],
        ranks=[],
        seconds=defaultdict(list),
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
    """Measures and prints the table."""
    parser = argparse.ArgumentParser()
    for name, default in (("ranks", 256), ("sequence-parallel", 1), ("rows", 4096), ("tokens", 1024), ("calls", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    batch = step_batch(options.rows, options.tokens)
    size = sum(tensor.nbytes for tensor in batch.batch.values()) / 2**20
    with ray_session(HOME, 1, verbose=False):
        seconds = measure(batch, Layout(options.ranks, options.sequence_parallel), options.calls + 1)
    print(
        f"{options.ranks} ranks, {options.sequence_parallel} per sequence; "
        f"{options.rows} rows of {options.tokens} tokens"
    )
    print(f"({size:,.0f} MiB of tensors); {os.cpu_count()} cores; median of {options.calls} calls after one warm-up\n")
    print("| part | ms |\n|---|---|")
    for name, values in seconds.items():
        print(f"| {name} | {1000 * statistics.median(values[1:]):,.0f} |")


if __name__ == "__main__":
    main()
