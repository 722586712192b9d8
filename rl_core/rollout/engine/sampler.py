"""Draws tokens from logits: temperature, top-k, top-p, and one uniform number per token from its request's seed."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_core.errors import TrainingError
from rl_core.rollout.engine.protocol import Sampling

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""Increment of SplitMix64: 2^64 divided by the golden ratio, odd."""


def uniforms(seeds: list[int], positions: list[int]) -> Tensor:
    """A uniform number in [0, 1) [B] float64 for each token, from the seed of its request and its position in the turn.

    SplitMix64 (Steele, Lea and Flood 2014): a hash of a counter, so no request has a state that others could change.
    """
    streams_B = _mixed(np.array(seeds, np.uint64) * GOLDEN + GOLDEN)
    bits_B = _mixed(streams_B + np.array(positions, np.uint64) * GOLDEN)
    return torch.from_numpy((bits_B >> np.uint64(11)) * 2.0**-53)


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(logits_BV: Tensor, samplings: list[Sampling], uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] drawn by inverting each row's cumulative distribution at its uniform number, and their log-probs [B]
    in the distribution drawn from; temperature 0 takes the most likely token, with its log-prob at temperature 1."""
    device = logits_BV.device
    temperature_B = torch.tensor([each.temperature or 1.0 for each in samplings], device=device)
    logits_BV = logits_BV.float() / temperature_B[:, None]
    if any(each.temperature and (each.top_p < 1 or each.top_k) for each in samplings):
        logits_BV = restricted(logits_BV, samplings)
    highest_B = logits_BV.amax(-1, keepdim=True)
    weight_BV = (logits_BV - highest_B).exp()
    cumulative_BV = weight_BV.cumsum(-1, dtype=torch.float64)
    total_B = cumulative_BV[:, -1:]
    if not total_B.isfinite().all():
        raise TrainingError("the rollout engine's logits are not finite")
    # The first token whose cumulative weight exceeds the number; it has a positive weight itself.
    token_B = torch.searchsorted(cumulative_BV, uniform_B.to(device)[:, None] * total_B, right=True)
    if any(not each.temperature for each in samplings):
        greedy_B = torch.tensor([not each.temperature for each in samplings], device=device)
        token_B = torch.where(greedy_B[:, None], logits_BV.argmax(-1, keepdim=True), token_B)
    log_prob_B = logits_BV.gather(1, token_B) - highest_B - total_B.log().float()
    return token_B.squeeze(1), log_prob_B.squeeze(1)


def restricted(logits_BV: Tensor, samplings: list[Sampling]) -> Tensor:
    """Logits with −inf for tokens outside each row's top-k, and outside the smallest set of its most likely tokens that
    holds a probability of top-p; greedy rows are unchanged."""
    device, size = logits_BV.device, logits_BV.shape[1]
    random = [each.temperature > 0 for each in samplings]
    counts = [each.top_k if drawn and each.top_k else size for each, drawn in zip(samplings, random, strict=True)]
    top_p_B = torch.tensor([each.top_p if drawn else 1.0 for each, drawn in zip(samplings, random, strict=True)])
    count_B = torch.tensor(counts, device=device).clamp(max=size)
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    place_V = torch.arange(size, device=device)
    sorted_BV = sorted_BV.masked_fill(place_V >= count_B[:, None], -torch.inf)
    probability_BV = sorted_BV.softmax(-1, dtype=torch.float64)
    before_BV = probability_BV.cumsum(-1) - probability_BV
    top_p_B1 = top_p_B.to(device, torch.float64)[:, None]
    outside_BV = (before_BV >= top_p_B1) & (top_p_B1 < 1) & (place_V > 0)
    return torch.empty_like(logits_BV).scatter_(1, order_BV, sorted_BV.masked_fill(outside_BV, -torch.inf))
