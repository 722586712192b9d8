"""What a config comes to, as text: every value with its origin, then the sizes that follow from it."""

import json
import math
import struct
from pathlib import Path

from rl_core.config.compose import Composed, settings
from rl_core.config.problems import show
from rl_core.config.schema import RunConfig, TinyModelConfig

# The offline model: a Qwen3 with the heads and vocabulary that its builder uses.
TINY_VOCABULARY, TINY_HEAD_DIM = 32, 64

# Characters of a value beyond which the others are not moved to the right with it.
WIDEST = 48

# Per parameter, all in float32: weight, gradient and Adam's two moments; a checkpoint has no gradient.
TRAINING_BYTES, CHECKPOINT_BYTES = 16, 12


def render(composed: Composed) -> str:
    """Table of all settings (a star marks what does not come from the schema's defaults) and of derived sizes."""
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
            "What follows from it",
            "",
            *(f"  {name:<{width}}  {size}" for name, size in sizes.items()),
        ]
    )


def derived(config: RunConfig, parameters: int | None = None, train_rows: int | None = None) -> dict[str, str]:
    """Sizes that follow from a config, by name, in the order to show them.

    `parameters` is the model's parameter count; without it nothing is said of memory and checkpoints.
    `train_rows` is the number of training rows; without it nothing is said of epochs.
    """
    prompts, world = config.data.train_batch_size, config.world_size
    responses = prompts * config.rollout.n
    updates = prompts // config.mini_batch_size * config.actor.ppo_epochs
    sequence = config.data.max_prompt_length + config.data.max_response_length
    # However sequences are packed, a full micro-batch holds at least as many as fit when all have the greatest length.
    at_least = config.actor.max_tokens_per_micro_batch // sequence
    per_rank = config.mini_batch_size * config.rollout.n // config.data_parallel_size
    sizes: dict[str, str] = {
        "prompts per step": f"{prompts:,}",
        "responses per step": f"{responses:,}",
        "responses per rank and step": f"{responses // world:,} ({world} rank{'s' if world > 1 else ''})",
        "mini-batches per step": f"{prompts // config.mini_batch_size:,}",
        "optimizer steps per step": f"{updates:,}",
        "optimizer steps in the run": f"{updates * config.trainer.steps:,}",
        "most tokens per step": f"{responses * sequence:,}",
        "most tokens per rank and micro-batch": f"{config.actor.max_tokens_per_micro_batch:,}",
        "most micro-batches per mini-batch": f"{math.ceil(per_rank / at_least):,}",
    }
    if train_rows:
        sizes["steps per epoch"] = f"{train_rows / prompts:,.1f}"
        sizes["epochs in the run"] = f"{config.trainer.steps * prompts / train_rows:,.2f}"
    return sizes | (_memory(config, parameters) if parameters else {})


def _memory(config: RunConfig, parameters: int) -> dict[str, str]:
    """Estimates in bytes; activations, logits and the key/value cache come on top."""
    width = {"float32": 4, "bfloat16": 2}[config.model.dtype]
    trained = parameters * (2 if config.needs_critic else 1)
    sizes = {
        "model parameters": f"{parameters:,}",
        "weights, gradient, Adam per rank": f"{_bytes(TRAINING_BYTES * trained / config.world_size)} (estimate)",
    }
    if config.needs_reference:
        sizes["reference model per rank"] = f"{_bytes(width * parameters / config.world_size)} (estimate)"
    sizes["rollout engine's weights"] = f"{_bytes(width * parameters)} (estimate)"
    sizes["one checkpoint"] = f"{_bytes(CHECKPOINT_BYTES * trained)} (estimate)"
    return sizes


def parameter_count(config: RunConfig) -> int | None:
    """Number of the model's parameters without loading it, or None when the folder does not tell."""
    if config.model.path == "tiny":
        return tiny_parameters(config.model.tiny)
    folder = Path(config.model.path).expanduser()
    try:
        # Where there is an index it says which files count: some folders hold a second, consolidated copy.
        index = folder / "model.safetensors.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else None
        files = [folder / name for name in names] if names else list(folder.glob("*.safetensors"))
        return sum(_safetensors_parameters(file) for file in files) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None


def tiny_parameters(shape: TinyModelConfig) -> int:
    """Parameters of the offline model, a Qwen3 with tied embeddings and as many key/value as query heads.

    Per layer: query, key, value and output projections (4 · hidden · heads · 64, no biases), the norms of queries and
    keys (2 · 64), a gated MLP of width 4 · hidden (3 · hidden · 4 · hidden) and two norms (2 · hidden); beside the
    layers the embedding (32 · hidden) and the last norm (hidden).
    """
    hidden, attention = shape.hidden_size, shape.heads * TINY_HEAD_DIM
    layer = 4 * hidden * attention + 2 * TINY_HEAD_DIM + 3 * hidden * 4 * hidden + 2 * hidden
    return TINY_VOCABULARY * hidden + shape.layers * layer + hidden


def _safetensors_parameters(path: Path) -> int:
    """Sum of the sizes in a file's header: 8 bytes of length (little-endian), then JSON of that length."""
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
