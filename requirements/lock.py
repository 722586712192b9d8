"""Writes the locks that install.py installs from: every package of a set, its version and the hashes of its files.

    python requirements/lock.py [--upgrade]

Versions of the present locks stay where the requirements of pyproject.toml and constraints.txt allow it, unless
--upgrade is given. Indexes are those of uv's own settings; UV_FIND_LINKS names a folder with the CPU build of torch
where PyTorch's index of CPU builds is out of reach. No address of an index is written.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
# The oldest supported Python and a common libc; all wheels of a release are listed, those of other Pythons too.
PLATFORM = ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_36", "--only-binary", ":all:"]
FORM = [
    *("--generate-hashes", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--quiet"),
    *("--constraint", "constraints.txt", "--custom-compile-command", "python requirements/lock.py"),
]
EXTRAS = [word for extra in ("s3", "servers", "dev") for word in ("--extra", extra)]
# Their default builds break transformers with a CPU build of torch, and nothing here uses them.
UNWANTED = ["torchvision", "torchaudio", "torchcodec"]


def compile_lock(name: str, environment: dict[str, str], *arguments: str) -> None:
    """Writes one lock; raises CalledProcessError if uv finds no solution."""
    command = ["uv", "pip", "compile", *PLATFORM, *FORM, "--output-file", f"requirements/{name}", *arguments]
    subprocess.run([*command, *sys.argv[1:]], cwd=ROOT, env=environment, check=True)


def take_torch_apart() -> None:
    """Moves torch from cpu.lock into a lock of its own, as not every index has its CPU build."""
    lock = HERE / "cpu.lock"
    header, *packages = re.split(r"(?m)^(?=\w)", lock.read_text())
    (torch,) = [text for text in packages if text.startswith("torch==")]
    packages.remove(torch)
    lock.write_text("".join([header, *packages]))
    (HERE / "cpu-torch.lock").write_text(header + torch)


def main() -> None:
    """Writes the locks of both sets."""
    environment = {key: value for key, value in os.environ.items() if key != "UV_FIND_LINKS"}
    compile_lock("gpu.lock", environment, "--extra", "gpu", *EXTRAS, "pyproject.toml")
    backend = [] if "UV_FIND_LINKS" in os.environ else ["--torch-backend", "cpu"]
    apart = [word for package in UNWANTED for word in ("--no-emit-package", package)]
    torch = "requirements/cpu-torch.in"
    compile_lock("cpu.lock", dict(os.environ), "--extra", "cpu", *EXTRAS, *apart, *backend, "pyproject.toml", torch)
    take_torch_apart()


if __name__ == "__main__":
    main()
