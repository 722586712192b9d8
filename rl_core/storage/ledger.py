"""What each step of a run did: one JSON record a step."""

import hashlib
import json

from rl_core.errors import InputError
from rl_core.storage import run_files
from rl_core.storage.run_files import step_name
from rl_core.storage.store import Json, Store

SHA256 = "sha256"
"""Key of the checksum in a record's file."""


class Ledger:
    """The records of a run's steps.

    A record counts only when a committed checkpoint covers its step. After a crash the steps behind the last
    checkpoint are done again and write their records again, so readers ask for records up to the committed step
    and never list the folder.
    """

    def __init__(self, store: Store, rel: str = run_files.LEDGER) -> None:
        """Keep the records of the run that `store` holds in its folder `rel`."""
        self.store = store.child(rel)

    def write(self, step: int, record: Json) -> None:
        """Write the record of a step whole, with its checksum; one that a crashed attempt left is replaced."""
        record = json.loads(json.dumps(record))  # what a reader will see, so that both digests agree
        self.store.write_json(_name(step), {**record, SHA256: _digest(record)})

    def read(self, step: int) -> Json:
        """The record of a step; `InputError` when it is missing or damaged."""
        try:
            record = json.loads(self.store.read_bytes(_name(step)))
        except FileNotFoundError:
            raise self._damaged(step, "it is missing") from None
        except ValueError as error:
            raise self._damaged(step, str(error)) from None
        if not isinstance(record, dict):
            raise self._damaged(step, "no JSON object")
        digest = record.pop(SHA256, None)
        if digest is not None and digest != _digest(record):  # one that a person has restored has none
            raise self._damaged(step, "a wrong checksum")
        return record

    def _damaged(self, step: int, seen: str) -> InputError:
        lost = {"step": step, "time": 0, "metrics": {"time/step": 0}}
        return InputError(
            f"the ledger's record of step {step} as it was written",
            seen,
            f"{self.store.url}/{_name(step)}",
            f"restore the file; to continue without the numbers of this step, write into it: {json.dumps(lost)}",
        )

    def records(self, upto: int, after: int = 0) -> list[Json]:
        """The records of the steps after + 1 … upto, in order; `InputError` names one that is missing or damaged."""
        return [self.read(step) for step in range(after + 1, upto + 1)]


def _name(step: int) -> str:
    return f"{step_name(step)}.json"


def _digest(record: Json) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
