"""Speculative decoding: draft, verify, accept (paper, algorithm 1).

The drafter proposes K tokens, a chain or a tree of them; the target checks all in one pass and keeps a path from the root;
the text is distributed exactly as if the target had written it alone (Leviathan et al. 2023; Chen et al. 2023). With p the
target's and q the drafter's distribution of the token at hand:

    accept x ~ q with probability min(1, p(x) / q(x)); if it is rejected, p becomes norm(max(p - q, 0)) and q loses x:
    so goes on the next sibling; after the last one, or behind the last accepted token, draw from what p is then.

For a chain, with no siblings, that is the algorithm of the two papers; for a tree, SpecInfer's (Miao et al. 2024) with
draws without replacement. At temperature 0 both are point masses and this is: follow the target's argmax while it was drafted.

    python speculate.py --prompt "Explain why the sky is blue." --show
    python speculate.py --bench                           # target alone, chain, tree and lookup, interleaved

Shapes: T tokens, K drafts, E hidden, V vocabulary.
"""
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from llama import (DEFAULT_MODEL, InputError, KVCache, Llama, Parser, Tokenizer, add_generation_arguments, add_model_arguments,
                   answer_length, generate, load_target, natural, probabilities, report, run_command, sample)
from moa import Draft, Drafter, Drafting, Memory, Shape, ancestor_mask, load_drafter

SHIPPED = {DEFAULT_MODEL: Path(__file__).parent / "weights" / DEFAULT_MODEL}
PROMPTS = Path(__file__).parent / "tests" / "prompts.jsonl"
CHAIN = Shape(depth=6)
TREE = Shape(depth=6, breadth=3, nodes=8)


@dataclass(frozen=True)
class Settings:
    """How to generate. shapes: of drafts; of several the fastest. adaptive: drafted of them is only what pays."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    shapes: tuple[Shape, ...] = (CHAIN, TREE)
    adaptive: bool = True
    stop_ids: frozenset[int] = frozenset()


@dataclass
class Figures:
    """What one generation cost."""

    target_calls: int = 0  # the prefill left out
    drafted: int = 0  # tokens proposed
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


class Pace:
    """What drafts of a shape cost and bring on this machine, measured as they are made; older cycles count less and less."""

    DECAY = 0.98
    PRIOR = 1 / 20  # of a pass: what one more token in it costs, until there are measurements
    TRIAL = 8  # cycles before a shape is judged

    def __init__(self, shape: Shape):
        self.shape = shape
        self.cycles = self.tokens = self.seconds = 0.0
        self.levels = self.draft_seconds = 0.0
        self.rows = self.rows_squared = self.verify_seconds = self.rows_seconds = 0.0

    @staticmethod
    def fastest(paces: "list[Pace]") -> "Pace":
        """Each in turn until all are tried, then whichever brings the most tokens a second."""
        least = min(paces, key=lambda pace: pace.cycles)
        return least if least.cycles < Pace.TRIAL * Pace.DECAY ** Pace.TRIAL else max(paces, key=lambda p: p.tokens / p.seconds)

    def record(self, levels: int, draft_seconds: float, rows: int, verify_seconds: float, tokens: int) -> None:
        """One cycle: levels drafted, rows in the verifying pass, tokens it brought."""
        for name, value in (("cycles", 1), ("tokens", tokens), ("seconds", draft_seconds + verify_seconds),
                            ("levels", levels), ("draft_seconds", draft_seconds), ("rows", rows),
                            ("rows_squared", rows * rows), ("verify_seconds", verify_seconds),
                            ("rows_seconds", rows * verify_seconds)):
            setattr(self, name, self.DECAY * getattr(self, name) + value)

    def row_seconds(self) -> float:
        """Seconds of one more token in a verifying pass: the slope of a line through the measurements, and the prior."""
        mean_rows, mean_seconds = self.rows / self.cycles, self.verify_seconds / self.cycles
        covariance = self.rows_seconds / self.cycles - mean_rows * mean_seconds
        variance = self.rows_squared / self.cycles - mean_rows ** 2
        return max(0.0, (covariance + self.PRIOR * mean_seconds) / (variance + 1))

    def fit(self) -> Shape:
        """The shape, ending where the expected gain, in tokens, no longer covers the time at the present rate of tokens."""
        if self.cycles == 0:
            return self.shape
        rate, row = self.tokens / self.seconds, self.row_seconds()
        level = self.draft_seconds / max(1.0, self.levels)
        return replace(self.shape, token_threshold=rate * row, level_threshold=rate * (level + row))


@dataclass
class Verdict:
    """The target's answer: the drafts it accepts, its own next token, and the memory of what is now verified."""

    accepted: list[int]
    token: int
    memory: Memory


def speculate(target: "LocalTarget", drafting: Drafting, prompt: list[int], settings: Settings,
              generator: torch.Generator, figures: Figures, paces: list[Pace]) -> Iterator[tuple[list[int], list[int]]]:
    """The loop. Yields, each cycle, the drafts that were accepted and the target's own token behind them.

    Ends with a stop token or at max_new_tokens: what lies beyond is not yielded.
    """
    s, left = settings, settings.max_new_tokens
    verdict = target.prefill(prompt)
    while True:
        tokens = (verdict.accepted + [verdict.token])[:left]
        end = next((i + 1 for i, token in enumerate(tokens) if token in s.stop_ids), len(tokens))
        left -= end
        yield tokens[:min(end, len(verdict.accepted))], tokens[len(verdict.accepted):end]
        if left == 0 or tokens[end - 1] in s.stop_ids:
            return
        start = clock(target)
        drafting.observe(verdict.memory)
        pace = Pace.fastest(paces)
        shape = pace.fit() if s.adaptive else pace.shape
        draft = drafting.draft(verdict.token, replace(shape, depth=min(shape.depth, left - 1)), s.temperature, s.top_p,
                               generator)
        drafted = clock(target)
        verdict = target.verify(draft)  # LSA runs on the target's side
        verified = clock(target)
        pace.record(max(draft.depths()), drafted - start, 1 + len(draft.tokens), verified - drafted, 1 + len(verdict.accepted))
        figures.target_calls += 1
        figures.drafted += len(draft.tokens)
        figures.draft_seconds += drafted - start
        figures.verify_seconds += verified - drafted


def clock(target: "LocalTarget") -> float:
    """Seconds, once the device has done what it was given."""
    if target.cache.kv.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def follow(choices: list[int], draft: Draft) -> tuple[list[int], int]:
    """Verification at temperature 0: the accepted nodes, and the token behind them.

    choices (K + 1): the target's argmax behind draft.token and behind each draft.
    """
    child = {(parent, token): i for i, (parent, token) in enumerate(zip(draft.parents, draft.tokens))}
    path, node = [], -1
    while (node, choices[node + 1]) in child:
        node = child[node, choices[node + 1]]
        path.append(node)
    return path, choices[node + 1]


def accept(p: Tensor, draft: Draft, generator: torch.Generator) -> tuple[list[int], int]:
    """Which nodes to keep, and the token behind them: distributed as p, whatever q is. p (K + 1, V).

    Siblings of one rank are tried together in all families: the device waits for the host once, not once a node.
    """
    parents = sorted(set(draft.parents))
    families = [[i for i, parent in enumerate(draft.parents) if parent == mother] for mother in parents]
    rest, q = p[[parent + 1 for parent in parents]], draft.q  # (F, V) of F families
    trials = []
    for rank in range(max(map(len, families), default=0)):
        x = torch.tensor([[draft.tokens[f[rank]] if rank < len(f) else -1] for f in families], device=p.device)  # (F, 1)
        present, x = x >= 0, x.clamp(min=0)
        if draft.q is None or rank > 0:  # a point mass where nothing was drawn, or what is left without the last sibling
            q = torch.zeros_like(rest).scatter_(1, x, 1.0) if draft.q is None else normalised(q.scatter(1, last, 0.0))
        u = torch.rand(len(x), 1, device=p.device, generator=generator)
        trials.append(present & (u * q.gather(1, x) < rest.gather(1, x)))  # with probability min(1, p(x) / q(x))
        residual = normalised((rest - q).clamp(min=0))
        rest = torch.where(present & (residual.sum(1, keepdim=True) > 0), residual, rest)  # all 0 where p = q
        last = x
    trials = torch.cat(trials, dim=1).tolist() if trials else []
    path, node = [], -1
    while node in parents:
        i = parents.index(node)
        if True not in trials[i]:
            return path, int(sample(rest[i], generator))
        node = families[i][trials[i].index(True)]
        path.append(node)
    return path, int(sample(p[node + 1], generator))


def normalised(p: Tensor) -> Tensor:
    return p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)


class LocalTarget:
    """The target of one conversation, on this machine. LSA runs on its side."""

    def __init__(self, model: Llama, drafter: Drafter, capacity: int, settings: Settings, generator: torch.Generator):
        self.model, self.drafter, self.settings, self.generator = model, drafter, settings, generator
        self.cache = model.new_cache(capacity)

    def prefill(self, prompt: list[int]) -> Verdict:
        """Read the prompt: first token, and the memory of all of it."""
        hidden = self.model.hidden(torch.tensor([prompt], device=self.cache.kv.device), self.cache)  # (1, T, E)
        _, token = self.judge(hidden[0, -1:], Draft(prompt[-1], [], []))
        return Verdict([], token, self.drafter.remember(prompt, self.cache, 0, hidden))

    def verify(self, draft: Draft) -> Verdict:
        """Check a draft in one pass; the cache keeps its root and the nodes that are accepted."""
        start, device, rope, mask = self.cache.length, self.cache.kv.device, None, None
        if not draft.is_chain():
            depths = torch.tensor(draft.depths(), device=device)
            rope = self.model.rope(start, start + int(depths.max()) + 1)[:, depths]  # (2, K + 1, D)
            tree = ancestor_mask([-1] + [parent + 1 for parent in draft.parents])  # (K + 1, K + 1)
            mask = F.pad(tree, (start, 0), value=True).to(device)
        hidden = self.model.hidden(torch.tensor([[draft.token] + draft.tokens], device=device), self.cache, rope, mask)
        path, token = self.judge(hidden[0], draft)
        rows = [0] + [1 + node for node in path]
        self.cache.keep(start, rows)
        accepted = [draft.tokens[node] for node in path]
        memory = self.drafter.remember([draft.token] + accepted, self.cache, start, hidden[:, rows])
        return Verdict(accepted, token, memory)

    def judge(self, hidden: Tensor, draft: Draft) -> tuple[list[int], int]:
        """Accepted nodes and next token, from the hidden states (K + 1, E) of draft.token and the drafts."""
        logits, s = self.model.lm_head(hidden), self.settings  # (K + 1, V)
        if s.temperature == 0:
            return follow(logits.argmax(-1).tolist(), draft)
        return accept(probabilities(logits, s.temperature, s.top_p), draft, self.generator)


# ---------------------------------------------------------------------------------------------------------------------
# One generation, by either method
# ---------------------------------------------------------------------------------------------------------------------

@dataclass
class Generation:
    """Tokens as they come, each with whether it was drafted, and the figures once they have all come."""

    tokens: list[int] = field(default_factory=list)
    figures: Figures = field(default_factory=Figures)
    seconds: float = 0.0

    def acceptance_length(self) -> float:
        return (len(self.tokens) - 1) / max(1, self.figures.target_calls)


@torch.inference_mode()
def answer(model: Llama, drafter: "Drafter | Lookup | None", prompt: list[int], settings: Settings, seed: int = 0,
           emit=lambda token, drafted: None, paces: list[Pace] | None = None) -> Generation:
    """One answer to a prompt, speculatively or, without a drafter, by the target alone. `emit` sees each token.

    paces: of earlier answers, to go on from; one a shape.
    """
    device, result, s = model.embed_tokens.weight.device, Generation(), settings
    generator = torch.Generator(device).manual_seed(seed)
    start = time.perf_counter()
    if drafter is None:
        stream = (([], [token]) for token in
                  generate(model, prompt, s.max_new_tokens, s.stop_ids, s.temperature, s.top_p, generator))
    else:
        capacity = len(prompt) + s.max_new_tokens + max(max(shape.depth, shape.nodes) for shape in s.shapes)  # with what will be rejected
        target = LocalTarget(model, drafter, capacity, s, generator)
        stream = speculate(target, drafter.start(capacity), prompt, s, generator, result.figures,
                           paces or [Pace(shape) for shape in s.shapes])
    for drafts, own in stream:
        for i, token in enumerate(drafts + own):
            result.tokens.append(token)
            emit(token, i < len(drafts))
    result.seconds = time.perf_counter() - start
    if drafter is None:
        result.figures.target_calls = len(result.tokens) - 1
        result.figures.verify_seconds = result.seconds
    return result


class Lookup:
    """A drafter that has learnt nothing: what followed the last few tokens when they occurred before (Saxena 2023)."""

    def start(self, capacity: int) -> "Lookup":
        self.history: list[int] = []
        return self

    def remember(self, tokens: list[int], cache: KVCache, start: int, hidden: Tensor) -> Memory:
        return Memory(tokens)

    def observe(self, memory: Memory) -> None:
        self.history += memory.tokens

    def draft(self, token: int, shape: Shape, temperature: float, top_p: float, generator: torch.Generator) -> Draft:
        text = self.history + [token]
        for n in (3, 2, 1):
            for i in range(len(text) - n - 1, -1, -1):
                if text[i:i + n] == text[-n:]:
                    found = text[i + n:i + n + shape.depth]
                    return Draft(token, found, list(range(-1, len(found) - 1)))
        return Draft(token, [], [])


# ---------------------------------------------------------------------------------------------------------------------
# The benchmark
# ---------------------------------------------------------------------------------------------------------------------

def read_prompts(path: str) -> list[tuple[str, list[str]]]:
    """(category, turns) of each line of a prompt set: {"prompt": text} or {"category": name, "turns": [text, ...]}."""
    prompts = []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            turns = [record["prompt"]] if "prompt" in record else record["turns"]
            if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise InputError(f'{path}, line {number}: expected {{"prompt": text}} or '
                             '{"category": name, "turns": [text, ...]}') from None
        prompts.append((str(record.get("category", "all")), turns))
    if not prompts:
        raise InputError(f"{path}: no prompts")
    return prompts


def bench(model: Llama, drafter: Drafter, tokenizer: Tokenizer, prompts: list[tuple[str, list[str]]], settings: Settings,
          seed: int) -> list[dict]:
    """Every prompt by every method, in turn, after a warm-up. Rows by category, then overall."""
    methods = {"target": (None, CHAIN), "chain": (drafter, CHAIN), "tree": (drafter, TREE), "lookup": (Lookup(), CHAIN)}
    paces = {method: [Pace(shape)] for method, (_, shape) in methods.items()}
    runs: dict[str, list[dict[str, Generation]]] = {}
    for number, (category, turns) in enumerate(tqdm(prompts[:1] + prompts, unit=" prompts")):
        messages: list[dict] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            prompt, results = tokenizer.chat(messages), {}
            length = answer_length(model, prompt, settings.max_new_tokens)
            for method in random.Random(number).sample(list(methods), len(methods)):
                proposer, shape = methods[method]
                s = replace(settings, max_new_tokens=length, shapes=(shape,))
                results[method] = answer(model, proposer, prompt, s, seed, paces=paces[method])
            messages.append({"role": "assistant", "content": tokenizer.decode(results["target"].tokens)})
            if number > 0:  # the first was the warm-up
                runs.setdefault(category, []).append(results)
    runs["overall"] = [results for category in runs.values() for results in category]
    return [row(category, method, results) for category, results in runs.items() for method in methods]


def row(category: str, method: str, runs: list[dict[str, Generation]]) -> dict:
    """One line of the benchmark: totals of a method over a category's prompts, and the spread over prompts."""
    mine = [results[method] for results in runs]
    new_tokens, seconds = sum(len(g.tokens) for g in mine), sum(g.seconds for g in mine)
    calls = sum(g.figures.target_calls for g in mine)
    draft, verify = (sum(getattr(g.figures, f"{part}_seconds") for g in mine) / seconds for part in ("draft", "verify"))
    base = sum(r["target"].seconds for r in runs) / sum(len(r["target"].tokens) for r in runs)  # seconds a token
    pace = [r["target"].seconds / len(r["target"].tokens) * len(r[method].tokens) / r[method].seconds for r in runs]
    low, _, high = statistics.quantiles(pace, n=4) if len(pace) > 1 else pace * 3
    return {"category": category, "method": method, "tokens_per_second": new_tokens / seconds,
            "speedup": base / (seconds / new_tokens), "speedup_quartiles": [low, high],
            "acceptance_length": (new_tokens - len(mine)) / max(1, calls), "target_calls": calls, "new_tokens": new_tokens,
            "drafted_per_call": sum(g.figures.drafted for g in mine) / max(1, calls),
            "draft_share": draft, "verify_share": verify, "other_share": 1 - draft - verify,
            "identical": sum(results[method].tokens == results["target"].tokens for results in runs) / len(runs)}


def print_table(rows: list[dict]) -> None:
    print("category         method  tokens/s speed-up   (quartiles) acceptance  calls tokens draft verify rest identical")
    for r in rows:
        low, high = r["speedup_quartiles"]
        print(f"{r['category']:<16} {r['method']:<7} {r['tokens_per_second']:>8.1f} {r['speedup']:>8.2f} "
              f"({low:>5.2f}-{high:>5.2f}) {r['acceptance_length']:>10.2f} {r['target_calls']:>6} {r['new_tokens']:>6} "
              f"{r['draft_share']:>5.0%} {r['verify_share']:>6.0%} {r['other_share']:>4.0%} {r['identical']:>9.0%}")


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------

GREEN, RESET = "\033[32m", "\033[0m"


def main() -> None:
    parser = Parser(description="Generate with a drafter: the target's own text, sooner.")
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--prompt")
    work.add_argument("--bench", nargs="?", const=PROMPTS, metavar="FILE",
                      help="measure all methods on a .jsonl file of prompts (default: a few of our own)")
    add_model_arguments(parser)
    parser.add_argument("--drafter", metavar="DIR", help="default: the one shipped for the default model")
    parser.add_argument("--draft-length", type=natural, metavar="K",
                        help="draft exactly this far (default: as far as pays, by the costs measured while generating)")
    parser.add_argument("--tree", action="store_true", help="draft trees (default: trees or chains, whichever are faster)")
    parser.add_argument("--breadth", type=natural, default=TREE.breadth, help="leaves expanded together (default: %(default)s)")
    parser.add_argument("--nodes", type=natural, default=TREE.nodes, help="tokens in a tree (default: %(default)s)")
    parser.add_argument("--no-speculation", action="store_true", help="the target alone")
    parser.add_argument("--show", action="store_true", help="colour the accepted drafts green")
    add_generation_arguments(parser)
    args = parser.parse_args()
    if args.bench and args.no_speculation:
        raise InputError("--bench compares with and without speculation; leave out --no-speculation")
    prompts = read_prompts(args.bench) if args.bench else None
    folder = args.drafter or SHIPPED.get(args.model)
    if folder is None and not args.no_speculation:
        raise InputError(f"no drafter is shipped for {args.model}: name one with --drafter (train.py makes them), or add "
                         "--no-speculation")
    model, tokenizer = load_target(args)
    drafter = None if args.no_speculation else load_drafter(folder, model).pack()
    model.pack()
    depth = args.draft_length or TREE.depth
    chain, tree = Shape(depth), Shape(depth, args.breadth, args.nodes)
    shapes = (tree,) if args.tree else (chain,) if args.draft_length else (chain, tree)
    settings = Settings(args.max_new_tokens, args.temperature, args.top_p, shapes, args.draft_length is None,
                        frozenset(tokenizer.stop_ids))
    if prompts:
        rows = bench(model, drafter, tokenizer, prompts, settings, args.seed)
        print(json.dumps({"rows": rows})) if args.json else print_table(rows)
        return
    prompt = tokenizer.chat([{"role": "user", "content": args.prompt}])
    settings = replace(settings, max_new_tokens=answer_length(model, prompt, args.max_new_tokens))
    stream = tokenizer.stream()

    def emit(token: int, drafted: bool) -> None:
        text = stream(token)
        if not args.json:
            print(f"{GREEN}{text}{RESET}" if args.show and drafted and text else text, end="", flush=True)

    result = answer(model, drafter, prompt, settings, args.seed, emit)
    f = result.figures
    report(tokenizer, result.tokens, result.seconds, args.json, target_calls=f.target_calls,
           acceptance_length=result.acceptance_length(), draft_seconds=f.draft_seconds, verify_seconds=f.verify_seconds)


if __name__ == "__main__":
    run_command(main)
