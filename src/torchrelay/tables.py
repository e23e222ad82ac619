"""Tables in HTML, which notebooks show for results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

ROWS_SHOWN = 64


def html_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, or its caption alone if `rows` is empty; of many rows the first. Every text is
    escaped: names in a state may be anything."""
    lines = [[escape(str(cell)) for cell in row] for row in rows]
    if not lines:
        return f"<p>{escape(caption)}</p>"
    more = len(lines) - ROWS_SHOWN
    body = [_row("td", line) for line in lines[:ROWS_SHOWN]]
    if more > 0:
        body.append(_row("td", [f"and {more} more"]))
    named = f"<caption>{escape(caption)}</caption>"
    heads = f"<thead>{_row('th', [escape(cell) for cell in head])}</thead>"
    return f"<table>{named}{heads}<tbody>{''.join(body)}</tbody></table>"


def _row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join([f'<{tag}>{cell}</{tag}>' for cell in cells])}</tr>"
