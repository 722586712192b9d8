"""The transformers engine's cache and batches, in float32."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import complete, plain_log_probs, save_grouped_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rl_core.config.schema import RolloutConfig
from rl_core.errors import TrainingError
from rl_core.rollout.engine.kv_cache import CachedLayout, KeyValueCache, cached_attention
from rl_core.rollout.engine.protocol import Sampling
from rl_core.rollout.engine.transformers_engine import TransformersEngine

FREE = Sampling(1.0, 20, ())
PROMPTS = [[4 + (i * k) % 50 for k in range(1, 3 + i)] for i in range(24)]


def engine_of(model: Path, **settings: Any) -> TransformersEngine:
    return TransformersEngine(model, RolloutConfig(**settings), "float32", 64, torch.device("cpu"))


def test_a_model_of_grouped_heads_samples_what_the_plain_model_says(tmp_path: Path) -> None:
    save_grouped_model(tmp_path)
    engine = engine_of(tmp_path)
    for turn in complete(engine, PROMPTS[:8], list(range(8)), FREE):
        wanted = plain_log_probs(tmp_path, turn.prompt_ids, turn.token_ids)
        torch.testing.assert_close(torch.tensor(turn.log_probs), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [{"kv_cache_gb": 2e-4}, {"max_num_seqs": 3}])
def test_turns_that_wait_for_room_are_the_same(tiny_model: Path, settings: dict[str, Any]) -> None:
    """With little memory turns are sent back to the queue, and go on later."""
    wanted = complete(engine_of(tiny_model), PROMPTS, list(range(24)), FREE)
    engine = engine_of(tiny_model, **settings)
    most: list[int] = []
    bytes_used: list[int] = []
    forward = engine._requests._forward

    def counted(cache: KeyValueCache, continued: list[tuple[int, int]], *rest: Any) -> Tensor:
        most.append(len(continued))
        logits_BV = forward(cache, continued, *rest)
        bytes_used.append(cache.rows * cache.columns * cache.bytes_per_token)
        return logits_BV

    engine._requests._forward = counted  # type: ignore[assignment,method-assign]
    turns = complete(engine, PROMPTS, list(range(24)), FREE)
    assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in wanted]
    assert 1 <= max(most) < 24
    if limit := settings.get("kv_cache_gb"):
        assert 0 < max(bytes_used) <= limit * 2**30
    for turn, alike in zip(turns, wanted, strict=True):
        assert turn.log_probs == pytest.approx(alike.log_probs, abs=1e-5)


def test_tokens_of_turns_sent_back_keep_the_version_that_sampled_them(tiny_model: Path) -> None:
    engine = engine_of(tiny_model, kv_cache_gb=2e-4)
    requests, before = engine._requests, dict[tuple[int, ...], int]()
    step = requests._step

    def pushed() -> None:
        if not before and any(turn.sampled_ids for turn in requests._waiting):
            before.update({tuple(turn.token_ids): len(turn.sampled_ids) for turn in requests._under_way})
            requests.weights_changed(1)
        step()

    requests._step = pushed  # type: ignore[method-assign]
    turns = complete(engine, PROMPTS, list(range(24)), FREE)
    assert any(before.values())
    for turn in turns:
        old = before.get(tuple(turn.prompt_ids), 20)
        assert turn.versions == [-1] * old + [1] * (20 - old)


def test_layers_with_another_state_are_computed_anew_for_every_token(tiny_model: Path) -> None:
    wanted = complete(engine_of(tiny_model), PROMPTS, list(range(24)), FREE)
    engine = engine_of(tiny_model)
    engine._requests.cached = False  # as for a family with a recurrent state
    engine._model.set_attn_implementation("sdpa")
    turns = complete(engine, PROMPTS, list(range(24)), FREE)
    assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in wanted]
    assert engine.log_probs(PROMPTS[9]) == pytest.approx(
        plain_log_probs(tiny_model, PROMPTS[9][:1], PROMPTS[9][1:]).tolist(), abs=1e-5
    )


def test_the_prompt_of_a_group_is_computed_once(tiny_model: Path) -> None:
    engine = engine_of(tiny_model)
    engine.log_probs(PROMPTS[0])  # the size of a token is known from here on
    lengths: list[int] = []
    forward = engine._model.forward

    def counted(input_ids: Tensor, **options: Any) -> Any:
        lengths.append(input_ids.shape[1])
        return forward(input_ids=input_ids, **options)

    engine._model.forward = counted
    turns = complete(engine, [PROMPTS[20]] * 8 + [PROMPTS[21]] * 8, list(range(16)), FREE)
    assert lengths == [len(PROMPTS[20]) + len(PROMPTS[21]), *[16] * 19]
    assert len({tuple(turn.token_ids) for turn in turns}) == 16


def test_sleep_gives_weights_and_cache_back(tiny_model: Path) -> None:
    engine = engine_of(tiny_model)
    complete(engine, PROMPTS, list(range(24)), FREE)
    assert engine._requests._cache._layers
    engine.sleep()
    assert not engine._requests._cache._layers
    assert sum(parameter.untyped_storage().nbytes() for parameter in engine._model.parameters()) == 0


def test_the_head_has_the_engines_own_copy(tiny_model: Path) -> None:
    """A push copies: the trainer's later updates do not reach the engine."""
    engine = engine_of(tiny_model)
    before = engine.log_probs(PROMPTS[9])
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    weights = dict(model.named_parameters())
    engine.update_weights([*weights.items(), ("lm_head.weight", model.lm_head.weight)], 1)
    with torch.no_grad():
        for weight in weights.values():
            weight.add_(1.0)
    assert engine.log_probs(PROMPTS[9]) == before and engine.version == 1


def test_a_push_of_other_names_or_without_a_buffer_stops_training(tiny_model: Path) -> None:
    engine = engine_of(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    weights = [*model.named_parameters(), ("lm_head.weight", model.lm_head.weight)]
    with pytest.raises(TrainingError, match="version 3 has model.other, which the rollout engine lacks"):
        engine.update_weights([*weights, ("model.other", torch.zeros(1))], 3)
    engine._model.register_buffer("routing_bias", torch.zeros(1))
    with pytest.raises(TrainingError, match="version 4 did not update 1 weights .* such as routing_bias"):
        engine.update_weights(weights, 4)


@pytest.mark.parametrize("window", [None, 3, 8])
@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize("sink", [False, True])
def test_attention_over_the_cache_is_the_formula(window: int | None, cap: float | None, sink: bool) -> None:
    """Two rows of 9 and 5 tokens, 4 query heads on 2 key/value heads."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    lengths, scale = [9, 5], 0.3
    keys, values, query = normal(2, 2, 9, 16), normal(2, 2, 9, 16), normal(4, 2, 16)
    sinks = normal(4) if sink else None
    cache = KeyValueCache()
    module = nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    cache.reserve(0, 2, 9)
    for cells, given in zip(cache.layer(0, keys, values), (keys, values), strict=True):
        cells[:, :, :9] = given
    last = torch.tensor([length - 1 for length in lengths])
    layout = CachedLayout(cache, last, torch.arange(2), last, None, None)
    new_key, new_value = (
        torch.stack([part[b, :, n - 1] for b, n in enumerate(lengths)], 1)[None] for part in (keys, values)
    )
    out, _ = cached_attention(
        module, query[None], new_key, new_value, None, scale, layout, sliding_window=window, softcap=cap, s_aux=sinks
    )
    for b, n in enumerate(lengths):
        for head in range(4):
            seen = slice(max(0, n - window) if window else 0, n)
            score_L = keys[b, head // 2, seen] @ query[head, b] * scale
            score_L = cap * torch.tanh(score_L / cap) if cap else score_L
            weight_L = score_L.exp()
            total = weight_L.sum() + (math.exp(sinks[head]) if sinks is not None else 0)
            torch.testing.assert_close(out[0, b, head], weight_L / total @ values[b, head // 2, seen])
