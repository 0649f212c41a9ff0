"""Speculative decoding: draft, verify, accept (paper, algorithm 1).

The drafter proposes K tokens, the target checks them all in one pass and keeps a prefix, and the text is distributed
exactly as if the target had written it alone (Leviathan et al. 2023; Chen et al. 2023). With p the target's and q the
drafter's distribution of the token at hand:

    accept x ~ q with probability min(1, p(x) / q(x)); at the first rejection draw from norm(max(p - q, 0)) instead;
    if all K are accepted draw one more from p.

At temperature 0 both are point masses and this is: keep drafts as long as they are the target's argmax.

    python speculate.py --prompt "Explain why the sky is blue." --show
    python speculate.py --bench prompts.jsonl             # against the target alone, interleaved

Shapes: T tokens, K draft length, E hidden, V vocabulary.
"""
import json
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from llama import (DEFAULT_MODEL, InputError, Llama, Parser, Tokenizer, add_generation_arguments, add_model_arguments,
                   answer_length, generate, load_target, natural, probabilities, report, run_command, sample)
from moa import Draft, Drafter, Drafting, Memory, load_drafter

SHIPPED = {DEFAULT_MODEL: Path(__file__).parent / "weights" / DEFAULT_MODEL}
LONGEST_DRAFT = 8  # where --draft-length does not say
CONFIDENCE = 0.6  # and there a draft ends once the product of the drafter's confidences is below this


@dataclass(frozen=True)
class Settings:
    """How to generate. draft_length None: up to LONGEST_DRAFT tokens, as long as the drafter is confident."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    draft_length: int | None = None
    stop_ids: frozenset[int] = frozenset()


@dataclass
class Figures:
    """What one generation cost."""

    target_calls: int = 0  # the prefill left out
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


@dataclass
class Verdict:
    """The target's answer: how many drafts it accepts, its own next token, and the memory of what is now verified."""

    accepted: int
    token: int
    memory: Memory


def speculate(target: "LocalTarget", drafting: Drafting, prompt: list[int], settings: Settings,
              generator: torch.Generator, figures: Figures) -> Iterator[tuple[list[int], list[int]]]:
    """The loop. Yields, each cycle, the drafts that were accepted and the target's own token behind them.

    Ends with a stop token or at max_new_tokens: what lies beyond is not yielded.
    """
    s, left = settings, settings.max_new_tokens
    longest, threshold = (LONGEST_DRAFT, CONFIDENCE) if s.draft_length is None else (s.draft_length, 0.0)
    verdict, drafts = target.prefill(prompt), []
    while True:
        tokens = (drafts[:verdict.accepted] + [verdict.token])[:left]
        end = next((i + 1 for i, token in enumerate(tokens) if token in s.stop_ids), len(tokens))
        left -= end
        yield tokens[:min(end, verdict.accepted)], tokens[verdict.accepted:end]
        if left == 0 or tokens[end - 1] in s.stop_ids:
            return
        start = clock(target)
        drafting.observe(verdict.memory)
        draft = drafting.draft(verdict.token, min(longest, left - 1), threshold, s.temperature, s.top_p, generator)
        drafted = clock(target)
        verdict, drafts = target.verify(draft), draft.tokens
        figures.draft_seconds += drafted - start
        figures.verify_seconds += clock(target) - drafted  # LSA runs on the target's side
        figures.target_calls += 1


def clock(target: "LocalTarget") -> float:
    """Seconds, once the device has done what it was given."""
    if target.cache.kv.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def accept(p: Tensor, q: Tensor | None, drafts: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """How many drafts to keep, and the token behind them: distributed as p, whatever q is.

    p (K + 1, V), q (K, V), drafts (K). q None: every draft was certain, a point mass on itself.
    """
    K = len(drafts)
    rows = torch.arange(K, device=p.device)
    p_x = p[rows, drafts]  # (K)
    q_x = torch.ones_like(p_x) if q is None else q[rows, drafts]  # (K)
    u = torch.rand(K, device=p.device, generator=generator)
    accepted = int((u * q_x < p_x).int().cumprod(0).sum())  # each with probability min(1, p(x) / q(x))
    last = p[accepted]  # (V)
    if accepted < K:  # draw from norm(max(p - q, 0)); sample() needs no norm
        certain = torch.zeros_like(last).index_fill_(0, drafts[accepted], 1.0)
        residual = (last - (certain if q is None else q[accepted])).clamp(min=0)
        last = residual if residual.any() else last  # all 0 where p = q up to rounding
    return accepted, int(sample(last, generator))


class LocalTarget:
    """The target of one conversation, on this machine. LSA runs on its side."""

    def __init__(self, model: Llama, drafter: Drafter, capacity: int, settings: Settings, generator: torch.Generator):
        self.model, self.drafter, self.settings, self.generator = model, drafter, settings, generator
        self.cache = model.new_cache(capacity)

    def prefill(self, prompt: list[int]) -> Verdict:
        """Read the prompt: first token, and the memory of all of it."""
        hidden = self.forward(prompt)  # (1, T, E)
        p = self.distribution(hidden[0, -1])
        return Verdict(0, int(sample(p, self.generator)), self.drafter.remember(prompt, self.cache, 0, hidden))

    def verify(self, draft: Draft) -> Verdict:
        """Check a draft in one pass; the cache keeps its last token and the drafts that are accepted."""
        start, tokens = self.cache.length, [draft.token] + draft.tokens
        hidden = self.forward(tokens)  # (1, K + 1, E)
        drafts = torch.tensor(draft.tokens, dtype=torch.long, device=hidden.device)
        accepted, token = accept(self.distribution(hidden[0]), draft.q, drafts, self.generator)
        self.cache.truncate(start + 1 + accepted)
        return Verdict(accepted, token, self.drafter.remember(tokens[:1 + accepted], self.cache, start, hidden))

    def forward(self, tokens: list[int]) -> Tensor:
        return self.model.hidden(torch.tensor([tokens], device=self.cache.kv.device), self.cache)

    def distribution(self, hidden: Tensor) -> Tensor:
        """p, (..., E) -> (..., V)."""
        return probabilities(self.model.lm_head(hidden), self.settings.temperature, self.settings.top_p)


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
def answer(model: Llama, drafter: Drafter | None, prompt: list[int], settings: Settings, seed: int = 0,
           emit=lambda token, drafted: None) -> Generation:
    """One answer to a prompt, speculatively or, without a drafter, by the target alone. `emit` sees each token."""
    device, result = model.embed_tokens.weight.device, Generation()
    generator = torch.Generator(device).manual_seed(seed)
    capacity, s = len(prompt) + settings.max_new_tokens, settings
    start = time.perf_counter()
    if drafter is None:
        stream = (([], [token]) for token in
                  generate(model, prompt, s.max_new_tokens, s.stop_ids, s.temperature, s.top_p, generator))
    else:
        target = LocalTarget(model, drafter, capacity, s, generator)
        stream = speculate(target, drafter.start(capacity), prompt, s, generator, result.figures)
    for drafts, own in stream:
        for i, token in enumerate(drafts + own):
            result.tokens.append(token)
            emit(token, i < len(drafts))
    result.seconds = time.perf_counter() - start
    if drafter is None:
        result.figures.target_calls = len(result.tokens) - 1
        result.figures.verify_seconds = result.seconds
    return result


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
    """Every prompt by the target alone and by speculation, in turn, after a warm-up. Rows by category, then overall."""
    methods = {"target": None, "chain": drafter}  # a chain: one draft token behind the other
    runs: dict[str, list[dict[str, Generation]]] = {}
    for number, (category, turns) in enumerate(tqdm(prompts[:1] + prompts, unit=" prompts")):
        messages: list[dict] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            prompt, results = tokenizer.chat(messages), {}
            s = replace(settings, max_new_tokens=answer_length(model, prompt, settings.max_new_tokens))
            for method in sorted(methods, reverse=number % 2 == 0):
                results[method] = answer(model, methods[method], prompt, s, seed)
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
    base = sum(r["target"].seconds for r in runs) / sum(len(r["target"].tokens) for r in runs)  # seconds a token
    pace = [r["target"].seconds / len(r["target"].tokens) * len(r[method].tokens) / r[method].seconds for r in runs]
    low, _, high = statistics.quantiles(pace, n=4) if len(pace) > 1 else pace * 3
    return {"category": category, "method": method, "tokens_per_second": new_tokens / seconds,
            "speedup": base / (seconds / new_tokens), "speedup_quartiles": [low, high],
            "acceptance_length": (new_tokens - len(mine)) / max(1, calls), "target_calls": calls, "new_tokens": new_tokens,
            "draft_share": sum(g.figures.draft_seconds for g in mine) / seconds,
            "verify_share": sum(g.figures.verify_seconds for g in mine) / seconds,
            "identical": sum(results[method].tokens == results["target"].tokens for results in runs) / len(runs)}


def print_table(rows: list[dict]) -> None:
    print(f"{'category':<16} {'method':<8} {'tokens/s':>8} {'speed-up':>8} {'(quartiles)':>13} {'acceptance':>10} "
          f"{'calls':>6} {'tokens':>6} {'identical':>9}")
    for r in rows:
        low, high = r["speedup_quartiles"]
        print(f"{r['category']:<16} {r['method']:<8} {r['tokens_per_second']:>8.1f} {r['speedup']:>8.2f} "
              f"({low:>5.2f}-{high:>5.2f}) {r['acceptance_length']:>10.2f} {r['target_calls']:>6} {r['new_tokens']:>6} "
              f"{r['identical']:>9.0%}")


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------

GREEN, RESET = "\033[32m", "\033[0m"


def main() -> None:
    parser = Parser(description="Generate with a drafter: the target's own text, sooner.")
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--prompt")
    work.add_argument("--bench", metavar="FILE", help="measure every prompt of a .jsonl file against the target alone")
    add_model_arguments(parser)
    parser.add_argument("--drafter", metavar="DIR", help="default: the one shipped for the default model")
    parser.add_argument("--draft-length", type=natural, metavar="K", help="default: as long as the drafter is confident")
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
    settings = Settings(args.max_new_tokens, args.temperature, args.top_p, args.draft_length, frozenset(tokenizer.stop_ids))
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
