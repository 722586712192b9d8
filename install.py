"""Installs Rollforward with tested dependency versions into the environment that runs this file.

    python install.py cpu|gpu

Handles two problems of the CPU variant: the CPU build of torch is not on every default index, and vLLM depends on
torchvision, torchaudio and torchcodec, whose default builds break transformers with a CPU build of torch.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
UNWANTED = ["torchvision", "torchaudio", "torchcodec"]
CPU_TORCH = "torch==2.13.0+cpu"


def pip(*arguments: str) -> bool:
    """Runs pip in this environment; returns whether it succeeded."""
    return subprocess.run([sys.executable, "-m", "pip", *arguments], check=False).returncode == 0


def main(extra: str) -> int:
    """Installs the project with an extra and its test tools; returns the exit code."""
    if extra == "cpu" and not pip("install", "--quiet", CPU_TORCH):
        # uv knows the index of PyTorch's CPU builds.
        uv = ["-m", "uv", "pip", "install", "--torch-backend", "cpu", CPU_TORCH]
        if not pip("install", "--quiet", "uv") or subprocess.run([sys.executable, *uv], check=False).returncode:
            print(
                f"install: failed to install {CPU_TORCH}; "
                "install it from PyTorch's index of CPU builds, then rerun install.py"
            )
            return 1
    constraints = ["--constraint", str(HERE / "constraints.txt")] if extra == "cpu" else []
    print("Installing (a few minutes, about 5 GB) …", flush=True)
    if not pip("install", "--quiet", *constraints, "--editable", f"{HERE}[{extra},s3,dev]"):
        return 1
    if extra == "cpu":
        pip("uninstall", "--quiet", "--yes", *UNWANTED)
    return 0


if __name__ == "__main__":
    if sys.argv[1:] not in (["cpu"], ["gpu"]):
        print("usage: python install.py cpu|gpu")
        raise SystemExit(2)
    raise SystemExit(main(sys.argv[1]))
