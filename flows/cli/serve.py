"""The command `serve`: serves a registered version through vLLM's OpenAI API."""

import argparse
import os
import sys

from flows.cli.base import Commands, add_command, add_registry_options, registry_of
from flows.home import home_folder
from rl_core.console import Console

# The module behind `vllm serve`; the command itself requires the package name `vllm`, and the CPU build has another.
SERVER = "vllm.entrypoints.openai.api_server"
CPU_OPTIONS = [
    "--dtype", "float32",
    "--block-size", "32",  # the CPU kernels do not support 16
    "--enforce-eager",
    "--kv-cache-memory-bytes", str(2**28),
]  # fmt: skip
CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores are shared with other processes
    "TORCHDYNAMO_DISABLE": "1",
}


def register(commands: Commands) -> None:
    """Adds the command."""
    sub = add_command(
        commands, "serve", serve, "Serve a version with vLLM; arguments after `--` are passed to `vllm serve`."
    )
    sub.add_argument("version", nargs="?", default="champion", help="number or alias of a version (default: champion)")
    sub.add_argument("--port", type=int, default=8000)
    sub.set_defaults(passed_on=[])
    add_registry_options(sub)


def serve(options: argparse.Namespace, console: Console) -> None:
    """Replaces this process by a vLLM server on the version's files, which are downloaded on first use."""
    from flows.server.ports import check_port

    check_port(options.port)
    registry = registry_of(options)
    version = registry.get(options.version).version
    folder = registry.local_folder(version, home_folder() / "cache")
    import torch

    from rl_core.models.load import check_model_folder, load_tokenizer

    load_tokenizer(check_model_folder(str(folder)))
    on_cpu = not torch.cuda.is_available()
    command = [
        sys.executable, "-m", SERVER, "--model", str(folder), "--served-model-name", registry.name,
        "--host", "127.0.0.1", "--port", str(options.port), *(CPU_OPTIONS if on_cpu else []), *options.passed_on,
        "--no-trust-remote-code",  # last, so that it holds whatever is passed on
    ]  # fmt: skip
    console.note(f"{registry.name} version {version}: http://127.0.0.1:{options.port}/v1  (Ctrl-C to stop)")
    environment = {"VLLM_NO_USAGE_STATS": "1", **(CPU_ENVIRONMENT if on_cpu else {}), **os.environ}
    os.execve(sys.executable, command, environment)
