"""`rollforward serve` as a user runs it: one server of the offline model."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support_flows import COMMAND, environment
from support_registry import SCORES, make_run
from support_servers import free_port
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.cli.main import main
from tasks.registry.registry import Registry

CHAT = [{"role": "user", "content": "7 3 5 1 2"}]


@pytest.fixture
def home(sqlite_uri: str, tiny_model: Path, tmp_path: Path) -> Path:
    """A home folder whose champion is an offline model that says different things."""
    model, folder = AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "export"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(10)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    registry = Registry(sqlite_uri, "sorter")
    registry.promote(registry.register(folder, make_run(sqlite_uri, tmp_path), "a" * 64, {}, SCORES))
    return tmp_path


@pytest.fixture
def port(home: Path) -> Iterator[int]:
    """Where the champion is served once it is ready."""
    port = free_port()
    command = [COMMAND, "serve", "--port", str(port), "--", "--max-model-len", "64"]
    with (home / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment(home), stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 900
        while not answers(port):
            assert process.poll() is None and time.monotonic() < deadline, (home / "serve.log").read_text()
            time.sleep(0.5)
        yield port
        process.send_signal(signal.SIGINT)
        process.wait(60)
        deadline = time.monotonic() + 120
        while group_lives(process.pid):  # not one process of it stays
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert not answers(port)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def group_lives(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
    except urllib.error.HTTPError as error:
        return error.code == 401
    except (urllib.error.URLError, OSError):
        return False
    raise AssertionError("answered without the key")


def ask(port: int, key: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    return json.load(urllib.request.urlopen(request, timeout=60))


def greedy(folder: Path, tokens: int) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_the_champion_answers_over_the_openai_api_as_it_does_with_transformers(port: int, home: Path) -> None:
    assert f"sorter version 1: http://127.0.0.1:{port}/v1" in (home / "serve.log").read_text()
    key = (home / "secrets/servers").read_text()
    for path in ("/v1/models", "/version", "/metrics", "/tokenize", "/docs"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(port, key[::-1], model="sorter", messages=CHAT)
    assert key not in (home / "serve.log").read_text()
    answer = ask(port, key, model="sorter", messages=CHAT, temperature=0, max_tokens=12)
    (folder,) = (home / "cache" / "versions").iterdir()
    text = answer["choices"][0]["message"]["content"]
    assert len(set(text)) > 2 and text == greedy(folder, 12)


def test_a_port_in_use_and_an_unknown_version_are_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLFORWARD_HOME", str(home))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert main(["serve", "7", "--port", str(free_port())]) == 2
    assert main(["serve", "--", "--api-key=secret"]) == 2
    said = capsys.readouterr().out
    assert "VLLM_API_KEY" in said and "expected: a free port" in said and "version 1 = champion" in said
