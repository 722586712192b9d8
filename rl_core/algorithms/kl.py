"""Estimators of KL(policy ‖ reference) per token from log-probs of the sampled tokens."""

from torch import Tensor


def kl_estimate(log_prob_BR: Tensor, ref_log_prob_BR: Tensor, kind: str) -> Tensor:
    """k1, k2 or k3 of the note "Approximating KL divergence" (J. Schulman, 2020), per token [B, R].

    With x = log_prob − ref_log_prob: k1 = x; k2 = x²/2; k3 = e^(−x) − 1 + x, its exponent held within ±20 and its
    value within ±10, so that one token cannot dominate a batch.
    """
    x_BR = log_prob_BR - ref_log_prob_BR
    if kind == "k1":
        return x_BR
    if kind == "k2":
        return 0.5 * x_BR.square()
    if kind == "k3":
        minus_BR = (-x_BR).clamp(-20, 20)
        return (minus_BR.exp() - 1 - minus_BR).clamp(-10, 10)
    raise ValueError(f"unknown KL estimator {kind!r}")
