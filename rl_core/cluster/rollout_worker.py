"""Worker process of the rollout pool."""

import asyncio
import os
from pathlib import Path
from typing import Any

import ray

from rl_core.cluster.base_worker import Worker, sampling_of, start_responders, start_scoring
from rl_core.cluster.dispatch import Dispatch, register
from rl_core.data.protocol import DataProto
from rl_core.models.load import stop_tokens
from rl_core.rollout.agent.agent_loop import roll_out
from rl_core.rollout.engine.factory import build_engine
from rl_core.rollout.engine.protocol import RolloutEngine
from rl_core.rollout.weights.transfer import NcclBroadcast, unpack


class RolloutWorker(Worker):
    """A rank of one rollout engine; everything runs in one event loop, so weights change only between decoding steps.

    Rank 0 returns results; the other ranks follow its steps.
    """

    engine: RolloutEngine
    link: NcclBroadcast | None = None

    @register(Dispatch.ONE_TO_ALL)
    async def init_model(self, path: str) -> None:
        """Builds the engine from the checkpoint at `path`; an existing one is kept and gets new weights by a push."""
        config = self.config
        self.stop_token_ids = stop_tokens(Path(path))
        if "engine" not in self.__dict__:
            self.engine = build_engine(Path(path), config, self.device)
            if not self.engine.is_follower:
                self.responders = await start_responders(config, Path(path))
                self.scoring = await start_scoring(config, Path(path))

    @register(Dispatch.ONE_TO_ALL)
    async def serve(self) -> None:
        """Never returns; ranks other than the first follow its steps."""
        while self.engine.is_follower:
            await self.engine.follow()
        await asyncio.Event().wait()

    @register(Dispatch.RANK_ZERO)
    async def generate_sequences(self, prompts: DataProto, temperature: float) -> DataProto:
        """Responses to the columns `prompt_ids` and `seed`, at a temperature (0: greedy)."""
        sampling = sampling_of(self.config, temperature, self.stop_token_ids)
        return await roll_out(self.engine, prompts, sampling, self.config.agent, self.responders, self.scoring)

    @register(Dispatch.RANK_ZERO)
    def pause(self) -> None:
        """Stops decoding until `resume`."""
        self.engine.pause()

    @register(Dispatch.RANK_ZERO)
    def resume(self) -> None:
        """Continues decoding with the current weights."""
        self.engine.resume()

    @register(Dispatch.ONE_TO_ALL)
    def link_trainer(self, host: str, port: int, first: int, world_size: int) -> None:
        """Joins the NCCL group of actor (rank 0) and all engines; `first` is the group rank of this engine's rank 0."""
        if self.link:
            self.link.close()
        self.link = NcclBroadcast(host, port, first + int(os.environ["RANK"]), world_size, self.device)

    @register(Dispatch.ONE_TO_ALL)
    async def receive_weights(self, version: int, refs: list[ray.ObjectRef[Any]]) -> None:
        """Replaces all weights by those of the actor, received over NCCL or from Ray's object store."""
        buckets = self.link.receive() if self.link else iter(await asyncio.gather(*refs))
        self.engine.update_weights((pair for bucket in buckets for pair in unpack(bucket)), version)

    @register(Dispatch.RANK_ZERO)
    def log_probs(self, token_ids: list[int]) -> list[float]:
        """Log-probs at temperature 1 of the given tokens, starting at the second one."""
        return self.engine.log_probs(token_ids)
