"""The experiments of results/README.md that can be made again from nothing.

    python results/run.py                       # all that do not measure time: half a day
    python results/run.py parts on_policy       # these
    python results/run.py cost network          # these measure time: on an idle machine (cost
                                                # and cost_longest first train their drafters)
    python results/run.py --tables parts        # only prints the tables of what is written

An experiment compares drafters (`network`: networks). Each is trained and scored by itself, as many
at a time as there are cores, with the flags of DRAFTERS and three seeds (in `text`, one). An
experiment is written to its results/NAME.json as soon as all of its drafters are scored, some with
a figure. Each row says when, where, and with which commit it was scored. (The files that are
shipped are mostly of earlier code, which noted date and machine once.)

How it runs:

    main
      run_experiments
        make_target_and_texts       train.py --pretrain and --synthesize, in processes of their own
        train_drafters              a pool with a thread for each core. For each drafter and seed:
          run_job                     a process: python results/run.py --one DRAFTER SEED
            train_and_score             train.py, then score, into runs/DRAFTER-SEED/scores.json
        measure_cost, measure_network   what is timed: alone, when all drafters are trained
        print_result                the tables

After an interruption the same command goes on. runs/DRAFTER-SEED/scores.json holds the scores of a
drafter, and the flags it was trained with. As long as these are the same, it is not trained again:
delete the file after a change of the code. What measures time, and drafters that were under way,
begin again.
"""
import argparse
import io
import itertools
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

import numpy as np
import torch

RESULTS = Path(__file__).parent
ROOT = RESULTS.parent
sys.path.insert(0, str(ROOT))

import speculate  # noqa: E402
import train  # noqa: E402
from llama import (  # noqa: E402
    GenerationConfig,
    Llama,
    Sampling,
    atomic_write,
    causal_mask,
    generate,
    load_model,
    load_tokenizer,
)
from moa import Draft, Drafter, TreeConfig, load_drafter, start_drafting  # noqa: E402

RUNS = ROOT / "runs"
TOY = "runs/toy"
ON_TOY = "--model", TOY, "--device", "cpu"
OWN = "runs/own.jsonl"  # written by this target, to train on
TEST = "runs/test.jsonl"
SEEDS = (0, 1, 2)
UPDATES = 6400  # ten minutes on a fast core, twenty on a slow one
TRAINING = [  # what all drafters have in common (the losses are train.py's defaults, the paper's)
    *ON_TOY, "--seq-len", "512",
    "--batch-size", "2", "--micro-batch-size", "2", "--eval-every", "400", "--save-every", "1000",
    "--optimizer", "muon", "--lr", "4e-3", "--schedule", "cosine", "--warmup", "20",
]
# All have 0.37 million parameters, within a hundredth. So:
WIDER = "--mlp", "352"  # without LSA: the MLPs of SA and CA are wider by its parameters
WIDEST = "--mlp", "768"  # without SA, too: the MLP of the one layer is wider still
DRAFTERS = {  # the flags of each, besides those in common
    "full": [],
    "no-lsa": ["--no-lsa", *WIDER],
    "no-ca": ["--no-ca"],
    "neither": ["--no-lsa", "--no-ca", *WIDER],
    "eagle": ["--no-lsa", "--no-ca", "--no-sa", *WIDEST],
    "last-layer": [],  # + remember_last_layer
    "staircase": [],  # + add_staircase
    "run-1": ["--run-length", "1", "1"],
    "run-2-8": ["--run-length", "2", "8"],
    "run-unbounded": ["--run-length", "100000", "100000"],
    "n-1": ["--tli", "1"],
    "n-2": ["--tli", "2"],
    "n-4": ["--tli", "4"],
    "kl-only": ["--feature-weight", "0"],
    "smooth-l1-only": ["--kl-weight", "0"],
    "others-text": [],
    "own-250": [],
}
TEXTS = {"others-text": "runs/others.jsonl", "own-250": "runs/own-250.jsonl"}  # all others: OWN
# A name that ends in "-quarter" is a drafter in a run of its own, of so many updates: at its end
# the learning rate is 0.
LENGTHS = {
    "eighth": UPDATES // 8,
    "quarter": UPDATES // 4,
    "half": UPDATES // 2,
    "double": UPDATES * 2,
}
OFFLINE = {"full", "n-1", "n-2", "n-4"}  # also judged by what they write alone: `score_offline`
PROMPT_COUNT = 64  # to measure acceptance on
FEW_PROMPTS = 16  # of them, for what takes longer
CHAIN_LENGTH = 4
TREE = TreeConfig(depth=6, top_k=3, total_tokens=16)  # of EAGLE-2's kind; the paper has 60 tokens
ANSWER_TOKENS = 96  # at most
COST_RATIOS = (0.02, 0.05, 0.1, 0.2)  # one step of the drafter / one pass of the target
LATENCIES = ("5ms", "21ms", "50ms")  # one way
PACKET_LOSSES = ("0%", "1%", "5%")

# Of each column: its heading, and the keys that lead to its value in a row of the JSON file. "depth
# 1" is row["drafting"]["depth_accuracy"][0].
ACCEPTANCE_COLUMNS = {
    "depth 1": ["drafting", "depth_accuracy", 0],
    "2": ["drafting", "depth_accuracy", 1],
    "4": ["drafting", "depth_accuracy", 3],
    "8": ["drafting", "depth_accuracy", 7],
    "chains": ["chain"],
    "trees": ["tree"],
    "sampled trees": ["sampled_tree"],
}
SPEEDUP_COLUMNS = {str(ratio): ["chain_speedup_at_cost_ratio", str(ratio)] for ratio in COST_RATIOS}
OFFLINE_COLUMNS = {
    "agreement": ["offline_agreement"],
    "perplexity": ["offline_perplexity"],
}
STATES_COLUMNS = {
    "predicted states": ["predicted"],
    "true states": ["true"],
    "points more": ["points_more"],
}
NETWORK_COLUMNS = {  # "link" is a network that --latency and --loss describe
    "api, tokens/s": ["api:link", "tokens_per_second"],
    "remote": ["remote:link", "speedup"],
    "remote+lookup": ["remote+lookup:link", "speedup"],
}
COST_COLUMNS = {
    "ms a draft": ["ms_a_draft"],
    "ms a cycle": ["ms_a_cycle"],
    "speed-up": ["speedup"],
    "acceptance length": ["acceptance_length"],
}
TRAINED_COLUMNS = {
    "ms a draft": ["ms_a_draft"],
    "ms a cycle": ["ms_a_cycle"],
    "acceptance length, trained": ["trained", "acceptance_length"],
    "speed-up, trained": ["trained", "speedup"],
}


@dataclass(frozen=True)
class Experiment:
    """What is compared, and how it is shown."""

    drafters: list[str]
    seeds: tuple[int, ...] = SEEDS
    tables: tuple[dict, ...] = (ACCEPTANCE_COLUMNS,)
    figure: bool = False
    measures_time: bool = False  # then the machine has to be idle


WITH_SPEEDUP = ACCEPTANCE_COLUMNS, SPEEDUP_COLUMNS
WITH_OFFLINE = ACCEPTANCE_COLUMNS, OFFLINE_COLUMNS
PARTS = ["full", "no-lsa", "no-ca", "neither", "eagle"]
EXPERIMENTS = {
    "on_policy": Experiment(["full", "run-1", "run-unbounded"], figure=True),
    "parts": Experiment(PARTS, tables=WITH_SPEEDUP, figure=True),
    "memory": Experiment(["full", "last-layer", "no-lsa"]),
    "reused_layers": Experiment(["full", "n-1", "n-2", "n-4"], tables=WITH_OFFLINE, figure=True),
    "losses": Experiment(["full", "kl-only", "smooth-l1-only"]),
    "text": Experiment(["full", "others-text", "own-250"], seeds=SEEDS[:1]),  # three took too long
    "longer": Experiment([
        "full-eighth", "full-quarter", "full-half", "full",
        "neither-eighth", "neither-quarter", "neither-half", "neither",
    ]),
    "longest": Experiment(["full", "full-double", "neither-double"]),
    "states": Experiment(
        ["neither-double", "neither-eighth", "eagle-quarter"], tables=(STATES_COLUMNS,),
    ),
    "on_policy_early": Experiment([
        "full-quarter", "run-2-8-quarter", "run-1-quarter", "run-unbounded-quarter",
    ]),
    "parts_early": Experiment([f"{name}-quarter" for name in PARTS]),
    "reused_layers_early": Experiment(
        ["full-quarter", "n-1-quarter", "n-2-quarter", "n-4-quarter"], tables=WITH_OFFLINE,
    ),
    "losses_early": Experiment(["full-quarter", "kl-only-quarter", "smooth-l1-only-quarter"]),
    "text_early": Experiment(["full-quarter", "others-text-quarter", "own-250-quarter"]),
    "staircase": Experiment(["full-quarter", "staircase-quarter"]),
    # What a cycle costs hardly depends on training: so a short one is enough.
    "cost": Experiment(
        [f"{name}-eighth" for name in PARTS], tables=(TRAINED_COLUMNS,), measures_time=True,
    ),
    "cost_longest": Experiment(
        ["full-double", "neither-double"], tables=(COST_COLUMNS,), measures_time=True,
    ),
    # Of the default target and its drafter:
    "network": Experiment([], tables=(NETWORK_COLUMNS,), measures_time=True),
}


def machine() -> str:
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():  # Linux: it knows the model
        models = re.findall("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
        processor = models[0] if models else processor
    return (
        f"{os.cpu_count()} cores, {processor}, {platform.system()}; "
        f"CPython {platform.python_version()}, torch {torch.__version__}"
    )


@cache  # `main` asks first: what is committed later is not what runs here
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


def circumstances() -> dict:
    """Return where, when and with which code something is measured."""
    return {"machine": machine(), "date": date.today().isoformat(), "commit": commit()}


def split_name(name: str) -> tuple[str, int]:
    """Return drafter and updates: of "eagle-quarter", "eagle" and a quarter of UPDATES."""
    drafter, _, share = name.rpartition("-")
    if share in LENGTHS:
        return drafter, LENGTHS[share]
    return name, UPDATES


# --- Drafters that no flag makes ---
#
# Each of these functions changes a class of moa.py for as long as the process runs, in which one
# drafter is trained and scored.


def remember_last_layer() -> None:
    """Let LSA see the keys and values of the target's last layer in place of every other's."""
    build_memory = Drafter.build_memory

    def build_from_last_layer(self, kv, hidden=None):
        return build_memory(self, kv[:, :, -1:].expand_as(kv), hidden)

    Drafter.build_memory = build_from_last_layer


def add_staircase() -> None:
    """Train as the authors' code does: in a share of sequences SA sees its own run only. The share
    falls from one to none over the first half of training.

    `distill` calls self_attend, then cross_attend. Only the latter knows the horizon, and with it
    the runs. So there SA runs again, under the narrower mask. (`distill` has no option for this, as
    it brings nothing: results/README.md.)
    """
    cross_attend = Drafter.cross_attend
    self_attend = Drafter.self_attend
    updates = LENGTHS["quarter"]  # in all: EXPERIMENTS trains it for so long only
    # Passes so far: one for each update, as --micro-batch-size is --batch-size. (And two that
    # `train.announce_cost` makes first: of 1600, no matter.)
    passes = 0
    draws = random.Random(0)

    def remember_tokens(self, tokens):
        self.tokens = tokens
        return self_attend(self, tokens)

    def attend_to_run(self, x, memory, horizon):
        nonlocal passes
        if torch.is_grad_enabled():  # in training; in an evaluation SA sees the whole text
            share = 1 - 2 * passes / updates
            passes += 1
            alone = torch.tensor([draws.random() < share for _ in horizon])  # (B)
            count = x.shape[1]
            positions = torch.arange(count)
            own_run = positions > horizon.unsqueeze(-1)  # (B, T, T)
            itself = torch.eye(count, dtype=torch.bool)
            seen = causal_mask(count, 0, "cpu") & (own_run | itself | ~alone[:, None, None])
            embedded = self.embed(self.tokens)
            x = self.self_attention(embedded, self.rotary[:, :count], seen.unsqueeze(1))
        return cross_attend(self, x, memory, horizon)

    Drafter.self_attend = remember_tokens
    Drafter.cross_attend = attend_to_run


CHANGES = {
    "last-layer": remember_last_layer,
    "staircase": add_staircase,
}


# --- One drafter ---


def run_here(script, *flags: str) -> str:
    """Run a script in this process, where CHANGES hold. Returns what it prints."""
    sys.argv = [script.__name__ + ".py", *flags]
    with redirect_stdout(io.StringIO()) as printed:
        script.main()
    return printed.getvalue()


def write_json(path: Path, content: dict) -> None:
    with atomic_write(path) as part:
        part.write_text(json.dumps(content, indent=1) + "\n")


def overall_rows(printed: str | bytes) -> list[dict]:
    """Return a benchmark's rows of all prompts together."""
    return [row for row in json.loads(printed)["rows"] if row["category"] == "overall"]


def training_flags(name: str, seed: int) -> list[str]:
    """Return the command line of train.py that makes a drafter."""
    drafter, updates = split_name(name)
    run = ["--updates", str(updates), "--seed", str(seed), "--out", f"runs/{name}-{seed}"]
    return ["--data", TEXTS.get(drafter, OWN), *TRAINING, *DRAFTERS[drafter], *run]


def training_command(name: str, seed: int) -> str:
    text = " ".join(["python train.py", *training_flags(name, seed)])
    drafter, _ = split_name(name)
    if drafter in CHANGES:
        text += f", changed as by: python results/run.py --one {name} {seed}"  # no flag does it
    return text


def train_and_score(name: str, seed: int) -> None:
    """Train one drafter, and score it."""
    drafter, _ = split_name(name)
    if drafter in CHANGES:
        CHANGES[drafter]()
    folder = Path(f"runs/{name}-{seed}")
    # What is left of other flags, or of a run that was interrupted. (No --resume: `add_staircase`
    # counts from 0.)
    shutil.rmtree(folder, ignore_errors=True)
    run_here(train, *training_flags(name, seed))
    scores = {
        "drafter": name,
        "seed": seed,
        "prompts": PROMPT_COUNT,
        "command": training_command(name, seed),
        **circumstances(),
        **score(name, folder),
    }
    write_json(folder / "scores.json", scores)


def score(name: str, folder: Path) -> dict:
    """Measure a drafter in all ways that the tables show, and its losses."""
    drafter, _ = split_name(name)
    target = load_model(TOY)
    trained = load_drafter(folder, target)
    scores = {"parameters": sum(parameter.numel() for parameter in trained.parameters())}
    evaluation = ["--evaluate", str(folder), "--data", TEST, "--seq-len", "512", *ON_TOY]
    # One pass over the text: the losses, and accuracies if all tokens before are the text's. Not
    # without CA, where it would read true memories of what drafting has only predicted.
    if "--no-ca" not in DRAFTERS[drafter]:
        scores |= json.loads(run_here(train, *evaluation))
    scores["drafting"] = json.loads(run_here(train, *evaluation, "--by-drafting"))
    if "--no-ca" in DRAFTERS[drafter]:
        scores["states"] = score_states(target, trained)
    chain = measure_acceptance(target, trained, TreeConfig(depth=CHAIN_LENGTH), temperature=0.0)
    scores["chain"] = chain
    scores["tree"] = measure_acceptance(target, trained, TREE, temperature=0.0)
    scores["sampled_tree"] = measure_acceptance(target, trained, TREE, temperature=1.0)
    # If a step of the drafter costs this share of a pass of the target, a cycle costs 1 + 4 shares.
    scores["chain_speedup_at_cost_ratio"] = {
        str(ratio): chain / (1 + CHAIN_LENGTH * ratio) for ratio in COST_RATIOS
    }
    if drafter in OFFLINE:
        scores |= score_offline(folder)
    return scores


@torch.no_grad()
def score_states(target: Llama, drafter: Drafter) -> dict:
    """Find what a drafter without CA loses by reading its own predictions while it drafts.

    Returns how often the token that it drafts at each depth is right after right ones: with states
    that it has "predicted", as always in a draft, and with the "true" ones of the target, which
    drafting does not have. Both at the same places of the test text.
    """
    data = train.Conversations([TEST], load_tokenizer(TOY), 512)
    right = {"predicted": [], "true": []}  # of each place, by depth
    for sequence in data.read_usable(range(len(data.places))):
        trained = train.loss_mask(sequence.answer)[:-train.DEPTHS]
        for start in trained.nonzero()[::train.DEPTHS, 0].tolist():
            text = sequence.tokens[:start + 1].tolist()  # its last token is the root
            chain = list(generate(target, text, GenerationConfig(train.DEPTHS)))  # the right one
            # Draft step by step, but go on with the right token each time.
            capacity = len(text) + train.DEPTHS
            state = start_drafting(drafter, capacity)
            verifier = speculate.LocalTarget(target, drafter, capacity, Sampling())
            state.append_verified(verifier.prefill(text[:-1]).memory)
            draft = Draft(text[-1])
            drafted = []
            for node, token in enumerate(chain):
                features = state.step(draft, [node])  # (1, E)
                drafted.append(drafter.head.logits(features).argmax().item())
                draft.add(token, parent=node, probability=1.0)
            right["predicted"].append([a == b for a, b in zip(drafted, chain)])
            # The same in one pass over the text and the chain, with all true states.
            tokens = torch.tensor([text + chain[:-1]])
            states = train.target_pass(target, tokens, N=0)
            memory = drafter.build_memory(states.kv, states.final)
            x = drafter.cross_attend(drafter.self_attend(tokens), memory, horizon=None)
            drafted = drafter.head.logits(x[0, start:]).argmax(-1).tolist()
            right["true"].append([a == b for a, b in zip(drafted, chain)])
    return {name: np.mean(places, axis=0).tolist() for name, places in right.items()}


def measure_acceptance(
    target: Llama, drafter: Drafter, tree: TreeConfig, temperature: float
) -> float:
    """Answer the prompts with drafts. Returns new tokens for each pass of the target."""
    tokenizer = load_tokenizer(TOY)
    method = speculate.Method(target, drafter, tree)
    stop_ids = frozenset(tokenizer.stop_ids)
    answers = []
    for seed, prompt in enumerate(speculate.read_prompts(RUNS / "prompts.jsonl")):
        ids = tokenizer.chat([{"role": "user", "content": prompt.turns[0]}])
        config = GenerationConfig(ANSWER_TOKENS, temperature, seed=seed, stop_ids=stop_ids)
        answers.append(method.answer(ids, config))
        if answers[-1].interrupted:  # by Ctrl-C, which `answer` takes for the end of an answer
            raise KeyboardInterrupt
    return speculate.acceptance_length(answers)


def score_offline(folder: Path) -> dict:
    """Judge what a drafter writes alone, after the network has gone down."""
    bench = [
        "--bench", "runs/few.jsonl", "--drafter", str(folder), "--json", *ON_TOY,
        "--max-new-tokens", str(ANSWER_TOKENS), "--remote", "--latency", "0ms",
    ]
    # (Not for a drafter of CHANGES: the server is another process, in which they do not hold.)
    rows = {row["method"]: row for row in overall_rows(run_here(speculate, *bench))}
    offline = rows["disconnected:link"]
    return {
        "offline_agreement": offline["agreement"],
        "offline_perplexity": offline["perplexity"],
    }


# --- Tables ---

RARE = 0.05  # a depth that fewer of the chains come to is left out


def value_at(row: dict, place: list) -> float | None:
    """Return a value of a row. None if it says nothing: the accuracy at a depth that few chains
    come to (see RARE)."""
    if place[:2] == ["drafting", "depth_accuracy"]:
        # Only chains that were right so far are counted. Their share is the product of the
        # accuracies before. (A list that ends before this depth ends with 0, and so it is 0.)
        if np.prod(row["drafting"]["depth_accuracy"][:place[2]]) < RARE:
            return None
    value = row
    for key in place:
        value = value[key]
    return value


def cell(values: list[float | None], sign: str = "", unit: str = "") -> str:
    """Return the mean over seeds and, if there are several, half of their range."""
    if None in values:
        return "–"
    digits = 1 if unit else 2
    text = f"{np.mean(values):{sign}.{digits}f}"
    if len(values) > 1:
        text += f" ± {(max(values) - min(values)) / 2:.{digits}f}"
    return text + unit


def compare_trees(rows: list[dict], first: list[dict]) -> str:
    """Return by how much greedy trees are longer than those of the first line's drafters: seed by
    seed, as both are in the order of seeds."""
    if rows is first:  # the first line's own
        return ""
    changes = [100 * (row["tree"] / one["tree"] - 1) for row, one in zip(rows, first)]
    return cell(changes, sign="+", unit=" %")


def print_table(columns: dict[str, list], groups: dict[str, list[dict]]) -> None:
    """Print a line for each group of rows, which differ in their seeds. Trees are also compared
    with those of the first line."""
    headings = list(columns)
    if "trees" in columns:
        headings.append("trees, relative")
    print("| |", " | ".join(headings), "|")
    print("|---" * (1 + len(headings)) + "|")
    first = next(iter(groups.values()))
    for name, rows in groups.items():
        cells = [cell([value_at(row, place) for row in rows]) for place in columns.values()]
        if "trees" in columns:
            cells.append(compare_trees(rows, first))
        print(f"| {name} |", " | ".join(cells), "|")


def rows_by_depth(rows: list[dict]) -> list[dict]:
    """Return a row for each drafter, seed and depth, of what `score_states` has found."""
    by_depth = []
    for row in rows:
        for depth in range(train.DEPTHS):
            predicted = row["states"]["predicted"][depth]
            true = row["states"]["true"][depth]
            by_depth.append({
                "drafter": row["drafter"],
                "depth": depth + 1,
                "predicted": predicted,
                "true": true,
                "points_more": 100 * (true - predicted),
            })
    return by_depth


def print_result(experiment: str) -> None:
    """Print the tables of an experiment, if it has been written."""
    path = RESULTS / f"{experiment}.json"
    if not path.exists():
        print(f"{experiment}: not written yet", file=sys.stderr)
        return
    rows = json.loads(path.read_text())["rows"]
    if experiment == "states":
        rows = rows_by_depth(rows)
    groups = {}
    for row in rows:
        if experiment == "network":
            name = f"{row['latency']}, {row['loss']}"
        elif experiment.startswith("cost"):
            name = row["method"].replace("runs/", "").removesuffix(f"-{row['seed']}")
        elif experiment == "states":
            name = f"{row['drafter']}, depth {row['depth']}"
        else:
            name = row["drafter"]
        groups.setdefault(name, []).append(row)
    print(f"\n{experiment}")
    for columns in EXPERIMENTS[experiment].tables:
        print()
        print_table(columns, groups)


# --- Texts, drafters and results ---


def run_script(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Run a script in a process of its own. options: those of `subprocess.run`."""
    print("python", *arguments, flush=True)
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, **options)


def copy_lines(source: Path, count: int, destination: Path) -> None:
    with source.open(encoding="utf-8") as lines:
        destination.write_text("".join(itertools.islice(lines, count)), encoding="utf-8")


def make_target_and_texts() -> None:
    """Make the target and the texts, with the commands of weights/README.md. Where one is done, its
    command ends at once."""
    run_script("train.py", "--pretrain", TOY, "--dtype", "bfloat16", "--resume")
    synthesize = ["train.py", "--model", TOY, "--seq-len", "512", "--dtype", "bfloat16",
                  "--batch-size", "64"]
    functions = f"{TOY}/functions.jsonl"
    held_out = f"{TOY}/held_out.jsonl"
    run_script(*synthesize, "--data", OWN, "--synthesize", "4000", "--questions", functions)
    run_script(*synthesize, "--data", TEST, "--synthesize", "32", "--questions", held_out)
    copy_lines(ROOT / functions, 4000, RUNS / "others.jsonl")
    copy_lines(ROOT / OWN, 250, RUNS / "own-250.jsonl")  # those that ended first: shorter ones
    copy_lines(ROOT / held_out, PROMPT_COUNT, RUNS / "prompts.jsonl")
    copy_lines(ROOT / held_out, FEW_PROMPTS, RUNS / "few.jsonl")


def run_job(name: str, seed: int) -> None:
    """Train and score a drafter in a process of its own, unless that is done."""
    path = RUNS / f"{name}-{seed}/scores.json"
    scores = json.loads(path.read_text()) if path.exists() else {}
    # (Scores of earlier code have no commit.)
    if scores.get("command") == training_command(name, seed) and "commit" in scores:
        return
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # as several run at a time
    log = RUNS / f"{name}-{seed}.log"
    try:
        with open(log, "w") as file:
            run_script("results/run.py", "--one", name, str(seed), env=one_thread, stderr=file)
    except subprocess.CalledProcessError:
        raise SystemExit(f"{name}-{seed} failed: {log} says why") from None


def jobs_of(experiment: str) -> list[tuple[str, int]]:
    """Return the drafters that an experiment needs, each with a seed."""
    return list(itertools.product(EXPERIMENTS[experiment].drafters, EXPERIMENTS[experiment].seeds))


def write_experiment(experiment: str) -> None:
    """Write the results of an experiment whose drafters are all scored, and a figure."""
    rows = []
    for name, seed in jobs_of(experiment):
        rows.append(json.loads((RUNS / f"{name}-{seed}/scores.json").read_text()))
    write_result(experiment, rows)
    if EXPERIMENTS[experiment].figure:
        draw_figure(experiment, rows)


def draw_figure(experiment: str, rows: list[dict]) -> None:
    """Draw accuracies by depth, means over seeds, and how many chains are right up to a depth."""
    names = list(dict.fromkeys(row["drafter"] for row in rows))
    accuracies = []
    shares = []
    for name in names:
        own = [row["drafting"]["depth_accuracy"] for row in rows if row["drafter"] == name]
        curves = np.zeros((len(own), train.DEPTHS))  # 0 where no chain comes so deep
        for curve, accuracy in zip(curves, own):
            curve[:len(accuracy)] = accuracy
        share = np.mean(np.cumprod(curves, axis=1), axis=0)  # of the chains
        common = 1 + np.sum(share[:-1] >= RARE)  # depths that enough chains come to
        accuracies.append(list(enumerate(np.mean(curves, axis=0)[:common], 1)))
        shares.append(list(enumerate([1.0, *share])))
    panels = [
        train.draw_panel("accuracy, as drafting meets it", "depth of the draft", accuracies),
        train.draw_panel("chains right up to here", "depth of the draft", shares),
    ]
    train.save_panels(RESULTS / f"{experiment}.svg", panels, names)


def write_result(experiment: str, rows: list[dict]) -> None:
    result = {
        "command": f"python results/run.py {experiment}",
        "machine": " and ".join(sorted({row["machine"] for row in rows})),
        "date": max(row["date"] for row in rows),
        "rows": rows,
    }
    write_json(RESULTS / f"{experiment}.json", result)


def train_drafters(names: list[str]) -> None:
    """Train and score the drafters of these experiments, as many at a time as there are cores. An
    experiment is written as soon as its own are scored, while others still train."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {}
        for experiment in names:
            for job in jobs_of(experiment):
                if job not in futures:  # some are in several experiments
                    futures[job] = pool.submit(run_job, *job)
        try:
            for experiment in names:
                for job in jobs_of(experiment):
                    futures[job].result()
                if not EXPERIMENTS[experiment].measures_time:
                    write_experiment(experiment)
        except BaseException as error:  # a drafter failed, or Ctrl-C
            print(f"{error!r}: ending as soon as those under way have ended", file=sys.stderr)
            pool.shutdown(cancel_futures=True)
            raise


# --- What is timed: on an idle machine ---


def measure_cost(experiment: str) -> None:
    """Time the drafters of three seeds, in turn within each run."""
    rows = []
    for seed in SEEDS:
        flags = [
            "--bench", "runs/few.jsonl", "--json", *ON_TOY,
            "--max-new-tokens", str(ANSWER_TOKENS), "--draft-length", str(CHAIN_LENGTH),
            "--depth", str(TREE.depth), "--top-k", str(TREE.top_k),
            "--total-tokens", str(TREE.total_tokens),
        ]
        for name in EXPERIMENTS[experiment].drafters:
            flags += ["--drafter", f"runs/{name}-{seed}"]
        for row in overall_rows(run_here(speculate, *flags)):
            milliseconds = 1000 * row["new_tokens"] / row["tokens_per_second"]
            row["ms_a_cycle"] = milliseconds / row["target_calls"]
            row["ms_a_draft"] = row["draft_share"] * row["ms_a_cycle"]
            if experiment == "cost":
                row["trained"] = trained_speed(row, seed)
            rows.append({"seed": seed} | row | circumstances())
    write_result(experiment, rows)


def trained_speed(row: dict, seed: int) -> dict:
    """Return how fast a drafter would be after the whole training: with the acceptance length that
    it has in parts.json, at the cost of a cycle that was measured here. (A cycle that accepts more
    costs a little more, for LSA or for reading what was verified: that is neglected.)"""
    method, _, folder = row["method"].partition(" ")  # "chain", "runs/full-eighth-0"
    if not folder:
        return {"acceptance_length": 1.0, "speedup": 1.0}  # the target alone
    name, _ = split_name(folder.removeprefix("runs/").removesuffix(f"-{seed}"))
    rows = json.loads((RESULTS / "parts.json").read_text())["rows"]
    (length,) = [r[method] for r in rows if (r["drafter"], r["seed"]) == (name, seed)]
    return {
        "acceptance_length": length,
        "speedup": row["speedup"] * length / row["acceptance_length"],
    }


def measure_network() -> None:
    """Measure the default target three times over all networks, in turn."""
    lines = (ROOT / "tests/prompts.jsonl").read_text().splitlines(keepends=True)
    (RUNS / "three.jsonl").write_text("".join(lines[::4]))
    rows = []
    for run, latency, loss in itertools.product(SEEDS, LATENCIES, PACKET_LOSSES):
        flags = ["--bench", "runs/three.jsonl", "--max-new-tokens", "24", "--json", "--remote"]
        flags += ["--latency", latency, "--loss", loss, "--seed", str(run)]
        # A process of its own, with which its server ends.
        printed = run_script("speculate.py", *flags, stdout=subprocess.PIPE).stdout
        methods = {row["method"]: row for row in overall_rows(printed)}
        # "seed", as in the other files: it is the run's number.
        rows.append({"seed": run, "latency": latency, "loss": loss} | methods | circumstances())
    write_result("network", rows)


# --- The command line ---


def run_experiments(names: list[str]) -> None:
    RUNS.mkdir(exist_ok=True)
    if names != ["network"]:  # which is of the default target
        make_target_and_texts()
    train_drafters(names)
    for name in names:
        if name == "network":
            measure_network()
        elif EXPERIMENTS[name].measures_time:
            measure_cost(name)
    for name in names:
        print_result(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiments", nargs="*", help="default: all that do not measure time")
    parser.add_argument("--one", nargs=2, metavar=("DRAFTER", "SEED"),
                        help="only train and score this drafter: what this script runs in turn")
    parser.add_argument("--tables", action="store_true", help="only print what is written")
    args = parser.parse_args()
    for name in args.experiments:
        if name not in EXPERIMENTS:
            parser.error(f"no experiment {name}: {', '.join(EXPERIMENTS)}")
    os.chdir(ROOT)
    commit()  # which remembers it
    if args.one:
        name, seed = args.one
        train_and_score(name, int(seed))
    elif args.tables:
        for name in args.experiments or EXPERIMENTS:
            print_result(name)
    else:
        untimed = [name for name in EXPERIMENTS if not EXPERIMENTS[name].measures_time]
        run_experiments(args.experiments or untimed)


if __name__ == "__main__":
    main()
