"""Where the ports of a run listen: at the address of their machine, which is the loopback address on a single one."""

import os
import socket

import psutil
import ray
import torch.distributed as dist


def node_address() -> str:
    """This machine's address in the Ray cluster."""
    return str(ray.util.get_node_ip_address())


def restrict_collectives(host: str) -> None:
    """Makes gloo, NCCL and vLLM use the network interface with the address `host`, unless variables name another."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # `=`: not a prefix of names
    os.environ.setdefault("VLLM_HOST_IP", host)


def open_store(host: str) -> dist.TCPStore:
    """A rendezvous store on a free port of the address `host`; by itself it would listen on all addresses."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
