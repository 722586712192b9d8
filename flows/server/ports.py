"""Checks that a port is free."""

import socket

from rl_core.errors import InputError


def check_port(port: int, option: str = "--port") -> None:
    """Raises InputError if the port is invalid or in use on this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OverflowError as error:
            raise InputError(
                expected="a port", seen=str(port), where=f"{option} {port}", fix="choose one from 1 to 65535"
            ) from error
        except OSError as error:
            raise InputError(
                expected="a free port",
                seen=f"{port}: {error.strerror}",
                where=f"{option} {port}",
                fix=f"try {option} {port + 1}",
            ) from error
