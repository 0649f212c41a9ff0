"""Above temperature 0: trees that are drawn, against trees of the likeliest tokens.

`TreeSampler` of speculate.py draws a tree's tokens from q, and rejection sampling tries them.
A *fixed* tree has the likeliest tokens, as at temperature 0, chosen as EAGLE-2 does. The target
draws a token of its own after the root. If the tree has it, it is accepted, and the target draws
the next one after it. So every token of the text is drawn from p, and there is nothing to prove.

Say that p = q = (0.6, 0.4). One drawn token is always accepted, the likelier one with probability
0.6; with two tokens both methods always accept one. What pays in use, is measured here. The q that
ranks a fixed tree's tokens has the temperature of the text or, as at temperature 0, 1 ("q at 1").

    python -m experiments.fixed_tree                       # on experiments/prompts.jsonl, at 0.8
"""
from __future__ import annotations

import itertools
import json
from argparse import Namespace
from dataclasses import dataclass, replace
from time import process_time
from typing import Iterable

import torch
from torch import Tensor
from tqdm import tqdm

from app.answers import (
    Cycles, Generation, Method, WithDrafts, acceptance_length, count_slots, timed_cycles
)
from app.exact import DetailedResult, ExactVerifier
from app.loading import Models, load_models
from app.speculate_command import TREE
from experiments.bench import CHAIN, DEFAULT_PROMPTS, Contender
from experiments.intervals import bootstrap_interval
from experiments.prompts import read_first_questions
from experiments.tables import Column, print_rows
from llama import GenerationConfig, Llama, Sampling, sample_next
from moa import Draft, Drafter, DraftLimits, DraftState
from plumbing.devices import DTYPES, choose_dtype
from plumbing.errors import run_command
from plumbing.flags import Parser, add_generation_arguments, add_model_arguments, path, positive_int
from speculate import Acceptance


class FixedTreeState(DraftState):
    """Drafts a tree as at temperature 0. ranking: the temperature and top-p of its q."""

    def __init__(self, drafter: Drafter, capacity: int, ranking: Sampling):
        super().__init__(drafter, capacity, Sampling())  # of temperature 0
        self.ranking = ranking

    def next_distributions(self, draft: Draft, frontier: list[int]) -> Tensor:
        return self.drafter.distributions(self.step(draft, frontier), self.ranking)  # (F, V)


def accept_own_draws(logits: Tensor, draft: Draft, sampling: Sampling) -> Acceptance:
    """Draw the target's own tokens, as long as they were drafted. logits (1 + K, V)"""
    path = [0]
    while True:
        token = sample_next(logits[path[-1]], sampling)  # after the newest accepted token
        child = draft.child(path[-1], token)
        if child is None:
            return Acceptance(path, token)
        path.append(child)


class FixedTreeVerifier(ExactVerifier):
    """The target's side. Differs from `LocalVerifier` in the rule of acceptance only."""

    def verify(self, draft: Draft) -> DetailedResult:
        start = self.cache.length
        acceptance = accept_own_draws(self.read_draft(draft), draft, self.sampling)
        self.cache.keep_path(start, acceptance.path)
        verified = [draft.tokens[node] for node in acceptance.path]  # the root, then accepted ones
        update = self.drafter.cache_update(verified, self.cache)
        return DetailedResult(verified[1:], acceptance.token, update, draft)


@dataclass
class WithFixedTrees:
    """As `WithDrafts` of app/answers.py. ranking: that of the state; None for that of the text."""

    target: Llama
    drafter: Drafter
    limits: DraftLimits
    ranking: Sampling | None = None

    @torch.inference_mode()
    def cycles(self, prompt: list[int], config: GenerationConfig) -> Cycles:
        sampling = config.new_sampling(self.target.device)
        capacity = count_slots(prompt, config, self.limits)
        verifier = FixedTreeVerifier(self.target, self.drafter, capacity, sampling)
        state = FixedTreeState(self.drafter, capacity, self.ranking or sampling)
        return timed_cycles(verifier, state, prompt, config, self.limits)


def contenders(models: Models, totals: list[int]) -> dict[str, Contender]:
    """Return what is compared, with each of these total_tokens. (A chain has none.)"""
    target, _, drafter = models
    found = {"chain": Contender(WithDrafts(target, drafter, CHAIN), f"drawn {totals[0]}")}
    for total in totals:
        tree = replace(TREE, total_tokens=total)
        fixed = WithFixedTrees(target, drafter, tree)
        base = f"drawn {total}"
        found[base] = Contender(WithDrafts(target, drafter, tree), base)
        found[f"fixed {total}"] = Contender(fixed, base)
        found[f"fixed {total}, q at 1"] = Contender(replace(fixed, ranking=Sampling(1.0)), base)
    return found


def measure(method: Method, prompt: list[int], config: GenerationConfig) -> Generation:
    """Answer a prompt. `seconds` are the CPU's here, without those for the prompt."""
    generation = Generation(prompt)
    cycles = method.cycles(prompt, config)
    generation.add(next(cycles))  # the prompt's
    start = process_time()
    for cycle in cycles:
        generation.add(cycle)
    generation.seconds = process_time() - start
    return generation


Answers = list[list[Generation]]  # for each prompt, one of each seed


def length(answers: Answers, prompts: Iterable[int]) -> float:
    """Return the acceptance length over these prompts, which may repeat."""
    return acceptance_length(flatten([answers[i] for i in prompts]))


def flatten(answers: Answers) -> list[Generation]:
    return list(itertools.chain(*answers))


def summarize(name: str, ours: Answers, base: Answers) -> dict:
    """Return a method's row. Intervals are over prompts. `base` has answered the same ones."""
    def difference(prompts: Iterable[int]) -> float:
        return length(ours, prompts) - length(base, prompts)

    prompts = range(len(ours))
    answers = flatten(ours)
    calls = sum(answer.target_calls for answer in answers)
    return {
        "method": name,
        "acceptance_length": length(ours, prompts),
        "acceptance_interval": bootstrap_interval(lambda p: length(ours, p), len(ours)),
        "difference": difference(prompts),
        "difference_interval": bootstrap_interval(difference, len(ours)),
        "drafted_per_call": sum(answer.drafted for answer in answers) / calls,
        "cpu_ms_per_call": 1e3 * sum(answer.seconds for answer in answers) / calls,
        "target_calls": calls,
    }


COLUMNS = {
    "acceptance_length": Column("accepted", "new tokens per pass of the target (without prompts)"),
    "acceptance_interval": Column("interval", "95%, over prompts"),
    "difference": Column("more", "accepted, than by drawn trees of the same size"),
    "difference_interval": Column("interval", "95%, over prompts, each compared with itself"),
    "drafted_per_call": Column("drafted", "tokens of a draft"),
    "cpu_ms_per_call": Column("CPU ms", "of a cycle, of all threads together"),
    "target_calls": Column("cycles", "that were measured"),
}


def parse_arguments() -> Namespace:
    parser = Parser(description="Above 0, compare drawn trees with trees of the likeliest tokens.")
    add = parser.add_argument
    add("file", type=path, nargs="?", default=DEFAULT_PROMPTS, metavar="FILE",
        help="prompts, one JSON object a line (default: experiments/prompts.jsonl)")
    add("--seeds", type=positive_int, default=3, metavar="N", help="answers to each prompt")
    add("--total-tokens", type=positive_int, nargs="+", default=[8, 16], metavar="N",
        help="tokens of a tree, at most (default: 8 and 16)")
    add("--drafter", type=path, metavar="DIR", help="default: the one shipped for the model")
    add_model_arguments(parser)
    add_generation_arguments(parser)
    parser.set_defaults(temperature=0.8, max_new_tokens=96)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    questions = list(read_first_questions(args.file))
    dtype = DTYPES[choose_dtype(args.device, args.dtype)]
    models = load_models(args.model, args.drafter, args.device, dtype)
    stop_ids = frozenset(models.tokenizer.stop_ids)
    compared = contenders(models, args.total_tokens)
    answers: dict[str, Answers] = {}
    for name in compared:
        answers[name] = [[] for _ in questions]
    for seed in tqdm(range(args.seed, args.seed + args.seeds), unit=" seeds"):
        config = GenerationConfig(args.max_new_tokens, args.temperature, args.top_p, seed, stop_ids)
        for i, question in enumerate(tqdm(questions, unit=" prompts", leave=False)):
            prompt = models.tokenizer.chat([{"role": "user", "content": question}])
            for name, contender in compared.items():
                answers[name][i].append(measure(contender.method, prompt, config))
    rows = []
    for name, contender in compared.items():
        rows.append(summarize(name, answers[name], answers[contender.base]))
    if args.json:
        print(json.dumps({"rows": rows}))
    else:
        print_rows(rows, ["method"], COLUMNS)


if __name__ == "__main__":
    run_command(main)
