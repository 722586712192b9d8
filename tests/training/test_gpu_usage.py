import pytest

from rl_core.training.gpu_usage import GpuUsage, gpu_metrics


def test_utilisation_is_that_of_all_ranks_against_their_peak() -> None:
    ranks = [GpuUsage("NVIDIA H200", 10**9, 2**30, 3 * 2**30), GpuUsage("NVIDIA H200", 10**9, 2**31, 2**31)]
    metrics = gpu_metrics(ranks, tokens=32_000.0, seconds=0.5)
    assert metrics["perf/mfu"] == pytest.approx(6e9 * 32_000 / 0.5 / (2 * 989e12))
    assert metrics["perf/gpu_memory_allocated"] == 2.0 and metrics["perf/gpu_memory_reserved"] == 3.0


def test_a_model_with_experts_or_beside_a_critic_has_no_utilisation() -> None:
    assert "perf/mfu" not in gpu_metrics([GpuUsage("NVIDIA H200", None, 1, 1)], 1.0, 1.0)


def test_a_card_without_a_known_peak_has_no_utilisation() -> None:
    assert set(gpu_metrics([GpuUsage("another", 1, 1, 1)], 1.0, 1.0)) == {
        "perf/gpu_memory_allocated",
        "perf/gpu_memory_reserved",
    }
