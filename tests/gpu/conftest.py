from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from rl_core.training.mesh import RankMesh, make_rank_mesh


@pytest.fixture(scope="session")
def gpu() -> Iterator[RankMesh]:
    """The mesh of a single rank on a GPU; vLLM finds the rank through the environment."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**rank, "MASTER_PORT": str(store.port), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
            patch.setenv(name, value)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
        yield make_rank_mesh(torch.device("cuda", 0), 1, 1, 1)
        if dist.is_initialized():  # vLLM ends it with its engine
            dist.destroy_process_group()
