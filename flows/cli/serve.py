"""The command `serve`: serves a registered version through vLLM's OpenAI API."""

import argparse
import os
import sys

from flows.cli.base import Commands, add_command, add_registry_options, registry_of
from flows.home import home_folder
from flows.server.service_file import SERVERS_SECRET
from rl_core.console import Console
from rl_core.errors import InputError
from rl_core.runtime.private import read_secret, secret_file

# The module behind `vllm serve`; the command itself requires the package name `vllm`, and the CPU build has another.
SERVER = "vllm.entrypoints.openai.api_server"
GUARD = "flows.server.guard.KeyGuard"
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
    """Replaces this process by a vLLM server on the version's files, which are downloaded on first use.

    Clients send the key as a bearer token: VLLM_API_KEY, or the secret of the home folder.
    """
    from flows.server.ports import check_port

    if any(word.partition("=")[0] in ("--api-key", "--api_key") for word in options.passed_on):
        raise InputError(
            expected="no key on the command line, which other users of the machine can read",
            seen="--api-key",
            where="arguments after --",
            fix="export VLLM_API_KEY=KEY, or leave it out: the secret of the home folder is the key",
        )
    check_port(options.port)
    registry = registry_of(options)
    home = home_folder()
    key = os.environ.get("VLLM_API_KEY")
    where = "VLLM_API_KEY" if key else f"cat {secret_file(home, SERVERS_SECRET)}"
    version = registry.get(options.version).version
    folder = registry.local_folder(version, home / "cache")
    import torch

    from rl_core.models.load import check_model_folder, load_tokenizer

    load_tokenizer(check_model_folder(str(folder)))
    on_cpu = not torch.cuda.is_available()
    command = [
        sys.executable, "-m", SERVER, "--model", str(folder), "--served-model-name", registry.name,
        "--host", "127.0.0.1", "--port", str(options.port), "--middleware", GUARD, *(CPU_OPTIONS if on_cpu else []),
        *options.passed_on,
        "--no-trust-remote-code",  # last, so that it holds whatever is passed on
    ]  # fmt: skip
    console.note(f"{registry.name} version {version}: http://127.0.0.1:{options.port}/v1  (Ctrl-C to stop)")
    console.note(f"key of the API: {where}")
    environment = {"VLLM_NO_USAGE_STATS": "1", **(CPU_ENVIRONMENT if on_cpu else {}), **os.environ}
    environment["VLLM_API_KEY"] = key or read_secret(home, SERVERS_SECRET)
    os.execve(sys.executable, command, environment)
