"""Table: evaluation results as terminal tables."""

from collections.abc import Sequence

import rich.box
import rich.table
import rich.text

from striped_attention.evaluation.needle import Cell
from striped_attention.training.loss_by_position import Losses, perplexity


def losses(found: Losses) -> rich.table.Table:
    """One row per range of contexts, and one for all tokens."""
    table = rich.table.Table(
        "context (tokens)", "tokens", "loss", "perplexity", box=rich.box.SIMPLE_HEAD, pad_edge=False
    )
    for column in table.columns:
        column.justify = "right"
    for r in found.ranges:
        table.add_row(f"{r.first:,}–{r.last:,}", f"{r.tokens:,}", f"{r.loss:.4f}", f"{perplexity(r.loss):,.2f}")
    table.add_section()
    table.add_row("all", f"{found.tokens:,}", f"{found.loss:.4f}", f"{perplexity(found.loss):,.2f}")
    return table


def needles(cells: Sequence[Cell]) -> rich.table.Table:
    """Share of needles found, by depth (rows) and length (columns)."""
    lengths, depths = (list(dict.fromkeys(getattr(cell, name) for cell in cells)) for name in ("length", "depth"))
    by_place = {(cell.length, cell.depth): cell for cell in cells}
    table = rich.table.Table(
        *("depth", *(f"{length:,}" for length in lengths)),
        box=rich.box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in table.columns:
        column.justify = "right"
    for depth in depths:
        table.add_row(f"{depth} %", *(_found(by_place[length, depth]) for length in lengths))
    return table


def _found(cell: Cell) -> rich.text.Text:
    """The share of needles found, on a blue that is darker for a larger share."""
    share = cell.correct / cell.draws
    shade = [round(255 + (end - 255) * share) for end in (0, 114, 178)]
    style = f"{'white' if share > 0.5 else 'black'} on rgb({','.join(map(str, shade))})"
    return rich.text.Text(f"{share:.0%}".rjust(5), style=style)
