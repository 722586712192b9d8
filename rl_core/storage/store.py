"""Files of a run in a folder or on an object store, with atomically committed folders.

A folder is committed by writing `manifest.json` last, which lists every other file with its size and checksum. Readers
trust only manifests. This needs no rename, which object stores lack.
"""

import logging
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from rl_core.errors import InputError, TransientError
from rl_core.storage.files import Files, join
from rl_core.storage.filesystem import replacing, storage_errors, sync_path
from rl_core.storage.manifest import Json, blocks, bytes_entry, checksum, file_entry, make_manifest, parse_manifest
from rl_core.storage.run_files import MANIFEST, step_name

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step_(\d{6,})")


class Store(Files):
    """A folder or prefix whose subfolders can be committed."""

    def upload(self, local_dir: str | Path, rel: str = "", under: str = "") -> list[Json]:
        """Copy all files under `local_dir` to the folder `under` of `rel`, each atomically.

        Returns their manifest entries for `commit_folder(rel)`.
        """
        source = Path(local_dir)
        if not source.is_dir():
            raise InputError(
                expected="a folder to upload", seen="no folder", where=str(source), fix="write the files there first"
            )
        # File by file: a recursive put into an existing folder would nest a second copy inside it.
        files = sorted(path for path in source.rglob("*") if path.is_file())
        return [self.put_file(file, rel, join(under, file.relative_to(source).as_posix())) for file in files]

    def put_file(self, file: str | Path, rel: str, name: str) -> Json:
        """Copy a local file to `name` in `rel`, atomically; returns its manifest entry."""
        target, entry = self._path(join(rel, name)), file_entry(Path(file), name)
        with storage_errors(target, writing=True):
            if self.is_local:
                with open(file, "rb") as data, replacing(Path(target), self._guard) as copied:
                    shutil.copyfileobj(data, copied)
            else:
                self._guard()
                self._call("put_file", str(file), target, size=entry["size"])
        return entry

    def add_bytes(self, data: bytes, rel: str, name: str) -> Json:
        """Write a file `name` in `rel`, atomically; returns its manifest entry."""
        self.write_bytes(join(rel, name), data)
        return bytes_entry(data, name)

    def download(self, rel: str, local_dir: str | Path) -> None:
        """Copy all files under the folder `rel` to `local_dir`, each atomically.

        In a committed folder or a subfolder of one, only the committed files are copied; files already in `local_dir`
        are kept. Raises TransientError if a file is damaged, because the next attempt may use another folder.
        """
        entries = self._committed_files(rel) or [{"path": name} for name in self._files(rel)]
        if not entries:
            raise FileNotFoundError(f"no files under {self._path(rel)}")
        for entry in entries:
            source, target = join(rel, entry["path"]), Path(local_dir, entry["path"])
            path = self._path(source)  # rejects names that leave the store
            if target.is_file() and entry == file_entry(target, entry["path"]):
                continue
            try:
                with storage_errors(path), self.open(source) as data, replacing(target) as copied:
                    for block in blocks(data):
                        copied.write(block)
                    copied.flush()
                    if "sha256" in entry and entry != file_entry(Path(copied.name), entry["path"]):
                        raise TransientError(f"{path} differs from its manifest")
            except FileNotFoundError as error:
                raise TransientError(f"{path} is missing") from error

    def _committed_files(self, rel: str) -> list[Json]:
        """Manifest entries of the files under `rel`, which is a committed folder or lies in one; empty otherwise."""
        folder = rel
        while (manifest := self.read_manifest(folder)) is None:
            folder = folder.rpartition("/")[0]
            if not folder:
                return []
        inside = f"{rel[len(folder) + 1 :]}/" if folder != rel else ""
        under = [file for file in manifest["files"] if file["path"].startswith(inside)]
        return [{**file, "path": file["path"].removeprefix(inside)} for file in under]

    def _sha256(self, rel: str) -> str:
        with storage_errors(self._path(rel)), self.open(rel) as file:
            return checksum(file)

    def commit_folder(self, rel: str, meta: Json, files: Iterable[Json] | None = None) -> Json:
        """Commit the files under `rel` as one unit and return the manifest.

        On a local file system, every file is flushed to disk before the manifest is written.

        Args:
            files: manifest entries computed when the files were written, so that missing, truncated or changed files
                are detected; default: all files in the folder as they are.
        """
        if files is None:
            listed = {name: size for name, size in self._files(rel).items() if name != MANIFEST}
            files = [{"path": name, "size": n, "sha256": self._sha256(join(rel, name))} for name, n in listed.items()]
        files = sorted(files, key=lambda file: file["path"])
        for file in files:
            size = self._size(join(rel, file["path"]))
            if size != file["size"]:
                where = self._path(join(rel, file["path"]))
                raise TransientError(f"{where} has {size} bytes instead of the {file['size']} that were written")
        if folder := self.local_path(rel):
            with storage_errors(str(folder), writing=True):
                for path in [*(folder / file["path"] for file in files), *(p for p in folder.rglob("*") if p.is_dir())]:
                    sync_path(path)
        manifest = make_manifest(files, meta)
        self.write_json(join(rel, MANIFEST), manifest)
        return manifest

    def read_manifest(self, rel: str) -> Json | None:
        """The manifest of a committed folder, or None if it is missing or damaged."""
        try:
            return parse_manifest(self.read_bytes(join(rel, MANIFEST)))
        except FileNotFoundError:
            return None

    def verify(self, rel: str, content: bool = True) -> list[str]:
        """Problems of a committed folder, each starting with the file name; empty if it is valid.

        Without `content`, only names and sizes are compared and no files are read.
        """
        manifest = self.read_manifest(rel)
        if manifest is None:
            return [f"{MANIFEST}: missing or damaged"]
        problems = []
        for name, size, digest in ((file["path"], file["size"], file["sha256"]) for file in manifest["files"]):
            # One request per file: with a stale listing, a valid folder would count as damaged.
            actual = self._size(join(rel, name))
            if actual is None:
                problems.append(f"{name}: missing")
            elif actual != size:
                problems.append(f"{name}: wrong size, {actual} bytes instead of {size}")
            elif content and self._sha256(join(rel, name)) != digest:
                problems.append(f"{name}: wrong checksum")
        return problems

    def _steps(self, rel: str) -> list[int]:
        """Steps of the step folders under `rel`, in order."""
        return sorted(int(match[1]) for name in self.listdir(rel) if (match := _STEP.fullmatch(name)))

    def _is_committed(self, rel: str, step: int) -> bool:
        return self.exists(join(rel, f"{step_name(step)}/{MANIFEST}"))

    def committed_steps(self, rel: str) -> list[int]:
        """Steps under `rel` that have a manifest, in numeric order."""
        return [step for step in self._steps(rel) if self._is_committed(rel, step)]

    def last_committed_step(self, rel: str) -> int:
        """The last step under `rel` that has a manifest, 0 without one."""
        return next((step for step in reversed(self._steps(rel)) if self._is_committed(rel, step)), 0)

    def latest_valid_step(self, rel: str, on_damage: Callable[[str], None] = logger.error) -> tuple[int, Json] | None:
        """Newest step under `rel` that passes verification, with its manifest; None if there is none.

        Newer damaged steps are removed, so that `prune` does not count them as kept, and `on_damage` gets a message for
        each; uncommitted steps are removed too. Steps missing from a stale listing stay.
        """
        steps, found = {step: self._is_committed(rel, step) for step in self._steps(rel)}, None
        invalid = [step for step, committed in steps.items() if not committed]
        for step in reversed([step for step, committed in steps.items() if committed]):
            folder = join(rel, step_name(step))
            problems = self.verify(folder)
            if not problems and (manifest := self.read_manifest(folder)):
                found = step, manifest
                break
            on_damage(f"{self._path(folder)} is damaged and is skipped: {'; '.join(problems)}")
            invalid.append(step)
        for step in invalid:
            self.remove(join(rel, step_name(step)))
        return found

    def prune(self, rel: str, keep: int, newest: int) -> None:
        """Remove committed steps under `rel` except the last `keep` (at least 1) up to step `newest`.

        Later steps stay: after a stale listing at the start of an attempt, they belong to the previous attempt.
        """
        steps = [step for step in self.committed_steps(rel) if step < newest]
        for step in steps[: max(0, len(steps) - max(keep - 1, 0))]:
            self.remove(join(rel, step_name(step)))
