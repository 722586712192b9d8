"""Continuous batching with a transformers model: each step samples one token of every running request."""

import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_core.models.attention import Layout
from rl_core.models.load import is_packed
from rl_core.rollout.engine.kv_cache import COLUMNS, CachedLayout, KeyValueCache
from rl_core.rollout.engine.protocol import Sampling
from rl_core.rollout.engine.request_queue import Request, RequestQueue
from rl_core.rollout.engine.sampler import draw, uniforms

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL_TOKENS = 8192
"""Maximum number of tokens whose keys and values one step computes anew; a longer sequence has a step of its own."""
FEWEST_TOKENS = 8
"""Number of tokens to which a smaller forward is padded: products of fewer rows use other CPU kernels, which round
differently, so a response alone would differ from the same one among others."""
CANARY_STEPS = 2
"""Number of last tokens of `log_probs` that go through the cache, as sampled tokens do."""


@dataclass(eq=False)
class Turn(Request):
    """A request with the tokens sampled so far."""

    sampled_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    limit: int = 0
    """Maximum number of tokens to sample."""

    @property
    def ids(self) -> list[int]:
        """Prompt and sampled tokens."""
        return self.token_ids + self.sampled_ids

    @property
    def length(self) -> int:
        """Number of tokens of prompt and response."""
        return len(self.token_ids) + len(self.sampled_ids)

    @property
    def stopped(self) -> bool:
        """Whether the last token is a stop token."""
        return self.sampled_ids[-1] in self.sampling.stop_token_ids


class Decoder(RequestQueue[Turn]):
    """Requests of a model: row b of the cache belongs to the b-th running turn; the others wait."""

    def __init__(self, model: "PreTrainedModel", max_length: int, max_running: int, cache_bytes: int) -> None:
        """`cache_bytes` limits the cache to as many turns as fit; one always does."""
        super().__init__(max_length)
        self.model, self.max_running, self.cache_bytes = model, max_running, cache_bytes
        # With a state other than keys and values in the layers, every step computes all sequences anew.
        self.cached = is_packed(model)
        self._waiting: deque[Turn] = deque()
        self._running: list[Turn] = []
        self._cache = KeyValueCache()
        self._token_bytes = 0

    async def sample(self, token_ids: list[int], seed: int, sampling: Sampling) -> Turn:
        """Samples one turn; see `RequestQueue.run` for errors."""
        limit = min(sampling.max_tokens, self.max_length - len(token_ids))
        return await self.run(Turn(token_ids, seed, sampling, limit=limit))

    @torch.inference_mode()
    def log_probs(self, token_ids: list[int]) -> list[float]:
        """Log-probs of the tokens at temperature 1, from the second one on; the last ones are computed as sampled
        tokens are. Running turns are unaffected."""
        start = max(len(token_ids) - CANARY_STEPS, 1) if self.cached else len(token_ids)
        cache = KeyValueCache()
        first = torch.arange(start)
        logits_TV = [self._forward(cache, [], [token_ids[:start]], [0], first)]
        for i in range(start, len(token_ids)):
            logits_TV.append(self._forward(cache, [(token_ids[i], i)], [], [], torch.zeros(1, dtype=torch.long)))
        log_prob_TV = torch.cat(logits_TV)[:-1].float().log_softmax(-1)
        label_T = torch.tensor(token_ids[1:], device=log_prob_TV.device)
        found: list[float] = log_prob_TV.gather(1, label_T[:, None]).squeeze(1).tolist()
        return found

    def weights_changed(self, version: int) -> None:
        """Sets the version of the following tokens; running turns compute their keys and values anew."""
        for turn in (*self._running, *self._waiting):  # a waiting turn has tokens if it was sent back
            turn.sampled(len(turn.sampled_ids), self.version)
        self._preempt(0)
        self.version = version

    def release_cache(self) -> None:
        """Frees the cache; running turns compute their keys and values anew."""
        self._preempt(0)
        self._cache = KeyValueCache()

    def _submit(self, request: Turn) -> None:
        self._waiting.append(request)

    def _abort(self, request: Turn) -> None:
        if request in self._running:
            self._remove(self._running.index(request))
        else:
            self._waiting.remove(request)

    def _reset(self) -> None:
        self._running, self._cache = [], KeyValueCache()
        self._waiting.clear()

    def _preempt(self, kept: int) -> None:
        """Sends all but the first turns back to the front of the queue."""
        self._waiting.extendleft(reversed(self._running[kept:]))
        del self._running[kept:]

    def _remove(self, row: int) -> None:
        """Ends a turn; the last one takes its row."""
        last = self._running.pop()
        if row < len(self._running):
            self._running[row] = last
            self._cache.move(len(self._running), row)

    @torch.inference_mode()
    def _step(self) -> None:
        if not self.cached:
            self._preempt(0)
        self._preempt(self._capacity(self._longest()))
        continued = [(turn.sampled_ids[-1], turn.length - 1) for turn in self._running]
        admitted = self._admitted()
        # Equal sequences, such as the prompts of a group, are computed once.
        sequences: dict[tuple[int, ...], int] = {}
        source = [sequences.setdefault(tuple(turn.ids), len(sequences)) for turn in admitted]
        lengths = torch.tensor([len(ids) for ids in sequences], dtype=torch.long)
        last = (lengths.cumsum(0) - 1)[source] + len(continued) if admitted else lengths
        target = torch.cat([torch.arange(len(continued)), last])
        self._running += admitted
        logits_BV = self._forward(self._cache, continued, [list(ids) for ids in sequences], source, target)
        uniform_B = uniforms([turn.seed for turn in self._running], [len(turn.sampled_ids) for turn in self._running])
        token_B, log_prob_B = draw(logits_BV, [turn.sampling for turn in self._running], uniform_B)
        for turn, token, log_prob in zip(self._running, token_B.tolist(), log_prob_B.tolist(), strict=True):
            turn.sampled_ids.append(token)
            turn.log_probs.append(log_prob)
        for row in reversed(range(len(self._running))):
            turn = self._running[row]
            if turn.stopped or len(turn.sampled_ids) == turn.limit:
                turn.sampled(len(turn.sampled_ids), self.version)
                self._remove(row)
                self._finish(turn)

    def _longest(self) -> int:
        return max((turn.length for turn in self._running), default=0)

    def _capacity(self, columns: int) -> int:
        """Number of turns whose cache fits if the longest has this many tokens; 1 until a token's size is known."""
        row = -(-columns // COLUMNS) * COLUMNS * self._token_bytes
        fitting = max(self.cache_bytes // row, 1) if row else 1
        return min(self.max_running, fitting) if self.cached else self.max_running

    def _admitted(self) -> list[Turn]:
        """Takes turns from the queue, in order, as far as rows and tokens allow."""
        admitted: list[Turn] = []
        if not self._waiting:
            return admitted
        longest = max(self._longest(), self._waiting[0].length)
        capacity = self._capacity(longest)
        # Wait until a good part of the rows is free: a prefill for each would cost as much as a step.
        if capacity - len(self._running) < min(len(self._waiting), math.ceil(capacity / 8)):
            return admitted
        distinct: set[tuple[int, ...]] = set()
        tokens = 0
        while self._waiting:
            turn = self._waiting[0]
            ids = tuple(turn.ids)
            longest, tokens = max(longest, turn.length), tokens + len(ids) * (ids not in distinct)
            count = len(self._running) + len(admitted)
            if count >= self._capacity(longest) or (tokens > PREFILL_TOKENS and admitted):
                break
            distinct.add(ids)
            admitted.append(self._waiting.popleft())
        return admitted

    def _forward(
        self,
        cache: KeyValueCache,
        continued: list[tuple[int, int]],
        sequences: list[list[int]],
        source: list[int],
        target_B: Tensor,
    ) -> Tensor:
        """Logits [B, V] after the tokens `target_B` of one row.

        The row has one token (id, position) of each of the cache's first rows, then whole sequences; the following rows
        of the cache get the sequences `source`.
        """
        device = self.model.device
        if len(continued) + sum(map(len, sequences)) < FEWEST_TOKENS:
            sequences = [*sequences, [0] * FEWEST_TOKENS]
        count, target_B = len(target_B), F.pad(target_B, (0, max(FEWEST_TOKENS - len(target_B), 0)))
        lengths = [len(ids) for ids in sequences]
        ids = [token for token, _ in continued] + [token for ids in sequences for token in ids]
        positions = [position for _, position in continued] + [i for length in lengths for i in range(length)]
        id_T, position_T = torch.tensor([ids, positions], device=device)
        fresh = Layout(lengths, device) if sequences else None
        if not self.cached:
            assert fresh is not None
            logits_BLV = self.model(input_ids=fresh.pad(id_T), use_cache=False).logits
            return fresh.unpad(logits_BLV)[target_B[:count].to(device)]
        layout = self._layout(cache, position_T, len(continued), lengths, source, fresh)
        output = self.model(
            input_ids=id_T[None],
            position_ids=position_T[None],
            layout=layout,
            use_cache=False,
            logits_to_keep=target_B.to(device),
        )
        self._token_bytes = cache.bytes_per_token
        logits_BV: Tensor = output.logits[0, :count]
        return logits_BV

    def _layout(
        self,
        cache: KeyValueCache,
        position_T: Tensor,
        count: int,
        lengths: list[int],
        source: list[int],
        fresh: Layout | None,
    ) -> CachedLayout:
        position_N = position_T[:count]
        longest = int(position_N.max()) + 1 if count else 0
        cache.reserve(count, count + len(source), max([longest, *lengths]))
        if fresh is None:
            row_N = torch.arange(count, device=position_T.device)
            return CachedLayout(cache, position_N, row_N, position_N, None, fresh)
        starts = list(itertools.accumulate(lengths, initial=count))
        tokens, rows = list(range(count)), list(range(count))
        for row, k in enumerate(source, count):
            tokens += range(starts[k], starts[k + 1])
            rows += [row] * lengths[k]
        tokens_W, rows_W = torch.tensor([tokens, rows], device=position_T.device)
        return CachedLayout(cache, position_N, rows_W, position_T[tokens_W], tokens_W, fresh)
