"""`rollforward data check` in this process: what it prints, writes and returns."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main

Rows = list[dict[str, Any]]


def row(text: str, **changes: Any) -> dict[str, Any]:
    return {
        "data_source": "exact",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
    } | changes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def write(name: str, rows: list[Any]) -> str:
    Path(name).write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in rows))
    return name


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["data", "check", *words])
    return code, capsys.readouterr().out


def test_a_recipe_with_good_rows_may_start(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, said = check(capsys, "demo", "data.train_rows=70", "data.val_rows=9")
    assert code == 0 and "a run would accept these rows" in said and "sort_digits (79 rows)" in said
    assert "70 read, 70 kept" in said and "the offline model" in said
    assert list(folder.iterdir()) == []  # it writes nothing that nobody asked for


def test_ten_kinds_of_broken_rows_are_all_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    other = {"type": "function", "function": {"name": "calculator", "parameters": {"properties": {"y": {}}}}}
    broken = [
        ("one JSON object per line", "{broken"),
        ("list of messages in prompt", row("1", prompt=[])),
        ("messages of {role, content}", row("1", prompt=[{"role": "user"}])),
        ("ground_truth, a string or number", row("1", reward_model={"style": "rule"})),
        ("extra_info", row("1", extra_info=7)),
        ("a non-blank prompt", row("  ")),
        ("at most data.max_prompt_length=20 tokens", row("x" * 30)),
        ("training prompts that are not held out", row("99")),
        ("one of calculator", row("2", extra_info={"tools_kwargs": {"calculater": {}}})),
        ("as configured", row("3", extra_info={"tools_kwargs": {"calculator": {}}, "tools": [other]})),
    ]
    train, val = write("train.jsonl", [each for _, each in broken]), write("val.jsonl", [row("99")])
    settings = ("agent.tools=[calculator]", "data.max_prompt_length=20")
    code, said = check(capsys, train, "--val", val, *settings)
    assert code == 2 and "a run would reject these rows" in said
    assert [text for text, _ in broken if text not in said] == []


def test_a_path_alone_is_looked_at_as_training_rows(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = check(capsys, write("rows.jsonl", [row("1"), row("2")]))
    assert code == 0 and "2 read, 2 kept" in said and "held-out  " not in said


def test_the_last_line_names_what_files_alone_do_not_show(capsys: pytest.CaptureFixture[str]) -> None:
    def last_line(*words: str) -> str:
        return check(capsys, *words)[1].strip().splitlines()[-1].strip()

    train, val = write("train.jsonl", [row("1"), row("2")]), write("val.jsonl", [row("3")])
    size, held_out = "data.train_batch_size of at most 2", "held-out rows without the prompts of these"
    start = "a run would accept these rows"
    assert last_line(train) == f"{start}, with {size}; {held_out} (checked with --val)"
    assert last_line(train, "--val", val) == f"{start}, with {size}"
    assert last_line(train, "--val", val, "data.train_batch_size=2") == start
    assert last_line(train, "--val", val, "data.train_batch_size=3") == "a run would reject these rows"
    tools = write("tools.jsonl", [row("1", extra_info={"tools_kwargs": {"calculator": {}}})])
    needed = "the tools calculator (agent.tools or agent.mcp_servers)"
    assert last_line(tools, "--val", val, "data.train_batch_size=1").endswith(needed)
    assert last_line(tools, "--val", val, "agent.tools=[calculator]").endswith("data.train_batch_size of at most 1")


def test_a_folder_and_a_pattern_are_paths(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "many").mkdir()
    for i in range(3):
        write(f"many/{i}.jsonl", [row(str(i))])
    for target in ("many", "many/*.jsonl"):
        assert "3 read, 3 kept" in check(capsys, target)[1]


def test_a_missing_scorer_stops_a_recipe_and_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    train, val = (write(name, [row(name, data_source="unheard_of")]) for name in ("t.jsonl", "v.jsonl"))
    code, said = check(capsys, train)
    assert code == 2 and "✗ error" in said and "'unheard_of'" in said and "data_source of train row 1 (reward" in said
    assert "a run would reject these rows" in said and check(capsys, train, "reward.function=exact")[0] == 0
    assert check(capsys, train, "reward.sources=[unheard_of=exact]")[0] == 0
    files = ("data.source=files", f"data.path={train}", f"data.val_path={val}", "data.train_batch_size=1")
    code, said = check(capsys, "grpo", *files, "data.train_batch_size=1")
    assert code == 2 and "✗ error" in said and "'unheard_of'" in said
    assert check(capsys, "grpo", *files, "reward.function=numeric")[0] == 0


LEAVES_A_FILE = """
from pathlib import Path
Path("IMPORTED").touch()
def score(response, row):
    return 1.0
"""


def test_rows_choose_among_scorers_and_import_nothing(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "named_by_data.py").write_text(LEAVES_A_FILE)
    named = "named_by_data:score"
    hostile = [named, "builtins:eval", "named_by_data", "rl_core.data.sources.math", "../named_by_data", "math:floor"]
    for source in hostile:
        code, said = check(capsys, write("rows.jsonl", [row("1", data_source=source)]))
        assert code == 2 and f"'{source}'" in said and "reward.sources=[NAME=" in said, said
    extra = {"scorer": named, "function": named, "task": named, "entry": "{}"}
    fields = {"reward_model": {"style": named, "ground_truth": "1", "function": named}, "extra_info": extra}
    assert check(capsys, write("rows.jsonl", [row("1", ability=named, **fields)]))[0] == 0
    assert not (folder / "IMPORTED").exists() and "named_by_data" not in sys.modules
    rows = write("rows.jsonl", [row("1", data_source=named)])
    assert check(capsys, rows, f"reward.sources=[{named}={named}]")[0] == 0
    assert (folder / "IMPORTED").exists()
    sys.modules.pop("named_by_data")


@pytest.mark.parametrize("truth", ["5 of 8", "3-5", "10:30", "10^3", "three"])
@pytest.mark.parametrize("scorer", ["numeric", "gsm8k"])
def test_a_ground_truth_that_is_not_one_number_is_refused(
    capsys: pytest.CaptureFixture[str], truth: str, scorer: str
) -> None:
    rows = [row("1", data_source=scorer, reward_model={"ground_truth": "-1 1/2"})]
    rows += [row("2", data_source=scorer, reward_model={"ground_truth": truth})]
    code, said = check(capsys, write("rows.jsonl", rows))
    assert code == 2 and f"'{truth}' is not one number" in said and "where: train row 2" in said
    dropping = ("data.drop=[malformed]", "data.max_dropped_share=0.5")
    code, said = check(capsys, "rows.jsonl", *dropping)
    assert code == 0 and "2 read, 1 kept (malformed 1)" in said


@pytest.mark.parametrize(
    "truth", ["[]", "no JSON", '{"tests": [1]}', '{"tests": ["a"], "inputs": ["b"], "outputs": ["c"]}']
)
def test_a_ground_truth_without_tests_is_refused(capsys: pytest.CaptureFixture[str], truth: str) -> None:
    code, said = check(
        capsys, write("rows.jsonl", [row("1", data_source="code", reward_model={"ground_truth": truth})])
    )
    assert code == 2 and "a ground truth for the scorer `code`" in said and "where: train row 1" in said


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ("return 'right'", "invalid: scorer 'broken_{0}:score' returned 'right'"),
        ("return None", "invalid: scorer 'broken_{0}:score' returned None"),
        ("return float('nan')", "non_finite: "),
        ("return 1 / 0", "invalid: ZeroDivisionError: division by zero (File "),
        ("return {'reward': 1.0}", "expected a float or a dict with 'score'"),
    ],
)
def test_a_scorer_with_a_mistake_is_found_by_one_row(
    capsys: pytest.CaptureFixture[str], folder: Path, request: pytest.FixtureRequest, body: str, seen: str
) -> None:
    name = f"broken_{abs(hash(request.node.name))}"
    (folder / f"{name}.py").write_text(f"def score(response, row):\n    {body}\n")
    rows = write("rows.jsonl", [row("1"), row("2")])
    code, said = check(capsys, rows, f"reward.function={name}:score")
    assert code == 2 and seen.format(name.removeprefix("broken_")) in said, said
    assert "train row 1" in said and "correct the scorer" in said


def test_a_word_that_is_neither_recipe_nor_path_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = check(capsys, "demoo")
    assert code == 2 and "the nearest name is demo" in said
    code, said = check(capsys, "unrelated")
    assert code == 2 and "nearest" not in said and "use one of these names" in said


def test_held_out_rows_of_a_recipe_are_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = check(capsys, "demo", "--val", "rows.jsonl")
    assert code == 2 and "set data.val_path=rows.jsonl" in said


def test_the_page_is_written_where_it_is_asked_for(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    rows = write("rows.jsonl", [row("<script>alert(1)</script>", data_source="\x1b[31mred"), row("2")])
    code, said = check(capsys, rows, "--html", "page.html", "reward.function=exact")
    page = (folder / "page.html").read_text()
    assert code == 0 and "Rows of rows.jsonl" in page and "<script" not in page
    assert "\x1b" not in said
    code, said = check(capsys, rows, "--html", "absent/page.html")
    assert code == 2 and "--html absent/page.html" in said


def test_neither_torch_nor_ray_nor_mlflow_nor_prefect_is_loaded() -> None:
    heavy = ("torch", "ray", "mlflow", "prefect", "matplotlib")
    program = (
        "import sys; from flows.cli.main import main; code = main(['data', 'check', 'demo', 'data.train_rows=70']);"
        f"sys.exit(code or ' '.join(set({heavy}) & set(sys.modules)) or 0)"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(root)}
    )
    assert done.returncode == 0, done.stderr
