"""Makes the results of experiments/results again, from nothing.

    python -m experiments.run                       # all that do not measure time: half a day
    python -m experiments.run parts on_policy       # only these
    python -m experiments.run cost network          # these measure time: on an idle machine

An experiment compares drafters of the toy target (`network` compares networks). Each drafter is
trained by its recipe (experiments/recipes.py) with three seeds, and scored (experiments/scores.py).
As many are trained at a time as the machine has cores, each in a process of its own. As soon as
all drafters of an experiment are scored, it is written to experiments/results/NAME.json, and
experiments/report.py prints its tables.

An interrupted run goes on with the same command. The scores of a drafter lie in
runs/DRAFTER-SEED/scores.json, with its recipe. As long as the recipe is the same, the drafter is
not trained again: delete the file after a change of the code. Drafters that were being trained, and
everything that measures time, begin again.
"""
import itertools
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr
from datetime import date
from pathlib import Path

import torch

from app.answers import Alone
from app.loading import load_drafter, load_model
from app.packed import pack_models
from app.training import train_drafter
from experiments.ablations import LIMITS, WithAblation
from experiments.bench import Contender, bench_prompts, summarize
from experiments.prompts import read_prompt_file
from experiments.recipes import (
    EXPERIMENTS,
    SEEDS,
    SEQ_LEN,
    TIMED,
    find_recipe,
    jobs_of,
)
from experiments.report import FIGURES, RESULTS, print_experiment, save_figure
from experiments.scores import ANSWER_TOKENS, PROMPT_COUNT, PROMPTS, TEST, TOY, score
from llama import GenerationConfig
from moa import Drafter
from plumbing.errors import run_command
from plumbing.files import atomic_write, read_json
from plumbing.flags import Parser
from plumbing.tokenizer import load_tokenizer

RUNS = Path("runs")
FEW_PROMPTS = RUNS / "few.jsonl"  # sixteen of PROMPTS, for what takes longer
LATENCIES = ("5ms", "21ms", "50ms")  # one way
PACKET_LOSSES = ("0%", "1%", "5%")


# --- What is noted beside each figure ---


def machine() -> str:
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():  # Linux: it knows the model
        models = re.findall("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
        processor = models[0] if models else processor
    return (
        f"{os.cpu_count()} cores, {processor}, {platform.system()}; "
        f"CPython {platform.python_version()}, torch {torch.__version__}"
    )


def commit() -> str:
    """Return the commit of the code, with "-dirty" if a script was changed since. (Results, which
    are written meanwhile, do not count.) Empty outside a clone, or without git."""
    if shutil.which("git") is None:
        return ""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py")
    return git("describe", "--always") + ("-dirty" if changed else "")


def circumstances(code: str) -> dict:
    """Return where, when and with which code (its commit) something is measured."""
    return {"machine": machine(), "date": date.today().isoformat(), "commit": code}


def write_json(path: Path, content: dict) -> None:
    with atomic_write(path) as part:
        part.write_text(json.dumps(content, indent=1) + "\n")


def write_result(experiment: str, rows: list[dict]) -> None:
    result = {
        "command": f"python -m experiments.run {experiment}",
        "machine": " and ".join(sorted({row["machine"] for row in rows})),
        "date": max(row["date"] for row in rows),
        "rows": rows,
    }
    write_json(RESULTS / f"{experiment}.json", result)


# --- The toy target, and texts ---


def run_module(name: str, *arguments: str) -> str:
    """Run a program of experiments in a process of its own. Returns what it prints."""
    command = [sys.executable, "-m", f"experiments.{name}", *arguments]
    print("python", *command[1:], flush=True)
    # (sys.stderr is the log of a drafter while that is trained: see `train_and_score`.)
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
    )
    return done.stdout


def copy_lines(source: Path, count: int, destination: Path) -> None:
    with source.open(encoding="utf-8") as lines:
        destination.write_text("".join(itertools.islice(lines, count)), encoding="utf-8")


def make_target_and_texts() -> None:
    """Run the commands of weights/README.md. Where one has been run, it ends at once."""
    run_module("toy", str(TOY), "--dtype", "bfloat16", "--resume")
    functions = TOY / "functions.jsonl"
    held_out = TOY / "held_out.jsonl"
    for out, count, questions in ((RUNS / "own.jsonl", 4000, functions), (TEST, 32, held_out)):
        run_module(
            "synthesize", str(count), "--out", str(out), "--questions", str(questions),
            "--model", str(TOY), "--device", "cpu", "--seq-len", str(SEQ_LEN),
            "--dtype", "bfloat16", "--batch-size", "64",
        )
    copy_lines(functions, 4000, RUNS / "others.jsonl")
    # Those answers that ended first, which are shorter ones.
    copy_lines(RUNS / "own.jsonl", 250, RUNS / "own-250.jsonl")
    copy_lines(held_out, PROMPT_COUNT, PROMPTS)
    copy_lines(held_out, 16, FEW_PROMPTS)


# --- Training and scoring ---


def folder_of(name: str, seed: int) -> Path:
    return RUNS / f"{name}-{seed}"


def is_done(name: str, seed: int) -> bool:
    """Return whether a drafter is scored, and by the present recipe."""
    path = folder_of(name, seed) / "scores.json"
    recipe, updates = find_recipe(name)
    return path.exists() and read_json(path).get("recipe") == recipe.describe(updates, seed)


def train_and_score(name: str, seed: int, code: str) -> None:
    """Train a drafter and write its scores: the whole work of a process."""
    torch.set_num_threads(1)  # as several processes run at a time
    recipe, updates = find_recipe(name)
    folder = folder_of(name, seed)
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted or other training has left
    with open(f"{folder}.log", "w") as log, redirect_stderr(log):
        train_drafter(
            str(TOY), [str(RUNS / f"{recipe.text}.jsonl")], folder,
            recipe.training(updates, seed), recipe.sizes(), kind=recipe.drafter.kind,
        )
        target = load_model(TOY)
        drafter = load_drafter(folder, target, recipe.drafter.kind)
        scores = score(target, drafter, recipe.drafter)
        if recipe.judged_offline:
            scores |= score_offline(folder)
    row = {
        "drafter": name,
        "seed": seed,
        "prompts": PROMPT_COUNT,
        "recipe": recipe.describe(updates, seed),
    }
    write_json(folder / "scores.json", row | circumstances(code) | scores)


def score_offline(folder: Path) -> dict:
    """Judge what a drafter writes alone, after the network has gone down."""
    rows = bench_remote(FEW_PROMPTS, "--model", str(TOY), "--drafter", str(folder),
                        "--device", "cpu", "--max-new-tokens", str(ANSWER_TOKENS),
                        "--latency", "0ms")
    offline = rows["disconnected:link"]
    return {
        "offline_agreement": offline["agreement"],
        "offline_perplexity": offline["perplexity"],
    }


def bench_remote(prompts: Path, *flags: str) -> dict[str, dict]:
    """Run the benchmark with a server. Returns a row for each method, of all prompts together."""
    # (In float32, so that figures of different processors can be compared.)
    printed = run_module(
        "bench", str(prompts), "--remote", "--json", "--dtype", "float32", *flags
    )
    return overall_rows(json.loads(printed)["rows"])


def overall_rows(rows: list[dict]) -> dict[str, dict]:
    return {row["method"]: row for row in rows if row["category"] == "overall"}


def train_drafters(experiments: list[str], code: str) -> None:
    """Train and score the drafters of experiments, as many at a time as there are cores. An
    experiment is written as soon as its own are scored, while others still train."""
    # (spawn: a fork would inherit PyTorch's threads, which it cannot use.) After Ctrl-C, or if a
    # drafter fails, the end of the `with` ends all processes.
    with multiprocessing.get_context("spawn").Pool(maxtasksperchild=1) as pool:
        results = {}
        for experiment in experiments:
            for job in jobs_of(experiment):
                if job not in results and not is_done(*job):  # some are in several experiments
                    results[job] = pool.apply_async(train_and_score, (*job, code))
        for experiment in experiments:
            for job in jobs_of(experiment):
                if job in results:
                    results[job].get()
                    print("scored", *job, flush=True)
            if experiment in EXPERIMENTS:
                write_experiment(experiment)


def write_experiment(experiment: str) -> None:
    rows = [read_json(folder_of(*job) / "scores.json") for job in jobs_of(experiment)]
    write_result(experiment, rows)
    if experiment in FIGURES:
        save_figure(experiment)


# --- What is timed: on an idle machine ---


def measure_cost(experiment: str, code: str) -> None:
    """Time drafters of three seeds: those of a seed in turn, within the same run."""
    rows = []
    for seed in SEEDS:
        for row in time_drafters(TIMED[experiment], seed):
            milliseconds = 1000 * row["new_tokens"] / row["tokens_per_second"]
            row["ms_a_cycle"] = milliseconds / row["target_calls"]
            row["ms_a_draft"] = row["draft_share"] * row["ms_a_cycle"]
            if experiment == "cost":
                row["trained"] = trained_speed(row, seed)
            rows.append({"seed": seed} | row | circumstances(code))
    write_result(experiment, rows)


def time_drafters(names: list[str], seed: int) -> list[dict]:
    """Return a row of the target alone, and of chains and trees of each drafter."""
    target = load_model(TOY)
    tokenizer = load_tokenizer(TOY)
    drafters: dict[str, Drafter] = {}
    for name in names:
        recipe, _ = find_recipe(name)
        drafters[name] = load_drafter(folder_of(name, seed), target, recipe.drafter.kind)
    target = pack_models(target, list(drafters.values()))
    contenders = {"target": Contender(Alone(target))}
    for name, drafter in drafters.items():
        recipe, _ = find_recipe(name)
        for kind, limits in LIMITS.items():
            method = WithAblation(target, drafter, limits, recipe.drafter)
            contenders[f"{kind} {name}"] = Contender(method)
    config = GenerationConfig(ANSWER_TOKENS, stop_ids=frozenset(tokenizer.stop_ids))
    context = target.config.max_position_embeddings
    turns = bench_prompts(tokenizer, context, contenders, read_prompt_file(FEW_PROMPTS), config)
    rows = summarize(target, contenders, list(turns), config)
    return list(overall_rows(rows).values())


def trained_speed(row: dict, seed: int) -> dict:
    """Return how fast a drafter would be after the whole training: with the acceptance length that
    it has in parts.json, at the cost of a cycle that was measured here. (A cycle that accepts more
    costs a little more, for LSA or for reading what was verified: that is neglected.)"""
    method, _, drafter = row["method"].partition(" ")  # "chain", "full-eighth"
    if not drafter:
        return {"acceptance_length": 1.0, "speedup": 1.0}  # the target alone
    for one in read_json(RESULTS / "parts.json")["rows"]:
        if (one["drafter"], one["seed"]) == (drafter.removesuffix("-eighth"), seed):
            length = one[method]
    return {
        "acceptance_length": length,
        "speedup": row["speedup"] * length / row["acceptance_length"],
    }


def measure_network(code: str) -> None:
    """Measure the default target three times over all networks, in turn."""
    prompts = RUNS / "three.jsonl"
    lines = (Path(__file__).parent / "prompts.jsonl").read_text().splitlines(keepends=True)
    prompts.write_text("".join(lines[::4]))
    rows = []
    for run, latency, loss in itertools.product(SEEDS, LATENCIES, PACKET_LOSSES):
        methods = bench_remote(prompts, "--max-new-tokens", "24", "--seed", str(run),
                               "--latency", latency, "--loss", loss)
        # The run's number is its seed, as in the other files.
        network = {"seed": run, "latency": latency, "loss": loss}
        rows.append(network | methods | circumstances(code))
    write_result("network", rows)
    save_figure("network")


# --- The command line ---


def run_experiments(names: list[str]) -> None:
    code = commit()  # now: what is committed later is not what runs here
    RUNS.mkdir(exist_ok=True)
    if names != ["network"]:  # which is of the default target
        make_target_and_texts()
    train_drafters(names, code)
    for name in names:
        if name == "network":
            measure_network(code)
        elif name in TIMED:
            measure_cost(name, code)
    for name in names:
        print_experiment(name)


def main() -> None:
    parser = Parser(
        prog="python -m experiments.run",
        description="Make the results of experiments/results again, from nothing.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="an experiment; default: all that do not measure time")
    args = parser.parse_args()
    known = [*EXPERIMENTS, *TIMED, "network"]
    for name in args.names:
        if name not in known:
            parser.error(f"no experiment {name}: {', '.join(known)}")
    run_experiments(args.names or list(EXPERIMENTS))


if __name__ == "__main__":
    run_command(main)
