"""Atomic reads and writes of files in a folder or under an object-store prefix, with a timeout on every request."""

import copy
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from fsspec.asyn import sync
from fsspec.implementations.local import LocalFileSystem

from rl_core.credentials import CREDENTIALS_FIX, holds_credentials, without_credentials
from rl_core.errors import InputError, TransientError
from rl_core.storage.filesystem import RemoteFile, make_folder, open_filesystem, remove_local, replacing, storage_errors
from rl_core.storage.manifest import parse_json
from rl_core.storage.run_files import MANIFEST

TIMEOUT_S = 60.0
"""Default timeout of a request to a remote store, including the client's retries."""
SLOWEST = 1 << 20
"""Minimum transfer rate of large files in bytes per second; slower transfers time out."""


class Files:
    """A folder (path) or a prefix of an object store (`s3://bucket/prefix`, `memory://…`).

    Every `rel` is a path inside it with `/` as separator; the empty path is the root. Credentials come from the
    environment only; a pickled store consists of its URL, timeout and guard. All methods raise `InputError` for errors
    that the user must fix (permissions, credentials, a `rel` outside the root) and `TransientError` for errors that a
    retry may resolve, such as a timeout of a remote store; reading a missing file raises `FileNotFoundError`.
    """

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        """Open the store without accessing it; a relative path is made absolute."""
        if holds_credentials(url):
            raise InputError(
                expected="a URL without credentials",
                seen="a URL that contains credentials",
                where=without_credentials(url),
                fix=CREDENTIALS_FIX,
            )
        try:
            self.fs, self.root = open_filesystem(url)
        except (ValueError, ImportError) as error:
            raise InputError(
                expected="a folder, or a URL of an installed file system, such as s3://bucket/prefix",
                seen=f"{url!r} ({error})",
                where="storage.root",
                fix="correct the URL; for s3:// install the extra: pip install 'rollforward[s3]'",
            ) from None
        self.timeout_s = timeout_s
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.root = self.root.rstrip("/") or "/"
        self.url = self._url()
        self._guard: Callable[[], None] = _unguarded
        self.holder = 0
        """Number of the lease under which this store is written, part of the names of shards; 0 without a lease."""

    def _url(self) -> str:
        return self.root if self.is_local else str(self.fs.unstrip_protocol(self.root))

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (type(self), self.url, self.timeout_s, self._guard, self.holder)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _path(self, rel: str) -> str:
        """Full path of `rel`; names come from configs, so any path that could leave the root is rejected."""
        parts = rel.split("/") if rel else []
        if any(part in ("", ".", "..") for part in parts) or set(rel) & set("*?[\0"):
            raise InputError(
                expected="a path inside the store: names joined by /, without . or .. parts and without * ? [",
                seen=repr(rel),
                where=self.url,
                fix="choose a plain name",
            )
        return "/".join([self.root.rstrip("/"), *parts]) if parts else self.root

    def child(self, rel: str) -> Self:
        """The store whose root is `rel`."""
        child = copy.copy(self)
        child.root = self._path(rel)
        child.url = child._url()
        return child

    def guarded(self, guard: Callable[[], None], holder: int = 0) -> Self:
        """The same store, but calling `guard` before each file is written or removed, which its exception prevents.

        Children and pickled copies are guarded too. `holder` is the number of the lease that `guard` checks.
        """
        guarded = copy.copy(self)
        guarded._guard, guarded.holder = guard, holder
        return guarded

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def _call(self, method: str, *args: Any, size: int = 0, **options: Any) -> Any:
        """Calls a method of the file system; remote ones get a timeout, extended by the transfer of `size` bytes."""
        if not self.fs.async_impl:
            return getattr(self.fs, method)(*args, **options)
        deadline = self.timeout_s + size / SLOWEST
        try:
            return sync(self.fs.loop, getattr(self.fs, f"_{method}"), *args, timeout=deadline, **options)
        except TimeoutError as error:
            raise TimeoutError(f"{method}: no answer within {deadline:.0f} s") from error

    def local_path(self, rel: str = "") -> Path | None:
        """Path of `rel` on this machine, or None if the store is remote."""
        path = self._path(rel)
        return Path(path) if self.is_local else None

    def write_bytes(self, rel: str, data: bytes) -> None:
        """Write a file atomically; once this returns, the file survives a power cut."""
        path = self._path(rel)
        with storage_errors(path, writing=True):
            if self.is_local:
                with replacing(Path(path), self._guard) as file:
                    file.write(data)
            else:
                self._guard()
                self._call("pipe_file", path, data, size=len(data))

    def create_bytes(self, rel: str, data: bytes) -> bool:
        """Create a file; False if it already exists. Of several concurrent calls, exactly one succeeds."""
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
                # The client may have retried a request that succeeded but whose response was lost.
                return self.read_bytes(rel) == data
        # Some servers ignore the condition, and the last write wins.
        return self.read_bytes(rel) == data

    def read_bytes(self, rel: str) -> bytes:
        """Content of a file."""
        path = self._path(rel)
        with storage_errors(path):
            return bytes(self._call("cat_file", path))

    def open(self, rel: str) -> BinaryIO:
        """A seekable file; only the requested ranges of a remote file are fetched."""
        path = self._path(rel)
        with storage_errors(path):
            if not self.fs.async_impl:
                return cast(BinaryIO, self.fs.open(path, "rb", cache_type="none"))
            size = int(self._call("info", path)["size"])
        return cast(BinaryIO, RemoteFile(lambda start, end: self._range(path, start, end), size))

    def _range(self, path: str, start: int, end: int) -> bytes:
        return bytes(self._call("cat_file", path, start=start, end=end, size=end - start))

    def write_json(self, rel: str, value: Any) -> None:
        """Write a value as JSON, atomically."""
        self.write_bytes(rel, json.dumps(value, indent=1, ensure_ascii=False).encode())

    def read_json(self, rel: str) -> Any:
        """Value of a JSON file; raises `InputError` if it is not valid JSON."""
        try:
            return parse_json(self.read_bytes(rel))
        except ValueError as error:
            raise InputError(
                expected="a JSON file", seen=str(error), where=self._path(rel), fix="restore the file or remove it"
            ) from None

    def _size(self, rel: str) -> int | None:
        """Size of a file or folder, None if it does not exist."""
        path = self._path(rel)
        # Not fs.exists: it returns False when the storage fails, so valid checkpoints would count as uncommitted.
        with suppress(FileNotFoundError), storage_errors(path):
            return int(self._call("info", path)["size"])
        return None

    def exists(self, rel: str) -> bool:
        """Whether a file or folder exists."""
        return self._size(rel) is not None

    def listdir(self, rel: str = "") -> list[str]:
        """Sorted names of the files and folders directly under `rel`; empty if it does not exist."""
        path = self._path(rel)
        with suppress(FileNotFoundError), storage_errors(path):
            listed = [entry["name"].rstrip("/") for entry in self._call("ls", path, detail=True)]
            return sorted(name.rpartition("/")[2] for name in listed if name.rpartition("/")[0] == path.rstrip("/"))
        return []

    def remove(self, rel: str) -> None:
        """Remove a file, or a folder with all its content, if it exists.

        The manifest is removed first, so a partly removed folder no longer counts as committed. Links are removed, not
        what they lead to.
        """
        path = self._path(rel)
        with suppress(FileNotFoundError), storage_errors(path):
            if self.is_local:
                remove_local(path, MANIFEST, self._guard)
                return
            manifest = f"{path}/{MANIFEST}"
            self._guard()
            with suppress(FileNotFoundError):
                self._call("rm_file", manifest)  # explicitly, in case a stale listing does not show it
            # Not rm: it treats [ and * in names as patterns, and removes the bucket if the root is one.
            for name in sorted(self._call("find", path)):
                if name != manifest:
                    self._guard()
                    with suppress(FileNotFoundError):  # another process of the run has removed it
                        self._call("rm_file", name)

    def check_writable(self) -> None:
        """Write, read and remove a small file; raises `InputError` with a fix if that fails."""
        probe, data = f".probe-{uuid.uuid4().hex}", b"rollforward"
        try:
            self.write_bytes(probe, data)
            read = self.read_bytes(probe)
            self.remove(probe)
        except (TransientError, FileNotFoundError, ValueError) as error:
            raise InputError(
                expected="storage in which files can be written, read and removed",
                seen=str(error),
                where=self.url,
                fix="check the URL, the network, and that the server is running (AWS_ENDPOINT_URL for S3)",
            ) from error
        if read != data:
            raise InputError(
                expected=f"{data!r}, which was just written",
                seen=repr(read),
                where=self.url,
                fix="use storage with read-after-write consistency",
            )

    def _files(self, rel: str) -> dict[str, int]:
        """Size of every file under `rel` by relative path, sorted by path."""
        path = self._path(rel)
        prefix = f"{path.rstrip('/')}/"
        with suppress(FileNotFoundError), storage_errors(path):
            found = self._call("find", path, detail=True)
            return {name[len(prefix) :]: found[name]["size"] for name in sorted(found) if name.startswith(prefix)}
        return {}


@contextmanager
def _whole(path: str) -> Iterator[None]:
    """Removes the file if the body fails to write it."""
    try:
        yield
    except BaseException:
        os.unlink(path)
        raise


def _unguarded() -> None:
    """No-op write guard."""


def _opened(cls: Any, url: str, timeout_s: float, guard: Callable[[], None], holder: int) -> Any:
    return cls(url, timeout_s).guarded(guard, holder)


def join(rel: str, name: str) -> str:
    """The path of `name` in the folder `rel`; either may be empty."""
    return "/".join(part for part in (rel, name) if part)
