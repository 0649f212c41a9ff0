"""The benchmark: every prompt by every method, in turn.

Each method answers the same prompts with the same settings, and is compared with a *base*: with the
target alone or, where the target is on a server, with plain use of an API on the same network.

    target                      the target alone
    chain, tree                 drafts by the drafter; with several: "tree runs/a", "tree runs/b"
    lookup, tree+lookup         drafts copied from the text; where there is nothing to copy, a tree
    target (not packed)         only where that is faster, see `faster_unpacked`

    api:4g                      plain use of the server, over a network like 4G
    remote:4g, remote+lookup:4g drafts made here, verified on the server
    disconnected:4g             the same, until the network goes down after a quarter of the tokens

    python -m experiments.bench                            # on experiments/prompts.jsonl
    python -m experiments.bench --remote --network 4g      # the target on a server
    python -m experiments.bench spec_bench.jsonl --drafter runs/a runs/b

Next to a speed-up and an acceptance length stands its 95% interval, bootstrapped over prompts
(`experiments.intervals`): how far it may move with other prompts of the same kinds. It does not
cover what changes from run to run, such as a busy machine. --json adds what every prompt gave.

`bench_prompts` yields a turn at a time, so that what was measured survives Ctrl-C. `summarize`
makes a row of each category and method.
"""
from __future__ import annotations

import json
import math
import random
import signal
import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from timeit import repeat
from typing import Callable, Iterator, NamedTuple

if not __package__:  # run as a file: Python does not find the repository's root
    print("run this from the repository's root: python -m experiments.bench", file=sys.stderr)
    sys.exit(2)

import numpy as np
import torch
from tqdm import tqdm

from app.answers import (
    Alone,
    Generation,
    Method,
    OnServer,
    Origin,
    PlainApi,
    WithDrafts,
    acceptance_length,
    answer,
    tokens_per_second,
)
from app.client import Channel, add_link_arguments, link_of, open_channel
from app.loading import (
    Models,
    find_drafter,
    fingerprints,
    load_drafter,
    load_model,
    load_models,
    load_target,
    make_ready,
    read_drafter,
    read_sizes,
)
from app.packed import PackedRMSNorm
from app.server import start_server
from app.speculate_command import (
    OWN_SERVER,
    REMOTE_TREE,
    TREE,
    add_draft_arguments,
    choose_limits,
    tree_limits,
)
from experiments.copies import WithCopies
from experiments.intervals import bootstrap_interval
from experiments.prompts import Prompt, read_prompt_file
from experiments.tables import Column, print_rows
from llama import GenerationConfig, Llama, generate
from moa import Drafter, DraftLimits
from netsim import PROFILES
from plumbing.devices import DTYPES, choose_dtype
from plumbing.errors import InputError, run_command
from plumbing.flags import (
    Parser,
    add_generation_arguments,
    add_model_arguments,
    address,
    path,
    time_limit,
)
from plumbing.hub import resolve_path
from plumbing.prompts import answer_length
from plumbing.tokenizer import Tokenizer

# --- What is compared ---

CHAIN = DraftLimits(depth=6, min_confidence=0.2)  # tuned as TREE of app/speculate_command.py was


class Contender(NamedTuple):
    """A method that is measured."""

    method: Method
    base: str = "target"  # the name of what it is compared with


class Turn(NamedTuple):
    """A question that all contenders have answered."""

    category: str
    prompt: int  # which one of the file, counted from 0
    answers: dict[str, Generation]  # by the name of the contender


def local_contenders(
    target: Llama, drafters: dict[str, Drafter], chain: DraftLimits, tree: DraftLimits
) -> dict[str, Contender]:
    """Return what is compared on one machine. drafters: by name. Of several, chains and trees of
    each are compared, without lookup."""
    methods = {"target": Alone(target)}
    if len(drafters) > 1:
        for name, drafter in drafters.items():
            methods[f"chain {name}"] = WithDrafts(target, drafter, chain)
            methods[f"tree {name}"] = WithDrafts(target, drafter, tree)
    else:
        drafter = next(iter(drafters.values()))
        with_chains = WithDrafts(target, drafter, chain)
        with_trees = WithDrafts(target, drafter, tree)
        methods["chain"] = with_chains
        methods["tree"] = with_trees
        methods["lookup"] = WithCopies(target, chain)
        methods["tree+lookup"] = replace(with_trees, lookup=True)
    return {name: Contender(method) for name, method in methods.items()}


def remote_contenders(
    drafter: Drafter,
    limits: DraftLimits,
    channels: dict[str, Callable[..., Channel]],
    outage_after: int,
) -> dict[str, Contender]:
    """Return what is compared over networks.

    channels: by the network's name, what opens a channel for a prompt. outage_after: the number of
    tokens after which the network of "disconnected" goes down for good.
    """
    vocab_size = drafter.target.config.vocab_size
    contenders = {}
    for name, new_channel in channels.items():
        lost = partial(new_channel, outage_after=outage_after)
        with_drafts = OnServer(new_channel, drafter, limits)
        methods = {
            f"api:{name}": PlainApi(new_channel, vocab_size),
            f"remote:{name}": with_drafts,
            f"remote+lookup:{name}": replace(with_drafts, lookup=True),
            f"disconnected:{name}": OnServer(lost, drafter, limits),
        }
        for method_name, method in methods.items():
            contenders[method_name] = Contender(method, base=f"api:{name}")
    return contenders


# --- Measuring ---


def bench_prompts(
    tokenizer: Tokenizer,
    context: int,
    contenders: dict[str, Contender],
    prompts: list[Prompt],
    config: GenerationConfig,
) -> Iterator[Turn]:
    """Let all contenders answer every turn of every prompt. Yields each turn when it is done.

    context: the model's.
    """
    warm_up = Prompt("", ["Hello"])
    for _ in bench_prompt(tokenizer, context, contenders, warm_up, config, index=0):
        pass
    for index, prompt in enumerate(tqdm(prompts, unit=" prompts")):
        yield from bench_prompt(tokenizer, context, contenders, prompt, config, index)


def bench_prompt(
    tokenizer: Tokenizer,
    context: int,
    contenders: dict[str, Contender],
    prompt: Prompt,
    config: GenerationConfig,
    index: int,
) -> Iterator[Turn]:
    """Let all contenders answer every turn of one prompt. All get the same conversation: its
    earlier answers are the first contender's. index: the prompt's number, which is also the seed of
    the order in which they answer."""
    names = list(contenders)
    messages = []
    for question in prompt.turns:
        messages.append({"role": "user", "content": question})
        ids = tokenizer.chat(messages)
        try:
            count = answer_length(context, len(ids), config.max_new_tokens)
        except InputError as error:
            tqdm.write(f"{question[:40]!r} is left out: {error}", file=sys.stderr)
            return
        answers = {}
        # In a random order, so that a machine that slows down hurts all of them alike.
        for name in random.Random(index).sample(names, len(names)):
            method = contenders[name].method
            answers[name] = answer(method, ids, replace(config, max_new_tokens=count))
        yield Turn(prompt.category, index, answers)
        first = answers[names[0]]
        messages.append({"role": "assistant", "content": tokenizer.decode(first.tokens)})


# --- Rows ---

UNPACKED = "target (not packed)"  # a row of its own, see `faster_unpacked`
MIN_PROMPTS = 5  # an interval of fewer would promise more than it can keep


def summarize(
    target: Llama, contenders: dict[str, Contender], turns: list[Turn], config: GenerationConfig
) -> list[dict]:
    """Return a row of each category and contender and, with the category "overall", of all turns
    together. (If all turns are of one category, its rows would be the same as these.)"""
    groups: dict[str, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.category, []).append(turn)
    if len(groups) == 1:
        groups.clear()
    groups["overall"] = turns
    rows = []
    for category, group in groups.items():
        for name, contender in contenders.items():
            ours = [turn.answers[name] for turn in group]
            bases = [turn.answers[contender.base] for turn in group]
            row = {"category": category, "method": name}
            row |= summarize_costs(ours, bases)
            row |= summarize_intervals(
                measure_prompts(group, name), measure_prompts(group, contender.base)
            )
            if config.temperature == 0:  # only then the tokens have to be the same
                same = sum(g.tokens == base.tokens for g, base in zip(ours, bases))
                row["identical"] = same / len(group)
            if ours[0].network:
                row |= summarize_traffic(ours)
            unverified = sum(g.unverified for g in ours)
            if unverified > 0:
                row["unverified_tokens"] = unverified
                if config.temperature == 0:
                    row |= offline_quality(target, ours, bases)
            rows.append(row)
    return rows


def summarize_costs(ours: list[Generation], bases: list[Generation]) -> dict:
    """Return totals over the turns, and the quartiles of the speed-up over them."""
    calls = sum(g.target_calls for g in ours)
    speedups = []  # of each turn
    for generation, base in zip(ours, bases):
        speedups.append(tokens_per_second([generation]) / tokens_per_second([base]))
    quartiles = torch.tensor(speedups).quantile(torch.tensor([0.25, 0.75]))
    return {
        "tokens_per_second": tokens_per_second(ours),
        "speedup": tokens_per_second(ours) / tokens_per_second(bases),
        "speedup_quartiles": quartiles.tolist(),
        "acceptance_length": acceptance_length(ours),
        "target_calls": calls,
        "new_tokens": sum(len(g.tokens) for g in ours),
        "drafted_per_call": sum(g.drafted for g in ours) / max(1, calls),
        "draft_share": sum(g.draft_seconds for g in ours) / sum(g.seconds for g in ours),
    }


def measure_prompts(turns: list[Turn], method: str) -> list[dict]:
    """Return a row of each prompt: what a method gave, in all turns of the prompt together."""
    answers: dict[int, list[Generation]] = {}
    for turn in turns:
        answers.setdefault(turn.prompt, []).append(turn.answers[method])
    rows = []
    for prompt, ours in answers.items():
        rows.append({
            "prompt": prompt,
            "method": method,
            "new_tokens": sum(len(g.tokens) for g in ours),
            "target_calls": sum(g.target_calls for g in ours),
            "acceptance_length": acceptance_length(ours),
            "seconds": sum(g.seconds for g in ours),
        })
    return rows


def summarize_intervals(ours: list[dict], bases: list[dict]) -> dict:
    """Return the 95% intervals of the speed-up and of the acceptance length over prompts, from rows
    of `measure_prompts`: a method's, and its base's."""
    if len(ours) < MIN_PROMPTS:
        return {}
    # Prompts are drawn, not turns: the turns of a conversation are alike.
    new_tokens = column(ours, "new_tokens")
    seconds = column(ours, "seconds")
    base_tokens = column(bases, "new_tokens")
    base_seconds = column(bases, "seconds")
    calls = column(ours, "target_calls")
    lengths = column(ours, "acceptance_length")

    def speedup(p: np.ndarray) -> float:
        speed = new_tokens[p].sum() / seconds[p].sum()
        return speed / (base_tokens[p].sum() / base_seconds[p].sum())

    def mean_length(p: np.ndarray) -> float:
        return (lengths[p] * calls[p]).sum() / max(1, calls[p].sum())

    return {
        "speedup_interval": list(bootstrap_interval(speedup, len(ours))),
        "acceptance_length_interval": list(bootstrap_interval(mean_length, len(ours))),
    }


def column(rows: list[dict], key: str) -> np.ndarray:
    return np.array([row[key] for row in rows])


def summarize_traffic(ours: list[Generation]) -> dict:
    """Return what crossed the network for each token that the target verified."""
    tokens = sum(len(g.tokens) - g.unverified for g in ours)
    traffic = {}
    for key in ("round_trips", "bytes_up", "bytes_down"):
        traffic[f"{key}_per_token"] = sum(g.network[key] for g in ours) / tokens
    return traffic


@torch.inference_mode()
def offline_quality(target: Llama, ours: list[Generation], bases: list[Generation]) -> dict:
    """Judge text that was written offline, greedily: the share of its tokens that the target has at
    the same place, and the target's perplexity of it."""
    agreed = []
    nll = []
    for g, base in zip(ours, bases):
        ids = torch.tensor([g.prompt + g.tokens], device=target.device)
        hidden = target.hidden(ids)[0, len(g.prompt) - 1:-1]  # (T, E)
        log_p = target.lm_head(hidden).float().log_softmax(-1)  # (T, V)
        for i, token in enumerate(g.tokens):
            if g.origins[i] == Origin.UNVERIFIED:
                # (Slices, because the base's answer may have ended before.)
                agreed.append(base.tokens[i:i + 1] == [token])
                nll.append(-log_p[i, token].item())
    return {"agreement": fmean(agreed), "perplexity": math.exp(fmean(nll))}


INTERVAL = Column("95%", "the interval of the figure to its left, over prompts of these kinds")
COLUMNS = {
    "tokens_per_second": Column("tokens/s", "new tokens per second, the prompt's time included"),
    "speedup": Column("speed-up", "over the target alone; over networks, over plain API use"),
    "speedup_interval": INTERVAL,
    "acceptance_length": Column("accepted", "new tokens per pass of the target (without prompts)"),
    "acceptance_length_interval": INTERVAL,
    "draft_share": Column("draft", "share of the time that drafting takes"),
    "identical": Column("same", "share of turns whose tokens are those of the target alone"),
    "round_trips_per_token": Column("trips", "per token: messages up that wait for one down"),
    "bytes_up_per_token": Column("up", "bytes per token, to the server, with the prompt"),
    "bytes_down_per_token": Column("down", "bytes per token, from the server, with the memory"),
    "unverified_tokens": Column("offline", "tokens written by the drafter alone, network down"),
    "agreement": Column("agreement", "share of these that the target has at the same place"),
    "perplexity": Column("perplexity", "the target's, of these"),
}


def print_result(rows: list[dict]) -> None:
    """Print the table, and sentences that say what it shows."""
    labels = ["category", "method"]
    if all(row["category"] == "overall" for row in rows):
        labels.remove("category")
    print_rows(rows, labels, COLUMNS)
    # What an outage cut short is no faster way to the same text.
    whole = [row for row in rows if "unverified_tokens" not in row]
    overall = [row for row in whole if row["category"] == "overall"]
    methods = [row for row in overall if row["method"] != UNPACKED]
    fastest = max(methods, key=lambda row: row["speedup"])
    remote = "target" not in [row["method"] for row in rows]
    base = "plain use of an API on the same network" if remote else "the target alone"
    print()
    if fastest["speedup"] > 1:
        print(f"Fastest: {fastest['method']}, {fastest['speedup']:.2f} times as fast as {base}.")
    else:
        print(f"No method was faster than {base}.")
    for row in overall:
        if row["method"] == UNPACKED:
            print(f"Not packed, the target alone is {row['speedup']:.2f} times as fast as packed.")
    print(compare_texts(whole))


def compare_texts(rows: list[dict]) -> str:
    """Say in a sentence whether all texts are the target's own."""
    different = set()
    for row in rows:
        if "identical" not in row:
            return "Texts differ, because they are sampled."
        if row["identical"] < 1:
            different.add(row["method"])
    if different:
        return f"Some texts differ from those of the target alone: {', '.join(sorted(different))}."
    return "All texts are identical to those of the target alone."


# --- Command line ---

DEFAULT_PROMPTS = Path(__file__).parent / "prompts.jsonl"
EXAMPLES = """\
python -m experiments.bench
python -m experiments.bench experiments/test_prompts.jsonl --max-new-tokens 64
python -m experiments.bench --remote --latency 21ms
python -m experiments.bench --drafter runs/a runs/b --draft-length 4
"""
NETWORK_FLAGS = "network", "latency", "jitter", "bandwidth", "loss", "timeout"


def parse_arguments() -> Namespace:
    parser = Parser(
        usage="python -m experiments.bench [FILE] [flags]",
        description="Measure every method on the same prompts, with 95% intervals over prompts.",
        examples=EXAMPLES,
    )
    add = parser.add_argument
    add("file", type=path, nargs="?", default=DEFAULT_PROMPTS, metavar="FILE",
        help="prompts, one JSON object a line (default: experiments/prompts.jsonl)")
    add("--drafter", type=path, nargs="+", metavar="DIR",
        help="one or, without --remote, several (default: the one shipped for the model)")
    add_model_arguments(parser)
    add_generation_arguments(parser)
    add_draft_arguments(parser.add_argument_group("drafts"))
    remote = parser.add_argument_group("the target on a server")
    remote.add_argument(
        "--remote", nargs="?", const=OWN_SERVER, type=address, metavar="HOST:PORT",
        help="there or, without an address, in a process of our own",
    )
    add_link_arguments(remote)
    remote.add_argument(
        "--timeout", type=time_limit, help="for a reply (default: ten times the slowest)"
    )
    args = parser.parse_args()
    if not args.remote:
        parser.refuse(args, NETWORK_FLAGS, "needs --remote")
    elif args.drafter and len(args.drafter) > 1:
        parser.error("--remote takes one --drafter, which its server has, too")
    return args


def load(args: Namespace, dtype: torch.dtype) -> tuple[Models, dict[str, Drafter]]:
    """Load what the command line names. Returns the models, and all drafters by name."""
    if args.drafter is None or len(args.drafter) == 1:
        folder = args.drafter[0] if args.drafter else None
        models = load_models(args.model, folder, args.device, dtype)
        return models, {str(folder): models.drafter}
    sizes, _ = read_sizes(resolve_path(args.model))
    for folder in args.drafter:
        read_drafter(folder, sizes)  # before the target loads, which takes longer
    target, tokenizer = load_target(args.model, args.device, dtype)
    drafters = {}
    for folder in args.drafter:
        drafters[str(folder)] = load_drafter(folder, target)
    target = make_ready(target, list(drafters.values()))
    return Models(target, tokenizer, drafter=None), drafters


def choose_local(
    args: Namespace, target: Llama, drafters: dict[str, Drafter]
) -> dict[str, Contender]:
    """Return what the command line compares on this machine."""
    chain = DraftLimits(args.draft_length) if args.draft_length else CHAIN
    contenders = local_contenders(target, drafters, chain, tree_limits(args, TREE))
    unpacked = faster_unpacked(target, args.model)
    if unpacked is not None:
        contenders[UNPACKED] = Contender(Alone(unpacked))
    return contenders


def faster_unpacked(packed: Llama, model: str) -> Llama | None:
    """Return the target with plain weights if that is faster alone, as it is on some CPUs.

    Its speed is a figure of its own. Methods are compared with the packed target, which verifies
    drafts: the two round differently, and need not write the same text.
    """
    if not isinstance(packed.norm, PackedRMSNorm):
        return None
    plain = load_model(model, packed.device, packed.dtype)
    config = GenerationConfig(max_new_tokens=16)

    def seconds(target: Llama) -> float:
        """Time a short answer to any prompt: the fastest of three."""
        return min(repeat(lambda: list(generate(target, [0], config)), number=1, repeat=3))

    return plain if seconds(plain) < seconds(packed) else None


def choose_remote(args: Namespace, drafter: Drafter, dtype: torch.dtype) -> dict[str, Contender]:
    """Return what the command line compares over networks: the one that it describes, or all of
    PROFILES. Starts a server if it is to be our own."""
    server = args.remote
    folder = find_drafter(args.model, args.drafter[0] if args.drafter else None)
    if server == OWN_SERVER:
        server = start_server(args.model, folder, args.device, dtype)
    links = PROFILES
    link = link_of(
        args.network,
        latency=args.latency,
        jitter=args.jitter,
        bandwidth=args.bandwidth,
        loss=args.loss,
    )
    if link is not None:
        links = {args.network or "link": link}
    models = fingerprints(args.model, folder)
    channels = {}
    for name, link in links.items():
        channels[name] = partial(
            open_channel, server, link, args.seed, fingerprints=models, timeout=args.timeout
        )
    limits = choose_limits(args, REMOTE_TREE)
    return remote_contenders(drafter, limits, channels, outage_after=args.max_new_tokens // 4)


def main() -> None:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    prompts = read_prompt_file(args.file)
    dtype = DTYPES[choose_dtype(args.device, args.dtype)]
    models, drafters = load(args, dtype)
    if args.remote:
        contenders = choose_remote(args, models.drafter, dtype)
    else:
        contenders = choose_local(args, models.target, drafters)
    config = GenerationConfig(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        stop_ids=frozenset(models.tokenizer.stop_ids),
    )
    context = models.target.config.max_position_embeddings
    turns = []
    try:
        for turn in bench_prompts(models.tokenizer, context, contenders, prompts, config):
            turns.append(turn)
            speeds = {name: tokens_per_second([g]) for name, g in turn.answers.items()}
            fastest = max(speeds, key=speeds.get)
            line = f"{turn.category}: {fastest} was fastest, {speeds[fastest]:.1f} tokens/s"
            tqdm.write(line, file=sys.stderr)
    except (KeyboardInterrupt, SystemExit, InputError):  # Ctrl-C, SIGTERM, a server that is lost
        if turns:
            print("stopped: the rows are of the prompts that were done", file=sys.stderr)
        raise
    finally:
        if turns:
            rows = summarize(models.target, contenders, turns, config)
            if args.json:
                by_prompt = []
                for name in contenders:
                    by_prompt += measure_prompts(turns, name)
                print(json.dumps({"rows": rows, "prompts": by_prompt}))
            else:
                print_result(rows)
    if not turns:
        raise InputError("no prompt fits the model's context")


if __name__ == "__main__":
    run_command(main)
