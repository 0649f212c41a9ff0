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

from experiments import recipes, report, run, scores
from llama import load_model
from moa import Drafter
from plumbing.errors import run_command
from train import make_drafter

RESULTS = ROOT / "experiments/results"
FILES = sorted(path.stem for path in RESULTS.glob("*.json"))
# Comparisons early in training, and three others: the page only tells what came out.
EARLY = {name for name in FILES if name.endswith("_early")}
TOLD = (EARLY - {"text_early"}) | {"staircase", "text"}
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
    printed = capsys.readouterr().out.split("\n")
    rows = [line for line in (RESULTS / "README.md").read_text().split("\n") if " ± " in line]
    for row in rows:
        assert not row.startswith("|") or row in printed


@pytest.mark.parametrize("name", sorted(TOLD))
def test_the_page_names_each_results_file_that_it_does_not_show(name):
    text = " ".join((RESULTS / "README.md").read_text().split())
    told = "files that end in `_early`" if name.endswith("_early") else f"{name}.json"
    assert told in text


def test_the_page_of_the_default_target_names_each_of_its_results_files():
    page = (RESULTS / "smollm2/README.md").read_text()
    for path in (RESULTS / "smollm2").glob("*.json"):
        assert f"`{path.name}`" in page


def speedups(name: str, method: str) -> list[str]:
    """Return the speed-up of a method for all prompts and then for each kind, as the page of the
    default target prints them."""
    rows = json.loads((RESULTS / f"smollm2/{name}.json").read_text())["rows"]
    values = {row["category"]: f"{row['speedup']:.2f}" for row in rows if row["method"] == method}
    return [values.pop("overall"), *values.values()]


def test_the_page_of_the_default_target_has_the_speed_ups_of_its_benchmark():
    page = (RESULTS / "smollm2/README.md").read_text()
    benchmarks = {
        "bfloat16: trees": speedups("local_bfloat16", "tree"),
        "bfloat16: trees with lookup": speedups("local_bfloat16", "tree+lookup"),
        "float32: trees": speedups("local_float32", "tree"),
        "float32: trees with lookup": speedups("local_float32", "tree+lookup"),
        "the benchmark's, 128 tokens": speedups("local", "tree"),
    }
    for name, values in benchmarks.items():
        assert f"| {name} | {' | '.join(values)} |\n" in page


def test_the_page_of_the_default_target_has_the_speeds_of_batches():
    page = (RESULTS / "smollm2/README.md").read_text()
    lines: dict[int, list[str]] = {}
    for row in json.loads((RESULTS / "smollm2/batch.json").read_text())["rows"]:
        conversations = min(row["batch"], 12)  # the benchmark has no more
        cells = lines.setdefault(conversations, [str(conversations)])
        cells.append(f"{row['tokens_per_second']:.1f}")
        if row["method"] == "chain":
            cells.append(f"{row['speedup']:.2f}")
    for cells in lines.values():
        assert f"| {' | '.join(cells)} |\n" in page


def test_the_page_of_the_default_target_has_the_speeds_on_each_network():
    page = (RESULTS / "smollm2/README.md").read_text()
    result = json.loads((RESULTS / "smollm2/remote.json").read_text())
    rows = {row["method"]: row for row in result["rows"] if row["category"] == "overall"}
    for network in ("wan", "5g", "4g"):
        speed = rows[f"api:{network}"]["tokens_per_second"]
        drafts = rows[f"remote:{network}"]["speedup"]
        lookup = rows[f"remote+lookup:{network}"]["speedup"]
        line, = [line for line in page.split("\n") if line.startswith(f"| `{network}`")]
        assert line.endswith(f"| {speed:.1f} | {drafts:.2f} | {lookup:.2f} |")


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
        drafter = make_drafter(target, None, None, recipe.sizes(), seed=0, kind=recipe.drafter.kind)
        counts.append(sum(parameter.numel() for parameter in drafter.parameters()))
    assert max(counts) <= 1.01 * min(counts)


# --- Two drafters that are trained otherwise ---


def features(drafter: Drafter, tokens: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """What it predicts at eight positions, with runs of four after a prompt of two, (T, E)."""
    return drafter.features(tokens, kv, torch.tensor([[0, 1, 1, 1, 1, 1, 5, 5]]))[0]


def test_the_last_layer_drafter_sees_no_other_layer():
    drafter = new_drafter(new_target(16), kind=recipes.LastLayerDrafter)
    tokens = torch.arange(8).unsqueeze(0)
    kv = torch.randn(1, 8, 4, 16)  # four layers
    other = torch.randn_like(kv)
    other[:, :, -1] = kv[:, :, -1]
    torch.testing.assert_close(features(drafter, tokens, kv), features(drafter, tokens, other))
    other[:, :, -1] += 1
    assert not torch.allclose(features(drafter, tokens, kv), features(drafter, tokens, other))


def test_the_staircase_drafter_sees_its_own_run_first_and_in_evaluations_all_text():
    drafter = new_drafter(new_target(16), kind=recipes.StaircaseDrafter)
    tokens = torch.arange(8).unsqueeze(0)
    kv = torch.randn(1, 8, 4, 16)
    other = tokens.clone()
    other[0, 0] = 15  # in the prompt
    alone = features(drafter, tokens, kv)[2:]
    torch.testing.assert_close(features(drafter, other, kv)[2:], alone)
    with torch.no_grad():
        whole = features(drafter, tokens, kv)[2:]
        assert not torch.allclose(features(drafter, other, kv)[2:], whole)
    drafter.passes = recipes.StaircaseDrafter.updates // 2
    torch.testing.assert_close(features(drafter, tokens, kv)[2:], whole)


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


@pytest.mark.parametrize("name", ["n-1-quarter", "staircase-quarter", "eagle-quarter"])
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
