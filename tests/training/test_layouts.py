"""Checkpoints between worlds of 1, 2 and 4 ranks and meshes of one and two dimensions, and what ranks do together."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import distance
from torch import Tensor

HERE = Path(__file__).parent
sys.path.append(str(HERE))
from layouts import LAYOUTS  # noqa: E402


class Worlds:
    """The folder in which all worlds left what they did."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / f"{name}.safetensors")

    def reports(self, name: str) -> list[Any]:
        return [json.loads((self.folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Worlds:
    folder = tmp_path_factory.mktemp("worlds")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])}
    done = subprocess.run(
        [sys.executable, str(HERE / "layouts.py"), str(tiny_model), str(folder)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return Worlds(folder)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("loaded", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_layout_continues_every_others_checkpoint(worlds: Worlds, saved: str, loaded: str) -> None:
    state = worlds.read(f"loaded-{saved}-{loaded}")
    assert state["updates"] == 1 and {name.partition(".")[0] for name in state} == {
        "model", "exp_avg", "exp_avg_sq", "updates",
    }  # fmt: skip
    assert same(state, worlds.read(f"saved-{saved}"))
    assert all(tensor.any() for name, tensor in state.items() if name.startswith("exp_avg"))
    continued, wanted = worlds.read(f"next-{saved}-{loaded}"), worlds.read(f"next-{saved}")
    assert continued["updates"] == 2 and not same(continued, state)
    del continued["updates"], wanted["updates"]
    assert distance(continued, wanted, "model.") < 1e-5
    assert distance(continued, wanted, "exp_avg.") < 1e-4
    assert distance(continued, wanted, "exp_avg_sq.") < 1e-4


def test_weights_trained_on_during_a_save_do_not_reach_the_file(worlds: Worlds) -> None:
    assert worlds.reports("during") == [False, False], "the save was over before training went on"
    before = worlds.read("before")
    assert not same(worlds.read("after"), before)
    assert same(worlds.read("reloaded"), before)


def test_ranks_agree_on_the_number_of_micro_batches(worlds: Worlds) -> None:
    assert worlds.reports("parts") == [2, 2], "the second rank's tokens alone fit into one"


@pytest.mark.parametrize(("name", "longest"), [("oversized", 7), ("refused", 20)])
def test_a_sequence_above_the_budget_is_one_error_on_all_ranks(worlds: Worlds, name: str, longest: int) -> None:
    first, second = worlds.reports(name)
    assert first == second and first[0] == "InputError"
    assert f"set actor.max_tokens_per_micro_batch={longest}" in first[1]


def test_what_one_rank_could_not_write_is_the_error_of_all(worlds: Worlds) -> None:
    for kind, text in worlds.reports("unwritable"):
        assert kind == "InputError"
        assert "NotADirectoryError" in text and "storage.root" in text


def test_a_rank_that_dies_during_a_save_is_a_transient_error(worlds: Worlds) -> None:
    kind, text = json.loads((worlds.folder / "lost-0.json").read_text())
    assert kind == "TransientError" and "a rank was lost" in text
