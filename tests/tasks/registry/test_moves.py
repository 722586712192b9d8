"""The alias champion moves forward and back, with a record, and never against the gate unless a person says so."""

import os
import subprocess
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support_registry import contents, registry_with

from rl_core.errors import InputError, TransientError
from rl_core.runtime.guardian import TOKEN
from tasks.registry.registry import Registry


def who(registry: Registry) -> dict[str, str]:
    return {alias: version for alias, version in registry.aliases().items() if alias != "candidate"}


def test_rollback_swaps_champion_and_previous_there_and_back(sqlite_uri: str, tmp_path: Path) -> None:
    registry = registry_with(sqlite_uri, tmp_path, {}, {})
    registry.promote("1")
    with pytest.raises(InputError, match="champion is version 1"):
        registry.rollback()
    registry.promote("2")
    assert registry.rollback() == ("2", "1") and who(registry) == {"champion": "1", "previous": "2"}
    left = datetime.fromisoformat(registry.get("2").tags["rolled_back"])
    assert abs((datetime.now(UTC) - left).total_seconds()) < 60 and "rolled_back" not in registry.get("1").tags
    assert registry.rollback() == ("1", "2") and who(registry) == {"champion": "2", "previous": "1"}


@pytest.mark.parametrize(
    "where", ["set_alias", "set_alias, after", "_make_champion", "_make_champion, after", "set_tags"]
)
def test_a_rollback_that_ended_halfway_is_completed_and_not_turned_back(
    sqlite_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    registry = registry_with(sqlite_uri, tmp_path, {}, {})
    registry.promote("1")
    registry.promote("2")
    name, _, after = where.partition(", ")
    done = getattr(Registry, name)

    def away(self: Registry, *asked: Any) -> None:
        if after:
            done(self, *asked)
        raise TransientError("MLflow is away")

    monkeypatch.setattr(Registry, name, away)
    with pytest.raises(TransientError):
        registry.rollback()
    monkeypatch.undo()
    for version in who(registry).values():  # the run of either is shown again
        if who(registry)["champion"] == version:
            registry.promote(version)
    assert registry.rollback() == ("2", "1") and who(registry) == {"champion": "1", "previous": "2"}
    assert "rolled_back" in registry.get("2").tags and len(registry.moves()) == 3
    assert registry.rollback() == ("1", "2") and len(registry.moves()) == 4


def test_every_move_is_recorded_once(sqlite_uri: str, tmp_path: Path) -> None:
    registry = registry_with(sqlite_uri, tmp_path, {}, {})
    for _ in range(2):
        registry.promote("1")
    registry.promote("2")
    registry.rollback()
    moves = [(move.version, move.before, move.why) for move in registry.moves()]
    assert moves == [("1", None, "promoted"), ("2", "1", "promoted"), ("1", "2", "rolled back")]
    assert all("@" in move.by for move in registry.moves())


def test_a_promotion_that_died_before_its_record_is_completed(sqlite_uri: str, tmp_path: Path) -> None:
    registry = registry_with(sqlite_uri, tmp_path, {}, {})
    registry.promote("1")
    registry.set_alias("previous", "1")  # where a process was killed
    registry.promote("2")
    assert who(registry) == {"champion": "2", "previous": "1"}
    registry.set_alias("champion", "1")  # killed between alias and record
    registry.promote("1")
    assert registry.moves()[-1].version == "1"


def test_of_two_promotions_at_once_one_wins_and_the_other_is_told(
    sqlite_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = registry_with(sqlite_uri, tmp_path, {}, {}, {})
    registry.promote("1")
    registry.set_alias("previous", "1")  # of two that make an alias at once, one is refused at once
    barrier, set_alias, aliases = threading.Barrier(2), Registry.set_alias, Registry.aliases
    reads = threading.local()

    def seen_by_both(self: Registry) -> dict[str, str]:
        found = aliases(self)
        reads.count = getattr(reads, "count", 0) + 1
        if reads.count <= 2:  # that of the version, and that of the champion of before
            barrier.wait(30)
        return found

    def together(self: Registry, alias: str, version: str) -> None:
        set_alias(self, alias, version)
        if alias == "champion":
            barrier.wait(30)

    monkeypatch.setattr(Registry, "set_alias", together)
    monkeypatch.setattr(Registry, "aliases", seen_by_both)
    ended: dict[str, Any] = {}

    def promote(version: str) -> None:
        try:
            ended[version] = Registry(sqlite_uri, "sorter").promote(version)
        except TransientError as error:
            ended[version] = error

    threads = [threading.Thread(target=promote, args=(version,)) for version in ("2", "3")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    monkeypatch.undo()
    winner = who(registry)["champion"]
    (loser,) = {"2", "3"} - {winner}
    assert ended[winner] == ("1", winner) and f"version {winner}" in str(ended[loser])
    assert registry.promote(loser) == (winner, loser) and who(registry) == {"champion": loser, "previous": winner}


def test_what_waits_is_promoted_by_approval_only(sqlite_uri: str, tmp_path: Path) -> None:
    registry = registry_with(sqlite_uri, tmp_path, {"gate": "waiting"}, {"gate": "passed"})
    with pytest.raises(InputError, match="promote 1 --approve"):
        registry.promote_manually("1")
    with pytest.raises(InputError, match="(?s)awaiting approval.*`gate` is passed"):
        registry.promote_manually("2", approve=True)
    assert registry.aliases() == {}
    assert registry.promote_manually("1", approve=True) == (None, "1")
    assert registry.promote_manually("1", approve=True) == ("1", "1")
    tags = registry.get("1").tags
    assert tags["gate"] == "approved" and "@" in tags["approved"] and registry.moves()[0].why == "approved"


def test_what_the_gate_refused_is_promoted_by_force_only(sqlite_uri: str, tmp_path: Path) -> None:
    registry = registry_with(sqlite_uri, tmp_path, {"gate": "refused"}, {"gate": "passed"})
    with pytest.raises(InputError, match="--force promotes it"):
        registry.promote_manually("1")
    assert registry.promote_manually("1", force=True) == (None, "1")
    tags = registry.get("1").tags
    assert tags["gate"] == "refused" and "@" in tags["forced"]
    assert registry.moves()[0].why == "forced against the gate"
    registry.promote_manually("2", force=True)
    assert "forced" not in registry.get("2").tags and registry.moves()[1].why == "promoted by hand"


def test_files_are_downloaded_once(sqlite_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_with(sqlite_uri, tmp_path, {}, {})
    folder = registry.local_folder("1", tmp_path / "cache")
    assert contents(folder) == contents(tmp_path / "export")
    assert registry.local_folder("2", tmp_path / "cache") != folder
    monkeypatch.setattr(Registry, "download", None)
    assert registry.local_folder("1", tmp_path / "cache") == folder


def test_what_a_killed_download_left_goes_with_the_next(
    sqlite_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = registry_with(sqlite_uri, tmp_path, {}, {})
    dead, alive = (tmp_path / f"cache/versions/rollforward-{token}-x/model" for token in ("0" * 32, "1" * 32))
    for folder in (dead, alive):
        folder.mkdir(parents=True)
    guardian = subprocess.Popen(["sleep", "60"], env={TOKEN: f"guardian of {'1' * 32}", "PATH": os.environ["PATH"]})
    try:
        registry.local_folder("1", tmp_path / "cache")
        assert not dead.exists() and alive.is_dir()
    finally:
        guardian.kill()
        guardian.wait()


def test_a_tag_leads_no_download_out_of_the_cache(sqlite_uri: str, tmp_path: Path) -> None:
    registry = registry_with(sqlite_uri, tmp_path, {})
    registry.set_tags("1", {"checkpoint": "../../../outside"})
    folder = registry.local_folder("1", tmp_path / "deep/cache")
    assert folder.resolve().parent == tmp_path / "deep/cache/versions"
