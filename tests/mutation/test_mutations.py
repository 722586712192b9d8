"""The list of planted bugs is honest; it runs with `make mutation`."""

import ast
from pathlib import Path

import pytest
from mutation.run import BUGS, ROOT, Bug

bugs = pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)


def test_there_are_twenty_bugs_of_different_names() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) == 20


@bugs
def test_each_text_is_found_once_and_leaves_valid_python(bug: Bug, tmp_path: Path) -> None:
    path = tmp_path / bug.file
    path.parent.mkdir(parents=True)
    source = (ROOT / bug.file).read_text()
    path.write_text(source)
    bug.apply(tmp_path)
    assert path.read_text() != source
    ast.parse(path.read_text())
    path.write_text(source + source)
    with pytest.raises(ValueError, match=f"{bug.name}.* 2 times in {bug.file}"):
        bug.apply(tmp_path)


@bugs
def test_each_bug_names_tests_that_exist(bug: Bug) -> None:
    for test in bug.tests:
        file, _, function = test.partition("[")[0].partition("::")
        assert (ROOT / file).is_file() and f"def {function}" in (ROOT / file).read_text()
