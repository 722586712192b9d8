"""File-system layer of a store: file systems by URL, error conversion, and atomic local writes."""

import errno
import io
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    """The file system of a URL and the path in it; nothing is accessed."""
    # Listings cached by s3fs would hide files that another process has committed or removed since.
    options = {"use_listings_cache": False, "skip_instance_cache": True} if url.startswith(("s3:", "s3a:")) else {}
    fs, path = url_to_fs(os.path.expanduser(url) if "://" not in url else url, **options)
    return fs, str(path)


class RemoteFile(io.RawIOBase):
    """A remote file read by ranges: one request per read."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        """`fetch(start, end)` returns these bytes of the file."""
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
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents durably, so that they survive a power cut."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_path(folder.parent)


def remove_local(path: str, first: str, guard: Callable[[], None]) -> None:
    """Remove a file, a link, or a folder with all its content, calling `guard` before each removal.

    The file `first` of a folder goes before all others, durably. Links are removed, not followed.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        guard()
        os.unlink(path)
        return
    try:
        guard()
        with suppress(FileNotFoundError):
            os.unlink(first, dir_fd=folder)
            os.fsync(folder)
    finally:
        os.close(folder)
    for _, folders, files, inside in os.fwalk(path, topdown=False):
        for name in [*files, *folders]:
            guard()
            with suppress(FileNotFoundError):  # another process of the run has removed it
                is_folder = stat.S_ISDIR(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode)
                (os.rmdir if is_folder else os.unlink)(name, dir_fd=inside)
    guard()
    os.rmdir(path)


def no_check() -> None:
    """The check of `replacing` that always passes."""


@contextmanager
def replacing(path: Path, check: Callable[[], None] = no_check) -> Iterator[BinaryIO]:
    """A temporary file that atomically replaces `path` at the end and is removed if the body or the `check` fails.

    `check` is called first, and again right before the file is renamed.
    """
    check()
    make_folder(path.parent)
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        check()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_path(path.parent)


@contextmanager
def storage_errors(path: str, writing: bool = False) -> Iterator[None]:
    """Convert errors of the file system and its client into `InputError` and `TransientError`.

    `FileNotFoundError` is passed on when reading; when writing it means that the bucket does not exist.
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
    """How the user can fix a permanent error, or None if a retry may resolve it."""
    if type(error).__name__ in _CREDENTIALS:
        return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) in the environment"
    if isinstance(error, FileNotFoundError):
        return "create the bucket, or correct its name in the URL"
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            "free space there and run the same command again, which continues from the last committed step; or choose "
            "another location with storage.root"
        )
    if isinstance(error, PermissionError | NotADirectoryError | FileExistsError) or code in _LASTING:
        return "give this user read and write access there, or choose another location with storage.root"
    return None
