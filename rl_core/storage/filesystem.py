"""What lies under a store: file systems by URL, their errors as this project's kinds, and files written whole."""

import errno
import io
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from rl_core.errors import InputError, TransientError

_LASTING = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG,
    errno.EINVAL, errno.ENOSYS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
}  # fmt: skip
_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}
_CLIENTS = {"botocore", "aiobotocore", "aiohttp", "httpx", "httpx2"}


def open_filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL and the path in it; nothing is touched."""
    # Listings that s3fs caches hide what another process has committed or removed meanwhile.
    options = {"use_listings_cache": False, "skip_instance_cache": True} if url.startswith(("s3:", "s3a:")) else {}
    fs, path = url_to_fs(os.path.expanduser(url) if "://" not in url else url, **options)
    return fs, str(path)


class RemoteFile(io.RawIOBase):
    """A file of which each read is one request; what was not asked for is not fetched."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        """`fetch(start, end)` gives these bytes of the file."""
        self._fetch, self._size, self._at = fetch, size, 0

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.RawIOBase`."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._at

    def readinto(self, buffer: "memoryview[int]") -> int:  # type: ignore[override]
        """See `io.RawIOBase`."""
        end = min(self._at + len(buffer), self._size)
        data = self._fetch(self._at, end) if end > self._at else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def sync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents so that they survive a power cut."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_path(folder.parent)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` at the end, and leaves nothing behind when the body fails."""
    make_folder(path.parent)
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_path(path.parent)


@contextmanager
def storage_errors(path: str, writing: bool = False) -> Iterator[None]:
    """Turn errors of the file system and its client into this project's kinds.

    `FileNotFoundError` passes when reading; when writing it means that the bucket is missing.
    """
    try:
        yield
    except Exception as error:
        client = type(error).__module__.partition(".")[0] in _CLIENTS
        if not client and not isinstance(error, OSError):
            raise
        if isinstance(error, FileNotFoundError) and not writing:
            raise
        fix = _fix(error)
        if fix is None:
            raise TransientError(f"storage failed at {path}: {type(error).__name__}: {error}") from error
        raise InputError("usable storage", f"{type(error).__name__}: {error}", path, fix) from error


def _fix(error: Exception) -> str | None:
    """What a person can do about a lasting error, or None when a retry may cure it."""
    if type(error).__name__ in _CREDENTIALS:
        return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) in the environment"
    if isinstance(error, FileNotFoundError):
        return "make the bucket first, or correct its name in the URL"
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            "free space there and give the same command again, which continues from the last committed step; or choose "
            "another place with storage.root"
        )
    if isinstance(error, PermissionError | NotADirectoryError | FileExistsError) or code in _LASTING:
        return "give this user the right to read and write there, or choose another place with storage.root"
    return None
