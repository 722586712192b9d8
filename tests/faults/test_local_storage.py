"""A disk that is full or read-only, and folders that are damaged: told, never used, and made again."""

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import policy_engine, save

from rl_core.config.compose import compose
from rl_core.config.schema import OptimConfig
from rl_core.console import Console
from rl_core.errors import InputError, TransientError
from rl_core.storage import run_files
from rl_core.storage.run_files import step_name
from rl_core.storage.store import Store
from rl_core.training.mesh import RankMesh
from rl_core.training.sharded_checkpoint import load_engine
from tasks.runs.open_run import open_run
from tasks.runs.report_page import run_page, run_summary
from tasks.session.session import Session, open_session

ROOM = "free space there and run the same command again"


def checkpoint(store: Store, step: int, size: int = 1000) -> str:
    folder = run_files.checkpoint(step)
    files = [store.add_bytes(bytes([step]) * size, folder, name) for name in ("actor/a", "actor/b")]
    store.commit_folder(folder, {}, files)
    return folder


def test_a_full_disk_says_so_and_the_checkpoint_before_stays(small_disk: Path) -> None:
    store = Store(str(small_disk / "run"))
    checkpoint(store, 1)
    with pytest.raises(InputError, match=ROOM) as caught:
        checkpoint(store, 2, size=5 << 20)
    assert str(small_disk) in caught.value.where and "No space left" in caught.value.seen
    assert not list(small_disk.rglob("*.tmp"))
    found = store.latest_valid_step(run_files.CHECKPOINTS)
    assert found and found[0] == 1 and store.listdir(run_files.CHECKPOINTS) == [step_name(1)]
    checkpoint(store, 2)
    assert store.verify(run_files.checkpoint(2)) == []


def test_a_lease_that_does_not_fit_leaves_no_torn_one(small_disk: Path) -> None:
    store = Store(str(small_disk / "run"))
    store.write_bytes("a", b"")
    with pytest.raises(InputError, match=ROOM):
        store.create_bytes("b", bytes(9 << 20))
    assert store.listdir() == ["a"]


def test_shards_that_do_not_fit_are_told_as_such(small_disk: Path, tiny_model: Path, rank_mesh: RankMesh) -> None:
    engine, store = policy_engine(tiny_model, rank_mesh, OptimConfig()), Store(str(small_disk / "run"))
    save(engine, store, f"{run_files.checkpoint(1)}/actor")
    store.commit_folder(run_files.checkpoint(1), {})
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):  # noqa: PT012
        while True:
            file.write(bytes(4096))
    with pytest.raises(InputError, match=ROOM):
        save(engine, store, f"{run_files.checkpoint(2)}/actor")
    filler.unlink()
    found = store.latest_valid_step(run_files.CHECKPOINTS)
    assert found and found[0] == 1
    load_engine(engine, store, f"{run_files.checkpoint(1)}/actor")
    save(engine, store, f"{run_files.checkpoint(2)}/actor")


def test_a_file_that_may_not_grow_is_told_as_a_full_disk(tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys\n"
        "from rl_core.errors import InputError\n"
        "from rl_core.storage.store import Store\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    Store(sys.argv[1]).write_bytes('a', bytes(200_000))\n"
        "except InputError as error:\n"
        "    sys.exit(error.fix)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ROOM in done.stderr and not list(tmp_path.iterdir())


def test_a_read_only_disk_is_read_and_not_written(small_disk: Path) -> None:
    store = Store(str(small_disk / "run"))
    folder = checkpoint(store, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for call in (lambda: checkpoint(store, 2), lambda: store.remove(folder), lambda: store.create_bytes("l", b"")):
        with pytest.raises(InputError, match="give this user read and write access"):
            call()
    found = store.latest_valid_step(run_files.CHECKPOINTS)
    assert found and found[0] == 1 and store.verify(folder) == []


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda file: file.write_bytes(file.read_bytes()[:9]), "actor/b: wrong size, 9 bytes instead of 1000"),
    "flipped": (lambda file: file.write_bytes(b"x" + file.read_bytes()[1:]), "actor/b: wrong checksum"),
    "missing": (lambda file: file.unlink(), "actor/b: missing"),
    "manifest alone": (lambda file: empty(file.parent), "actor/a: missing; actor/b: missing"),
}


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with open_session(open_run(compose("demo", []), tmp_path, "hurt")) as session:
        session.console = session.telemetry.console = Console(io.StringIO())
        yield session


def said(session: Session) -> str:
    """What a person has read."""
    stream = session.console._stream
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


def test_the_report_says_what_happened(session: Session) -> None:
    session.telemetry.warn("step 2 is damaged <actor/b>")
    page = run_page(session.store, {})
    assert "<h2>Warnings</h2>" in page
    assert "damaged &lt;actor/b&gt;" in page
    assert "step 2 is damaged <actor/b>" in run_summary(session.store, {})


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("folder", ["data", "warm_start", "export/step_000004"])
def test_a_damaged_folder_is_told_and_made_again(session: Session, folder: str, damage: str) -> None:
    assert session.assets.verify_or_remove(folder) is None
    files = [session.store.add_bytes(name.encode() * 1000, folder, f"actor/{name}") for name in "ab"]
    manifest = session.store.commit_folder(folder, {}, files)
    assert session.assets.verify_or_remove(folder) == manifest and said(session) == ""
    session.workers.drop()  # before a retry
    local = session.store.local_path(folder)
    assert local
    DAMAGES[damage][0](local / "actor/b")
    assert session.assets.verify_or_remove(folder) is None and not local.exists()
    assert f"{local} is damaged and will be rebuilt: {DAMAGES[damage][1]}" in said(session)


def test_a_copy_of_a_remote_folder_is_made_right(session: Session) -> None:
    session.store = session.assets.store = Store("memory://copies/hurt")
    session.store.commit_folder("warm_start", {}, [session.store.add_bytes(b"weights", "warm_start", "model")])
    folder = session.assets.download("warm_start")
    (folder / "model").write_bytes(b"weird")  # a download that was killed, or an earlier folder of that name
    session.workers.drop()
    assert (session.assets.download("warm_start") / "model").read_bytes() == b"weights"
    session.store.write_bytes("warm_start/model", b"other")
    (folder / "model").unlink()
    session.workers.drop()
    with pytest.raises(TransientError, match="warm_start/model differs from its manifest"):
        session.assets.download("warm_start")
    assert not (folder / "model").exists()
