"""The environment that all tests run in, set before torch or Ray is imported, and the parts that many of them share."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from flows.home import prepare_environment

if TYPE_CHECKING:
    from support_training import Trained

    from rl_core.training.mesh import RankMesh

os.environ["OMP_NUM_THREADS"] = "1"
# Short: sockets of Ray lie below it, and their paths may not be long.
HOME = Path(tempfile.mkdtemp(prefix="rft"))
prepare_environment(HOME)
# Where a shell has started the tests in its background, they and what they start would not hear Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
HERE = str(Path(__file__).parent)
sys.path.append(HERE)  # for support.py
# In processes that the tests start as well: Ray's workers import scorers.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), HERE]))
# How long an example takes is a property of the machine and of what else it does.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

ALONE = re.compile(r"^tests/(faults/|flows/test_(operations|retrain|variants)\.py)")
TOGETHER = re.compile(r"^tests/rollout/")
# What takes longest, in this order; each of the others takes under two minutes.
LONGEST = [
    re.compile(f"^tests/{path}")
    for path in (
        "flows/(?!cli/|test_(operations|retrain|variants))", "learning/", "flows/test_operations",
        "flows/test_variants", "cluster/", "faults/test_matrix", "trainer/", "faults/test_trackers",
        "faults/test_secrets", "training/", "faults/test_hangs", "rewards/", "tasks/", "evaluation/", "runtime/",
        "data/", "flows/", "examples/", "faults/", "rollout/",
    )
]  # fmt: skip
# The tests of `make quick`, which need no Ray, no vLLM and no servers.
QUICK = re.compile(
    r"^tests/((algorithms|config|data(?!/test_memory)|models|reports|storage)/\w+|test_(console|contributing|house)"
    r"|evaluation/test_(evaluate|gate|statistics)|rewards/test_(reward_model|scorers)"
    r"|trainer/test_(checkpoints|metric_names|metrics|sampler|start|step_parts|warm_start)"
    r"|training/test_(checkpoint|engine|lora|losses|optimizer|packing|shards)"
    r"|rollout/(test_tools|agent/test_(agent_loop|chat|parsers)|weights/test_(canary|transfer))"
    r"|cluster/test_(dispatch|stall|training_workers)|tasks/runs/test_signals)\.py"
)
SERVED = {"s3_endpoint", "trained"}  # fixtures behind which there are servers or workers
HEAVY = {"mlflow", "moto", "prefect", "vllm"}


def is_quick(item: pytest.Item) -> bool:
    """Whether the test is one of `make quick`; a store may be on S3 by a parameter."""
    served = not SERVED.isdisjoint(getattr(item, "fixturenames", ()))
    store = getattr(item, "callspec", None) and item.callspec.params.get("store")  # type: ignore[attr-defined]
    return bool(QUICK.match(item.nodeid)) and not served and store != "s3"


def only_quick(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m quick` other files are not even imported."""
    path = collection_path.relative_to(config.rootpath).as_posix()
    return True if only_quick(config) and path.endswith(".py") and not QUICK.match(path) else None


def place_in_queue(nodeid: str) -> int:
    return next((place for place, path in enumerate(LONGEST) if path.search(nodeid)), len(LONGEST))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first and the short ones last, so that all processes end together."""
    items.sort(key=lambda item: place_in_queue(item.nodeid))
    for item in filter(is_quick, items):
        item.add_marker("quick")


@pytest.fixture(scope="session", autouse=True)
def stays_quick(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fails the last test of `make quick` when one has loaded an engine or a server, or started Ray."""
    yield
    if only_quick(pytestconfig):
        assert sorted(HEAVY & sys.modules.keys()) == []
        assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes (`-n`) the tests of a folder stay in one of them, as they share runs and workers; but
    for files that take long and share nothing."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if ALONE.search(file):
                return file
            return "tests/rollout" if TOGETHER.search(file) else file.rpartition("/")[0]

    config.option.loadscopereorder = False  # folders with few tests may take long
    return ByFolder(config, log)


def pytest_unconfigure() -> None:
    shutil.rmtree(HOME, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Another process that lives."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="session")
def process_group() -> Iterator[None]:
    """A process group of this process alone, found by vLLM through the environment."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**rank, "MASTER_PORT": str(store.port)}.items():
            patch.setenv(name, value)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        if dist.is_initialized():  # vLLM ends it with its engine
            dist.destroy_process_group()


@pytest.fixture(scope="session")
def rank_mesh(process_group: None) -> "RankMesh":
    """The mesh of a single rank."""
    import torch

    from rl_core.training.mesh import make_rank_mesh

    return make_rank_mesh(torch.device("cpu"), 1, 1, 1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3 with two heads whose log-probs are far from uniform; at most 64 tokens."""
    from support import save_sharp_model

    folder = tmp_path_factory.mktemp("model")
    save_sharp_model(folder)
    return folder


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Address of an S3 server; `empty_bucket` leads a test there."""
    from support_servers import s3_server

    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with all its tables: making them takes seconds, copying the file does not."""
    from tasks.tracking.tracker import configure_mlflow, mlflow_client

    configure_mlflow()
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    mlflow_client(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def sqlite_uri(migrated_database: Path, tmp_path: Path) -> str:
    shutil.copy(migrated_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> "Trained":
    """Small real runs that together switch everything on."""
    from support_training import train_small_runs

    return train_small_runs(tmp_path_factory.mktemp("trained"), HOME)
