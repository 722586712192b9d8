"""No credential that a user may have set comes up where a run is kept, watched or told of."""

import json
import pickle
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import psutil
import pyarrow.parquet as pq
import pytest
from support_flows import COMMAND, SMALL, environment

from flows.cli.main import main
from flows.home import ADDRESSES
from rl_core.config.compose import compose
from rl_core.credentials import without_credentials
from rl_core.errors import InputError, TransientError
from rl_core.storage.filesystem import storage_errors
from rl_core.storage.store import Store
from tasks.tracking.tracker import check_tracking

WORD = "hunter2Zq7"
"""Part of every secret."""
VARIABLES = {
    name: f"{WORD}{name.replace('_', '')}"
    for name in (
        "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN",
        "PREFECT_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "JUDGE_KEY", "WORDS_KEY",
    )
}  # fmt: skip
URL = f"https://user:{WORD}@host.example/place"
NOWHERE = {"AWS_ACCESS_KEY_ID": "me", "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
EVALUATED, TRAINED = 2 * 8, 2 * 8 * 4
"""Responses that the judge scores before and after the training, and in it."""
MCP_SERVER = Path(__file__).parents[1] / "mcp_server_for_tests.py"


class Judge(BaseHTTPRequestHandler):
    """Refuses every fourth request of the training, with the key in its answer as some servers do."""

    asked = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        key, type(self).asked = self.headers["Authorization"].removeprefix("Bearer "), self.asked + 1
        assert key == VARIABLES["JUDGE_KEY"]
        refused = self.asked % 4 == 0 and EVALUATED < self.asked <= EVALUATED + TRAINED
        content = None if refused else f"Score: {self.asked % 2}"
        body = {"choices": [{"message": {"content": content}}]} if content else {"error": f"the key {key} is refused"}
        self.send_response(200 if content else 401)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


class JudgeServer(ThreadingHTTPServer):
    """Takes all requests that come at once."""

    request_queue_size = 64


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    server = JudgeServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


@dataclass
class Ran:
    """A run with all secrets in its environment: its home folder, and everything that anybody could see of it."""

    home: Path
    code: int
    output: str
    command_lines: set[str]

    def told_by(self, *arguments: str) -> str:
        """What another command prints."""
        done = subprocess.run(
            [COMMAND, *arguments], env=environment(self.home) | VARIABLES | NOWHERE,
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        return f"exit code {done.returncode}\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def ran(judge: str) -> Iterator[Ran]:
    home = Path(mkdtemp(prefix="rfs"))  # short, so that Ray's logs are below it too
    settings = [
        *SMALL, "trainer.steps=2", "data.val_rows=8", "warm_start.steps=2",
        "tracking.traces_per_step=1", "reward.function=judge",
        f"reward.judge.url={judge}", "reward.judge.model=any", "reward.judge.key_env=JUDGE_KEY",
        "reward.judge.retries=0", "reward.max_failed_share=1", "agent.parser=pythonic",
        f"agent.mcp_servers=[env SECRET_KEY=$WORDS_KEY {sys.executable} {MCP_SERVER}]",
    ]  # fmt: skip
    process = subprocess.Popen(
        [COMMAND, "run", "demo", "--run", "secret", "-v", *settings],
        env=environment(home) | VARIABLES, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    seen: set[str] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.1):
            try:
                family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                seen.update(" ".join(member.cmdline()) for member in family)
            except psutil.Error:
                continue

    watcher = threading.Thread(target=look)
    watcher.start()
    output, _ = process.communicate(timeout=1500)
    ended.set()
    watcher.join()
    yield Ran(home, process.returncode, output, seen)
    rmtree(home)


def forms(word: str) -> list[bytes]:
    """The word as it stands in a file, also within base64, whatever stands before it."""
    found = [word.encode()]
    for before in range(3):
        encoded = b64encode(b"x" * before + word.encode())
        found.append(encoded[4 * (before > 0) : len(encoded) // 4 * 4 - 4])
    return found


def found_in(home: Path) -> list[str]:
    """Files below the folder that hold a secret."""
    found = []
    for file in home.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            if file.suffix == ".parquet":  # compressed
                content += repr(pq.read_table(file).to_pylist()).encode()
            if any(form in content for form in forms(WORD)):
                found.append(str(file.relative_to(home)))
    return found


def test_the_search_finds_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "plain.log").write_text(f"… {VARIABLES['HF_TOKEN']} …")
    for before in range(3):
        (tmp_path / f"{before}.result").write_bytes(b64encode(b"x" * before + pickle.dumps([VARIABLES["JUDGE_KEY"]])))
    assert len(found_in(tmp_path)) == 4


def test_a_run_keeps_and_tells_no_secret(ran: Ran) -> None:
    assert ran.code == 0, ran.output
    assert any("mcp_server_for_tests" in line for line in ran.command_lines)
    places = {str(file.relative_to(ran.home)).split("/")[0] for file in ran.home.rglob("*") if file.is_file()}
    assert places >= {"mlflow.db", "mlartifacts", "prefect", "ray", "runs"}, "what is searched is there"
    assert found_in(ran.home) == []
    assert WORD not in ran.output
    assert not [line for line in ran.command_lines if WORD in line]
    assert Judge.asked == 2 * EVALUATED + TRAINED and "the key *** is refused" in repr(
        pq.read_table(ran.home / "runs/secret/rollouts/step_000001.parquet", columns=["score_detail"]).to_pylist()
    )


@pytest.mark.parametrize(
    "words",
    [
        ("runs", "--json"), ("status", "secret"), ("report", "secret"), ("lineage", "1", "--json"), ("doctor", "demo"),
        ("run", "demo", "--new", "storage.root=s3://bucket/runs"),  # where nothing answers
        ("config", "demo", "reward.judge.key_env=JUDGE_KEY"), ("data", "check", "demo", "data.train_rows=8"),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_commands_on_it_tell_none(ran: Ran, words: tuple[str, ...]) -> None:
    told = ran.told_by(*words)
    assert "Traceback" not in told and WORD not in told, told
    assert found_in(ran.home) == []


@pytest.mark.parametrize(
    "setting",
    [
        f"tracking.uri={URL}", f"storage.root=s3://key:{WORD}@bucket/runs", f"reward.judge.url={URL}",
        f"data.path={URL}.jsonl", f"data.val_path=[rows.parquet, '{URL}.jsonl']", f"model.path={URL}",
        f"data.mixture=[{{source: files, path: '{URL}', val_path: x}}]", f"tracking.url={URL}", f"data={URL}",
        f"data.path=https://host/rows.parquet?X-Amz-Credential=me&X-Amz-Signature={WORD}",
        f"agent.mcp_servers=['{URL}']", f"agent.mcp_servers=['https://host/mcp?api_key={WORD}']",
        f"agent.mcp_servers=['words --api-key {WORD}']", f"agent.mcp_servers=[env TOKEN={WORD} words]",
        f"agent.mcp_servers='words --header \"Authorization: Bearer {WORD}\"'", f"reward.judge.key_env=sk-{WORD}",
        f"agent.mcp_servers=[env AWS_SECRET_ACCESS_KEY={WORD} words]", f"agent.mcp_servers=[env DB_PASS={WORD} words]",
        f"agent.mcp_servers=['https://host/mcp?wordsApiKey={WORD}']", f"agent.mcp_servers=[words --access-key {WORD}]",
        f"agent.mcp_servers='words --header \"X-Api-Key: {WORD}\"'", f"agent.mcp_servers=['HTTPS://{WORD}@host/mcp']",
        f"agent.mcp_servers='words --header \"Authorization: Basic {WORD}\"'",
        f"agent.mcp_servers=['https://host/mcp?client_secret={WORD}']",
        f"agent.mcp_servers=[words --pat {WORD}]", f"agent.mcp_servers=['curl -u me:{WORD} host']",
        f"reward.judge.prompt='hf_{3 * WORD}'", f"storage.root=/runs/ghp_{4 * WORD}",
    ],
)  # fmt: skip
def test_a_setting_with_credentials_is_refused_and_not_shown(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLFORWARD_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for words in (["config", "demo"], ["run", "demo", "--run", "x"], ["data", "check", "demo"], ["doctor", "demo"]):
        assert main([*words, setting]) == 2
    told = "".join(capsys.readouterr())
    assert WORD not in told and setting.partition("=")[0] in told
    assert not (tmp_path / "home").exists()


def test_a_variable_is_no_credential() -> None:
    for setting in (
        "http://me:$WORDS_KEY@host/mcp", "http://host/mcp?token=${WORDS_KEY}", "words --token $WORDS_KEY",
        'words --header "Authorization: Bearer $WORDS_KEY"', "env WORDS_KEY=$WORDS_KEY words", "monkey run --keys=2",
        "http://host/mcp?max_tokens=5", 'words --header "Authorization: Token $WORDS_KEY"', "words --hotkey F1",
        'env AUTHORIZATION="Bearer $WORDS_KEY" words', "words --mode basic --x", "docker run -i mcp/api-key:latest",
        "docker run -v /home/me/.secret:/x words", "http://host/mcp?use_auth=true", "https://vault-secret:8200/mcp",
    ):  # fmt: skip
        assert compose("demo", [f"agent.mcp_servers=['{setting}']"]).config.agent.mcp_servers == (setting,)


@pytest.mark.parametrize("name", ADDRESSES)
def test_an_address_in_the_environment_has_none_either(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLFORWARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(name, URL)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for words in (["run", "demo"], ["doctor"], ["models"]):
        assert main(words) == 2
    told = "".join(capsys.readouterr())
    assert WORD not in told and name in told and not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    "opened",
    [
        Store, check_tracking, lambda url: main(["models", "--tracking-uri", url]),
        lambda url: main(["runs", "--root", url]), lambda url: main(["data", "check", f"{url}.jsonl"]),
    ],
    ids=["store", "uri", "models", "runs", "data"],
)  # fmt: skip
def test_addresses_that_are_given_otherwise_are_refused(
    opened: Callable[[str], object], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert opened(URL) == 2
        told = "".join(capsys.readouterr())
    except InputError as error:
        told = f"{error} {error!r} {error.args}"
    assert WORD not in told and "credentials" in told


def test_what_libraries_say_is_told_without_credentials() -> None:
    signed = f"https://bucket.host/shard?X-Amz-Expires=60&X-Amz-Signature={WORD}&X-Amz-Security-Token={WORD}"
    with pytest.raises(TransientError) as raised, storage_errors("s3://bucket/shard"):
        raise ConnectionError(f"GET {signed} failed behind http://me:{WORD}@proxy:3128")
    for told in (str(raised.value), repr(raised.value), repr(pickle.loads(pickle.dumps(raised.value)).args)):
        assert WORD not in told and "X-Amz-Expires=60" in told and "@proxy:3128" in told
    assert without_credentials(f"https://me:{WORD}@mlflow:5000/x") == "https://***@mlflow:5000/x"
    for harmless in (
        "http://host:5000/a@b?max_tokens=5&steps=3", "me@host", "sqlite:////home/a@b/mlflow.db", "s3://bucket/a:b@c",
        "abfs://container@account.dfs.core.windows.net/rows", "sftp://me@host/rows",
    ):  # fmt: skip
        assert without_credentials(harmless) == harmless
