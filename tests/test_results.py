"""Claims about the pages of results: they show what the files say."""
import functools
import json
import re
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch
from conftest import ROOT

from experiments import report
from experiments.arms import ARMS, new_drafter_of
from llama import Config, Llama
from moa import Drafter, default_config

RESULTS = ROOT / "experiments/results"
SMOLLM2 = RESULTS / "smollm2"
PAGE = (RESULTS / "README.md").read_text()
FURTHER = (RESULTS / "further.md").read_text()
FIGURES = (RESULTS / "figures.md").read_text()
COMPARING = (ROOT / "experiments/comparing.md").read_text()
FRONT = (ROOT / "README.md").read_text()
EXPERIMENTS = (ROOT / "experiments/README.md").read_text()
TARGETS = {
    "Llama-3-8B": Config(128256, 4096, 14336, 32, 32, 8, 128),
    "smollm2": Config(49152, 576, 1536, 30, 9, 3, 64),
    "toy": Config(2048, 128, 341, 8, 4, 2, 32),
}


@functools.cache
def read(path: Path) -> dict:
    return json.loads(path.read_text())


def names_its_origin(result: dict) -> bool:
    """Whether a file names its command, machine and date."""
    return all(result.get(key) for key in ("command", "machine", "date"))


# --- Comparisons: what experiments/compare.py has printed ---

CURVES = ["full", "full-unmasked", "full-one-run", "no-memory", "eagle-two-layers"]
PICTURED = [
    "full", "full-unmasked", "last-state", "last-layer", "n-1", "n-1-new", "full-larger",
    "n-1-scaled", "eagle", "eagle-two-layers", "hass-two-layers", "no-memory",
]
FILES = {  # what pages call them
    "toy": ("compare_toy.json", "compare_toy_fresh.json"),  # together
    "test prompts": ("compare_toy.json",),
    "fresh prompts": ("compare_toy_fresh.json",),
    "half the size": ("compare_toy_small.json",),
    "SmolLM2": ("compare_smollm2.json",),
    "earlier forms": ("forms.json",),
    "3200 updates": ("compare_toy_3200.json",),
    "12800 updates": ("compare_toy_12800.json",),
    "AdamW": ("compare_toy_adamw.json",),
    "new seeds": ("compare_toy_lsa.json",),
    "larger toy": ("compare_larger_toy.json",),
}
# Those that a page shows with all tables.
COMPARISONS = [
    "toy", "larger toy", "SmolLM2", "3200 updates", "12800 updates", "AdamW", "new seeds",
]
CONDITIONS = {  # columns of a table, each with trainings of its own
    "3200": "3200 updates",
    "6400": "toy",
    "12800": "12800 updates",
    "AdamW, 3200": "AdamW",
    "half size": "half the size",
}


@functools.cache
def rows_of_files(name: str) -> list[dict]:
    return report.pool([read(RESULTS / file)["rows"] for file in FILES[name]])


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.glob("*.json")))
def test_a_comparison_names_its_command_machine_and_date(name):
    assert names_its_origin(read(RESULTS / name))


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_page_shows_all_tables_of_a_comparison(name, capsys, monkeypatch):
    files = [str(RESULTS / file) for file in FILES[name]]
    monkeypatch.setattr(sys, "argv", ["report.py", *files])
    report.main()
    parts = capsys.readouterr().out.strip().split("\n\n")
    tables = [part for part in parts if part.startswith("|")]
    assert tables
    for table in tables:
        assert table in FIGURES


@pytest.mark.parametrize("name", ["toy", "larger toy"])
def test_a_picture_shows_the_main_arms(name):
    rows = report.rows_of(rows_of_files(name), PICTURED)
    picture = (RESULTS / f"compare_{name.replace(' ', '_')}.svg").read_text()
    assert picture == report.draw(rows)
    assert ">0</text>" in picture  # where the paper's drafter is


@pytest.mark.parametrize("name", ["test prompts", "SmolLM2"])
def test_the_curves_of_a_comparison_show_its_file(name, tmp_path):
    rows = rows_of_files(name)
    picture = RESULTS / "curves_smollm2.svg"
    if name == "test prompts":
        rows = report.rows_of(rows, CURVES)
        picture = RESULTS / "curves_toy.svg"
    report.draw_curves(rows, tmp_path / "curves.svg")
    assert picture.read_text() == (tmp_path / "curves.svg").read_text()


@functools.cache
def difference(name: str, kind: str, arm: str, base: str) -> str:
    """Return, as pages print it, by how many percent an arm's drafts exceed another's."""
    rows = report.rows_of(rows_of_files(name), [base, arm])
    last = max(row["updates"] for row in rows)
    [figure] = report.differences(rows, last, kind).values()
    return report.show(figure, "+z.1f")


KINDS = {name: kind for kind, name in report.KINDS.items()}


def table_rows(page: str) -> list[dict[str, str]]:
    """Return the rows of all tables of a page, as cells by heading."""
    rows = []
    for block in page.split("\n\n"):
        if block.startswith("|"):
            headings, _, *lines = [line[2:-2].split(" | ") for line in block.strip().split("\n")]
            rows += [dict(zip(headings, cells)) for cells in lines]
    return rows


def wanted_cells(row: dict[str, str]) -> dict[str, str]:
    """Return what a row has to say, by heading. Three kinds of tables compare arms:

        | toy: percent of `B` | chains of 8 | ...              and a row of `A`
        | toy, chains of 8: percent of `B` | 3200 | ...        the same under these conditions
        | arms | toy: chains of 8 | ...                        and a row that names "`A` over `B`"
    """
    cells = {}
    first, *others = row
    of_base = re.fullmatch(r"(.+): percent of `(.+)`", first)
    pair = re.search(r"`([\w. -]+)` over `([\w. -]+)`", " ".join(row.values()))
    for heading in others:
        if row[heading] == "–":
            continue
        if of_base is not None:
            name, _, kind = of_base[1].partition(", ")
            arm = row[first].strip("`")
            if heading in CONDITIONS:
                cells[heading] = difference(CONDITIONS[heading], KINDS[kind], arm, of_base[2])
            elif heading in KINDS:
                cells[heading] = difference(name, KINDS[heading], arm, of_base[2])
        target, _, name = heading.partition(": ")
        if pair is not None and target in FILES and name in KINDS:
            cells[heading] = difference(target, KINDS[name], *pair.groups())
    return cells


@pytest.mark.parametrize("page, rows", [
    (PAGE, 30), (FURTHER, 10), (FIGURES, 24), (FRONT, 9), (EXPERIMENTS, 6), (COMPARING, 5),
], ids=["the results", "further results", "all figures", "the front page", "experiments", "comparing"])
def test_what_a_page_says_of_an_arm_over_another_is_what_their_prompts_give(page, rows):
    compared = 0
    for row in table_rows(page):
        cells = wanted_cells(row)
        assert cells == {heading: row[heading] for heading in cells}
        compared += bool(cells)
    assert compared >= rows


def test_the_share_of_lsa_is_what_the_page_says():
    """Of a drafter's parameters, with the projection of the memory; in percent, rounded."""

    def share(drafter: Drafter) -> int:
        parts = drafter.trained_parameters()
        lsa = sum(p.numel() for n, p in parts.items() if n.startswith(("layer_self", "Ekv2E")))
        return round(100 * lsa / sum(p.numel() for p in parts.values()))

    shares = {}
    with torch.device("meta"):
        for name, sizes in TARGETS.items():
            target = Llama(sizes)
            shares[name] = share(Drafter(target, default_config(target)))
    assert shares == {"Llama-3-8B": 14, "smollm2": 22, "toy": 38}
    with torch.device("meta"):
        target = Llama(TARGETS["toy"])
    compared = share(new_drafter_of(ARMS["full"], target, None, None, seed=0))
    assert compared == 15
    assert all(f"{percent}%" in COMPARING for percent in (*shares.values(), compared))


# --- The page of the default target ---


@pytest.fixture(scope="module")
def page() -> str:
    return (SMOLLM2 / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(SMOLLM2.glob("*.json")), ids=lambda path: path.stem)
def test_each_file_of_the_default_target_is_on_its_page_and_names_its_origin(path, page):
    assert f"`{path.name}`" in page
    assert names_its_origin(read(path))


def rows_of(name: str) -> list[dict]:
    return read(SMOLLM2 / f"{name}.json")["rows"]


def overall(name: str, **labels: str) -> dict[str, dict]:
    """Return the rows for all prompts together of a file of the default target, by method."""
    labels["category"] = "overall"
    rows = [row for row in rows_of(name) if labels.items() <= row.items()]
    methods = {row["method"]: row for row in rows}
    assert len(methods) == len(rows)
    return methods


def line_of(cells: list[str]) -> str:
    return f"\n| {' | '.join(cells)} |\n"


def speedup(row: dict) -> str:
    """Return a speed-up and its middle half of the turns, as pages print them."""
    low, high = row["speedup_quartiles"]
    return f"{row['speedup']:.2f} ({low:.2f} to {high:.2f})"


def test_the_speed_ups_of_the_benchmarks(page):
    methods = {"chain": "chains", "tree": "trees", "tree+lookup": "trees with lookup"}
    for dtype in ("bfloat16", "float32"):
        rows = overall(f"local_{dtype}")
        for method in ("tree", "tree+lookup"):
            assert f"| {dtype}: {methods[method]} | {speedup(rows[method])} |" in page
    for method, name in methods.items():
        assert f"| {name} | {speedup(overall('testsets')[method])} |" in page
        row = overall("sampled")[method]
        assert line_of([name, speedup(row), f"{row['acceptance_length']:.2f}"]) in page


def test_the_speeds_of_batches(page):
    lines: dict[int, list[str]] = {}
    for row, before in zip(rows_of("batch"), rows_of("batch_before"), strict=True):
        cells = lines.setdefault(row["batch"], [str(row["batch"])])
        cells.append(f"{row['tokens_per_second']:.1f}")
        if row["method"] == "chain":
            cells.append(f"{row['speedup']:.2f}, {before['speedup']:.2f}")
    for cells in lines.values():
        assert line_of(cells) in page


def test_the_speeds_on_each_network(page):
    rows = overall("remote")
    for network in ("wan", "5g", "4g"):
        speed = rows[f"api:{network}"]["tokens_per_second"]
        drafts = speedup(rows[f"remote:{network}"])
        lookup = speedup(rows[f"remote+lookup:{network}"])
        line, = [line for line in page.split("\n") if line.startswith(f"| `{network}`")]
        assert line.endswith(f"| {speed:.1f} | {drafts} | {lookup} |")


def mean_and_half_range(values: list[float]) -> str:
    return f"{fmean(values):.2f} ± {(max(values) - min(values)) / 2:.2f}"


def test_the_speeds_by_latency_and_loss(page):
    networks: dict[str, list[dict]] = {}
    for row in rows_of("network"):
        networks.setdefault(f"{row['latency']}, {row['loss']}", []).append(row)
    assert len(networks) == 9
    for name, rows in networks.items():
        assert len(rows) == 3
        cells = [name, mean_and_half_range([row["api:link"]["tokens_per_second"] for row in rows])]
        for method in ("remote:link", "remote+lookup:link"):
            cells.append(mean_and_half_range([row[method]["speedup"] for row in rows]))
        assert line_of(cells) in page


@pytest.mark.parametrize("name", ["gpu_h100", "gpu"])
def test_the_speeds_on_gpus(name, page):
    types = [overall(name, dtype=dtype) for dtype in ("float32", "bfloat16")]
    for method in ("target", "chain", "tree", "lookup", "tree+lookup"):
        cells = [method]
        for rows in types:
            row = rows[method]
            cells += [f"{row['tokens_per_second']:.0f}", f"{row['speedup']:.2f}"]
        cells.append(f"{row['identical']:.0%}")
        assert line_of(cells) in page


def test_the_speeds_on_a_xeon(page):
    rows = overall("local")
    section = page[page.index("## On a Xeon"):]
    for figure in (
        f"trees were {rows['tree']['speedup']:.2f} times",
        f"wrote {rows['target']['tokens_per_second']:.0f} tokens",
        f"with lookup {rows['tree+lookup']['speedup']:.2f} times",
        f"trees reached {overall('documents')['tree weights/smollm2']['speedup']:.2f}.",
    ):
        assert figure in " ".join(section.split())


def test_what_the_drafter_gets_right_with_parts_of_the_memory(page):
    rows = [row for row in rows_of("memory") if row["part"] == "visible memories"]
    assert len(rows) == 8
    for row in rows:
        cells = [f"{row['kl']:.2f}"]
        for key in ("first_choice_right", "at_depth_1", "at_depth_8"):
            cells.append(f"{row[key]:.0%}")
        assert f" | {' | '.join(cells)} |\n" in page
