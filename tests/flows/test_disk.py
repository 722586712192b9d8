"""A run whose disk fills up stops and says so; the same command ends it when there is room, damaged or not."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_flows import COMMAND, SMALL, Result, environment, rollforward

RUN = ["run", "demo", "--run", "small", *SMALL]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of its own."""
    folder = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Leaves no room on the disk."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return filler


@pytest.fixture(scope="module")
def filled(disk: Path, home: Path) -> Result:
    """The small run, on a disk that is full from step 2 on."""
    process = subprocess.Popen(
        [COMMAND, *RUN, f"storage.root={disk}"],
        env=environment(home.with_name("disk home")),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = ""
    assert process.stdout is not None
    for line in process.stdout:
        output += line
        if "step 2/6" in line:
            fill(disk)
    return Result(process.wait(), output, 0.0)


def test_a_disk_that_fills_up_ends_the_run_with_a_fix(disk: Path, filled: Result) -> None:
    assert filled.code == 2, filled.output
    assert "No space left" in filled.output and "free space there and run the same command again" in filled.output
    assert str(disk / "small") in filled.output and "Traceback" not in filled.output
    committed = list((disk / "small/checkpoints").glob("*/manifest.json"))
    assert committed, "nothing is left of what was committed"


def test_it_goes_on_when_there_is_room_and_makes_again_what_is_damaged(
    disk: Path, home: Path, small: Result, filled: Result
) -> None:
    (disk / "filler").unlink()
    run = disk / "small"
    newest = max((run / "checkpoints").glob("*/manifest.json")).parent
    shard = next(newest.rglob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    part, model = run / "data/train/part_00000.parquet", run / "warm_start/model.safetensors"
    part.write_bytes(part.read_bytes()[:-5])
    model.unlink()
    done = rollforward(home.with_name("disk home"), *RUN, f"storage.root={disk}")
    assert done.code == 0, done.output
    for words in (
        f"{newest} is damaged and is skipped: {shard.relative_to(newest)}: wrong checksum",
        f"{run}/data is damaged and will be rebuilt: train/part_00000.parquet: wrong size",
        f"{run}/warm_start is damaged and will be rebuilt: model.safetensors: missing",
    ):
        assert words in done.output
        assert words in (run / "report.html").read_text()
    wanted, seen = (
        {file["path"]: file["sha256"] for file in json.loads((folder / "manifest.json").read_text())["files"]}
        for folder in (home / "runs/small/export/step_000006", run / "export/step_000006")
    )
    assert small.code == 0 and seen.keys() == wanted.keys()
    assert [name for name in seen if seen[name] != wanted[name]] in ([], ["README.md"])  # which names the MLflow run
