"""Checking and loading Hugging Face checkpoints, and the two modules that are trained: policy and value model."""

import json
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rl_core.errors import InputError
from rl_core.models.attention import ATTENTION, Layout, layout_of

# Tokens whose logits exist at one time: [2048, vocabulary] instead of [tokens, vocabulary].
LOGIT_CHUNK = 2048


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


def load_causal_lm(path: str | Path) -> PreTrainedModel:
    """The checkpoint in float32 on the CPU, with packed attention."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True
    )
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
    """B sequences in one row: `input_ids` and `position_ids` [1, T], and the layout that keeps them apart."""

    def __init__(self, sequences: list[Tensor], device: torch.device) -> None:
        lengths = [len(sequence) for sequence in sequences]
        self.input_ids = torch.cat(sequences).unsqueeze(0).to(device)
        self.position_ids = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0).to(device)
        self.layout: Layout = layout_of(lengths, device)


def _hidden_states(model: PreTrainedModel, packed: Packed) -> Tensor:
    output = model.base_model(
        input_ids=packed.input_ids, position_ids=packed.position_ids, layout=packed.layout, use_cache=False
    )
    return output.last_hidden_state[0]


class PolicyModel(nn.Module):
    """Log-probs, entropies and Σπ² of chosen tokens; logits exist only a chunk at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.hf: PreTrainedModel = model

    def forward(self, packed: Packed, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Of the packed tokens at indices `target_N` [N], given those before them, each [N] float32: log-prob, entropy
        and Σ_v π_v² of the distribution."""
        hidden_ND = _hidden_states(self.hf, packed)[target_N - 1]
        label_N = packed.input_ids[0, target_N]
        chunks = [
            checkpoint(self._chunk, hidden, label, temperature, use_reentrant=False)
            for hidden, label in zip(hidden_ND.split(LOGIT_CHUNK), label_N.split(LOGIT_CHUNK), strict=True)
        ]
        log_probs, entropies, squares = zip(*chunks, strict=True)
        return torch.cat(log_probs), torch.cat(entropies), torch.cat(squares)

    def _chunk(self, hidden_ND: Tensor, label_N: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        logits_NV = self.hf.get_output_embeddings()(hidden_ND).float() / temperature
        log_probs_NV = F.log_softmax(logits_NV, dim=-1)
        probs_NV = log_probs_NV.exp()
        entropy_N = -(probs_NV * log_probs_NV).sum(-1)
        square_N = probs_NV.detach().square().sum(-1)
        return log_probs_NV.gather(1, label_N[:, None]).squeeze(1), entropy_N, square_N


class ValueModel(nn.Module):
    """A causal language model whose head gives one value a token; the new head starts at zero."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.hf = cast(PreTrainedModel, model.base_model)
        self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, packed: Packed, target_N: Tensor) -> Tensor:
        """Values [N], float32, of the states before the packed tokens at indices `target_N` [N]."""
        hidden_ND = self.hf(
            input_ids=packed.input_ids, position_ids=packed.position_ids, layout=packed.layout, use_cache=False
        ).last_hidden_state[0][target_N - 1]
        # A copy, because FSDP2 warns of outputs that are views.
        return self.value_head(hidden_ND).float().squeeze(1).clone()
