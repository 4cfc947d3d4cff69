"""Style: a colour-blind-safe palette for light and dark schemes, figures of two widths, and writing them to files.

A figure is drawn once for both schemes, in the colours of the light one. In its SVG each of these becomes a CSS
variable with that colour as fallback, so that a page, or a style sheet inside the file, can switch the figure to dark.
For the same reason shades are made with opacity, never with a paler colour.

A figure is drawn twice for screens: WIDE, and NARROW for phones, where 8 points are 11 CSS pixels on a screen of 375.
`drawing` sets the width; functions that draw ask `width` and `abreast` how much fits side by side.
"""

import io
import pathlib
import re
import textwrap
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

# Name: light, dark. The hues are those of Okabe and Ito, lighter for the dark scheme; pink is darker, for text on it.
PALETTE = {
    "paper": ("#fefefe", "#14171c"),
    "ink": ("#1d2126", "#e3e6ea"),
    "quiet": ("#6b727b", "#9aa3ad"),
    "faint": ("#d5d9de", "#343a42"),
    "orange": ("#d55e00", "#ff8b3d"),
    "blue": ("#0072b2", "#4fb0f0"),
    "sky": ("#56b4e9", "#a9dcff"),
    "green": ("#009e73", "#2fd0a2"),
    "pink": ("#b8608f", "#f0a6cf"),
    "yellow": ("#e69f00", "#f7c948"),
}
MARKERS = {"blue": "o", "orange": "s", "green": "^", "pink": "D", "yellow": "P", "sky": "v"}  # line markers by colour
CYCLE = tuple(MARKERS)  # for series that are not layouts
ENTRIES = 6  # of a legend, at most
WIDE, NARROW = 8.0, 3.5  # widths of figures in inches


def colour(name: str) -> str:
    """Return the light colour of a name, in which figures are drawn."""
    return PALETTE[name][0]


def of_layout(layout: str) -> str:
    """Return the name of a layout's colour, which is the same in every figure."""
    if layout.startswith("contiguous"):
        return "orange"
    if layout.startswith("zigzag"):
        return "green"
    found = re.match(r"striped\((\d+)\)", layout)
    stripe = int(found[1]) if found else 1
    return "blue" if stripe == 1 else "sky" if stripe <= 64 else "pink"


def drawing(width: float = WIDE) -> AbstractContextManager[None]:
    """Matplotlib settings under which figures of this width are made and written."""
    ink, quiet = colour("ink"), colour("quiet")
    settings: Any = {
        **{"figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none"},
        **{"text.color": ink, "axes.labelcolor": ink, "axes.titlecolor": ink, "axes.edgecolor": quiet},
        **{"xtick.color": quiet, "ytick.color": quiet, "xtick.labelcolor": ink, "ytick.labelcolor": ink},
        **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True},
        **{"grid.color": colour("faint"), "grid.linewidth": 0.7, "legend.frameon": False, "legend.fontsize": 8.5},
        **{"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Verdana"]},  # of similar width
        **{"font.size": 9.0, "axes.titlesize": 9.5, "axes.labelsize": 9.0, "figure.figsize": (width, width)},
        **{"svg.fonttype": "none", "svg.hashsalt": "striped", "lines.linewidth": 1.8, "lines.markersize": 5.5},
    }
    return matplotlib.rc_context(settings)


def width() -> float:
    """Return the width of figures in inches, as set by `drawing`."""
    return float(matplotlib.rcParams["figure.figsize"][0])


def narrow() -> bool:
    """Whether figures are drawn for narrow screens."""
    return width() == NARROW


def abreast(least: float) -> int:
    """Return how many panels of at least this many inches fit side by side."""
    return max(1, int(width() // least))


def fit(text: str, size: float = 9.5, columns: int = 1) -> str:
    """Break a text into lines that fit into one of the columns of a figure; a letter is about 0.6 times its size."""
    return textwrap.fill(text, max(12, int(72 * width() / columns / (0.6 * size))))


def figure(height: float) -> Figure:
    """Make an empty figure of the common width."""
    return Figure(figsize=(width(), height), layout=ConstrainedLayoutEngine(h_pad=0.08))


def named(axes: Iterable[Axes]) -> dict[str, Artist]:
    """Return what the legend of these axes shows, by name."""
    return {label: handle for one in axes for handle, label in zip(*one.get_legend_handles_labels(), strict=True)}


def legend_below(figure: Figure, names: Mapping[str, Artist]) -> None:
    """Put a legend below the figure, in as many columns as fit, and make the figure higher by its rows."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    for columns in range(len(names), 0, -1):
        legend = figure.legend(names.values(), names.keys(), loc="outside lower center", ncols=columns)
        if columns == 1 or legend.get_window_extent(renderer).width < figure.bbox.width:
            figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(names) // columns))
            return
        legend.remove()


def svg(figure: Figure, name: str) -> str:
    """Make an <svg> element for a page: transparent, with the page's colour variables and unique ids."""
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = written.getvalue()
    text = text[text.index("<svg") :]
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", text)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    for variable, (light, _) in PALETTE.items():
        text = text.replace(light, f"var(--{variable}, {light})")
    # Two decimals of a point are enough in drawings; labels keep theirs.
    text = re.sub(r"<[^>]*>", lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), text)
    return re.sub(r"\n(?=[LMz])|[ \t]+(?=\n)", "", text)


def css_variables() -> str:
    """Return the palette as CSS variables, for light and dark."""
    light, dark = (" ".join(f"--{name}: {both[i]};" for name, both in PALETTE.items()) for i in (0, 1))
    root = f":root {{ color-scheme: light dark; {light} }}\n"
    return f"{root}@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def save(figure: Figure, folder: pathlib.Path, name: str, title: str) -> None:
    """Write NAME.svg, which follows the light or dark scheme, and NAME.png (light), with `title` above the figure."""
    lines = textwrap.wrap(title, 88)
    figure.set_figheight(figure.get_figheight() + 0.25 * len(lines))
    figure.suptitle("\n".join(lines), fontsize=11, fontweight="bold")
    text = svg(figure, name)
    start = text.index(">") + 1
    own = f'<style>{css_variables()}</style><rect width="100%" height="100%" style="fill: var(--paper)"/>'
    (folder / f"{name}.svg").write_text(f"{text[:start]}\n{own}{text[start:]}")
    figure.set_layout_engine("none")  # keep the layout that was computed for the SVG
    figure.savefig(folder / f"{name}.png", dpi=150, facecolor=colour("paper"), metadata={"Software": None})
