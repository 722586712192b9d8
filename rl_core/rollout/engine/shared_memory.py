"""Location and file names of weights in shared memory."""

from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
VLLM_PATTERN = "*cpushm*"
"""Shared-memory segments of vLLM's multi-rank CPU engines."""
ADAPTER_PREFIX = "rollforward-adapter-"
"""Name prefix of temporary folders with adapters for the engine."""
