"""Whether a Ray cluster can be reached; imports nothing of Ray, which takes a moment."""

import socket

CONNECT_S = 5.0


def cluster_problem(address: str) -> str | None:
    """Error of connecting to a cluster's address HOST:PORT; None on success and for other forms of address."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return None
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        return str(error)
    return None
