"""Sharding, copies and shared sequences change nothing: four ranks on several meshes against one rank."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import distance, save_grouped_model, save_sharp_model, start_ranks
from torch import Tensor

from rl_core.training.mesh import RankMesh

sys.path.append(str(Path(__file__).parent))
from meshes import LENGTHS, MODELS, take_step

# Shards over all; two copies of two shards; four copies; sequences over two ranks and over four, also with copies.
MESHES = ["4,1", "2,1", "1,1", "4,2", "2,2", "4,4"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, rank_mesh: RankMesh) -> dict[str, dict[str, Tensor]]:
    """What came out, by `model-shard_size-sequence_parallel_size`, and by `model` for a rank that is alone."""
    folder = tmp_path_factory.mktemp("meshes")
    save_sharp_model(folder / "qwen3", heads=4)
    save_grouped_model(folder / "llama")
    start_ranks(Path(__file__).parent / "meshes.py", 4, "cpu", "float32", folder, *MESHES)
    alone = {model: take_step(folder / model, rank_mesh, 1, 0, "float32", False) for model in MODELS}
    return {file.stem: load_file(file) for file in folder.glob("*.safetensors")} | alone


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_the_step_is_that_of_one_rank(outcome: dict[str, dict[str, Tensor]], model: str, mesh: str) -> None:
    wanted, seen = outcome[model], outcome[f"{model}-{mesh.replace(',', '-')}"]
    rows = len(seen["log_probs"])  # rank 0 has the first of them
    assert rows == len(LENGTHS) * int(mesh[-1]) // 4
    torch.testing.assert_close(seen["old_log_probs"], wanted["old_log_probs"][:rows], rtol=0, atol=1e-5)
    torch.testing.assert_close(seen["log_probs"], wanted["log_probs"][:rows], rtol=0, atol=2e-5)
    ours, theirs = ({k: v for k, v in each.items() if not k.endswith("log_probs")} for each in (seen, wanted))
    assert distance(ours, theirs, "exp_avg.") < 1e-5
    assert distance(ours, theirs, "model.") < 1e-5
    for name in (key for key in wanted if key.startswith("metric.")):
        assert seen[name].item() == pytest.approx(wanted[name].item(), rel=1e-4, abs=1e-6), name
