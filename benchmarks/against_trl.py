"""Measures a GRPO step on the CPU side by side with TRL: same model, prompts, lengths, reward and machine.

python -m benchmarks.against_trl TRL_PYTHON WORK [ROUNDS=5] [SETTING …], with WORK = `tiny` (a Qwen3 of 3 layers of
width 64 built in code, 64 prompts × 8 responses × up to 32 tokens) or FOLDER,GSM8K (a checkpoint, and a folder with
train.jsonl and test.jsonl of GSM8K: 4 prompts × 8 responses × up to 64 tokens). Both in float32. With SETTINGs of this
project (`trainer.ranks_per_node=2`) it is also measured with these.

Every variant is a process that keeps its model and waits before each step, so that the steps alternate and all variants
see the same machine. No variant writes checkpoints. A step is timed from its release to its end, after a warm-up step;
the table has the fastest and the median time, and the fewest CPU seconds of a step over all of the variant's processes,
which other load on the machine changes less. TRL is no dependency; its Python is that of an environment made with

    python3.11 -m venv /tmp/trl
    echo "$PWD/.venv/lib/python3.11/site-packages" > /tmp/trl/lib/python3.11/site-packages/shared.pth
    /tmp/trl/bin/python -m pip install --no-deps trl==1.16.0 datasets multiprocess xxhash

The second line lends it this project's torch and transformers, so that both run the same kernels.
"""

import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import psutil

DONE = "@step"
THREADS = (1, 2)


@dataclass(frozen=True)
class Work:
    """What a step does: prompts, responses per prompt, and their limits in tokens."""

    prompts: int
    prompt_tokens: int
    tokens: int
    settings: tuple[str, ...]
    group: int = 8

    def config(self, further: list[str], steps: int) -> Any:
        """The project's config of this work."""
        from rl_core.config.compose import compose

        common = [
            f"data.train_batch_size={self.prompts}",
            f"data.max_prompt_length={self.prompt_tokens}",
            f"data.max_response_length={self.tokens}",
            f"rollout.n={self.group}",
            f"rollout.max_num_seqs={self.prompts * self.group}",
            "rollout.canary_tolerance=0.5",
            "actor.optim.lr=1.0e-7",
            "actor.max_tokens_per_micro_batch=16384",
            "reward.function=benchmarks.against_trl:characters",
            f"trainer.steps={steps}",
            f"trainer.save_every={steps}",
        ]
        return compose("grpo", [*self.settings, *common, *further]).config


def work_of(name: str) -> Work:
    """The work with this name."""
    if name == "tiny":
        return Work(64, 16, 32, ("data.source=copy_digits", "model.tiny.layers=3", "model.tiny.hidden_size=64"))
    model, data = name.split(",")
    return Work(4, 512, 64, (f"model.path={model}", "data.source=gsm8k", f"data.path={data}", "data.train_rows=256"))


def characters(response: str, row: dict[str, Any]) -> float:
    """The reward of both sides: the number of different characters, in hundredths."""
    return len(set(response)) / 100


def pause() -> int:
    """Reports a finished step and waits for the release of the next; returns its number of threads."""
    print(DONE, flush=True)
    return int(sys.stdin.readline() or sys.exit(0))


def ours(home: Path, name: str, steps: int, further: list[str]) -> None:
    """Trains with this project, a step per release."""
    from flows.home import prepare_environment

    prepare_environment(home)
    from rl_core.cluster.resources import ray_session
    from rl_core.cluster.roles import Roles
    from rl_core.data.dataset import RLHFDataset
    from rl_core.data.prepare import prepare_data
    from rl_core.models.load import load_tokenizer
    from rl_core.storage.store import Store
    from rl_core.trainer.observer import NullObserver
    from rl_core.trainer.trainer import PPOTrainer

    class Paced(NullObserver):
        def on_step(self, record: dict[str, Any]) -> None:
            times = {k: round(v, 3) for k, v in record["metrics"].items() if k.startswith("time/") and v >= 0.001}
            print(record["step"], times, file=sys.stderr, flush=True)
            pause()

    config = work_of(name).config(further, steps)
    model = home.parent / "model"
    store, tokenizer = Store(str(home / "run")), load_tokenizer(model)
    data_hash = prepare_data(config, store, tokenizer)["data_hash"]
    rows = RLHFDataset.load(store, "train", tokenizer)
    with ray_session(home, config.slots, False), closing(Roles(config, "against_trl")) as roles:
        trainer = PPOTrainer(config, store, tokenizer, rows, data_hash, roles, Paced())
        trainer.start(str(model))
        pause()
        trainer.fit(steps)


def trl(home: Path, name: str, steps: int) -> None:
    """Trains with TRL, a step per release."""
    torch, library, transformers = map(importlib.import_module, ("torch", "trl", "transformers"))
    datasets, work = importlib.import_module("datasets"), work_of(name)
    rows = work.prompts * work.group
    arguments = library.GRPOConfig(
        output_dir=str(home / "trl"),
        per_device_train_batch_size=rows,
        generation_batch_size=rows,
        num_generations=work.group,
        max_completion_length=work.tokens,
        learning_rate=1e-7,
        beta=0.0,
        temperature=1.0,
        max_steps=steps,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )

    class Paced(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.set_num_threads(pause())

    prompts = json.loads((home / "prompts.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    trainer = library.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [characters(text, {}) for text in completions],
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=transformers.AutoTokenizer.from_pretrained(home / "model", padding_side="left"),
        callbacks=[Paced()],
    )
    trainer.train()


def make_work(home: Path, name: str) -> None:
    """Writes the model, and the prompts as the texts that TRL tokenises."""
    from rl_core.data.dataset import RLHFDataset
    from rl_core.data.prepare import prepare_data
    from rl_core.models.load import load_tokenizer
    from rl_core.models.tiny import save_tiny_model
    from rl_core.storage.store import Store

    work, model = work_of(name), home / "model"
    config = work.config([], 1)
    if config.model.path == "tiny":
        save_tiny_model(model, config.model.tiny, config.max_length, 0)
    else:
        shutil.copytree(config.model.path, model)
    tokenizer, store = load_tokenizer(model), Store(str(home / "prompts"))
    prepare_data(config, store, tokenizer)
    rows = RLHFDataset.load(store, "train", tokenizer)
    prompts = [tokenizer.decode(rows[i]["prompt_ids"]) for i in range(sum(rows.sizes))]
    (home / "prompts.json").write_text(json.dumps(prompts))


class Variant:
    """A process that trains a step per release."""

    def __init__(self, title: str, python: str, arguments: list[str], threads: int) -> None:
        self.title, self.threads, self.seconds, self.cpu = title, threads, list[float](), list[float]()
        environment = {**os.environ, "PYTHONPATH": os.getcwd(), "CUDA_VISIBLE_DEVICES": ""}
        command = [python, "-m", "benchmarks.against_trl", *arguments]
        self.process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def wait(self) -> None:
        """Waits until the process has finished its step."""
        for line in cast(IO[str], self.process.stdout):
            if line.strip() == DONE:
                return
        raise RuntimeError(f"{self.title} ended with code {self.process.wait()}")

    def step(self) -> None:
        """Releases a step and measures it."""
        start, cpu = time.perf_counter(), self._cpu()
        print(self.threads, file=cast(IO[str], self.process.stdin), flush=True)
        self.wait()
        self.seconds.append(time.perf_counter() - start)
        self.cpu.append(self._cpu() - cpu)

    def _cpu(self) -> float:
        """CPU seconds of all living processes of the variant so far."""
        parent = psutil.Process(self.process.pid)
        times = [each.cpu_times() for each in [parent, *parent.children(recursive=True)]]
        return float(sum(each.user + each.system for each in times))

    def end(self) -> None:
        """Ends the process."""
        cast(IO[str], self.process.stdin).close()
        self.process.wait()


def main(python: str, name: str, rounds: int, settings: list[str]) -> None:
    """Measures and prints the table."""
    home = Path(tempfile.mkdtemp(prefix="rt"))  # short, because Ray's sockets are below it
    steps, variants = str(rounds + 3), list[Variant]()
    try:
        make_work(home, name)
        for threads in THREADS:
            arguments = ["trl", str(home), name, steps]
            variants.append(Variant(f"TRL, threads={threads}", python, arguments, threads))
        for further in [[], settings][: 1 + bool(settings)]:
            own = str(home / f"our{len(further)}")
            title = " ".join(["Rollforward", *further])
            variants.append(Variant(title, sys.executable, ["ours", own, name, steps, *further], 0))
        for variant in variants:
            variant.wait()
        for _ in range(1 + rounds):
            for variant in variants:
                variant.step()
        print("| variant | fastest step | median | CPU |\n|---|---|---|---|")
        for variant in variants:
            seconds, cpu = variant.seconds[1:], variant.cpu[1:]
            times = f"{min(seconds):.2f} s | {statistics.median(seconds):.2f} s | {min(cpu):.2f} s"
            print(f"| {variant.title} | {times} |", flush=True)
    finally:
        for variant in variants:
            variant.end()
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    if first == "ours":
        ours(Path(rest[0]), rest[1], int(rest[2]), rest[3:])
    elif first == "trl":
        trl(Path(rest[0]), rest[1], int(rest[2]))
    else:
        main(first, rest[0], int(rest[1]) if len(rest) > 1 else 5, rest[2:])
