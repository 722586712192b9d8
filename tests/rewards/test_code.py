"""Programs are scored by the row's tests, and reach little of the machine that runs them."""

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support_scoring import scored

from rl_core.rewards.code import code, last_block

ADD = "def add(a, b):\n    return a + b"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


def row(**truth: Any) -> dict[str, Any]:
    return {"data_source": "code", "reward_model": {"ground_truth": json.dumps(truth)}}


def block(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def share(program: str, *tests: str, **more: Any) -> float:
    return code(block(program), row(tests=list(tests), **more))["tests_passed"]


def test_all_tests_or_nothing_and_their_share_by_name() -> None:
    assert code(block(ADD), row(tests=TESTS)) == {"score": 1.0, "tests_passed": 1.0}
    half = code(block("def add(a, b):\n    return 3"), row(tests=TESTS))
    assert half == {"score": 0.0, "tests_passed": 0.5}
    for nothing in ("", ADD, block("syntax error"), block("import sys\nsys.exit(0)"), block("import os\nos._exit(0)")):
        assert code(nothing, row(tests=TESTS)) == {"score": 0.0, "tests_passed": 0.0}


def test_programs_read_and_print() -> None:
    double = block("for line in open(0):\n    print(2 * int(line))\n    print()")
    assert code(double, row(inputs=["1\n", "4"], outputs=["2", "8\n"]))["score"] == 1.0
    assert code(double, row(inputs=["1", "4"], outputs=["2", "9"])) == {"score": 0.0, "tests_passed": 0.5}
    assert code(block("print(1)\nraise SystemExit(1)"), row(inputs=[""], outputs=["1"]))["score"] == 0.0
    assert code(block("print(1)\nraise SystemExit"), row(inputs=[""], outputs=["1"]))["score"] == 1.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\na\n```\nand\n```python\nb\n```", "b\n"),
        ("```python\na\n```\noutput:\n```\n1\n```", "a\n"),
        ("```py\na\n```\n```python\nnot closed", "a\n"),
        ("```text\n```python\na\n```", None),
        ("```python\n```", ""),
        ("a = '```python'", None),
    ],
)
def test_the_last_closed_block_of_python_counts(text: str, found: str | None) -> None:
    assert last_block(text) == found


@pytest.mark.parametrize(
    "truth", [{}, {"tests": []}, {"inputs": ["1"], "outputs": []}, {"tests": ["1"], "inputs": ["1"]}]
)
def test_a_ground_truth_without_tests_is_an_error(truth: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the ground truth for code needs"):
        code(block(ADD), row(**truth))


def test_what_hangs_fails_its_tests_and_leaves_no_process() -> None:
    program = "import os, subprocess\nsubprocess.Popen(['sleep', '98.7'], start_new_session=True)\n"
    program += f"{ADD}\ndef hang():\n    while True: pass"
    start = time.monotonic()
    assert share(program, TESTS[0], "hang()", TESTS[1], timeout_s=2) == pytest.approx(1 / 3)
    assert time.monotonic() - start < 30
    deadline = time.monotonic() + 30
    while sleepers() and time.monotonic() < deadline:  # the kernel ends them, in its time
        time.sleep(0.05)
    assert not sleepers()


def sleepers() -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "98.7"]]


def test_a_killed_scoring_process_takes_the_program_along(tmp_path: Path) -> None:
    program = block("import os\nos.execvp('sleep', ['sleep', '98.7'])")
    (result,) = scored([program], [row(tests=["1"], timeout_s=60)], function="code", timeout_s=1.5)
    assert (result.score, result.status) == (0.0, "unreadable") and "timeout_s=1.5" in result.detail
    deadline = time.monotonic() + 30
    while sleepers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sleepers()


def test_it_has_neither_credentials_nor_input_nor_much_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    checks = [
        "import os; assert not [name for name in os.environ if 'SECRET' in name]",
        "import sys; assert sys.stdin.read() == ''",
        "import os; assert os.environ['HOME'] == os.getcwd()",
        "x = bytearray(1 << 28)",
    ]
    assert share("", *checks) == 1.0
    assert share("", "x = bytearray(1 << 31)") == 0.0
    assert share("", "f = open('x', 'wb', 0); f.write(b'1' * 2000000); assert f.write(b'1')") == 0.0
    assert code(block("print('1' * 3000000)"), row(inputs=[""], outputs=["1" * 3000000]))["score"] == 0.0
