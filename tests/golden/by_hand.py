"""Values of the formulas that the reference implementation does not give, in plain Python's double precision.

Uses nothing of the library: gdpo, dro (arXiv 2405.19107), clip_cov (arXiv 2505.22617), and the gradients of the KL
estimates (J. Schulman, "Approximating KL divergence", 2020).

Usage: python tests/golden/by_hand.py > tests/golden/by_hand.json
"""

import json
import math
import random
import statistics
from typing import Any

Rows = list[list[float]]
UIDS = ["a", "a", "a", "b", "b", "b", "c"]
WIDTH = 5


def inputs() -> dict[str, Any]:
    draw = random.Random(0)
    mask = [[1.0, 1.0, 0.0, 1.0, 1.0], *([1.0] * k + [0.0] * (WIDTH - k) for k in (5, 3, 4, 1, 0, 5))]
    old = [[-3 * draw.random() for _ in range(WIDTH)] for _ in UIDS]
    log_prob = [[x + draw.gauss(0, 0.4) for x in row] for row in old]
    ref = [[x + draw.gauss(0, 0.4) for x in row] for row in log_prob]
    # Beyond the clamps of k3: a value above 10, and an exponent above 20 with either sign.
    ref[0][0], ref[0][1], ref[1][0] = log_prob[0][0] + 3, log_prob[0][1] - 25, log_prob[1][0] + 25
    return {
        "uid": UIDS,
        "response_mask": mask,
        "old_log_prob": old,
        "log_prob": log_prob,
        "ref_log_prob": ref,
        "advantages": [[draw.gauss(0, 1) for _ in range(WIDTH)] for _ in UIDS],
        "selected": [[float((WIDTH * i + t) % 4 == 0) for t in range(WIDTH)] for i in range(len(UIDS))],
        # The rewards of group b do not differ in `right`; those of c, a single response, cannot.
        "named": {
            "right": [1, 0, 0, 1, 1, 1, 1],
            "short": [0.1, 0.5, 0.2, -3, 4, 0.5, 2],
            "more": [0, 9, 3, 1, 2, 4, 5],
        },
        "reward_weights": {"short": 0.5, "more": -2.0},
    }


def each_token(function: Any, *columns: Rows) -> Any:
    return [[function(*values) for values in zip(*rows, strict=True)] for rows in zip(*columns, strict=True)]


def kl(kind: str, log_prob: float, ref: float) -> tuple[float, float]:
    """Value and derivative with respect to `log_prob`."""
    x = log_prob - ref
    if kind.endswith("+"):
        return kl(kind[:-1], log_prob, ref)[0], x
    if kind == "k1":
        return x, 1.0
    if kind == "abs":
        return abs(x), math.copysign(1.0, x)
    if kind == "k2":
        return x * x / 2, x
    y = min(max(-x, -20.0), 20.0)
    value = math.exp(y) - 1 - y
    return min(value, 10.0), 0.0 if abs(x) > 20 or value > 10 else 1 - math.exp(-x)


def dro(log_prob: float, old: float, advantage: float, beta: float) -> tuple[float, float]:
    ratio = log_prob - old
    return -(advantage * log_prob - beta / 2 * ratio**2), -(advantage - beta * ratio)


def clip_cov(log_prob: float, old: float, advantage: float, selected: float) -> tuple[float, float]:
    if selected:
        return 0.0, 0.0
    ratio = math.exp(log_prob - old)
    plain, clipped = -advantage * ratio, -advantage * min(max(ratio, 0.8), 1.28)
    return max(plain, clipped), 0.0 if clipped > plain else -advantage * ratio


def gdpo(x: dict[str, Any]) -> Rows:
    mask, weights = x["response_mask"], x["reward_weights"]
    groups = {uid: [i for i, other in enumerate(UIDS) if other == uid] for uid in UIDS}
    total, has_spread = [0.0] * len(UIDS), [False] * len(UIDS)
    for name, reward in x["named"].items():
        for members in groups.values():
            values = [reward[i] for i in members]
            if len(values) < 2 or max(values) == min(values):
                continue
            mean, deviation = statistics.fmean(values), statistics.stdev(values)
            for i in members:
                total[i] += weights.get(name, 1.0) * (reward[i] - mean) / (deviation + 1e-6)
                has_spread[i] = True
    tokens = [total[i] for i in range(len(UIDS)) for t in range(WIDTH) if mask[i][t]]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    white = [(value - mean) / math.sqrt(variance + 1e-8) if spread else 0.0
             for value, spread in zip(total, has_spread, strict=True)]  # fmt: skip
    return [[value * on for on in row] for value, row in zip(white, mask, strict=True)]


def golden() -> dict[str, Any]:
    x = inputs()
    kinds = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")
    estimates = {kind: each_token(lambda *pair, kind=kind: kl(kind, *pair), x["log_prob"], x["ref_log_prob"])
                 for kind in kinds}  # fmt: skip
    dros = each_token(
        lambda lp, old, advantage: dro(lp, old, advantage, 0.3), x["log_prob"], x["old_log_prob"], x["advantages"]
    )
    clips = each_token(clip_cov, x["log_prob"], x["old_log_prob"], x["advantages"], x["selected"])

    def parts(pairs: list[list[tuple[float, float]]]) -> dict[str, Rows]:
        return {
            "value": [[v for v, _ in row] for row in pairs],
            "grad_log_prob": [[g for _, g in row] for row in pairs],
        }

    return {
        "inputs": x,
        "kl": {kind: parts(pairs) for kind, pairs in estimates.items()},
        "policy_loss": {"dro": parts(dros), "clip_cov": parts(clips)},
        "settings": {"dro_beta": 0.3, "clip_low": 0.2, "clip_high": 0.28},
        "gdpo": gdpo(x),
    }


if __name__ == "__main__":
    print(json.dumps(golden()))
