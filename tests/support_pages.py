"""What pages say, for tests that hold them to it."""

import re
from html.parser import HTMLParser
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def page(name: str) -> str:
    """The text of a page in docs."""
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def write_files(name: str, folder: Path) -> None:
    """Writes the page's code blocks that begin with a file's name as these files."""
    for file, text in re.findall(r"```(?:python|yaml)\n(?=# (\S+\.(?:py|yaml))\b)(.*?)```", page(name), re.DOTALL):
        (folder / file).write_text(text, encoding="utf-8")


def table(name: str, section: str) -> list[list[str]]:
    """The cells of each row of the table below a heading, header and rule left out."""
    body = page(name).split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in body.splitlines() if line[:1] == "|"]
    return rows[2:]


class Page(HTMLParser):
    """Elements, their attributes and the shown text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.tags)
