"""Checking and loading Hugging Face checkpoints, and the two modules that are trained: policy and value model."""

import json
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rl_core.errors import InputError
from rl_core.models.attention import ATTENTION, Layout, to_device
from rl_core.models.log_probs import ChunkedLogProbs
from rl_core.models.sequence_parallel import SequenceParallel

_NO_SHAPE = {"_name_or_path", "architectures", "dtype", "transformers_version"}
"""Entries of a config that do not change with the architecture."""


def check_model_folder(path: str) -> Path:
    """The folder of a Hugging Face checkpoint; InputError when it is not one."""
    folder = Path(path).expanduser()
    where = f"model.path={path}"
    fix = "give model.path=FOLDER with config.json, *.safetensors and the tokenizer's files, or model.path=tiny"
    if not folder.is_dir():
        raise InputError("a folder with a Hugging Face checkpoint", "no such folder", where, fix)
    if not (folder / "config.json").is_file():
        raise InputError("config.json in the model's folder", "the folder has none", where, fix)
    if not any(folder.glob("*.safetensors")):
        raise InputError("weights as *.safetensors in the model's folder", "the folder has none", where, fix)
    try:
        json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise InputError("config.json that is valid JSON", str(error), where, fix) from error
    return folder


def check_shape(path: str | Path, max_length: int, tensor_parallel_size: int) -> None:
    """InputError when sequences of `max_length` tokens are longer than the model's, or when its attention heads cannot
    be shared out over the ranks of a rollout engine."""
    config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    where = f"config.json of {path}"
    stretched = (getattr(config, "rope_scaling", None) or {}).get("factor") or 1.0
    limit = getattr(config, "max_position_embeddings", None)
    if limit and max_length > limit * max(stretched, 1.0):
        raise InputError(
            f"a model for the {max_length} tokens of data.max_prompt_length + data.max_response_length",
            f"max_position_embeddings={limit}",
            where,
            "set shorter lengths or take another model",
        )
    heads = getattr(config, "num_attention_heads", None)
    if heads and heads % tensor_parallel_size:
        raise InputError(
            f"attention heads that rollout.tensor_parallel_size={tensor_parallel_size} divides",
            f"num_attention_heads={heads}",
            where,
            "set another rollout.tensor_parallel_size",
        )


def same_shape(a: Path, b: Path) -> bool:
    """Whether the weights of one checkpoint may take the place of the other's in live workers: the architecture, and
    what prompts and answers are read with, are the same."""

    def shape(folder: Path) -> list[object]:
        config = AutoConfig.from_pretrained(folder, local_files_only=True).to_dict()
        config = {key: value for key, value in config.items() if key not in _NO_SHAPE}
        files = [folder / name for name in ("tokenizer.json", "chat_template.jinja")]
        return [config, *(file.read_bytes() if file.is_file() else None for file in files)]

    return shape(a) == shape(b)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer; InputError when it cannot be loaded."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
        # Where the files are missing, transformers makes an empty tokenizer for some architectures.
        if not any(Path(path, name).is_file() for name in tokenizer.vocab_files_names.values()):
            raise OSError(f"none of the files {', '.join(tokenizer.vocab_files_names.values())}")
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            "a tokenizer beside the model",
            str(error).splitlines()[0],
            f"model.path={path}",
            "copy the tokenizer's files",
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def empty_causal_lm(path: str | Path) -> PreTrainedModel:
    """The checkpoint's model with packed attention and float32 parameters that have shapes but neither memory nor
    values; `rl_core.models.weights.load_weights` gives it both."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=ATTENTION
        )
    # The exported model generates as the given one does.
    if model.can_generate() and (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    # A model without dropout gives the same log-probs in every call, which the ratio at the first update needs.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def stop_tokens(path: str | Path) -> tuple[int, ...]:
    """Ids that end a response: those of the generation config, or else of the tokenizer and the model's config."""
    folder, found = Path(path), set()
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            ids = json.loads((folder / name).read_text()).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [ids])
    found.add(load_tokenizer(path).eos_token_id)
    return tuple(sorted(token for token in found if token is not None))


class Packed:
    """B sequences in one row: `ids_T` [T], this rank's part of them as `input_ids` and `position_ids` [1, T/S], and the
    layout that keeps the sequences apart. With sequence parallelism over S ranks a short sequence of padding makes the
    row divisible."""

    def __init__(
        self, ids_T: Tensor, lengths: list[int], device: torch.device, parallel: SequenceParallel | None = None
    ) -> None:
        """Takes the tokens of all sequences, one behind the other, and each one's number of them."""
        missing = -len(ids_T) % (parallel.size if parallel else 1)
        if missing:
            ids_T, lengths = F.pad(ids_T, (0, missing)), [*lengths, missing]
        length_B = torch.tensor(lengths)
        starts_T = (length_B.cumsum(0) - length_B).repeat_interleave(length_B)
        positions_T = to_device(torch.arange(len(ids_T)) - starts_T, device)
        self.ids_T = to_device(ids_T, device)
        self.parallel, self.own = parallel, parallel.own(len(ids_T)) if parallel else slice(0, len(ids_T))
        self.input_ids, self.position_ids = self.ids_T[None, self.own], positions_T[None, self.own]
        self.layout = Layout(lengths, device, parallel)

    def hidden_states(self, model: PreTrainedModel, target_N: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of the target tokens that are this rank's: the last hidden states before them [n, D] and their ids [n]; and
        which of the target tokens they are [N], unless they are all."""
        output = model(
            input_ids=self.input_ids, position_ids=self.position_ids, layout=self.layout, use_cache=False
        ).last_hidden_state[0]
        before_N = target_N - 1
        if self.parallel is None:
            return output[before_N], self.ids_T[target_N], None
        own_N = (before_N >= self.own.start) & (before_N < self.own.stop)
        return output[before_N[own_N] - self.own.start], self.ids_T[target_N[own_N]], own_N

    def gather(self, values_n: Tensor, own_N: Tensor | None) -> Tensor:
        """The values of all target tokens [N] from this rank's."""
        return values_n if self.parallel is None or own_N is None else self.parallel.gather(values_n, own_N)


class PolicyModel(nn.Module):
    """Log-probs, entropies and Σπ² of chosen tokens; logits exist only a chunk at a time."""

    def __init__(self, model: PreTrainedModel, compiled: bool = False) -> None:
        super().__init__()
        self.hf: PreTrainedModel = model
        self._log_probs = ChunkedLogProbs(compiled)

    def forward(self, packed: Packed, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Of the packed tokens at indices `target_N` [N], given those before them, each [N] float32: log-prob, entropy
        and Σ_v π_v² of the distribution."""
        hidden_nD, label_n, own_N = packed.hidden_states(cast(PreTrainedModel, self.hf.base_model), target_N)
        head = cast(nn.Linear, self.hf.get_output_embeddings())
        values = self._log_probs(hidden_nD, head.weight, label_n, temperature)
        log_prob_N, entropy_N, square_N = (packed.gather(each, own_N) for each in values)
        return log_prob_N, entropy_N, square_N


class ValueModel(nn.Module):
    """A causal language model whose head gives one value a token; the new head starts at zero."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.hf = cast(PreTrainedModel, model.base_model)
        self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False, device="meta")

    def forward(self, packed: Packed, target_N: Tensor) -> Tensor:
        """Values [N], float32, of the states before the packed tokens at indices `target_N` [N]."""
        hidden_nD, _, own_N = packed.hidden_states(self.hf, target_N)
        # A copy, because FSDP2 warns of outputs that are views.
        return packed.gather(self.value_head(hidden_nD).float().squeeze(1), own_N).clone()
