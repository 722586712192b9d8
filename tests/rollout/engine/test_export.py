"""An exported policy served by vLLM's own loader."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from support import LENGTHS, off_policy, policy_engine, rows_of, update_alone
from transformers import AutoModelForCausalLM

from rl_core.cluster.resources import WORKER_ENV
from rl_core.config.schema import OptimConfig
from rl_core.models.load import load_tokenizer
from rl_core.storage.store import Store
from rl_core.training.mesh import RankMesh
from rl_core.training.sharded_checkpoint import export_model

FIXED = [7, 8, 20, 21, 60, 3, 44, 9, 9, 1, 33, 50]


def test_an_export_is_served_by_vllm_as_it_is(tiny_model: Path, rank_mesh: RankMesh, tmp_path: Path) -> None:
    """Loaded from the folder alone, with its tokenizer, template and generation config."""
    policy = policy_engine(tiny_model, rank_mesh, OptimConfig(lr=3e-2))
    update_alone(policy, off_policy(policy, rows_of(LENGTHS)))
    policy.model.generation_config.temperature = 0.6
    export_model(policy, "float32", tiny_model, Store(str(tmp_path)), "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32, attn_implementation="eager")
    logits_TV = model(torch.tensor([FIXED])).logits[0, :-1]
    wanted = logits_TV.log_softmax(-1).gather(1, torch.tensor(FIXED[1:])[:, None]).squeeze(1)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "load_export.py"), str(tmp_path / "export"), *map(str, FIXED)],
        env={**os.environ, **WORKER_ENV}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    served = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    torch.testing.assert_close(torch.tensor(served["log_probs"]), wanted, rtol=0, atol=1e-5)
    tokenizer = load_tokenizer(tiny_model)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "1 2"}], tokenize=False)
    assert served == {**served, "temperature": 0.6, "chat": chat, "end": tokenizer.eos_token}
