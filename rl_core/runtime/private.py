"""Folders and secrets that only the user of this process can read."""

import os
import secrets
import stat
import tempfile
from pathlib import Path

from rl_core.errors import InputError

SECRETS = "secrets"
"""Folder of a home folder that holds its secrets."""
RAY_SECRET = "ray"
"""Name of the secret that the Ray processes of a home folder share."""
_BYTES = 32


def private_folder(folder: Path) -> Path:
    """Creates the folder with mode 0700, or sets this mode, and returns the folder.

    Raises InputError if it belongs to another user or stays open to others, and OSError if it cannot be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.stat()
    if facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) & 0o077:
        folder.chmod(0o700)
        facts = folder.stat()
    _check(facts, str(folder), "a folder", f"chmod 700 {folder}, or use another one with ROLLFORWARD_HOME=FOLDER")
    return folder


def secret_file(home: Path, name: str) -> Path:
    """The file with the secret `name` of a home folder, created on first use: one line of 64 hexadecimal digits.

    Raises InputError if the file belongs to another user or is open to others.
    """
    file = private_folder(home / SECRETS) / name
    if not os.path.lexists(file):
        _create(file)
    _read(file)
    return file


def read_secret(home: Path, name: str) -> str:
    """The secret `name` of a home folder, created on first use; raises InputError as `secret_file` does."""
    return _read(secret_file(home, name))


def _create(file: Path) -> None:
    descriptor, draft = tempfile.mkstemp(dir=file.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as opened:
            opened.write(secrets.token_hex(_BYTES))
        if not os.path.lexists(file):
            os.link(draft, file)  # unlike a rename, keeps the secret of a process that was faster
    except FileExistsError:
        pass
    finally:
        os.unlink(draft)


def _read(file: Path) -> str:
    fix = f"rm {file}: a new one is created, and running servers have to be restarted"
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise InputError("a readable file with a secret", str(error), str(file), fix) from None
    with os.fdopen(descriptor) as opened:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise InputError("a file with a secret", "something else", str(file), fix)
        _check(facts, str(file), "a file", fix)
        text = opened.read(1024).strip()
    if len(text) < 2 * _BYTES:
        raise InputError(f"a secret of {2 * _BYTES} characters", f"{len(text)} characters", str(file), fix)
    return text


def _check(facts: os.stat_result, where: str, what: str, fix: str) -> None:
    mode = stat.S_IMODE(facts.st_mode)
    if facts.st_uid != os.geteuid() or mode & 0o077:
        raise InputError(
            expected=f"{what} of user {os.geteuid()} that nobody else can read or write",
            seen=f"owner {facts.st_uid}, mode {mode:04o}",
            where=where,
            fix=fix,
        )
