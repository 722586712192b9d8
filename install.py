"""Installs Rollforward into the environment that runs this file, with the packages of requirements/*.lock.

    python install.py cpu|gpu

Every file is checked against the hashes of its lock, and nothing is built from source. The CPU build of torch, which
is not on every index, has a lock of its own; it lists the file for Python 3.11 only.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LOCKS = HERE / "requirements"
CHECKED = ["--no-deps", "--only-binary", ":all:", "--require-hashes"]


def run(*command: str) -> bool:
    """Runs a module of this environment; returns whether it succeeded."""
    return subprocess.run([sys.executable, "-m", *command], check=False).returncode == 0


def install_cpu_torch() -> bool:
    """Installs the CPU build of torch, from PyTorch's index of CPU builds if the default one has none."""
    if sys.version_info[:2] == (3, 11):
        source = [*CHECKED, "--requirement", str(LOCKS / "cpu-torch.lock")]
    else:
        print("install: no hash of torch's CPU build for this Python is known; it is installed by its version")
        source = ["--no-deps", "--requirement", str(LOCKS / "cpu-torch.in")]
    # uv, which is in the lock, knows the address of that index.
    return run("pip", "install", "--quiet", *source) or run("uv", "pip", "install", "--torch-backend", "cpu", *source)


def main(extra: str) -> int:
    """Installs the packages of a set, then the project itself; returns the exit code."""
    print("Installing (a few minutes, about 5 GB) …", flush=True)
    if not run("pip", "install", "--quiet", *CHECKED, "--requirement", str(LOCKS / f"{extra}.lock")):
        return 1
    if extra == "cpu" and not install_cpu_torch():
        print("install: failed to install the CPU build of torch; install requirements/cpu-torch.in, then rerun")
        return 1
    project = ["--no-deps", "--no-build-isolation", "--editable", str(HERE)]
    return 0 if run("pip", "install", "--quiet", *project) else 1


if __name__ == "__main__":
    if sys.argv[1:] not in (["cpu"], ["gpu"]):
        print("usage: python install.py cpu|gpu")
        raise SystemExit(2)
    raise SystemExit(main(sys.argv[1]))
