"""Checkpoints whose files are missing, cut off or only pointers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rl_core.errors import InputError
from rl_core.models.folder import INDEX
from rl_core.models.load import check_model_folder

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 988097824\n"
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A checkpoint in two shards: the embedding, and everything else."""
    made = tmp_path / "model"
    shutil.copytree(tiny_model, made)
    weights = load_file(made / "model.safetensors")
    (made / "model.safetensors").unlink()
    files = {name: "b.safetensors" if name == EMBEDDING else "a.safetensors" for name in weights}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({name: weights[name] for name in weights if files[name] == file}, made / file)
    (made / INDEX).write_text(json.dumps({"weight_map": files}))
    return made


def header_length(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def cut(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])


def without_norm(folder: Path) -> None:
    weights = load_file(folder / "a.safetensors")
    weights.pop(NORM)
    save_file(weights, folder / "a.safetensors")


def last_tensor(file: Path) -> str:
    with safe_open(file, framework="pt") as opened:
        return str(list(opened.offset_keys())[-1])


def map_to(name: object) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: name}}))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda f: (f / "b.safetensors").unlink(), f"no b.safetensors, which has {EMBEDDING}"),
    "tensor not in its shard": (without_norm, f"no {NORM} in a.safetensors"),
    "half a shard": (
        lambda f: cut(f / "b.safetensors", header_length(f / "b.safetensors") + 100),
        f"b.safetensors ends after .* within tensor {EMBEDDING}",
    ),
    "half a header": (lambda f: cut(f / "b.safetensors", 50), "b.safetensors ends after 50 bytes, within its header"),
    "empty shard": (lambda f: cut(f / "a.safetensors", 0), "a.safetensors ends after 0 bytes, within its header"),
    "noise": (lambda f: (f / "a.safetensors").write_bytes(b"\xff" * 5000), "a.safetensors: "),
    "too long": (
        lambda f: (f / "a.safetensors").write_bytes((f / "a.safetensors").read_bytes() + b"more"),
        "a.safetensors: ",
    ),
    "pointer instead of weights": (
        lambda f: (f / "b.safetensors").write_text(POINTER),
        "b.safetensors is a Git LFS pointer",
    ),
    "pointer instead of a tokenizer": (
        lambda f: (f / "tokenizer.json").write_text(POINTER),
        "tokenizer.json is a Git LFS pointer",
    ),
    "index that is no JSON": (lambda f: (f / INDEX).write_text("{"), "line 1"),
    "index without files": (lambda f: (f / INDEX).write_text("{}"), "None"),
    "index with files elsewhere": (map_to("../b.safetensors"), "../b.safetensors"),
    "index with numbers": (map_to(7), "7"),
    "generation config": (lambda f: (f / "generation_config.json").write_text("[]"), "list"),
}


def test_a_whole_checkpoint_in_shards_passes(folder: Path) -> None:
    assert check_model_folder(str(folder)) == folder


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_files_is_an_error_that_names_file_and_tensor(folder: Path, fault: str) -> None:
    plant, seen = FAULTS[fault]
    plant(folder)
    with pytest.raises(InputError, match=f"seen: .*{seen}") as raised:
        check_model_folder(str(folder))
    assert raised.value.where == f"model.path={folder}"


def test_a_single_file_that_is_cut_off_names_its_last_tensor(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    file = folder / "model.safetensors"
    name = last_tensor(file)
    cut(file, file.stat().st_size - 1)
    with pytest.raises(InputError, match=f"model.safetensors ends after .* within tensor {name}"):
        check_model_folder(str(folder))
