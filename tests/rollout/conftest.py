from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from rl_core.cluster.resources import WORKER_ENV
from rl_core.config.schema import RolloutConfig

if TYPE_CHECKING:
    from rl_core.rollout.engine.vllm_engine import VLLMEngine


@pytest.fixture(scope="session")
def vllm_engine(tiny_model: Path, process_group: None) -> Iterator["VLLMEngine"]:
    """One engine for all tests (importing and starting it takes half a minute); it serves what was pushed last."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in WORKER_ENV.items():
            patch.setenv(name, value)
        yield from live_engine(tiny_model, 0)


@pytest.fixture(scope="session")
def adapter_engine(tiny_model: Path, vllm_engine: "VLLMEngine") -> Iterator["VLLMEngine"]:
    """An engine that takes adapters; after the other one, which sets the environment."""
    yield from live_engine(tiny_model, 4)


def live_engine(model: Path, adapter_rank: int) -> Iterator["VLLMEngine"]:
    from rl_core.rollout.engine.vllm_engine import VLLMEngine

    settings = RolloutConfig(kv_cache_gb=0.0625)
    engine = VLLMEngine(model, settings, "float32", 64, torch.device("cpu"), adapter_rank)
    yield engine
    engine._llm.llm_engine.engine_core.shutdown()  # while its process group is still there
