"""Common parts of HTML reports: a self-contained file with charts as inline SVG."""

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent / "templates"
# Placeholder colours in the charts; the style sheet defines each of them for light and dark mode.
_INK, _GRID = "#010101", "#020202"
COLOURS = [f"#0300{i:02x}" for i in range(8)]
_VARIABLES = {_INK: "var(--muted)", _GRID: "var(--line)"} | {c: f"var(--c{i})" for i, c in enumerate(COLOURS)}
STYLE: Any = {
    "svg.fonttype": "none", "font.size": 8.5, "axes.edgecolor": _GRID, "axes.labelcolor": _INK, "text.color": _INK,
    "xtick.color": _INK, "ytick.color": _INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "xtick.major.size": 3, "ytick.major.size": 0, "axes.grid": True, "axes.grid.axis": "y",
    "figure.facecolor": "none", "axes.facecolor": "none", "grid.color": _GRID, "grid.linewidth": 0.7,
    "axes.axisbelow": True, "axes.formatter.limits": (-3, 5),
}  # fmt: skip


def render_page(template: str, **values: Any) -> str:
    """Renders a template from `TEMPLATES`; string values are escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template(template).render(**values)


def to_svg(figure: "Figure", title: str) -> Markup:
    """The figure as an inline SVG element that uses the page's colours."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->| xmlns(:\w+)?=\"[^\"]*\"", "", text, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return Markup(text.replace("<svg", '<svg role="img"', 1))
