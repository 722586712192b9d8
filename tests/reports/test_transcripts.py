import io
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support_traces import ANSWER, TOKENIZER, step_parquet

from rl_core.errors import InputError
from rl_core.reports.transcripts import Transcript, spread, transcripts


@pytest.fixture(scope="module")
def four() -> dict[int, Transcript]:
    return {each.position: each for each in transcripts(step_parquet(), 9, TOKENIZER, "here")}


def test_turns_are_cut_where_the_policy_sampled_and_meet_their_calls(four: dict[int, Transcript]) -> None:
    asked = four[1]
    first, second = asked.turns
    assert (first.read, first.text) == (asked.prompt, "{6*7}<|end|>")
    assert (second.read, second.text) == (ANSWER, "42<|end|>")
    assert (first.read_tokens, first.tokens, second.read_tokens, second.tokens) == (6, 6, 5, 3)
    assert (first.log_prob, second.log_prob) == (-1.0, -0.25)
    assert (first.versions, second.versions) == ([3], [4])
    assert (first.reward, second.reward) == (-0.75, 0.625)
    assert [call["name"] for call in first.calls] == ["calculator", "search"] and second.calls == []
    assert first.calls[0]["arguments"]["expression"] == "6*7\ud800" and math.isnan(first.calls[0]["arguments"]["scale"])


def test_a_transcript_tells_what_was_scored_and_what_trains(four: dict[int, Transcript]) -> None:
    single, asked = four[0], four[1]
    assert single.prompt == "<|user|>6*7<|end|><|assistant|>" and single.answer == "41" and len(single.turns) == 1
    assert (single.score, single.advantage, single.row, single.uid) == (0.0, -1.0, 10, "1-0-0")
    assert (asked.score, asked.advantage, asked.answer, asked.stop_reason) == (1.0, 1.0, "42", "stop")
    assert asked.rewards == {"scores": 1.0, "shaped": 1.0, "rewards": -0.125, "turns": 0.5, "format": 0.0}


def test_failed_trajectories_keep_what_was_said_before(four: dict[int, Transcript]) -> None:
    late, refused = four[2], four[3]
    assert [(turn.text, turn.tokens) for turn in late.turns] == [("{?}<|end|>", 4), ("", 0)]
    assert late.turns[1].read == ANSWER and late.turns[1].log_prob is None
    assert late.answer == ""  # not what the tool said
    assert (late.status, late.stop_reason, late.score, late.advantage) == ("failed", "timeout", None, None)
    assert "agent.timeout_s" in late.detail
    assert (refused.turns, refused.answer, refused.status, refused.detail) == ([], "", "failed", "too long")


def test_the_best_the_worst_and_those_between_are_shown() -> None:
    scores = [0.5, 0.1, 0.9, 0.3, 0.7, 0.9, 0.0]
    table = pa.table({"token_level_scores": [[0.0, s] for s in scores], "scored": [True, False, *[True] * 5]})
    whole = [2, 5, 4, 0, 3, 6, 1]  # of equal scores the first, and last the one without
    assert [spread(table, count) for count in (1, 2, 3, 4)] == [[2], [2, 1], [2, 0, 1], [2, 4, 3, 1]]
    assert spread(table, 7) == spread(table, 100) == whole
    assert all(len(set(spread(table, count))) == count for count in range(1, 8))


def test_a_damaged_or_foreign_file_is_named() -> None:
    with pytest.raises(InputError, match="damaged"):
        transcripts(step_parquet()[:-20], 1, TOKENIZER, "here")
    buffer = io.BytesIO()
    pq.write_table(pq.read_table(io.BytesIO(step_parquet())).drop_columns(["calls"]), buffer)
    with pytest.raises(InputError, match="no calls"):
        transcripts(buffer.getvalue(), 1, TOKENIZER, "here")
