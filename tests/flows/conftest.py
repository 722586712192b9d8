"""Runs of the real command that several tests look at."""

from pathlib import Path

import pytest
from support_flows import SMALL, Result, rollforward


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder that the session's runs share, as a user's would."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def demo(home: Path) -> Result:
    """The command behind `make demo`, once."""
    return rollforward(home, "run", "demo")


@pytest.fixture(scope="session")
def small(home: Path) -> Result:
    """A short run that nothing disturbs."""
    return rollforward(home, "run", "demo", "--run", "small", *SMALL)
