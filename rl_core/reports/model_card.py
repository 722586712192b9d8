"""The model card of an exported folder (README.md in the Hugging Face Hub's format), and the hash of an export."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rl_core.console import clean
from rl_core.html.page import TEMPLATES
from rl_core.storage.manifest import Json
from rl_core.storage.run_files import MANIFEST

CARD = "README.md"
CURVE = {
    "score/mean": "score", "reward/mean": "reward", "kl/ref": "KL to the reference", "actor/entropy": "entropy",
    "response_length/mean": "response length",
}  # fmt: skip
CURVE_ROWS = 6
SCORES = ("greedy", "sampled", "pass_at_k", "maj_at_k")


def weights_hash(manifest: Json) -> str:
    """sha256 over an exported model's files, excluding card and manifest, so that it does not depend on the run."""
    return _digest((file["path"], file["sha256"]) for file in manifest["files"])


def folder_hash(folder: Path) -> str:
    """`weights_hash` of a model folder, computed from its files; hidden files are ignored."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return _digest((path.relative_to(folder).as_posix(), _sha256(path)) for path in found)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(files: Iterable[tuple[str, str]]) -> str:
    counted = [file for file in files if file[0] not in (CARD, MANIFEST) and not re.search(r"(^|/)\.", file[0])]
    return hashlib.sha256(json.dumps(sorted(counted)).encode()).hexdigest()


def render_card(
    facts: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    data: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
) -> str:
    """Renders the card as Markdown with metadata; texts from rows and settings are escaped.

    facts: `name` of the registered model, `base`, `step`, `recipe`, `settings` {key: value}, `lineage` {title: text},
        `prompt_length`, `response_length` (tokens), `seed`, `programs` (a risk of their isolation, or empty).
    before, after: evaluations with `greedy` and `sampled`; optional are `pass_at_k`, `maj_at_k`, `rows`,
        `intervals` {score: [low, high]} and `sources` {name: {greedy, sampled, rows}}.
    data: manifest metadata of the run's committed rows. records: ledger records.
    """
    # jinja2 cannot escape Markdown, so every text goes through `plain`.
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    body = environment.get_template("model_card.md.j2").render(
        name=plain(facts["name"]),
        base=plain(facts["base"]),
        step=facts["step"],
        scores_text=_scores_text(after, data),
        scores=[(name, _score(before, name), _score(after, name)) for name in SCORES if name in after],
        sources=[
            (plain(name), each.get("rows", ""), _score(each, "greedy"), _score(each, "sampled"))
            for name, each in after.get("sources", {}).items()
        ],
        data=_pairs(_data(data)),
        curve_titles=[CURVE[metric] for metric in _known(records)],
        curve=_curve(records),
        recipe=plain(facts["recipe"]),
        settings=_pairs(facts["settings"]),
        lineage=_pairs(facts["lineage"]),
        prompt_length=facts["prompt_length"],
        response_length=facts["response_length"],
        seed=facts["seed"],
        programs=plain(facts["programs"]),
        served_name=re.sub(r"[^\w.-]", "-", facts["name"]),
    )
    return f"---\n{_metadata(facts, after, data)}\n---\n\n{body}"


def plain(text: object) -> str:
    """Escapes a text for Markdown and joins it into one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~!&$])", r"\\\1", " ".join(clean(str(text)).split()))


def _metadata(facts: Mapping[str, Any], after: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    rows = " and ".join(data.get("data_sources", {}))
    results = [
        EvalResult("text-generation", rows, f"held-out rows of {rows}", name, after[name], dataset_split="held out")
        for name in SCORES
        if name in after
    ]
    return ModelCardData(
        model_name=facts["name"],
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "rollforward"],
        eval_results=results,
    ).to_yaml()


def _scores_text(after: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    rows = after.get("rows", data.get("val_rows"))
    text = f"Means over {rows} held-out prompts: greedy decodes the most likely tokens, sampled is the mean of samples."
    return text + (" Brackets contain 95 % bootstrap intervals over prompts." if after.get("intervals") else "")


def _score(result: Mapping[str, Any], name: str) -> str:
    if (value := result.get(name)) is None:
        return ""
    low, high = result.get("intervals", {}).get(name, (None, None))
    return f"{value:.3f}" + ("" if low is None or high is None else f" [{low:.3f}, {high:.3f}]")


def _data(data: Mapping[str, Any]) -> dict[str, str]:
    dropped = [f"{n} {split} {kind}" for split, kinds in data.get("dropped", {}).items() for kind, n in kinds.items()]
    return {
        "training rows": f"{data['train_rows']:,}",
        "held-out rows": f"{data['val_rows']:,}",
        "rows by source": ", ".join(f"{name} {count:,}" for name, count in data.get("data_sources", {}).items()),
        "dropped": ", ".join(dropped) or "none",
        "files": ", ".join(data.get("files", {})) or "none: generated rows",
        "hash": data["data_hash"],
    }


def _pairs(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(plain(name), plain(value)) for name, value in values.items() if value not in (None, "")]


def _known(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return [metric for metric in CURVE if any(metric in record["metrics"] for record in records)]


def _curve(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Metrics of a few evenly spaced steps, including the first and the last."""
    last, count = len(records) - 1, min(CURVE_ROWS, len(records))
    chosen = [records[round(i * last / max(count - 1, 1))] for i in range(count)]
    return [
        [str(each["step"]), *(_number(each["metrics"].get(metric)) for metric in _known(records))] for each in chosen
    ]


def _number(value: float | None) -> str:
    return "n/a" if value is None or not math.isfinite(value) else f"{value:.4g}"
