"""Single files of a folder or of a prefix of an object store, each written whole or not at all, in bounded time."""

import copy
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from fsspec.asyn import sync
from fsspec.implementations.local import LocalFileSystem

from rl_core.credentials import CREDENTIALS_FIX, holds_credentials, without_credentials
from rl_core.errors import InputError, TransientError
from rl_core.storage.filesystem import RemoteFile, make_folder, open_filesystem, replacing, storage_errors, sync_path
from rl_core.storage.run_files import MANIFEST

TIMEOUT_S = 60.0
"""Longest wait for a request to a remote store, with the client's own retries of it."""
SLOWEST = 1 << 20
"""Bytes per second that a large file goes over the network at least; slower counts as hanging."""


class Files:
    """A folder (path) or a prefix of an object store (`s3://bucket/prefix`, `memory://…`).

    Every `rel` is a path inside it with `/` as separator; the empty one is the root. Credentials come from the
    environment only, and a pickled store is its URL and deadline. All methods raise `InputError` for what a person must
    change (permissions, credentials, a `rel` that leaves the root) and `TransientError` for what a retry may cure, such
    as no answer of a remote store within its deadline; reading what is not there raises `FileNotFoundError`.
    """

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        """Open the store without touching it; a relative path is made absolute."""
        if holds_credentials(url):
            raise InputError("a URL without credentials", "one with some", without_credentials(url), CREDENTIALS_FIX)
        try:
            self.fs, self.root = open_filesystem(url)
        except (ValueError, ImportError) as error:
            raise InputError(
                expected="a folder, or a URL of a file system that is installed, such as s3://bucket/prefix",
                seen=f"{url!r} ({error})",
                where="storage.root",
                fix="correct the URL; for s3:// install the extra: pip install 'rollforward[s3]'",
            ) from None
        self.timeout_s = timeout_s
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.root = self.root.rstrip("/") or "/"
        self.url = self._url()
        self._guard: Callable[[], None] = _unguarded

    def _url(self) -> str:
        return self.root if self.is_local else str(self.fs.unstrip_protocol(self.root))

    def __reduce__(self) -> tuple[type[Self], tuple[str, float]]:
        return type(self), (self.url, self.timeout_s)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _path(self, rel: str) -> str:
        """Full path of `rel`; names come from configs, so anything that could leave the root is refused."""
        parts = rel.split("/") if rel else []
        if any(part in ("", ".", "..") for part in parts) or set(rel) & set("*?[\0"):
            raise InputError(
                expected="a path inside the store: names joined by /, without . or .. parts and none of * ? [",
                seen=repr(rel),
                where=self.url,
                fix="choose a plain name",
            )
        return "/".join([self.root.rstrip("/"), *parts]) if parts else self.root

    def child(self, rel: str) -> Self:
        """The store whose root is `rel`."""
        made = copy.copy(self)
        made.root = self._path(rel)
        made.url = made._url()
        return made

    def guarded(self, guard: Callable[[], None]) -> Self:
        """The same store that calls `guard` before it writes or removes anything; what that raises prevents it.

        Its children are guarded too, what is pickled is not.
        """
        made = copy.copy(self)
        made._guard = guard
        return made

    def __copy__(self) -> Self:
        made = type(self).__new__(type(self))
        vars(made).update(vars(self))
        return made

    def _call(self, method: str, *args: Any, size: int = 0, **options: Any) -> Any:
        """A method of the file system; remote ones have a deadline, which `size` bytes that go over the wire extend."""
        if not self.fs.async_impl:
            return getattr(self.fs, method)(*args, **options)
        deadline = self.timeout_s + size / SLOWEST
        try:
            return sync(self.fs.loop, getattr(self.fs, f"_{method}"), *args, timeout=deadline, **options)
        except TimeoutError as error:
            raise TimeoutError(f"{method}: no answer within {deadline:.0f} s") from error

    def local_path(self, rel: str = "") -> Path | None:
        """Path of `rel` on this machine, or None when the store is remote."""
        path = self._path(rel)
        return Path(path) if self.is_local else None

    def write_bytes(self, rel: str, data: bytes) -> None:
        """Write a file whole or not at all; when this returns, a power cut does not lose it."""
        path = self._path(rel)
        self._guard()
        with storage_errors(path, writing=True):
            if self.is_local:
                with replacing(Path(path)) as file:
                    file.write(data)
            else:
                self._call("pipe_file", path, data, size=len(data))

    def create_bytes(self, rel: str, data: bytes) -> bool:
        """Write a file that is not there yet; False when it is. Of several that try at once one succeeds."""
        path = self._path(rel)
        with storage_errors(path, writing=True):
            try:
                if self.is_local:
                    make_folder(Path(path).parent)
                    with open(path, "xb") as file, _whole(path):
                        file.write(data)
                        file.flush()
                        os.fsync(file.fileno())
                else:
                    self._call("pipe_file", path, data, size=len(data), mode="create")
            except FileExistsError:
                # What a client that lost the answer tried again is there as well.
                return self.read_bytes(rel) == data
        # Some servers know no condition and let the last one win.
        return self.read_bytes(rel) == data

    def read_bytes(self, rel: str) -> bytes:
        """Content of a file."""
        path = self._path(rel)
        with storage_errors(path):
            return bytes(self._call("cat_file", path))

    def open(self, rel: str) -> BinaryIO:
        """A file to read parts of; of a remote one only what is asked for is fetched."""
        path = self._path(rel)
        with storage_errors(path):
            if not self.fs.async_impl:
                return cast(BinaryIO, self.fs.open(path, "rb", cache_type="none"))
            size = int(self._call("info", path)["size"])
        return cast(BinaryIO, RemoteFile(lambda start, end: self._range(path, start, end), size))

    def _range(self, path: str, start: int, end: int) -> bytes:
        return bytes(self._call("cat_file", path, start=start, end=end, size=end - start))

    def write_json(self, rel: str, value: Any) -> None:
        """Write a value as JSON, whole or not at all."""
        self.write_bytes(rel, json.dumps(value, indent=1, ensure_ascii=False).encode())

    def read_json(self, rel: str) -> Any:
        """Value of a JSON file; a file that is not JSON is an `InputError`."""
        try:
            return json.loads(self.read_bytes(rel))
        except ValueError as error:
            raise InputError(
                expected="a JSON file", seen=str(error), where=self._path(rel), fix="restore the file or remove it"
            ) from None

    def _size(self, rel: str) -> int | None:
        """Size of a file or folder, None when it is not there."""
        path = self._path(rel)
        # Not fs.exists: it answers False when the storage fails, and good checkpoints would then count as uncommitted.
        with suppress(FileNotFoundError), storage_errors(path):
            return int(self._call("info", path)["size"])
        return None

    def exists(self, rel: str) -> bool:
        """Whether a file or folder is there."""
        return self._size(rel) is not None

    def listdir(self, rel: str = "") -> list[str]:
        """Sorted names of the files and folders directly under `rel`; empty when it is not there."""
        path = self._path(rel)
        with suppress(FileNotFoundError), storage_errors(path):
            listed = [entry["name"].rstrip("/") for entry in self._call("ls", path, detail=True)]
            return sorted(name.rpartition("/")[2] for name in listed if name.rpartition("/")[0] == path.rstrip("/"))
        return []

    def remove(self, rel: str) -> None:
        """Remove a file or a folder with all its content; missing is fine.

        The manifest goes first, so that a folder is never read when the removal is cut short.
        """
        path = self._path(rel)
        self._guard()
        with suppress(FileNotFoundError), storage_errors(path):
            if self.is_local:
                with suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(f"{path}/{MANIFEST}")
                    sync_path(Path(path))
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
                return
            manifest = f"{path}/{MANIFEST}"
            with suppress(FileNotFoundError):
                self._call("rm_file", manifest)  # also where a stale listing does not show it
            # By rm_file: rm takes [ and * in names for patterns, and removes a bucket when the root is one.
            for name in sorted(self._call("find", path)):
                if name != manifest:
                    self._call("rm_file", name)

    def check_writable(self) -> None:
        """Write, read and remove a small file; `InputError` says what to change when that fails."""
        probe, data = f".probe-{uuid.uuid4().hex}", b"rollforward"
        try:
            self.write_bytes(probe, data)
            seen = self.read_bytes(probe)
            self.remove(probe)
        except (TransientError, FileNotFoundError, ValueError) as error:
            raise InputError(
                expected="storage that can be written, read and removed",
                seen=str(error),
                where=self.url,
                fix="check the URL, that its server runs and is reachable (AWS_ENDPOINT_URL for S3), and the network",
            ) from error
        if seen != data:
            raise InputError(
                expected=f"{data!r}, which was just written",
                seen=repr(seen),
                where=self.url,
                fix="use storage where a read sees the last write",
            )

    def _files(self, rel: str) -> dict[str, int]:
        """Path under `rel` and size of every file, sorted by path."""
        path = self._path(rel)
        prefix = f"{path.rstrip('/')}/"
        with suppress(FileNotFoundError), storage_errors(path):
            found = self._call("find", path, detail=True)
            return {name[len(prefix) :]: found[name]["size"] for name in sorted(found) if name.startswith(prefix)}
        return {}


@contextmanager
def _whole(path: str) -> Iterator[None]:
    """Leaves no file behind that the body could not write."""
    try:
        yield
    except BaseException:
        os.unlink(path)
        raise


def _unguarded() -> None:
    """Nothing speaks against writing."""


def join(rel: str, name: str) -> str:
    """The path of `name` in the folder `rel`."""
    return f"{rel}/{name}" if rel else name
