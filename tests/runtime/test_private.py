"""A home folder and its secrets belong to one user; what another one could have made or read is refused."""

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flows.home import prepare_home
from rl_core.errors import InputError
from rl_core.runtime.private import private_folder, read_secret, secret_file

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_home_folder_and_its_secrets_are_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o755)  # as earlier versions made it
    monkeypatch.setattr(os, "environ", os.environ | {"ROLLFORWARD_HOME": str(home)})
    os.environ.pop("RAY_AUTH_MODE", None)
    assert prepare_home(verbose=False) == home
    files = sorted((home / "secrets").iterdir())
    assert [file.name for file in files] == ["ray", "servers"]
    assert [mode(path) for path in (home, home / "secrets", *files)] == [0o700, 0o700, 0o600, 0o600]
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert token == files[0] and home / "ray" not in token.parents


def test_processes_that_start_together_share_one_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: read_secret(tmp_path, "servers"), range(16)))
    assert len(found) == 1 and len(found.pop()) == 64
    assert [file.name for file in (tmp_path / "secrets").iterdir()] == ["servers"]


def open_to_all(file: Path) -> None:
    file.chmod(0o644)


def link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def cut_off(file: Path) -> None:
    file.write_text("")


@pytest.mark.parametrize("damage", [open_to_all, link, cut_off])
def test_a_secret_that_others_may_know_or_have_made_is_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    file = secret_file(tmp_path, "servers")
    damage(file)
    with pytest.raises(InputError) as error:
        read_secret(tmp_path, "servers")
    assert error.value.where == str(file) and f"rm {file}" in error.value.fix


@AS_ROOT
@pytest.mark.parametrize("name", ["", "secrets", "secrets/servers"])
def test_what_belongs_to_another_user_is_refused(tmp_path: Path, name: str) -> None:
    secret_file(tmp_path, "servers")
    os.chown(tmp_path / name, 12345, -1)
    with pytest.raises(InputError, match="owner 12345"):
        private_folder(tmp_path) and read_secret(tmp_path, "servers")
