from pathlib import Path

from benchmarks import data
from rl_core.storage.store import Store


def test_drawing_prompts_from_many_rows_takes_no_more_memory_than_from_few(tmp_path: Path) -> None:
    peaks = []
    for rows in (20_000, 400_000):
        folder = tmp_path / str(rows)
        data.write_rows(Store(str(folder)), rows)
        peaks.append(data.measure(str(folder), batches=40)["peak_mb"])  # of rows from nearly all parts of the files
    assert abs(peaks[1] - peaks[0]) < 40, peaks
