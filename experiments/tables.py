"""Tables, for a terminal and for a page: every experiment that prints one prints it here.

A result is a list of rows. A row is a dict, the same that --json prints:

    {"category": "maths", "method": "tree", "tokens_per_second": 41.3, "speedup": 1.72}

`print_rows` lays such rows out in columns with short headings, and ends with a legend that says
what each heading means. A table that is too wide for a terminal is printed in several parts.
`format_markdown` makes a table for a page, of cells that are already text.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

WIDTH = 100  # columns of a terminal that a table may take up
MAX_LABEL = 30  # characters of a label: of a longer one, say a folder, the middle is left out


class Column(NamedTuple):
    """How a key of the rows is printed."""

    heading: str
    meaning: str  # a line of the legend


def print_rows(rows: list[dict], labels: list[str], columns: dict[str, Column]) -> None:
    """Print rows as a table, then its legend.

    labels: the keys that name a row. They come first, and need no legend.
    columns: the other keys to print, in this order. A key that no row has is left out.
    """
    label_columns = []
    for key in labels:
        cells = [key] + [shorten(str(row[key])) for row in rows]
        label_columns.append(align(cells, str.ljust))
    legend = []
    part = list(label_columns)
    for key, column in columns.items():
        values = [row.get(key) for row in rows]
        if all(value is None for value in values):
            continue
        if column not in legend:  # two columns may share a meaning, say "interval of the last"
            legend.append(column)
        cells = align([column.heading] + [format_value(value) for value in values], str.rjust)
        if table_width(part + [cells]) > WIDTH:
            print_lines(part)
            part = list(label_columns)
        part.append(cells)
    print_lines(part)
    longest = max(len(column.heading) for column in legend)
    for column in legend:
        print(f"{column.heading:{longest}}  {column.meaning}")


def align(cells: list[str], justify: Callable[[str, int], str]) -> list[str]:
    """Pad the cells of one column to the same width."""
    width = max(len(cell) for cell in cells)
    return [justify(cell, width) for cell in cells]


def table_width(columns: list[list[str]]) -> int:
    return sum(len(cells[0]) for cells in columns) + 2 * (len(columns) - 1)


def print_lines(columns: list[list[str]]) -> None:
    """Print columns of aligned cells side by side, and an empty line after them."""
    for i in range(len(columns[0])):
        print("  ".join(cells[i] for cells in columns).rstrip())
    print()


def format_value(value: float | list[float] | None) -> str:
    """Format a number, a range of two, or nothing, where a row lacks the column's key."""
    if value is None:
        return ""
    if isinstance(value, list):
        low, high = value
        separator = "-" if low >= 0 else " to "  # no minus sign after a dash
        return f"{low:.2f}{separator}{high:.2f}"
    if isinstance(value, float):
        return f"{value:.2f}"
    return str(value)


def shorten(text: str) -> str:
    """Leave out the middle of a long text. (Its end is what tells folders apart.)"""
    if len(text) <= MAX_LABEL:
        return text
    return text[:8] + "..." + text[11 - MAX_LABEL:]


def format_markdown(headings: list[str], rows: list[list[str]]) -> str:
    """Return a table of a Markdown page, without a line break at its end."""
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    for cells in rows:
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
