"""The same behaviour on a local folder and on an S3 server (a real one on this machine, spoken to over HTTP)."""

import json
import pickle
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support_servers import empty_bucket

from rl_core.errors import InputError, TransientError
from rl_core.storage import manifest as manifests
from rl_core.storage import run_files
from rl_core.storage.ledger import Ledger
from rl_core.storage.run_files import step_name
from rl_core.storage.store import Store


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty bucket; the credentials are in the environment."""
    empty_bucket(s3_endpoint, monkeypatch)
    return "s3://runs/team/one"


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(str(tmp_path / "root") if request.param == "local" else request.getfixturevalue("s3"))


def checkpoint(store: Store, step: int, rel: str = "checkpoints") -> str:
    """Write and commit a small step folder with a nested file; returns its path."""
    folder = f"{rel}/{step_name(step)}"
    store.write_bytes(f"{folder}/rank0.bin", bytes(range(200)))
    store.write_bytes(f"{folder}/optim/state.bin", b"moments")
    store.commit_folder(folder, {"step": step})
    return folder


def test_files_are_written_read_listed_and_removed(store: Store) -> None:
    assert store.listdir() == [] and not store.exists("a") and store.listdir("nowhere") == []
    store.write_bytes("a/b.bin", b"one")
    store.write_bytes("a/b.bin", b"two")
    store.write_json("a/c/d.json", {"k": [1, "é"]})
    store.write_bytes("ab/e", b"")
    assert store.read_bytes("a/b.bin") == b"two"
    assert store.read_json("a/c/d.json") == {"k": [1, "é"]}
    assert store.listdir("a") == ["b.bin", "c"] and store.listdir() == ["a", "ab"] and store.listdir("a/b.bin") == []
    assert store.exists("a/b.bin") and store.exists("a") and not store.exists("a/b")
    store.remove("a/b.bin")
    assert store.listdir("a") == ["c"]
    store.remove("a")
    store.remove("a")
    assert store.listdir() == ["ab"], "removing a folder must leave one whose name starts the same"
    with pytest.raises(FileNotFoundError):
        store.read_bytes("a/b.bin")


def test_child_and_pickle_lead_to_the_same_files(store: Store) -> None:
    child = pickle.loads(pickle.dumps(store.child("x/y")))
    child.write_bytes("f", b"1")
    assert store.read_bytes("x/y/f") == b"1"
    assert child.url == f"{store.url}/x/y"


def test_a_pickled_store_holds_no_credentials(s3: str) -> None:
    store = Store(s3)
    store.write_bytes("f", b"1")
    assert b"dummy" not in pickle.dumps(store)


def test_local_path_is_only_known_for_folders(store: Store) -> None:
    path = store.local_path("a/b")
    assert path is None if store.url.startswith("s3") else path == Path(store.url) / "a" / "b"


def test_json_that_is_damaged_is_an_input_error(store: Store) -> None:
    store.write_bytes("a.json", b"{")
    with pytest.raises(InputError, match="a.json"):
        store.read_json("a.json")


@pytest.mark.parametrize("rel", ["../x", "a/../../x", "/etc/x", "a//b", "./a", "s3://other/x", "a/*", "a/[b]"])
def test_names_never_leave_the_root(store: Store, rel: str) -> None:
    for call in (store.read_bytes, store.remove, store.child, store.exists, lambda r: store.write_bytes(r, b"")):
        with pytest.raises(InputError, match="inside the store"):
            call(rel)


def test_upload_twice_and_download_give_the_same_tree(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "top.txt").write_bytes(b"top")
    (source / "deep" / "er" / "x.bin").write_bytes(b"\0" * 1000)
    store.upload(source, "export/model")
    (source / "top.txt").write_bytes(b"new")
    store.upload(source, "export/model")
    assert store.listdir("export/model") == ["deep", "top.txt"], "a second upload must not nest a copy"
    store.download("export/model", tmp_path / "back")
    back = {
        str(p.relative_to(tmp_path / "back")): p.read_bytes() for p in (tmp_path / "back").rglob("*") if p.is_file()
    }
    assert back == {"top.txt": b"new", "deep/er/x.bin": b"\0" * 1000}
    with pytest.raises(FileNotFoundError):
        store.download("nowhere", tmp_path / "back")
    with pytest.raises(InputError, match="folder to upload"):
        store.upload(tmp_path / "missing", "export")


def test_a_write_that_fails_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write_bytes("f", b"old")
    with pytest.raises(TypeError):
        store.write_bytes("f", "text is not bytes")  # type: ignore[arg-type]
    assert store.read_bytes("f") == b"old" and store.listdir() == ["f"]


def test_commit_lists_every_file_and_reads_back(store: Store) -> None:
    folder = checkpoint(store, 3)
    manifest = store.read_manifest(folder)
    assert manifest is not None and manifest["version"] == 1 and manifest["meta"] == {"step": 3}
    assert [(f["path"], f["size"]) for f in manifest["files"]] == [("optim/state.bin", 7), ("rank0.bin", 200)]
    assert store.verify(folder) == []
    assert store.commit_folder(folder, {"step": 3}) == manifest, "committing again must not list the manifest"
    assert store.commit_folder(folder, {10: "a", 9: (1, 2)}) == store.read_manifest(folder)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda s, f: s.write_bytes(f"{f}/rank0.bin", bytes([1, *range(1, 200)])), "rank0.bin: wrong checksum"),
        (lambda s, f: s.write_bytes(f"{f}/rank0.bin", bytes(range(199))), "rank0.bin: wrong size"),
        (lambda s, f: s.remove(f"{f}/optim/state.bin"), "optim/state.bin: missing"),
        (lambda s, f: s.remove(f"{f}/manifest.json"), "manifest.json: missing"),
        (lambda s, f: s.write_bytes(f"{f}/manifest.json", b'{"version": 1'), "manifest.json: missing or damaged"),
        (
            lambda s, f: s.write_json(f"{f}/manifest.json", {**s.read_json(f"{f}/manifest.json"), "meta": {"step": 9}}),
            "manifest.json: missing or damaged",
        ),
        (
            lambda s, f: [s.remove(f"{f}/{name}") for name in ("rank0.bin", "optim")],
            "optim/state.bin: missing; rank0.bin: missing",
        ),
    ],
    ids=["flipped", "truncated", "missing", "no-manifest", "half-manifest", "edited-manifest", "only-manifest"],
)
def test_damage_is_named_and_an_older_checkpoint_is_used(
    store: Store, damage: Callable[[Store, str], object], problem: str
) -> None:
    checkpoint(store, 4)
    folder = checkpoint(store, 12)
    damage(store, folder)
    assert "; ".join(store.verify(folder)).startswith(problem)
    had_manifest = store.exists(f"{folder}/manifest.json")
    told: list[str] = []
    found = store.latest_valid_step("checkpoints", told.append)
    assert found is not None and found[0] == 4 and found[1]["meta"] == {"step": 4}
    assert store.listdir("checkpoints") == [step_name(4)]
    if had_manifest:
        (words,) = told
        assert words.startswith(f"{store._path(folder)} is damaged and is skipped: ") and problem in words


def signed(files: Any, meta: Any) -> bytes:
    return json.dumps({"version": 1, "files": files, "meta": meta, "sha256": manifests.digest(files, meta)}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000, b'{"files": ' * 100_000, b"null", b"[]",
        signed([{"path": "a", "sha256": "b"}], {}), signed([{"path": "a", "size": "1", "sha256": "b"}], {}),
        signed([{"path": 1, "size": 1, "sha256": "b"}], {}), signed(["a"], {}), signed({"a": 1}, {}), signed(5, {}),
        signed([], "x"),
    ],
    ids=["deep list", "deep dict", "null", "list", "no size", "text size", "no name", "text", "dict", "number", "meta"],
)  # fmt: skip
def test_a_hostile_manifest_is_a_damaged_one(tmp_path: Path, content: bytes) -> None:
    store = Store(str(tmp_path))
    folder = checkpoint(store, 12)
    store.write_bytes(f"{folder}/manifest.json", content)
    assert store.read_manifest(folder) is None
    assert store.verify(folder) == ["manifest.json: missing or damaged"]
    told: list[str] = []
    assert store.latest_valid_step("checkpoints", told.append) is None and len(told) == 1


def test_json_that_is_nested_too_deeply_is_an_input_error(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write_bytes("run.json", b"[" * 100_000)
    with pytest.raises(InputError, match="nested too deeply"):
        store.read_json("run.json")
    store.write_bytes("ledger/step_000001.json", b"[" * 100_000)
    with pytest.raises(InputError, match="nested too deeply"):
        Ledger(store).read(1)


def test_long_reads_are_progress(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[None] = []
    monkeypatch.setattr(manifests, "BLOCK", 4)
    monkeypatch.setattr(manifests, "progress", lambda: blocks.append(None))
    store.write_bytes("a/x", b"0123456789")
    store.commit_folder("a", {})
    for read in (lambda: store.verify("a"), lambda: store.download("a", tmp_path / "copy")):
        blocks.clear()
        read()
        assert len(blocks) >= 3


def test_steps_are_in_numeric_order_and_need_a_manifest(store: Store) -> None:
    assert store.committed_steps("checkpoints") == [] and store.latest_valid_step("checkpoints") is None
    for step in (1_000_000, 2, 999_999):
        checkpoint(store, step)
    store.write_bytes(f"{run_files.checkpoint(7)}/rank0.bin", b"cut short")
    store.write_bytes("checkpoints/notes/x", b"")
    assert store.committed_steps("checkpoints") == [2, 999_999, 1_000_000]
    assert store.child("checkpoints").committed_steps("") == [2, 999_999, 1_000_000]
    found = store.latest_valid_step("checkpoints")
    assert found is not None and found[0] == 1_000_000
    assert store.listdir("checkpoints") == ["notes", "step_000002", "step_1000000", "step_999999"]
    assert store.verify(run_files.checkpoint(2)) == []


def test_retention_keeps_the_newest(store: Store) -> None:
    for step in (1, 2, 3, 10):
        checkpoint(store, step)
    store.prune("checkpoints", keep=2, newest=10)
    assert store.listdir("checkpoints") == [step_name(3), step_name(10)]
    assert store.verify(run_files.checkpoint(3)) == []
    store.prune("checkpoints", keep=5, newest=10)
    assert store.committed_steps("checkpoints") == [3, 10]
    store.prune("checkpoints", keep=1, newest=3)
    assert store.committed_steps("checkpoints") == [3, 10], "what is newer than the step just committed stays"


def test_a_removal_that_is_cut_short_leaves_no_manifest(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(store, 1)
    checkpoint(store, 2)
    removed: list[str] = []

    def cut(path: str, topdown: bool) -> None:
        raise OSError("cut short")

    remove_file: Any = getattr(store.fs, "_rm_file", None)

    async def cut_after_one(path: str) -> None:
        removed.append(path)
        if len(removed) > 1:
            raise OSError("cut short")
        await remove_file(path)

    monkeypatch.setattr(*(("os.fwalk", cut) if store.is_local else (store.fs, "_rm_file", cut_after_one)))
    with pytest.raises(TransientError):
        store.prune("checkpoints", keep=1, newest=2)
    assert store.committed_steps("checkpoints") == [2]
    assert store.exists(f"{folder}/rank0.bin")


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    store, elsewhere = Store(str(tmp_path / "run")), Store(str(tmp_path / "elsewhere"))
    for step in (1, 2, 3):
        checkpoint(store, step)
    kept = checkpoint(elsewhere, 9)
    store.remove(run_files.checkpoint(1))
    (tmp_path / "run" / run_files.checkpoint(1)).symlink_to(tmp_path / "elsewhere" / kept)
    (tmp_path / "run" / run_files.checkpoint(2) / "inner").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / run_files.checkpoint(2) / "dangling").symlink_to(tmp_path / "nowhere")
    store.prune("checkpoints", keep=1, newest=3)
    assert store.listdir("checkpoints") == [step_name(3)] and elsewhere.verify(kept) == []
    (tmp_path / "run" / run_files.checkpoint(4)).symlink_to(tmp_path)  # not committed
    found = store.latest_valid_step("checkpoints")
    assert found and found[0] == 3
    assert store.listdir("checkpoints") == [step_name(3)] and elsewhere.verify(kept) == []


def test_a_second_client_sees_what_the_first_does(store: Store) -> None:
    other = Store(store.url)
    assert store.listdir("checkpoints") == [] and store.committed_steps("checkpoints") == []
    checkpoint(store, 1)
    assert store.listdir("checkpoints") == [step_name(1)]
    checkpoint(other, 2)
    assert store.committed_steps("checkpoints") == [1, 2]
    other.remove(run_files.checkpoint(1))
    assert store.committed_steps("checkpoints") == [2] and not store.exists(run_files.checkpoint(1))


def test_memory_urls_work() -> None:
    store = Store("memory://rollforward-test/a")
    checkpoint(store, 1)
    found = Store(store.url).latest_valid_step("checkpoints")
    assert found is not None and found[0] == 1
    store.remove("checkpoints")
    assert store.committed_steps("checkpoints") == []


def test_storage_failures_are_never_taken_for_missing_files(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(s3)
    checkpoint(store, 1)

    async def busy(path: str) -> None:
        raise OSError(16, "Please reduce your request rate")

    monkeypatch.setattr(store.fs, "_info", busy)
    with pytest.raises(TransientError, match="request rate"):
        store.latest_valid_step("checkpoints")


def test_a_probe_leaves_nothing(store: Store) -> None:
    store.check_writable()
    assert store.listdir() == []


def test_a_folder_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"file/root(.|\n)*storage.root"):
        Store(str(tmp_path / "file" / "root")).check_writable()


def test_a_missing_bucket_is_refused(s3: str) -> None:
    with pytest.raises(InputError, match="create the bucket"):
        Store("s3://no-such-bucket/x").check_writable()
    assert Store("s3://no-such-bucket/x").listdir() == []


def test_missing_credentials_are_refused(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(InputError, match="AWS_ACCESS_KEY_ID"):
        Store(s3).check_writable()


def test_a_dead_endpoint_is_transient_but_the_probe_says_what_to_check(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store = Store(s3)
    store.fs.retries = 1
    with pytest.raises(TransientError):
        store.exists("a")
    with pytest.raises(InputError, match="AWS_ENDPOINT_URL"):
        store.check_writable()


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(InputError, match=r"nosuch://"):
        Store("nosuch://bucket/x")


def test_relative_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Store("runs/").url == str(tmp_path / "runs")


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    folder = checkpoint(store, 1)
    with fsspec.open(f"{tmp_path}/{folder}/manifest.json", "rt") as file:
        assert set(json.load(file)) == {"version", "files", "meta", "sha256"}


def test_a_file_is_created_once(store: Store) -> None:
    assert store.create_bytes("a/b", b"one") and not store.create_bytes("a/b", b"two")
    assert store.read_bytes("a/b") == b"one"
    assert store.create_bytes("a/b", b"one"), "a client that lost the answer tries again"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: store.create_bytes("c", b"%d" % number), range(8)))
    assert made.count(True) == 1 and store.read_bytes("c") == b"%d" % made.index(True)
