"""Names from commands, configs, manifests and tags never lead out of the folder that they belong to."""

from pathlib import Path

import pytest

from rl_core.config.compose import compose
from rl_core.data.sources import load_source
from rl_core.errors import InputError
from tasks.runs.open_run import find_run

OUTSIDE = ["../outside", "..", "/outside", "a/../../outside", "a\0b", ""]


@pytest.mark.parametrize("name", OUTSIDE[:-1])
def test_run_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="a run name of letters"):
        find_run(compose("demo", []), tmp_path, name)


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_of_sources(name: str) -> None:
    with pytest.raises(InputError, match="one of the sources"):
        load_source(name)


@pytest.mark.parametrize("name", ["../../outside", "/outside", "..", "a:b", " ", "it's"])
def test_names_of_models(name: str) -> None:
    with pytest.raises(InputError, match="must not be blank or contain /"):
        compose("demo", [f"registry.model_name={name!r}"])
