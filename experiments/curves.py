"""Draws the logs of training runs side by side, in one picture: curves.svg.

    python -m experiments.curves runs/small runs/large

Four diagrams show the training loss, the held-out KL and the acceptance length that the held-out
accuracies imply, each over the updates; and the accuracy by the depth of the draft, at the last
evaluation. Each run has a curve in each.

SVG is text, so no library is needed. It counts x to the right and y downwards, in units of its
viewBox. In a path, M moves, and h and v draw lines of a length to the right and down. A diagram is
drawn around its own origin, and `g` moves it to its place.
"""
import html
import itertools
import math
from pathlib import Path

import numpy as np

from plumbing.errors import input_errors, run_command
from plumbing.files import atomic_write
from plumbing.flags import Parser, path
from plumbing.journal import read_log
from plumbing.processes import say

COLORS = (
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e",
    "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22",
)
MAX_POINTS = 200  # of a curve: more are averaged
UPDATE_PANELS = {
    "loss": "training loss",
    "held_out_kl": "held-out KL",
    "implied_acceptance_length": "implied acceptance length",
}

Curve = list[tuple[float, float]]


# --- Curves of a log ---


def update_curve(log: list[dict], name: str) -> Curve:
    """Return (update, value) of what was logged under a name, averaged where points are many."""
    points = [(record["update"], record[name]) for record in log if name in record]
    width = len(points) // MAX_POINTS + 1
    curve = []
    for first in range(0, len(points), width):
        update, value = np.mean(points[first:first + width], axis=0)
        curve.append((update, value))
    return curve


def depth_curve(log: list[dict]) -> Curve:
    """Return (depth, accuracy) of the last evaluation."""
    accuracies = []
    for record in log:
        accuracies = record.get("depth_accuracy", accuracies)
    return list(enumerate(accuracies, 1))


# --- Drawing ---


def axis_ticks(lowest: float, highest: float) -> list[float]:
    """Return round numbers, up to six, from `lowest` to at or above `highest`: 0, 0.05, ..., 0.25
    for 0 and 0.218."""
    length = highest - lowest or 1.0
    unit = 10 ** math.floor(math.log10(length))
    for factor in (0.1, 0.2, 0.5, 1, 2):
        step = unit * factor
        count = math.ceil(length / step - 1e-9)
        if count <= 5:
            break
    return [lowest + step * i for i in range(count + 1)]


def draw_panel(
    title: str,
    x_label: str,
    curves: list[Curve],
    lowest: float = 0.0,
    highest: float | None = None,
    marked: float | None = None,
) -> str:
    """Draw one diagram, 300 wide and 200 high, with a curve for each run.

    lowest, highest: where y begins and ends, by default at 0 and at the highest point. marked: a y
    that gets a dashed line.
    """
    points = list(itertools.chain(*curves))
    x_ticks = axis_ticks(0, max([x for x, _ in points], default=1))
    if highest is None:
        highest = max([y for _, y in points], default=1)
    y_ticks = axis_ticks(lowest, highest)

    def place(x: float, y: float) -> tuple[float, float]:
        right = 300 * x / x_ticks[-1]
        down = 200 - 200 * (y - lowest) / (y_ticks[-1] - lowest)
        return round(right, 1), round(down, 1)

    panel = f"""
        <text y="-14" font-weight="bold">{title}</text>
        <text x="150" y="234" text-anchor="middle">{x_label}</text>
        <path d="M0 0v200h300" stroke="black" fill="none"/>
    """
    for tick in x_ticks:
        x, _ = place(tick, lowest)
        panel += f"""
            <path d="M{x} 200v5" stroke="black"/>
            <text x="{x}" y="218" text-anchor="middle">{tick:.4g}</text>
        """
    for tick in y_ticks:
        _, y = place(0, tick)
        panel += f"""
            <path d="M0 {y}h300" stroke="#ddd"/>
            <text x="-6" y="{y + 4}" text-anchor="end">{tick:.4g}</text>
        """
    if marked is not None:
        _, y = place(0, marked)
        panel += f'<path d="M0 {y}h300" stroke="black" stroke-dasharray="4 4"/>'
    for curve, color in zip(curves, itertools.cycle(COLORS)):
        places = []
        for point in curve:
            x, y = place(*point)
            places.append(f"{x},{y}")
        line = " ".join(places[:1] + places)  # the first one twice: so a single point is a dot
        style = f'fill="none" stroke="{color}" stroke-width="2" stroke-linecap="round"'
        panel += f'<polyline points="{line}" {style}/>\n'
    return panel


def save_panels(picture: Path, panels: list[str], names: list[str]) -> None:
    """Write diagrams as an SVG file, two in a row, and below them the names of their curves."""
    drawing = ""
    for i, panel in enumerate(panels):
        x = 60 + 400 * (i % 2)  # left or right
        y = 40 + 290 * (i // 2)  # the row
        drawing += f'<g transform="translate({x} {y})">{panel}</g>\n'
    y += 280  # below the last row
    for name, color in zip(names, itertools.cycle(COLORS)):
        drawing += f"""
            <path d="M60 {y - 4}h24" stroke="{color}" stroke-width="2"/>
            <text x="92" y="{y}">{html.escape(name)}</text>
        """
        y += 20
    size = f'viewBox="0 0 820 {y + 10}"'
    style = 'font-family="sans-serif" font-size="12"'
    svg = f"""<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>
        <rect width="100%" height="100%" fill="white"/>
        {drawing}
    </svg>"""
    with atomic_write(picture) as part:
        part.write_text(svg, encoding="utf-8", errors="replace")  # a folder may have any bytes


# --- The command line ---


def draw_runs(folders: list[Path], picture: Path) -> None:
    """Draw the logs of runs. Raises InputError."""
    logs = []
    for folder in folders:
        with input_errors(f"{folder}: no run with a log", OSError, ValueError):
            logs.append(read_log(folder))
    panels = []
    for name, title in UPDATE_PANELS.items():
        panels.append(draw_panel(title, "updates", [update_curve(log, name) for log in logs]))
    curves = [depth_curve(log) for log in logs]
    panels.append(draw_panel("accuracy, last evaluation", "depth of the draft", curves))
    save_panels(picture, panels, [str(folder) for folder in folders])


def main() -> None:
    parser = Parser(
        prog="python -m experiments.curves",
        description="Draw the logs of training runs side by side, in curves.svg.",
    )
    parser.add_argument("folders", type=path, nargs="+", metavar="DIR", help="the folder of a run")
    args = parser.parse_args()
    draw_runs(args.folders, Path("curves.svg"))
    say("see curves.svg")


if __name__ == "__main__":
    run_command(main)
