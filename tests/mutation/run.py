"""Plants known bugs of reinforcement learning, one at a time, into a copy of the library, and counts those caught.

Learning curves hide such bugs: a run with one of them still learns something. Each bug is an exact replacement of text
that must be found once, and names the tests that should notice it. The same tests pass on the unchanged copy first.

Usage: python tests/mutation/run.py [NAME ...]; without names all bugs.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
KL_LOSS = "tests/cluster/test_training_workers.py::test_the_kl_loss_is_that_to_the_reference_in_value_and_gradient"
AT_A_TIME = 2


@dataclass(frozen=True)
class Bug:
    """A bug: what is replaced in which file, and the tests that should fail then."""

    name: str
    file: str
    text: str
    planted: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Plants the bug below `root`; ValueError when its text is not there exactly once."""
        path = root / self.file
        source = path.read_text()
        if source.count(self.text) != 1:
            raise ValueError(
                f"bug '{self.name}': its text is {source.count(self.text)} times in {self.file}, not once; "
                f"follow the change of the source in {Path(__file__).name}: {self.text}"
            )
        path.write_text(source.replace(self.text, self.planted))


BUGS = (
    Bug(
        "sign flip",
        "rl_core/training/losses.py",
        'loss = shares["pg_loss"]',
        'loss = -shares["pg_loss"]',
        ("tests/cluster/test_training_workers.py::test_an_update_makes_good_tokens_likelier_and_bad_ones_less",),
    ),
    Bug(
        "stale sampler",
        "rl_core/rollout/engine/vllm_engine.py",
        "            written = self._load(self._conversion.to_stored(recorded()))",
        "            written = self._parameters | {name for name, _ in recorded()}",
        ("tests/rollout/engine/test_contract.py::test_greedy_is_the_plain_models_whatever_the_seed[vllm]",),
    ),
    Bug(
        "wrong group interleave",
        "rl_core/algorithms/advantages.py",
        "return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids])",
        "return torch.arange(len(uids)) % len(set(uids))",
        ("tests/trainer/test_sampler.py", "tests/algorithms/test_golden.py::test_advantages"),
    ),
    Bug(
        "missing baseline",
        "rl_core/algorithms/advantages.py",
        "self.centred_B = values_B - self.mean_B",
        "self.centred_B = values_B",
        ("tests/algorithms/test_properties.py::test_the_advantages_of_a_group_sum_to_zero",),
    ),
    Bug(
        "off-by-one log-probs",
        "rl_core/models/load.py",
        "before_N = self.layout.in_row(target_N - 1)",
        "before_N = self.layout.in_row(target_N)",
        ("tests/training/test_engine.py::test_compute_gives_the_log_probs_of_the_plain_model",),
    ),
    Bug(
        "first token only",
        "rl_core/algorithms/masked.py",
        "summed_B = (loss_BR * mask_BR).sum(-1)",
        "summed_B = (loss_BR * mask_BR)[:, 0]",
        ("tests/cluster/test_training_workers.py::test_every_sampled_token_moves_the_gradient_and_no_other_does",),
    ),
    Bug(
        "temperature missing in training",
        "rl_core/cluster/training_workers.py",
        "self._policy_loss, self.temperature, keep",
        "self._policy_loss, 1.0, keep",
        ("tests/cluster/test_training_workers.py::test_the_first_update_is_on_policy",),
    ),
    Bug(
        "batch mean instead of group mean",
        "rl_core/algorithms/advantages.py",
        "self.mean_B = self.sum(values_B) / self.count_B",
        "self.mean_B = values_B.mean().expand_as(values_B)",
        ("tests/algorithms/test_properties.py::test_a_constant_added_to_a_groups_rewards_changes_nothing",),
    ),
    Bug(
        "micro-batch dependent scale",
        "rl_core/training/losses.py",
        "return aggregate_loss(values_BR, mask_BR, mode, tokens, sequences, scale)",
        "return aggregate_loss(values_BR, mask_BR, mode, float(mask_BR.sum()), float(len(mask_BR)), scale)",
        ("tests/training/test_losses.py::test_no_split_changes_loss_metrics_or_gradient",),
    ),
    Bug(
        "mask ignoring tool spans",
        "rl_core/training/losses.py",
        'mask_BR, old_BR = tensors["response_mask"], tensors.get(',
        'mask_BR, old_BR = (tensors["old_log_probs"] != 0).float(), tensors.get(',
        ("tests/cluster/test_training_workers.py::test_every_sampled_token_moves_the_gradient_and_no_other_does",),
    ),
    Bug(
        "KL loss with its arguments swapped",
        "rl_core/training/losses.py",
        'kl_estimate(log_prob_BR, tensors["ref_log_prob"], actor.kl_loss_type)',
        'kl_estimate(tensors["ref_log_prob"], log_prob_BR, actor.kl_loss_type)',
        (KL_LOSS,),
    ),
    Bug(
        "KL loss against the old policy",
        "rl_core/training/losses.py",
        'kl_estimate(log_prob_BR, tensors["ref_log_prob"], actor.kl_loss_type)',
        "kl_estimate(log_prob_BR, old_BR, actor.kl_loss_type)",
        (KL_LOSS,),
    ),
    Bug(
        "canary that lets NaN pass",
        "rl_core/rollout/weights/canary.py",
        "if not difference <= limit:",
        "if difference > limit:",
        ("tests/rollout/weights/test_canary.py",),
    ),
    Bug(
        "two-sided interval of a gain",
        "rl_core/evaluation/gate.py",
        "level, limit = 1 - 2 * config.alpha, config.min_effect",
        "level, limit = 1 - config.alpha, config.min_effect",
        ("tests/evaluation/test_gate.py::test_a_gain_is_judged_at_the_one_sided_level",),
    ),
    Bug(
        "guards at the wrong level",
        "rl_core/evaluation/gate.py",
        "    level = 1 - 2 * config.alpha",
        "    level = 1 - config.alpha",
        ("tests/evaluation/test_gate.py::test_guards_are_judged_at_the_one_sided_level",),
    ),
    Bug(
        "bootstrap chunks of the same draws",
        "rl_core/evaluation/statistics.py",
        "value_N[rng.integers(",
        "value_N[np.random.default_rng(seed).integers(",
        ("tests/evaluation/test_statistics.py::test_chunks_of_draws_are_different_draws",),
    ),
    Bug(
        "learning-rate schedule without epochs",
        "rl_core/cluster/roles.py",
        "updates_of_actor = updates * config.actor.ppo_epochs",
        "updates_of_actor = updates",
        ("tests/trainer/test_start.py::test_the_learning_rate_schedule_counts_every_optimizer_step",),
    ),
    Bug(
        "KL coefficient lost on resume",
        "rl_core/trainer/trainer.py",
        'self.kl_controller.coef = meta["kl_coef"]',
        "pass",
        ("tests/trainer/test_start.py::test_a_resumed_trainer_has_the_step_the_position_and_the_kl_coefficient",),
    ),
    Bug(
        "colliding groups of dynamic sampling",
        "rl_core/trainer/batch.py",
        'f"{step}-{attempt}-{i}"',
        'f"{step}-{i}"',
        ("tests/trainer/test_sampler.py::test_enough_useful_groups_stop_the_sampling_and_the_rest_is_cut",),
    ),
    Bug(
        "new batches on resume",
        "rl_core/trainer/rollout_queue.py",
        'enumerate(state["ahead"])',
        'enumerate(state["ahead"][:0])',
        ("tests/trainer/test_sampler.py::test_a_resume_trains_on_the_batches_that_were_ahead",),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What the tests said: whether they passed, the first that failed, and the seconds they took."""

    passed: bool
    failed_test: str
    seconds: float


def copied(folder: Path) -> Path:
    """The library and its tests in a new folder, which come before the installed ones there."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("rl_core", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_tests(folder: Path, tests: Sequence[str]) -> Outcome:
    """Runs the tests in a copy, up to the first that fails; RuntimeError when they could not be run at all."""
    start = time.monotonic()
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    failed = re.search(r"^FAILED \S*?([^/\s]+\.py::\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 0 and not failed:
        raise RuntimeError(f"the tests did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return Outcome(done.returncode == 0, failed.group(1) if failed else "", time.monotonic() - start)


def run_bug(bug: Bug) -> Outcome:
    """The tests of a bug on a copy that has it."""
    with tempfile.TemporaryDirectory(prefix="rfm") as folder:
        copy = copied(Path(folder))
        bug.apply(copy)
        return run_tests(copy, bug.tests)


def run_unchanged(bugs: Sequence[Bug]) -> Outcome:
    """The tests of all these bugs on a copy without any."""
    with tempfile.TemporaryDirectory(prefix="rfm") as folder:
        return run_tests(copied(Path(folder)), sorted({test for bug in bugs for test in bug.tests}))


def main(names: list[str]) -> int:
    """Prints which test caught each bug, and the score; 0 when all were caught."""
    unknown = set(names) - {bug.name for bug in BUGS}
    if unknown:
        print(f"no bugs named {sorted(unknown)}; there are: {', '.join(bug.name for bug in BUGS)}")
        return 2
    bugs = [bug for bug in BUGS if not names or bug.name in names]
    unchanged = run_unchanged(bugs)
    if not unchanged.passed:
        print(f"the unchanged library fails its own tests: {unchanged.failed_test}")
        return 2
    width = max(len(bug.name) for bug in bugs)
    print(f"{'(none)':{width}}  {unchanged.seconds:4.0f} s  all tests pass", flush=True)
    caught = 0
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for bug, outcome in zip(bugs, pool.map(run_bug, bugs), strict=True):
            caught += not outcome.passed
            print(f"{bug.name:{width}}  {outcome.seconds:4.0f} s  {outcome.failed_test or 'NOT CAUGHT'}", flush=True)
    print(f"mutation score {caught}/{len(bugs)}")
    return 0 if caught == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
