"""Writing and reading `rollouts/step_….parquet`, which contains all trajectories of a step."""

import io
import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from rl_core.data.protocol import DataProto
from rl_core.errors import InputError
from rl_core.storage.store import Store


def write_rollouts(store: Store, path: str, batch: DataProto) -> None:
    """Writes the step's trajectories to a file of the run, atomically."""
    store.write_bytes(path, rollout_parquet(batch))


def rollout_parquet(batch: DataProto) -> bytes:
    """The step's trajectories as parquet, without padding: advantages and all inputs of advantages and losses."""
    columns: dict[str, Any] = {
        name: batch.non_tensor_batch[name].tolist()
        for name in ("uid", "seed", "stop_reason", "status", "detail", "score_status", "score_detail")
    }
    columns["calls"] = [json.dumps(calls) for calls in batch.non_tensor_batch["calls"]]
    columns["row"] = [row["extra_info"]["index"] for row in batch.non_tensor_batch["row"]]
    columns["data_source"] = [row["data_source"] for row in batch.non_tensor_batch["row"]]
    columns["prompt_ids"] = _lists(batch.batch["prompts"], batch.batch["prompt_length"])
    for name, tensor in sorted(batch.batch.items()):
        if tensor.ndim == 1 and name not in ("prompt_length", "response_length"):
            columns[name] = tensor.numpy()
        elif tensor.ndim == 2 and name != "prompts":
            columns[name] = _lists(tensor, batch.batch["response_length"])
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def _lists(values_BR: Tensor, length_B: Tensor) -> pa.ListArray:
    """The first `length_B` values of each row, without a Python object per value."""
    real_BR = torch.arange(values_BR.shape[1]) < length_B[:, None]
    offsets = torch.nn.functional.pad(length_B.cumsum(0), (1, 0)).to(torch.int32)
    return pa.ListArray.from_arrays(pa.array(offsets.numpy()), pa.array(values_BR[real_BR].numpy()))


def rollout_table(data: bytes, needed: Sequence[str], where: str) -> pa.Table:
    """Reads the output of `rollout_parquet`; raises InputError if it is damaged or lacks a column of `needed`."""
    try:
        table = pq.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            "a step's rollouts as a parquet file", str(error), where, "choose another step; this file is damaged"
        ) from error
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise InputError(
            f"the columns {', '.join(needed)}",
            f"no {', '.join(missing)}",
            where,
            "choose a step of a run trained with this version of Rollforward",
        )
    return table
