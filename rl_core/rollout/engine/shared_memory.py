"""Where weights pass between processes of one machine, and how what lies there is called."""

from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
VLLM_PATTERN = "*cpushm*"
"""vLLM's segments of engines of several ranks on a CPU."""
ADAPTER_PREFIX = "rollforward-adapter-"
"""Folders of adapters on their way into the engine."""
