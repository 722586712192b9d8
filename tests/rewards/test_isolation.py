"""Where the kernel refuses namespaces no program runs, unless the settings say so; and what then still holds."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from support_scoring import scored

from rl_core.config.compose import compose
from rl_core.config.schema import RewardConfig
from rl_core.errors import InputError
from rl_core.rewards import programs, sandbox
from rl_core.rewards.code import code
from rl_core.rewards.runner import check_scorers
from rl_core.rewards.worker import score_chunk

REFUSE = """import ctypes, struct, sys
from rl_core.rewards import seccomp
seccomp.DENIED = {"unshare": seccomp.DENIED["unshare"]}
rules = ctypes.create_string_buffer(seccomp.system_call_filter())
passed = ctypes.create_string_buffer(struct.pack("@HP", len(rules.raw) // 8, ctypes.addressof(rules)))
libc = ctypes.CDLL(None)
libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.addressof(passed), 0, 0) == 0
from flows.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""Runs the command line in a process whose kernel refuses namespaces."""


def row(**truth: Any) -> dict[str, Any]:
    return {"data_source": "code", "reward_model": {"ground_truth": json.dumps(truth), "style": "rule"}}


def block(program: str) -> str:
    return f"```python\n{program}\n```"


def refused(script: str, *words: str, home: Path) -> tuple[int, str]:
    environment = {**os.environ, "ROLLFORWARD_HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", script, *words], env=environment, capture_output=True, text=True)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def test_nothing_runs_where_namespaces_are_refused(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    script = (
        REFUSE.partition("from flows")[0]
        + f"""from rl_core.rewards.code import code
from rl_core.rewards.runner import check_scorers
from rl_core.rewards.worker import score_chunk
from rl_core.config.reward import CodeConfig, RewardConfig
from rl_core.errors import InputError
from rl_core.rewards.programs import isolate
def refused(call, *words):
    try:
        call(*words)
    except InputError as error:
        print(error.where, "|", error.seen)
response, row = {block(f"open({str(trace)!r}, 'w')")!r}, {row(tests=["1"])!r}
for _ in range(2):
    refused(check_scorers, RewardConfig(), {{"code": "row 1"}})
    refused(code, response, row)
check_scorers(RewardConfig(code=CodeConfig(isolation="none")), {{"code": "row 1"}})
import os; print(os.path.exists({str(trace)!r}))
isolate("none")
print(code(response, row), os.path.exists({str(trace)!r}))
"""
    )
    code_, said = refused(script, home=tmp_path)
    error = "reward.code.isolation=namespaces | unshare: Operation not permitted "
    assert (code_, said) == (0, f"{error * 4}False {{'score': 1.0, 'tests_passed': 1.0}} True")


def test_the_data_check_refuses_it(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row(tests=["1"]) | {"prompt": [{"role": "user", "content": "1"}]}))
    for chosen in (["reward.function=code"], []):
        result, said = refused(REFUSE, "data", "check", str(rows), *chosen, home=tmp_path)
        assert result == 2 and "unshare: Operation not permitted" in said and "would accept" not in said
    settings = ["reward.function=code", "reward.code.isolation=none"]
    assert refused(REFUSE, "data", "check", str(rows), *settings, home=tmp_path)[0] == 0


def test_the_doctor_warns_of_it(tmp_path: Path) -> None:
    script = (
        REFUSE.partition("from flows")[0]
        + """from flows.cli.doctor_checks import _programs
from rl_core.config.reward import CodeConfig
for code in (CodeConfig(), CodeConfig(isolation="none")):
    print(_programs(code).level, _programs(code).seen)
"""
    )
    _, said = refused(script, home=tmp_path)
    assert said.startswith("warning cannot be isolated: unshare: Operation not permitted; scorer `code` is refused")
    assert "warning Programs written by the model are not isolated (reward.code.isolation=none)" in said


def test_a_user_without_a_process_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "PROBE", "print(False)")
    programs.check_isolation.cache_clear()
    with pytest.raises(InputError, match="the limit of 64 processes does not bind this user"):
        check_scorers(RewardConfig(), {"code": "row 1"})


def test_a_sandbox_that_is_not_there_is_an_error_and_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    for command, error in ((["false"], InputError), (["sleep", "9"], TimeoutError)):
        monkeypatch.setattr(programs, "_command", lambda *_, command=command: command)
        with pytest.raises(error):
            code(block("1"), row(tests=["1"], timeout_s=1.2))


def test_scoring_processes_follow_the_setting() -> None:
    look = block("import os; print(os.getpid() < 9)")
    for isolation, score in (("namespaces", 1.0), ("none", 0.0)):
        rows = [row(inputs=[""], outputs=["True"])]
        (result,) = scored([look], rows, function="code", code={"isolation": isolation}, timeout_s=30)
        assert result.score == score


def test_another_isolation_is_another_run() -> None:
    with pytest.raises(InputError, match="reward.code.isolation"):
        compose("demo", ["reward.code.isolation=some"])
    plain, none = (compose("demo", words).config for words in ([], ["reward.code.isolation=none"]))
    assert plain.reward.code.risk == "" and "can read answers and credentials" in none.reward.code.risk


def test_without_namespaces_rights_and_calls_are_still_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_isolation", "none")
    flags = "import ctypes\nlibc = ctypes.CDLL(None)\nprint(libc.prctl(39, 0, 0, 0, 0), libc.prctl(21, 0, 0, 0, 0))"
    assert programs.run_program(flags, time.monotonic() + 60).output == "1 2\n"
    assert code(block("x = 1"), row(tests=["assert x == 1"]))["score"] == 1.0


@pytest.mark.parametrize("isolation", ["namespaces", "none"])
@pytest.mark.parametrize(
    "leaves",
    [
        "for _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')",
        "for name in ('verdict', 'passed', 'report'):\n    os.symlink('/dev/zero', name)\nos.symlink('/', 'root')",
        "os.mkdir('closed')\nopen('closed/file', 'w')\nos.chmod('closed', 0)",
        "open('verdict', 'w').truncate(1 << 20)\nos.mkfifo('pipe')",
    ],
    ids=["deep", "links", "closed", "large"],
)
def test_what_a_program_leaves_in_its_folder_harms_nobody(
    isolation: Any, leaves: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_isolation", isolation)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = f"import os\n{leaves}"
    assert code(block(program), row(tests=["1"]))["score"] == 1.0
    assert code(block(program), row(inputs=[""], outputs=[""]))["score"] == 1.0
    assert os.listdir(tmp_path) == [] and os.path.exists("/dev/zero")


FLOODS = """import os
for file in range(3, 16):
    try:
        os.ftruncate(file, 1 << 40)
    except OSError:
        pass
x = 1"""


def test_what_it_prints_and_reports_is_read_up_to_a_limit() -> None:
    assert code(block(FLOODS), row(tests=["assert x == 1", "assert x == 2"]))["tests_passed"] == 0.5
    ended = programs.run_program("print('1' * (2 << 20))", time.monotonic() + 60)
    assert not ended.succeeded and len(ended.output) <= sandbox.FILE_SIZE


def test_a_refusal_on_the_way_is_no_score_of_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InputError("namespaces", "none", "this machine", "allow them")

    monkeypatch.setattr("rl_core.rewards.code.run_program", refuse)
    (result,) = score_chunk([("code", block("pass"), row(tests=["1"]), None)], 1.0)
    assert (result.score, result.status) == (None, "error")
