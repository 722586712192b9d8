"""Estimators of KL(policy ‖ reference) from log-probs of the sampled tokens, and the controller of the KL weight."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


def kl_estimate(log_prob_BR: Tensor, ref_log_prob_BR: Tensor, kind: str) -> Tensor:
    """KL estimate per token [B, R]: k1, abs, k2 or k3 of "Approximating KL divergence" (J. Schulman, 2020).

    With x = log_prob − ref_log_prob: k1 = x; abs = |x|; k2 = x²/2; k3 = e^(−x) − 1 + x, its exponent clamped to ±20 and
    its value to ±10, so that no single token dominates a batch. The suffix `+` keeps the value but uses the gradient of
    k2, which is the gradient of the KL itself.
    """
    if kind.endswith("+"):
        value_BR = kl_estimate(log_prob_BR, ref_log_prob_BR, kind[:-1])
        slope_BR = kl_estimate(log_prob_BR, ref_log_prob_BR, "k2")
        return value_BR.detach() + slope_BR - slope_BR.detach()
    x_BR = log_prob_BR - ref_log_prob_BR
    if kind == "k1":
        return x_BR
    if kind == "abs":
        return x_BR.abs()
    if kind == "k2":
        return 0.5 * x_BR.square()
    if kind == "k3":
        minus_BR = (-x_BR).clamp(-20, 20)
        return (minus_BR.exp() - 1 - minus_BR).clamp(-10, 10)
    raise ValueError(f"unknown KL estimator {kind!r}")


@dataclass
class KLController:
    """The weight β of the KL in the reward; stored in checkpoints.

    `fixed` keeps it constant. `adaptive` adjusts it after each step to bring the KL towards the target (arXiv
    1909.08593, section 2.2): β ← β·(1 + clip(KL/target − 1, ±0.2)·rows/horizon).
    """

    kind: Literal["fixed", "adaptive"]
    coef: float
    target: float
    horizon: float

    def update(self, kl: float, rows: int) -> None:
        """Updates β from the mean KL of a step and its number of responses."""
        if self.kind == "adaptive":
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * rows / self.horizon
