"""ASGI middleware in front of the servers: the secret is required, and other hosts and pages are refused."""

import base64
import hmac
import os
from typing import Any
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_CHALLENGE = {"WWW-Authenticate": 'Basic realm="rollforward", charset="UTF-8"'}
"""With it a browser asks for user and password, and sends them with each further request to this address."""


class Guard:
    """Answers requests of its own pages, and of programs.

    A page of another site that a browser sends to a server of this machine names that site in `Origin` or, after a
    change of its DNS entry, in `Host`.
    """

    def __init__(self, app: ASGIApp, secret: str | None, hosts: frozenset[str] | None = LOOPBACK) -> None:
        """`secret` is the password of any user, or the bearer token; with None the app checks it.

        `hosts` are the names under which the server is reached; None accepts all. Raises ValueError for an empty
        secret.
        """
        if secret == "":
            raise ValueError("the secret is empty")
        self._app, self._hosts = app, hosts
        self._secret = None if secret is None else secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 403 for another host or origin and 401 without the secret, and otherwise calls the app."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not self._own_page(headers):
            refusal = PlainTextResponse("requests of another host or origin are refused", 403)
        elif not self._knows_secret(headers):
            refusal = PlainTextResponse("the secret of the home folder is required", 401, _CHALLENGE)
        else:
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # the server answers the handshake with 403
        else:
            await refusal(scope, receive, send)

    def _own_page(self, headers: Headers) -> bool:
        try:
            (host,) = (_address(f"//{value}") for value in headers.getlist("host"))
            origins = [_address(value) for value in headers.getlist("origin")]
        except ValueError:
            return False
        if self._hosts is not None and host[0] not in self._hosts:
            return False
        # A page of `localhost` may use the API of 127.0.0.1.
        return all(port == host[1] and (name == host[0] or {name, host[0]} <= LOOPBACK) for name, port in origins)

    def _knows_secret(self, headers: Headers) -> bool:
        if self._secret is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        token = given.strip().encode()
        if scheme.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).rpartition(b":")[2]
            except ValueError:
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(token, self._secret)


class KeyGuard(Guard):
    """Guard of all paths of vLLM's server, whose own check of its key covers only some; vLLM constructs it."""

    def __init__(self, app: ASGIApp) -> None:
        """Reads the key from VLLM_API_KEY."""
        super().__init__(app, os.environ["VLLM_API_KEY"], hosts=None)


def _address(url: str) -> tuple[str | None, int | None]:
    """Host name and port; raises ValueError for anything else than an address."""
    parts: SplitResult | Any = urlsplit(url)
    if not parts.hostname or parts.path or parts.query or parts.username:
        raise ValueError(url)
    return parts.hostname, parts.port
