import json
from itertools import pairwise
from pathlib import Path

import pytest

from rl_core.errors import InputError, RollforwardError, TransientError
from rl_core.storage.ledger import Ledger
from rl_core.storage.store import Store


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(Store(str(tmp_path)))


def test_records_come_back_in_order_and_in_range(ledger: Ledger, tmp_path: Path) -> None:
    for step in (10, 2, 1, 9, 3, 4, 5, 6, 7, 8):
        ledger.write(step, {"step": step, "loss": step / 3})
    assert [record["step"] for record in ledger.records(upto=10)] == list(range(1, 11))
    assert list(ledger.records(upto=4, after=2)) == [{"step": 3, "loss": 1.0}, {"step": 4, "loss": 4 / 3}]
    assert list(ledger.records(upto=0)) == []
    assert (tmp_path / "ledger" / "step_000010.json").is_file()


@pytest.mark.parametrize(("upto", "count"), [(0, 9), (1, 9), (2, 2), (8, 9), (9, 9), (10, 9), (60, 9), (61, 60)])
def test_a_sample_is_spread_over_all_steps_and_has_both_ends(ledger: Ledger, upto: int, count: int) -> None:
    for step in range(1, upto + 1):
        ledger.store.write_bytes(f"step_{step:06d}.json", b'{"step": %d}' % step)
    steps = [record["step"] for record in ledger.sample(upto, count)]
    assert steps == sorted(set(steps)) and len(steps) <= count
    assert steps == list(range(1, upto + 1)) if upto <= count else {1, upto} <= set(steps)
    assert all(right - left <= 2 * upto / count + 1 for left, right in pairwise(steps))


def test_a_step_that_is_done_again_replaces_its_record(ledger: Ledger) -> None:
    ledger.write(1, {"attempt": 1})
    ledger.write(1, {"attempt": 2})
    assert ledger.read(1) == {"attempt": 2}


def test_a_missing_record_is_named_and_not_retried(ledger: Ledger) -> None:
    ledger.write(1, {})
    ledger.write(3, {})
    with pytest.raises(RollforwardError, match="step 2") as caught:
        list(ledger.records(upto=3))
    assert not isinstance(caught.value, TransientError)


def test_a_record_that_is_no_object_is_named(ledger: Ledger) -> None:
    ledger.store.write_bytes("step_000001.json", b"[1]")
    with pytest.raises(RollforwardError, match="step 1"):
        ledger.read(1)


@pytest.mark.parametrize(
    ("old", "new"), [(b"0.5", b"0.9"), (b"}", b""), (b"loss", b"lost")], ids=["flipped", "truncated", "renamed"]
)
def test_a_damaged_record_is_named_with_the_way_on(ledger: Ledger, old: bytes, new: bytes) -> None:
    ledger.write(7, {"step": 7, "metrics": {"loss": 0.5}})
    name = "step_000007.json"
    ledger.store.write_bytes(name, ledger.store.read_bytes(name).replace(old, new))
    with pytest.raises(InputError, match="step 7") as caught:
        list(ledger.records(upto=7, after=6))
    assert caught.value.where == f"{ledger.store.url}/{name}"
    lost = caught.value.fix.partition("replace its content by ")[2]
    ledger.store.write_bytes(name, lost.encode())
    assert ledger.read(7) == json.loads(lost)
