"""Two GPUs against one: shards, copies and shared sequences give the same step."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import distance, plain_log_probs, save_grouped_model, save_sharp_model, start_ranks, weights_of
from support_ranks import Alone, Outcome
from torch import Tensor

from rl_core.training.mesh import RankMesh
from rl_core.training.sharded_checkpoint import load_engine

sys.path.append(str(Path(__file__).parents[1] / "training"))
from meshes import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
MESHES = ["2,1", "1,1", "2,2", "1,2"]
# bfloat16 rounds other sums otherwise; Adam's moments show the gradient.
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, dict[str, Tensor]]]:
    """What came out, by `model-shard_size-sequence_parallel_size`; `model-1-1` of `alone` is one GPU's."""
    dtype: str = request.param
    found: dict[str, dict[str, Tensor]] = {}
    for world_size, meshes in ((2, MESHES), (1, ["1,1"])):
        folder = tmp_path_factory.mktemp("gpus")
        save_sharp_model(folder / "qwen3", heads=4)
        save_grouped_model(folder / "llama")
        start_ranks(Path(__file__).parents[1] / "training" / "meshes.py", world_size, "cuda", dtype, folder, *meshes)
        found |= {f"{world_size}-{file.stem}": load_file(file) for file in folder.glob("*.safetensors")}
    return dtype, found


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_the_step_is_that_of_one_gpu(outcome: tuple[str, dict[str, dict[str, Tensor]]], model: str, mesh: str) -> None:
    dtype, found = outcome
    wanted, seen = found[f"1-{model}-1-1"], found[f"2-{model}-{mesh.replace(',', '-')}"]
    ours, theirs = ({k: v for k, v in each.items() if not k.endswith("log_probs")} for each in (seen, wanted))
    assert distance(ours, theirs, "exp_avg.") < TOLERANCE[dtype]
    assert seen["metric.grad_norm"].item() == pytest.approx(wanted["metric.grad_norm"].item(), rel=TOLERANCE[dtype])
    rows = len(seen["old_log_probs"])
    torch.testing.assert_close(
        seen["old_log_probs"], wanted["old_log_probs"][:rows], rtol=0, atol=1e-4 if dtype == "float32" else 0.3
    )


def test_a_checkpoint_continues_on_another_number_of_gpus(tmp_path: Path, gpu: RankMesh) -> None:
    save_sharp_model(tmp_path / "model")
    outcome = Outcome(tmp_path, tmp_path / "model", gpu)
    loaded = outcome.read("loaded")
    assert loaded.keys() == outcome.first.keys()
    assert all(torch.equal(loaded[name], outcome.first[name]) for name in loaded)
    alone, first = Alone(tmp_path / "model", gpu), outcome.read("first")
    load_engine(alone.engine, outcome.store, "together")
    back = weights_of(alone.engine)
    assert all(torch.equal(back[name], first[name]) for name in first)
    alone.update()
    for continued, wanted in (
        (outcome.read("resumed"), outcome.second),
        (weights_of(alone.engine), outcome.read("second")),
    ):
        assert distance(continued, wanted, "model.") < 1e-5
        assert distance(continued, wanted, "exp_avg.") < TOLERANCE["float32"]


def test_two_gpus_serve_one_model(tmp_path: Path) -> None:
    save_sharp_model(tmp_path / "model")
    script = Path(__file__).parents[1] / "rollout" / "engine" / "tensor_parallel.py"
    start_ranks(script, 2, tmp_path / "model", tmp_path / "meeting", "cuda")
    told = json.loads((tmp_path / "meeting.json").read_text())
    fixed = list(range(7, 20))
    wanted = plain_log_probs(tmp_path / "model", fixed[:1], fixed[1:])
    torch.testing.assert_close(torch.tensor(told["log_probs"]), wanted, rtol=0, atol=1e-3)
    assert told["versions"] == [5] * 8
