"""Profile of a rank during a step: a trace of torch's profiler and, on CUDA, a snapshot of its memory."""

import gzip
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from rl_core.storage.store import Store


class Profile:
    """A profile of this process, from its creation until `write`."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._profiler = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self.on_gpu])
        if self.on_gpu:
            torch.cuda.memory._record_memory_history()
        self._profiler.start()

    def stop(self) -> None:
        """Ends the profile."""
        self._profiler.stop()
        if self.on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)

    def write(self, store: Store, name: str) -> None:
        """Ends the profile and writes `name`.json.gz, and on CUDA `name`.pickle, into the store."""
        with tempfile.TemporaryDirectory() as folder:
            trace, memory = Path(folder, "trace.json"), Path(folder, "memory.pickle")
            if self.on_gpu:
                torch.cuda.memory._dump_snapshot(str(memory))
                store.write_bytes(f"{name}.pickle", memory.read_bytes())
            self.stop()
            self._profiler.export_chrome_trace(str(trace))
            store.write_bytes(f"{name}.json.gz", gzip.compress(trace.read_bytes(), 1))
