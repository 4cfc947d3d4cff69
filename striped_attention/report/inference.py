"""Inference: what a token costs once a text is in the cache."""

import functools
from collections.abc import Sequence

from striped_attention.report import figures
from striped_attention.report.figures import Line, Panel
from striped_attention.report.read import Document, of
from striped_attention.report.section import Section, newest, tokens


def traffic(documents: Sequence[Document]) -> Section | None:
    """Bytes that a device sends for a token, over devices."""
    key = ("preset", "batch", "cached", "devices", "layout")
    own = [x for x in of(documents, "decode") if any("wire_bytes" in row for row in x.rows("rows"))]
    rows, sources = newest(own, "rows", key)
    shown = [row for row in rows if row["devices"] > 1]
    if not shown:
        return None
    by_length: dict[tuple[object, ...], set[int]] = {}
    for row in shown:
        rest = tuple(row[name] for name in key if name != "cached")
        by_length.setdefault(rest, set()).add(row["wire_bytes"])
    same = all(len(sizes) == 1 for sizes in by_length.values())
    lines: dict[str, dict[str, Line]] = {}
    for row in shown if not same else [row for row in shown if row["cached"] == shown[0]["cached"]]:
        texts = f"{row['batch']} text{'s' * (row['batch'] > 1)}"
        panel = lines.setdefault(f"{row['preset']}, {texts}", {})
        for name, field in (("all", "wire_bytes"), ("for attention", "attention_bytes")):
            where = "" if same else f", {tokens(row['cached'])}"
            panel.setdefault(name + where, []).append((row["devices"], row[field] / 1e3))
    most = max(shown, key=lambda row: row["wire_bytes"])
    return Section(
        name="decode",
        title=f"A token sends at most {most['wire_bytes'] / 1e3:,.0f} kB from a device"
        + (", however long the text" if same else ""),
        caption=(
            "To write a token every device looks at the part of the text that it keeps, and the devices exchange small "
            "partial results; the keys and values of the text never travel. The rest is for weights, which are split "
            "over the devices too. Read from the compiled programs of whole models on virtual CPU devices."
        ),
        sources=sources,
        draw=functools.partial(
            figures.curves,
            [Panel(name, panel) for name, panel in lines.items()],
            "devices",
            "kB a device sends for a token",
            x_format=lambda n: f"{n:g}",
            floor=0.0,
        ),
    )
