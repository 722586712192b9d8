"""Places for the ranks on the machines of a Ray cluster: what an earlier attempt holds is freed, all pools are shown
to fit, then they are reserved.

Actors and placement groups carry the run's name, so that another attempt finds them from any driver.
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

# Seconds in which processes that were ended must have gone and their resources must be free.
PATIENCE = 20.0
POLL = 0.1


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster: what it has, and what of that nobody holds."""

    node_id: str
    address: str
    total: Resources
    free: Resources

    def describe(self, need: Resources, left: Resources) -> str:
        """What it has or what is left of it, and how much of which resource is short."""
        has = ", ".join(f"{kind} {left.get(kind, 0):g}" for kind in need)
        short = ", ".join(f"{kind} short by {amount:g}" for kind, amount in shortage(need, left).items())
        return f"{self.address} (node {self.node_id[:8]}) has {has}: {short or 'fits'}"


def machines() -> list[Machine]:
    """The live machines by address and id, which is the order of ranks."""
    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    found = [
        Machine(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in alive
    ]
    return sorted(found, key=lambda machine: (natural(machine.address), machine.node_id))


def natural(address: str) -> list[str | int]:
    """Sort key under which numbers within an address count as numbers: 10.0.0.9 comes before 10.0.0.10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", address)]


def shortage(need: Resources, have: Resources) -> dict[str, float]:
    """How much of which resource is missing."""
    return {kind: amount - have.get(kind, 0) for kind, amount in need.items() if have.get(kind, 0) < amount}


def first_short(pools: Sequence[ResourcePool], left: dict[str, Resources]) -> ResourcePool | None:
    """The first pool that the machines' resources, by node id, cannot hold beside those before it.

    What the pools take is taken out of `left`.
    """
    for pool in pools:
        need = pool.bundle()
        fitting = [node for node, have in left.items() if not shortage(need, have)]
        if len(fitting) < pool.nodes:
            return pool
        # The tightest machines first, so that the roomy ones are there for the pools to come.
        for node in sorted(fitting, key=lambda node: [left[node].get(kind, 0) for kind in ("GPU", "CPU")])[
            : pool.nodes
        ]:
            left[node] = {kind: amount - need.get(kind, 0) for kind, amount in left[node].items()}
    return None


def preflight(pools: Sequence[ResourcePool], patience: float = PATIENCE) -> None:
    """Shows that the machines can hold the pools; looks only.

    InputError when they never can, TransientError when others still hold what they need after `patience` seconds. Both
    name each machine and what it is short of.
    """
    found = machines()
    left = {machine.node_id: machine.total for machine in found}
    pool = first_short(pools, left)
    if pool:
        raise InputError(
            _wanted(pool),
            _seen(pool, found, left),
            f"{pool.setting}.nodes and {pool.setting}.ranks_per_node",
            "lower them, or start Ray on more machines and set RAY_ADDRESS",
        )
    start = time.monotonic()
    while True:
        found = machines()
        left = {machine.node_id: machine.free for machine in found}
        pool = first_short(pools, left)
        if pool is None:
            return
        if time.monotonic() - start > patience:
            holders = sorted(table["name"] or "without a name" for table in _live_groups())
            raise TransientError(
                f"the cluster did not free {_wanted(pool)} within {patience:.0f} s: {_seen(pool, found, left)}; "
                f"placement groups there: {', '.join(holders) or 'none'}"
            )
        time.sleep(POLL)


def _wanted(pool: ResourcePool) -> str:
    each = ", ".join(f"{kind} {amount:g}" for kind, amount in pool.bundle().items())
    return f"{pool.nodes} machine(s) with {each} each"


def _seen(pool: ResourcePool, found: list[Machine], left: dict[str, Resources]) -> str:
    lines = [machine.describe(pool.bundle(), left[machine.node_id]) for machine in found]
    return f"{len(found)} machine(s): " + "; ".join(lines)


class Placement:
    """The reserved slots of a pool; worker groups that share them are colocated."""

    def __init__(self, pool: ResourcePool, run: str, deadline: float) -> None:
        """Reserves one bundle a machine; TransientError when the cluster does not give them in time."""
        self.pool, self.namespace = pool, namespace(run)
        strategy = "STRICT_SPREAD" if pool.nodes > 1 else "PACK"
        name = f"{self.namespace} ({pool.setting})"
        self.group = placement_group([pool.bundle()] * pool.nodes, strategy=strategy, name=name)
        if not self.group.wait(timeout_seconds=min(deadline, PATIENCE)):
            raise TransientError(f"the cluster did not give {_wanted(pool)} in time")
        order = {machine.node_id: i for i, machine in enumerate(machines())}
        node_of: dict[int, str] = placement_group_table(self.group)["bundles_to_node_id"]
        # Ray numbers bundles as it likes; ranks follow the machines, so that each attempt has them in the same order.
        self.bundles = sorted(node_of, key=lambda bundle: order[node_of[bundle]])

    def bundle_of(self, slot: int) -> int:
        """The index of the bundle that holds a slot."""
        return self.bundles[slot // self.pool.ranks_per_node]

    def whole(self) -> bool:
        """Whether all its machines are there."""
        state: str = placement_group_table(self.group)["state"]
        return state == "CREATED"


def reserve(pools: Sequence[ResourcePool], run: str, deadline: float) -> list[Placement]:
    """Ends what an earlier attempt of the run left, shows that all pools fit, then reserves them."""
    end_attempts(run)
    preflight(pools)
    return [Placement(pool, run, deadline) for pool in pools]


def namespace(run: str) -> str:
    """What the actors and placement groups of a run are known by in the cluster."""
    return f"rollforward {run}"


def end_attempts(run: str) -> None:
    """Ends all actors and placement groups of the run, whichever driver started them; returns when they are gone.

    TransientError when they do not go, or when Ray does not answer.
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
                raise TransientError(f"an earlier attempt of {run} does not end: {actors or groups}")
            for name in actors:
                with suppress(ValueError):  # gone meanwhile
                    ray.kill(ray.get_actor(name, namespace=mine), no_restart=True)
            for table in groups:
                remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(table["placement_group_id"]))))
            time.sleep(POLL)
    except RayError as error:
        raise TransientError(f"Ray does not answer while an earlier attempt of {run} is ended: {error}") from error


def _live_groups() -> list[dict[str, Any]]:
    return [table for table in placement_group_table().values() if table["state"] != "REMOVED"]
