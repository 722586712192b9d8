"""Measures the time of a training step in each rollout mode, with the engine in its own pool.

python -m benchmarks.modes [STEPS=10]: the actor on one device, the rollout engine on another. On CUDA a 0.49B model in
bfloat16, 256 responses of 256 tokens per step; on a CPU the offline model, 64 of 32. Responses of the random model
never end early, so all modes do the same work. Times are medians in seconds; the first two steps are excluded.
"""

import shutil
import statistics
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from flows.home import prepare_environment

HOME = Path(tempfile.mkdtemp(prefix="rf"))  # short, because Ray's sockets are below it
prepare_environment(HOME)

import torch  # noqa: E402

from benchmarks.rollout import make_model  # noqa: E402
from rl_core.cluster.resources import ray_session  # noqa: E402
from rl_core.cluster.roles import Roles  # noqa: E402
from rl_core.config.compose import compose  # noqa: E402
from rl_core.config.schema import RunConfig  # noqa: E402
from rl_core.data.dataset import RLHFDataset  # noqa: E402
from rl_core.data.prepare import prepare_data  # noqa: E402
from rl_core.models.load import load_tokenizer  # noqa: E402
from rl_core.models.tiny import build_tokenizer  # noqa: E402
from rl_core.storage.ledger import Ledger  # noqa: E402
from rl_core.storage.store import Store  # noqa: E402
from rl_core.trainer.observer import NullObserver  # noqa: E402
from rl_core.trainer.trainer import PPOTrainer  # noqa: E402

WARM_UP, PROMPT = 2, 16
MODES = {
    "sync": ["rollout.mode=sync"],
    "one_step_off": ["rollout.mode=one_step_off", "correction.weights=token"],
    "async": ["rollout.mode=async", "correction.weights=token"],
}
SHOWN = ("time/step", "time/rollout", "time/log_prob", "time/update", "time/push", "time/commit")


def config_of(mode: str, steps: int, on_gpu: bool) -> RunConfig:
    """The config used to measure a mode."""
    tokens, prompts, settings = (256, 32, ["model.dtype=bfloat16"]) if on_gpu else (32, 8, [])
    return compose(
        "grpo",
        [
            *MODES[mode],
            *settings,
            "data.source=copy_digits",
            f"data.max_prompt_length={PROMPT}",
            f"data.max_response_length={tokens}",
            f"data.train_batch_size={prompts}",
            "actor.max_tokens_per_micro_batch=16384",
            "rollout.n=8",
            f"rollout.max_num_seqs={8 * prompts}",
            "rollout.ranks_per_node=1",
            "rollout.canary_tolerance=0.5",
            f"trainer.steps={steps}",
            f"trainer.save_every={steps}",
        ],
    ).config


class Progress(NullObserver):
    """Prints a line per step to stderr, since a mode takes minutes."""

    def on_step(self, record: dict[str, Any]) -> None:
        """Prints the time of the step."""
        print(f"step {record['step']}: {record['metrics']['time/step']:.2f} s", file=sys.stderr, flush=True)


def measure(mode: str, steps: int, roles: Roles) -> dict[str, float]:
    """Median of each time over a run with the given workers."""
    config = config_of(mode, steps, torch.cuda.is_available())
    store, tokenizer = Store(str(HOME / mode)), load_tokenizer(HOME / "model")
    data_hash = prepare_data(config, store, tokenizer)["data_hash"]
    rows = RLHFDataset.load(store, "train", tokenizer)
    trainer = PPOTrainer(config, store, tokenizer, rows, data_hash, roles, Progress())
    trainer.start(str(HOME / "model"))
    trainer.fit(steps)
    metrics = [record["metrics"] for record in Ledger(store).records(steps)][WARM_UP:-1]
    return {name: statistics.median(values[name] for values in metrics) for name in SHOWN}


def main(steps: int) -> None:
    """Measures and prints the table."""
    on_gpu = torch.cuda.is_available()
    make_model(HOME / "model", torch.device("cuda" if on_gpu else "cpu"), PROMPT + (256 if on_gpu else 32))
    build_tokenizer().save_pretrained(HOME / "model")
    config = config_of("sync", steps, on_gpu)
    with ray_session(HOME, 2, False), closing(Roles(config, "modes")) as roles:
        print(f"{'mode':14}" + "".join(f"{name.partition('/')[2]:>10}" for name in SHOWN), flush=True)
        for mode in MODES:
            times = measure(mode, steps, roles)
            print(f"{mode:14}" + "".join(f"{value:10.2f}" for value in times.values()), flush=True)


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:2] or (10,)))
    finally:
        shutil.rmtree(HOME, ignore_errors=True)
