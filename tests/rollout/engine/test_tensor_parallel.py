import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from support import complete, plain_log_probs, start_ranks

from rl_core.rollout.engine.protocol import RolloutEngine, Sampling


def test_two_ranks_serve_one_model_as_one_rank_does(
    tiny_model: Path, tmp_path: Path, vllm_engine: RolloutEngine
) -> None:
    left = Path("/dev/shm/-left-cpushm")  # as of an engine that was killed
    left.touch()
    start_ranks(Path(__file__).parent / "tensor_parallel.py", 2, tiny_model, tmp_path / "meeting", "cpu")
    assert not left.exists()
    told = json.loads((tmp_path / "meeting.json").read_text())
    fixed = list(range(7, 20))
    wanted = plain_log_probs(tiny_model, fixed[:1], fixed[1:])
    torch.testing.assert_close(torch.tensor(told["log_probs"]), wanted, rtol=0, atol=1e-5)
    weights = load_file(tiny_model / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    vllm_engine.update_weights(weights.items(), 5)
    alone = complete(vllm_engine, [[4, 8, 9], [4, 30], [40]], [1, 2, 3], Sampling(1.0, 8, ()))
    assert told["ids"] == [turn.token_ids for turn in alone] and told["versions"] == [5] * 8
