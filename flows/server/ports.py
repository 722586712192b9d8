"""Whether a port is free."""

import socket

from rl_core.errors import InputError


def check_port(port: int, option: str = "--port") -> None:
    """InputError when something listens on the port of this machine already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OverflowError as error:
            raise InputError("a port", str(port), f"{option} {port}", "give one from 1 to 65535") from error
        except OSError as error:
            raise InputError(
                "a free port", f"{port}: {error.strerror}", f"{option} {port}", f"try {option} {port + 1}"
            ) from error
