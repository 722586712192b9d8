"""Sharded checkpoints of a training engine with torch.distributed.checkpoint, on any storage.

Every rank writes its own shards from a copy of its state while training continues; the driver commits the folder after
all ranks have finished. Loading reshards to the current world size and mesh.
"""

import copy
import errno
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from rl_core.errors import TransientError
from rl_core.models.lora import save_adapters
from rl_core.runtime.guardian import staging
from rl_core.storage.filesystem import make_folder, storage_errors
from rl_core.storage.manifest import Json, file_entry
from rl_core.storage.run_files import MANIFEST
from rl_core.storage.store import Store
from rl_core.training.checkpoint_reader import METADATA, TensorReader
from rl_core.training.engine import DTYPES, TrainEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Suffixes of weight files in any format; the source's weight files are not copied to an export."""
MIN_FREE_BYTES = 1 << 20
"""A disk with less free space counts as full."""
FILES = "files.json"
"""File with the manifest entries of all shards of a folder, written after all ranks have written their shards."""


def save_engine(engine: TrainEngine, store: Store, folder: str, group: dist.ProcessGroup) -> Future[list[Json]]:
    """Copies the engine's state and starts writing it as shards into `folder` of the store; collective over all ranks.

    Later training does not affect the files. The future resolves after this rank has written (and uploaded) its shards,
    to their entries in the manifest of the parent folder; it raises InputError and TransientError like a `Store`.

    Args:
        group: gloo group of all ranks used for nothing else, so that its messages do not mix with those of training.
    """
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    stager = DefaultStager(options)
    state = stager.stage(engine.state())
    assert not isinstance(state, Future), "staging must be synchronous: training would change the state being saved"
    stager.close()  # otherwise it keeps the copy for reuse as long as the weights exist
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
    local, (parent, _, name) = store.local_path(folder), folder.rpartition("/")
    if local is not None:
        with _real_cause(str(local), writing=True):
            # torch creates folders that a power cut may remove. An error here would leave the other ranks waiting in
            # `save`, which reports it to all of them.
            with suppress(OSError):
                make_folder(local)
            dcp.save(state, checkpoint_id=local, process_group=group)
        rank = dist.get_rank(group)
        files = [*local.glob(f"__{rank}_*"), *([local / METADATA] if rank == 0 else [])]
        return [file_entry(file, f"{name}/{file.name}") for file in files]
    with staging() as directory:
        with _real_cause(directory, writing=True):
            dcp.save(state, checkpoint_id=directory, process_group=group)
        return store.upload(Path(directory), parent, name)


def load_engine(engine: TrainEngine, store: Store, folder: str) -> None:
    """Loads the state in `folder` of the store into the engine, from any world size and mesh.

    No code in the folder is executed: raises InputError if it contains anything but tensors.
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
    """Raises the first rank's error, as one of this project's kinds, instead of torch's collection of all failures."""
    with storage_errors(path, writing):
        try:
            yield
        except CheckpointException as error:
            # A BaseException: only a bare except would catch it.
            cause = next(iter(error.failures.values()))[0]
            raise _write_error(path) if "inline_container" in str(cause) else cause from error
        except RuntimeError as error:
            # A rank's own failure is a CheckpointException; this is a communication failure between ranks.
            raise TransientError(f"a rank was lost while a checkpoint was read or written: {error}") from error


def _write_error(path: str) -> OSError:
    """OSError for a failed write: torch's archive writer only reports that it wrote too little."""
    full = os.path.exists(path) and shutil.disk_usage(path).free < MIN_FREE_BYTES
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if full else OSError(errno.EIO, os.strerror(errno.EIO))


def export_model(engine: TrainEngine, dtype: str, source: Path, store: Store, folder: str) -> list[Json]:
    """Rank 0 writes a standard Hugging Face folder: safetensors, config, generation config, tokenizer and templates.

    Adapters are merged into the weights, and also stored in the subfolder `adapter`, in PEFT's layout for `source`.
    Returns the entries of this rank's files for `Store.commit_folder`.

    Args:
        source: folder of the original model; its tokenizer and templates are copied.
    """
    model, written = engine.model, []
    weights = {name: tensor.cpu() for name, tensor in engine.in_dtype(engine.full_parameters(), DTYPES[dtype])}
    adapters = {name: tensor.cpu() for name, tensor in engine.adapter_parameters()}
    if dist.get_rank() == 0:
        if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
            weights.pop("lm_head.weight", None)
        with staging() as directory:
            target = Path(directory)
            _save_pretrained(model, weights, DTYPES[dtype], target)
            for file in [*source.iterdir(), *source.glob("additional_chat_templates/*")]:
                copy_path = target / file.relative_to(source)
                if file.is_file() and not copy_path.exists() and not _is_weights(file.name):
                    copy_path.parent.mkdir(exist_ok=True)
                    shutil.copyfile(file, copy_path)
            if adapters:
                save_adapters(model, adapters, source, target / "adapter")
            store.remove(folder)
            written = store.upload(target, folder)
    dist.barrier()
    return written


def _save_pretrained(model: "PreTrainedModel", weights: dict[str, Tensor], dtype: torch.dtype, target: Path) -> None:
    from transformers import GenerationConfig

    # transformers loads a generation config with, for example, a temperature but no do_sample, but refuses to save it.
    # Such configs are common, so it is written unchanged.
    generation, model.generation_config = model.generation_config, GenerationConfig()
    try:
        model.save_pretrained(target, state_dict=weights)
    finally:
        model.generation_config = generation
    generation.to_json_file(target / "generation_config.json")
    # The saved config has the dtype of the float32 master weights; write it again with the export's dtype.
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(target)


def _is_weights(name: str) -> bool:
    return name.endswith((*WEIGHTS, ".index.json")) or name == MANIFEST
