"""Claims about results/: its tables are those of its files, and its files are complete."""
import importlib.util
import json
from collections import Counter

import pytest
from conftest import ROOT

RESULTS = ROOT / "results"
FILES = sorted(path.stem for path in RESULTS.glob("*.json"))
# Comparisons early in training, and one of a single seed: the README only tells what came out.
EARLY = {name for name in FILES if name.endswith("_early")}
TOLD = (EARLY - {"text_early"}) | {"staircase", "text"}
PAGES = {name: RESULTS / "README.md" for name in FILES}
PAGES["network"] = RESULTS / "smollm2/README.md"  # the one that is about the default target


@pytest.fixture(scope="module")
def run():
    """results/run.py, which is no module of the repository."""
    spec = importlib.util.spec_from_file_location("run", RESULTS / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [name for name in FILES if name not in TOLD])
def test_a_page_shows_the_table_of_each_results_file(run, name, capsys):
    run.print_result(name)
    title, *tables = capsys.readouterr().out.strip().split("\n\n")
    assert title == name and tables
    for table in tables:
        assert table in PAGES[name].read_text()


@pytest.mark.parametrize("name", sorted(TOLD))
def test_the_readme_names_each_results_file_that_it_does_not_show(name):
    text = " ".join((RESULTS / "README.md").read_text().split())
    told = "files that end in `_early`" if name.endswith("_early") else f"{name}.json"
    assert told in text


@pytest.mark.parametrize("name", FILES)
def test_each_results_file_names_its_command_machine_and_date_and_has_the_seeds_it_says(run, name):
    result = json.loads((RESULTS / f"{name}.json").read_text())
    assert result["command"] == f"python results/run.py {name}"
    assert result["machine"] and result["date"]
    seeds = Counter(row["seed"] for row in result["rows"])
    assert len(seeds) == (1 if name == "text" else 3)
    assert len(set(seeds.values())) == 1


def test_drafters_that_are_compared_have_the_same_number_of_parameters_within_a_hundredth():
    for name in FILES:
        rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        counts = [row["parameters"] for row in rows if "parameters" in row]
        assert not counts or max(counts) <= 1.01 * min(counts)


def test_the_page_of_the_default_target_names_each_of_its_results_files():
    page = (RESULTS / "smollm2/README.md").read_text()
    for path in (RESULTS / "smollm2").glob("*.json"):
        assert f"`{path.name}`" in page


def test_every_drafter_of_an_experiment_has_flags_that_train_py_knows(run, monkeypatch):
    names = list(run.DRAFTERS)
    for experiment in run.EXPERIMENTS.values():
        names += experiment.drafters
    for name in names:
        monkeypatch.setattr("sys.argv", ["train.py", *run.training_flags(name, seed=1)])
        args = run.train.parse_arguments()
        assert (args.seed, args.out) == (1, f"runs/{name}-1")
