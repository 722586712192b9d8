"""Measures memory and time of drawing prompts from large prepared data.

    python -m benchmarks.data [ROWS=10000]

Writes ROWS prepared training rows into a temporary folder, then draws 200 batches of 64 prompts in a separate process.
Prints its peak memory minus that of the imports, the milliseconds per batch, and the size on disk.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rl_core.data.dataset import RLHFDataset
from rl_core.data.loader import StatefulLoader
from rl_core.data.store import GROUP_ROWS, PART_ROWS, SCHEMA, part_name, part_writer
from rl_core.models.tiny import build_tokenizer
from rl_core.storage import run_files
from rl_core.storage.store import Store

BATCHES, BATCH = 200, 64
QUESTION = "a problem of a few lines with some numbers in it and a question at its end " * 3


def write_rows(store: Store, rows: int) -> None:
    """Commits `rows` generated rows, one part at a time and without a Python object per row."""
    for number, start in enumerate(range(0, rows, PART_ROWS)):
        index = pa.array(np.arange(start, min(start + PART_ROWS, rows))).cast(pa.string())
        columns: dict[str, object] = {
            "data_source": _texts('"exact"', index, ""),
            "prompt": _texts(f'[{{"role": "user", "content": "{QUESTION}', index, '"}]'),
            "ability": _texts('"math"', index, ""),
            "reward_model": _texts('{"style": "rule", "ground_truth": "', index, '"}'),
            "extra_info": _texts('{"split": "train", "index": ', index, "}"),
            "more": pa.nulls(len(index), pa.string()),
            "prompt_tokens": pa.array(np.full(len(index), len(QUESTION), dtype=np.int32)),
        }
        file = Path(store.url, part_name("train", number))
        file.parent.mkdir(parents=True, exist_ok=True)
        with part_writer(file) as part:
            part.write_table(pa.table(columns, SCHEMA), GROUP_ROWS)
    source = {"source": "files", "train_rows": rows, "weight": 1.0}
    store.commit_folder("data", {"sources": [source], "train_rows": rows, "data_hash": "made"})


def _texts(before: str, index: pa.StringArray, after: str) -> pa.StringArray:
    """One text per row with the row's number between `before` and `after`; only `before` if `after` is empty."""
    if not after:
        return pa.repeat(before, len(index))
    return pc.binary_join_element_wise(before, index, after, "")


def draw(url: str, batches: int) -> dict[str, float]:
    """Draws the batches in this process; returns `peak_mb` (above the memory at the start) and `ms` per batch."""
    store, tokenizer = Store(url), build_tokenizer()
    manifest = store.read_manifest(run_files.DATA)
    assert manifest is not None
    before, start = _memory("VmRSS"), time.perf_counter()
    rows = RLHFDataset.load(store, "train", tokenizer)
    loader = StatefulLoader(rows.sizes, BATCH, 0, manifest["meta"]["data_hash"])
    for _ in range(batches):
        indices = loader.next()
        assert [rows[i]["extra_info"]["index"] for i in indices] == indices
    return {"peak_mb": _memory("VmHWM") - before, "ms": 1000 * (time.perf_counter() - start) / batches}


def measure(url: str, batches: int = BATCHES) -> dict[str, float]:
    """Runs `draw` in a new process and returns its result."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.data", "--draw", url, str(batches)],
        cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _memory(name: str) -> float:
    """A field of this process's `/proc` status in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(f"{name}:"))


def main(rows: int) -> None:
    """Measures and prints one line."""
    with tempfile.TemporaryDirectory(prefix="rfdata") as folder:
        start = time.perf_counter()
        write_rows(Store(folder), rows)
        seconds = time.perf_counter() - start
        disk = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        found = measure(folder)
    print(
        f"{rows:,} rows, {disk / 1e6:,.1f} MB on disk, written in {seconds:.0f} s: {found['peak_mb']:.1f} MB above the "
        f"imports, {found['ms']:.1f} ms per batch of {BATCH}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--draw"]:
        print(json.dumps(draw(sys.argv[2], int(sys.argv[3]))))
    else:
        main(*map(int, sys.argv[1:2] or (10_000,)))
