"""Validates and loads Hugging Face checkpoints; defines the trained modules, policy and value model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rl_core.errors import InputError
from rl_core.models.attention import (
    ATTENTION,
    Layout,
    Shared,
    import_model_code,
    register_attention,
    row_of,
    to_device,
)
from rl_core.models.folder import check_files
from rl_core.models.log_probs import ChunkedLogProbs
from rl_core.models.sequence_parallel import SequenceParallel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The model code of transformers takes seconds to import. A driver needs none of it for the offline model, so it is
# imported where a model is built.

_NO_SHAPE = {"_name_or_path", "architectures", "dtype", "transformers_version"}
"""Config entries that are independent of the architecture."""


def check_model_folder(path: str) -> Path:
    """The folder of a Hugging Face checkpoint; raises InputError if it is not one, or not whole."""
    folder = Path(path).expanduser()
    where = f"model.path={path}"
    fix = "set model.path=FOLDER with config.json, *.safetensors and the tokenizer's files, or model.path=tiny"
    if not folder.is_dir():
        raise InputError("a folder with a Hugging Face checkpoint", "no such folder", where, fix)
    if not (folder / "config.json").is_file():
        raise InputError("config.json in the model's folder", "the folder has none", where, fix)
    if not any(folder.glob("*.safetensors")):
        raise InputError("weights as *.safetensors in the model's folder", "the folder has none", where, fix)
    check_files(folder, where)
    try:
        load_config(folder)
    except InputError as error:
        raise InputError(error.expected, error.seen, where, error.fix) from error
    return folder


def load_config(path: str | Path) -> PreTrainedConfig:
    """The checkpoint's config; raises InputError if the architecture is not part of transformers.

    Code in the folder is never run: it must be refused explicitly, otherwise transformers asks on standard input.
    """
    with _part_of_transformers(path, "an architecture"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        return config


@contextmanager
def _part_of_transformers(path: str | Path, what: str) -> Iterator[None]:
    """Raises InputError if transformers has no class for this checkpoint."""
    try:
        yield
    except Exception as error:  # each architecture validates its values with errors of its own
        seen = _reason(error, Path(path, "config.json"))
        raise InputError(
            f"{what} that is part of transformers", seen, f"config.json of {path}", "use a model that needs no code"
        ) from error


def _reason(error: Exception, file: Path) -> str:
    """Why transformers cannot load the checkpoint that this file describes, without its advice to trust the code."""
    if file.is_file() and "auto_map" in file.read_text(errors="replace"):
        return f"{file.name} needs code from the model's folder (auto_map), which is never run"
    return next(iter(str(error).splitlines()), type(error).__name__)


def check_shape(path: str | Path, max_length: int, tensor_parallel_size: int) -> None:
    """Raises InputError if `max_length` tokens exceed the model's maximum, or if its attention heads do not divide by
    the ranks of a rollout engine."""
    config = load_config(path).get_text_config()
    where = f"config.json of {path}"
    rope_factor = (getattr(config, "rope_scaling", None) or {}).get("factor") or 1.0
    limit = getattr(config, "max_position_embeddings", None)
    if limit and max_length > limit * max(rope_factor, 1.0):
        raise InputError(
            f"a model for the {max_length} tokens of data.max_prompt_length + data.max_response_length",
            f"max_position_embeddings={limit}",
            where,
            "set shorter lengths or use another model",
        )
    heads = getattr(config, "num_attention_heads", None)
    if heads and heads % tensor_parallel_size:
        raise InputError(
            f"a number of attention heads divisible by rollout.tensor_parallel_size={tensor_parallel_size}",
            f"num_attention_heads={heads}",
            where,
            "set another rollout.tensor_parallel_size",
        )


def same_shape(a: Path, b: Path) -> bool:
    """Whether running workers can replace the weights of one checkpoint with the other's: same architecture, tokenizer
    and chat template."""

    def shape(folder: Path) -> list[object]:
        config = load_config(folder).to_dict()
        config = {key: value for key, value in config.items() if key not in _NO_SHAPE}
        files = [folder / name for name in ("tokenizer.json", "chat_template.jinja")]
        return [config, *(file.read_bytes() if file.is_file() else None for file in files)]

    return shape(a) == shape(b)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer; raises InputError if it cannot be loaded."""
    try:
        tokenizer: PreTrainedTokenizerBase = _tokenizer_class(Path(path)).from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        # For some architectures, transformers creates an empty tokenizer if the files are missing.
        if not any(Path(path, name).is_file() for name in tokenizer.vocab_files_names.values()):
            raise OSError(f"none of the files {', '.join(tokenizer.vocab_files_names.values())} exists")
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            "a tokenizer in the model's folder",
            _reason(error, Path(path, "tokenizer_config.json")),
            f"model.path={path}",
            "copy the tokenizer's files to the folder",
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _tokenizer_class(folder: Path) -> Any:
    """AutoTokenizer, or the class it returns for the offline model: AutoTokenizer imports the model code."""
    files = [folder / name for name in ("tokenizer_config.json", "config.json")]
    if all(file.is_file() for file in files):
        settings, config = (json.loads(file.read_text()) for file in files)
        if settings.get("tokenizer_class") == "TokenizersBackend" and config.get("model_type") == "qwen3":
            return PreTrainedTokenizerFast
    import_model_code()
    from transformers import AutoTokenizer

    return AutoTokenizer


def empty_causal_lm(path: str | Path) -> "PreTrainedModel":
    """The checkpoint's model on the meta device, with packed attention and float32 parameters;
    `rl_core.models.weights.load_weights` allocates and loads the weights."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    register_attention()
    config = load_config(path)
    with torch.device("meta"), _part_of_transformers(path, "a causal language model"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=ATTENTION, trust_remote_code=False
        )
    # Keep the generation config for the exported model.
    if model.can_generate() and (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    # Disable dropout: the ratio at the first update requires the same log-probs in every call.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def stop_tokens(path: str | Path) -> tuple[int, ...]:
    """Token ids that end a response, from the generation config, the model's config and the tokenizer together."""
    folder, found = Path(path), set()
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            ids = json.loads((folder / name).read_text()).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [ids])
    found.add(load_tokenizer(path).eos_token_id)
    return tuple(sorted(token for token in found if token is not None))


class Packed:
    """B sequences packed into one row: `ids_T` [T], this rank's part as `input_ids` and `position_ids` [1, K/S], and
    the layout that separates the sequences. A prefix that several sequences share is in the row once, so K <= T. With
    sequence parallelism over S ranks, a short padding sequence makes the row divisible by S."""

    def __init__(
        self,
        ids_T: Tensor,
        lengths: list[int],
        device: torch.device,
        parallel: SequenceParallel | None = None,
        shared: Shared | None = None,
    ) -> None:
        """`ids_T` are the concatenated tokens of all sequences, `lengths` the number of tokens of each, and `shared`
        the prefixes that are computed once; without it, no sequence shares any."""
        row = shared and row_of(lengths, shared)
        computed = len(row.kept_K) if row else len(ids_T)
        padding = -computed % (parallel.size if parallel else 1)
        if padding:
            ids_T, lengths, row = F.pad(ids_T, (0, padding)), [*lengths, padding], row and row.extended(padding)
        length_B = torch.tensor(lengths)
        starts_T = (length_B.cumsum(0) - length_B).repeat_interleave(length_B)
        positions_T = torch.arange(len(ids_T)) - starts_T
        row_ids, row_positions = (x[row.kept_K] if row else x for x in (ids_T, positions_T))
        self.ids_T = to_device(ids_T, device)
        self.parallel, self.own = parallel, parallel.own(len(row_ids)) if parallel else slice(0, len(row_ids))
        self.input_ids, self.position_ids = (to_device(x, device)[None, self.own] for x in (row_ids, row_positions))
        self.layout = Layout(lengths, device, parallel, row)

    def hidden_states(self, model: "PreTrainedModel", target_N: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """For this rank's target tokens: last hidden states before them [n, D], their ids [n], and a mask [N] of them
        among all target tokens (None without sequence parallelism)."""
        output = model(
            input_ids=self.input_ids, position_ids=self.position_ids, layout=self.layout, use_cache=False
        ).last_hidden_state[0]
        before_N = self.layout.in_row(target_N - 1)
        if self.parallel is None:
            return output[before_N], self.ids_T[target_N], None
        own_N = (before_N >= self.own.start) & (before_N < self.own.stop)
        return output[before_N[own_N] - self.own.start], self.ids_T[target_N[own_N]], own_N

    def gather(self, values_n: Tensor, own_N: Tensor | None) -> Tensor:
        """Values of all target tokens [N] from each rank's own [n]."""
        return values_n if self.parallel is None or own_N is None else self.parallel.gather(values_n, own_N)


class PolicyModel(nn.Module):
    """Log-probs, entropies and Σπ² of given tokens; only one chunk of logits is materialised at a time."""

    def __init__(self, model: "PreTrainedModel", compiled: bool = False) -> None:
        super().__init__()
        self.hf = model
        self._log_probs = ChunkedLogProbs(compiled)

    def forward(self, packed: Packed, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob, entropy and Σ_v π_v², each [N] float32, for the packed tokens at indices `target_N` [N], given the
        tokens before them."""
        hidden_nD, label_n, own_N = packed.hidden_states(cast("PreTrainedModel", self.hf.base_model), target_N)
        head = cast(nn.Linear, self.hf.get_output_embeddings())
        values = self._log_probs(hidden_nD, head.weight, label_n, temperature)
        log_prob_N, entropy_N, square_N = (packed.gather(each, own_N) for each in values)
        return log_prob_N, entropy_N, square_N


class ValueModel(nn.Module):
    """A causal language model with a scalar value head, which is initialised to zero."""

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__()
        self.hf = cast("PreTrainedModel", model.base_model)
        self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False, device="meta")

    def forward(self, packed: Packed, target_N: Tensor) -> Tensor:
        """Values [N] float32 of the states before the packed tokens at indices `target_N` [N]."""
        hidden_nD, _, own_N = packed.hidden_states(self.hf, target_N)
        # Copy, because FSDP2 warns about outputs that are views.
        return packed.gather(self.value_head(hidden_nD).float().squeeze(1), own_N).clone()
