"""The ledger of a run: one JSON record per step."""

import hashlib
import json
from collections.abc import Iterator

from rl_core.errors import InputError
from rl_core.runtime.watchdog import progress
from rl_core.storage import run_files
from rl_core.storage.manifest import Json, parse_json
from rl_core.storage.run_files import step_name
from rl_core.storage.store import Store

SHA256 = "sha256"
"""Key of the checksum in a record's file."""
_GOLDEN_RATIO = (5**0.5 - 1) / 2


class Ledger:
    """The records of a run's steps.

    A record is valid only if a committed checkpoint covers its step. After a crash, the steps after the last
    checkpoint are repeated and overwrite their records, so readers request records up to the committed step and never
    list the folder.
    """

    def __init__(self, store: Store, rel: str = run_files.LEDGER) -> None:
        """Open the ledger in folder `rel` of the run stored in `store`."""
        self.store = store.child(rel)

    def write(self, step: int, record: Json) -> None:
        """Write the record of a step with its checksum, atomically; a record left by a crashed attempt is replaced."""
        record = json.loads(json.dumps(record))  # as a reader parses it, so that both digests agree
        self.store.write_json(_name(step), {**record, SHA256: _digest(record)})

    def read(self, step: int) -> Json:
        """The record of a step; raises `InputError` if it is missing or damaged."""
        try:
            record = parse_json(self.store.read_bytes(_name(step)))
        except FileNotFoundError:
            raise self._damaged(step, "it is missing") from None
        except ValueError as error:
            raise self._damaged(step, str(error)) from None
        if not isinstance(record, dict):
            raise self._damaged(step, "not a JSON object")
        digest = record.pop(SHA256, None)
        if digest is not None and digest != _digest(record):  # a record restored by a user has no checksum
            raise self._damaged(step, "a wrong checksum")
        return record

    def _damaged(self, step: int, seen: str) -> InputError:
        placeholder = {"step": step, "time": 0, "metrics": {"time/step": 0}}
        return InputError(
            expected=f"the ledger record of step {step} as it was written",
            seen=seen,
            where=f"{self.store.url}/{_name(step)}",
            fix="restore the file; to continue without the metrics of this step, replace its content by "
            + json.dumps(placeholder),
        )

    def records(self, upto: int, after: int = 0) -> Iterator[Json]:
        """Yields the records of steps after + 1 … upto, in order; raises `InputError` at a missing or damaged one."""
        for step in range(after + 1, upto + 1):
            progress()
            yield self.read(step)

    def sample(self, upto: int, count: int) -> list[Json]:
        """At most `count` (at least 2) records spread evenly over steps 1 … upto, including both.

        Raises `InputError` if one of them is missing or damaged.
        """
        stride = max(1.0, (upto - 1) / (count - 1))
        # The place within a stride varies, so that a metric of every n-th step keeps its share.
        places = (i + i * _GOLDEN_RATIO % 1 for i in range(count - 1)) if stride > 1 else range(upto - 1)
        steps = {*(1 + int(place * stride) for place in places), upto} if upto else set()
        return [record for step in sorted(steps) for record in self.records(step, step - 1)]


def _name(step: int) -> str:
    return f"{step_name(step)}.json"


def _digest(record: Json) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
