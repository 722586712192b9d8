"""Sharded checkpoints of a training engine by torch.distributed.checkpoint, on any storage.

Every rank writes its own shards from a copy of its state, while training goes on; the driver commits the folder when
all are done. Loading reshards to the present world size and mesh.
"""

import copy
import errno
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from transformers import GenerationConfig, PreTrainedModel

from rl_core.errors import TransientError
from rl_core.models.lora import save_adapters
from rl_core.runtime.guardian import staging
from rl_core.storage.filesystem import storage_errors
from rl_core.storage.run_files import MANIFEST
from rl_core.storage.store import Json, Store, file_entry
from rl_core.training.engine import DTYPES, TrainEngine
from rl_core.training.shards import METADATA, TensorReader

# Endings of files that hold weights, in any format: those of the source are not the trained ones.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")

ROOM = 1 << 20
"""Bytes; a disk with less is full."""
FILES = "files.json"
"""File of a folder of shards with the entries of all of them, which is there when all ranks have written theirs."""


def save_engine(engine: TrainEngine, store: Store, folder: str, group: dist.ProcessGroup) -> Future[list[Json]]:
    """Copies the engine's state and starts to write it as shards into `folder` of the store; all ranks take part.

    What is trained from now on does not reach the files. The result comes when this rank has written (and uploaded)
    its shards: their entries in the manifest of the folder above. Or it raises what went wrong: InputError and
    TransientError as a `Store` does.

    Args:
        group: gloo group of all ranks that nothing else uses, for messages must not mix with those of training.
    """
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    stager = DefaultStager(options)
    state = stager.stage(engine.state())
    assert not isinstance(state, Future), "staging is over when this returns, or training would change what is saved"
    stager.close()  # it would keep the copy as long as the weights live, to use its memory again
    thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    written = thread.submit(_write, state, store, folder, group)
    thread.shutdown(wait=False)
    return written


def _write(state: dict[str, Any], store: Store, folder: str, group: dist.ProcessGroup) -> list[Json]:
    entries = _write_shards(state, store, folder, group)
    parts: list[list[Json]] | None = [[]] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    with _real_cause(folder, writing=True):
        dist.gather_object(entries, parts, group=group)
    if parts is not None:
        store.write_json(f"{folder}/{FILES}", [entry for part in parts for entry in part])
    return entries


def _write_shards(state: dict[str, Any], store: Store, folder: str, group: dist.ProcessGroup) -> list[Json]:
    local, (above, _, name) = store.local_path(folder), folder.rpartition("/")
    if local is not None:
        with _real_cause(str(local), writing=True):
            dcp.save(state, checkpoint_id=local, process_group=group)
        rank = dist.get_rank(group)
        files = [*local.glob(f"__{rank}_*"), *([local / METADATA] if rank == 0 else [])]
        return [file_entry(file, f"{name}/{file.name}") for file in files]
    with staging() as directory:
        with _real_cause(directory, writing=True):
            dcp.save(state, checkpoint_id=directory, process_group=group)
        return store.upload(Path(directory), above, name)


def load_engine(engine: TrainEngine, store: Store, folder: str) -> None:
    """Puts the state in `folder` of the store into the engine, whatever world size and mesh wrote it.

    Nothing in the folder is run: InputError for one that holds anything but tensors.
    """
    state = engine.state()
    with ExitStack() as stack:
        local = store.local_path(folder)
        if local is None:
            local = Path(stack.enter_context(staging()))
            store.download(folder, local)
        with _real_cause(str(local)):
            dcp.load(state, storage_reader=TensorReader(local))
    engine.load_state(state)


@contextmanager
def _real_cause(path: str, writing: bool = False) -> Iterator[None]:
    """What the first rank failed at, as one of this project's kinds, instead of torch's collection of all failures."""
    with storage_errors(path, writing):
        try:
            yield
        except CheckpointException as error:
            # Not even an Exception: nothing but a bare except would stop it.
            cause = next(iter(error.failures.values()))[0]
            raise _why_unwritten(path) if "inline_container" in str(cause) else cause from error
        except RuntimeError as error:
            # Failures of a rank's own come as above; this is one of the messages between the ranks.
            raise TransientError(f"a rank was lost while a checkpoint was read or written: {error}") from error


def _why_unwritten(path: str) -> OSError:
    """Why torch's writer of archives, which only says that it wrote less than it should, could not write."""
    full = os.path.exists(path) and shutil.disk_usage(path).free < ROOM
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if full else OSError(errno.EIO, os.strerror(errno.EIO))


def export_model(engine: TrainEngine, dtype: str, source: Path, store: Store, folder: str) -> list[Json]:
    """Rank 0 writes an ordinary Hugging Face folder: safetensors, config, generation config, tokenizer and templates.

    Returns what `Store.commit_folder` takes of the files that this rank has written.

    Adapters are part of its weights, and lie in its subfolder `adapter` once more, in PEFT's layout for `source`.

    Args:
        source: the folder that the model came from, whose tokenizer and templates go along.
    """
    model, written = engine.model, []
    weights = {name: tensor.to(DTYPES[dtype]).cpu() for name, tensor in engine.full_parameters()}
    adapters = {name: tensor.cpu() for name, tensor in engine.adapter_parameters()}
    if dist.get_rank() == 0:
        if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
            weights.pop("lm_head.weight", None)
        with staging() as directory:
            target = Path(directory)
            _save_pretrained(model, weights, DTYPES[dtype], target)
            for file in [*source.iterdir(), *source.glob("additional_chat_templates/*")]:
                kept = target / file.relative_to(source)
                if file.is_file() and not kept.exists() and not _is_weights(file.name):
                    kept.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, kept)
            if adapters:
                save_adapters(model, adapters, source, target / "adapter")
            store.remove(folder)
            written = store.upload(target, folder)
    dist.barrier()
    return written


def _save_pretrained(model: PreTrainedModel, weights: dict[str, Tensor], dtype: torch.dtype, target: Path) -> None:
    # A generation config that sets, say, a temperature without do_sample is common and is loaded without complaint, but
    # transformers refuses to save it; it goes along as it is.
    generation, model.generation_config = model.generation_config, GenerationConfig()
    try:
        model.save_pretrained(target, state_dict=weights)
    finally:
        model.generation_config = generation
    generation.to_json_file(target / "generation_config.json")
    # What was saved has the type of the float32 master weights in its config.
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(target)


def _is_weights(name: str) -> bool:
    return name.endswith((*WEIGHTS, ".index.json")) or name == MANIFEST
