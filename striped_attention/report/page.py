"""Page: a report as one HTML file that loads nothing. Figures are inside it, light or dark as the reader's system."""

import html
from collections.abc import Iterable, Sequence

from striped_attention._version import __version__
from striped_attention.report.contents import Contents
from striped_attention.report.read import KNOWN
from striped_attention.report.section import Section
from striped_attention.report.style import css_variables, drawing, svg

_STYLE = """
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 56rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; }
h2 { font-size: 1.2rem; line-height: 1.35; margin: 3rem 0 0.75rem; }
figure { margin: 0; overflow-x: auto; }
figure svg { width: 100%; min-width: 40rem; height: auto; display: block; }
figcaption { margin-top: 0.75rem; }
.source, footer { color: var(--quiet); font-size: 0.85rem; }
a { color: var(--blue); }
code { font-size: 0.9em; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: 0.85rem; }
.wide { overflow-x: auto; }
th, td { text-align: left; padding: 0.25rem 1rem 0.25rem 0; border-bottom: 1px solid var(--faint);
  white-space: nowrap; }
@media print { section { break-inside: avoid; } }
"""
_INTRODUCTION = (
    "Attention over a text too long for one device: the text is spread over several devices, and every device "
    "compares its own tokens (queries) with everybody's (keys), which travel round the ring of devices step by step. "
    "In a language model a token sees only those before it, so how tokens are dealt to devices, the layout, decides "
    "who has how much to do. Each figure says what was found; the text below it says how to read it and which file "
    "it was made from."
)


def render(contents: Contents) -> str:
    """The whole page."""
    with drawing():
        sections = "\n".join(_section(section) for section in contents.sections)
    links = "".join(f'<li><a href="#{s.name}">{html.escape(s.title)}</a></li>' for s in contents.sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>striped_attention: results</title>
<style>
{css_variables()}{_STYLE}</style>
</head>
<body>
<h1>striped_attention: what was measured</h1>
<p>{html.escape(_INTRODUCTION)}</p>
<nav><ol>{links}</ol></nav>
<main>
{sections}
</main>
{_missing(contents)}
{_files(contents)}
<footer><p>Made by <code>striped report</code>, version {html.escape(__version__)}.</p></footer>
</body>
</html>
"""


def _section(section: Section) -> str:
    title, caption, source = (html.escape(text) for text in (section.title, section.caption, section.source))
    drawn = svg(section.draw(), section.name)
    drawn = drawn.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    return f"""<section id="{section.name}">
<h2>{title}</h2>
<figure>
{drawn}
<figcaption>{caption}</figcaption>
</figure>
<p class="source">{source}</p>
</section>"""


def _missing(contents: Contents) -> str:
    if not contents.missing:
        return ""
    return _table("missing", "Not shown, for want of results", ("figure", "made by"), contents.missing)


def _files(contents: Contents) -> str:
    rows = [
        (
            d.path.name,
            d.benchmark.split(",")[0],
            d.hardware,
            d.commit,
            d.date,
            "" if d.benchmark in KNOWN else "not drawn",
        )
        for d in contents.documents
    ]
    return _table("files", "Files read", ("file", "benchmark", "hardware", "commit", "date", ""), rows)


def _table(name: str, title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"""<section id="{name}">
<h2>{title}</h2>
<div class="wide"><table>
<thead><tr>{first}</tr></thead>
<tbody>
{body}
</tbody>
</table></div>
</section>"""
