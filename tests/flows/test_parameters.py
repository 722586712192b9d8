"""What whoever may start flow runs can choose by their parameters, and what only a recipe can."""

from pathlib import Path

import pytest

from flows.parameters import compose_parameters
from rl_core.config.compose import dotted_fields
from rl_core.config.learning import Trusted
from rl_core.errors import InputError


@pytest.mark.parametrize(
    "override",
    [
        'agent.mcp_servers=["sh -c id"]', 'agent.mcp_servers=["http://h/mcp?key=$AWS_SECRET_ACCESS_KEY"]',
        "agent.tools=[os:system]", "agent.environment=a.b:C", "reward.function=builtins:eval",
        "reward.extra_functions=[a.b:c=0.5]", "actor.policy_loss=a.b:c", "algorithm.estimator=a.b:c",
        "reward.judge.key_env=AWS_SECRET_ACCESS_KEY", "tracking.uri=http://evil.example",
        "reward.code.isolation=none",
        'reward.judge={"url": "http://evil.example", "model": "m"}',
    ],
)  # fmt: skip
def test_parameters_name_no_code_no_command_and_no_receiver_of_secrets(override: str) -> None:
    with pytest.raises(InputError, match="overrides that name no code") as error:
        compose_parameters("demo", ["trainer.steps=3", override])
    assert error.value.seen.startswith(override.partition("=")[0])


def test_names_of_the_library_are_allowed_and_a_recipe_may_name_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose_parameters("demo", ["actor.policy_loss=gspo", "agent.tools=[calculator]", "agent.mcp_servers=[]"])
    assert config.config.actor.policy_loss == "gspo"
    (tmp_path / "own.yaml").write_text("defaults: [demo]\nreward:\n  function: my_rewards:score\n")
    monkeypatch.chdir(tmp_path)
    assert compose_parameters("own.yaml", ["trainer.steps=3"]).config.reward.function == "my_rewards:score"


@pytest.mark.parametrize("recipe", ["{}/other.yaml", "../other.yaml", "link.yaml"])
def test_a_recipe_outside_of_the_deployments_folder_is_refused(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.yaml").write_text("defaults: [demo]\n")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/link.yaml").symlink_to(tmp_path / "other.yaml")
    monkeypatch.chdir(tmp_path / "inside")
    with pytest.raises(InputError, match=r"a \.yaml file below"):
        compose_parameters(recipe.format(tmp_path), [])


def test_every_setting_that_takes_code_or_a_command_is_marked() -> None:
    for key, field in dotted_fields().items():
        text = field.description or ""
        if any(word in text for word in ("package.module", "command line", "environment variable", "extra_functions")):
            assert any(isinstance(mark, Trusted) for mark in field.metadata), key
