"""What is committed when, with roles that only write a file where real ones write shards."""

from pathlib import Path

import pytest

from rl_core.commit import CHECKPOINTS, Commits
from rl_core.errors import InputError, TrainingError, TransientError
from rl_core.storage import Store, step_name


class Files:
    """Roles whose background save is over when it is waited for, or fails then."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failure: Exception | None = None

    def save_checkpoint(self, store: Store, folder: str) -> None:
        self.calls.append(f"save {folder}")
        self.store, self.folder = store, folder
        store.write_bytes(f"{folder}/actor/first", b"half")

    def finish_checkpoint(self) -> None:
        self.calls.append("finish")
        if self.failure:
            raise self.failure
        self.store.write_bytes(f"{self.folder}/actor/second", b"whole")

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
def commits(store: Store, roles: Files, committed: list[int]) -> Commits:
    return Commits(store, roles, 2, committed.append)  # type: ignore[arg-type]


def folder(step: int) -> str:
    return f"{CHECKPOINTS}/{step_name(step)}"


def test_a_step_is_committed_when_all_shards_are_written(
    commits: Commits, roles: Files, store: Store, committed: list[int]
) -> None:
    commits.begin(1, {"step": 1, "kl_coef": 0.5})
    assert store.committed_steps(CHECKPOINTS) == committed == []
    commits.finish()
    assert store.committed_steps(CHECKPOINTS) == committed == [1]
    manifest = store.read_manifest(folder(1))
    assert manifest and manifest["meta"] == {"step": 1, "kl_coef": 0.5}
    assert [file["path"] for file in manifest["files"]] == ["actor/first", "actor/second"]
    commits.finish()
    assert roles.calls == [f"save {folder(1)}", "finish"] and committed == [1]


def test_the_newest_are_kept(commits: Commits, store: Store) -> None:
    for step in (1, 2, 3):
        commits.begin(step, {})
        assert store.committed_steps(CHECKPOINTS) == [s for s in (1, 2, 3) if step - 3 < s < step]
        commits.finish()
    assert store.listdir(CHECKPOINTS) == [step_name(2), step_name(3)]


def test_a_failed_save_is_raised_and_commits_nothing(
    commits: Commits, roles: Files, store: Store, committed: list[int]
) -> None:
    roles.failure = TransientError("the storage is gone")
    commits.begin(1, {})
    with pytest.raises(TransientError, match="the storage is gone"):
        commits.finish()
    assert store.committed_steps(CHECKPOINTS) == committed == []


def test_what_a_crash_left_half_written_is_swept_away(commits: Commits, roles: Files, store: Store) -> None:
    commits.begin(1, {"step": 1})
    commits.finish()
    commits.begin(2, {"step": 2})
    after = Commits(store, roles, 2, lambda step: None)  # type: ignore[arg-type]
    assert store.exists(f"{folder(2)}/actor/first")
    assert after.recover() == (1, {"step": 1})
    assert store.listdir(CHECKPOINTS) == [step_name(1)]
    after.load(1)
    assert roles.calls[-1] == f"load {folder(1)}"


def test_a_damaged_checkpoint_gives_way_to_the_one_before(commits: Commits, store: Store) -> None:
    for step in (1, 2):
        commits.begin(step, {"step": step})
        commits.finish()
    store.write_bytes(f"{folder(2)}/actor/second", b"other")
    assert commits.recover() == (1, {"step": 1})
    assert store.listdir(CHECKPOINTS) == [step_name(1)]


def test_without_a_commit_everything_is_removed(commits: Commits, store: Store) -> None:
    commits.begin(1, {})
    assert commits.recover() is None
    assert store.listdir(CHECKPOINTS) == []
    commits.finish()
    assert store.committed_steps(CHECKPOINTS) == []


@pytest.mark.parametrize(
    ("error", "steps"),
    [(InputError("a", "b", "c", "d"), [1]), (TrainingError("not finite"), [1]), (TransientError("lost"), [])],
    ids=["input", "training", "transient"],
)
def test_a_step_is_kept_at_an_error_unless_it_will_be_made_again(
    commits: Commits, store: Store, error: Exception, steps: list[int]
) -> None:
    commits.begin(1, {})
    with commits.kept():
        pass
    assert store.committed_steps(CHECKPOINTS) == []
    with pytest.raises(type(error)) as raised, commits.kept():
        raise error
    assert raised.value is error
    assert store.committed_steps(CHECKPOINTS) == steps
