"""Lossless: with drafts, a text is distributed exactly as the target's own. Shown branch by branch.

Everything random in drafting and accepting is one of three draws: a token from a distribution,
several without replacement, or a uniform number that a ratio is compared with. Here a script
decides them. The real functions run again and again, until every outcome of every draw was taken
once, with its probability. Added up by the text that comes out, these must be the target's own
probabilities, up to what float32 rounds. The same sums must reject wrong rules.

That the real draws have the probabilities which are scripted here is shown in test_llama.py
(`sample`) and in test_speculate.py (`gumbel_topk`).

First comes one token, then one draft with its verification, where tables of random logits stand for
networks, so that much can be enumerated: 5 900 branches by the right rules, 15 000 by wrong ones.
Then come whole answers of tiny models, 1 000 branches by either. Where a branch ends before the
text is as long as it is compared, the target goes on alone, as it would.
"""
from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Callable, Iterator, NamedTuple

import pytest
import torch
from tiny_models import new_drafter, new_target
from torch import Tensor, nn

import llama
import moa
import netsim
import speculate
from app.lookup import Lookup
from experiments.copies import NoDrafter, new_copier
from llama import GenerationConfig, Llama, Sampling, probabilities
from moa import CacheUpdate, Draft, Drafter, DraftLimits, DraftState, likeliest_candidates
from netsim import Connection, Link, QuantizedDraftState, RemoteVerifier, Server
from speculate import (
    Acceptance,
    LocalVerifier,
    TreeSampler,
    accept_draft,
    draw_candidates,
    rejection_sample_tree,
)

VOCABULARY = 3
TOLERANCE = 1e-6  # of a total variation
CLEARLY = 1e-3  # the least by which a wrong rule must be off


# --- Every branch, with its probability ---


class Chance:
    """What is drawn, by a script: each run takes one branch, and `branches` takes them all."""

    def __init__(self):
        self.script: list[int] = []  # the outcomes to take first, one for each draw
        self.taken: list[int] = []
        self.probability = 1.0  # of the branch so far
        self.waiting: list[list[int]] = []  # scripts of branches that were passed by
        self.seed: int | None = None  # of the only generator whose draws branch; None: all do

    def branches(self, run: Callable) -> Iterator[tuple[float, object]]:
        """The probability of each branch, and what `run` returns there. Depth first."""
        self.waiting = [[]]
        while self.waiting:
            self.script = self.waiting.pop()
            self.taken = []
            self.probability = 1.0
            result = run()
            yield self.probability, result

    def outcome(self, weights: list[float]) -> int:
        """One of the possible outcomes of a draw, with a probability proportional to its weight."""
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        if len(self.taken) < len(self.script):
            choice = self.script[len(self.taken)]
            assert choice in possible, "a run does not repeat what it did before"
        else:
            choice = possible[0]
            for other in possible[1:]:
                self.waiting.append(self.taken + [other])
        self.taken.append(choice)
        self.probability *= weights[choice] / sum(weights)
        return choice

    def branches_here(self, generator: torch.Generator) -> bool:
        return self.seed is None or generator.initial_seed() == self.seed

    def sample(self, p: Tensor, generator: torch.Generator) -> int:
        """In place of llama.sample."""
        if not self.branches_here(generator):
            return int(p.argmax())
        return self.outcome(p.double().tolist())

    def gumbel_topk(self, p: Tensor, k: int, generator: torch.Generator) -> list[int]:
        """In place of speculate.gumbel_topk: k tokens from p (V), in the order drawn."""
        weights = p.double().tolist()
        drawn = []
        for _ in range(k):
            token = self.outcome(weights)
            weights[token] = 0.0
            drawn.append(token)
        return drawn

    def rand(self, count: int, generator: torch.Generator, device=None) -> UniformNumbers:
        """In place of torch.rand."""
        return UniformNumbers(self, count, self.branches_here(generator))


class UniformNumbers:
    """What torch.rand returns, as far as anyone asks."""

    def __init__(self, chance: Chance, count: int, branching: bool):
        self.chance = chance
        self.count = count
        self.branching = branching

    def tolist(self) -> list:
        if not self.branching:
            return [0.5] * self.count
        return [Uniform(self.chance) for _ in range(self.count)]


class Uniform:
    """A number in [0, 1) that is not decided yet. Each comparison narrows it."""

    def __init__(self, chance: Chance):
        self.chance = chance
        self.low = 0.0
        self.high = 1.0

    def __lt__(self, bound: float | Tensor) -> bool:
        bound = min(max(float(bound), self.low), self.high)
        is_less = self.chance.outcome([self.high - bound, bound - self.low]) == 1
        if is_less:
            self.high = bound
        else:
            self.low = bound
        return is_less

    def __ge__(self, bound: float | Tensor) -> bool:
        return not self < bound


@pytest.fixture
def chance(monkeypatch) -> Chance:
    chance = Chance()
    for script in (llama, moa, speculate):
        monkeypatch.setattr(script, "sample", chance.sample)
    monkeypatch.setattr(speculate, "gumbel_topk", chance.gumbel_topk)
    monkeypatch.setattr(torch, "rand", chance.rand)
    monkeypatch.setattr(torch, "multinomial", None)  # whoever draws past the script fails
    return chance


class Comparison(NamedTuple):
    """Of the text of all branches with the target's."""

    off: float  # the total variation
    branches: int


def compare(branches: Iterator[tuple[float, list[int]]], exact: Tensor) -> Comparison:
    """exact (V, ..., V): the target's probability of each text of so many tokens."""
    found = torch.zeros_like(exact)
    impossible = 0.0  # what fell on texts that the target never writes
    count = 0
    for probability, tokens in branches:
        count += 1
        start = tuple(tokens[:exact.dim()])
        rest = exact[start]
        if rest.sum() > 0:
            found[start] += probability * rest / rest.sum()  # the target goes on alone
        else:
            impossible += probability
    total = float(found.sum()) + impossible
    assert total == pytest.approx(1, abs=1e-9), f"{count} branches have the probability {total}"
    return Comparison(float((found - exact).abs().sum() + impossible) / 2, count)


def check(comparison: Comparison) -> None:
    assert comparison.off < TOLERANCE, f"off by {comparison.off} on {comparison.branches} branches"


def chain_rule(conditionals: list[Tensor]) -> Tensor:
    """The probabilities of texts, (V, ..., V), from those of a token after each beginning: (V),
    (V, V), ..."""
    p = torch.ones((), dtype=torch.double)
    for conditional in conditionals:
        conditional = conditional.double()
        p = p.unsqueeze(-1) * conditional / conditional.sum(-1, keepdim=True)
    return p


# --- Wrong rules, which every kind of check has to reject ---


def accept_all(monkeypatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda count, **_: torch.full((count,), -1.0))


def redraw_from_p(monkeypatch) -> None:
    """After a rejection, as if nothing had been tried."""
    monkeypatch.setattr(speculate, "residual", lambda p, q: p)


def leave_the_residual_as_it_sums(monkeypatch) -> None:
    def residual(p: Tensor, q: Tensor) -> Tensor:
        left = (p - q).clamp(min=0)
        return left if left.any() else p

    monkeypatch.setattr(speculate, "residual", residual)


def leave_x_in_q(monkeypatch) -> None:
    """As if siblings had been drawn with replacement."""
    monkeypatch.setattr(speculate, "without", lambda q, x: q)


def change_drafts(monkeypatch, change: Callable[[Draft], Draft]) -> None:
    """Change every draft after it was drawn."""
    right = TreeSampler.draft

    def draft(state: TreeSampler, root: int, limits: DraftLimits) -> Draft:
        return change(right(state, root, limits))

    monkeypatch.setattr(TreeSampler, "draft", draft)


def drop_unlikely_drafts(monkeypatch) -> None:
    """Drawn, and then not proposed."""
    def drop(draft: Draft) -> Draft:
        kept = [i for i, p in enumerate(draft.path_probabilities) if p >= 0.3]
        return with_q(moa.keep_nodes(draft, kept), draft, kept)

    change_drafts(monkeypatch, drop)


def try_the_likelier_first(monkeypatch) -> None:
    """In place of the order in which siblings were drawn."""
    def reorder(draft: Draft) -> Draft:
        nodes = sorted(
            range(len(draft.tokens)), key=lambda i: (draft.depth(i), -draft.probabilities[i])
        )
        return with_q(moa.keep_nodes(draft, nodes), draft, nodes)

    change_drafts(monkeypatch, reorder)


def with_q(smaller: Draft, draft: Draft, kept: list[int]) -> Draft:
    """Give a draft of these nodes the distributions that their children were drawn from."""
    for index, i in enumerate(kept):
        if smaller.children(index):
            smaller.q[index] = draft.q[i]
    return smaller


def sharpen(draft: Draft) -> Draft:
    for parent, q in draft.q.items():
        draft.q[parent] = q**3 / (q**3).sum()
    return draft


def record_another_q(monkeypatch) -> None:
    """Than the one that drafts are drawn from."""
    change_drafts(monkeypatch, sharpen)


def receive_another_q(monkeypatch) -> None:
    """Than the one that a client has sent."""
    right = netsim.parse_verify
    monkeypatch.setattr(netsim, "parse_verify", lambda *sent: sharpen(right(*sent)))


def draw_before_quantizing(monkeypatch) -> None:
    """From a finer q than the one that is sent."""
    fine = DraftState.next_distributions
    monkeypatch.setattr(QuantizedDraftState, "next_distributions", fine)


def doubt_certain_drafts(monkeypatch) -> None:
    """As if what was looked up had been drawn from a uniform q."""
    certain_draft = Lookup.certain_draft

    def doubtful_draft(lookup: Lookup, token: int, tokens: list[int]) -> Draft:
        draft = certain_draft(lookup, token, tokens)
        for parent, q in draft.q.items():
            draft.q[parent] = torch.full_like(q, 1 / len(q))
        return draft

    monkeypatch.setattr(Lookup, "certain_draft", doubtful_draft)


OF_CHAINS = [accept_all, redraw_from_p, drop_unlikely_drafts, record_another_q]
OF_TREES = OF_CHAINS + [leave_x_in_q, leave_the_residual_as_it_sums, try_the_likelier_first]
OF_LOOKUP = [accept_all, redraw_from_p, doubt_certain_drafts]
OF_REMOTE_TREES = OF_TREES + [receive_another_q, draw_before_quantizing]


# --- One token ---

P = torch.tensor([0.5, 0.2, 0.15, 0.15, 0.0])
QS = [
    torch.tensor([0.1, 0.6, 0.1, 0.1, 0.1]),
    torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]),
    torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]),
    torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]),
    torch.tensor([1.0, 5.5e-42, 0.0, 0.0, 0.0]),
    torch.tensor([0.0, 0.0, 5.5e-42, 2e-30, 1.0]),
    P,
]


def siblings(tokens: list[int], q: Tensor) -> Draft:
    draft = Draft(0)
    for token in tokens:
        draft.add(token, parent=0, probability=float(q[token]))
    draft.q[0] = q
    return draft


def accepted_text(draft: Draft, acceptance: Acceptance) -> list[int]:
    """The accepted drafts, and the target's own token."""
    return [draft.tokens[i] for i in acceptance.path[1:]] + [acceptance.token]


def try_siblings(draft: Draft, chance: Chance) -> Acceptance:
    """By the tree's rule, whose target has the distribution P everywhere."""
    count = len(draft.tokens)
    u = chance.rand(count, torch.Generator()).tolist()
    return rejection_sample_tree(P.expand(count, -1), draft, u, torch.Generator())


@pytest.mark.parametrize(
    "q, tokens",
    [
        (QS[0], [1, 3, 0]),
        (QS[0], [4, 0, 1]),
        (QS[1], [1, 3]),
        (QS[1], [3, 1]),
        (QS[2], [1]),
        (QS[3], [4]),
        (P, [2, 0, 3]),
    ],
    ids=str,
)
def test_a_draft_is_accepted_with_probability_min_1_p_over_q(q, tokens, chance):
    """p: what the siblings before it leave of P. q: without those."""
    p_left = P.double()
    q_left = q.double()
    tried = 1.0  # the probability that all before were rejected
    branches = list(chance.branches(lambda: try_siblings(siblings(tokens, q), chance)))
    for i, x in enumerate(tokens):
        expected = tried * min(1.0, float(p_left[x] / q_left[x]))
        found = sum(probability for probability, result in branches if result.path == [0, i + 1])
        assert found == pytest.approx(expected, abs=1e-6)
        tried -= expected
        if tried < 1e-6:
            return
        p_left = (p_left - q_left).clamp(min=0)
        p_left = p_left / p_left.sum()
        q_left[x] = 0.0
        q_left = q_left / q_left.sum().clamp(min=1e-300)


@pytest.mark.parametrize("q", QS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_token_that_comes_out_is_distributed_as_p_whatever_q_is(q, count, chance):
    def run() -> list[int]:
        likeliest = likeliest_candidates(Draft(0), [0], q[None], count, min_probability=0.0)
        counts = Counter(choice.row for choice in likeliest)
        choices = draw_candidates(counts, q[None], torch.Generator())
        draft = siblings([choice.token for choice in choices], q)
        return accepted_text(draft, try_siblings(draft, chance))

    check(compare(chance.branches(run), chain_rule([P])))


# --- One draft and its verification, by tables in place of networks ---


class Table:
    """Random logits after every beginning of at most `depth` tokens."""

    def __init__(self, seed: int, depth: int, outputs: int = VOCABULARY):
        generator = torch.Generator().manual_seed(seed)
        self.logits = []  # by the beginning's length
        for length in range(depth + 1):
            shape = [VOCABULARY] * length + [outputs]
            self.logits.append(1.5 * torch.randn(shape, generator=generator))

    def after(self, draft: Draft, i: int) -> Tensor:
        """After token i of a draft."""
        beginning = [draft.tokens[j] for j in draft.paths[i][1:]]
        return self.logits[len(beginning)][tuple(beginning)]


class TableSteps:
    """For a DraftState: a table in place of SA, CA and TLI."""

    table: Table

    def step(self, draft: Draft, frontier: list[int]) -> Tensor:
        return torch.stack([self.table.after(draft, node) for node in frontier])


class TableDraftState(TableSteps, TreeSampler):
    pass


class RemoteTableDraftState(TableSteps, QuantizedDraftState):
    pass


CHAIN = DraftLimits(2)
TREE = DraftLimits(2, top_k=2, total_tokens=4)
SMALL_TREE = DraftLimits(2, top_k=2, total_tokens=3)
CAUTIOUS_CHAIN = DraftLimits(3, min_confidence=0.4)
CAUTIOUS_TREE = DraftLimits(2, top_k=3, total_tokens=6, min_confidence=0.5, min_probability=0.1)
SEEDS = (1, 3, 12)  # of tables where each wrong rule makes a difference
TABLE_CASES = {
    "chain of 1": (dict(limits=DraftLimits(1)), OF_CHAINS),
    "chain of 3": (dict(limits=DraftLimits(3)), OF_CHAINS),
    "siblings": (dict(limits=DraftLimits(1, top_k=3, total_tokens=3)), OF_TREES),
    "tree": (dict(limits=SMALL_TREE), OF_TREES),
    "deep tree": (dict(limits=DraftLimits(3, top_k=2, total_tokens=4)), OF_TREES),
    "chain, top-p": (dict(limits=DraftLimits(3), top_p=0.8), OF_CHAINS),
    "tree, top-p": (dict(limits=DraftLimits(2, top_k=3, total_tokens=6), top_p=0.9), OF_TREES),
    "chain, cold": (dict(limits=DraftLimits(3), temperature=0.4), OF_CHAINS),
    "tree, cold": (dict(limits=SMALL_TREE, temperature=0.4), OF_TREES),
    "chain, draft vocabulary": (dict(limits=DraftLimits(3), draft_vocabulary=(0, 2)), OF_CHAINS),
    "tree, draft vocabulary": (dict(limits=TREE, draft_vocabulary=(2, 1)), OF_TREES),
    "chain, quantized q": (dict(limits=CHAIN, q_tokens=64), OF_CHAINS),
    "tree, q of two tokens": (dict(limits=TREE, q_tokens=2), OF_REMOTE_TREES),
    "chain, limits": (dict(limits=CAUTIOUS_CHAIN), OF_CHAINS),
    "tree, limits": (dict(limits=CAUTIOUS_TREE, top_p=0.95), OF_TREES),
    "lookup": (dict(limits=DraftLimits(3), lookup=True), OF_LOOKUP),
}


@functools.cache
def drafter_for_tables(draft_vocabulary: tuple[int, ...] | None) -> Drafter:
    """Only its head is used, and a table's rows are logits already."""
    drafter = new_drafter(new_target(VOCABULARY, layers=1), draft_vocabulary=draft_vocabulary)
    outputs = VOCABULARY if draft_vocabulary is None else len(draft_vocabulary)
    drafter.lm_head.weight = nn.Parameter(torch.eye(outputs), requires_grad=False)
    return drafter


def one_cycle(
    chance: Chance,
    seed: int,
    limits: DraftLimits,
    temperature: float = 0.8,
    top_p: float = 1.0,
    draft_vocabulary: tuple[int, ...] | None = None,
    q_tokens: int | None = None,
    lookup: bool = False,
) -> Comparison:
    """Of the text of a draft and its verification.

    q_tokens: of the distributions that a remote target is sent, None for a local one.
    """
    sampling = Sampling(temperature, top_p, torch.Generator())
    drafter = drafter_for_tables(draft_vocabulary)
    target_table = Table(seed, limits.depth)
    if lookup:
        state = new_copier(VOCABULARY, sampling)
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(VOCABULARY, (8,), generator=generator).tolist()
        state.append_verified(CacheUpdate(text, None, None))
    else:
        kind = TableDraftState if q_tokens is None else RemoteTableDraftState
        state = kind(drafter, 16, sampling)
        outputs = VOCABULARY if draft_vocabulary is None else len(draft_vocabulary)
        state.table = Table(seed + 100, limits.depth, outputs)

    def run() -> list[int]:
        draft = state.draft(2, limits)
        if q_tokens is not None:
            draft = netsim.parse_verify(netsim.make_verify(draft), drafter.target)
        rows = [target_table.after(draft, i) for i in range(len(draft.tokens))]
        return accepted_text(draft, accept_draft(torch.stack(rows), draft, sampling))

    conditionals = [probabilities(x, temperature, top_p) for x in target_table.logits]
    return compare(chance.branches(run), chain_rule(conditionals))


@pytest.mark.parametrize("name", TABLE_CASES)
def test_a_draft_and_its_verification_write_what_the_target_would(name, chance, monkeypatch):
    choices, _ = TABLE_CASES[name]
    monkeypatch.setattr(netsim, "Q_TOKENS", choices.get("q_tokens"))
    for seed in SEEDS:
        check(one_cycle(chance, seed, **choices))


@pytest.mark.parametrize("name", TABLE_CASES)
def test_the_same_check_rejects_each_wrong_rule(name, chance, monkeypatch):
    choices, wrong_rules = TABLE_CASES[name]
    monkeypatch.setattr(netsim, "Q_TOKENS", choices.get("q_tokens"))
    for wrong_rule in wrong_rules:
        with monkeypatch.context() as patch:
            wrong_rule(patch)
            comparisons = (one_cycle(chance, seed, **choices) for seed in SEEDS)
            assert any(comparison.off > CLEARLY for comparison in comparisons), wrong_rule.__name__


# --- Whole answers of tiny models ---

PROMPT = [0, 2, 1, 1]
LENGTH = 4  # of the text that is compared
LAYERS = 1


def exact_texts(target: Llama, config: GenerationConfig, prompt: list[int]) -> Tensor:
    """The target's probability of each text of LENGTH tokens after the prompt, (V, ..., V)."""
    conditionals = []
    for length in range(LENGTH):
        beginnings = list(itertools.product(range(VOCABULARY), repeat=length))
        texts = torch.tensor([prompt + list(beginning) for beginning in beginnings])
        p = probabilities(target(texts)[:, -1], config.temperature, config.top_p)
        conditionals.append(p.view([VOCABULARY] * (length + 1)))
    return chain_rule(conditionals)


def whole_answers(
    chance: Chance,
    limits: DraftLimits,
    cycles: int,
    temperature: float = 0.8,
    top_p: float = 1.0,
    max_new_tokens: int = 16,
    prompt: list[int] = PROMPT,
    lookup: bool = False,
    alone: bool = False,
    remote: bool = False,
    **choices,
) -> Comparison:
    """Of answers that are interrupted after so many drafts. choices: the drafter's."""
    target = new_target(VOCABULARY, layers=LAYERS)
    drafter = NoDrafter() if alone else new_drafter(target, **choices)
    config = GenerationConfig(max_new_tokens, temperature, top_p)

    def run() -> list[int]:
        sampling = config.new_sampling("cpu")
        if remote:
            state = QuantizedDraftState(drafter, 64, sampling)
            connection = Connection(Server(target, drafter), Link())
            verifier = RemoteVerifier(connection, config, sampling)
        else:
            verifier = LocalVerifier(target, drafter, 64, sampling)
            if alone:
                state = new_copier(VOCABULARY, sampling)
            else:
                state = TreeSampler(drafter, 64, sampling)
        if lookup:
            state = Lookup(state, VOCABULARY, sampling)
        tokens = []
        answer = speculate.speculate(verifier, state, prompt, config, limits)
        for cycle in itertools.islice(answer, 1 + cycles):  # the first one is the prompt's
            tokens += cycle.tokens
        return tokens

    return compare(chance.branches(run), exact_texts(target, config, prompt))


RETOLD = [0, 2, 1, 0, 2]  # after which lookup finds something, or the drafter is asked
ANSWER_CASES = {
    "to its end": (dict(limits=CHAIN, cycles=9, max_new_tokens=3), redraw_from_p),
    "two chains": (dict(limits=CHAIN, cycles=2, top_p=0.8), accept_all),
    "tree": (dict(limits=SMALL_TREE, cycles=1, top_p=0.95), leave_x_in_q),
    "two trees": (
        dict(limits=SMALL_TREE, cycles=2, top_p=0.8, max_new_tokens=LENGTH),
        drop_unlikely_drafts,
    ),
    "tree, N = 1": (dict(limits=TREE, cycles=1, top_p=0.9, target_layer_inference=1), accept_all),
    "draft vocabulary": (dict(limits=CHAIN, cycles=1, draft_vocabulary=(0, 2)), redraw_from_p),
    "limits": (dict(limits=CAUTIOUS_CHAIN, cycles=1, top_p=0.9), drop_unlikely_drafts),
    "lookup": (dict(limits=CHAIN, cycles=2, alone=True), doubt_certain_drafts),
    "lookup and drafter": (
        dict(limits=CHAIN, cycles=1, lookup=True, prompt=RETOLD),
        doubt_certain_drafts,
    ),
    "remote chain": (dict(limits=CHAIN, cycles=1, remote=True), receive_another_q),
    "remote tree": (dict(limits=TREE, cycles=1, remote=True, top_p=0.9), receive_another_q),
    "remote lookup": (
        dict(limits=CHAIN, cycles=1, remote=True, lookup=True, prompt=RETOLD),
        receive_another_q,
    ),
}


@pytest.mark.parametrize("name", ANSWER_CASES)
def test_an_answer_is_distributed_as_the_targets_own(name, chance):
    choices, _ = ANSWER_CASES[name]
    check(whole_answers(chance, **choices))


@pytest.mark.parametrize("name", ANSWER_CASES)
def test_the_same_check_of_answers_rejects_a_wrong_rule(name, chance, monkeypatch):
    choices, wrong_rule = ANSWER_CASES[name]
    wrong_rule(monkeypatch)
    assert whole_answers(chance, **choices).off > CLEARLY
