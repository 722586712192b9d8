"""Renders a config as text: every value with its origin, then the derived sizes."""

import json
import math
import struct
from pathlib import Path

from rl_core.config.compose import Composed, settings
from rl_core.config.problems import show
from rl_core.config.schema import RunConfig, TinyModelConfig
from rl_core.config.updates import actor_updates, config_warnings

# The offline model is a Qwen3; these must match its builder.
TINY_VOCABULARY, TINY_HEAD_DIM = 32, 64

# Maximum column width in characters; longer values overflow it.
WIDEST = 48

# Per parameter, all in float32: weight, gradient and Adam's two moments; a checkpoint stores no gradient.
TRAINING_BYTES, CHECKPOINT_BYTES = 16, 12


def render(composed: Composed) -> str:
    """Table of all settings (a star marks values that are not schema defaults) and of derived sizes."""
    config = composed.config
    rows = [
        ("  " if composed.origins[key] == "default" else "* ", key, show(value), composed.origins[key])
        for key, value in settings(config).items()
    ]
    key_width, value_width = (max(min(len(row[column]), WIDEST) for row in rows) for column in (1, 2))
    lines = [f"{mark}{key:<{key_width}}  {value:<{value_width}}  {origin}" for mark, key, value, origin in rows]
    sizes = derived(config, parameter_count(config), config.data.train_rows)
    width = max(len(name) for name in sizes)
    return "\n".join(
        [
            f"Recipe {composed.recipe} (* = set by a recipe or an override)",
            "",
            *lines,
            "",
            "Derived sizes",
            "",
            *(f"  {name:<{width}}  {size}" for name, size in sizes.items()),
            *(f"\n! {text}" for text in config_warnings(config)),
        ]
    )


def derived(config: RunConfig, parameters: int | None = None, train_rows: int | None = None) -> dict[str, str]:
    """Sizes derived from a config, by name, in display order.

    `parameters` is the model's parameter count; without it, memory and checkpoint sizes are omitted.
    `train_rows` is the number of training rows; without it, epochs are omitted.
    """
    prompts, world = config.data.train_batch_size, config.world_size
    responses = prompts * config.rollout.n
    updates = prompts // config.mini_batch_size * config.actor.ppo_epochs
    sequence = config.data.max_prompt_length + config.data.max_response_length
    # However sequences are packed, a full micro-batch holds at least as many as fit at maximum length.
    at_least = config.actor.max_tokens_per_micro_batch // sequence
    per_rank = config.mini_batch_size * config.rollout.n // config.data_parallel_size
    sizes: dict[str, str] = {
        "prompts per step": f"{prompts:,}",
        "responses per step": f"{responses:,}",
        "responses per rank per step": f"{responses // world:,} ({world} rank{'s' if world > 1 else ''})",
        "mini-batches per step": f"{prompts // config.mini_batch_size:,}",
        "optimizer steps per step": f"{updates:,}",
        "optimizer steps in the run": f"{actor_updates(config):,}",
        "max tokens per step": f"{responses * sequence:,}",
        "max tokens per rank and micro-batch": f"{config.actor.max_tokens_per_micro_batch:,}",
        "max micro-batches per mini-batch": f"{math.ceil(per_rank / at_least):,}",
    }
    if train_rows:
        sizes["steps per epoch"] = f"{train_rows / prompts:,.1f}"
        sizes["epochs in the run"] = f"{config.trainer.steps * prompts / train_rows:,.2f}"
    return sizes | (_memory(config, parameters) if parameters else {})


def _memory(config: RunConfig, parameters: int) -> dict[str, str]:
    """Estimated sizes; activations, logits and the key/value cache are not included."""
    width = {"float32": 4, "bfloat16": 2}[config.model.dtype]
    trained = parameters * (2 if config.needs_critic else 1)
    sizes = {
        "model parameters": f"{parameters:,}",
        "weights, gradients, Adam per rank": f"{_bytes(TRAINING_BYTES * trained / config.world_size)} (estimate)",
    }
    if config.needs_reference:
        sizes["reference model per rank"] = f"{_bytes(width * parameters / config.world_size)} (estimate)"
    sizes["rollout engine weights"] = f"{_bytes(width * parameters)} (estimate)"
    sizes["one checkpoint"] = f"{_bytes(CHECKPOINT_BYTES * trained)} (estimate)"
    return sizes


def parameter_count(config: RunConfig) -> int | None:
    """Number of model parameters without loading the model, or None if the folder's files do not give it."""
    if config.model.path == "tiny":
        return tiny_parameters(config.model.tiny)
    folder = Path(config.model.path).expanduser()
    try:
        # The index, if any, lists the files that count: some folders hold a second, consolidated copy.
        index = folder / "model.safetensors.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else None
        files = [folder / name for name in names] if names else list(folder.glob("*.safetensors"))
        return sum(_safetensors_parameters(file) for file in files) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None


def tiny_parameters(shape: TinyModelConfig) -> int:
    """Number of parameters of the offline model, a Qwen3 with tied embeddings and as many key/value as query heads.

    Per layer: query, key, value and output projections (4 · hidden · heads · 64, no biases), the norms of queries and
    keys (2 · 64), a gated MLP of width 4 · hidden (3 · hidden · 4 · hidden) and two norms (2 · hidden). Outside the
    layers: the embedding (32 · hidden) and the final norm (hidden).
    """
    hidden, attention = shape.hidden_size, shape.heads * TINY_HEAD_DIM
    layer = 4 * hidden * attention + 2 * TINY_HEAD_DIM + 3 * hidden * 4 * hidden + 2 * hidden
    return TINY_VOCABULARY * hidden + shape.layers * layer + hidden


def _safetensors_parameters(path: Path) -> int:
    """Sum of the tensor sizes in a file's header: 8 bytes of length (little-endian), then JSON of that length."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            raise ValueError(f"{path} is not a safetensors file")
        header = json.loads(file.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
