"""Parity of the training forward pass with transformers' own, for the family of a checkpoint's config.

A narrow model of the same config (`narrow_configs`) with random weights computes several sequences of different lengths
in one batch with this project's modules, and each sequence alone with transformers' forward pass. Log-probs, entropies
and all gradients must agree. Otherwise training would optimise another function than the exported model computes.
"""

import copy
import hashlib
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rl_core.errors import InputError
from rl_core.models.load import Packed, PolicyModel, causal_lm, load_config
from rl_core.models.narrow import VOCABULARY, narrow_configs

CPU = torch.device("cpu")
LENGTHS = (7, 29, 16)
"""Tokens of the sequences; with a window of `WINDOW`, two of them are longer."""
WINDOW = 8
TOLERANCE = 1e-3
"""Nats for log-probs and entropies; relative to its norm for a parameter's gradient."""
MAX_PARAMETERS = 250_000_000
"""Two copies of the model and their gradients are in memory: 4 GB."""
NOISE_FACTOR, MAX_TOLERANCE = 4.0, 2e-2
"""Limit for a model that amplifies rounding errors, as a multiple of their effect, and its maximum."""
SPREAD = 2.0
"""Standard deviation of a layer's output for inputs of unit variance: log-probs must be far from uniform."""


@dataclass(frozen=True)
class Parity:
    """Largest differences to transformers: of log-probs and entropies in nats, of the parameters' gradients relative to
    their norms. `limit` is `TOLERANCE`, or more for a model that amplifies rounding errors."""

    log_prob: float
    gradient: float
    limit: float = TOLERANCE

    @property
    def is_exact(self) -> bool:
        """Whether both are within the limit."""
        return all(each <= self.limit for each in (self.log_prob, self.gradient))  # not so for NaN


def check_parity(path: str, max_length: int, cache: Path) -> None:
    """Raises InputError if the checkpoint's family is not exact for sequences of up to `max_length` tokens.

    The folder `cache` remembers exact configs for the installed versions.
    """
    config = load_config(path)
    kept = cache / _key(config, max_length)
    if kept.is_file():
        return
    fix = "use a model of another family; docs/models.md lists the exact ones"
    expected = f"a training forward pass that computes what transformers' {config.model_type} computes"
    try:
        seen = parity(config, max_length)
    except Exception as error:  # each family fails in its own way; what cannot be checked is refused
        reason = next(iter(str(error).splitlines()), "")
        raise InputError(expected, f"{type(error).__name__}: {reason}", f"config.json of {path}", fix) from error
    if not seen.is_exact:
        difference = f"log-probs differ by {seen.log_prob:.1e} nats, gradients by {seen.gradient:.1e} of their norm"
        raise InputError(expected, f"{difference} (limit {seen.limit:.0e})", f"config.json of {path}", fix)
    cache.mkdir(exist_ok=True)
    kept.touch()


def _key(config: PreTrainedConfig, max_length: int) -> str:
    names = ("attention", "load", "log_probs", "narrow", "parity")
    own = [Path(__file__).with_name(f"{name}.py").read_text() for name in names]
    content = [config.to_json_string(), _window(config, max_length), torch.__version__, transformers.__version__, *own]
    return hashlib.sha256(repr(content).encode()).hexdigest()


def parity(config: PreTrainedConfig, max_length: int, device: torch.device = CPU) -> Parity:
    """Differences between the training modules and transformers for a narrow model of this config, in float32.

    Windows of at least `max_length` tokens stay longer than the sequences, all others become shorter.
    """
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(0)
        reference, wanted = _reference(config, _window(config, max_length), device)
        with device:
            own = PolicyModel(causal_lm(copy.deepcopy(reference.config)))
        own.hf.load_state_dict(reference.state_dict())
        seen = _outputs(own.train(), _sequences(reference.config))
        found = Parity(_difference(seen, wanted), _gradient_difference(own.hf, reference))
        return found if found.is_exact else replace(found, limit=_limit(reference, wanted))


def _limit(reference: PreTrainedModel, wanted: tuple[Tensor, Tensor]) -> float:
    """`TOLERANCE`, or a multiple of the change of the reference itself when its weights change by rounding errors."""
    changed = copy.deepcopy(reference)
    changed.zero_grad()
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1 + torch.finfo(torch.float32).eps * torch.randn_like(parameter))
    seen = _plain_outputs(changed, _sequences(reference.config))
    noise = _highest(_difference(seen, wanted), _gradient_difference(changed, reference))
    return min(max(TOLERANCE, NOISE_FACTOR * noise), MAX_TOLERANCE) if math.isfinite(noise) else TOLERANCE


def _difference(seen: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    return _highest(*((a - b).abs().max().item() for a, b in zip(seen, wanted, strict=True)))


def _highest(*values: float) -> float:
    """The maximum; NaN if one value is, which `max` may leave out."""
    return torch.tensor(values, dtype=torch.float64).max().item()


def _window(config: PreTrainedConfig, max_length: int) -> int | None:
    text = config.get_text_config()
    sizes = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size", "attention_window_size")]
    return WINDOW if any(isinstance(size, int) and size < max_length for size in sizes) else None


def _reference(
    config: PreTrainedConfig, window: int | None, device: torch.device
) -> tuple[PreTrainedModel, tuple[Tensor, Tensor]]:
    """The narrowest model that transformers builds and runs, with its outputs for the sequences and its gradients."""
    failure: Exception = ValueError("no narrow model of this config is valid")
    for narrow in narrow_configs(config, window):
        try:
            with torch.device("meta"):
                size = AutoModelForCausalLM.from_config(narrow, trust_remote_code=False).num_parameters()
            if size > MAX_PARAMETERS:
                raise ValueError(f"no narrow model of this config has fewer than {MAX_PARAMETERS:,} parameters")
            with device:
                model = _spread(AutoModelForCausalLM.from_config(narrow, dtype=torch.float32, trust_remote_code=False))
                if model.config.get_text_config()._attn_implementation != "eager":
                    model.set_attn_implementation("eager")
            return model, _plain_outputs(model.eval(), _sequences(narrow))
        except Exception as error:  # each family fails in its own way for a width that it does not have
            failure = error
    raise failure


@torch.no_grad()
def _spread(model: PreTrainedModel) -> PreTrainedModel:
    # Deep stacks of large weights would amplify rounding errors.
    spread = SPREAD * min(1.0, 8 / model.config.get_text_config().num_hidden_layers) ** 0.5
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=spread / parameter.shape[-1] ** 0.5)
        else:
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def _sequences(config: PreTrainedConfig) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    high = min(config.get_text_config().vocab_size, VOCABULARY) * 3 // 4  # without special tokens
    return [torch.randint(3, high, (length,), generator=generator) for length in LENGTHS]


def _differentiated(log_prob_N: Tensor, entropy_N: Tensor) -> tuple[Tensor, Tensor]:
    """The values, after the backward pass of an objective of both where gradients are enabled."""
    if torch.is_grad_enabled():
        weight_N = torch.linspace(-1.0, 1.5, len(log_prob_N), device=log_prob_N.device)
        (weight_N * (log_prob_N + 0.3 * entropy_N)).sum().backward()
    return log_prob_N.detach(), entropy_N.detach()


def _plain_outputs(model: PreTrainedModel, sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
    parts = []
    for ids_T in (each.to(model.device) for each in sequences):
        logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        log_prob_N = logits_TV.gather(1, ids_T[1:, None])[:, 0]
        parts.append((log_prob_N, -(logits_TV.exp() * logits_TV).sum(-1)))
    log_prob_N, entropy_N = (torch.cat(each) for each in zip(*parts, strict=True))
    return _differentiated(log_prob_N, entropy_N)


def _outputs(policy: PolicyModel, sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
    device, lengths = policy.hf.device, [len(each) for each in sequences]
    packed = Packed(torch.cat(sequences), lengths, device)
    target_N = torch.ones(sum(lengths), dtype=torch.bool)
    target_N[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = False
    log_prob_N, entropy_N, _ = policy(packed, target_N.nonzero().squeeze(1).to(device), 1.0)
    return _differentiated(log_prob_N, entropy_N)


def _gradient_difference(own: PreTrainedModel, reference: PreTrainedModel) -> float:
    """Largest difference of a parameter's gradient, relative to its norm or, if that is larger, to a thousandth of the
    whole gradient's: the gradient of, for example, a key's bias is zero but for rounding."""
    wanted = {name: _zeros_if_none(each) for name, each in reference.named_parameters()}
    total = torch.stack([each.norm() for each in wanted.values()]).norm().item()
    seen = {name: _zeros_if_none(each) for name, each in own.named_parameters()}
    norms = {name: _highest(each.norm().item(), 1e-3 * total) for name, each in wanted.items()}
    return _highest(*((seen[name] - each).norm().item() / norms[name] for name, each in wanted.items()))


def _zeros_if_none(parameter: torch.nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' advice on kernels and on configs, which concerns the narrow copy."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def narrow_model(config: PreTrainedConfig, max_length: int) -> PreTrainedModel:
    """The narrow random model of transformers that `parity` compares with, with the same weights at each call."""
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(0)
        return _reference(config, _window(config, max_length), CPU)[0]


def rounding(config: PreTrainedConfig, dtype: torch.dtype) -> float:
    """Largest difference in nats between the log-probs of a narrow model in `dtype` and in float32, on the CPU."""
    with torch.random.fork_rng(devices=[]), _quiet(), torch.no_grad():
        torch.manual_seed(0)
        reference, (wanted_N, _) = _reference(config, None, CPU)
        own = PolicyModel(causal_lm(copy.deepcopy(reference.config)))
        own.hf.load_state_dict(reference.state_dict())
        for parameter in own.parameters():
            parameter.data = parameter.data.to(dtype)
        log_prob_N, _ = _outputs(own, _sequences(reference.config))
    return (log_prob_N - wanted_N).abs().max().item()
