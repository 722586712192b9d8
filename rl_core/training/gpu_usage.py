"""Memory and utilisation of the GPUs in training."""

from dataclasses import dataclass

import torch
from torch import nn

from rl_core.data.protocol import Metrics

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 peak in FLOP/s of a card whose name contains the key, from the vendor's data sheets."""


@dataclass(frozen=True)
class GpuUsage:
    """A rank's card, the parameters of its whole model (None if they do not tell the FLOPs
    of an update), and its peaks of GPU memory since the last call in bytes."""

    card: str
    parameters: int | None
    allocated: int
    reserved: int


def gpu_usage(model: nn.Module, device: torch.device, dense: bool) -> GpuUsage:
    """The usage of this rank's GPU; the peaks start again. In an update of a `dense` model every token uses every
    parameter, and no other model is trained."""
    parameters = sum(parameter.numel() for parameter in model.parameters()) if dense else None
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return GpuUsage(torch.cuda.get_device_name(device), parameters, *peaks)


def gpu_metrics(ranks: list[GpuUsage], tokens: float, seconds: float) -> Metrics:
    """`perf/gpu_memory_…` of the rank with most, in GiB, and for a known card `perf/mfu` of an update of that many
    tokens: 6 FLOPs per parameter and token, over the peak of all ranks."""
    metrics = {
        "perf/gpu_memory_allocated": max(rank.allocated for rank in ranks) / 2**30,
        "perf/gpu_memory_reserved": max(rank.reserved for rank in ranks) / 2**30,
    }
    peak = next((flops for card, flops in PEAKS.items() if card in ranks[0].card), None)
    if peak is not None and (parameters := ranks[0].parameters) is not None:
        metrics["perf/mfu"] = 6 * parameters * tokens / max(seconds, 1e-9) / (len(ranks) * peak)
    return metrics
