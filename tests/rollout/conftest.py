from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from rl_core.cluster.resources import WORKER_ENV
from rl_core.config.schema import RolloutConfig

if TYPE_CHECKING:
    from rl_core.rollout.vllm import VLLMEngine


@pytest.fixture(scope="session")
def vllm_engine(tiny_model: Path, process_group: None) -> Iterator["VLLMEngine"]:
    """One engine for all tests (importing and starting it takes half a minute); it serves what was pushed last."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in WORKER_ENV.items():
            patch.setenv(name, value)
        from rl_core.rollout.vllm import VLLMEngine

        engine = VLLMEngine(tiny_model, RolloutConfig(kv_cache_gb=0.0625), "float32", 64, torch.device("cpu"))
        yield engine
        engine._llm.llm_engine.engine_core.shutdown()  # while its process group is still there
