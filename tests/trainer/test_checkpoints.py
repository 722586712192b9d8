"""What is committed when, with roles that only write a file where real ones write shards."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.data.protocol import DataProto
from rl_core.errors import InputError, TrainingError, TransientError, WorkerError
from rl_core.storage import run_files
from rl_core.storage.manifest import Json
from rl_core.storage.run_files import step_name
from rl_core.storage.store import Store
from rl_core.trainer.checkpoints import Checkpointer
from rl_core.trainer.failed_steps import failed_step, read_failure
from rl_core.trainer.observer import NullObserver


class Noted(NullObserver):
    """Notes commits and damages."""

    def __init__(self, committed: list[int], damages: list[str] | None = None) -> None:
        self.committed, self.damages = committed, [] if damages is None else damages

    def on_commit(self, step: int) -> None:
        self.committed.append(step)

    def on_damage(self, message: str) -> None:
        self.damages.append(message)


class Files:
    """Roles whose background save is over when it is waited for, or fails then."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failure: Exception | None = None

    def save_checkpoint(self, store: Store, folder: str) -> None:
        self.calls.append(f"save {folder}")
        self.store, self.folder = store, folder
        self.files = [store.add_bytes(b"half", folder, "actor/first")]

    def finish_checkpoint(self) -> list[Json]:
        self.calls.append("finish")
        if self.failure:
            raise self.failure
        return [*self.files, self.store.add_bytes(b"whole", self.folder, "actor/second")]

    def written_files(self, store: Store, folder: str) -> list[Json] | None:
        if not store.exists(f"{folder}/actor/second"):
            return None
        return [*self.files, store.add_bytes(b"whole", folder, "actor/second")]

    def load_checkpoint(self, store: Store, folder: str) -> None:
        self.calls.append(f"load {folder}")


@pytest.fixture
def roles() -> Files:
    return Files()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


@pytest.fixture
def committed() -> list[int]:
    return []


@pytest.fixture
def checkpointer(store: Store, roles: Files, committed: list[int]) -> Checkpointer:
    return Checkpointer(store, roles, 2, 1, Noted(committed))  # type: ignore[arg-type]


def folder(step: int) -> str:
    return run_files.checkpoint(step)


def test_a_step_is_committed_when_all_shards_are_written(
    checkpointer: Checkpointer, roles: Files, store: Store, committed: list[int]
) -> None:
    checkpointer.begin(1, {"step": 1, "kl_coef": 0.5})
    assert store.committed_steps(run_files.CHECKPOINTS) == committed == []
    checkpointer.finish()
    assert store.committed_steps(run_files.CHECKPOINTS) == committed == [1]
    manifest = store.read_manifest(folder(1))
    assert manifest and manifest["meta"] == {"step": 1, "kl_coef": 0.5}
    assert [file["path"] for file in manifest["files"]] == ["actor/first", "actor/second"]
    checkpointer.finish()
    assert roles.calls == [f"save {folder(1)}", "finish"] and committed == [1]


def test_the_newest_are_kept(checkpointer: Checkpointer, store: Store) -> None:
    for step in (1, 2, 3):
        checkpointer.begin(step, {})
        assert store.committed_steps(run_files.CHECKPOINTS) == [s for s in (1, 2, 3) if step - 3 < s < step]
        checkpointer.finish()
    assert store.listdir(run_files.CHECKPOINTS) == [step_name(2), step_name(3)]


def test_a_failed_save_is_raised_and_commits_nothing(
    checkpointer: Checkpointer, roles: Files, store: Store, committed: list[int]
) -> None:
    roles.failure = TransientError("the storage is gone")
    checkpointer.begin(1, {})
    with pytest.raises(TransientError, match="the storage is gone"):
        checkpointer.finish()
    assert store.committed_steps(run_files.CHECKPOINTS) == committed == []


def test_what_a_crash_left_half_written_is_swept_away(checkpointer: Checkpointer, roles: Files, store: Store) -> None:
    checkpointer.begin(1, {"step": 1})
    checkpointer.finish()
    checkpointer.begin(2, {"step": 2})
    after = Checkpointer(store, roles, 2, 1, NullObserver())  # type: ignore[arg-type]
    assert store.exists(f"{folder(2)}/actor/first")
    assert after.recover() == (1, {"step": 1})
    assert store.listdir(run_files.CHECKPOINTS) == [step_name(1)]
    after.load(1)
    assert roles.calls[-1] == f"load {folder(1)}"


def test_late_workers_of_a_former_holder_do_not_touch_the_files_of_its_successor(store: Store) -> None:
    former, roles = Files(), Files()
    held = [store.guarded(lambda: None, number) for number in (1, 2)]
    before = Checkpointer(held[0], former, 2, 1, NullObserver())  # type: ignore[arg-type]
    before.begin(1, {"step": 1})
    after = Checkpointer(held[1], roles, 2, 1, NullObserver())  # type: ignore[arg-type]
    assert after.recover() is None
    after.begin(1, {"step": 1})
    after.finish(b"rollouts")
    # As torch writes its shards: past the store, to the names that it was given at the beginning.
    late = store.local_path(former.folder) or Path()
    (late / "actor").mkdir(parents=True, exist_ok=True)
    for name in ("first", "second"):
        (late / "actor" / name).write_bytes(b"late")
    assert store.verify(folder(1)) == [] and after.rollouts(1) == b"rollouts"
    third = Checkpointer(store.guarded(lambda: None, 3), roles, 2, 1, NullObserver())  # type: ignore[arg-type]
    assert third.recover() == (1, {"step": 1})
    third.load(1)
    assert roles.calls[-1] == f"load {folder(1)}/lease_000002"


def test_a_checkpoint_without_the_number_of_a_lease_is_resumed(
    checkpointer: Checkpointer, store: Store, roles: Files
) -> None:
    checkpointer.begin(1, {"step": 1})
    checkpointer.finish(b"rollouts")
    now = Checkpointer(store.guarded(lambda: None, 1), roles, 2, 1, NullObserver())  # type: ignore[arg-type]
    assert now.recover() == (1, {"step": 1}) and now.rollouts(1) == b"rollouts"
    now.load(1)
    assert roles.calls[-1] == f"load {folder(1)}"


def test_a_damaged_checkpoint_gives_way_to_the_one_before(checkpointer: Checkpointer, store: Store) -> None:
    for step in (1, 2):
        checkpointer.begin(step, {"step": step})
        checkpointer.finish()
    store.write_bytes(f"{folder(2)}/actor/second", b"other")
    told: list[str] = []
    after = Checkpointer(store, checkpointer.roles, 2, 1, Noted([], told))
    assert after.recover() == (1, {"step": 1})
    assert store.listdir(run_files.CHECKPOINTS) == [step_name(1)]
    assert told == [f"{store.url}/{folder(2)} is damaged and is skipped: actor/second: wrong checksum"]


def test_without_a_commit_everything_is_removed(checkpointer: Checkpointer, store: Store) -> None:
    checkpointer.begin(1, {})
    assert checkpointer.recover() is None
    assert store.listdir(run_files.CHECKPOINTS) == []
    checkpointer.finish()
    assert store.committed_steps(run_files.CHECKPOINTS) == []


@pytest.mark.parametrize(
    ("error", "steps"),
    [(InputError("a", "b", "c", "d"), [1]), (TrainingError("not finite"), [1]), (TransientError("lost"), [])],
    ids=["input", "training", "transient"],
)
def test_a_step_is_kept_at_an_error_unless_it_will_be_made_again(
    checkpointer: Checkpointer, store: Store, error: Exception, steps: list[int]
) -> None:
    checkpointer.begin(1, {})
    with checkpointer.kept():
        pass
    assert store.committed_steps(run_files.CHECKPOINTS) == []
    with pytest.raises(type(error)) as raised, checkpointer.kept():
        raise error
    assert raised.value is error
    assert store.committed_steps(run_files.CHECKPOINTS) == steps


def batch() -> DataProto:
    """A row of a batch as `rollout_parquet` takes it."""
    names = ("stop_reason", "status", "detail", "score_status", "score_detail", "uid")
    row = {"extra_info": {"index": 0}, "data_source": "exact"}
    arrays: dict[str, Any] = {"seed": [1], "calls": [[]], "row": [row], **{name: ["x"] for name in names}}
    ones = torch.ones(1, 2, dtype=torch.long)
    lengths = {"prompt_length": torch.tensor([2]), "response_length": torch.tensor([2])}
    return DataProto.from_dict({"prompts": ones, "responses": ones, **lengths}, arrays)


@pytest.mark.parametrize("error", [WorkerError("it broke\n\ntraceback"), TransientError("it broke"), KeyError("no")])
def test_what_a_failed_step_trained_on_is_kept_until_it_is_committed(
    checkpointer: Checkpointer, store: Store, error: Exception
) -> None:
    metrics = {"reward/mean": 0.5}
    with checkpointer.replayable(2, batch(), metrics):
        pass
    assert failed_step(store, 0) is None
    with pytest.raises(type(error)) as raised, checkpointer.replayable(2, batch(), metrics):  # noqa: PT012
        metrics["actor/first_loss"] = 0.25
        raise error
    assert raised.value is error
    words = "KeyError" if isinstance(error, KeyError) else "it broke"
    assert read_failure(store, 2) == {"step": 2, "error": words, "metrics": metrics}
    assert failed_step(store, 1) == 2 and failed_step(store, 2) is None
    for step in (1, 2):
        assert len(store.listdir("failed")) == 2
        checkpointer.begin(step, {})
        checkpointer.finish()
    assert store.listdir("failed") == [] and read_failure(store, 2) is None


def test_storage_that_fails_hides_no_error(checkpointer: Checkpointer, tmp_path: Path) -> None:
    (tmp_path / "failed").write_text("no folder")
    with pytest.raises(TrainingError, match="not finite"), checkpointer.replayable(1, batch(), {}):
        raise TrainingError("not finite")


def test_what_is_written_is_rescued_without_asking_the_roles(
    checkpointer: Checkpointer, roles: Files, store: Store, committed: list[int]
) -> None:
    checkpointer.rescue(0, 0.0)
    checkpointer.begin(1, {"kl_coef": 0.5})
    start = time.monotonic()
    checkpointer.rescue(1, 0.3)  # half written
    assert committed == [] and 0.3 <= time.monotonic() - start < 20
    threading.Timer(0.2, store.write_bytes, (f"{folder(1)}/actor/second", b"whole")).start()
    checkpointer.rescue(0, 120.0)  # the record of step 1 is not written
    assert committed == []
    checkpointer.rescue(1, 20.0)
    assert committed == store.committed_steps(run_files.CHECKPOINTS) == [1] and roles.calls == [f"save {folder(1)}"]
    checkpointer.rescue(1, 0.0)
    checkpointer.finish()
    assert committed == [1]


def test_a_rescue_that_fails_is_only_told(
    checkpointer: Checkpointer, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer.begin(1, {})
    store.write_bytes(f"{folder(1)}/actor/second", b"whole")

    def fails(*_: object) -> None:
        raise TransientError("storage is gone")

    monkeypatch.setattr(store, "commit_folder", fails)
    checkpointer.rescue(1, 0.0)
    assert caplog.messages == ["step 1 was not committed: storage is gone"]
