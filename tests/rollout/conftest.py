from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.cluster.resources import WORKER_ENV
from rl_core.config.schema import DataConfig, RolloutConfig, RunConfig
from rl_core.rollout.engine.factory import build_engine
from rl_core.rollout.engine.protocol import RolloutEngine

ENGINES = ("vllm", "transformers")


# An engine lives until the session ends, because vLLM ends the process group with it.
@pytest.fixture(scope="session")
def vllm_engine(tiny_model: Path, process_group: None) -> Iterator[RolloutEngine]:
    """One engine for all tests (importing and starting vLLM takes seconds); it serves what was pushed last."""
    with live_engine(tiny_model, "vllm", 0) as engine:
        yield engine


@pytest.fixture(scope="session")
def vllm_adapter_engine(tiny_model: Path, vllm_engine: RolloutEngine) -> Iterator[RolloutEngine]:
    """An engine that takes adapters."""
    with live_engine(tiny_model, "vllm", 4) as engine:
        yield engine


@pytest.fixture(scope="session")
def transformers_engine(tiny_model: Path) -> Iterator[RolloutEngine]:
    """See `vllm_engine`."""
    with live_engine(tiny_model, "transformers", 0) as engine:
        yield engine


@pytest.fixture(scope="session")
def transformers_adapter_engine(tiny_model: Path) -> Iterator[RolloutEngine]:
    """See `vllm_adapter_engine`."""
    with live_engine(tiny_model, "transformers", 4) as engine:
        yield engine


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Any:
    """Each engine in turn."""
    return request.getfixturevalue(f"{request.param}_engine")


@pytest.fixture(params=ENGINES)
def adapter_engine(request: pytest.FixtureRequest) -> Any:
    """Each engine in turn, taking adapters."""
    return request.getfixturevalue(f"{request.param}_adapter_engine")


@contextmanager
def live_engine(model: Path, name: str, adapter_rank: int) -> Iterator[RolloutEngine]:
    """An engine of sequences of 64 tokens, in this process."""
    rollout = RolloutConfig.model_validate({"engine": name, "kv_cache_gb": 0.0625})
    config = RunConfig(data=DataConfig(max_prompt_length=32, max_response_length=32), rollout=rollout)
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in WORKER_ENV.items():
            patch.setenv(variable, value)
        engine: Any = build_engine(model, config, torch.device("cpu"), adapter_rank)
        yield engine
        if name == "vllm":
            engine._llm.llm_engine.engine_core.shutdown()  # while its process group is still there
