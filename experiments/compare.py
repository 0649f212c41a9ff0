"""The comparison: drafters of equal size, trained side by side on one pass of the target.

Is the paper's drafter better than its opponents, and which part of it is? experiments/arms.py has
the drafters that are compared, the *arms*. For each batch the target runs once, and every arm
learns from that pass. So the arms differ in nothing but what they are: all see the same text in the
same order, have the same number of parameters and the same LM head, and learn by the same
optimizer. Each gets its own learning rate: the best of three, in a training of one seed that is a
quarter as long, by answers to prompts that are neither trained on nor tested on.

    python -m experiments.compare --model runs/toy --data runs/own.jsonl \\
        --prompts runs/toy/held_out.jsonl --out runs/compare

Figures lie in OUT/seed-S/log.jsonl, what every test prompt gave among them. The same command goes
on after an interruption, and prints the table again when all is done. Seeds may run in processes of
their own (--seeds 0, then --seeds 1, ...): then the learning rates have to be there first
(--seeds without a number).

At some stages of a training, chains of eight are scored along texts of the target
(experiments/along_text.py): greedy ones, and texts sampled at temperature 1. The last stage also
answers the test prompts greedily with trees that are really drafted.
"""
from __future__ import annotations

import json
import math
from argparse import Namespace
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Iterable, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Subset
from tqdm import tqdm

from app.answers import answer
from app.evaluation import check_context, mixed_precision, pad_for_gpu
from app.loading import load_target
from app.training import Optimizers, RunConfig, choose_optimizer, scheduled_rate
from experiments.along_text import Text, acceptance_by_depth, count_passes
from experiments.arms import (
    ARMS,
    Arm,
    Reading,
    WithArm,
    count_parameters,
    moa_features,
    new_drafter_of,
    read,
    unroll,
)
from experiments.batching import Batch
from experiments.intervals import bootstrap_interval
from experiments.prompts import read_prompt_file
from experiments.tables import Column, print_rows
from llama import GenerationConfig, Llama
from moa import Drafter, DraftLimits
from plumbing.conversations import Conversations, check_files, frequent_tokens, hold_out
from plumbing.devices import DTYPES, choose_training_dtype
from plumbing.errors import InputError, run_command
from plumbing.files import atomic_write, read_json
from plumbing.flags import Parser, add_model_arguments, number, path, positive_int
from plumbing.journal import Journal, find_run, lock_folder, read_log
from plumbing.processes import say
from plumbing.tokenizer import Tokenizer
from train import (
    Example,
    Losses,
    collate,
    count_trained,
    draw_batches,
    draw_examples,
    loss_mask,
    smooth_l1_loss,
)

CHAIN_DEPTH = 8
TREES = {  # the size that speculate.py drafts by default, and the paper's
    "tree": DraftLimits(depth=6, top_k=3, total_tokens=8),
    "tree of 60": DraftLimits(depth=6, top_k=8, total_tokens=60),
}
RATES = (1e-3, 2e-3, 4e-3)
MAX_GRADIENT_NORM = 1.0  # as in train.py
STEP_WEIGHT = 0.8  # of each step's loss over the one before, as in EAGLE-3's code
TEXT_ROWS = 64  # texts that the target writes at once
TEXTS_AT_ONCE = 16  # texts that are scored at once


@dataclass
class Entrant:
    """A drafter in training."""

    name: str
    arm: Arm
    drafter: Drafter
    rate: float  # the peak of its learning rate
    optimizer: Optimizers


# --- Losses ---


class Lesson(NamedTuple):
    """What all entrants learn from in a batch."""

    reading: Reading
    trained: Tensor  # (B, T), True at n positions: `loss_mask` of train.py
    log_p: Tensor  # the target's distributions there, over the tokens that are drafted, (n, V')


def kl_divergence(log_p: Tensor, features: Tensor, head: Tensor) -> Tensor:
    """Return KL(p || q), summed over positions, as `kl_divergence` of train.py does. Here log_p
    (n, V') is computed once for all entrants."""
    log_q = F.linear(features, head).log_softmax(-1, dtype=torch.float32)
    return (log_p.exp() * (log_p - log_q)).sum()


def losses_of(entrant: Entrant, lesson: Lesson, horizon: Tensor, noise: Tensor | None) -> Losses:
    """Return the losses of a drafter, summed over trained positions, as `distill` of train.py
    does."""
    arm, drafter = entrant.arm, entrant.drafter
    reading, trained, log_p = lesson
    head = drafter.lm_head.weight
    if arm.is_autoregressive:
        return losses_of_steps(entrant, lesson, noise)
    [(ca_output, hidden)] = moa_features(drafter, reading, [horizon])
    kl = kl_divergence(log_p, hidden[trained].float(), head)
    smooth_l1 = smooth_l1_loss(hidden[trained], reading.final[trained])
    if drafter.N > 0:
        entering = reading.states[-1 - drafter.N]
        ca_loss = smooth_l1_loss(ca_output[trained], entering[trained])
        smooth_l1 = (smooth_l1 + ca_loss) / 2
    return Losses(arm.kl_weight * kl + arm.feature_weight * smooth_l1, kl, smooth_l1)


def losses_of_steps(entrant: Entrant, lesson: Lesson, noise: Tensor | None) -> Losses:
    """Return the losses of an autoregressive drafter: the weighted mean over its steps. Query i is
    trained in step s only if the root of its draft, i - s, is trained as well."""
    arm, drafter = entrant.arm, entrant.drafter
    reading, trained, log_p = lesson
    outputs = unroll(drafter, reading, arm.steps, noise)
    total = torch.zeros(2, device=drafter.device)
    weights = 0.0
    for step, a in enumerate(outputs):
        has_root = F.pad(trained, (step, 0))[:, :trained.shape[1]] & trained
        kl = kl_divergence(
            log_p[has_root[trained]], drafter.feature(a)[has_root].float(), drafter.lm_head.weight
        )
        smooth_l1 = smooth_l1_loss(a[has_root], reading.final[has_root])
        weight = STEP_WEIGHT**step
        total = total + weight * torch.stack([kl, smooth_l1])
        weights += weight
    kl, smooth_l1 = total / weights
    loss = arm.kl_weight * kl
    if arm.feature_weight:
        loss = loss + arm.feature_weight * smooth_l1
    return Losses(loss, kl, smooth_l1)


# --- Training side by side ---


def train_side_by_side(
    entrants: list[Entrant],
    training: Subset,
    config: RunConfig,
    journal: Journal,
    stages: Iterable[int],
    score: callable,
) -> None:
    """Train all entrants up to config.updates, and log score(entrants) at each stage."""
    batches = draw_batches(range(len(training)), config)
    progress = tqdm(total=config.updates, initial=journal.done, desc="updates")
    sums = {}
    for update, indices in zip(range(config.updates), batches):
        if update < journal.done:
            continue
        batch = [training[index] for index in indices]
        losses = make_update(entrants, batch, update, config)
        for name, loss in losses.items():
            sums[name] = sums.get(name, 0.0) + loss
        progress.update()
        done = update + 1
        if done % config.eval_every == 0 or done == config.updates:
            means = {name: float(total) / config.eval_every for name, total in sums.items()}
            sums = {}
            if not all(map(math.isfinite, means.values())):
                raise InputError(f"update {done}: a loss is not finite: {means}")
            journal.log(done, {"losses": means})
        if done in stages:
            for name, scores in score(entrants).items():
                journal.log(done, {"arm": name} | scores)
        if done % config.save_every == 0 or done == config.updates:
            journal.save(done)


def make_update(
    entrants: list[Entrant], batch: list, update: int, config: RunConfig
) -> dict[str, Tensor]:
    """Make one update of every entrant. Returns their losses, means over trained positions."""
    target = entrants[0].drafter.target
    device = target.device
    # The same conversations and draws for all. Arms differ in how long their mock cycles are.
    examples_of = {}
    for entrant in entrants:
        length = entrant.arm.run_length
        if length not in examples_of:
            examples = draw_examples(batch, update, replace(config, run_length=length))
            examples = [pad_for_gpu(example, device) for example in examples]
            examples_of[length] = sorted(examples, key=lambda example: len(example.tokens))
    some = examples_of[entrants[0].arm.run_length]
    total = count_trained(some)
    for entrant in entrants:
        entrant.drafter.zero_grad()
    losses = {entrant.name: torch.zeros((), device=device) for entrant in entrants}
    for first in range(0, len(batch), config.micro_batch_size):
        rows = slice(first, first + config.micro_batch_size)
        horizons = {
            length: collate(examples[rows], device).horizon
            for length, examples in examples_of.items()
        }
        with mixed_precision(device, config.dtype):
            lesson = make_lesson(entrants[0].drafter, collate(some[rows], device))
            seed = (config.seed << 48) + (update << 16) + first
            noise = draw_noise(lesson.reading.final, seed)
            for entrant in entrants:
                scaled = noise * entrant.arm.noise if entrant.arm.noise else None
                loss = losses_of(entrant, lesson, horizons[entrant.arm.run_length], scaled).loss
                (loss / total).backward()
                losses[entrant.name] += loss.detach() / total
    for entrant in entrants:
        parameters = entrant.drafter.trained_parameters().values()
        nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        rate = scheduled_rate(update, replace(config, lr=entrant.rate), epoch_updates=1)
        for group in entrant.optimizer.param_groups:
            group["lr"] = rate
        entrant.optimizer.step()
    return losses


@torch.no_grad()
def make_lesson(drafter: Drafter, batch: Example) -> Lesson:
    """Let the target read a batch."""
    trained = loss_mask(batch.answer)
    reading = read(drafter.target, batch.tokens)
    logits = F.linear(reading.final[trained].float(), drafter.lm_head.weight)
    return Lesson(reading, trained, logits.log_softmax(-1, dtype=torch.float32))


def draw_noise(like: Tensor, seed: int) -> Tensor:
    """Draw numbers from -1/2 to 1/2, the same whenever the training comes to this place."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.rand(like.shape, generator=generator, device=like.device) - 0.5


# --- Texts, and scores along them ---


def write_texts(
    target: Llama, prompts: list[list[int]], stop_ids: frozenset, count: int, temperature: float
) -> list[Text]:
    """Let the target answer prompts, many at once."""
    capacity = max(map(len, prompts)) + count + 1
    batch = Batch(target, TEXT_ROWS, capacity)
    waiting = list(enumerate(prompts))
    texts = {}
    with torch.inference_mode(), tqdm(total=len(prompts), desc="texts", leave=False) as progress:
        while len(texts) < len(prompts):
            new = []
            while waiting and len(batch.requests) + len(new) < TEXT_ROWS:
                key, prompt = waiting.pop(0)
                config = GenerationConfig(count, temperature, seed=key, stop_ids=stop_ids)
                new.append((key, prompt, config))
            batch.add_all(new)
            for request in batch.step():
                prompt = prompts[request.key]
                tokens = torch.tensor(prompt + request.tokens)
                texts[request.key] = Text(tokens, len(prompt), temperature)
                progress.update()
    return [texts[key] for key in range(len(prompts))]


@torch.no_grad()
def score_chains(entrants: list[Entrant], texts: list[Text], dtype: str) -> dict[str, dict]:
    """Return how many tokens and passes each text takes with chains, without its first token, for
    each entrant."""
    target = entrants[0].drafter.target
    scores = {entrant.name: {"tokens": [0] * len(texts), "passes": [0.0] * len(texts)}
              for entrant in entrants}
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
    for first in range(0, len(texts), TEXTS_AT_ONCE):
        places = by_length[first:first + TEXTS_AT_ONCE]
        some = [texts[i] for i in places]
        tokens = pad_sequence([text.tokens for text in some], batch_first=True)
        with mixed_precision(target.device, dtype):
            reading = read(target, tokens.to(target.device))
            for entrant in entrants:
                drafter, arm = entrant.drafter, entrant.arm
                accepted = acceptance_by_depth(drafter, arm, reading, some, CHAIN_DEPTH)
                for i, text, probabilities in zip(places, some, accepted):
                    count = len(text.tokens)
                    passes = count_passes(probabilities, text.prompt, count)
                    scores[entrant.name]["tokens"][i] = count - text.prompt - 1
                    scores[entrant.name]["passes"][i] = round(passes, 4)
    return scores


def score_trees(
    entrant: Entrant, limits: DraftLimits, prompts: list[list[int]], config: GenerationConfig
) -> dict:
    """Answer prompts with trees, by really drafting. Returns tokens and passes of each prompt."""
    method = WithArm(entrant.drafter.target, entrant.drafter, limits)
    tokens, passes = [], []
    for prompt in tqdm(prompts, desc=f"trees, {entrant.name}", leave=False):
        generation = answer(method, prompt, config)
        tokens.append(len(generation.tokens) - 1)
        passes.append(generation.target_calls)
    return {"tokens": tokens, "passes": passes}


def time_drafts(
    entrants: list[Entrant], prompts: list[list[int]], config: GenerationConfig
) -> list[dict]:
    """Time chains of eight: the drafters in turn, prompt by prompt. Returns milliseconds of a draft
    and of a cycle, the medians over prompts."""
    times = {entrant.name: [] for entrant in entrants}
    for prompt in tqdm(prompts, desc="timing", leave=False):
        for entrant in entrants:
            limits = DraftLimits(depth=CHAIN_DEPTH)
            method = WithArm(entrant.drafter.target, entrant.drafter, limits)
            begin = perf_counter()
            generation = answer(method, prompt, config)
            seconds = perf_counter() - begin - generation.prompt_seconds
            calls = max(1, generation.target_calls)
            times[entrant.name].append((generation.draft_seconds / calls, seconds / calls))
    rows = []
    for name, pairs in times.items():
        draft, cycle = np.median(np.array(pairs), axis=0) * 1000
        rows.append({"arm": name, "draft_ms": float(draft), "cycle_ms": float(cycle)})
    return rows


# --- The whole comparison ---


class Comparison:
    """The target, the texts, and where everything is written."""

    def __init__(self, args: Namespace):
        self.args = args
        self.out: Path = args.out
        self.dtype = choose_training_dtype(args.device, args.dtype)
        self.target, self.tokenizer = load_target(args.model, args.device, DTYPES[self.dtype])
        check_context(args.seq_len, self.target)
        data = Conversations(args.data, self.tokenizer, args.seq_len)
        self.training, self.held_out = hold_out(data, seed=0)
        self.vocabulary = None
        if args.draft_vocabulary is not None:
            size = self.target.config.vocab_size
            kept = frequent_tokens(self.training, size, args.draft_vocabulary)
            self.vocabulary = torch.tensor(kept, device=self.target.device)
        self.stop_ids = frozenset(self.tokenizer.stop_ids)
        self.prompts = []
        for prompt in read_prompt_file(args.prompts)[:args.prompt_count]:
            messages = [{"role": "user", "content": prompt.turns[0]}]
            self.prompts.append(self.tokenizer.chat(messages))

    def texts(self, prompts: list[list[int]], temperature: float) -> list[Text]:
        count = self.args.max_new_tokens
        texts = write_texts(self.target, prompts, self.stop_ids, count, temperature)
        return [text for text in texts if len(text.tokens) > text.prompt + 1]

    def config(self, updates: int, seed: int) -> RunConfig:
        args = self.args
        return RunConfig(
            updates=updates, batch_size=args.batch_size, seq_len=args.seq_len,
            micro_batch_size=min(args.batch_size, args.micro_batch_size), schedule="cosine",
            warmup=20, optimizer="muon", dtype=self.dtype, seed=seed, eval_every=50,
            save_every=args.save_every,
        )

    def entrant(self, name: str, arm: Arm, rate: float, seed: int) -> Entrant:
        drafter = new_drafter_of(arm, self.target, self.args.mlp, self.vocabulary, seed)
        parameters = drafter.trained_parameters().values()
        for parameter in parameters:
            parameter.requires_grad_(True)
        return Entrant(name, arm, drafter, rate, choose_optimizer(parameters, "muon"))

    def train(
        self, entrants: list[Entrant], folder: Path, updates: int, seed: int, stages, score
    ) -> None:
        """Train entrants into a folder, or go on with what is there."""
        config = self.config(updates, seed)
        parameters = {}
        for entrant in entrants:
            for name, parameter in entrant.drafter.trained_parameters().items():
                parameters[f"{entrant.name}/{name}"] = parameter
        settings = asdict(config) | {
            "arms": {entrant.name: entrant.rate for entrant in entrants},
            "mlp": self.args.mlp,
            "draft_vocabulary": self.args.draft_vocabulary,
            "conversations": len(self.training),
        }
        optimizer = Optimizers(*[entrant.optimizer for entrant in entrants])
        journal = Journal(folder, parameters, optimizer, lambda: None, settings)
        resumes = find_run(folder, resume=True)
        with lock_folder(folder):
            if resumes:
                journal.resume(updates, may_differ={"save_every", "micro_batch_size"})
            else:
                journal.begin()
            if journal.done < updates:
                train_side_by_side(entrants, self.training, config, journal, stages, score)

    def choose_rates(self) -> dict[str, float]:
        """Return the learning rate of each arm: read, or found by short trainings of one seed."""
        if self.args.lr is not None:
            return {name: self.args.lr for name in self.args.arms}
        file = self.out / "rates.json"
        if file.exists():
            return read_json(file)["rates"]
        entrants = []
        for name in self.args.arms:
            for rate in RATES:
                entrants.append(self.entrant(f"{name}@{rate}", ARMS[name], rate, seed=0))
        prompts = []
        for tokens, is_answer in self.held_out:
            prompts.append(tokens[:int(is_answer.int().argmax())].tolist())
        texts = self.texts(prompts, temperature=0.0)

        def score(entrants: list[Entrant]) -> dict[str, dict]:
            return self.score_all(entrants, {"chain": texts})

        updates = max(1, self.args.updates // 4)
        folder = self.out / "rates"
        self.train(entrants, folder, updates, 0, {updates}, score)
        lengths = {}
        for record in read_log(folder):
            if "arm" in record:
                lengths[record["arm"]] = acceptance_length([record["chain"]])
        rates = {}
        for name in self.args.arms:
            rates[name] = max(RATES, key=lambda rate: lengths[f"{name}@{rate}"])
        with atomic_write(file) as part:
            part.write_text(json.dumps({"rates": rates, "acceptance_lengths": lengths}, indent=1))
        return rates

    def run_seed(self, seed: int, rates: dict[str, float]) -> list[dict]:
        """Train all arms with a seed, and score them. Returns a row for each arm and stage."""
        args = self.args
        entrants = [self.entrant(name, ARMS[name], rates[name], seed) for name in args.arms]
        texts = {
            "chain": self.texts(self.prompts, temperature=0.0),
            "sampled chain": self.texts(self.prompts, temperature=1.0),
        }

        def score(entrants: list[Entrant]) -> dict[str, dict]:
            return self.score_all(entrants, texts)

        folder = self.out / f"seed-{seed}"
        self.train(entrants, folder, args.updates, seed, args.stages, score)
        rows = [record for record in read_log(folder) if "arm" in record]
        last = {row["arm"]: row for row in rows if row["update"] == args.updates}
        for entrant in entrants:
            entrant.drafter.to(self.target.dtype)
            if not args.no_trees:
                last[entrant.name] |= self.tree_scores(entrant, folder)
        for row in rows:
            row["seed"] = seed
        for entrant in entrants:
            last[entrant.name]["parameters"] = count_parameters(entrant.drafter)
        return rows

    def score_all(
        self, entrants: list[Entrant], texts: dict[str, list[Text]]
    ) -> dict[str, dict[str, dict]]:
        """Return the scores of each entrant, of each kind of texts."""
        scores = {entrant.name: {} for entrant in entrants}
        for kind, some in texts.items():
            for name, score in score_chains(entrants, some, self.dtype).items():
                scores[name][kind] = score
        return scores

    def tree_scores(self, entrant: Entrant, folder: Path) -> dict:
        """Score trees of a trained drafter, or read the scores."""
        file = folder / f"trees-{entrant.name}.json"
        if not file.exists():
            config = GenerationConfig(self.args.max_new_tokens, stop_ids=self.stop_ids)
            prompts = self.prompts[:self.args.tree_prompts]
            scores = {}
            for kind, limits in TREES.items():
                scores[kind] = score_trees(entrant, limits, prompts, config)
            with atomic_write(file) as part:
                part.write_text(json.dumps(scores))
        return read_json(file)


# --- Results ---


def acceptance_length(scores: list[dict]) -> float:
    """Return tokens for each pass of the target, of all prompts together."""
    tokens = sum(sum(score["tokens"]) for score in scores)
    return tokens / sum(sum(score["passes"]) for score in scores)


SCORED = ("chain", "sampled chain", *TREES)


def tabulate(rows: list[dict], base: str) -> list[dict]:
    """Return a row of each stage and arm: acceptance lengths, and by how many percent they differ
    from those of the arm `base`, with 95% intervals over prompts and seeds."""
    table = []
    for update in sorted({row["update"] for row in rows}):
        for name in dict.fromkeys(row["arm"] for row in rows):
            line = {"updates": update, "arm": name}
            for kind in SCORED:
                mine = gather(rows, update, name, kind)
                if mine is None:
                    continue
                line[kind] = length_of(mine)
                line[f"{kind} interval"] = interval(length_of, mine)
                other = gather(rows, update, base, kind)
                if name != base and other is not None:
                    both = np.concatenate([mine, other])
                    line[f"{kind} difference"] = difference(both)
                    line[f"{kind} difference interval"] = interval(difference, both)
            table.append(line)
    return table


def gather(rows: list[dict], update: int, arm: str, kind: str) -> np.ndarray | None:
    """Return tokens and passes of an arm, (2, seeds, prompts), or None without any."""
    found = [row[kind] for row in rows if (row["update"], row["arm"]) == (update, arm)
             and kind in row]
    if not found:
        return None
    return np.array([[one["tokens"] for one in found], [one["passes"] for one in found]])


def length_of(counts: np.ndarray) -> float:
    """The acceptance length, from counts (2, ...)."""
    tokens, passes = counts[:2].sum(axis=tuple(range(1, counts.ndim)))
    return float(tokens / passes)


def difference(counts: np.ndarray) -> float:
    """By how many percent the acceptance length of the first arm exceeds that of the second, from
    the counts of both (4, ...)."""
    return 100 * (length_of(counts[:2]) / length_of(counts[2:]) - 1)


def interval(statistic: callable, counts: np.ndarray) -> list[float]:
    """Return the 95% interval of a statistic of counts (.., seeds, prompts)."""
    _, seeds, prompts = counts.shape
    return list(bootstrap_interval(lambda s, p: statistic(counts[:, s, p]), prompts, seeds))


COLUMNS = {}
for kind in SCORED:
    COLUMNS[kind] = Column(kind, f"acceptance length, {kind}s")
    COLUMNS[f"{kind} interval"] = Column("95%", "its interval")


def print_table(table: list[dict], base: str) -> None:
    for kind in SCORED:
        if all(kind not in line for line in table):
            continue
        print(f"{kind}: tokens for each pass of the target; difference from {base} in percent")
        rows = []
        for line in table:
            if kind in line:
                rows.append({key.removeprefix(kind).strip() or "length": value
                             for key, value in line.items()
                             if key in ("updates", "arm") or is_of(key, kind)})
        columns = {
            "length": Column("length", "new tokens for each pass of the target"),
            "interval": Column("95%", "its interval, over prompts and seeds"),
            "difference": Column("percent", f"by how much it exceeds that of {base}"),
            "difference interval": Column("95% of that", "interval, over prompts and seeds"),
        }
        print_rows(rows, ["updates", "arm"], columns)
        print()


def is_of(key: str, kind: str) -> bool:
    return key in (kind, f"{kind} interval", f"{kind} difference", f"{kind} difference interval")


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
    add("--prompts", required=True, type=path, metavar="FILE", help="test prompts, not in the data")
    add("--out", required=True, type=path, metavar="DIR", help="the same DIR goes on")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS)[:7], metavar="ARM",
        help="of %(choices)s (default: the first seven)")
    add("--seeds", nargs="*", type=number(int, 0), default=[0, 1, 2], metavar="N",
        help="of drafters; without a number only learning rates are chosen (default: 0 1 2)")
    add("--updates", type=positive_int, default=6400, help=default)
    add("--stages", nargs="*", type=positive_int, metavar="N",
        help="updates after which chains are scored (default: an eighth, a quarter, a half, all)")
    add("--lr", type=number(float, 0), help="of all arms (default: each arm's best of three)")
    add("--batch-size", type=positive_int, default=2, help=f"conversations {default}")
    add("--micro-batch-size", type=positive_int, default=16, help=f"read at once {default}")
    add("--seq-len", type=number(int, 16), default=512, help=f"tokens {default}")
    add("--mlp", type=positive_int, metavar="WIDTH",
        help="of the MLPs of `full`, to whose size the others are fitted (default: the paper's)")
    add("--draft-vocabulary", type=positive_int, metavar="COUNT", help="as in train.py")
    add("--prompt-count", type=positive_int, default=256, help=f"test prompts {default}")
    add("--tree-prompts", type=positive_int, default=64, help=f"with trees {default}")
    add("--max-new-tokens", type=positive_int, default=96, help=f"of an answer {default}")
    add("--save-every", type=positive_int, default=200, help=f"updates {default}")
    add("--no-trees", action="store_true", help="chains only")
    add("--time", action="store_true", help="also time drafts, on an idle machine")
    add("--json", action="store_true", help="print one JSON object instead of the tables")
    add_model_arguments(parser)
    args = parser.parse_args()
    if args.stages is None:
        args.stages = [args.updates // share for share in (8, 4, 2, 1)]
    return args


def main() -> None:
    args = parse_arguments()
    check_files(args.data)
    comparison = Comparison(args)
    rates = comparison.choose_rates()
    rows = []
    for seed in args.seeds:
        rows += comparison.run_seed(seed, rates)
    table = tabulate(rows, args.arms[0])
    if args.json:
        print(json.dumps({"rates": rates, "rows": rows, "table": table}))
    elif rows:
        say(f"learning rates: {rates}")
        print_table(table, args.arms[0])


if __name__ == "__main__":
    run_command(main)
