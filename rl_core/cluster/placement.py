"""Placement of the ranks on the machines of a Ray cluster: frees resources of earlier attempts, checks that all pools
fit, then reserves them.

Actors and placement groups carry the run's name, so that a later attempt can find them from any driver.
"""

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from rl_core.cluster.resources import ResourcePool
from rl_core.errors import InputError, TransientError

Resources = Mapping[str, float]

PATIENCE = 20.0
"""Seconds that killed processes may take to release their resources."""
POLL = 0.1


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster with its total and its free resources."""

    node_id: str
    address: str
    total: Resources
    free: Resources

    def describe(self, need: Resources, left: Resources) -> str:
        """Describes the resources in `left`, and how much of each is missing for `need`."""
        has = ", ".join(f"{kind} {left.get(kind, 0):g}" for kind in need)
        short = ", ".join(f"{kind} short by {amount:g}" for kind, amount in shortage(need, left).items())
        return f"{self.address} (node {self.node_id[:8]}) has {has}: {short or 'fits'}"


def machines() -> list[Machine]:
    """Live machines, sorted by address and id; ranks follow this order."""
    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    found = [
        Machine(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in alive
    ]
    return sorted(found, key=lambda machine: (natural(machine.address), machine.node_id))


def natural(address: str) -> list[str | int]:
    """Sort key that compares numbers in an address numerically: 10.0.0.9 comes before 10.0.0.10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", address)]


def shortage(need: Resources, have: Resources) -> dict[str, float]:
    """Missing amount of each resource that is short."""
    return {kind: amount - have.get(kind, 0) for kind, amount in need.items() if have.get(kind, 0) < amount}


def first_short(pools: Sequence[ResourcePool], left: dict[str, Resources]) -> ResourcePool | None:
    """The first pool that does not fit into the resources `left` (by node id) after the pools before it.

    Subtracts the resources of the fitting pools from `left`.
    """
    for pool in pools:
        need = pool.bundle()
        fitting = [node for node, have in left.items() if not shortage(need, have)]
        if len(fitting) < pool.nodes:
            return pool
        # Use the machines with the least free resources first, to keep the others for the remaining pools.
        for node in sorted(fitting, key=lambda node: [left[node].get(kind, 0) for kind in ("GPU", "CPU")])[
            : pool.nodes
        ]:
            left[node] = {kind: amount - need.get(kind, 0) for kind, amount in left[node].items()}
    return None


def preflight(pools: Sequence[ResourcePool], patience: float = PATIENCE) -> None:
    """Checks that the machines can hold the pools; reserves nothing.

    Raises InputError if they never can, TransientError if the resources are still in use after `patience` seconds. Both
    list each machine and its missing resources.
    """
    found = machines()
    left = {machine.node_id: machine.total for machine in found}
    pool = first_short(pools, left)
    if pool:
        raise InputError(
            _requested(pool),
            _offered(pool, found, left),
            f"{pool.setting}.nodes and {pool.setting}.ranks_per_node",
            "lower them, or add machines to the Ray cluster and set RAY_ADDRESS",
        )
    start = time.monotonic()
    while True:
        found = machines()
        left = {machine.node_id: machine.free for machine in found}
        pool = first_short(pools, left)
        if pool is None:
            return
        if time.monotonic() - start > patience:
            holders = sorted(table["name"] or "unnamed" for table in _live_groups())
            raise TransientError(
                f"the cluster did not free {_requested(pool)} within {patience:.0f} s: {_offered(pool, found, left)}; "
                f"placement groups in use: {', '.join(holders) or 'none'}"
            )
        time.sleep(POLL)


def _requested(pool: ResourcePool) -> str:
    each = ", ".join(f"{kind} {amount:g}" for kind, amount in pool.bundle().items())
    return f"{pool.nodes} machine(s) with {each} each"


def _offered(pool: ResourcePool, found: list[Machine], left: dict[str, Resources]) -> str:
    lines = [machine.describe(pool.bundle(), left[machine.node_id]) for machine in found]
    return f"{len(found)} machine(s): " + "; ".join(lines)


class Placement:
    """The reserved slots of a pool; worker groups that share them are colocated."""

    def __init__(self, pool: ResourcePool, run: str, deadline: float) -> None:
        """Reserves one bundle per machine; raises TransientError if the cluster does not grant them in time."""
        self.pool, self.namespace = pool, namespace(run)
        strategy = "STRICT_SPREAD" if pool.nodes > 1 else "PACK"
        name = f"{self.namespace} ({pool.setting})"
        self.group = placement_group([pool.bundle()] * pool.nodes, strategy=strategy, name=name)
        timeout_s = min(deadline, PATIENCE)
        if not self.group.wait(timeout_seconds=timeout_s):
            raise TransientError(f"the cluster did not reserve {_requested(pool)} within {timeout_s:g} s")
        order = {machine.node_id: i for i, machine in enumerate(machines())}
        node_of: dict[int, str] = placement_group_table(self.group)["bundles_to_node_id"]
        # Ray orders bundles arbitrarily; sorting them by machine gives every attempt the same order of ranks.
        self.bundles = sorted(node_of, key=lambda bundle: order[node_of[bundle]])

    def bundle_of(self, slot: int) -> int:
        """Index of the bundle that contains a slot."""
        return self.bundles[slot // self.pool.ranks_per_node]

    def whole(self) -> bool:
        """Whether all machines of the placement are alive."""
        state: str = placement_group_table(self.group)["state"]
        return state == "CREATED"


def reserve(pools: Sequence[ResourcePool], run: str, deadline: float) -> list[Placement]:
    """Ends earlier attempts of the run, checks that all pools fit, then reserves them."""
    end_attempts(run)
    preflight(pools)
    return [Placement(pool, run, deadline) for pool in pools]


def namespace(run: str) -> str:
    """Namespace of a run's actors and name prefix of its placement groups in the cluster."""
    return f"rollforward {run}"


def end_attempts(run: str) -> None:
    """Kills all actors and placement groups of the run, whichever driver started them; returns once they are gone.

    Raises TransientError if they do not disappear within PATIENCE seconds or if Ray does not respond.
    """
    mine, start = namespace(run), time.monotonic()
    try:
        while True:
            named = ray.util.list_named_actors(all_namespaces=True)
            actors = [actor["name"] for actor in named if actor["namespace"] == mine]
            groups = [table for table in _live_groups() if table["name"].rpartition(" (")[0] == mine]
            if not actors and not groups:
                return
            if time.monotonic() - start > PATIENCE:
                raise TransientError(
                    f"an earlier attempt of {run} is still alive after {PATIENCE:.0f} s: {actors or groups}"
                )
            for name in actors:
                with suppress(ValueError):  # already gone
                    ray.kill(ray.get_actor(name, namespace=mine), no_restart=True)
            for table in groups:
                remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(table["placement_group_id"]))))
            time.sleep(POLL)
    except RayError as error:
        raise TransientError(f"Ray does not respond while ending an earlier attempt of {run}: {error}") from error


def _live_groups() -> list[dict[str, Any]]:
    return [table for table in placement_group_table().values() if table["state"] != "REMOVED"]
