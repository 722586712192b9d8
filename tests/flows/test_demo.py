"""What README promises of `make demo`: a small model learns, is registered, becomes champion, and loads anywhere."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from huggingface_hub import ModelCard
from support_flows import Result, environment, rollforward

from rl_core.data.store import StoredRows
from rl_core.reports.model_card import weights_hash
from rl_core.storage.store import Store

LINES = re.compile(r"^($|▸ |✓ |  \S|Run |Model )")


def run_folder(home: Path, name: str = "demo-*") -> Path:
    (folder,) = (home / "runs").glob(name)
    return folder


def evaluation(home: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_folder(home) / f"evaluation/step_{step:06d}.json").read_text())
    return found


@pytest.fixture(scope="module")
def steps(home: Path, demo: Result) -> int:
    assert demo.code == 0, demo.output
    return max(int(path.stem.split("_")[1]) for path in (run_folder(home) / "ledger").iterdir())


def test_the_model_learns(home: Path, steps: int) -> None:
    before, after = evaluation(home, 0), evaluation(home, steps)
    assert before["sampled"] <= 0.60
    assert after["sampled"] >= 0.85
    assert after["greedy"] >= 0.95


def test_it_takes_less_than_five_minutes(demo: Result) -> None:
    # Beside other tests it has a part of the machine only.
    assert demo.seconds < (1200 if "PYTEST_XDIST_WORKER" in os.environ else 300), demo.output


def test_a_person_sees_stages_one_line_a_step_and_a_table(demo: Result, steps: int) -> None:
    stages = re.findall(r"^✓ ([a-z ]+?)  ", demo.output, re.MULTILINE)
    wanted = ["prepare data", "warm start", "evaluate", "train", "evaluate"]
    wanted += ["register", "evaluate champion", "reload", "promote", "report"]
    assert [s for i, s in enumerate(stages) if i == 0 or stages[i - 1] != s] == wanted
    lines = re.findall(r"^  step +(\d+)/\d+  reward .+  kl .+  len .+ tok/s  left \S+$", demo.output, re.MULTILINE)
    assert [int(number) for number in lines] == list(range(1, steps + 1))
    for word in (
        "score, greedy",
        "score, sampled",
        "steps",
        "time",
        "model version",
        "alias",
        "report",
        "rollforward ui",
    ):
        assert word in demo.output
    assert "candidate, champion" in demo.output


def test_its_status_says_that_it_has_finished(home: Path, steps: int) -> None:
    status = json.loads(rollforward(home, "status", run_folder(home).name, "--json").output)
    assert (status["state"], status["step"], status["stage"]) == ("finished", steps, "report")
    assert status["seconds_per_step"] > 0 and status["reward"] > 0.5


def test_libraries_are_quiet(demo: Result) -> None:
    noise = [line for line in demo.output.splitlines() if not LINES.match(line)]
    assert noise == []


def test_all_files_stay_below_the_home_folder(home: Path, demo: Result, tmp_path: Path) -> None:
    assert {path.name for path in home.iterdir()} >= {"mlflow.db", "mlartifacts", "prefect", "runs"}
    assert not Path("mlruns").exists()


def test_each_step_is_kept_with_its_rollouts(home: Path, steps: int) -> None:
    table = pq.read_table(run_folder(home) / f"rollouts/step_{steps:06d}.parquet").to_pylist()
    assert len(table) == 64 * 8
    row = table[0]
    assert set(row["version"]) == {steps - 1}
    assert len(row["responses"]) == len(row["response_mask"]) == len(row["rollout_log_probs"])


def test_mlflow_has_parameters_every_step_once_and_the_report(home: Path, steps: int) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "rollforward"]
    (run,) = [r for r in client.search_runs([experiment.experiment_id]) if r.info.run_name.startswith("demo-")]
    assert run.info.status == "FINISHED"
    assert run.data.params["algorithm.estimator"] == "grpo"
    assert re.search(r"greedy 0\.\d+ → 0\.\d+", run.data.tags["mlflow.note.content"])
    for metric in ("reward/mean", "actor/entropy", "response_length/mean", "kl/canary", "time/rollout"):
        history = client.get_metric_history(run.info.run_id, metric)
        assert [point.step for point in history] == list(range(1, steps + 1))
    assert {a.path for a in client.list_artifacts(run.info.run_id)} >= {"report.html", "config.yaml"}


def test_the_version_says_where_it_comes_from(home: Path, steps: int) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    aliases = {alias: str(number) for alias, number in client.get_registered_model("rollforward-demo").aliases.items()}
    assert set(aliases) == {"candidate", "champion"}
    tags = client.get_model_version("rollforward-demo", aliases["champion"]).tags
    manifest = json.loads((run_folder(home) / f"export/step_{steps:06d}/manifest.json").read_text())
    assert tags["rollforward.checkpoint"] == weights_hash(manifest)
    assert tags["rollforward.step"] == str(steps)
    shown = rollforward(home, "lineage", aliases["champion"], "--model", "rollforward-demo", "--json")
    (facts,) = json.loads(shown.output)
    assert facts["missing"] == [] and [parent["name"] for parent in facts["parents"]] == ["tiny"]
    assert facts["rollouts"]["steps"] == steps and facts["data"]["data_hash"] == facts["tags"]["data_hash"]
    assert facts["evaluation"]["after"]["greedy"] == float(facts["tags"]["score_after"])
    assert {"config_hash", "code_version", "packages", "flow_run", "mlflow_run", "recipe"} <= facts["tags"].keys()


def test_the_export_has_a_model_card_that_its_manifest_covers(home: Path, steps: int) -> None:
    export = run_folder(home) / f"export/step_{steps:06d}"
    card = ModelCard.load(export / "README.md")
    greedy = {result.metric_type: result.metric_value for result in card.data.eval_results}["greedy"]
    assert greedy == evaluation(home, steps)["greedy"] and "sort\\_digits" in card.text
    assert Store(str(export)).verify("") == []


def champion(home: Path, tmp_path: Path) -> Path:
    from tasks.registry.registry import Registry

    return Registry(f"sqlite:///{home}/mlflow.db", "rollforward-demo").download("champion", tmp_path / "champion")


def held_out(home: Path) -> tuple[list[str], list[str]]:
    rows = StoredRows(Store(str(run_folder(home))), "val")
    return [row["prompt"][0]["content"] for row in rows], [row["reward_model"]["ground_truth"] for row in rows]


def test_the_champion_scores_the_same_with_transformers_alone(home: Path, steps: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = champion(home, tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    right = 0
    for prompt, answer in zip(*held_out(home), strict=True):
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**ids, max_new_tokens=8, do_sample=False)
        right += tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True) == answer
    assert right / len(held_out(home)[0]) == pytest.approx(evaluation(home, steps)["greedy"])


WITH_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
folder, prompts = sys.argv[1], json.load(open(sys.argv[2]))
llm = LLM(folder, dtype="float32", enforce_eager=True, block_size=32, kv_cache_memory_bytes=2**28, max_model_len=24)
chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
json.dump([output.outputs[0].text for output in outputs], open(sys.argv[3], "w"))
"""


def test_the_champion_scores_the_same_with_vllm(home: Path, steps: int, tmp_path: Path) -> None:
    prompts, answers = held_out(home)
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    env = {**environment(home), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    arguments = [str(champion(home, tmp_path)), str(tmp_path / "prompts.json"), str(tmp_path / "texts.json")]
    subprocess.run([sys.executable, "-c", WITH_VLLM, *arguments], env=env, check=True, capture_output=True, timeout=900)
    texts = json.loads((tmp_path / "texts.json").read_text())
    right = sum(text.split() == answer.split() for text, answer in zip(texts, answers, strict=True))
    assert right / len(prompts) == pytest.approx(evaluation(home, steps)["greedy"])


def test_the_example_of_the_readme_loads_the_champion(home: Path, steps: int) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    script = textwrap.dedent(code).replace("sqlite:///.rollforward/", f"sqlite:///{home}/")
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(home), check=True, capture_output=True, text=True, timeout=900
    )
    assert re.search(r"^\d{5}$", done.stdout.strip(), re.MULTILINE), done.stdout


def test_models_and_promote_show_and_move_aliases(home: Path, demo: Result, small: Result) -> None:
    assert small.code == 0, small.output
    assert "✗ better: " in small.output and "not promoted: " in small.output
    held_against = json.loads((run_folder(home, "small") / "evaluation/champion.json").read_text())
    assert held_against["version"] == "1" and held_against["rows"] == 32
    assert held_against["greedy"] >= 0.9, "the champion's weights took the place of the run's own"
    which = ("--model", "rollforward-demo")
    listed = rollforward(home, "models", *which).output
    assert re.search(r"version 1 .*champion", listed) and re.search(r"version 2 .*candidate", listed)
    refused = rollforward(home, "promote", "candidate", *which)
    assert refused.code == 2 and "--force" in refused.output
    forced = rollforward(home, "promote", "candidate", "--force", *which)
    assert "version 2 (previously version 1)" in forced.output
    assert re.search(r"version 2 .*champion", rollforward(home, "models", *which).output)
    assert "version 1 (previously version 2)" in rollforward(home, "promote", "previous", *which).output
    unknown = rollforward(home, "promote", "7", *which)
    assert unknown.code == 2 and "version 1" in unknown.output
