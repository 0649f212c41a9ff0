"""The comparison: drafters of equal size, trained side by side on one pass of the target.

Is the paper's drafter better than its opponents, and what is each part of it worth? arms.py has the
drafters that are compared, the *arms*; side_by_side.py trains them. The target reads each batch
once, and every arm learns from that pass. So the arms differ in nothing but what they are: all but
four larger controls have the same number of parameters (within 1%), all have the same LM head, and
all see the same text in the same order under the same optimizer. Unless --lr sets one for all, each
has a learning rate of its own, the best of several: the one with which drafts get furthest after a
training of one seed, a quarter as long, on answers to prompts that are neither trained on nor
tested on.

    python -m experiments.compare --model runs/toy --data runs/own.jsonl \\
        --prompts runs/toy/held_out.jsonl --out runs/compare --json > toy.json
    python -m experiments.report toy.json

After an interruption the same command goes on. Seeds may be trained at the same time: first
`--seeds` without a number finds the learning rates, then each process gets its `--seeds N`, and in
the end the whole command prints everything.

At some stages chains of eight are scored along texts that the target has written (along_text.py):
greedily, and sampled at temperature 1. After the last update each arm also drafts trees, and with
--time the arms draft by turns, to see what a draft costs.
"""
from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Collection

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from app.answers import answer
from app.evaluation import check_context, mixed_precision
from app.loading import load_target
from app.training import Optimizers, RunConfig, choose_optimizer
from experiments.along_text import (
    Text,
    acceptance_by_depth,
    count_passes,
    entropies,
    mean_by_depth,
)
from experiments.arms import ARMS, Arm, WithArm, count_parameters, new_drafter_of, sharpened
from experiments.batching import Batch
from experiments.circumstances import circumstances
from experiments.paper_family import GlideDrafter, scale_of_states
from experiments.prompts import read_prompt_file
from experiments.reading import read
from experiments.report import print_tables
from experiments.side_by_side import Entrant, Scores, train_side_by_side
from llama import GenerationConfig, Llama
from moa import DraftLimits
from plumbing.conversations import Conversations, check_files, frequent_tokens, hold_out
from plumbing.devices import DTYPES, choose_training_dtype
from plumbing.errors import InputError, run_command
from plumbing.files import atomic_write, fingerprint_files, fingerprint_model, read_json
from plumbing.flags import Parser, add_model_arguments, number, path, positive_int
from plumbing.hub import resolve_path
from plumbing.journal import Journal, find_run, lock_folder, read_log
from plumbing.processes import say

CHAIN = DraftLimits(depth=8)
TREE = DraftLimits(depth=6, top_k=3, total_tokens=8)  # as speculate.py's, without early stops
LARGE_TREE = DraftLimits(depth=6, top_k=8, total_tokens=60)  # about the paper's
# The limits of each kind of trees, and the temperature of the q that ranks their paths. A greedy
# target always takes its likeliest token, however unsure it is, so a sharper q may rank better.
TREES = {
    "tree": (TREE, 1.0),
    "tree of 60": (LARGE_TREE, 1.0),
    "sharp tree of 60": (LARGE_TREE, 0.5),
}
RATES = {"muon": (2e-3, 4e-3, 8e-3), "adamw": (1e-3, 2e-3, 4e-3, 8e-3)}
TEXTS_AT_ONCE = 16  # texts that are written, or scored, in one batch


# --- Texts, and scores ---


def write_texts(
    target: Llama, prompts: list[list[int]], stop_ids: frozenset[int], count: int,
    temperature: float,
) -> list[Text]:
    """Let the target answer prompts, many at once. An answer of one token has no second one to
    draft, and is left out."""
    batch = Batch(target, TEXTS_AT_ONCE, max(map(len, prompts)) + count + 1)
    waiting = list(enumerate(prompts))
    texts = {}
    with torch.inference_mode(), tqdm(total=len(prompts), desc="texts", leave=False) as progress:
        while waiting or batch.requests:
            new = []
            while waiting and len(batch.requests) + len(new) < TEXTS_AT_ONCE:
                place, prompt = waiting.pop(0)
                config = GenerationConfig(count, temperature, seed=place, stop_ids=stop_ids)
                new.append((place, prompt, config))
            batch.add_all(new)
            for request in batch.step():
                prompt = prompts[request.key]
                if len(request.tokens) > 1:
                    tokens = torch.tensor(prompt + request.tokens)
                    texts[request.key] = Text(tokens, len(prompt), temperature)
                progress.update()
    return [texts[place] for place in sorted(texts)]


@torch.no_grad()
def score_chains(entrants: list[Entrant], texts: list[Text], dtype: str) -> dict[str, dict]:
    """Return how many tokens and passes each text takes with chains, after its first token, and the
    probability that a draft is accepted, by its depth. Of sampled texts also the mean entropies of
    q and of p, in nats."""
    target = entrants[0].target
    accepted = {entrant.name: [None] * len(texts) for entrant in entrants}
    entropies_of = {entrant.name: [] for entrant in entrants}
    by_length = sorted(range(len(texts)), key=lambda place: len(texts[place].tokens))
    for first in range(0, len(texts), TEXTS_AT_ONCE):
        places = by_length[first:first + TEXTS_AT_ONCE]
        some = [texts[place] for place in places]
        tokens = pad_sequence([text.tokens for text in some], batch_first=True).to(target.device)
        with mixed_precision(target.device, dtype):
            reading = read(target, tokens)
            for entrant in entrants:
                rows = acceptance_by_depth(
                    entrant.drafter, entrant.arm, reading, some, CHAIN.depth
                )
                for place, probabilities in zip(places, rows):
                    accepted[entrant.name][place] = probabilities
                if some[0].temperature > 0:
                    found = entropies(entrant.drafter, entrant.arm, reading, some)
                    entropies_of[entrant.name].append(torch.stack(found))
    scores = {}
    for name, rows in accepted.items():
        tokens = []
        passes = []
        for text, probabilities in zip(texts, rows):
            count = len(text.tokens)
            tokens.append(count - text.prompt - 1)
            passes.append(round(count_passes(probabilities, text.prompt, count), 4))
        by_depth = mean_by_depth(rows, texts)
        scores[name] = {"tokens": tokens, "passes": passes, "by_depth": by_depth}
        if entropies_of[name]:
            of_p, of_q = torch.cat(entropies_of[name], dim=1).mean(dim=1).tolist()
            scores[name]["entropies"] = {"p": round(of_p, 4), "q": round(of_q, 4)}
    return scores


def score_trees(
    entrant: Entrant, limits: DraftLimits, prompts: list[list[int]], config: GenerationConfig
) -> dict:
    """Answer prompts with drafts. Returns tokens and passes of each, after the first token."""
    method = WithArm(entrant.target, entrant.drafter, limits)
    tokens = []
    passes = []
    for prompt in tqdm(prompts, "trees", leave=False):
        generation = answer(method, prompt, config)
        tokens.append(len(generation.tokens) - 1)
        passes.append(generation.target_calls)
    return {"tokens": tokens, "passes": passes}


def time_drafts(
    entrants: list[Entrant], prompts: list[list[int]], config: GenerationConfig
) -> dict[str, dict]:
    """Answer prompts with chains, the arms by turns. Returns milliseconds of a draft and of a whole
    cycle for each arm, medians over prompts."""
    times = {entrant.name: [] for entrant in entrants}
    for prompt in tqdm(prompts, "timing", leave=False):
        for entrant in entrants:
            method = WithArm(entrant.target, entrant.drafter, CHAIN)
            generation = answer(method, prompt, config)
            calls = generation.target_calls
            if calls == 0:  # the first token ended the answer
                continue
            draft = generation.draft_seconds / calls
            cycle = draft + generation.verify_seconds / calls
            times[entrant.name].append((1000 * draft, 1000 * cycle))
    rows = {}
    for name, pairs in times.items():
        draft, cycle = np.median(pairs, axis=0).round(2).tolist()
        rows[name] = {"draft_ms": draft, "cycle_ms": cycle}
    return rows


# --- The whole comparison ---


class Comparison:
    """A target, texts, and a folder for what is trained."""

    def __init__(self, args: Namespace):
        self.args = args
        self.dtype = choose_training_dtype(args.device, args.dtype)
        self.target, tokenizer = load_target(args.model, args.device, DTYPES[self.dtype])
        check_context(args.seq_len, self.target)
        layers = self.target.config.num_hidden_layers
        for name in args.arms:
            if ARMS[name].tli > layers:
                raise InputError(f"--arms {name}: the target has only {layers} layers")
            if issubclass(ARMS[name].kind, GlideDrafter):
                # CA's queries are the drafter's: of its own width, and rotated by its own table.
                sizes = self.target.config
                if sizes.rope_factors:
                    raise InputError(f"--arms {name}: the target's RoPE is scaled, as Llama-3.1's")
                if sizes.head_dim * sizes.num_attention_heads != sizes.hidden_size:
                    raise InputError(f"--arms {name}: the target's heads have another width")
        data = Conversations(args.data, tokenizer, args.seq_len)
        self.training, self.held_out = hold_out(data, seed=0)
        self.vocabulary = None
        if args.draft_vocabulary is not None:
            size = self.target.config.vocab_size
            kept = frequent_tokens(self.training, size, args.draft_vocabulary)
            self.vocabulary = torch.tensor(kept, device=self.target.device)
        stop_ids = frozenset(tokenizer.stop_ids)
        self.answers = GenerationConfig(args.max_new_tokens, stop_ids=stop_ids)
        self.prompts = []
        for prompt in read_prompt_file(args.prompts)[:args.prompt_count]:
            self.prompts.append(tokenizer.chat([{"role": "user", "content": prompt.turns[0]}]))

    def choose_rates(self) -> dict[str, float]:
        """Return the learning rate of each arm: the given one, or the best of RATES."""
        args = self.args
        if args.lr is not None:
            return dict.fromkeys(args.arms, args.lr)
        tried = RATES[args.optimizer]
        updates = max(1, args.updates // 4)
        training = {"updates": updates, "batch_size": args.batch_size, "seq_len": args.seq_len}
        settings = self.settings() | training | {"tried": list(tried), "dtype": self.dtype}
        folder = args.out / f"rates-{args.optimizer}"
        file = folder.with_suffix(".json")
        if not file.exists():
            entrants = []
            for name in args.arms:
                for rate in tried:
                    entrants.append(self.entrant(f"{name}@{rate}", ARMS[name], rate, seed=0))
            prompts = []
            for tokens, is_answer in self.held_out:
                prompts.append(tokens[:int(is_answer.int().argmax())].tolist())
            texts = {"chain": self.texts(prompts, temperature=0.0)}
            rows = self.train(entrants, folder, updates, 0, {updates}, texts)
            lengths = {}
            for row in rows:
                passes = sum(row["chain"]["passes"])
                lengths[row["arm"]] = sum(row["chain"]["tokens"]) / max(1, passes)
            rates = {}
            for name in args.arms:
                rates[name] = max(tried, key=lambda rate: lengths[f"{name}@{rate}"])
            with atomic_write(file) as part:
                found = {"settings": settings, "rates": rates, "lengths": lengths}
                part.write_text(json.dumps(found, indent=1))
        found = read_json(file)
        if found["settings"] != settings:
            raise InputError(f"{file} was made with other settings: choose another --out")
        rates = found["rates"]
        missing = [name for name in args.arms if name not in rates]
        if missing:
            raise InputError(f"{file} lacks {', '.join(missing)}: choose another --out")
        return rates

    def run_seed(self, seed: int, rates: dict[str, float]) -> list[dict]:
        """Train and score all arms with one seed. Returns a row for each arm and stage."""
        args = self.args
        entrants = [self.entrant(name, ARMS[name], rates[name], seed) for name in args.arms]
        folder = args.out / f"seed-{seed}"
        rows = self.train(entrants, folder, args.updates, seed, args.stages, self.test_texts)
        for row in rows:
            row["seed"] = seed
        last = {row["arm"]: row for row in rows if row["updates"] == args.updates}
        for entrant in entrants:
            row = last[entrant.name]
            row["parameters"] = count_parameters(entrant.drafter)
            if args.tree_prompts > 0:
                row |= self.score_all_trees(entrant, folder)
        if args.time > 0:
            prompts = self.prompts[:args.time]
            for name, times in time_drafts(entrants, prompts, self.answers).items():
                last[name] |= times
        return rows

    def score_all_trees(self, entrant: Entrant, folder: Path) -> dict[str, dict]:
        """Return what trees of each kind yield. They are kept in the folder."""
        prompts = self.prompts[:self.args.tree_prompts]
        scores = {}
        for kind, (limits, temperature) in TREES.items():
            file = folder / f"{entrant.name}, {kind}, {len(prompts)} prompts.json"
            if not file.exists():
                with sharpened(entrant.drafter, temperature):
                    found = score_trees(entrant, limits, prompts, self.answers)
                with atomic_write(file) as part:
                    part.write_text(json.dumps(found))
            scores[kind] = read_json(file)
        return scores

    def entrant(self, name: str, arm: Arm, rate: float, seed: int) -> Entrant:
        drafter = new_drafter_of(arm, self.target, self.args.mlp, self.vocabulary, seed)
        parameters = list(drafter.trained_parameters().values())
        optimizer = choose_optimizer(parameters, self.args.optimizer)
        scale = scale_of_states(self.target) if arm.ca_loss == "scaled" else 1.0
        return Entrant(name, arm, self.target, drafter, rate, optimizer, scale)

    @cached_property
    def test_texts(self) -> dict[str, list[Text]]:
        """The target's answers to the test prompts, by the kind of drafts that they are for."""
        return {
            "chain": self.texts(self.prompts, temperature=0.0),
            "sampled chain": self.texts(self.prompts, temperature=1.0),
        }

    def texts(self, prompts: list[list[int]], temperature: float) -> list[Text]:
        count = self.args.max_new_tokens
        return write_texts(self.target, prompts, self.answers.stop_ids, count, temperature)

    def train(
        self,
        entrants: list[Entrant],
        folder: Path,
        updates: int,
        seed: int,
        stages: Collection[int],
        texts: dict[str, list[Text]],
    ) -> list[dict]:
        """Train entrants in a folder, or go on with what is there. Returns the scores along texts,
        a row for each entrant and stage."""
        args = self.args
        config = RunConfig(
            updates=updates, batch_size=args.batch_size, micro_batch_size=args.micro_batch_size,
            seq_len=args.seq_len, schedule="cosine", warmup=20, optimizer=args.optimizer,
            dtype=self.dtype, seed=seed, save_every=args.save_every,
        )
        parameters = {}
        for entrant in entrants:
            for name, parameter in entrant.drafter.trained_parameters().items():
                parameters[f"{entrant.name}/{name}"] = parameter
        settings = asdict(config) | self.settings() | {
            "arms": {entrant.name: entrant.rate for entrant in entrants},
            "stages": sorted(stages),
        }
        optimizer = Optimizers(*[entrant.optimizer for entrant in entrants])
        journal = Journal(folder, parameters, optimizer, lambda: None, settings)

        def score(entrants: list[Entrant]) -> Scores:
            scores = {entrant.name: {} for entrant in entrants}
            for kind, some in texts.items():
                for name, counts in score_chains(entrants, some, self.dtype).items():
                    scores[name][kind] = counts
            return scores

        resumes = find_run(folder, resume=True)
        with lock_folder(folder):
            if resumes:
                journal.resume(updates, may_differ={"save_every"})
            else:
                journal.begin()
            if journal.done < updates:
                train_side_by_side(entrants, self.training, config, journal, stages, score)
        rows = []
        for record in read_log(folder):
            if "arm" in record:
                rows.append({"updates": record.pop("update")} | record)
        return rows

    def settings(self) -> dict:
        """Return what must be the same when a training goes on."""
        args = self.args
        return {
            "mlp": args.mlp,
            "draft_vocabulary": args.draft_vocabulary,
            "model_checksum": fingerprint_model(resolve_path(args.model)),
            "data_checksum": fingerprint_files(args.data),
            # What is scored is in the log, which is not computed again.
            "prompts_checksum": fingerprint_files([args.prompts]),
            "prompt_count": args.prompt_count,
            "max_new_tokens": args.max_new_tokens,
        }


# --- The command line ---

EXAMPLES = """\
python -m experiments.compare --model runs/toy --data runs/own.jsonl \\
    --prompts runs/toy/held_out.jsonl --out runs/compare
"""


def parse_arguments() -> Namespace:
    parser = Parser(
        usage="python -m experiments.compare --data FILE --prompts FILE --out DIR [flags]",
        description="Train drafters of equal size side by side, and compare them.",
        examples=EXAMPLES,
    )
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("--data", nargs="+", required=True, type=path, metavar="FILE", help="conversations")
    add("--prompts", required=True, type=path, metavar="FILE", help="to test on; not in the data")
    add("--out", required=True, type=path, metavar="DIR", help="the same DIR goes on")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM",
        help="of %(choices)s (default: all)")
    add("--seeds", nargs="*", type=number(int, 0), default=[0, 1, 2], metavar="N",
        help="of drafters; without a number only learning rates are chosen (default: 0 1 2)")
    add("--updates", type=positive_int, metavar="N", default=6400, help=default)
    add("--stages", nargs="*", type=positive_int, metavar="N",
        help="updates after which chains are scored (default: an eighth, a quarter, half, all)")
    add("--lr", type=number(float, 0), help="of all arms (default: each arm's best of several)")
    add("--optimizer", choices=["muon", "adamw"], default="muon", help=default)
    add("--batch-size", type=positive_int, metavar="N", default=2, help=f"conversations {default}")
    add("--micro-batch-size", type=positive_int, metavar="N", default=16,
        help=f"read at once {default}")
    add("--seq-len", type=number(int, 16), metavar="N", default=512, help=f"tokens {default}")
    add("--mlp", type=positive_int, metavar="WIDTH",
        help="of moa.py's MLPs: sets the size of all arms")
    add("--draft-vocabulary", type=positive_int, metavar="COUNT", help="as in train.py")
    add("--prompt-count", type=positive_int, metavar="N", default=256,
        help=f"test prompts {default}")
    add("--tree-prompts", type=number(int, 0), metavar="N", default=64,
        help=f"of these with trees {default}")
    add("--max-new-tokens", type=positive_int, metavar="N", default=96,
        help=f"of an answer {default}")
    add("--save-every", type=positive_int, metavar="N", default=200, help=f"updates {default}")
    add("--time", type=number(int, 0), default=0, metavar="PROMPTS",
        help="also time drafts, on an idle machine")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add_model_arguments(parser)
    args = parser.parse_args()
    if args.stages is None:
        args.stages = [max(1, args.updates // share) for share in (8, 4, 2)]
    args.stages = sorted({*args.stages, args.updates})
    return args


def main() -> None:
    args = parse_arguments()
    check_files(args.data)
    comparison = Comparison(args)
    rates = comparison.choose_rates()
    say(f"learning rates: {rates}")
    rows = []
    for seed in args.seeds:
        rows += comparison.run_seed(seed, rates)
    if args.json:
        result = circumstances(comparison.target.device) | {"rates": rates, "rows": rows}
        print(json.dumps(result))
    elif rows:
        print_tables(rows)


if __name__ == "__main__":
    run_command(main)
