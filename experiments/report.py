"""Prints the tables of experiments/results, and draws its figures.

    python -m experiments.report            # all tables, as Markdown
    python -m experiments.report parts      # those of one experiment
    python -m experiments.report --pairs    # how the acceptance lengths of two drafters compare
    python -m experiments.report --figures  # draws the figures again

A table has a line for each drafter (or network), with the mean over the seeds and half of their
range. It shows what experiments/run.py has written to experiments/results/NAME.json.
"""
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np

from app.evaluation import EVALUATION_CYCLE
from experiments.curves import draw_panel, save_panels
from experiments.tables import format_markdown
from plumbing.errors import run_command
from plumbing.files import read_json
from plumbing.flags import Parser

RESULTS = Path(__file__).parent / "results"
RARE = 0.05  # a depth that a smaller share of the chains comes to is left out
# Trained otherwise than it drafts. It is in the files, but no comparison with it is fair.
UNFAIR = "no-ca"

# The pairs of drafters, A and B, whose acceptance lengths --pairs compares, and the experiment that
# has both. A and B differ in one thing.
PAIRS = [
    ("on_policy", "full", "run-1"),
    ("on_policy", "full", "run-unbounded"),
    ("parts", "full", "eagle"),
    ("parts", "full", "no-lsa"),
    ("parts", "no-lsa", "neither"),
    ("parts", "full", "neither"),
    ("memory", "full", "last-layer"),
    ("reused_layers", "n-1", "full"),
    ("reused_layers", "n-2", "full"),
    ("reused_layers", "n-4", "full"),
    ("losses", "full", "smooth-l1-only"),
    ("losses", "full", "kl-only"),
    # Early in training: as it was, and made again.
    ("on_policy_early", "full-quarter", "run-1-quarter"),
    ("repeated", "full-quarter", "run-1-quarter"),
    ("on_policy_early", "full-quarter", "run-unbounded-quarter"),
    ("repeated", "full-quarter", "run-unbounded-quarter"),
    ("parts_early", "full-quarter", "eagle-quarter"),
    ("repeated", "full-quarter", "eagle-quarter"),
    ("parts_early", "full-quarter", "no-lsa-quarter"),
    ("repeated", "full-quarter", "no-lsa-quarter"),
    ("parts_early", "no-lsa-quarter", "neither-quarter"),
    ("repeated", "no-lsa-quarter", "neither-quarter"),
    ("parts_early", "full-quarter", "neither-quarter"),
    ("repeated", "full-quarter", "neither-quarter"),
]

Row = dict  # of a results file


class Column(NamedTuple):
    value: Callable[[Row], float | None]  # the column's number in a row, or None if it has none
    form: str = ".2f"


# --- Columns ---


def accuracy_at(depth: int) -> Column:
    """Return a column: how many percent of the tokens at a depth are right, if all before are."""

    def value(row: Row) -> float | None:
        accuracies = row["drafting"]["depth_accuracy"]
        # The share of chains that come to this depth is the product of the accuracies before. (A
        # list that ends before this depth ends with 0, and so the product is 0.)
        if np.prod(accuracies[:depth - 1]) < RARE:
            return None
        return 100 * accuracies[depth - 1]

    return Column(value, ".1f")


def points_lost(first: int, last: int) -> Column:
    """Return a column: by how many percentage points a drafter that reads its own predictions is
    right less often than with the target's states, in the mean of these depths."""

    def value(row: Row) -> float:
        true = np.mean(row["states"]["true"][first - 1:last])
        predicted = np.mean(row["states"]["predicted"][first - 1:last])
        return 100 * (true - predicted)

    return Column(value, ".1f")


def key(name: str, inner: str | None = None) -> Column:
    """Return the column of a key, or of a key inside the object that it holds."""
    if inner is None:
        return Column(lambda row: row[name])
    return Column(lambda row: row[name][inner])


DRAFTS = {"chains": key("chain"), "trees": key("tree"), "sampled trees": key("sampled_tree")}
ACCEPTANCE = {
    "right at depth 1": accuracy_at(1),
    "2": accuracy_at(2),
    "4": accuracy_at(4),
    "8": accuracy_at(8),
    **DRAFTS,
}
OFFLINE = {"agreement": key("offline_agreement"), "perplexity": key("offline_perplexity")}
STATES = {
    "points lost at depth 2": points_lost(2, 2),
    "at depth 8": points_lost(8, 8),
    "mean of depths 2 to 8": points_lost(2, 8),
}
COST = {
    "ms a draft": key("ms_a_draft"),
    "ms a cycle": key("ms_a_cycle"),
    "speed-up": key("speedup"),
    "acceptance length": key("acceptance_length"),
}
TRAINED_COST = {
    "ms a draft": key("ms_a_draft"),
    "ms a cycle": key("ms_a_cycle"),
    "acceptance length, trained": key("trained", "acceptance_length"),
    "speed-up, trained": key("trained", "speedup"),
}
NETWORK = {  # "link" is a network that --latency and --loss describe
    "api, tokens/s": key("api:link", "tokens_per_second"),
    "remote": key("remote:link", "speedup"),
    "remote+lookup": key("remote+lookup:link", "speedup"),
}
TABLES = {  # of each experiment; of those that are not here: ACCEPTANCE
    "repeated": [DRAFTS],
    "memory": [DRAFTS],
    "losses": [DRAFTS],
    "reused_layers": [ACCEPTANCE, OFFLINE],
    "reused_layers_early": [ACCEPTANCE, OFFLINE],
    "states": [STATES],
    "cost": [TRAINED_COST],
    "cost_longest": [COST],
    "network": [NETWORK],
}


# --- Lines: rows that differ in their seeds ---


def line_name(experiment: str, row: Row) -> str:
    if experiment == "network":
        return f"{row['latency']}, {row['loss']}"
    if experiment.startswith("cost"):  # (rows of earlier code have folders: "chain runs/full-0")
        return row["method"].replace("runs/", "").removesuffix(f"-{row['seed']}")
    return row["drafter"]


def cell(values: list[float | None], form: str) -> str:
    """Return the mean over seeds and, if there are several, half of their range."""
    if None in values:
        return "–"
    text = f"{np.mean(values):{form}}"
    if len(values) > 1:
        text += f" ± {(max(values) - min(values)) / 2:{form.removeprefix('+')}}"
    return text


def make_table(columns: dict[str, Column], lines: dict[str, list[Row]]) -> str:
    table = []
    for name, rows in lines.items():
        cells = [name]
        for value, form in columns.values():
            cells.append(cell([value(row) for row in rows], form))
        table.append(cells)
    return format_markdown(["", *columns], table)


def read_lines(experiment: str) -> dict[str, list[Row]]:
    """Return the rows of an experiment, by line. Raises InputError if it has not been written."""
    lines: dict[str, list[Row]] = {}
    for row in read_json(RESULTS / f"{experiment}.json")["rows"]:
        name = line_name(experiment, row)
        if UNFAIR not in name:
            lines.setdefault(name, []).append(row)
    return lines


def print_experiment(experiment: str) -> None:
    """Print the tables of an experiment. Raises InputError if it has not been written."""
    lines = read_lines(experiment)
    print(f"\n{experiment}")
    for columns in TABLES.get(experiment, [ACCEPTANCE]):
        print("\n" + make_table(columns, lines))


def print_pairs() -> None:
    """Print by how many percent acceptance lengths of A are above those of B, seed by seed."""
    table = []
    for experiment, a, b in PAIRS:
        lines = read_lines(experiment)
        cells = [experiment, f"`{a}`", f"`{b}`"]
        for length, _ in DRAFTS.values():
            changes = []
            for row_a, row_b in zip(lines[a], lines[b]):
                changes.append(100 * (length(row_a) / length(row_b) - 1))
            cells.append(cell(changes, "+.1f"))
        table.append(cells)
    print(format_markdown(["experiment", "A", "B", *DRAFTS], table))


# --- Figures ---
#
# A figure is made of two diagrams with the same curves, and the names of the curves.


def draw_depths(rows: list[Row]) -> tuple[list[str], list[str]]:
    """Draw accuracies by depth, means over seeds, and how many chains are right up to a depth."""
    names = list(dict.fromkeys(row["drafter"] for row in rows if row["drafter"] != UNFAIR))
    accuracies = []  # a curve for each drafter
    shares = []
    for name in names:
        curves = []
        for row in rows:
            if row["drafter"] == name:
                curve = row["drafting"]["depth_accuracy"]
                missing = EVALUATION_CYCLE - len(curve)  # depths that no chain comes to
                curves.append(curve + [0.0] * missing)
        share = np.mean(np.cumprod(curves, axis=1), axis=0)  # of the chains
        common = 1 + np.sum(share[:-1] >= RARE)  # depths that enough chains come to
        accuracies.append(list(enumerate(np.mean(curves, axis=0)[:common], 1)))
        shares.append(list(enumerate([1.0, *share])))
    panels = [
        draw_panel("accuracy while drafting", "depth of the draft", accuracies, lowest=0.7),
        draw_panel("chains right up to here", "depth of the draft", shares),
    ]
    return panels, names


def draw_networks(rows: list[Row]) -> tuple[list[str], list[str]]:
    """Draw speed-ups over plain API use by latency, means over runs, for each share of losses."""
    losses = list(dict.fromkeys(row["loss"] for row in rows))
    latencies = list(dict.fromkeys(row["latency"] for row in rows))
    panels = []
    for method, title in (("remote", "drafts"), ("remote+lookup", "drafts and lookup")):
        curves = []
        for loss in losses:
            curve = []
            for latency in latencies:
                speedups = []
                for row in rows:
                    if (row["loss"], row["latency"]) == (loss, latency):
                        speedups.append(row[f"{method}:link"]["speedup"])
                curve.append((int(latency.removesuffix("ms")), np.mean(speedups)))
            curves.append(curve)
        panel = draw_panel(
            f"speed-up with {title}", "latency one way, ms", curves, highest=2, marked=1
        )
        panels.append(panel)
    return panels, [f"{loss} of the packets lost" for loss in losses]


def draw_batches(rows: list[Row]) -> tuple[list[str], list[str]]:
    """Draw tokens per second by the number of conversations."""
    panels = []
    for dtype in ("float32", "bfloat16"):
        curves = []
        for method in ("target", "chain"):
            curve = []
            for row in rows:
                if (row["dtype"], row["method"]) == (dtype, method):
                    curve.append((row["batch"], row["tokens_per_second"]))
            curves.append(curve)
        title = f"tokens per second, {dtype}"
        panels.append(draw_panel(title, "conversations at once", curves))
    return panels, ["the target alone", "with chains of 3"]


FIGURES = {  # of a results file: lies beside it
    "on_policy": draw_depths,
    "parts": draw_depths,
    "reused_layers": draw_depths,
    "network": draw_networks,
    "smollm2/batch": draw_batches,
}


def save_figure(name: str) -> None:
    panels, names = FIGURES[name](read_json(RESULTS / f"{name}.json")["rows"])
    save_panels(RESULTS / f"{name}.svg", panels, names)


def main() -> None:
    parser = Parser(
        prog="python -m experiments.report",
        description="Print the tables of experiments/results.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--pairs", action="store_true", help="compare drafters two by two instead")
    parser.add_argument("--figures", action="store_true", help="draw all figures instead")
    args = parser.parse_args()
    if args.pairs:
        print_pairs()
        return
    if args.figures:
        for name in FIGURES:
            save_figure(name)
        return
    for name in args.names or sorted(path.stem for path in RESULTS.glob("*.json")):
        print_experiment(name)


if __name__ == "__main__":
    run_command(main)
