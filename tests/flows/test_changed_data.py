"""A run whose source files have changed goes on only when it is told what to do."""

import json
from pathlib import Path

from support_flows import SMALL, rollforward

from rl_core.data.rows import make_row

SHORT = [*SMALL, "warm_start.steps=0", "trainer.steps=1", "trainer.segment_steps=1", "data.val_rows=4"]


def write(path: Path, numbers: range) -> None:
    rows = [make_row("exact", " ".join(str(i)), "copy", str(i), str(i), "train", i) for i in numbers]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_changed_files_stop_a_resumed_run_unless_it_keeps_its_data(tmp_path: Path) -> None:
    home = tmp_path / "home"  # the demo's model has its versions from the demo alone
    train, held_out = tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"
    write(train, range(100, 140))
    write(held_out, range(200, 208))
    command = ["run", "demo", "--run", "changed", *SHORT, "data.source=files", f"data.path={train}"]
    command += [f"data.val_path={held_out}"]
    first = rollforward(home, *command)
    assert first.code == 0, first.output
    write(train, range(100, 150))
    refused = rollforward(home, *command)
    assert refused.code == 2 and "train.jsonl: " in refused.output and "--keep-data" in refused.output
    kept = rollforward(home, *command, "--keep-data")
    assert kept.code == 0, kept.output
    alone = rollforward(home, "run", "demo", "--keep-data")
    assert alone.code == 2 and "--run NAME" in alone.output
