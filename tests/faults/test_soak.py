"""What the soak says of made-up measurements."""

from dataclasses import replace

import pytest

from benchmarks.soak import MEMORY, STEP_TIME, Sample, Soak, Usage, judge, name_of, table

MIB = 1 << 20
STEPS = 400
DRIVER, WORKER = 7, 8


def measured(
    memory: float = 0.0,
    files: float = 0.0,
    segments: float = 0.0,
    kept: float = 0.0,
    seconds: float = 0.0,
    cpu: float = 0.0,
) -> Soak:
    """A run whose driver and folders grow by these shares over its steps, but for a warm-up where all do."""

    def grown(begin: int, by: float, step: int) -> int:
        return round(begin * (1 + by * step / STEPS)) if step > 40 else round(begin * step / 80)

    samples = [
        Sample(
            step,
            {
                DRIVER: Usage(
                    "rollforward",
                    step * (1 + cpu * step / STEPS),
                    grown(200 * MIB, memory, step),
                    10,
                    grown(100, files, step),
                    5,
                ),
                WORKER: Usage("worker", step, 500 * MIB + step % 3 * MIB // 4, 20, 50, 5),
            },
            grown(10, segments, step),
            10 * MIB,
            grown(100, kept, step),
        )
        for step in range(10, STEPS + 1, 10)
    ]
    return Soak(STEPS, samples, [0.1 * (1 + seconds * step / STEPS) for step in range(STEPS)])


def grew(soak: Soak) -> list[str]:
    return [row.name for row in judge(soak) if row.grew]


def test_a_flat_run_with_a_warm_up_passes() -> None:
    assert grew(measured()) == []
    assert grew(measured(memory=-0.3, seconds=-0.5)) == []


@pytest.mark.parametrize(
    ("leak", "name"),
    [
        ({"memory": 2 * MEMORY}, "rollforward: memory"), ({"files": 0.1}, "rollforward: files"),
        ({"segments": 0.5}, "segments"), ({"kept": 0.1}, "kept files"), ({"seconds": 2 * STEP_TIME}, "step time"),
        ({"cpu": 0.2}, "CPU of a step"),
    ],
)  # fmt: skip
def test_each_growth_is_found_by_name(leak: dict[str, float], name: str) -> None:
    soak = measured(**leak)
    assert grew(soak) == [name]
    assert f"| {name} |" in table(judge(soak)) and table(judge(soak)).count("GREW") == 1


def test_processes_that_are_started_again_and_again_are_found() -> None:
    soak = measured()
    more = [
        replace(sample, processes=sample.processes | {100 + i: Usage("scorer", 0, MIB, 1, 1, 0) for i in range(number)})
        for number, sample in enumerate(soak.samples)
    ]
    assert grew(replace(soak, samples=more)) == ["processes"]


def test_a_process_that_came_or_went_is_not_compared() -> None:
    soak = measured()
    late = soak.samples[-3:]
    short = [replace(s, processes=s.processes | {9: Usage("short", 0, s.step * MIB, 1, 1, 0)}) for s in late]
    assert not [row for row in judge(replace(soak, samples=[*soak.samples[:-3], *short])) if "short" in row.name]


def test_a_process_that_one_sample_lacks_is_compared_all_the_same() -> None:
    soak = measured(memory=2 * MEMORY)
    lost = soak.samples[-2]
    gaps = [*soak.samples[:-2], replace(lost, processes={WORKER: lost.processes[WORKER]}), soak.samples[-1]]
    assert "rollforward: memory" in grew(replace(soak, samples=gaps))


@pytest.mark.parametrize(("more", "found"), [(2, []), (3, ["worker: threads"])])
def test_a_pool_of_threads_may_fill_late(more: int, found: list[str]) -> None:
    soak = measured()
    late = [
        replace(s, processes={**s.processes, WORKER: replace(s.processes[WORKER], threads=20 + more)})
        for s in soak.samples[len(soak.samples) // 2 :]
    ]
    assert grew(replace(soak, samples=[*soak.samples[: len(soak.samples) // 2], *late])) == found


def test_processes_have_names_that_stay() -> None:
    for line, name in (
        ("ray::update_actor", "worker"),
        ("ray::IDLE", "ray IDLE"),
        ("/site-packages/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "ray raylet"),
        ("/venv/bin/python /venv/bin/rollforward run demo", "rollforward"),
        ("/usr/bin/python -m uvicorn --app-dir x prefect.server.api.server:create_app", "prefect server"),
    ):
        assert name_of(line.split(" ")) == name
