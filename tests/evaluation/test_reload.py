"""A process of its own says how far a folder is from what was trained."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_core.cluster.resources import WORKER_ENV
from rl_core.errors import TransientError
from rl_core.evaluation.reload import Question, reload_test

ENV = {**WORKER_ENV, "OMP_NUM_THREADS": "1"}
FIXED = [5, 9, 12, 7, 33]
PROMPT = [4, 8, 15]


@pytest.fixture(params=["transformers", "vllm"])
def question(request: pytest.FixtureRequest, tiny_model: Path) -> Question:
    """The right answers of transformers, but for one log-prob and one token of the greedy answer."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        log_probs_TV = model(torch.tensor([FIXED])).logits[0, :-1].log_softmax(-1)
        likeliest = int(model(torch.tensor([PROMPT])).logits[0, -1].argmax())
        second = int(model(torch.tensor([[*PROMPT, likeliest]])).logits[0, -1].argmax())
    log_probs = log_probs_TV.gather(1, torch.tensor(FIXED[1:])[:, None]).squeeze(1).tolist()
    turns = [{"prompt_ids": PROMPT, "response_ids": [likeliest, second]}]
    return Question(str(tiny_model), request.param, "float32", 16, 1, 0.5, FIXED, log_probs, turns)


def test_what_differs_is_measured_in_nats(question: Question, tiny_model: Path) -> None:
    wrong = (question.turns[0]["response_ids"][0] + 1) % 64
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        log_probs_V = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    shifted = [*question.canary_log_probs[:-1], question.canary_log_probs[-1] + 0.5]
    turns = [{"prompt_ids": PROMPT, "response_ids": [wrong]}]
    found = reload_test(replace(question, canary_log_probs=shifted, turns=turns), ENV, 900)
    # That all is right gives no difference is among the checks of the demo's gate.
    assert found["log_prob_difference"] == pytest.approx(0.5, abs=1e-4)
    assert found["greedy_gap"] == pytest.approx(float(log_probs_V.max() - log_probs_V[wrong]), abs=1e-4)


def test_a_folder_that_cannot_be_loaded_is_a_problem_in_words(question: Question, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "exit code 1" in reload_test(replace(question, folder=str(tmp_path)), ENV, 900)["problem"]
    assert reload_test(question, ENV, 0.01) == {"problem": "no answer within 0.01 s"}


def test_a_process_that_is_killed_says_nothing_about_the_folder(question: Question) -> None:
    def kill() -> None:
        end = time.monotonic() + 180
        while time.monotonic() < end:
            for process in psutil.Process().children():
                if "rl_core.evaluation.reload" in process.cmdline():
                    process.kill()
                    return
            time.sleep(0.05)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(TransientError, match="was killed"):
        reload_test(question, ENV, 900)
    thread.join()
