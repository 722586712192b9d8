import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support_pages import table

from rl_core.config.compose import (
    RUN_CONTROL_KEYS,
    RUN_CONTROL_SECTIONS,
    compose,
    config_hash,
    diff,
    extend,
    flatten,
    from_dict,
    layout_diff,
    override,
    recipe_names,
    to_yaml,
)
from rl_core.config.schema import RunConfig
from rl_core.errors import InputError


def write(folder: Path, name: str, text: str) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_composes(name: str) -> None:
    composed = compose(name, [])
    assert composed.recipe == name and f"recipe {name}" in composed.origins.values()


def test_recipes_are_the_ones_that_are_documented() -> None:
    assert {"demo", "grpo", "gsm8k", "ppo", "tools", "one_step_off", "async"} <= set(recipe_names())
    assert compose("ppo", []).config.needs_critic and not compose("demo", []).config.needs_critic
    assert compose("gsm8k", []).config.needs_reference and compose("tools", []).config.multi_turn
    assert [compose(mode, []).config.max_staleness for mode in ("grpo", "one_step_off", "async")] == [0, 1, 2]


def test_later_layers_win_and_each_value_knows_its_layer() -> None:
    composed = compose("demo", ["actor.optim.lr=3e-4", "trainer.steps=7", "trainer.steps=9"])
    config, origins = composed.config, composed.origins
    assert config.actor.optim.lr == 3e-4 and origins["actor.optim.lr"] == "override"
    assert config.trainer.steps == 9 and origins["trainer.steps"] == "override"
    assert config.actor.clip_ratio == 0.3 and origins["actor.clip_ratio"] == "recipe demo"
    assert config.rollout.n == 8 and origins["rollout.n"] == "recipe grpo"
    assert config.trainer.seed == 0 and origins["trainer.seed"] == "default"
    assert list(origins) == list(flatten(config))


def test_recipe_files_build_on_recipes_and_on_files_beside_them(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", "base", "defaults: [demo]\ntrainer: {steps: 5, seed: 5}\n")
    path = write(tmp_path, "mine", "defaults: [gsm8k, sub/base.yaml]\ntrainer:\n  seed: 6\nactor.clip_ratio: 0.1\n")
    composed = compose(path, [])
    assert composed.config.trainer.steps == 5 and composed.origins["trainer.steps"] == "recipe sub/base.yaml"
    assert composed.config.trainer.seed == 6 and composed.origins["trainer.seed"] == f"recipe {path}"
    assert composed.config.data.source == "sort_digits", "a later one of the defaults wins"
    assert composed.config.actor.kl_loss_coef == 1e-3, "what only an earlier one sets stays"
    assert composed.config.actor.clip_ratio == 0.1


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("actor.optim.lr=1e-3", "actor.optim.lr", 1e-3),
        ("actor.optim.lr=1", "actor.optim.lr", 1.0),
        ("actor.mini_batch_size=null", "actor.mini_batch_size", None),
        ("actor.mini_batch_size=", "actor.mini_batch_size", None),
        ("gate.mode=off", "gate.mode", "off"),
        ("registry.model_name=no", "registry.model_name", "no"),
        ("registry.model_name=2026-01-01", "registry.model_name", "2026-01-01"),
        ("registry.model_name='12'", "registry.model_name", "12"),
        ("reward.function=my.module:score", "reward.function", "my.module:score"),
        ("storage.root=s3://bucket/a=b", "storage.root", "s3://bucket/a=b"),
        ("actor.optim.betas=[0.9, 0.95]", "actor.optim.betas", "[0.9, 0.95]"),
        ("trainer={steps: 3}", "trainer.steps", 3),
    ],
)
def test_override_values_are_read_as_one_means_them(override: str, key: str, value: object) -> None:
    seen = flatten(compose("demo", [override]).config)[key]
    assert seen == value and type(seen) is type(value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.stepz=1", ["trainer.steps", "trainer.stepz", "override"]),
        ("lr=1", ["actor.optim.lr", "critic.optim.lr"]),
        ("trianer.steps.x=1", ["trainer.steps"]),
        ("trainer.steps", ["KEY=VALUE", "trainer.steps=VALUE"]),
        ("trainer=3", ["settings within the section trainer", "trainer.steps"]),
        ("trainer.steps=abc", ["whole number of at least 1", '"abc"', "trainer.steps (override)"]),
        ("trainer.steps=0", ["whole number of at least 1", "= 0"]),
        ("trainer.steps=2.5", ["whole number", "2.5"]),
        ("trainer.steps=true", ["whole number", "true"]),
        ("trainer.steps=null", ["whole number", "null"]),
        ("algorithm.gamma=1.5", ["a number of at least 0 and at most 1", "1.5"]),
        ("actor.optim.lr=0", ["a number above 0"]),
        ("actor.optim.lr=.nan", ["a number above 0"]),
        ("actor.optim.betas=[0.9]", ["a list of 2 numbers"]),
        ("model.dtype=int8", ["one of float32, bfloat16", "int8"]),
        ("gate.approval=1", ["true or false"]),
        ("registry.model_name=12", ["a string", "registry.model_name='\"12\"'"]),
        ("data.source=[x", ["valid YAML", "data.source=[x"]),
        ("data.drop=[x]", ["a list with entries from malformed, overlong"]),
        ("rollout.n=1", ["rollout.n (override)", "algorithm.estimator (recipe grpo)", "at least 2"]),
        ("reward.sources=[mine]", ["NAME=SCORER", "not mine", "reward.sources (override)"]),
        ("reward.sources=[mine=exact,mine=numeric]", ["distinct names"]),
        ("reward={function: exact, sources: [mine=numeric]}", ["reward.sources would have no effect"]),
        ("reward.judge.score_range=[1,0]", ["reward.judge.score_range", "the smaller one first"]),
        ("algorithm.reward_weights=[short]", ["NAME=WEIGHT", "not short", "algorithm.reward_weights (override)"]),
        ("correction.reject_bounds=[2, 0.5]", ["ascending order", "correction.reject_bounds (override)"]),
        ("rollout.mode=async", ["rollout.mode=async", "requires rollout.ranks_per_node"]),
        ("rollout.nodes=2", ["rollout.nodes=2 requires rollout.ranks_per_node"]),
        ("rollout.tensor_parallel_size=2", ["rollout.tensor_parallel_size=2 must divide the 1 rollout ranks"]),
        ("rollout={tensor_parallel_size: 3, ranks_per_node: 3}", ["=3 must divide model.tiny.heads="]),
        ("rollout={mode: async, ranks_per_node: 1, top_p: 0.9}", ["compare log-probs", "require rollout.top_p=1"]),
        ("rollout={mode: async, ranks_per_node: 1, log_probs: false}", ["require", "rollout.log_probs=true"]),
        ("evaluation.refusal_pattern='('", ["not a valid regular expression", "evaluation.refusal_pattern (override)"]),
        ("trainer.profile_steps=[a]", ["a list of whole numbers of at least 1 and at most", '["a"]']),
        ("data.chat_template_kwargs=3", ["a mapping of names to true, false, numbers or strings", "valid value"]),
        ("data.chat_template_kwargs={a: [1]}", ["a mapping of names", '{"a": [1]}', "chat_template_kwargs (override)"]),
        ("data.chat_template_kwargs={a: 1e300}", ["a mapping of names"]),
        ("actor.mini_batch_size=7", ["must divide", "data.train_batch_size (recipe demo)"]),
    ],
)
def test_a_wrong_override_is_explained(override: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        compose("demo", [override])
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in:\n{caught.value}"


def test_a_guard_on_a_kl_that_is_not_measured_is_refused() -> None:
    assert compose("demo", ["gate.max_kl=1"]).config.gate.max_kl == 1
    with pytest.raises(InputError, match=r"gate.max_kl \(override\), actor.kl_loss_coef \(override\)"):
        compose("demo", ["gate.max_kl=1", "actor.kl_loss_coef=0"])


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(InputError) as caught:
        compose("demo", ["trainer.stepz=1", "trainer.seed=-1", "oops", "data.source=[x"])
    text = str(caught.value)
    assert "4 problems" in text
    assert all(word in text for word in ("trainer.stepz", "trainer.seed", "'oops'", "valid YAML"))


def test_an_unknown_recipe_is_answered_with_the_nearest_and_all_names(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=", ".join(recipe_names()) + r"(.|\n)*nearest name is gsm8k"):
        compose("gsm", [])
    with pytest.raises(InputError, match="nowhere.yaml"):
        compose(str(tmp_path / "nowhere.yaml"), [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer: [1", "valid YAML"),
        ("trainer:\n  steps: 1\n  steps: 2\n", "duplicate key 'steps'"),
        ("- 1\n", "a mapping of settings"),
        ("defaults: grpo\n", "`defaults`"),
        ("defaults: [nope]\n", "'nope'"),
        ("defaults: [mine.yaml]\n", "recipes without circular `defaults`"),
        ("defaults: [other.yaml]\n", "mine.yaml → .*other.yaml → .*mine.yaml"),
        ("trainer:\n", "settings within the section trainer"),
        ("trainer: {stepz: 1}\n", "trainer.stepz(.|\n)*recipe .*mine.yaml(.|\n)*trainer.steps"),
    ],
)
def test_a_wrong_recipe_is_explained(tmp_path: Path, text: str, words: str) -> None:
    write(tmp_path, "other", "defaults: [mine.yaml]")
    with pytest.raises(InputError, match=words):
        compose(write(tmp_path, "mine", text), [])


def test_an_empty_recipe_and_a_base_used_twice_are_fine(tmp_path: Path) -> None:
    assert compose(write(tmp_path, "empty", "# nothing\n"), []).config == RunConfig()
    twice = compose(write(tmp_path, "twice", "defaults: [grpo, demo, grpo]\n"), []).config
    assert twice == compose("demo", []).config


def test_yaml_and_dictionary_bring_the_config_back(tmp_path: Path) -> None:
    config = compose("gsm8k", ["registry.model_name='1e3'", "tracking.experiment='on'", "data.path=a b"]).config
    assert compose(write(tmp_path, "again", to_yaml(config)), []).config == config
    assert from_dict(config.model_dump()) == config and from_dict(config.model_dump(mode="json")) == config
    with pytest.raises(InputError, match="trainer.stepz"):
        from_dict({"trainer": {"stepz": 1}})


def test_the_hash_ignores_run_control_only() -> None:
    base = compose("demo", []).config
    control = [
        "storage.root=/x", "tracking.uri=http://localhost:1", "registry.model_name=x", "trainer.segment_steps=1",
        "trainer.save_every=2", "trainer.keep_checkpoints=9", "trainer.max_attempts=1", "trainer.call_timeout_s=1",
        "reward.processes=2", "reward.timeout_s=1", "gate.mode=off",
        "rollout.canary_tolerance=0.5",
        # How the work lies on processes: results are equal within rounding.
        "trainer.ranks_per_node=2", "trainer.nodes=2", "trainer.threads_per_rank=2", "rollout.ranks_per_node=1",
        "fsdp.activation_checkpointing=true", "fsdp.offload=idle", "actor.max_tokens_per_micro_batch=4096",
    ]  # fmt: skip
    for setting in control:
        assert config_hash(compose("demo", [setting]).config) == config_hash(base), setting
    changed = [
        "trainer.seed=1",
        "trainer.steps=2",
        "actor.optim.lr=2e-3",
        "actor.optim.betas=[0.9, 0.99]",
        "rollout.n=4",
    ]
    assert len({config_hash(compose("demo", [override]).config) for override in changed} | {config_hash(base)}) == 6
    assert config_hash(compose("demo", ["actor.optim.lr=0.0005"]).config) == config_hash(base)


def test_diff_names_the_identity_keys_that_differ() -> None:
    a, b = compose("demo", []).config, compose("demo", ["trainer.seed=3", "storage.root=/x"]).config
    assert diff(a, b) == {"trainer.seed": (0, 3)} and diff(a, a) == {}


def test_the_layout_is_told_apart_from_what_decides_results() -> None:
    a, b = compose("demo", []).config, compose("demo", ["trainer.ranks_per_node=2", "fsdp.shard_size=1"]).config
    assert layout_diff(a, b) == {"trainer.ranks_per_node": (1, 2), "fsdp.shard_size": (None, 1)} and not diff(a, b)


def test_configs_are_checked_in_a_moment_without_heavy_imports() -> None:
    code = (
        "import sys; from rl_core.config.compose import compose; from rl_core.config.render import render;"
        "render(compose('demo', []));"
        "print(sorted({'torch', 'ray', 'prefect', 'mlflow', 'transformers', 'vllm', 'fsspec'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    after = os.times()
    assert done.stdout.strip() == "[]"
    # Time of the processor: the machine may be busy.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.5


@pytest.mark.parametrize("setting", ["algorithm.kl_in_reward_coef=0.1", "algorithm.overlong_buffer=2"])
def test_token_rewards_that_gdpo_would_not_see_are_refused(setting: str) -> None:
    compose("grpo", ["algorithm.estimator=gdpo"])
    with pytest.raises(InputError, match="gdpo uses the scorer's named rewards"):
        compose("grpo", ["algorithm.estimator=gdpo", setting])


def test_the_page_names_all_settings_that_a_continued_run_may_change() -> None:
    rows = table("reliability", "What may change on resume")
    named = [name for row in rows for name in re.findall("`([a-z_.]+)`", row[0])]
    assert tuple(named[:4]) == RUN_CONTROL_SECTIONS and set(named[4:]) == RUN_CONTROL_KEYS


def test_a_mapping_goes_through_every_form_of_the_config(tmp_path: Path) -> None:
    key, values = "data.chat_template_kwargs", {"enable_thinking": False, "budget": 2.5, "style": "short"}
    folder = "model.path=/checkpoint"
    composed = compose("grpo", [folder, f"{key}={json.dumps(values)}"])
    assert composed.config.data.chat_template_kwargs == values and composed.origins[key] == "override"
    assert compose(write(tmp_path, "again", to_yaml(composed.config)), []).config == composed.config
    assert from_dict(composed.config.model_dump(mode="json")) == composed.config
    longer = extend(composed, ["trainer.steps=7"])
    assert longer.config.data.chat_template_kwargs == values and longer.origins[key] == "override"
    assert diff(compose("grpo", [folder]).config, composed.config) == {key: ("{}", json.dumps(values))}
    assert extend(composed, [f"{key}={{}}"]).config == compose("grpo", [folder]).config


SECOND = "{source: files, path: [a.jsonl, c.jsonl], val_path: b.jsonl}"
MIXTURE = f"data.mixture=[{{source: gsm8k, path: X, weight: 2}}, {SECOND}]"


def test_a_mixture_goes_through_every_form_of_the_config(tmp_path: Path) -> None:
    composed = compose("grpo", [MIXTURE])
    config = composed.config
    assert composed.origins["data.mixture"] == "override"
    assert [(each.source, each.path, each.weight) for each in config.data.sources] == [
        ("gsm8k", "X", 2.0),
        ("files", ("a.jsonl", "c.jsonl"), 1.0),
    ]
    assert config.data.paths == ("X", "a.jsonl", "c.jsonl", "b.jsonl")
    assert compose(write(tmp_path, "again", to_yaml(config)), []).config == config
    assert from_dict(config.model_dump()) == config and from_dict(config.model_dump(mode="json")) == config
    recipe = "defaults: [grpo]\ndata:\n  mixture:\n    - {source: gsm8k, path: X, weight: 2}\n    - source: files\n"
    recipe += "      path: [a.jsonl, c.jsonl]\n      val_path: b.jsonl\n"
    assert compose(write(tmp_path, "mine", recipe), []).config == config
    assert json.loads(str(flatten(config)["data.mixture"]))[1]["path"] == ["a.jsonl", "c.jsonl"]
    other = compose("grpo", [MIXTURE.replace("weight: 2", "weight: 3")]).config
    assert config_hash(other) != config_hash(config) and list(diff(other, config)) == ["data.mixture"]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ("[{source: gsm8k, weigth: 2}]", ["data.mixture[0].weigth", "the nearest known key is data.mixture[0].weight"]),
        ("[{}, {weight: 0}]", ["data.mixture[1].weight (override)", "a number above 0"]),
        ("[{tasks: a}]", ["data.mixture[0].tasks", "a list of strings"]),
        ("[{train_rows: x, val_rows: y}]", ["2 problems", "mixture[0].train_rows", "mixture[0].val_rows"]),
        ("[{mixture: []}]", ["data.mixture[0].mixture"]),
        ("[gsm8k]", ["a list of {source: …, path: …", '["gsm8k"]']),
        ("gsm8k", ["a list of {source: …, path: …"]),
        ("[{}, {source: files, path: a}]", ["data.mixture[1].val_path", "data.mixture (override)"]),
    ],
)
def test_a_wrong_mixture_is_explained(entries: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        compose("grpo", [f"data.mixture={entries}"])
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in:\n{caught.value}"


def test_settings_that_a_mixture_would_ignore_are_refused() -> None:
    with pytest.raises(InputError, match="data.source=gsm8k and data.path=x would be ignored") as caught:
        compose("grpo", [MIXTURE, "data.source=gsm8k", "data.path=x"])
    assert "data.path (override), data.mixture (override)" in caught.value.where
    compose("grpo", [MIXTURE, "data.max_prompt_length=100", "data.drop=[overlong]"])


def test_settings_by_former_names_are_read_in_saved_configs_and_named_to_users() -> None:
    saved = RunConfig().model_dump(mode="json")
    saved["engine"] = {**saved.pop("fsdp"), "offload": "idle"}
    saved["gate"]["length_ratio"] = saved["gate"].pop("max_length_ratio")
    assert from_dict(saved) == override(RunConfig(), ["fsdp.offload=idle"])
    with pytest.raises(InputError, match="engine.offload.*(?s:.)*it has been renamed to fsdp.offload"):
        compose("demo", ["engine.offload=idle"])


@pytest.mark.parametrize("override", ["data.path={}", "data.val_path=[rows.parquet,{}]", "model.path={}"])
def test_a_path_that_is_not_utf_8_is_an_input_error(override: str) -> None:
    with pytest.raises(InputError) as raised:
        compose("demo", [override.format(json.dumps(os.fsdecode(b"/rows/\xff.parquet")))])
    assert raised.value.expected == "text in UTF-8" and override.partition("=")[0] in raised.value.where
    str(raised.value).encode()  # can be printed
