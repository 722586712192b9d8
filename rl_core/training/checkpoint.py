"""Sharded checkpoints of a training engine by torch.distributed.checkpoint, on any storage.

Every rank writes its own shards; the driver commits the folder afterwards. Loading reshards to the present world size.
"""

import copy
import shutil
import tempfile
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from rl_core.models.lora import save_adapters
from rl_core.storage import MANIFEST, Store
from rl_core.training.engine import DTYPES, TrainEngine


def save_engine(engine: TrainEngine, store: Store, folder: str) -> None:
    """Writes the engine's state as shards into `folder` of the store; all ranks take part."""
    local = store.local_path(folder)
    if local is not None:
        dcp.save(engine.state(), checkpoint_id=local)
        return
    with tempfile.TemporaryDirectory() as staging:
        dcp.save(engine.state(), checkpoint_id=staging)
        store.upload(Path(staging), folder)
    dist.barrier()


def load_engine(engine: TrainEngine, store: Store, folder: str) -> None:
    """Puts the state in `folder` of the store into the engine, whatever world size wrote it."""
    state = engine.state()
    local = store.local_path(folder)
    if local is not None:
        dcp.load(state, checkpoint_id=local)
    else:
        with tempfile.TemporaryDirectory() as staging:
            store.download(folder, Path(staging))
            dcp.load(state, checkpoint_id=staging)
    engine.load_state(state)


def export_model(engine: TrainEngine, dtype: str, source: Path, store: Store, folder: str) -> None:
    """Rank 0 writes an ordinary Hugging Face folder: safetensors, config, generation config and tokenizer.

    Adapters are part of its weights, and lie in its subfolder `adapter` once more, in PEFT's layout for `source`.

    Args:
        source: the folder that the model came from, whose tokenizer and templates go along.
    """
    model = engine.model
    weights = {name: tensor.to(DTYPES[dtype]).cpu() for name, tensor in engine.full_parameters()}
    adapters = {name: tensor.cpu() for name, tensor in engine.adapter_parameters()}
    if dist.get_rank() == 0:
        if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
            weights.pop("lm_head.weight", None)
        with tempfile.TemporaryDirectory() as staging:
            target = Path(staging)
            model.save_pretrained(target, state_dict=weights)
            # That wrote the type of the float32 master weights into the config.
            config = copy.deepcopy(model.config)
            config.dtype = DTYPES[dtype]
            config.save_pretrained(target)
            for file in source.iterdir():
                if file.is_file() and not (target / file.name).exists() and not _is_weights(file.name):
                    shutil.copyfile(file, target / file.name)
            if adapters:
                save_adapters(model, adapters, source, target / "adapter")
            store.remove(folder)
            store.upload(target, folder)
    dist.barrier()


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".index.json")) or name == MANIFEST
