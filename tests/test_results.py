"""Claims about experiments/run.py and its results: the pages show what the files say, every drafter
can be trained and scored, and a run that was interrupted does not repeat what is done."""
import json
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from tiny_models import new_drafter, new_target

from app.loading import load_model
from app.training import make_drafter
from experiments import curves, recipes, report, run, scores
from plumbing.errors import run_command
from train import drafter_pass

RESULTS = ROOT / "experiments/results"
FILES = sorted(path.stem for path in RESULTS.glob("*.json"))
# Of comparisons early in training, and of others, the page only tells what came out.
EARLY = {name for name in FILES if name.endswith("_early")}
TOLD = (EARLY - {"text_early"}) | {"staircase", "text", "repeated"}
TOLD |= {"longer", "longest", "cost", "cost_longest"}
PAGES = {name: RESULTS / "README.md" for name in FILES}
PAGES["network"] = RESULTS / "smollm2/README.md"  # the one that is about the default target


# --- The pages ---


@pytest.mark.parametrize("name", [name for name in FILES if name not in TOLD])
def test_a_page_shows_the_table_of_each_results_file(name, capsys):
    report.print_experiment(name)
    tables = capsys.readouterr().out.strip().split("\n\n")[1:]  # after the experiment's name
    assert tables
    for table in tables:
        assert table in PAGES[name].read_text()


def test_each_figure_with_an_uncertainty_on_the_page_is_one_that_the_report_prints(capsys):
    for name in FILES:
        report.print_experiment(name)
    report.print_pairs()
    printed = capsys.readouterr().out.split("\n")
    rows = [line for line in (RESULTS / "README.md").read_text().split("\n") if " ± " in line]
    for row in rows:
        # The table of claims has words beside the figures that the report prints.
        assert not row.startswith("|") or any(figures(row) == figures(line) for line in printed)


def figures(row: str) -> list[str]:
    """Return the cells of a row of a table that have an uncertainty."""
    return [cell.strip() for cell in row.split("|") if " ± " in cell]


@pytest.mark.parametrize("name", sorted(TOLD))
def test_the_page_names_each_results_file_that_it_does_not_show(name):
    text = " ".join((RESULTS / "README.md").read_text().split())
    told = "files that end in `_early`" if name.endswith("_early") else f"{name}.json"
    assert told in text


SMOLLM2 = RESULTS / "smollm2"


def test_the_pages_of_the_default_target_name_each_of_its_results_files():
    pages = (SMOLLM2 / "README.md").read_text() + (SMOLLM2 / "parts.md").read_text()
    for path in SMOLLM2.glob("*.json"):
        assert f"`{path.name}`" in pages


def overall(name: str) -> dict[str, dict]:
    """Return the rows for all prompts together of a file of the default target, by method."""
    rows = json.loads((SMOLLM2 / f"{name}.json").read_text())["rows"]
    return {row["method"]: row for row in rows if row["category"] == "overall"}


def speedup(row: dict) -> str:
    """Return a speed-up and its middle half of the turns, as pages print them."""
    low, high = row["speedup_quartiles"]
    return f"{row['speedup']:.2f} ({low:.2f} to {high:.2f})"


def test_the_page_of_the_default_target_has_the_speed_ups_of_its_benchmarks():
    page = (SMOLLM2 / "README.md").read_text()
    methods = {"chain": "chains", "tree": "trees", "tree+lookup": "trees with lookup"}
    for dtype in ("bfloat16", "float32"):
        rows = overall(f"local_{dtype}")
        for method in ("tree", "tree+lookup"):
            assert f"| {dtype}: {methods[method]} | {speedup(rows[method])} |" in page
    for method, name in methods.items():
        assert f"| {name} | {speedup(overall('testsets')[method])} |" in page
        row = overall("sampled")[method]
        assert f"| {name} | {speedup(row)} | {row['acceptance_length']:.2f} |" in page


def test_the_page_of_the_default_target_has_the_speeds_of_batches():
    page = (SMOLLM2 / "README.md").read_text()
    latest = json.loads((SMOLLM2 / "batch.json").read_text())["rows"]
    earlier = json.loads((SMOLLM2 / "batch_before.json").read_text())["rows"]
    lines: dict[int, list[str]] = {}
    for row, before in zip(latest, earlier):
        cells = lines.setdefault(row["batch"], [str(row["batch"])])
        cells.append(f"{row['tokens_per_second']:.1f}")
        if row["method"] == "chain":
            cells.append(f"{row['speedup']:.2f}, {before['speedup']:.2f}")
    for cells in lines.values():
        assert f"| {' | '.join(cells)} |\n" in page


def test_the_page_of_the_default_target_has_the_speeds_on_each_network():
    page = (SMOLLM2 / "README.md").read_text()
    rows = overall("remote")
    for network in ("wan", "5g", "4g"):
        speed = rows[f"api:{network}"]["tokens_per_second"]
        drafts = speedup(rows[f"remote:{network}"])
        lookup = speedup(rows[f"remote+lookup:{network}"])
        line, = [line for line in page.split("\n") if line.startswith(f"| `{network}`")]
        assert line.endswith(f"| {speed:.1f} | {drafts} | {lookup} |")


def test_the_page_of_earlier_measurements_has_the_speeds_on_gpus():
    page = (SMOLLM2 / "parts.md").read_text()
    for name in ("gpu_h100", "gpu"):
        rows = json.loads((SMOLLM2 / f"{name}.json").read_text())["rows"]
        for method in ("target", "chain", "tree", "lookup", "tree+lookup"):
            cells = [method]
            for dtype in ("float32", "bfloat16"):
                row, = [
                    row for row in rows
                    if (row.get("category"), row.get("method"), row.get("dtype"))
                    == ("overall", method, dtype)
                ]
                cells += [f"{row['tokens_per_second']:.0f}", f"{row['speedup']:.2f}"]
            cells.append(f"{row['identical']:.0%}")
            assert f"| {' | '.join(cells)} |\n" in page


@pytest.mark.parametrize("name", report.FIGURES)
def test_a_figure_shows_its_results_file(name, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(report, "save_panels", lambda path, *parts: drawn.update({path: parts}))
    report.save_figure(name)
    (path, (panels, names)), = drawn.items()
    curves.save_panels(tmp_path / "figure.svg", panels, names)
    assert (tmp_path / "figure.svg").read_text() == path.read_text()


# --- The files ---


@pytest.mark.parametrize("name", FILES)
def test_each_results_file_names_its_command_machine_and_date_and_has_the_seeds_it_says(name):
    result = json.loads((RESULTS / f"{name}.json").read_text())
    before = f"python results/run.py {name}"  # up to commit 26e90ba
    assert result["command"] in (before, f"python -m experiments.run {name}")
    assert result["machine"] and result["date"]
    seeds = Counter(row["seed"] for row in result["rows"])
    assert len(seeds) == (1 if name in recipes.ONE_SEED else 3)
    assert len(set(seeds.values())) == 1


def test_a_results_file_has_the_drafters_of_its_experiment():
    for name, drafters in recipes.EXPERIMENTS.items():
        rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        assert {row["drafter"] for row in rows} == set(drafters)


def test_drafters_that_are_compared_have_the_same_number_of_parameters_within_a_hundredth():
    target = load_model("toy")
    counts = []
    for recipe in recipes.RECIPES.values():
        drafter = make_drafter(target, None, recipe.sizes(), seed=0, kind=recipe.drafter.kind)
        counts.append(sum(p.numel() for p in drafter.trained_parameters().values()))
    assert max(counts) <= 1.01 * min(counts)


def test_the_last_layer_drafter_sees_no_other_layer():
    drafter = new_drafter(new_target(16), kind=recipes.LastLayerDrafter)
    kv = torch.randn(1, 8, 4, 16)  # four layers
    other = torch.randn_like(kv)
    other[:, :, -1] = kv[:, :, -1]

    def features(kv: torch.Tensor) -> torch.Tensor:
        """What it predicts at eight positions."""
        horizon = torch.tensor([[0, 1, 1, 1, 1, 1, 5, 5]])
        return drafter_pass(drafter, torch.arange(8).unsqueeze(0), kv, horizon)[1]

    torch.testing.assert_close(features(kv), features(other))
    other[:, :, -1] += 1
    assert not torch.allclose(features(kv), features(other))


# --- Training and scoring ---


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """A folder with the shipped toy target and a few texts in runs/, where a whole training is two
    updates."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes, "UPDATES", 2)
    monkeypatch.setattr(recipes, "LENGTHS", {"quarter": 1})
    monkeypatch.setattr(scores, "ANSWER_TOKENS", 24)
    monkeypatch.setattr(run, "ANSWER_TOKENS", 24)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the processes that it starts
    folder = tmp_path / "runs"
    shutil.copytree(ROOT / "weights/toy/target", folder / "toy")
    lines = []
    for i in range(20):
        signature = f"def read_{i}(self, size):"
        source = f"{signature}\n    text = self.files[{i}].read(size)\n    return text.strip()\n"
        lines.append(json.dumps({"prompt": signature, "data": [signature, source]}) + "\n")
    (folder / "own.jsonl").write_text("".join(lines))
    (folder / "test.jsonl").write_text("".join(lines[:2]))
    (folder / "prompts.jsonl").write_text(lines[0])
    # The target's answer to this one is long enough for the network to go down in it.
    (folder / "few.jsonl").write_text('{"prompt": "def main(args=None):"}')
    return folder


@pytest.mark.parametrize("name", ["n-1-quarter", "eagle-quarter"])
def test_a_trained_drafter_has_all_scores_that_its_tables_show(runs, name):
    run.train_and_score(name, 0, "the commit")
    row = json.loads((runs / f"{name}-0/scores.json").read_text())
    assert row["commit"] == "the commit"
    for experiment, drafters in recipes.EXPERIMENTS.items():
        if name not in drafters:
            continue
        for columns in report.TABLES.get(experiment, [report.ACCEPTANCE]):
            table = report.make_table(columns, {name: [row]})
            assert table.count("\n") == 2 and name in table
    assert run.is_done(name, 0)


def test_a_drafter_is_trained_again_only_if_its_recipe_has_changed(runs, monkeypatch):
    assert not run.is_done("full", 0)
    recipe = recipes.RECIPES["full"]
    run.write_json(runs / "full-0/scores.json", {"recipe": recipe.describe(2, 0)})
    assert run.is_done("full", 0)
    monkeypatch.setitem(recipes.RECIPES, "full", replace(recipe, kl_weight=0.2))
    assert not run.is_done("full", 0)


def test_an_experiment_that_does_not_exist_is_refused_with_those_that_do(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run", "part"])
    with pytest.raises(SystemExit) as end:
        run_command(run.main)
    assert end.value.code == 2
    assert "no experiment part: on_policy, parts," in capsys.readouterr().err
