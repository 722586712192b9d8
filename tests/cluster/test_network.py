"""Ports of a process group are open at the address of the node, not at all addresses of the machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from rl_core.cluster.network import open_store, restrict_collectives

LISTENING = """
import os, psutil, torch, torch.distributed as dist
from rl_core.cluster.network import open_store, restrict_collectives
restrict_collectives("127.0.0.1")
dist.init_process_group("gloo", store=open_store("127.0.0.1"), rank=0, world_size=1)
dist.new_group(backend="gloo")
dist.all_reduce(torch.ones(2))
print({c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"})
"""


def test_a_store_serves_other_ranks() -> None:
    store = open_store("127.0.0.1")
    dist.TCPStore("127.0.0.1", store.port, is_master=False).set("name", "value")
    assert store.get("name") == b"value"


def test_store_and_collectives_of_one_machine_listen_on_the_loopback_address() -> None:
    env = {name: value for name, value in os.environ.items() if not name.endswith("SOCKET_IFNAME")}
    done = subprocess.run(
        [sys.executable, "-c", LISTENING], env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert done.stdout.strip() == "{'127.0.0.1'}", done.stderr


def test_the_interface_of_an_address_is_used_unless_a_variable_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    restrict_collectives("127.0.0.1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "ib0")
    assert os.environ["VLLM_HOST_IP"] == "127.0.0.1"
