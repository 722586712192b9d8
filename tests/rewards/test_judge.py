"""A judge behind a real server: asked politely, understood or a typed failure, and its key told to nobody."""

import json
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pydantic import ValidationError
from support_scoring import scored

from rl_core.config.reward import JudgeConfig
from rl_core.config.schema import RewardConfig
from rl_core.errors import InputError
from rl_core.rewards.judge import check_judge
from rl_core.rewards.runner import RewardResult, check_scorers

KEY = "sk-very-secret"


class Server(ThreadingHTTPServer):
    """Answers as the response says, which is between the last two lines with the code; what it was asked is kept."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.questions: list[str] = []
        self.keys: set[str | None] = set()
        self.sent = 0
        self.busy, self.at_once, self.most_at_once = 0, 0, 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        with self.server.lock:
            self.server.questions.append(question)
            self.server.keys.add(self.headers["Authorization"])
            self.server.busy -= 1
            refused = (429, 500)[self.server.busy % 2] if self.server.busy >= 0 else 0
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        code = question.splitlines()[-1]
        self.answer(question.split(f"{code}\n")[-1].removesuffix(f"\n{code}"), refused)

    def answer(self, wish: str, refused: int) -> None:
        kind, _, rest = wish.partition(" ")
        if kind == "sleep":
            time.sleep(float(rest))
        with self.server.lock:
            self.server.at_once -= 1  # before the answer, after which the next request may come
        status = refused or (int(rest) if kind == "status" else 200)
        if kind == "huge":
            self.send_response(int(rest))
            self.send_header("Content-Length", str(400 * 2**20))
            self.end_headers()
            with suppress(OSError):  # the client stops reading
                for _ in range(400):
                    self.wfile.write(b"x" * 2**20)
                    self.server.sent += 2**20
            self.close_connection = True
            return
        content = {"choices": [{"message": {"content": wish}}]} if status == 200 else {"error": f"bad key {KEY}"}
        data = b"no json" if kind == "garbage" else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if refused == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def config(server: Server, **settings: Any) -> JudgeConfig:
    url = f"http://127.0.0.1:{server.server_port}/v1/"
    return JudgeConfig(
        url=url, model="m", key_env="JUDGE_KEY", **{"prompt": "{prompt} {ground_truth}\n{response}", **settings}
    )


def row(source: str = "judge") -> dict[str, Any]:
    prompt = [{"role": "user", "content": "Q {response}"}]
    return {"data_source": source, "prompt": prompt, "reward_model": {"ground_truth": "T"}}


def judged(judge: JudgeConfig, *responses: str) -> list[RewardResult]:
    return scored(responses, [row()] * len(responses), function="judge", judge=judge)


def test_a_busy_server_is_asked_again_and_other_rows_are_scored_as_ever(server: Server) -> None:
    server.busy = 2
    responses = ["T", "score: 0.2, no,\n**Score: 0.5**", "x"]
    results = scored(responses, [row("exact"), row(), row("exact")], judge=config(server))
    assert [(result.score, result.status) for result in results] == [(1.0, "ok"), (0.5, "ok"), (0.0, "ok")]
    assert len(set(server.questions)) == 1 and len(server.questions) == 3
    guard, blank, asked, *guarded = server.questions[0].splitlines()
    assert asked == "Q {response} T" and guarded[1:-1] == ["score: 0.2, no,", "**Score: 0.5**"]
    assert guarded[0] == guarded[-1] and f"between the two lines {guarded[0]} is" in guard.lower() and not blank
    assert server.keys == {f"Bearer {KEY}"}


def test_what_the_judge_cannot_answer_is_a_failure_that_does_not_tell_the_key(server: Server) -> None:
    results = judged(
        config(server, retries=0), "none", "status 401", "status 503", "status 307", "garbage", "\ud800\nScore: 1"
    )
    assert [(result.score, result.status) for result in results] == [(None, "error")] * 5 + [(1.0, "ok")]
    details = [result.detail for result in results]
    assert "does not match reward.judge.score" in details[0] and "401" in details[1] and "bad key ***" in details[1]
    assert not any(KEY in detail for detail in details)
    assert len(server.questions) == 6
    assert judged(config(server, retries=0, timeout_s=0.3), "sleep 1")[0].status == "timeout"


def test_a_server_out_of_reach_is_a_failure(server: Server) -> None:
    gone = config(server, retries=1)
    server.server_close()
    assert judged(gone, "Score: 1")[0].status == "error"


def test_so_many_are_asked_at_a_time(server: Server) -> None:
    pattern = r"sleep (\S+)"
    start = time.monotonic()
    assert [
        result.score for result in judged(config(server, requests=3, score_pattern=pattern), *["sleep 0.2"] * 9)
    ] == [0.2] * 9
    assert server.most_at_once == 3 and time.monotonic() - start > 0.6


def test_a_field_of_json_is_the_score(server: Server) -> None:
    answers = ['so ```{"grade": 0.25}```', '{"grade": true}', '{"other": 1}', '{"grade": 1e999}', "grade: 1"]
    results = judged(config(server, score_field="grade"), *answers)
    assert [result.status for result in results] == ["ok", "error", "error", "out_of_range", "error"]
    assert results[0].score == 0.25


@pytest.mark.parametrize(
    ("answer", "status", "score"),
    [
        ("Score: 1", "ok", 1.0),
        ("Fine.\n\n Score: 0.25 \n", "ok", 0.25),
        ("__Score:__ 1.", "ok", 1.0),
        ("Score: 999999999999", "out_of_range", None),
        ("Score: " + "9" * 300, "out_of_range", None),
        ("Score: -0.5", "out_of_range", None),
        ("Score: 95%", "error", None),
        ("Score: 0,9", "error", None),
        ("Score: 9/10", "error", None),
        ('Score: 0. The response tried to say "Score: 1"', "error", None),
        ("Score: 1\nNo, it is wrong.", "error", None),
        ("Score: 1" + " " * 2000 + "no", "error", None),
        ("", "error", None),
    ],
)
def test_only_the_last_line_of_the_judge_has_the_score_and_only_in_its_range(
    server: Server, answer: str, status: str, score: float | None
) -> None:
    [result] = judged(config(server), answer)
    assert (result.status, result.score) == (status, score)


def test_a_range_of_its_own(server: Server) -> None:
    results = judged(config(server, score_range=(1.0, 10.0)), "Score: 7", "Score: 0", "Score: 10")
    assert [(result.status, result.score) for result in results] == [("ok", 7.0), ("out_of_range", None), ("ok", 10.0)]
    assert "score_range=[1, 10]" in results[1].detail


def test_only_an_object_at_the_end_has_the_score(server: Server) -> None:
    answers = ['{"grade": 0.5, "why": {"a": 1}}', '{"grade": 1} was requested, no', '{"a": {"grade": 1}}', "{" * 30_000]
    results = judged(config(server, score_field="grade"), *answers)
    assert [result.status for result in results] == ["ok", "error", "error", "error"] and results[0].score == 0.5


def test_a_response_cannot_end_its_section(server: Server) -> None:
    judged(config(server), "Score: 1", "Score: 1")
    codes = [question.splitlines()[-1] for question in server.questions]
    assert len(set(codes)) == 2 and all(len(code) == 32 for code in codes)


@pytest.mark.parametrize("status", [200, 400, 503])
def test_a_huge_reply_is_not_read_to_its_end(server: Server, status: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    [result] = judged(config(server, retries=1), f"huge {status}")
    assert result.status == "error" and server.sent < 2 * 64 * 2**20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_a_judge_that_cannot_be_asked_is_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="reward.judge.url"):
        check_scorers(RewardConfig(), {"judge": "row 1"})
    with pytest.raises(InputError, match="a URL without credentials") as raised:
        check_judge(JudgeConfig(url=f"http://me:{KEY}@host/v1", model="m"))
    assert KEY not in str(raised.value)
    with pytest.raises(InputError, match="environment variable"):
        check_judge(JudgeConfig(url="http://host/v1", model="m", key_env="NO_SUCH_KEY"))
    for wrong in (
        {"key_env": KEY},
        {"url": "http://host"},
        {"prompt": "no place"},
        {"score_pattern": "no group"},
        {"score_pattern": "("},
        {"score_range": (1.0, 0.0)},
    ):
        with pytest.raises(ValidationError, match=r"reward\.judge\."):
            JudgeConfig(**wrong)
