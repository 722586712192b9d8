"""What a page of another site, or another user of the machine, sends to the servers; and the ports that are open."""

import ipaddress
import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import psutil

from flows.server.prefect_api import basic_login

EVIL = "http://evil.example"


def answer(url: str, headers: Mapping[str, str], body: Any = None, method: str | None = None) -> int:
    """The status of the answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as opened:
            return int(opened.status)
    except urllib.error.HTTPError as error:
        return error.code


def attacks(secret: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Headers of requests that no server may answer."""
    login = {"Authorization": basic_login(secret)}
    browser = {"Origin": EVIL, "Sec-Fetch-Site": "cross-site", "Referer": f"{EVIL}/", "User-Agent": "Mozilla/5.0"}
    yield "no secret", {}
    yield "wrong secret", {"Authorization": basic_login(secret[::-1])}
    yield "a page of another site", browser
    yield "a page of another site, in a browser that is logged in", browser | login
    yield "a page of another port", {"Origin": "http://127.0.0.1:1"} | login
    yield "a name that another site gave this machine", {"Host": "evil.example"} | login


def listening(processes: Iterable[psutil.Process]) -> dict[tuple[str, int], str]:
    """Addresses and ports on which the processes and their children listen, with the process."""
    found: dict[tuple[str, int], str] = {}
    for process in {member for root in processes for member in family(root)}:
        with suppress(psutil.Error):
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN or (one.type.name == "SOCK_DGRAM" and not one.raddr):
                    found[one.laddr.ip, one.laddr.port] = " ".join(process.cmdline())[:120]
    return found


def family(root: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return [root, *root.children(recursive=True)]
    return []


def is_loopback(address: str) -> bool:
    one = ipaddress.ip_address(address)
    return (getattr(one, "ipv4_mapped", None) or one).is_loopback
