"""The manifest of a committed folder: `{"version": 1, "files": [{"path", "size", "sha256"}, …], "meta", "sha256"}`.

Its own sha256 covers files and meta. `Store.commit_folder` writes it last, so it commits the folder.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rl_core.runtime.watchdog import progress
from rl_core.storage.filesystem import storage_errors

Json = dict[str, Any]
BLOCK = 8 << 20
"""Bytes per read."""


def make_manifest(files: list[Json], meta: Json) -> Json:
    """The manifest of these entries; `meta` holds JSON values."""
    meta = json.loads(json.dumps(meta))  # as a reader parses it, so that both digests agree
    return {"version": 1, "files": files, "meta": meta, "sha256": digest(files, meta)}


def parse_manifest(data: bytes) -> Json | None:
    """The manifest in these bytes, or None if it is damaged."""
    try:
        manifest: Json = parse_json(data)
        valid = manifest["version"] == 1 and manifest["sha256"] == digest(manifest["files"], manifest["meta"])
        entries = [(file["path"], file["size"], file["sha256"]) for file in manifest["files"]]
    except (ValueError, KeyError, TypeError):
        return None
    typed = all(isinstance(path, str) and type(size) is int and isinstance(sha, str) for path, size, sha in entries)
    return manifest if valid and typed and isinstance(manifest["meta"], dict) else None


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON text; raises ValueError, also if it is nested deeper than Python can follow."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


def digest(files: list[Json], meta: Json) -> str:
    """sha256 (hexadecimal) of a manifest's files and meta."""
    text = json.dumps({"files": files, "meta": meta}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def file_entry(file: Path, name: str) -> Json:
    """The manifest entry of a local file under the given name."""
    with storage_errors(str(file)), file.open("rb") as data:
        sha256 = checksum(data)
    return {"path": name, "size": file.stat().st_size, "sha256": sha256}


def bytes_entry(data: bytes, name: str) -> Json:
    """The manifest entry of a file with this content."""
    return {"path": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def checksum(file: BinaryIO) -> str:
    """sha256 (hexadecimal) of the remaining content."""
    found = hashlib.sha256()
    for block in blocks(file):
        found.update(block)
    return found.hexdigest()


def blocks(file: BinaryIO) -> Iterator[bytes]:
    """The remaining content in blocks; reports progress, so that the watchdog tolerates large files."""
    while block := file.read(BLOCK):
        progress()
        yield block
