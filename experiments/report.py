"""The tables and the pictures of a comparison, from what experiments/compare.py has printed.

    python -m experiments.report experiments/results/compare_toy.json
    python -m experiments.report experiments/results/compare_toy.json --figure toy.svg
    python -m experiments.report experiments/results/compare_toy.json --curves depths.svg
    python -m experiments.report experiments/results/compare_toy.json --arms no-memory eagle

A row of such a file is an arm after some updates, with one seed of drafters. It has the tokens and
the passes of every prompt, so that everything else follows: acceptance lengths, by how many percent
they differ from those of the first arm, and 95% intervals over prompts and seeds. Two arms are
compared on the same prompts and seeds, that is, in pairs. Files of the same drafters with other
prompts, as compare_toy.json and compare_toy_fresh.json, are read as one with all their prompts.
"""
from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Callable

import numpy as np

from experiments import curves
from experiments.intervals import interval_over_seeds_and_prompts
from experiments.tables import format_markdown
from plumbing.errors import InputError, run_command
from plumbing.files import atomic_write, read_json
from plumbing.flags import Parser, path

KINDS = {  # of drafts
    "chain": "chains of 8",
    "sampled chain": "sampled chains of 8",
    "tree": "trees of 8",
    "tree of 60": "trees of 60",
    "sharp tree of 60": "sharp trees of 60",
}

Row = dict


# --- Statistics ---


def gather(rows: list[Row], update: int, arm: str, kind: str) -> dict[int, np.ndarray]:
    """Return the tokens and passes of an arm after some updates, (2, prompts), by seed."""
    counts = {}
    for row in rows:
        if (row["updates"], row["arm"]) == (update, arm) and kind in row:
            counts[row["seed"]] = np.array([row[kind]["tokens"], row[kind]["passes"]])
    return counts


def length(totals: np.ndarray) -> float | np.ndarray:
    """The acceptance length, from tokens and passes in total (2), or of many samples (2, DRAWS)."""
    return totals[0] / totals[1]


def difference(totals: np.ndarray) -> float | np.ndarray:
    """By how many percent the acceptance length of one arm exceeds that of another, from the tokens
    and passes of both (4), or of many samples (4, DRAWS)."""
    return 100 * (length(totals[:2]) / length(totals[2:]) - 1)


def with_interval(
    statistic: Callable[[np.ndarray], np.ndarray], *arms: dict[int, np.ndarray]
) -> tuple[float, float, float]:
    """Return a statistic of the counts of one arm or of two, from `gather`, and the ends of its 95%
    interval. It is computed of the seeds that both have."""
    seeds = sorted(set.intersection(*map(set, arms)))
    counts = []
    for seed in seeds:
        counts.append(np.concatenate([arm[seed] for arm in arms]))  # (2 or 4, prompts)
    counts = np.stack(counts, axis=1)  # (2 or 4, seeds, prompts)
    low, high = interval_over_seeds_and_prompts(statistic, counts)
    return statistic(counts.sum(axis=(1, 2))), low, high


def differences(rows: list[Row], update: int, kind: str) -> dict[str, tuple[float, float, float]]:
    """Return for each arm but the first by how many percent it differs from that one, with the
    interval."""
    first, *others = dict.fromkeys(row["arm"] for row in rows)
    of_first = gather(rows, update, first, kind)
    found = {}
    for arm in others:
        of_arm = gather(rows, update, arm, kind)
        if of_arm.keys() & of_first.keys():
            found[arm] = with_interval(difference, of_arm, of_first)
    return found


def by_depth(rows: list[Row], update: int, arm: str) -> np.ndarray:
    """Return how often a draft of a greedy chain is right after the text's own tokens, by its
    depth: means over seeds. They are over all roots, whether drafting would get that far or not."""
    of_seeds = []
    for row in rows:
        if (row["updates"], row["arm"]) == (update, arm):
            of_seeds.append(row["chain"]["by_depth"])
    return np.mean(of_seeds, axis=0)


def rows_of(rows: list[Row], arms: list[str]) -> list[Row]:
    """Return the rows of these arms, arm by arm. Raises InputError if one has none."""
    chosen = []
    for arm in arms:
        of_arm = [row for row in rows if row["arm"] == arm]
        if not of_arm:
            raise InputError(f"--arms {arm}: no such arm in this file")
        chosen += of_arm
    return chosen


def pool(files: list[list[Row]]) -> list[Row]:
    """Return the rows of the first file, with the prompts that other files have of the same arm,
    seed and updates, for each kind of drafts. (What is right at each depth, and entropies, stay the
    first file's.) Raises InputError if another file has other arms or seeds."""
    first, *others = files
    pooled = {key_of(row): copy.deepcopy(row) for row in first}
    for rows in others:
        stages = {row["updates"] for row in rows}
        if {key_of(row) for row in rows} != {key for key in pooled if key[0] in stages}:
            raise InputError("the files differ in their arms, seeds or updates")
        for row in rows:
            ours = pooled[key_of(row)]
            for kind in KINDS.keys() & row.keys():
                ours[kind]["tokens"] += row[kind]["tokens"]
                ours[kind]["passes"] += row[kind]["passes"]
    return list(pooled.values())


def key_of(row: Row) -> tuple[int, int, str]:
    return row["updates"], row["seed"], row["arm"]


def prompts_at(rows: list[Row], update: int) -> int:
    """Return how many prompts were scored after some updates."""
    return max(len(row["chain"]["tokens"]) for row in rows if row["updates"] == update)


def kinds_in(rows: list[Row]) -> list[str]:
    """Return the kinds of drafts that were scored."""
    scored = set().union(*rows)
    return [kind for kind in KINDS if kind in scored]


# --- Tables ---


def show(figure: tuple[float, float, float], form: str) -> str:
    value, low, high = figure
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def print_tables(rows: list[Row]) -> None:
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    stages = sorted({row["updates"] for row in rows})
    kinds = kinds_in(rows)
    last = stages[-1]
    final = [row for row in rows if row["updates"] == last]
    prompts = prompts_at(rows, last)
    tree_prompts = [len(row["tree"]["tokens"]) for row in final if "tree" in row]
    fewer = ""
    if tree_prompts and tree_prompts[0] < prompts:
        fewer = f" (trees: {tree_prompts[0]})"
    seeds = Counter(row["arm"] for row in final).values()
    most = f" to {max(seeds)}" if max(seeds) > min(seeds) else ""
    print(f"Acceptance lengths after {last} updates; {prompts} prompts{fewer}, seeds of drafters: "
          f"{min(seeds)}{most}. In brackets 95% intervals.\n")
    table = []
    for arm in arms:
        cells = [arm]
        for kind in kinds:
            counts = gather(rows, last, arm, kind)
            cells.append(show(with_interval(length, counts), ".2f") if counts else "–")
        table.append(cells)
    headings = [KINDS[kind] for kind in kinds]
    print(format_markdown(["", *headings], table))
    if max(seeds) > 1:
        print_seeds(rows, arms, last)
    print_depths(rows, arms, last)
    print_entropies(final, arms)
    print_times([row for row in rows if "draft_ms" in row])
    if len(arms) == 1:
        return  # there is nothing to compare it with
    print(f"\nPercent by which they differ from those of {arms[0]}.\n")
    print_differences(headings, [differences(rows, last, kind) for kind in kinds])
    if len(stages) == 1:
        return
    print(f"\nThe same in {KINDS['chain']}, by updates.\n")
    columns = [differences(rows, stage, "chain") for stage in stages]
    headings = [str(stage) for stage in stages]
    counts = [prompts_at(rows, stage) for stage in stages]
    if min(counts) < max(counts):  # files were pooled, and some lack the earlier stages
        headings = [f"{stage}, {count} prompts" for stage, count in zip(stages, counts)]
    print_differences(headings, columns)


def print_differences(headings: list[str], columns: list[dict]) -> None:
    """Print a table with a line for each arm. columns: from `differences`."""
    table = []
    for arm in columns[0]:
        cells = [arm]
        for column in columns:
            cells.append(show(column[arm], "+z.1f") if arm in column else "–")
        table.append(cells)
    print(format_markdown(["", *headings], table))


def print_seeds(rows: list[Row], arms: list[str], update: int) -> None:
    seeds = sorted({row["seed"] for row in rows})
    table = []
    for arm in arms:
        counts = gather(rows, update, arm, "chain")
        cells = [arm]
        for seed in seeds:
            cells.append(f"{length(counts[seed].sum(axis=1)):.2f}" if seed in counts else "–")
        table.append(cells)
    print(f"\nAcceptance lengths of {KINDS['chain']}, seed by seed.\n")
    print(format_markdown(["", *map(str, seeds)], table))


def print_depths(rows: list[Row], arms: list[str], update: int) -> None:
    table = []
    for arm in arms:
        shares = [f"{100 * share:.1f}%" for share in by_depth(rows, update, arm)]
        table.append([arm, *shares])
    print("\nHow often the draft at a depth is the text's next token, after the text's own tokens: "
          "over all roots, whether drafting would get there or not; temperature 0.\n")
    depths = range(1, len(table[0]))
    print(format_markdown(["", *map(str, depths)], table))


def print_entropies(rows: list[Row], arms: list[str]) -> None:
    table = []
    for arm in arms:
        pairs = []
        for row in rows:
            if row["arm"] == arm and "entropies" in row["sampled chain"]:
                entropies = row["sampled chain"]["entropies"]
                pairs.append((entropies["p"], entropies["q"]))
        if pairs:
            of_p, of_q = np.mean(pairs, axis=0)
            table.append([arm, f"{of_p:.2f}", f"{of_q:.2f}"])
    if table:
        print("\nMean entropies in nats, of p and of q for the first token of each draft, along "
              "sampled texts.\n")
        print(format_markdown(["", "p", "q"], table))


def print_times(rows: list[Row]) -> None:
    """Print what a draft and a cycle cost, if that was measured: means over seeds."""
    table = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        of_seeds = [[row["draft_ms"], row["cycle_ms"]] for row in rows if row["arm"] == arm]
        draft, cycle = np.mean(of_seeds, axis=0)
        table.append([arm, f"{draft:.1f}", f"{cycle:.1f}"])
    if table:
        print("\nMilliseconds of a draft of 8 tokens, and of a cycle with its verification.\n")
        print(format_markdown(["", "draft", "cycle"], table))


# --- A picture: how far each arm is from the first, with intervals ---

LEFT = 200  # where the panels begin; left of it are the arms' names
WIDTH = 250  # of a panel
GAP = 45  # between panels
LINE = 24  # the height of an arm


def draw(rows: list[Row]) -> str:
    """Draw the differences after the last update as an SVG, a panel for each kind of drafts."""
    first = rows[0]["arm"]
    last = max(row["updates"] for row in rows)
    # Trees of 8 are left out: arms differ in these much as in those of 60.
    kinds = [kind for kind in kinds_in(rows) if kind != "tree"]
    found = {kind: differences(rows, last, kind) for kind in kinds}
    arms = list(found[kinds[0]])
    ends = [0.0]
    for column in found.values():
        for figure in column.values():
            ends += figure
    ticks = curves.axis_ticks(min(ends) // 10 * 10, max(ends))  # tens, so that 0 is one of them
    drawing = ""
    height = LINE * len(arms)
    for i, arm in enumerate(arms):
        drawing += f'<text x="{LEFT - 15}" y="{60 + LINE * i}" text-anchor="end">{arm}</text>\n'
    for i, kind in enumerate(kinds):
        panel = draw_panel(KINDS[kind], arms, found[kind], ticks, height)
        drawing += f'<g transform="translate({LEFT + (WIDTH + GAP) * i} 44)">{panel}</g>\n'
    width = LEFT + (WIDTH + GAP) * len(kinds)
    foot = height + 92
    caption = f"acceptance length, percent above or below that of {first}; bars: 95% intervals"
    drawing += f'<text x="{LEFT}" y="{foot}">{caption}</text>\n'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {foot + 16}" '
        'font-family="sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{drawing}</svg>\n'
    )


def draw_panel(
    title: str, arms: list[str], found: dict[str, tuple[float, float, float]], ticks: list[float],
    height: int,
) -> str:
    """Draw the arms that have figures, a line each. found: from `differences`."""

    def place(value: float) -> float:
        return round(WIDTH * (value - ticks[0]) / (ticks[-1] - ticks[0]), 1)

    panel = f'<text y="-18" font-weight="bold">{title}</text>\n'
    for tick in ticks:
        x = place(tick)
        color = "#ddd" if round(tick, 6) else "black"
        panel += f'<path d="M{x} -6v{height + 6}" stroke="{color}"/>\n'
        label = f"{tick:+.4g}" if round(tick, 6) else "0"
        panel += f'<text x="{x}" y="{height + 16}" text-anchor="middle">{label}</text>\n'
    for i, arm in enumerate(arms):
        if arm not in found:
            continue
        value, low, high = found[arm]
        y = 12 + LINE * i
        style = f'stroke="{curves.COLORS[0]}" stroke-width="2"'
        panel += f'<path d="M{place(low)} {y}H{place(high)}" {style}/>\n'
        panel += f'<circle cx="{place(value)}" cy="{y}" r="4" fill="{curves.COLORS[0]}"/>\n'
    return panel


def draw_curves(rows: list[Row], picture: Path) -> None:
    """Draw, as an SVG, how often drafts of greedy chains are right, by depth; and how long these
    chains become in training."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    stages = sorted({row["updates"] for row in rows})
    if len({prompts_at(rows, stage) for stage in stages}) > 1:
        raise InputError("--curves: stages have different prompts: give one file")
    of_depths = []
    of_updates = []
    lowest = 1.0
    for arm in arms:
        shares = by_depth(rows, stages[-1], arm)
        lowest = min(lowest, shares.min())
        of_depths.append(list(enumerate(shares, 1)))
        lengths = []
        for stage in stages:
            counts = sum(gather(rows, stage, arm, "chain").values())  # over seeds, (2, prompts)
            lengths.append(length(counts.sum(axis=1)))
        of_updates.append(list(zip(stages, lengths)))
    title = "right, after the text's own tokens"
    panels = [
        curves.draw_panel(title, "depth of the draft", of_depths, lowest=lowest // 0.1 * 0.1),
        curves.draw_panel("acceptance length of chains", "updates", of_updates, lowest=1.0),
    ]
    curves.save_panels(picture, panels, arms)


# --- The command line ---


def read_rows(file: Path) -> list[Row]:
    rows = read_json(file).get("rows", [])
    if not rows or "arm" not in rows[0]:
        raise InputError(f"{file}: not printed by experiments.compare --json")
    return rows


def main() -> None:
    parser = Parser(
        prog="python -m experiments.report",
        description="Print the tables of a comparison, or draw it.",
    )
    parser.add_argument("files", type=path, nargs="+", metavar="FILE",
        help="what compare --json has printed; of several, the prompts are pooled")
    parser.add_argument("--arms", nargs="+", metavar="ARM",
        help="only these, compared with the first of them (default: all)")
    parser.add_argument("--figure", type=path, metavar="OUT", help="draw an SVG instead")
    parser.add_argument("--curves", type=path, metavar="OUT", help="by depth and by updates")
    args = parser.parse_args()
    files = [read_rows(file) for file in args.files]
    rows = pool(files)
    if args.arms is not None:
        rows = rows_of(rows, args.arms)
    if args.figure is not None:
        with atomic_write(args.figure) as part:
            part.write_text(draw(rows))
    elif args.curves is not None:
        draw_curves(rows, args.curves)
    else:
        print_tables(rows)
        times = read_json(args.files[0]).get("times")
        if times is not None:  # measured apart from the training, on another machine
            chosen = times["rows"]
            if args.arms is not None:
                chosen = [row for row in chosen if row["arm"] in args.arms]
            print_times(chosen)


if __name__ == "__main__":
    run_command(main)
