"""What each step of a run did: one JSON record a step."""

from typing import Any

from rl_core.errors import RollforwardError
from rl_core.storage import Store, step_name


class Ledger:
    """The records of a run's steps.

    A record counts only when a committed checkpoint covers its step. After a crash the steps behind the last
    checkpoint are done again and write their records again, so readers ask for records up to the committed step
    and never list the folder.
    """

    def __init__(self, store: Store, rel: str = "ledger") -> None:
        """Keep the records of the run that `store` holds in its folder `rel`."""
        self.store = store.child(rel)

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Write the record of a step whole; one that a crashed attempt left is replaced."""
        self.store.write_json(f"{step_name(step)}.json", record)

    def read(self, step: int) -> dict[str, Any]:
        """The record of a step; `RollforwardError` when it is missing or is not a record."""
        name = f"{step_name(step)}.json"
        try:
            record = self.store.read_json(name)
        except FileNotFoundError:
            raise RollforwardError(f"the ledger has no record of step {step}: {self.store.url}/{name}") from None
        if not isinstance(record, dict):
            raise RollforwardError(f"the ledger's record of step {step} is not a JSON object: {self.store.url}/{name}")
        return record

    def records(self, upto: int, after: int = 0) -> list[dict[str, Any]]:
        """The records of the steps after + 1 … upto, in order; `RollforwardError` names a step without one."""
        return [self.read(step) for step in range(after + 1, upto + 1)]
