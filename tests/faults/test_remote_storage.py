"""A store behind a disturbed network ends in bounded time, and a run never loses or mixes up what it committed."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support_proxy import Proxy

from rl_core.errors import InputError, RollforwardError, TransientError
from rl_core.storage import run_files
from rl_core.storage.files import TIMEOUT_S
from rl_core.storage.lease import Lease
from rl_core.storage.manifest import Json
from rl_core.storage.store import Store

DEADLINE_S, SLACK_S = 1.5, 40.0
SHARD = bytes(range(256)) * 40


def write(store: Store, step: int) -> list[Json]:
    """The files of a checkpoint, not yet committed."""
    folder = run_files.checkpoint(step)
    return [store.add_bytes(SHARD + bytes([step]), folder, "actor/shard"), store.add_bytes(b"table", folder, "actor/t")]


def commit(store: Store, step: int) -> None:
    store.commit_folder(run_files.checkpoint(step), {"step": step}, write(store, step))


def timed(call: Callable[[], object]) -> tuple[Exception | None, float]:
    start = time.monotonic()
    try:
        call()
    except RollforwardError as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


@pytest.mark.parametrize("kind", ["500", "503", "hang", "reset"])
def test_lasting_faults_end_in_time_and_leave_the_good_checkpoint(
    proxy: Proxy, store: Store, direct: Store, kind: str, tmp_path: Path
) -> None:
    commit(store, 1)
    files = write(store, 2)
    proxy.disturb(kind)  # type: ignore[arg-type]
    store.timeout_s = DEADLINE_S
    calls: list[Callable[[], object]] = [
        lambda: store.read_bytes(f"{run_files.checkpoint(1)}/actor/shard"),
        lambda: store.write_bytes("f", SHARD),
        lambda: store.create_bytes("g", SHARD),
        lambda: store.listdir(run_files.CHECKPOINTS),
        lambda: store.exists("f"),
        lambda: store.remove(run_files.checkpoint(1)),
        lambda: store.download(run_files.checkpoint(1), tmp_path),
        lambda: store.latest_valid_step(run_files.CHECKPOINTS),
        lambda: store.prune(run_files.CHECKPOINTS, 1, 2),
        lambda: store.commit_folder(run_files.checkpoint(2), {}, files),
    ]
    if kind == "reset":  # an answer without a body is whole: only what is read is cut
        calls = [calls[0], calls[3], calls[6], calls[7], calls[8]]
    with ThreadPoolExecutor(len(calls)) as pool:
        ended = list(pool.map(timed, calls))
    for error, seconds in ended:
        assert isinstance(error, TransientError), error
        assert seconds < store.timeout_s + SLACK_S
    if kind == "hang":
        assert "no answer within" in str(ended[0][0])
    assert not list(tmp_path.iterdir()), "half a file was left"
    proxy.calm()
    store.timeout_s = TIMEOUT_S
    assert direct.verify(run_files.checkpoint(1)) == []
    assert direct.committed_steps(run_files.CHECKPOINTS) == [1]
    commit(store, 2)
    found = store.latest_valid_step(run_files.CHECKPOINTS)
    assert found and found[0] == 2


@pytest.mark.parametrize("kind", ["500", "503", "reset"])
def test_short_faults_are_not_even_noticed(proxy: Proxy, store: Store, kind: str) -> None:
    commit(store, 1)
    read, written = proxy.disturb(kind, 1, "GET", "shard"), proxy.disturb(kind, 1, "PUT", "shard")  # type: ignore[arg-type]
    assert store.read_bytes(f"{run_files.checkpoint(1)}/actor/shard") == SHARD + b"\1"
    commit(store, 2)
    assert read.seen == written.seen == 1 and store.verify(run_files.checkpoint(2)) == []


def test_half_an_upload_is_never_committed(proxy: Proxy, store: Store, direct: Store) -> None:
    commit(store, 1)
    proxy.disturb("half upload", method="PUT", path="shard")
    store.timeout_s = DEADLINE_S
    with pytest.raises(TransientError, match="shard"):
        commit(store, 2)
    assert direct.committed_steps(run_files.CHECKPOINTS) == [1]
    proxy.calm()
    store.timeout_s = TIMEOUT_S
    commit(store, 2)
    assert direct.committed_steps(run_files.CHECKPOINTS) == [1, 2] and direct.verify(run_files.checkpoint(2)) == []


def test_a_file_that_the_server_cut_is_noticed_before_the_commit(store: Store, direct: Store) -> None:
    files = write(store, 1)
    direct.write_bytes(f"{run_files.checkpoint(1)}/actor/shard", SHARD[:100])
    with pytest.raises(TransientError, match=r"step_000001/actor/shard has 100 bytes instead of"):
        store.commit_folder(run_files.checkpoint(1), {}, files)
    assert direct.committed_steps(run_files.CHECKPOINTS) == []


def test_a_shard_that_another_process_wrote_over_is_damage_and_not_taken_for_the_own(
    store: Store, direct: Store
) -> None:
    commit(store, 1)
    files = write(store, 2)
    direct.write_bytes(f"{run_files.checkpoint(2)}/actor/shard", SHARD + b"\7")  # a late process of an old attempt
    store.commit_folder(run_files.checkpoint(2), {}, files)
    told: list[str] = []
    found = store.latest_valid_step(run_files.CHECKPOINTS, told.append)
    assert found and found[0] == 1 and "step_000002 is damaged and is skipped: actor/shard: wrong checksum" in told[0]


def test_slow_reads_go_on_until_the_deadline(proxy: Proxy, store: Store) -> None:
    commit(store, 1)
    file = f"{run_files.checkpoint(1)}/actor/shard"
    proxy.disturb("slow", 1, "GET", "shard", seconds=0.5)
    assert store.read_bytes(file) == SHARD + b"\1"
    store.timeout_s = DEADLINE_S
    proxy.disturb("slow", method="GET", path="shard", seconds=30)  # each piece in time, all of them not
    error, seconds = timed(lambda: store.read_bytes(file))
    assert isinstance(error, TransientError) and seconds < store.timeout_s + SLACK_S


def test_stale_listings_hide_no_file_from_a_commit_and_make_no_good_checkpoint_damaged(
    proxy: Proxy, store: Store, tmp_path: Path
) -> None:
    folder = run_files.checkpoint(1)
    assert store._files(folder) == {} and store.listdir(run_files.CHECKPOINTS) == []
    proxy.disturb("stale")
    commit(store, 1)
    assert store._files(folder) == {}, "the listing is not stale"
    manifest = store.read_manifest(folder)
    assert manifest and [file["path"] for file in manifest["files"]] == ["actor/shard", "actor/t"]
    assert store.verify(folder) == []
    store.download(f"{folder}/actor", tmp_path)
    assert (tmp_path / "shard").read_bytes() == SHARD + b"\1"


def test_stale_listings_make_no_good_checkpoint_go(proxy: Proxy, store: Store, direct: Store) -> None:
    for step in (1, 2):
        commit(store, step)
    assert store.committed_steps(run_files.CHECKPOINTS) == [1, 2]
    proxy.disturb("stale")
    commit(direct, 4)
    direct.remove(run_files.checkpoint(1))
    told: list[str] = []
    found = store.latest_valid_step(run_files.CHECKPOINTS, told.append)  # step 4 is not shown, step 1 still is
    assert found and found[0] == 2 and told == []
    commit(store, 3)
    store.prune(run_files.CHECKPOINTS, keep=1, newest=3)
    proxy.calm()
    assert direct.committed_steps(run_files.CHECKPOINTS) == [3, 4]
    store.prune(run_files.CHECKPOINTS, keep=1, newest=3)
    assert direct.committed_steps(run_files.CHECKPOINTS) == [3, 4], (
        "the newest commit was removed for one of an earlier attempt"
    )
    assert [direct.verify(run_files.checkpoint(step)) for step in (3, 4)] == [[], []]


def test_an_empty_stale_listing_removes_nothing(proxy: Proxy, store: Store, direct: Store) -> None:
    assert store.listdir(run_files.CHECKPOINTS) == []
    proxy.disturb("stale", times=1)
    commit(direct, 1)
    assert store.latest_valid_step(run_files.CHECKPOINTS) is None  # later listings show it
    assert direct.committed_steps(run_files.CHECKPOINTS) == [1]


def test_what_a_stale_listing_hid_does_not_mix_with_what_is_written_again(
    proxy: Proxy, store: Store, direct: Store
) -> None:
    assert store._files(run_files.checkpoint(1)) == {}
    commit(direct, 1)
    proxy.disturb("stale")
    store.remove(run_files.checkpoint(1))  # what each begin of a checkpoint does first
    assert direct.committed_steps(run_files.CHECKPOINTS) == [], (
        "readers would take new shards for those of the old manifest"
    )


def test_failing_listings_remove_nothing(proxy: Proxy, store: Store, direct: Store) -> None:
    for step in (1, 2):
        commit(store, step)
    proxy.disturb("503", path="list-type=2")
    store.timeout_s = DEADLINE_S
    with pytest.raises(TransientError):
        store.latest_valid_step(run_files.CHECKPOINTS)
    with pytest.raises(TransientError):
        store.prune(run_files.CHECKPOINTS, 1, 2)
    assert direct.committed_steps(run_files.CHECKPOINTS) == [1, 2]


def test_damage_is_named_when_it_is_read(store: Store, direct: Store, tmp_path: Path) -> None:
    commit(store, 1)
    folder = run_files.checkpoint(1)
    direct.write_bytes(f"{folder}/actor/shard", bytes(len(SHARD) + 1))
    with pytest.raises(TransientError, match="one/checkpoints/step_000001/actor/shard differs from its manifest"):
        store.download(f"{folder}/actor", tmp_path)
    direct.remove(f"{folder}/actor/shard")
    with pytest.raises(TransientError, match=r"actor/shard is missing"):
        store.download(f"{folder}/actor", tmp_path)
    assert not (tmp_path / "shard").exists()


def test_a_download_completes_what_is_there_and_mends_it(store: Store, tmp_path: Path) -> None:
    commit(store, 1)
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor/shard").write_bytes(SHARD[:7])
    store.download(run_files.checkpoint(1), tmp_path)
    assert (tmp_path / "actor/shard").read_bytes() == SHARD + b"\1" and (tmp_path / "actor/t").read_bytes() == b"table"


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "actor/../../outside"])
def test_names_in_a_manifest_lead_nowhere_else(direct: Store, tmp_path: Path, name: str) -> None:
    folder, inside = run_files.checkpoint(1), tmp_path / "a/b/c"
    direct.write_bytes("outside", b"x")
    entry = {"path": name, "size": 1, "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"}
    with pytest.raises(InputError, match="inside the store"):
        direct.commit_folder(folder, {}, [entry])
    from rl_core.storage.manifest import digest

    manifest = {"version": 1, "files": [entry], "meta": {}, "sha256": digest([entry], {})}
    direct.write_json(f"{folder}/manifest.json", manifest)
    with pytest.raises(InputError, match="inside the store"):
        direct.download(folder, inside)
    assert not list(tmp_path.rglob("outside"))


def test_a_lease_outlives_an_outage(proxy: Proxy, direct: Store) -> None:
    store = Store("s3://runs/team/one")
    lease = Lease(store, "one", renew_s=0.2, expire_s=1.0, machine="one machine")
    store.timeout_s = 0.5
    proxy.disturb("503")
    time.sleep(2.5)
    assert not lease.lost
    with pytest.raises(TransientError):  # a retry may cure it
        lease.check()
    proxy.calm()
    store.timeout_s = TIMEOUT_S
    lease.check()
    with pytest.raises(InputError, match="held by|working on"):
        Lease(direct, "one", renew_s=0.2, expire_s=30.0, machine="another machine")
    lease.end()
