"""Every numeric setting has a range, and values out of it are refused by the schema, not later by a library."""

import re
import typing
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rl_core.config.compose import compose, dotted_fields, extend
from rl_core.config.problems import entry_section
from rl_core.config.schema import RunConfig
from rl_core.config.updates import config_warnings
from rl_core.errors import InputError


def fields_of(section: type[BaseModel] = RunConfig) -> dict[str, FieldInfo]:
    """All settings by dotted key, and those of sections in lists as `key[].name`."""
    found = dotted_fields(section)
    lists = {key: part for key, field in found.items() if (part := entry_section(field))}
    return found | {f"{key}[].{name}": f for key, part in lists.items() for name, f in fields_of(part).items()}


def numbers_in(annotation: Any, rules: list[Any]) -> list[list[Any]]:
    """The rules of each number that a value of this type contains."""
    if annotation in (int, float):
        return [rules]
    if typing.get_origin(annotation) is typing.Annotated:
        inside, *more = typing.get_args(annotation)
        return numbers_in(inside, [*rules, *(rule for each in more for rule in getattr(each, "metadata", [each]))])
    if typing.get_origin(annotation) is typing.Literal:
        return []
    return [found for inside in typing.get_args(annotation) for found in numbers_in(inside, rules)]


FIELDS, BASE = fields_of(), compose("ppo")
NUMBERS = {
    key: rules for key, field in FIELDS.items() for rules in numbers_in(field.annotation, list(field.metadata))[:1]
}
SCALARS = sorted(
    key for key in NUMBERS if "[]" not in key and typing.get_origin(FIELDS[key].annotation) not in (tuple, dict)
)


def test_every_number_has_a_smallest_and_a_largest_value() -> None:
    assert len(NUMBERS) > 100 and {"actor.optim.betas", "data.mixture[].weight", "gate.max_kl"} <= NUMBERS.keys()
    unbounded = {
        key
        for key, field in FIELDS.items()
        for rules in numbers_in(field.annotation, list(field.metadata))
        if not (any(isinstance(r, Ge | Gt) for r in rules) and any(isinstance(r, Le | Lt) for r in rules))
    }
    assert unbounded == set(), "add ge or gt, and le or lt, to the fields of these settings"


@pytest.mark.parametrize("key", SCALARS)
def test_values_out_of_the_range_are_refused_with_the_range(key: str) -> None:
    for rule in NUMBERS[key]:
        match rule:
            case Ge() | Gt():
                bound: Any = rule.ge if isinstance(rule, Ge) else rule.gt
                value = bound - 1 if isinstance(rule, Ge) else bound
            case Le() | Lt():
                bound = rule.le if isinstance(rule, Le) else rule.lt
                value = bound + 1 if isinstance(rule, Le) else bound
            case _:
                continue
        value = value * (1 + 1e-9) if isinstance(value, float) and value == bound and isinstance(rule, Le) else value
        with pytest.raises(InputError) as raised:
            extend(BASE, [f"{key}={value}"])
        words = f"{bound:g}" if isinstance(bound, float) else str(bound)
        assert re.search(rf"(of at least|above|at most|below) {re.escape(words)}(\s|$)", raised.value.expected)
        assert raised.value.where == f"{key} (override)"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor.optim.betas=[0.9,1.0]", "a list of 2 numbers of at least 0 and below 1"),
        ("critic.optim.betas=[-0.1,0.9]", "a list of 2 numbers of at least 0 and below 1"),
        ("correction.weight_bounds=[-1,2]", "a list of 2 numbers of at least 0"),
        ("reward.judge.score_range=[0,1e300]", "a list of 2 numbers of at least -1e"),
        ("rollout.temperature=0.001", "a number of at least 0.01"),  # vLLM would sample with 0.01
        ("trainer.seed=18446744073709551616", "a whole number of at least 0 and at most 4294967295"),
        ("trainer.call_timeout_s=1e300", "a number above 0 and at most 1e+08"),
        ("data.mixture=[{source: gsm8k, path: a, weight: 1e300}]", "a number above 0 and at most 1e+12"),
        ("reward.extra_functions=[a:b=" + "9" * 400 + "]", "consistent settings"),
        ("algorithm.reward_weights=[a=" + "9" * 400 + "]", "consistent settings"),
        ("actor={clip_cov_low: 6}", "consistent settings"),
    ],
)
def test_values_that_a_library_would_refuse_later(override: str, expected: str) -> None:
    with pytest.raises(InputError) as raised:
        extend(BASE, [override])
    assert raised.value.expected.startswith(expected)


def test_a_part_of_the_critics_optimizer_leaves_its_learning_rate_as_it_is() -> None:
    default = compose("grpo").config.critic.optim.lr
    assert default == 1e-5 and compose("grpo", ["critic.optim.warmup_steps=3"]).config.critic.optim.lr == default


def test_a_warm_up_longer_than_the_run_is_a_warning() -> None:
    sizes = ["trainer.steps=5", "data.train_batch_size=64", "actor.mini_batch_size=32"]
    config = compose("ppo", [*sizes, "actor.ppo_epochs=2", "actor.optim.warmup_steps=21", "actor.optim.lr=1e-3"]).config
    assert config_warnings(config) == [
        "actor.optim.warmup_steps=21 is longer than the 20 optimizer steps of the run: the learning rate ends at "
        "0.000952, below actor.optim.lr=0.001"
    ]
    fits = ["actor.ppo_epochs=2", "actor.optim.warmup_steps=20", "critic.ppo_epochs=1", "critic.optim.warmup_steps=10"]
    assert config_warnings(compose("ppo", [*sizes, *fits]).config) == []
    longer = compose("ppo", [*sizes, "critic.ppo_epochs=1", "critic.optim.warmup_steps=11"])
    assert [text.partition(" ")[0] for text in config_warnings(longer.config)] == ["critic.optim.warmup_steps=11"]
    assert config_warnings(compose("grpo", [*sizes, "critic.optim.warmup_steps=11"]).config) == [], "it has no critic"
