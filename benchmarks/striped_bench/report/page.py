"""Page: a report as one self-contained HTML file.

Figures are inline, follow the system's light or dark scheme, and are there twice: the style sheet shows the wide one
on wide screens and the narrow one on others.
"""

import jinja2
from markupsafe import Markup

from striped_attention._version import __version__
from striped_bench.report.contents import Contents
from striped_bench.report.read import KNOWN
from striped_bench.report.style import NARROW, WIDE, css_variables, drawing, svg


def render(contents: Contents) -> str:
    """Render the page. Text from result files is escaped; the drawings and their colours are trusted."""
    loader = jinja2.PackageLoader("striped_bench.report", ".")
    page = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    drawn = {"wide": _drawn(contents, WIDE), "narrow": _drawn(contents, NARROW)}
    known = {d.path: "" if d.benchmark in KNOWN else "not drawn" for d in contents.documents}
    files = [
        (d.path.name, d.benchmark.split(",")[0], d.hardware, d.commit, d.date, known[d.path])
        for d in contents.documents
    ]
    ours = {"drawn": drawn, "colours": Markup(css_variables()), "version": __version__}
    return page.get_template("page.html").render(contents=contents, files=files, **ours)


def _drawn(contents: Contents, width: float) -> dict[str, Markup]:
    """Draw all figures in this width, by name."""
    with drawing(width):
        return {one.name: Markup(svg(one.draw(), f"{one.name}-{width:g}")) for one in contents.sections}
