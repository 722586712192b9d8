"""The page of metric names and the names that training emits are the same."""

import re
from pathlib import Path

import pytest
from support_training import Trained

from rl_core.training.gpu_usage import GpuUsage, gpu_metrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|[^|]*\|")


def names_on_the_page() -> list[str]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    rows = [ROW.fullmatch(line) for line in lines]
    assert all(rows), [line for line, row in zip(lines, rows, strict=True) if not row]
    return [row[1] for row in rows if row]


def pattern(name: str) -> re.Pattern[str]:
    """`<…>` in a name stands for one part of it."""
    return re.compile(re.sub(r"<\w+>", "[^/]+", re.sub(r"[.+]", r"\\\g<0>", name)))


@pytest.fixture(scope="module")
def emitted(trained: Trained) -> set[str]:
    return {name for run in trained.configs for record in trained.records(run) for name in record["metrics"]}


def test_every_emitted_name_is_on_the_page(emitted: set[str]) -> None:
    page = [pattern(name) for name in names_on_the_page()]
    assert {name for name in emitted if not any(known.fullmatch(name) for known in page)} == set()


def test_every_name_on_the_page_is_emitted(emitted: set[str]) -> None:
    emitted = emitted | set(gpu_metrics([GpuUsage("NVIDIA H200", 1, 1, 1)], 1.0, 1.0))  # these runs have no GPU
    page = names_on_the_page()
    assert [name for name in page if not any(pattern(name).fullmatch(seen) for seen in emitted)] == []
    assert len(page) == len(set(page))


def test_a_name_stands_under_the_heading_of_its_prefix() -> None:
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        prefixes = section.splitlines()[0].split(", ")
        for name in re.findall(r"^\| `([^`]+)`", section, re.MULTILINE):
            assert name.split("/")[0] in prefixes, name


def test_the_phases_account_for_the_time_of_a_step(trained: Trained) -> None:
    for run in trained.configs:
        for record in trained.records(run):
            times = {name: value for name, value in record["metrics"].items() if name.startswith("time/")}
            step = times.pop("time/step")
            others = step - sum(times.values())
            assert 0 <= others < max(0.03 * step, 0.1), (run, record["step"], step, times)
            assert ("time/record" in times) == (record["step"] > 1) and "time/commit" in times


def test_throughput_is_tokens_over_the_time_of_their_phase(trained: Trained) -> None:
    # Without filtering, what is trained is what was generated.
    config, metrics = trained.configs["grpo"], trained.records("grpo")[-1]["metrics"]
    rows = config.data.train_batch_size * config.rollout.n
    generated = rows * metrics["response_length/mean"]
    tokens = generated + rows * metrics["prompt_length/mean"]
    assert metrics["perf/rollout_tokens_per_s"] * metrics["time/rollout"] == pytest.approx(generated)
    assert metrics["perf/update_tokens_per_s"] * metrics["time/update"] == pytest.approx(tokens * 2)
    assert metrics["perf/tokens_per_s"] * metrics["time/step"] == pytest.approx(tokens)
