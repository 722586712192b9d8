from pathlib import Path

import pytest
import torch
from support import CPU, loaded, plain_outputs, save_grouped_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl_core.models.attention import Layout, packed_attention
from rl_core.models.load import Packed, PolicyModel, empty_causal_lm
from rl_core.training.packing import shared_prompts

# Prompt and response of sequences of different lengths, the shortest not at the end.
SEQUENCES = [([5, 6, 7, 8, 9], [10, 11, 12]), ([40], [41, 2]), ([20, 21, 33], [9, 9, 9, 1, 60, 4, 31, 2])]


@pytest.fixture(scope="module")
def grouped_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with 4 query heads on 2 key/value heads."""
    folder = tmp_path_factory.mktemp("llama")
    save_grouped_model(folder)
    return folder


@pytest.fixture(params=["tiny_model", "grouped_heads"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def packed_outputs(
    policy: PolicyModel, sequences: list[tuple[list[int], list[int]]], temperature: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs and entropies of each sequence's response, computed in one packed row."""
    ids = [prompt + response for prompt, response in sequences]
    packed = Packed(
        torch.tensor([token for each in ids for token in each]), [len(each) for each in ids], torch.device("cpu")
    )
    targets, start = [], 0
    for prompt, response in sequences:
        targets.append(torch.arange(start + len(prompt), start + len(prompt) + len(response)))
        start += len(prompt) + len(response)
    log_probs, entropies, _ = policy(packed, torch.cat(targets), temperature)
    sizes = [len(response) for _, response in sequences]
    return list(log_probs.split(sizes)), list(entropies.split(sizes))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_log_probs_and_entropies_are_those_of_single_sequences(folder: Path, temperature: float) -> None:
    model = plain(folder)
    log_probs, entropies = packed_outputs(loaded(PolicyModel(empty_causal_lm(folder)), folder), SEQUENCES, temperature)
    for (prompt, response), log_prob, entropy in zip(SEQUENCES, log_probs, entropies, strict=True):
        wanted_log_prob, wanted_entropy = plain_outputs(model, prompt, response, temperature)
        torch.testing.assert_close(log_prob, wanted_log_prob, rtol=0, atol=5e-6)
        torch.testing.assert_close(entropy, wanted_entropy, rtol=0, atol=5e-6)


def test_packed_gradients_are_those_of_single_sequences(folder: Path) -> None:
    model, policy = plain(folder), loaded(PolicyModel(empty_causal_lm(folder)), folder)
    sum(part.sum() for part in packed_outputs(policy, SEQUENCES, 0.7)[0]).backward()  # type: ignore[union-attr]
    for prompt, response in SEQUENCES:
        plain_outputs(model, prompt, response, 0.7)[0].sum().backward()
    wanted = dict(model.named_parameters())
    for name, parameter in policy.hf.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-5, msg=name)


# Three responses to a prompt, one of them after another prompt, and a prompt that begins like the first.
GROUP = [([5, 6, 7, 8], [10, 11]), ([40], [41, 2, 9]), ([5, 6, 7, 8], [30]), ([5, 6], [7, 8]), ([5, 6, 7, 8], [12, 1])]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_shared_prompt_is_computed_once_and_trains_as_often_as_it_occurs(folder: Path, threads: int) -> None:
    prompts, lengths = [prompt for prompt, _ in GROUP], torch.tensor([len(prompt) for prompt, _ in GROUP])
    rows_BP = torch.zeros(len(GROUP), 4, dtype=torch.long)
    for row, prompt in zip(rows_BP, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    shared = shared_prompts(rows_BP, lengths)
    assert shared is not None and shared.first_B.tolist() == [0, 1, 0, 3, 0]
    ids = [prompt + response for prompt, response in GROUP]
    ends, whole = torch.tensor([len(each) for each in ids]).cumsum(0).tolist(), [t for each in ids for t in each]
    target_N = torch.cat([torch.arange(e - len(r), e) for e, (_, r) in zip(ends, GROUP, strict=True)])
    torch.set_num_threads(threads)
    results = []
    try:
        for sharing in (None, shared, shared):
            policy = loaded(PolicyModel(empty_causal_lm(folder)), folder)
            packed = Packed(torch.tensor(whole), [len(each) for each in ids], torch.device("cpu"), shared=sharing)
            assert packed.input_ids.shape[1] == (len(whole) if sharing is None else len(whole) - 8)
            log_prob_N, entropy_N, _ = policy(packed, target_N, 0.7)
            (log_prob_N * torch.arange(1.0, len(target_N) + 1)).sum().add(entropy_N.sum()).backward()
            gradients = {name: parameter.grad for name, parameter in policy.hf.named_parameters()}
            results.append({"log_prob": log_prob_N.detach(), "entropy": entropy_N.detach(), **gradients})
    finally:
        torch.set_num_threads(1)
    for name, wanted in results[0].items():
        torch.testing.assert_close(results[1][name], wanted, rtol=1e-4, atol=2e-5, msg=name)
        assert torch.equal(results[1][name], results[2][name]), f"{name} differs from run to run"


def test_different_prompts_share_nothing() -> None:
    assert shared_prompts(torch.tensor([[1, 2], [1, 3], [1, 0]]), torch.tensor([2, 2, 1])) is None


def test_a_neighbours_tokens_move_nothing(folder: Path) -> None:
    policy = loaded(PolicyModel(empty_causal_lm(folder)), folder)
    changed = [SEQUENCES[0], ([1], [3, 50]), SEQUENCES[2]]
    before, after = packed_outputs(policy, SEQUENCES, 1.0)[0], packed_outputs(policy, changed, 1.0)[0]
    assert torch.equal(before[0], after[0]) and torch.equal(before[2], after[2])
    assert not torch.equal(before[1], after[1])


def test_a_token_sees_those_before_it_and_none_after(folder: Path) -> None:
    policy = loaded(PolicyModel(empty_causal_lm(folder)), folder)
    prompt, response = SEQUENCES[2]
    changed = [*response[:4], 61, *response[5:]]
    (before,), (after,) = (packed_outputs(policy, [(prompt, ids)], 1.0)[0] for ids in (response, changed))
    assert torch.equal(before[:4], after[:4])
    assert (before[4:] != after[4:]).all()


def test_the_layout_finds_every_token() -> None:
    layout = Layout([2, 3, 1], torch.device("cpu"))
    assert layout.cu_seqlens.tolist() == [0, 2, 5, 6] and layout.cu_seqlens.dtype == torch.int32
    assert layout.longest == 3
    padded_BL = layout.pad(torch.arange(6))
    assert padded_BL.tolist() == [[0, 1, 0], [2, 3, 4], [5, 0, 0]]
    assert layout.unpad(padded_BL).tolist() == list(range(6))


@pytest.mark.parametrize("window", [1, 3, 7, 8])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_windows_soft_caps_and_sinks(window: int, softcap: float | None, sinks: bool) -> None:
    """Each sequence alone, from the definition: window − 1 tokens before, capped scores, a sink without a value."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 4, generator=generator) for heads in (4, 2, 2))
    sink_H = torch.randn(4, generator=generator) if sinks else None
    seen_THD = packed_attention(
        torch.nn.Identity(), query, key, value, None, 0.7, Layout([7, 2], CPU), window, softcap, sink_H
    )[0][0]
    for part in (slice(0, 7), slice(7, 9)):
        own_HTD = query[0, :, part]
        key_HTD, value_HTD = (x[0, :, part].repeat_interleave(2, dim=0) for x in (key, value))
        scores_HTT = own_HTD @ key_HTD.transpose(1, 2) * 0.7
        if softcap:
            scores_HTT = torch.tanh(scores_HTT / softcap) * softcap
        distance_TT = torch.arange(len(own_HTD[0]))[:, None] - torch.arange(len(own_HTD[0]))
        scores_HTT[:, (distance_TT < 0) | (distance_TT >= window)] = -torch.inf
        exp_HTT = scores_HTT.exp()
        total_HT1 = exp_HTT.sum(-1, keepdim=True) + (0 if sink_H is None else sink_H.exp()[:, None, None])
        wanted_THD = (exp_HTT / total_HT1 @ value_HTD).transpose(0, 1)
        torch.testing.assert_close(seen_THD[part], wanted_THD, rtol=0, atol=1e-6)
