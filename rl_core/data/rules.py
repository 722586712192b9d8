"""What is wrong with rows, in words: what was expected, what was seen, where, and what to do next."""

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

from rl_core.config.data import DataConfig, SourceConfig
from rl_core.data.dataset import Schema
from rl_core.data.report import counted, in_rows
from rl_core.data.rows import Row, canonical
from rl_core.errors import InputError


def labels(sources: tuple[SourceConfig, ...]) -> list[str]:
    """A name for each source: its own, with a number where several have the same."""
    names = [each.source for each in sources]
    return [f"{name} {i}" if names.count(name) > 1 else name for i, name in enumerate(names, start=1)]


def prompt_hash(row: Row) -> int:
    """64 bits of what makes two rows the same problem: the messages, and the tools with what they are created with."""
    text = canonical([row["prompt"], (row.get("extra_info") or {}).get("tools_kwargs")])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def named(config: DataConfig) -> str:
    """The sources in words."""
    return "data.source=" + " and ".join(labels(config.sources))


def check_values(row: Row, where: str) -> None:
    """Raises InputError when the row has values that JSON has not, or a prompt of nothing."""
    try:
        json.dumps(row)
    except (TypeError, ValueError) as error:
        expected = "values that JSON has: texts, numbers, true, false, null, lists and objects"
        raise InputError(expected, str(error), where, "write dates and bytes as texts") from error
    if not any(str(message["content"] or "").strip() for message in row["prompt"]):
        fix = "write the problem into the row's prompt"
        raise InputError("a prompt that says something", "only blank messages", where, fix)


def overlong(limit: int, tokens: int, longest: int, where: str) -> InputError:
    """For a prompt of too many tokens; `longest` is the longest so far."""
    return InputError(
        f"prompts of at most data.max_prompt_length={limit} tokens",
        f"{tokens} tokens",
        where,
        f"set data.max_prompt_length={longest} or more",
    )


def too_many_dropped(split: str, seen: int, dropped: dict[str, int], config: DataConfig) -> InputError | None:
    """For a split of which more than `data.max_dropped_share` is dropped."""
    share = sum(dropped.values()) / max(seen, 1)
    if share <= config.max_dropped_share:
        return None
    return InputError(
        f"at most {config.max_dropped_share:.0%} of the {split} rows dropped (data.max_dropped_share)",
        f"{sum(dropped.values()):,} of {seen:,} dropped: {counted(dropped)}",
        named(config),
        f"correct the rows, or set data.max_dropped_share={math.ceil(share * 100) / 100:g}",
    )


def schema_differences(row: Row, known: dict[str, Schema], where: str) -> Iterator[InputError]:
    """For each tool whose schema in the row has other parameters than the configured one, which the policy sees."""
    schemas = (row.get("extra_info") or {}).get("tools")
    for schema in schemas if isinstance(schemas, list) else ():
        name, given = _parameters(schema)
        if name not in known:
            continue
        ours = _parameters(known[name])[1]
        missing, extra = sorted(ours - given), sorted(given - ours)
        if missing or extra:
            found = [f"{word} {', '.join(names)}" for word, names in (("no", missing), ("also", extra)) if names]
            yield InputError(
                f"tool '{name}' as it is configured, with the parameters {', '.join(sorted(ours)) or 'none'}",
                f"in the row it has {' and '.join(found)}",
                where,
                "correct the rows' tools or the configured tool; the policy is shown the configured one",
            )


def _parameters(schema: Any) -> tuple[str, set[str]]:
    """Name and parameters of an OpenAI function schema; no name when it is none."""
    function = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(function, dict):
        return "", set()
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return str(function.get("name")), set(properties) if isinstance(properties, dict) else set()


def too_few(split: str, seen: int, dropped: dict[str, int], config: DataConfig) -> InputError | None:
    """For a split that has not the rows that a run needs."""
    needed = config.train_batch_size if split == "train" else 1
    kept = seen - sum(dropped.values())
    if kept >= needed:
        return None
    fixes = ["give more rows"]
    fixes += ["a smaller data.train_batch_size"] if split == "train" else []
    fixes += ["a larger data.max_prompt_length"] if "overlong" in dropped else []
    return InputError(
        f"at least {needed} {split} rows" + (", one batch (data.train_batch_size)" if split == "train" else ""),
        f"{kept} rows, {sum(dropped.values())} dropped" + (f" ({counted(dropped)})" if dropped else ""),
        named(config),
        " or ".join(fixes),
    )


def empty_source(source: str, seen: int) -> InputError:
    """For a source of a mixture that has no training rows."""
    fix = "give it rows, or take it out of data.mixture"
    return InputError("a train row of each source", f"{in_rows(seen)}, all dropped" if seen else "no rows", source, fix)


def held_out(same: str, where: str) -> InputError:
    """For a training row with the prompt of a held-out one."""
    fix = "remove it from one of the two sets of rows"
    return InputError("held-out prompts that are not trained on", f"the prompt of {same}", where, fix)


def no_truth(truth: object, where: str) -> InputError:
    """For a row without ground truth."""
    fix = "write reward_model.ground_truth, which most scorers compare with"
    return InputError("a ground truth in each row", repr(truth), where, fix)


def not_configured(names: list[str], where: str) -> InputError:
    """For a row that chooses tools which are not looked at here."""
    fix = "add them to agent.tools or agent.mcp_servers; their schemas are not in the lengths given here"
    return InputError("tools that are configured", ", ".join(names), where, fix)
