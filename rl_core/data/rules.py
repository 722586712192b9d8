"""Error messages for invalid rows: what was expected, what was seen, where, and how to fix it."""

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
    """A label for each source: its name, numbered if several sources have the same name."""
    names = [each.source for each in sources]
    return [f"{name} {i}" if names.count(name) > 1 else name for i, name in enumerate(names, start=1)]


def prompt_hash(row: Row) -> int:
    """64-bit hash of a problem: its messages and its tools with their creation arguments."""
    text = canonical([row["prompt"], (row.get("extra_info") or {}).get("tools_kwargs")])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def named(config: DataConfig) -> str:
    """The sources as text: `data.source=gsm8k and math`."""
    return "data.source=" + " and ".join(labels(config.sources))


def check_values(row: Row, where: str) -> None:
    """Raises InputError if the row has values that JSON cannot represent, or a blank prompt."""
    try:
        json.dumps(row)
    except (TypeError, ValueError) as error:
        expected = "JSON values: strings, numbers, true, false, null, lists and objects"
        raise InputError(expected, str(error), where, "write dates and bytes as strings") from error
    if not any(str(message["content"] or "").strip() for message in row["prompt"]):
        fix = "write the problem into the row's prompt"
        raise InputError("a non-blank prompt", "only blank messages", where, fix)


def overlong(limit: int, tokens: int, longest: int, where: str) -> InputError:
    """Error for a prompt with too many tokens; `longest` is the maximum so far."""
    return InputError(
        f"prompts of at most data.max_prompt_length={limit} tokens",
        f"{tokens} tokens",
        where,
        f"set data.max_prompt_length={longest} or more",
    )


def too_many_dropped(split: str, seen: int, dropped: dict[str, int], config: DataConfig) -> InputError | None:
    """Error if more than `data.max_dropped_share` of a split is dropped."""
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
    """Errors for tools whose schema in the row has other parameters than the configured one, which the policy sees."""
    schemas = (row.get("extra_info") or {}).get("tools")
    for schema in schemas if isinstance(schemas, list) else ():
        name, given = _parameters(schema)
        if name not in known:
            continue
        ours = _parameters(known[name])[1]
        missing, extra = sorted(ours - given), sorted(given - ours)
        if missing or extra:
            found = [f"{kind} {', '.join(names)}" for kind, names in (("missing", missing), ("extra", extra)) if names]
            yield InputError(
                expected=f"tool '{name}' as configured, with the parameters {', '.join(sorted(ours)) or 'none'}",
                seen=f"other parameters in the row: {'; '.join(found)}",
                where=where,
                fix="correct the tools of the rows or the configured tool; the policy sees the configured one",
            )


def _parameters(schema: Any) -> tuple[str, set[str]]:
    """Name and parameters of an OpenAI function schema; an empty name if it is invalid."""
    function = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(function, dict):
        return "", set()
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return str(function.get("name")), set(properties) if isinstance(properties, dict) else set()


def too_few(split: str, seen: int, dropped: dict[str, int], config: DataConfig) -> InputError | None:
    """Error if a split has fewer rows than a run needs."""
    needed = config.train_batch_size if split == "train" else 1
    kept = seen - sum(dropped.values())
    if kept >= needed:
        return None
    fixes = ["provide more rows"]
    fixes += ["decrease data.train_batch_size"] if split == "train" else []
    fixes += ["increase data.max_prompt_length"] if "overlong" in dropped else []
    return InputError(
        f"at least {needed} {split} rows" + (", one batch (data.train_batch_size)" if split == "train" else ""),
        f"{kept} rows, {sum(dropped.values())} dropped" + (f" ({counted(dropped)})" if dropped else ""),
        named(config),
        " or ".join(fixes),
    )


def empty_source(source: str, seen: int) -> InputError:
    """Error for a source of a mixture without training rows."""
    fix = "add rows to it, or remove it from data.mixture"
    return InputError(
        "at least one training row in each source", f"{in_rows(seen)}, all dropped" if seen else "no rows", source, fix
    )


def held_out(same: str, where: str) -> InputError:
    """Error for a training row with the prompt of a held-out one."""
    fix = "remove it from the training or the held-out rows"
    return InputError("training prompts that are not held out", f"the prompt of {same}", where, fix)


def no_truth(truth: object, where: str) -> InputError:
    """Warning for a row without ground truth."""
    fix = "set reward_model.ground_truth, which most scorers require"
    return InputError("a ground truth in every row", repr(truth), where, fix)


def not_configured(names: list[str], where: str) -> InputError:
    """Warning for a row that selects tools whose schemas are not known here."""
    fix = "add them to agent.tools or agent.mcp_servers; the lengths reported here do not include their schemas"
    return InputError("configured tools", ", ".join(names), where, fix)
