"""Log-probs, entropies and Σπ² of tokens from hidden states, with one chunk of logits in memory at a time.

With z = f(logits) / temperature, p = softmax(z) and lse = log Σ exp z: log p(y) = z_y − lse, entropy H = lse − Σ p·z.
Here f(l) = cap · tanh(scale · l / cap) is the family's transform of its head's output (`LogitTransform`). The gradients
are ∂ log p(y) / ∂z = 1[y] − p and ∂H / ∂z = −p · (z − lse + H). The backward pass recomputes the logits from the hidden
states, so only three numbers per token are stored between the passes instead of a vocabulary row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOGIT_CHUNK = 2048
"""Tokens per chunk of logits: [2048, vocabulary] instead of [tokens, vocabulary]."""


@dataclass(frozen=True)
class LogitTransform:
    """A family's transform of its head's output: multiplied by `scale`, then capped to ±`cap` by a tanh (0: not)."""

    scale: float = 1.0
    cap: float = 0.0

    def __call__(self, logits_NV: Tensor) -> Tensor:
        """The transformed logits [N, V]."""
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        return torch.tanh(logits_NV / self.cap) * self.cap if self.cap else logits_NV

    def gradient(self, transformed_NV: Tensor, of_transformed_NV: Tensor) -> Tensor:
        """Gradient of the head's output, from the transformed logits and their gradient."""
        if self.cap:
            of_transformed_NV = of_transformed_NV * (1.0 - (transformed_NV / self.cap).square())
        return of_transformed_NV * self.scale if self.scale != 1.0 else of_transformed_NV


IDENTITY = LogitTransform()

Statistics = tuple[Tensor, Tensor, Tensor, Tensor]


def token_statistics(
    logits_NV: Tensor, label_N: Tensor, scale: float, transform: LogitTransform = IDENTITY
) -> Statistics:
    """Log-prob of the label, entropy, Σπ² and log Σ exp of softmax(f(logits) · scale), each [N] float32."""
    z_NV = transform(logits_NV.float()) * scale
    # Written so that a compiler can fuse all sums into one pass; logsumexp and then probabilities would take two.
    highest_N = z_NV.amax(-1)
    z_NV = z_NV - highest_N[:, None]
    exp_NV = z_NV.exp()
    sum_N = exp_NV.sum(-1)
    log_sum_N = sum_N.log()
    log_prob_N = z_NV.gather(1, label_N[:, None]).squeeze(1) - log_sum_N
    entropy_N = log_sum_N - (exp_NV * z_NV).sum(-1) / sum_N
    return log_prob_N, entropy_N, exp_NV.square().sum(-1) / sum_N.square(), highest_N + log_sum_N


def logit_gradient(
    logits_NV: Tensor,
    label_N: Tensor,
    scale: float,
    lse_N: Tensor,
    entropy_N: Tensor,
    of_log_prob: Tensor,
    of_entropy: Tensor,
    transform: LogitTransform = IDENTITY,
) -> Tensor:
    """Gradient [N, V] of the logits, in their dtype, from the gradients of log-prob and entropy [N]."""
    transformed_NV = transform(logits_NV.float())
    z_NV = transformed_NV * scale - lse_N[:, None]
    p_NV = z_NV.exp()
    one_NV = torch.arange(z_NV.shape[1], device=z_NV.device) == label_N[:, None]
    through_log_prob_NV = of_log_prob[:, None] * (one_NV.float() - p_NV)
    through_entropy_NV = of_entropy[:, None] * p_NV * (z_NV + entropy_N[:, None])
    of_transformed_NV = (through_log_prob_NV - through_entropy_NV) * scale
    return transform.gradient(transformed_NV, of_transformed_NV).to(logits_NV.dtype)


def _logits(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    return hidden_ND @ weight_VD.T if bias_V is None else torch.addmm(bias_V, hidden_ND, weight_VD.T)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        label_N: Tensor,
        scale: float,
        transform: LogitTransform,
        statistics: Callable[..., Statistics],
        gradient: Callable[..., Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = [
            statistics(_logits(hidden, weight_VD, bias_V), label, scale, transform)
            for hidden, label in zip(hidden_ND.split(LOGIT_CHUNK), label_N.split(LOGIT_CHUNK), strict=True)
        ]
        log_prob_N, entropy_N, square_N, lse_N = (torch.cat(each) for each in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, label_N, lse_N, entropy_N)
        ctx.scale, ctx.transform, ctx.gradient = scale, transform, gradient
        ctx.mark_non_differentiable(square_N)
        return log_prob_N, entropy_N, square_N

    @staticmethod
    def backward(ctx: Any, of_log_prob: Tensor, of_entropy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, *per_token = ctx.saved_tensors
        label_N, lse_N, entropy_N = per_token
        of_hidden_ND = torch.empty_like(hidden_ND)
        # Accumulate over chunks in float32: in bfloat16, later chunks would be lost to rounding.
        of_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        of_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for start in range(0, len(hidden_ND), LOGIT_CHUNK):
            chunk = slice(start, start + LOGIT_CHUNK)
            hidden = hidden_ND[chunk]
            of_logits_NV = ctx.gradient(
                _logits(hidden, weight_VD, bias_V),
                label_N[chunk],
                ctx.scale,
                lse_N[chunk],
                entropy_N[chunk],
                of_log_prob[chunk],
                of_entropy[chunk],
                ctx.transform,
            )
            of_hidden_ND[chunk] = of_logits_NV @ weight_VD
            if of_weight_VD is not None:
                _add_product(of_weight_VD, of_logits_NV.T, hidden)
            if of_bias_V is not None:
                of_bias_V += of_logits_NV.sum(0, dtype=torch.float32)
        if of_weight_VD is not None:
            of_weight_VD = of_weight_VD.to(weight_VD.dtype)
        if of_bias_V is not None:
            of_bias_V = of_bias_V.to(bias_V.dtype)
        return of_hidden_ND, of_weight_VD, of_bias_V, None, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a · b to a float32 total; on CUDA, products of lower-precision inputs are accumulated without rounding."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


class ChunkedLogProbs:
    """Chunked log-probs, optionally with the element-wise parts of each pass compiled into one kernel."""

    def __init__(self, compiled: bool) -> None:
        self._statistics: Any = torch.compile(token_statistics) if compiled else token_statistics
        self._gradient: Any = torch.compile(logit_gradient) if compiled else logit_gradient

    def __call__(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        label_N: Tensor,
        temperature: float,
        bias_V: Tensor | None = None,
        transform: LogitTransform = IDENTITY,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob of each label, entropy and Σπ² (no gradient), each [N] float32."""
        result: tuple[Tensor, Tensor, Tensor] = _ChunkedLogProbs.apply(
            hidden_ND, weight_VD, bias_V, label_N, 1.0 / temperature, transform, self._statistics, self._gradient
        )
        return result
