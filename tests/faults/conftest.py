"""Storage that can be disturbed: an S3 server behind a proxy, and a small file system of its own."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_proxy import Proxy, proxy_to
from support_servers import empty_bucket

from rl_core.storage.store import Store

URL = "s3://runs/team/one"


@pytest.fixture
def direct(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store as it is, past the proxy."""
    empty_bucket(s3_endpoint, monkeypatch)
    store = Store(URL)
    assert store.listdir() == []  # now it is connected
    return store


@pytest.fixture
def proxy(direct: Store, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxy_to(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.fixture
def store(proxy: Proxy) -> Store:
    """The store behind the proxy."""
    return Store(URL)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
