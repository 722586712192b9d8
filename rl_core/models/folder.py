"""Checks the files of a checkpoint's folder: JSON, pointers to large files, shards, and cut-off files."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rl_core.errors import InputError

INDEX = "model.safetensors.index.json"
_JSON = ("config.json", "generation_config.json", INDEX)
_LFS = b"version https://git-lfs.github.com/spec/"
_SMALL = 4096
"""Maximum bytes of a Git LFS pointer."""
_AGAIN = "download or copy the file again, or set model.path=FOLDER to a whole checkpoint"


def check_files(folder: Path, where: str) -> None:
    """Raises InputError that names the file, and the tensor if there is one, of the first problem in the folder."""
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.stat().st_size <= _SMALL and file.read_bytes().startswith(_LFS):
            fix = "run `git lfs pull` in the folder, or download the file"
            raise InputError("the files of the checkpoint", f"{file.name} is a Git LFS pointer", where, fix)
    content = {name: _object(folder / name, where) for name in _JSON if (folder / name).is_file()}
    if INDEX not in content:
        for file in sorted(folder.glob("*.safetensors")):
            _tensors(file, where)
        return
    shards: dict[str, list[str]] = {}
    for tensor, name in _weight_map(content[INDEX], where).items():
        shards.setdefault(name, []).append(tensor)
    for name, tensors in sorted(shards.items()):
        more = f" and {len(tensors) - 1} further tensors" if len(tensors) > 1 else ""
        if not (folder / name).is_file():
            seen = f"no {name}, which has {tensors[0]}{more}"
            raise InputError(f"all files named in {INDEX}", seen, where, "copy the missing file to the folder")
        if missing := set(tensors) - _tensors(folder / name, where):
            expected = f"the tensors in {name} that {INDEX} names"
            raise InputError(expected, f"no {min(missing)} in {name}", where, "use the index of these files")


def _object(file: Path, where: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"a {file.name} with valid JSON", str(error), where, _AGAIN) from error
    if not isinstance(content, dict):
        raise InputError(f"a {file.name} with a JSON object", type(content).__name__, where, _AGAIN)
    return content


def _weight_map(index: dict[str, Any], where: str) -> dict[str, str]:
    """The file of each tensor; files elsewhere than in the folder are refused."""
    found = index.get("weight_map")
    if not isinstance(found, dict) or not found or any(Path(str(name)).name != name for name in found.values()):
        expected = f"a `weight_map` in {INDEX} from tensors to files of the folder"
        raise InputError(expected, repr(found)[:200], where, _AGAIN)
    return found


def _tensors(file: Path, where: str) -> set[str]:
    """Names of the tensors of a whole safetensors file."""
    try:
        with safe_open(file, framework="pt") as opened:
            return set(opened.keys())
    except (SafetensorError, OSError) as error:
        seen = _cut(file) or f"{file.name}: {error}"
        raise InputError("whole safetensors files", seen, where, _AGAIN) from error


def _cut(file: Path) -> str:
    """Where a file is cut off; empty if it is damaged in another way."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 + length:
            return f"{file.name} ends after {size:,} bytes, within its header" if length < 100_000_000 else ""
        try:
            header = json.loads(opened.read(length))
            ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
            cut = sorted((end, name) for name, end in ends.items() if end > size - 8 - length)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return ""
    return f"{file.name} ends after {size:,} bytes, within tensor {cut[0][1]}" if cut else ""
