"""Device, sharding mesh and sequence-parallel group of a rank.

Consecutive ranks are close to each other (on one machine): sequence parallelism uses the closest ranks, then sharding;
replicas of the weights are farthest apart.
"""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl_core.models.sequence_parallel import SequenceParallel


@dataclass(frozen=True)
class RankMesh:
    """`mesh` has the dimension `shard`, preceded by `replicate` if groups of ranks hold one copy each (HybridShard);
    `parallel` is set if several ranks share each sequence."""

    device: torch.device
    mesh: DeviceMesh
    parallel: SequenceParallel | None


def make_rank_mesh(device: torch.device, world_size: int, shard_size: int, sequence_parallel_size: int) -> RankMesh:
    """RankMesh of this rank; collective over all ranks of the process group. The sizes divide `world_size`."""
    if shard_size == world_size:
        mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    else:
        shape = (world_size // shard_size, shard_size)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    if sequence_parallel_size == 1:
        return RankMesh(device, mesh, None)
    shape = (world_size // sequence_parallel_size, sequence_parallel_size)
    sequences = init_device_mesh(device.type, shape, mesh_dim_names=("data", "sequence"))
    return RankMesh(device, mesh, SequenceParallel(sequences["sequence"].get_group()))
