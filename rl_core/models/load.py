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
from rl_core.models.log_probs import ChunkedLogProbs, LogitTransform
from rl_core.models.sequence_parallel import SequenceParallel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The model code of transformers takes seconds to import. A driver needs none of it for the offline model, so it is
# imported where a model is built.

_NO_SHAPE = {"_name_or_path", "architectures", "dtype", "transformers_version"}
"""Config entries that are independent of the architecture."""
PACKED_LAYERS = {"full_attention", "sliding_attention", "attention", "mlp", "moe"}
"""Kinds of layers in which only attention mixes tokens."""
NO_LAYOUT = {"nemotron"}
"""Families whose layers do not pass unknown arguments, such as the layout of a packed row, on to attention."""


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
        config = load_config(folder)
    except InputError as error:
        raise InputError(error.expected, error.seen, where, error.fix) from error
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise InputError(
            "weights in float32, bfloat16 or float16",
            f"a quantised checkpoint ({method or 'quantization_config'})",
            where,
            "use the checkpoint in bfloat16, or convert this one with the tools of its quantisation",
        )
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


def check_sequence_parallel(model: "PreTrainedModel", size: int) -> None:
    """Raises InputError if several ranks are to share a sequence and the model cannot: its layers need whole rows, or
    its attention has sinks."""
    sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    if size > 1 and (sinks or not is_packed(model)):
        raise InputError(
            "a model whose sequences several ranks can share",
            f"{model.config.get_text_config().model_type}, which has " + ("sinks" if sinks else "padded rows"),
            f"fsdp.sequence_parallel_size={size}",
            "set fsdp.sequence_parallel_size=1",
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
    from transformers import GenerationConfig

    config = load_config(path)
    with torch.device("meta"), _part_of_transformers(path, "a causal language model"):
        model = causal_lm(config)
    # Keep the generation config for the exported model.
    if model.can_generate() and (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return model


def causal_lm(config: PreTrainedConfig) -> "PreTrainedModel":
    """The config's causal language model on torch's default device, with float32 parameters and without dropout: packed
    attention if packed rows are exact for it (`takes_packed_rows`), otherwise transformers' own attention."""
    from transformers import AutoModelForCausalLM

    register_attention()
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if takes_packed_rows(model):
        model.set_attn_implementation(ATTENTION)
    # Disable dropout and router noise: the ratio at the first update requires the same log-probs in every call.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or "jitter" in name):
                setattr(module, name, 0.0)
    return model


def takes_packed_rows(model: "PreTrainedModel") -> bool:
    """Whether attention, called through transformers' interface, is the only part of the model that mixes tokens.

    Recurrences and convolutions would carry state from one packed sequence into the next.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) | set(getattr(config, "layers_block_type", None) or ())
    recurrent = model._is_stateful or kinds - PACKED_LAYERS or any(isinstance(m, nn.Conv1d) for m in model.modules())
    return model._supports_attention_backend and not recurrent and config.model_type not in NO_LAYOUT


def body(model: "PreTrainedModel") -> "PreTrainedModel":
    """The model without its head."""
    found = model.base_model
    # Some families name a part as the base model that exists in their multimodal sibling only.
    return cast("PreTrainedModel", model.get_submodule("model") if found is model else found)


def is_packed(model: "PreTrainedModel") -> bool:
    """Whether the model computes packed rows, not padded ones."""
    return bool(model.config.get_text_config()._attn_implementation == ATTENTION)


def stop_tokens(path: str | Path) -> tuple[int, ...]:
    """Token ids that end a response, from the generation config, the model's config and the tokenizer together."""
    folder, found = Path(path), set()
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            ids = json.loads((folder / name).read_text()).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [ids])
    found.add(load_tokenizer(path).eos_token_id)
    return tuple(sorted(token for token in found if token is not None))


def logit_transform(config: PreTrainedConfig) -> LogitTransform:
    """What the family computes between its head and its logits, from the names that transformers' configs give it."""
    text = config.get_text_config()
    scale = float(getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None) or 1.0)
    if scaling := getattr(text, "logits_scaling", None):
        scale *= scaling if text.model_type == "hyperclovax" else 1.0 / scaling
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return LogitTransform(scale, next((float(cap) for name in names if (cap := getattr(text, name, None))), 0.0))


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
        output = self._packed(model) if is_packed(model) else self._padded(model)
        # A shared prefix has one row for several targets: `index_select`, unlike indexing, adds gradients in order.
        before_N = self.layout.in_row(target_N - 1)
        if self.parallel is None:
            return output.index_select(0, before_N), self.ids_T[target_N], None
        own_N = (before_N >= self.own.start) & (before_N < self.own.stop)
        return output.index_select(0, before_N[own_N] - self.own.start), self.ids_T[target_N[own_N]], own_N

    def _packed(self, model: "PreTrainedModel") -> Tensor:
        output = model(input_ids=self.input_ids, position_ids=self.position_ids, layout=self.layout, use_cache=False)
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD

    def _padded(self, model: "PreTrainedModel") -> Tensor:
        # One row per sequence. Padding is on the right, and no token depends on later ones, so no mask is needed.
        hidden_BLD = model(input_ids=self.layout.pad(self.input_ids[0]), use_cache=False).last_hidden_state
        return self.layout.unpad(hidden_BLD)

    def gather(self, values_n: Tensor, own_N: Tensor | None) -> Tensor:
        """Values of all target tokens [N] from each rank's own [n]."""
        return values_n if self.parallel is None or own_N is None else self.parallel.gather(values_n, own_N)


class PolicyModel(nn.Module):
    """Log-probs, entropies and Σπ² of given tokens; only one chunk of logits is materialised at a time."""

    def __init__(self, model: "PreTrainedModel", compiled: bool = False) -> None:
        super().__init__()
        self.hf = model
        self._log_probs, self._logits = ChunkedLogProbs(compiled), logit_transform(model.config)

    def forward(self, packed: Packed, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob, entropy and Σ_v π_v², each [N] float32, for the packed tokens at indices `target_N` [N], given the
        tokens before them."""
        hidden_nD, label_n, own_N = packed.hidden_states(body(self.hf), target_N)
        head = cast(nn.Linear, self.hf.get_output_embeddings())
        values = self._log_probs(hidden_nD, head.weight, label_n, temperature, head.bias, self._logits)
        log_prob_N, entropy_N, square_N = (packed.gather(each, own_N) for each in values)
        return log_prob_N, entropy_N, square_N


class ValueModel(nn.Module):
    """A causal language model with a scalar value head, which is initialised to zero."""

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__()
        self.hf = body(model)
        self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False, device="meta")

    def forward(self, packed: Packed, target_N: Tensor) -> Tensor:
        """Values [N] float32 of the states before the packed tokens at indices `target_N` [N]."""
        hidden_nD, _, own_N = packed.hidden_states(self.hf, target_N)
        # Copy, because FSDP2 warns about outputs that are views.
        return packed.gather(self.value_head(hidden_nD).float().squeeze(1), own_N).clone()
