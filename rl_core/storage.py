"""Files of a run in a folder or on an object store, with folders that are committed whole or not at all.

A folder is committed by writing `manifest.json` last: it lists every other file with size and checksum. Readers trust
manifests only. That needs no rename, which object stores do not have.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from rl_core.errors import InputError, TransientError

logger = logging.getLogger(__name__)

Json = dict[str, Any]
MANIFEST = "manifest.json"
_STEP = re.compile(r"step_(\d{6,})")
_LASTING = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG,
    errno.EINVAL, errno.ENOSYS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
}  # fmt: skip
_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}
_CLIENTS = {"botocore", "aiobotocore", "aiohttp", "httpx", "httpx2"}


def step_name(step: int) -> str:
    """Name of the folder (or, with an ending, the file) of a step: `step_000012`."""
    return f"step_{step:06d}"


class Store:
    """A folder (path) or a prefix of an object store (`s3://bucket/prefix`, `memory://…`).

    Every `rel` is a path inside it with `/` as separator; the empty one is the root. Credentials come from the
    environment only, and a pickled store is its URL. All methods raise `InputError` for what a person must change
    (permissions, credentials, a `rel` that leaves the root) and `TransientError` for what a retry may cure;
    reading what is not there raises `FileNotFoundError`.
    """

    def __init__(self, url: str) -> None:
        """Open the store without touching it; a relative path is made absolute."""
        # Listings that s3fs caches hide what another process has committed or removed meanwhile.
        options = {"use_listings_cache": False, "skip_instance_cache": True} if url.startswith(("s3:", "s3a:")) else {}
        try:
            self.fs, self.root = _open(url, options)
        except (ValueError, ImportError) as error:
            raise InputError(
                expected="a folder, or a URL of a file system that is installed, such as s3://bucket/prefix",
                seen=f"{url!r} ({error})",
                where="storage.root",
                fix="correct the URL; for s3:// install the extra: pip install 'rollforward[s3]'",
            ) from None
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.root = self.root.rstrip("/") or "/"
        self.url = self.root if self.is_local else self.fs.unstrip_protocol(self.root)

    def __reduce__(self) -> tuple[type["Store"], tuple[str]]:
        return Store, (self.url,)

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

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

    def child(self, rel: str) -> "Store":
        """The store whose root is `rel`."""
        made = Store.__new__(Store)
        made.fs, made.is_local, made.root = self.fs, self.is_local, self._path(rel)
        made.url = made.root if self.is_local else self.fs.unstrip_protocol(made.root)
        return made

    def local_path(self, rel: str = "") -> Path | None:
        """Path of `rel` on this machine, or None when the store is remote."""
        path = self._path(rel)
        return Path(path) if self.is_local else None

    def write_bytes(self, rel: str, data: bytes) -> None:
        """Write a file whole or not at all; when this returns, a power cut does not lose it."""
        path = self._path(rel)
        with storage_errors(path, writing=True):
            if self.is_local:
                with _replacing(Path(path)) as file:
                    file.write(data)
            else:
                self.fs.pipe_file(path, data)

    def read_bytes(self, rel: str) -> bytes:
        """Content of a file."""
        path = self._path(rel)
        with storage_errors(path):
            return bytes(self.fs.cat_file(path))

    def open(self, rel: str) -> BinaryIO:
        """A file to read parts of; of a remote one only what is asked for is fetched."""
        path = self._path(rel)
        with storage_errors(path):
            return cast(BinaryIO, self.fs.open(path, "rb", cache_type="none"))

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

    def exists(self, rel: str) -> bool:
        """Whether a file or folder is there."""
        path = self._path(rel)
        # Not fs.exists: it answers False when the storage fails, and a sweep would then remove good checkpoints.
        with suppress(FileNotFoundError), storage_errors(path):
            self.fs.info(path)
            return True
        return False

    def listdir(self, rel: str = "") -> list[str]:
        """Sorted names of the files and folders directly under `rel`; empty when it is not there."""
        path = self._path(rel)
        with suppress(FileNotFoundError), storage_errors(path):
            listed = [entry["name"].rstrip("/") for entry in self.fs.ls(path, detail=True)]
            return sorted(name.rpartition("/")[2] for name in listed if name.rpartition("/")[0] == path.rstrip("/"))
        return []

    def remove(self, rel: str) -> None:
        """Remove a file or a folder with all its content; missing is fine.

        The manifest goes first, so that a folder is never read when the removal is cut short.
        """
        path = self._path(rel)
        with suppress(FileNotFoundError), storage_errors(path):
            if self.is_local:
                with suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(f"{path}/{MANIFEST}")
                    _sync(Path(path))
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
            else:
                # By rm_file: rm takes [ and * in names for patterns, and removes a bucket when the root is one.
                for name in sorted(self.fs.find(path), key=lambda name: name != f"{path}/{MANIFEST}"):
                    self.fs.rm_file(name)

    def upload(self, local_dir: str | Path, rel: str = "") -> None:
        """Copy all files under `local_dir` to `rel`, each whole or not at all."""
        source = Path(local_dir)
        if not source.is_dir():
            raise InputError(
                expected="a folder to upload", seen="no folder", where=str(source), fix="write the files there first"
            )
        # File by file: a recursive put of a folder that is already there nests a second copy inside it.
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            self.put_file(file, _join(rel, file.relative_to(source).as_posix()))

    def put_file(self, file: str | Path, rel: str) -> None:
        """Copy a file of this machine to `rel`, whole or not at all."""
        target = self._path(rel)
        with storage_errors(target, writing=True):
            if self.is_local:
                with open(file, "rb") as data, _replacing(Path(target)) as copy:
                    shutil.copyfileobj(data, copy)
            else:
                self.fs.put_file(str(file), target)

    def download(self, rel: str, local_dir: str | Path) -> None:
        """Copy all files under the folder `rel` to `local_dir`, each whole or not at all."""
        files = self._files(rel)
        if not files:
            raise FileNotFoundError(f"no files under {self._path(rel)}")
        for name in files:
            source = self._path(_join(rel, name))
            with storage_errors(source), self.fs.open(source, "rb") as data, _replacing(Path(local_dir, name)) as copy:
                shutil.copyfileobj(data, copy)

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
            found = self.fs.find(path, detail=True)
            return {name[len(prefix) :]: found[name]["size"] for name in sorted(found) if name.startswith(prefix)}
        return {}

    def _sha256(self, rel: str) -> str:
        path = self._path(rel)
        with storage_errors(path), self.fs.open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def commit_folder(self, rel: str, meta: Json) -> Json:
        """Make the files under `rel` one committed whole, and return the manifest.

        The manifest is `{"version": 1, "files": [{"path", "size", "sha256"}, …], "meta", "sha256"}`; its own sha256 is
        over files and meta. On a local file system every file is flushed to the disk before it is written.
        """
        listed = {name: size for name, size in self._files(rel).items() if name != MANIFEST}
        if folder := self.local_path(rel):
            with storage_errors(str(folder), writing=True):
                for path in [*(folder / name for name in listed), *(p for p in folder.rglob("*") if p.is_dir())]:
                    _sync(path)
        files = [
            {"path": name, "size": size, "sha256": self._sha256(_join(rel, name))} for name, size in listed.items()
        ]
        meta = json.loads(json.dumps(meta))  # what a reader will see, so that both digests agree
        manifest = {"version": 1, "files": files, "meta": meta, "sha256": _digest(files, meta)}
        self.write_json(_join(rel, MANIFEST), manifest)
        return manifest

    def read_manifest(self, rel: str) -> Json | None:
        """The manifest of a committed folder, or None when there is none or it is damaged."""
        try:
            manifest = json.loads(self.read_bytes(_join(rel, MANIFEST)))
            right = manifest["version"] == 1 and manifest["sha256"] == _digest(manifest["files"], manifest["meta"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return manifest if right else None

    def verify(self, rel: str) -> list[str]:
        """Problems of a committed folder, by file name; an empty list says that it is good."""
        manifest = self.read_manifest(rel)
        if manifest is None:
            return [f"{MANIFEST}: missing or damaged"]
        sizes, problems = self._files(rel), []
        for name, size, digest in ((file["path"], file["size"], file["sha256"]) for file in manifest["files"]):
            if name not in sizes:
                problems.append(f"{name}: missing")
            elif sizes[name] != size:
                problems.append(f"{name}: wrong size, {sizes[name]} bytes instead of {size}")
            elif self._sha256(_join(rel, name)) != digest:
                problems.append(f"{name}: wrong checksum")
        return problems

    def _steps(self, rel: str) -> dict[int, bool]:
        """Step of each step folder under `rel`, in order, and whether it has a manifest."""
        steps = sorted(int(match[1]) for name in self.listdir(rel) if (match := _STEP.fullmatch(name)))
        return {step: self.exists(_join(rel, f"{step_name(step)}/{MANIFEST}")) for step in steps}

    def committed_steps(self, rel: str) -> list[int]:
        """Steps under `rel` that have a manifest, in numeric order."""
        return [step for step, committed in self._steps(rel).items() if committed]

    def latest_verified(self, rel: str) -> tuple[int, Json] | None:
        """Newest step under `rel` whose files are all as committed, with its manifest; None when there is none.

        Damaged newer ones are logged as errors by name and passed over.
        """
        for step in reversed(self.committed_steps(rel)):
            folder = _join(rel, step_name(step))
            problems = self.verify(folder)
            if not problems and (manifest := self.read_manifest(folder)):
                return step, manifest
            logger.error("%s is damaged and is not used: %s", self._path(folder), "; ".join(problems))
        return None

    def sweep(self, rel: str, newest: int | None = None) -> None:
        """Remove the step folders under `rel` that were never committed, and those after step `newest` if given.

        A resume gives the step that it starts from: a damaged later one must not count as kept by `retain`.
        """
        for step, committed in self._steps(rel).items():
            if not committed or (newest is not None and step > newest):
                self.remove(_join(rel, step_name(step)))

    def retain(self, rel: str, keep: int) -> None:
        """Remove all committed steps under `rel` but the newest `keep` (at least 1)."""
        for step in self.committed_steps(rel)[: -max(keep, 1)]:
            self.remove(_join(rel, step_name(step)))


def _open(url: str, options: dict[str, bool]) -> tuple[AbstractFileSystem, str]:
    fs, path = url_to_fs(os.path.expanduser(url) if "://" not in url else url, **options)
    return fs, str(path)


def _join(rel: str, name: str) -> str:
    return f"{rel}/{name}" if rel else name


def _digest(files: list[Json], meta: Json) -> str:
    text = json.dumps({"files": files, "meta": meta}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents so that they survive a power cut."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` at the end, and leaves nothing behind when the body fails."""
    _make_folder(path.parent)
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


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
    if code in (errno.ENOSPC, errno.EDQUOT):
        return "free space there, or choose another place with storage.root"
    if isinstance(error, PermissionError | NotADirectoryError | FileExistsError) or code in _LASTING:
        return "give this user the right to read and write there, or choose another place with storage.root"
    return None
