"""Speculative decoding with a Mixture of Attentions: draft, verify, accept (paper, algorithm 1).

The target needs one pass for each token that it writes, and most of a pass is spent reading its
weights. To save passes, a drafter proposes the next few tokens, and one pass of the target verifies
all of them. The target keeps the drafted tokens up to the first that it rejects, and adds a token
of its own. Wherever the drafter is right, a pass yields several tokens, and the text is still the
target's.

`speculate` is the loop, and `LocalVerifier` is the target's side of it. The section *Acceptance*
decides which drafted tokens are kept, and proves that the text is distributed exactly as the
target's own.

    python speculate.py --prompt "Explain why the sky is blue." --show   # accepted tokens are green

`--help` shows more commands. Read as far as the bar, the line that says where the method ends.

Shapes: T tokens, K drafted tokens, S tokens in the cache, E hidden size, V vocabulary.
"""
from __future__ import annotations

import plumbing.start  # first: no traceback for Ctrl-C or a missing package while PyTorch loads

import json
import math
import signal
import sys
from argparse import Namespace
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from time import monotonic, perf_counter
from typing import Callable, Generator, Iterator, Protocol

import torch
from torch import Tensor

import netsim
from llama import (
    AlignedKVCache,
    GenerationConfig,
    KVCache,
    Llama,
    OnPiece,
    Sampling,
    check_logits,
    generate,
    load_target,
    probabilities,
    read_in_pieces,
    sample,
    sample_next,
)
from moa import (
    Draft,
    Drafter,
    DraftLimits,
    DraftState,
    MemoryUpdate,
    Models,
    RemoteDraftState,
    Verifier,
    VerifyResult,
    draft_distributions,
    load_models,
    pack_together,
)
from plumbing import flags, terminal
from plumbing.devices import DTYPES, choose_dtype
from plumbing.errors import InputError, run_command
from plumbing.layout import TreeLayout, lay_out_tree
from plumbing.prompts import answer_length, drop_oldest_exchanges, read_prompt
from plumbing.tokenizer import TextStream, Tokenizer


@dataclass
class Cycle:
    """One round of the loop: a draft and its verification. The first cycle reads the prompt, and
    its draft is empty."""

    result: VerifyResult
    tokens: list[int]  # the new tokens of the answer


class DraftSource(Protocol):
    """The drafter's side of the loop: a `DraftState` or, below the bar, a `Lookup`."""

    def append_verified(self, update: MemoryUpdate) -> None:
        """Take in newly verified tokens, in place of the draft."""

    def draft(self, root: int, limits: DraftLimits) -> Draft:
        """Draft tokens that may follow the root, the newest token."""


@torch.inference_mode()
def speculate(
    verifier: Verifier,
    state: DraftSource,
    prompt: list[int],
    config: GenerationConfig,
    limits: DraftLimits,
) -> Iterator[Cycle]:
    """Run algorithm 1. Yield each cycle as soon as it is complete.

    The first cycle has the token after the prompt. The last one ends with a stop token, or with
    token number max_new_tokens. Prompt and answer must fit the model's context.

    Of `config` only max_new_tokens and stop_ids are used here. The temperature is in the `Sampling`
    that the verifier and the state hold.
    """
    left = config.max_new_tokens
    result = verifier.prefill(prompt)  # the first token, and the memory of the prompt
    while True:
        tokens = truncate_at_stop(result.accepted + [result.token], config.stop_ids)
        yield Cycle(result, tokens)
        left -= len(tokens)
        if left == 0 or tokens[-1] in config.stop_ids:
            return
        state.append_verified(result.memory)  # grow the cross-attention memory
        # The target adds a token of its own, so at most left - 1 drafted ones can be used.
        depth = min(limits.depth, left - 1)  # if 0, nothing is drafted
        draft = state.draft(result.token, replace(limits, depth=depth))
        result = verifier.verify(draft)  # accepted tokens, next token, memory of what is verified


def truncate_at_stop(tokens: list[int], stop_ids: frozenset[int]) -> list[int]:
    """Return the tokens up to and including the first stop token."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[:i + 1]
    return tokens


class LocalVerifier:
    """The target's side of one conversation with a model on this machine: the model, its KV cache,
    and LSA.

    LSA is a part of the drafter, but it reads the target's cache. When the target is on a server,
    the server therefore runs LSA, and sends only what CA needs of LSA's output.
    """

    def __init__(
        self,
        model: Llama,
        drafter: Drafter,
        capacity: int,
        sampling: Sampling,
        on_piece: OnPiece | None = None,
    ):
        """drafter: only its `memory_update`, which runs LSA, is used here. capacity: how many
        tokens of text and draft the cache has room for. on_piece: see `read_in_pieces`."""
        self.model = model
        self.drafter = drafter
        self.sampling = sampling
        self.on_piece = on_piece
        self.cache = self.new_cache(capacity)

    def new_cache(self, capacity: int) -> KVCache:
        return self.model.new_cache(capacity)

    def prefill(self, prompt: list[int]) -> VerifyResult:
        """Read a prompt, and choose the token after it."""
        hidden = read_in_pieces(self.model, prompt, self.cache, self.on_piece)  # (E)
        token = sample_next(self.model.lm_head(hidden), self.sampling)
        memory = self.drafter.memory_update(prompt, self.cache)
        # Nothing was drafted, so the draft of this result is empty. Every draft has a root, and the
        # prompt's last token stands in for one.
        return VerifyResult([], token, memory, draft=Draft(prompt[-1]))

    def verify(self, draft: Draft) -> VerifyResult:
        """Decide which tokens of a draft to keep. The cache keeps the root and the accepted tokens.

        One pass over the draft is enough, because a transformer predicts the token after every
        token that it reads. The pass reads the root and a chain of K drafted tokens, and returns
        1 + K distributions. (The root is the newest token. The target has chosen it, but has not
        read it yet.) The distribution after the root decides on drafted token 1, the distribution
        after drafted token 1 decides on drafted token 2, and so on. If all are accepted, the last
        distribution supplies the target's own token. (In a tree, the distribution after a node
        decides on all its children.)
        """
        start = self.cache.length
        draft, positions, mask = self.lay_out(draft)
        ids = torch.tensor([draft.tokens], device=self.model.device)  # (1, 1 + K)
        hidden = self.model.hidden(ids, self.cache, positions, mask)  # (1, 1 + K, E)
        logits = self.model.lm_head(hidden[0])  # (1 + K, V): row i is what follows node i
        acceptance = accept_draft(logits, draft, self.sampling)
        self.cache.keep_path(start, acceptance.path)
        verified = [draft.tokens[node] for node in acceptance.path]  # the root, then accepted ones
        memory = self.drafter.memory_update(verified, self.cache)
        return VerifyResult(verified[1:], acceptance.token, memory, draft, logits)

    def lay_out(self, draft: Draft) -> tuple[Draft, Tensor, Tensor]:
        """A hook for `ExactVerifier`, which may leave nodes out."""
        positions, mask = draft_layout(draft, self.cache.length, self.model.device)
        return draft, positions, mask


def draft_layout(draft: Draft, start: int, device) -> tuple[Tensor, Tensor]:
    """Return the positions (1 + K) of a draft's tokens after `start` tokens of text, and a mask
    (1 + K, S) of the slots that each token may look at, with S = start + 1 + K.

    The branches of a tree lie side by side in the slots of the cache. Two tokens that may follow
    the same one have the same position. Each of them sees the text, its ancestors and itself, but
    no other branch. After 10 tokens of text, for example:

        node   token        slot   position   sees slots 0 to 9, and
         0     " lies"       10       10      10                        the root
         1     " in"         11       11      10 11
         2     " within"     12       11      10    12
         3     " the"        13       12      10 11    13               after " in"

    If nodes 0, 1 and 3 are accepted, `keep_path` moves slot 13 to 12.
    """
    nodes = list(range(len(draft.tokens)))
    positions = [start + draft.depth(node) for node in nodes]
    mask = draft.mask(nodes, nodes, start)
    return torch.tensor(positions, device=device), mask.to(device)


# --- Acceptance ---


@dataclass
class Acceptance:
    """The decision on a draft."""

    path: list[int]  # the nodes to keep: the root, then the accepted nodes
    token: int  # the target's own token after them


def accept_draft(logits: Tensor, draft: Draft, sampling: Sampling) -> Acceptance:
    """Decide which drafted tokens to keep. Row i of logits (1 + K, V) is what the target predicts
    after node i of the draft. Raise InputError if a logit is NaN or +infinity."""
    check_logits(logits)
    if sampling.temperature == 0:
        choices = logits.float().argmax(-1)  # in float32: on CPUs ten times as fast as bfloat16
        return accept_greedy(choices.tolist(), draft)
    p = probabilities(logits, sampling.temperature, sampling.top_p)
    # One call draws a random number in [0, 1) for each token. Some of them may not be needed.
    u = torch.rand(len(draft.tokens), generator=sampling.generator, device=p.device).tolist()
    # The rule for trees would give the same result for a chain. The plain rule is easier to read.
    rule = rejection_sample if draft.is_chain else rejection_sample_tree
    return rule(p, draft, u, sampling.generator)


def accept_greedy(choices: list[int], draft: Draft) -> Acceptance:
    """At temperature 0, accept drafted tokens that are the target's own choices (1 + K)."""
    path = [0]
    while True:
        choice = choices[path[-1]]  # after the newest accepted token
        child = draft.child(path[-1], choice)
        if child is None:
            return Acceptance(path, choice)
        path.append(child)


def rejection_sample(
    p: Tensor, draft: Draft, u: list[float], generator: torch.Generator
) -> Acceptance:
    """Accept tokens of a chain so that the text is distributed as p (1 + K, V), the target's own.

    This is speculative sampling (Leviathan et al. 2023, algorithm 1), also called modified
    rejection sampling (Chen et al. 2023, algorithm 2). With p the target's distribution of the next
    token, q the drafter's, and scaled(f) = f / sum f:

        accept x ~ q with probability min(1, p(x) / q(x))
        if x is rejected, draw the token from scaled(max(p - q, 0)) instead

    A token x can come out in two ways:

        drafted and accepted      q(x) min(1, p(x) / q(x))                 = min(p(x), q(x))
        drawn after a rejection   P(rejection) scaled(max(p - q, 0))(x)    = max(p(x) - q(x), 0)

    The second line holds because P(rejection) = 1 - sum min(p, q) = sum max(p - q, 0), which is
    what `scaled` divides by. The two probabilities add up to p(x), whatever q is. A bad drafter
    costs time, but never changes how the text is distributed.

    An example with three tokens a, b and c: p = (0.6, 0.3, 0.1) and q = (0.4, 0.5, 0.1). A drafted
    a, b or c is accepted with probability 1, 0.6 or 1. With probability 0.5 * 0.4 = 0.2, b is
    drafted and rejected. In its place a token is drawn from scaled(max(p - q, 0)) = (1, 0, 0),
    which is always a. Altogether a, b and c come out with probability 0.4 + 0.2, 0.5 * 0.6 and 0.1,
    which is p.

    The same holds for each token of the chain in turn. A token is tried only if those before it
    were accepted, so p and q are the distributions after exactly the text that precedes it. After
    a rejection the rest of the chain is thrown away: it follows a token that is not in the text.

    u (1 + K): random numbers, uniform in [0, 1), one for each token. The root's is not used.
    """
    path = [0]
    for i in range(1, len(draft.tokens)):
        x = draft.tokens[i]
        # In a chain node i follows node i - 1, so both distributions are those after i - 1.
        p_here = p[i - 1]  # the target's, (V)
        q_here = draft.q[i - 1]  # the drafter's, which x was drawn from, (V)
        accepted = u[i] < float(p_here[x] / q_here[x])  # with probability min(1, p(x) / q(x))
        if not accepted:
            return Acceptance(path, sample(residual(p_here, q_here), generator))
        path.append(i)
    return Acceptance(path, sample(p[-1], generator))  # all are accepted


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return scaled(max(p - q, 0)): by how much p exceeds q, as a distribution. p, q (V)."""
    left = (p - q).clamp(min=0)
    if not left.any():
        # p exceeds q nowhere. Both sum to 1, so they are equal up to rounding, and the rejection
        # was a rounding error. Draw from p instead (0 / 0 would be NaN).
        return p
    return left / left.sum()


def rejection_sample_tree(
    p: Tensor, draft: Draft, u: list[float], generator: torch.Generator
) -> Acceptance:
    """Accept tokens of a tree so that the text is distributed as p (1 + K, V).

    This is the recursive rejection sampling of Jeon et al. 2024, for children that are drawn
    without replacement. (For independent draws it is the multi-step speculative sampling of Miao et
    al. 2024.) The children of the newest accepted token are tried in the order drawn.

    A rejection changes two things for the next sibling. First, what is left to produce is the
    residual of p. Second, the sibling was drawn from q without the rejected token. The sibling is
    therefore tried with these two distributions, p_left and q_left, in place of p and q. If all
    children are rejected, the token is drawn from p_left.

    Take p and q of the example in `rejection_sample`, and say that b was drawn first, then a. b is
    accepted with probability 0.6. If b is rejected, p_left is (1, 0, 0) and q_left (0.8, 0, 0.2),
    so a is accepted.

    Why that is exact, by induction over the number of children that are left. Claim: given which
    children were rejected so far, the token that comes out is distributed as p_left.

    - No child is left: the token is drawn from p_left.
    - Else the next child x was drawn from q_left. Call p' = scaled(max(p_left - q_left, 0)). If x
      is rejected, p' is the new p_left and one child less is left. By induction, the token is then
      distributed as p'. In short: x is accepted with probability min(1, p_left(x) / q_left(x)),
      and if x is rejected, the token is distributed as p'. That is the chain's rule with p_left and
      q_left in place of p and q, so the token is distributed as p_left.

    Before the first child is tried, p_left is p. The token is therefore distributed as p.

    The proof needs every child to be drawn from its q_left, every child that was drawn to be
    proposed, and their number to be fixed before any is drawn. `sample_tree` of moa.py drafts in
    this way.
    """
    path = [0]
    while True:
        last = path[-1]
        p_left = p[last]  # (V)
        q_left = draft.q.get(last)  # (V); None, and not used, if `last` has no children
        accepted = None
        for child in draft.children(last):
            x = draft.tokens[child]
            if u[child] < float(p_left[x] / q_left[x]):
                accepted = child
                break
            p_left = residual(p_left, q_left)
            q_left = without(q_left, x)
        if accepted is None:
            return Acceptance(path, sample(p_left, generator))
        path.append(accepted)


def without(q: Tensor, x: int) -> Tensor:
    """Return the distribution of the next draw if x was drawn from q (V) and not put back."""
    rest = q.clone()
    rest[x] = 0.0
    # If x was all of q, the rest sums to 0. In that case no sibling follows, and the result is not
    # used: the clamp only avoids 0 / 0.
    return rest / rest.sum().clamp(min=torch.finfo(q.dtype).tiny)


# --- The method ends here: what follows makes it fast and practical ---
#
#     Lookup         copies drafts from the text. Only --lookup uses it.
#     Exact          makes greedy text bit-identical to the target's own in spite of rounding.
#     One answer     runs the loop, with the target here or on a server, and measures what it costs.
#     Watching       prints an answer as it comes, in colors or with --trace.
#     Command line   parses the flags, and answers one prompt or holds a chat.
#
# To see how the parts above become a program, continue with *One answer*. *Lookup* and *Exact*
# stand alone: skip them unless you want to know how they work. *Watching* and *Command line*
# contain no part of the method.


# --- Lookup: copy what followed the same tokens before ---


@dataclass
class Lookup:
    """Prompt lookup (Saxena 2023), a `DraftSource`. If the newest tokens have occurred before, the
    draft copies what followed them there. Otherwise the drafter drafts, if there is one."""

    state: DraftState | None  # the drafter's; None without a drafter (see `NoDrafter`)
    vocab_size: int
    sampling: Sampling
    history: list[int] = field(default_factory=list)  # the text: all tokens before the root

    def append_verified(self, update: MemoryUpdate | None) -> None:
        """Grow the history, and the drafter's caches. update: None while a server is out of reach
        (see `RemoteResult`).

        While the server is out of reach, the history lacks the unverified tokens, and a draft may
        copy from the wrong place. Such a draft does no harm, because it is never verified.
        """
        if update is not None:
            self.history += update.tokens
        if self.state is not None:
            self.state.append_verified(update)

    def draft(self, root: int, limits: DraftLimits) -> Draft:
        """Copy a chain from the text. If there is nothing to copy, let the drafter draft."""
        tokens = self.history + [root]
        count = min(limits.depth, limits.total_tokens)
        # Copy where the last 3 tokens occurred before, else where the last 2 did, else the last 1.
        # With a drafter, copy only where the last 3 did, because after a shorter match the drafter
        # is right more often than a copy.
        sizes = (3, 2, 1) if self.state is None else (3,)
        for size in sizes:
            place = find_earlier(tokens, size)
            if place is not None:
                # If fewer than `count` tokens are left to copy, they are repeated. For example,
                # 5 7 8 7 8 ends with 7 8, which also occurs earlier. Only 7 8 follows the earlier
                # occurrence, so the draft is 7 8 7 8 7 ...
                copied = tokens[place:place + count]
                return self.certain_draft(root, (copied * count)[:count])
        if self.state is None:
            return Draft(root)
        return self.state.draft(root, limits)

    def certain_draft(self, root: int, tokens: list[int]) -> Draft:
        """Make a chain of tokens that were not drawn.

        Above temperature 0 the rule of acceptance needs a q to compare p with. Token x was certain
        to be drafted, so q(x) = 1. The rule therefore accepts x with probability p(x). If x is
        rejected, the residual is p without x, scaled to sum to 1. (EAGLE-2 does this with its whole
        tree, whose tokens are the likeliest and not drawn.)
        """
        draft = Draft(root)
        for parent, token in enumerate(tokens):  # in a chain each token follows the one before it
            draft.add(token, parent, probability=1.0)
            if self.sampling.temperature > 0:
                q = torch.zeros(self.vocab_size, device=self.sampling.generator.device)
                q[token] = 1.0
                draft.q[parent] = q
        return draft


def find_earlier(tokens: list[int], size: int) -> int | None:
    """Find the newest place where the last `size` tokens occurred before. Return the index of the
    token that followed them there, or None if there is no such place."""
    newest = tokens[-size:]
    for start in reversed(range(len(tokens) - size)):  # (`newest` itself starts later)
        if tokens[start:start + size] == newest:
            return start + size
    return None


class NoDrafter:
    """Takes the place of a `Drafter` in a verifier if all drafts are copied, and no memory is
    needed. Used only by the benchmark's method "lookup" (experiments/bench.py)."""

    def memory_update(self, tokens: list[int], cache: KVCache) -> MemoryUpdate:
        return MemoryUpdate(tokens, cross_kv=None, reused_kv=None)


# --- Exact: greedy text and logits, bit for bit those of the target alone ---
#
# plumbing/kernels.py explains why the same sum can have two values, and plumbing/layout.py what
# that means for a tree. The code that makes a pass over a draft exact is spread over four files:
#
#     plumbing/kernels.py             finds out how much padding an exact pass needs on this CPU
#     PackedLlama of llama.py         adds padding to the tokens of a pass
#     AlignedKVCache of llama.py      adds masked keys
#     plumbing/layout.py              chooses the slots of a tree's nodes
#     ExactKVCache, ExactVerifier     below: verify trees in these slots


class ExactKVCache(AlignedKVCache):
    """A cache that keeps the nodes of a tree in the slots that `lay_out_tree` chooses. In these
    slots attention adds up the keys in the same order as in the text."""

    layout: TreeLayout | None = None  # the layout of the tree that is being verified

    def append(self, layer: int, kv: Tensor) -> Tensor:
        if self.layout is None:
            return super().append(layer, kv)
        # (Only nodes are written. Tokens that only pad the pass come after them and have no slot.)
        self.layout.write(self.kv[layer], kv)
        end = self.layout.mask.shape[1]
        return self.kv[layer, :, :, :self.limits.padded(end)]

    def keep_path(self, start: int, path: list[int]) -> None:
        if self.layout is not None:
            slot_of_node = self.layout.slots.tolist()
            path = [slot_of_node[node] - start for node in path]
            self.layout = None
        super().keep_path(start, path)


class ExactVerifier(LocalVerifier):
    """A verifier that is exact at temperature 0, with a `PackedLlama`.

    Above temperature 0 every token that was drawn has to be proposed, so none can be left out to
    make a tree fit. The last bits may differ there, but the distribution is right.
    """

    def new_cache(self, capacity: int) -> KVCache:
        cache = super().new_cache(capacity)
        if isinstance(cache, AlignedKVCache) and self.sampling.temperature == 0:
            return ExactKVCache(cache.kv, cache.limits)
        return cache

    def lay_out(self, draft: Draft) -> tuple[Draft, Tensor, Tensor]:
        cache = self.cache
        if not isinstance(cache, ExactKVCache):
            return super().lay_out(draft)
        draft = draft.likeliest_first()
        layout = lay_out_tree(draft.paths, cache.length, cache.limits)
        draft = draft.keep(layout.nodes)
        if draft.is_chain:  # its tokens have the slots that they will have in the text
            return super().lay_out(draft)
        cache.layout = layout
        return draft, layout.positions, layout.mask


# --- One answer, and what it cost ---
#
# `speculate` measures nothing. Here its cycles are timed, and their costs are added up. There are
# four ways to answer a prompt. Each is a class with a method `cycles`, which yields timed cycles.
# `answer` adds these cycles up in a `Generation`.


class Origin(Enum):
    """Who wrote a token."""

    TARGET = auto()
    DRAFT = auto()  # the drafter, and the target accepted the token
    UNVERIFIED = auto()  # the drafter, and the target has not seen the token


@dataclass
class TimedCycle(Cycle):
    """A cycle, and what it cost. Where the target writes alone, every token is a cycle."""

    draft_seconds: float
    verify_seconds: float
    traffic: netsim.Traffic | None = None  # None if the target is on this machine
    is_late: bool = False  # a simulated outage overlapped the cycle

    @property
    def draft(self) -> Draft:
        return self.result.draft

    @property
    def link(self) -> str:
        """Return the state of the link to a server, as in `RemoteResult`. A target on this machine
        is always "connected"."""
        return self.result.link if isinstance(self.result, netsim.RemoteResult) else "connected"

    @property
    def is_offline(self) -> bool:
        """Return whether the server was out of reach, and the drafter wrote the tokens alone."""
        return self.link == "offline"

    @property
    def draft_is_lost(self) -> bool:
        """Return whether the draft was lost with the connection: the server did not verify the
        draft, even if a new connection was made."""
        return self.link != "connected"

    @property
    def origins(self) -> list[Origin]:
        """Return who wrote each token."""
        if self.is_offline:
            return [Origin.UNVERIFIED] * len(self.tokens)
        origins = [Origin.DRAFT] * len(self.result.accepted) + [Origin.TARGET]
        return origins[:len(self.tokens)]

    @property
    def path(self) -> list[int]:
        """Return the nodes of the draft that are in the answer: the root, then accepted ones."""
        return self.draft.path_of(self.tokens[:self.origins.count(Origin.DRAFT)])


Cycles = Generator[TimedCycle, None, None]  # an iterator that can be closed


@dataclass
class Stopwatch:
    """A wrapper around a verifier, which notes when each call of the verifier began and ended."""

    verifier: Verifier
    began: float = 0.0  # when the newest call began, in seconds of `perf_counter`
    ended: float = 0.0

    def prefill(self, prompt: list[int]) -> VerifyResult:
        return self.time(self.verifier.prefill, prompt)

    def verify(self, draft: Draft) -> VerifyResult:
        return self.time(self.verifier.verify, draft)

    def time(self, call: Callable, argument: list[int] | Draft) -> VerifyResult:
        self.began = perf_counter()
        result = call(argument)
        self.ended = perf_counter()
        return result


def timed_cycles(
    verifier: Verifier,
    source: DraftSource,
    prompt: list[int],
    config: GenerationConfig,
    limits: DraftLimits,
) -> Cycles:
    """Run the loop, and time its cycles.

    Whatever the loop does between two calls of the verifier counts as drafting. LSA counts as
    verification, because the verifier runs it. (On an accelerator LSA may still be running when
    `verify` returns, and its remainder is counted in the next draft.)
    """
    watch = Stopwatch(verifier)
    resumed = perf_counter()  # when the loop went on
    for cycle in speculate(watch, source, prompt, config, limits):
        draft_seconds = watch.began - resumed
        verify_seconds = watch.ended - watch.began
        yield TimedCycle(cycle.result, cycle.tokens, draft_seconds, verify_seconds)
        resumed = perf_counter()


class Method(Protocol):
    """A way to answer prompts. The next four classes are such ways."""

    def cycles(
        self, prompt: list[int], config: GenerationConfig, on_piece: OnPiece | None
    ) -> Cycles:
        """Answer a prompt, cycle by cycle. on_piece: see `read_in_pieces`. It is called only if the
        target is on this machine, because a server does not say how far it has read."""


@dataclass
class Alone:
    """The target writes alone."""

    model: Llama

    def cycles(
        self, prompt: list[int], config: GenerationConfig, on_piece: OnPiece | None
    ) -> Cycles:
        return cycles_of_tokens(generate(self.model, prompt, config, on_piece), prompt)


@dataclass
class WithDrafts:
    """A drafter, lookup, or both draft, and the target verifies on this machine."""

    model: Llama
    drafter: Drafter | None  # None: with lookup only, as in experiments/bench.py
    limits: DraftLimits
    lookup: bool = False
    new_verifier: type[LocalVerifier] = ExactVerifier

    def cycles(
        self, prompt: list[int], config: GenerationConfig, on_piece: OnPiece | None
    ) -> Cycles:
        sampling = config.new_sampling(self.model.device)
        capacity = count_slots(prompt, config, self.limits)
        source = self.drafter.new_state(capacity, sampling) if self.drafter else None
        if self.lookup:
            source = Lookup(source, self.model.config.vocab_size, sampling)
        verifier = self.new_verifier(
            self.model, self.drafter or NoDrafter(), capacity, sampling, on_piece
        )
        return timed_cycles(verifier, source, prompt, config, self.limits)


NewChannel = Callable[[list[int]], netsim.Channel]  # opens a channel to a server for a prompt


@dataclass
class OnServer:
    """Drafts are made here, as in `WithDrafts`, and a server verifies."""

    new_channel: NewChannel
    drafter: Drafter
    limits: DraftLimits
    lookup: bool = False

    def cycles(
        self, prompt: list[int], config: GenerationConfig, on_piece: OnPiece | None
    ) -> Cycles:
        channel = self.new_channel(prompt)
        target = self.drafter.target
        sampling = config.new_sampling(target.device)
        state = RemoteDraftState(self.drafter, count_slots(prompt, config, self.limits), sampling)
        verifier = netsim.RemoteVerifier(channel, state, config)
        source = Lookup(state, target.config.vocab_size, sampling) if self.lookup else state
        return over_channel(channel, timed_cycles(verifier, source, prompt, config, self.limits))


@dataclass
class PlainApi:
    """A server writes alone, as behind a plain API."""

    new_channel: NewChannel
    vocab_size: int

    def cycles(
        self, prompt: list[int], config: GenerationConfig, on_piece: OnPiece | None
    ) -> Cycles:
        channel = self.new_channel(prompt)
        tokens = netsim.call_api(channel, prompt, config, self.vocab_size)
        return over_channel(channel, cycles_of_tokens(tokens, prompt))


def count_slots(prompt: list[int], config: GenerationConfig, limits: DraftLimits) -> int:
    """Return how many slots the target's and the drafter's caches need: for the text, the root of
    the newest draft, and the draft.

    The target's cache holds all tokens of a draft, at most total_tokens. The drafter's caches hold
    the nodes that it expands, at most top_k on each level.
    """
    drafted = max(limits.total_tokens, limits.depth * limits.top_k)
    return len(prompt) + config.max_new_tokens + 1 + drafted


def cycles_of_tokens(tokens: Iterator[int], prompt: list[int]) -> Cycles:
    """Make a cycle of each token."""
    start = perf_counter()
    for token in tokens:
        empty = Draft(prompt[-1])  # as in `LocalVerifier.prefill`
        result = VerifyResult([], token, memory=None, draft=empty)
        yield TimedCycle(result, [token], 0.0, perf_counter() - start)
        start = perf_counter()


def over_channel(channel: netsim.Channel, cycles: Cycles) -> Cycles:
    """Run cycles whose target is at the other end of a channel. Note each cycle's traffic, and
    whether an outage delayed the cycle. Begin the simulated outage when it is due, and close the
    channel at the end."""
    outage = channel.network.outage
    count = 0  # the number of tokens so far
    start = monotonic()
    try:
        for cycle in cycles:
            cycle.traffic = channel.traffic
            channel.traffic = netsim.Traffic()  # counts the next cycle
            cycle.is_late = outage.overlaps(start, monotonic())
            count += len(cycle.tokens)
            start = monotonic()
            outage.begin_if_due(count, start)
            yield cycle
    finally:
        channel.close()


@dataclass
class Generation:
    """One answer, and what it cost. The first cycle, which reads the prompt, is not counted in
    target_calls, draft_seconds and verify_seconds."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    seconds: float = 0.0
    prompt_seconds: float = 0.0  # until the first token
    target_calls: int = 0
    drafted: int = 0  # the number of drafted tokens that the target decided on
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    network: Counter = field(default_factory=Counter)  # the sums of the cycles' Traffic
    outage: str = ""  # the reason why the drafter first wrote alone; empty if it never did
    disconnected: bool = False  # the network was down, or the connection had to be made again
    interrupted: bool = False  # Ctrl-C ended the answer

    def add(self, cycle: TimedCycle) -> None:
        """Add a cycle."""
        if not self.tokens:  # the prompt's cycle
            self.prompt_seconds = cycle.verify_seconds
        else:
            self.draft_seconds += cycle.draft_seconds
            self.verify_seconds += cycle.verify_seconds
            if cycle.is_offline:
                self.outage = self.outage or cycle.result.reason
            else:
                self.target_calls += 1
            if not cycle.draft_is_lost:
                self.drafted += len(cycle.draft.tokens) - 1  # without the root
        self.disconnected |= cycle.is_late or cycle.draft_is_lost
        self.tokens += cycle.tokens
        self.origins += cycle.origins
        if cycle.traffic is not None:
            self.network.update(vars(cycle.traffic))

    @property
    def unverified(self) -> int:
        return self.origins.count(Origin.UNVERIFIED)

    def statistics(self) -> dict:
        """Return what `terminal.report` shows of this answer."""
        statistics = {
            "seconds": self.seconds,
            "tokens_per_second": tokens_per_second([self]),
            "target_calls": self.target_calls,
            "acceptance_length": acceptance_length([self]),
            "prompt_tokens": len(self.prompt),
            "prompt_seconds": self.prompt_seconds,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
        }
        if self.network:
            statistics |= self.network
            statistics["unverified_tokens"] = self.unverified
            statistics["disconnected"] = self.disconnected
        return statistics


def acceptance_length(answers: list[Generation]) -> float:
    """Return how many tokens a call of the target yields, without unverified tokens. The call that
    reads a prompt, and the first token, which comes from that call, are not counted."""
    new_tokens = sum(len(g.tokens) - 1 - g.unverified for g in answers)
    return new_tokens / max(1, sum(g.target_calls for g in answers))


def tokens_per_second(answers: list[Generation]) -> float:
    """Return tokens per second."""
    return sum(len(g.tokens) for g in answers) / sum(g.seconds for g in answers)


Emit = Callable[[TimedCycle], None]  # what a caller does with each cycle as soon as it is complete


def do_nothing(cycle: TimedCycle) -> None:
    pass


@torch.inference_mode()
def answer(
    method: Method,
    prompt: list[int],
    config: GenerationConfig,
    emit: Emit = do_nothing,
    on_piece: OnPiece | None = None,
) -> Generation:
    """Answer a prompt. `emit` gets each cycle as it happens, and Ctrl-C ends the answer. on_piece:
    see `Method.cycles`.

    Raise InputError if a server sends no first token, or if a plain API is lost later. In neither
    case can a drafter take over.
    """
    generation = Generation(prompt)
    start = perf_counter()
    cycles = method.cycles(prompt, config, on_piece)
    try:
        for cycle in cycles:
            generation.add(cycle)
            emit(cycle)
    except KeyboardInterrupt:
        generation.interrupted = True
    finally:
        cycles.close()  # this also closes the channel to a server
        generation.seconds = perf_counter() - start
    return generation


# --- Watching: the answer as it comes, and with --trace every cycle ---

# The colors of tokens with --show.
COLORS = {Origin.TARGET: "", Origin.DRAFT: terminal.GREEN, Origin.UNVERIFIED: terminal.YELLOW}


@dataclass
class Printer:
    """Prints an answer as it comes, and says when the server is lost and when it is back."""

    stream: TextStream
    show: bool  # print tokens in colors
    offline: bool = False

    def emit(self, cycle: TimedCycle) -> None:
        if cycle.is_offline != self.offline:
            self.offline = cycle.is_offline
            note = "the link is back: the target goes on"
            if self.offline:
                note = "the link is lost: what follows is the drafter's own text, unverified"
            print(f"\n[{note}]", file=sys.stderr)
        for token, origin in zip(cycle.tokens, cycle.origins):
            text = self.stream.add(token)
            print(terminal.paint(text, COLORS[origin]) if self.show else text, end="", flush=True)


@dataclass
class Trace:
    """Shows every cycle: what was drafted, and which drafted tokens were kept. The section *A
    traced cycle* of plumbing/terminal.py specifies a cycle's record, and has an example."""

    tokenizer: Tokenizer
    sampling: Sampling  # only its temperature and top_p are used
    as_json: bool
    cycles: int = 0

    def emit(self, cycle: TimedCycle) -> None:
        self.cycles += 1
        record = self.record(cycle)
        lines = [json.dumps(record)] if self.as_json else terminal.draw_cycle(record)
        print(*lines, sep="\n", flush=True)

    def record(self, cycle: TimedCycle) -> dict:
        """Return the record of a cycle."""
        shown = cycle.tokens if cycle.is_offline else [cycle.result.token]
        record = {
            "cycle": self.cycles,
            "root": self.tokenizer.decode(cycle.draft.tokens[:1]),
            "drafts": self.drafted_nodes(cycle),
            "token": cycle.result.token,
            "text": self.tokenizer.decode(shown),
            "tokens": cycle.tokens,
            "offline": cycle.is_offline,
            "draft_seconds": cycle.draft_seconds,
            "verify_seconds": cycle.verify_seconds,
        }
        if cycle.traffic is not None:
            record["link"] = {"state": cycle.link, **vars(cycle.traffic)}
        return record

    def drafted_nodes(self, cycle: TimedCycle) -> list[dict]:
        """Return the drafted tokens as the record lists them."""
        if cycle.draft_is_lost:
            return []
        draft = cycle.draft
        path = cycle.path
        p = None  # the target's distribution after each node, (1 + K, V)
        if cycle.result.logits is not None:
            p = draft_distributions(cycle.result.logits, self.sampling)  # in the same way as q
        nodes = []
        for i, token in enumerate(draft.tokens[1:], start=1):
            parent = draft.parents[i]
            node = {
                "token": token,
                "text": self.tokenizer.decode([token]),
                "parent": parent - 1,  # node 1 has index 0 in this list
                "q": draft.probabilities[i],
                "p": None if p is None else float(p[parent, token]),
                "accepted": i in path,
                "verdict": verdict(cycle, path, i),
            }
            nodes.append(node)
        return nodes


def verdict(cycle: TimedCycle, path: list[int], node: int) -> str:
    """Say what became of a drafted token. path: the nodes that are in the answer, `cycle.path`."""
    draft = cycle.draft
    if node in path:
        return "accepted"
    parent = draft.parents[node]
    ended_at_parent = draft.depth(parent) == len(cycle.tokens)  # for example by a stop token
    if parent not in path or ended_at_parent:
        return "not reached"
    if parent == path[-1] and draft.tokens[node] == cycle.result.token:
        return "left out"  # a server had no room for the token (see `ExactVerifier`)
    accepted = set(path) & set(draft.children(parent))
    if draft.q and accepted and node > min(accepted):
        return "not tried"  # drawn siblings are tried in order, and one before it was accepted
    return "rejected"


# --- Command line ---

# The sizes of trees, if the command line states none. They were tuned on 48 prompts of Spec-Bench,
# at temperature 0, on an Intel Xeon. EAGLE-2's trees have about 60 tokens. TREE is small: on a CPU
# every token beyond the first few makes the target's pass longer. REMOTE_TREE is larger, because
# each of its cycles also costs a round trip over the network.
TREE = DraftLimits(depth=6, top_k=3, total_tokens=8, min_confidence=0.15, min_probability=0.04)
REMOTE_TREE = DraftLimits(
    depth=16, top_k=3, total_tokens=31, min_confidence=0.1, min_probability=0.02
)

OWN_SERVER = ("", 0)  # --remote without an address

EXAMPLES = """\
  python speculate.py --prompt "Explain why the sky is blue." --show
  python speculate.py                                        # a chat
  python speculate.py --remote --latency 21ms                # the target in a process of its own
  python speculate.py --prompt "Why?" --trace                # every draft, and what is kept
  python speculate.py --prompt "Why?" --temperature 0.7      # sampled trees
  python speculate.py --serve 7000                           # then, from another terminal:
  python speculate.py --remote localhost:7000 --network 4g\
"""


def make_parser() -> flags.Parser:
    parser = flags.Parser(
        description="Generate with a drafter: the target's own text, only sooner.",
        examples=EXAMPLES,
    )
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--prompt", metavar="TEXT",
                      help="default: standard input or, on a terminal, a chat")
    task.add_argument("--serve", type=flags.address, metavar="[HOST:]PORT",
                      help="be the server of --remote")
    flags.add_model_arguments(parser.add_argument_group("model"))
    flags.add_generation_arguments(parser.add_argument_group("text"))
    drafts = parser.add_argument_group(
        "drafts",
        "Trees, unless --draft-length is given. Without a size here, drafts end early where the "
        "drafter is unsure. At temperature 0 a CPU verifies at most 31 tokens of a draft.",
    )
    drafts.add_argument("--drafter", type=flags.path, metavar="DIR",
                        help="default: the one shipped for the model")
    add_draft_arguments(drafts)
    drafts.add_argument("--lookup", action="store_true",
                        help="where the last three tokens occurred before, draft what followed")
    drafts.add_argument("--no-speculation", action="store_true", help="the target alone")
    drafts.add_argument("--show", action="store_true",
                        help="color accepted tokens green, unverified ones yellow")
    drafts.add_argument("--trace", action="store_true",
                        help="show every draft, and what is kept")
    remote = parser.add_argument_group("the target on a server")
    remote.add_argument("--remote", nargs="?", const=OWN_SERVER, type=flags.address,
                        metavar="HOST:PORT", help="default: a second process on this machine")
    netsim.add_link_arguments(remote)
    remote.add_argument("--timeout", type=flags.time_limit,
                        help="how long to wait for a reply (default: ten times as long as for the "
                        "slowest so far, and at least a minute for the first)")
    remote.add_argument("--disconnect-after", type=flags.positive_int, default=math.inf,
                        metavar="N", help="simulate an outage of the network after N tokens")
    remote.add_argument("--disconnect-for", type=flags.duration, default=math.inf, metavar="TIME",
                        help="length of the simulated outage (default: it never ends)")
    return parser


def add_draft_arguments(parser: flags.Parser) -> None:
    """Add the flags that `choose_limits` reads."""
    size = flags.number(int, 1, netsim.MAX_DRAFT_TOKENS)
    add = parser.add_argument
    add("--draft-depth", type=size, metavar="N",
        help=f"levels of a tree (default: {TREE.depth}, remote {REMOTE_TREE.depth})")
    add("--draft-top-k", type=flags.number(int, 2, netsim.MAX_DRAFT_TOKENS), metavar="N",
        help=f"nodes that a level expands (default: {TREE.top_k})")
    add("--draft-tokens", type=size, metavar="N",
        help=f"tokens of a tree (default: {TREE.total_tokens}, "
        f"remote {REMOTE_TREE.total_tokens})")
    add("--draft-length", type=size, metavar="K", help="draft chains of K tokens")


# Groups of flags that `check_arguments` refuses together. (A test compares them with the groups of
# `make_parser`.)
TREE_FLAGS = "draft_depth", "draft_top_k", "draft_tokens"
DRAFT_FLAGS = "lookup", "draft_length", *TREE_FLAGS, "show", "trace"
NETWORK_FLAGS = (
    "network", "latency", "jitter", "bandwidth", "loss", "timeout", "disconnect_after",
    "disconnect_for",
)
SERVER_FLAGS = {"serve", "model", "drafter", "device", "dtype"}  # a server refuses all others


def check_arguments(parser: flags.Parser, args: Namespace) -> None:
    """Refuse flags that contradict each other."""
    refuse = partial(parser.refuse, args)
    if args.serve:
        client_flags = sorted(vars(args).keys() - SERVER_FLAGS)
        refuse(client_flags, "is for the client: it has no effect with --serve")
    if not args.remote:
        refuse(NETWORK_FLAGS, "needs --remote")
    if args.disconnect_after == math.inf:
        refuse(["disconnect_for"], "needs --disconnect-after")
    if args.no_speculation:
        refuse(DRAFT_FLAGS, "is not for --no-speculation, which drafts nothing")
    if args.draft_length:
        refuse(TREE_FLAGS, "is a size of a tree, and --draft-length makes chains")
    if args.trace or args.json:
        refuse(["show"], "has no effect with --trace or --json")


def choose_limits(args: Namespace, tree: DraftLimits) -> DraftLimits:
    """Return the limits of chains with --draft-length, else those of trees. tree: the defaults."""
    if args.draft_length:
        return DraftLimits(args.draft_length)
    return tree_limits(args, tree)


def tree_limits(args: Namespace, tree: DraftLimits) -> DraftLimits:
    """Return the limits of trees: `tree` with the sizes that the command line states. If it states
    any, no draft ends early, however unsure the drafter is."""
    sizes = {
        "depth": args.draft_depth,
        "top_k": args.draft_top_k,
        "total_tokens": args.draft_tokens,
    }
    stated = {name: size for name, size in sizes.items() if size is not None}
    if not stated:
        return tree
    return replace(tree, **stated, min_confidence=0.0, min_probability=0.0)


def load_needed_models(args: Namespace, dtype: torch.dtype) -> Models:
    """Load the target, with a drafter if one is needed. A client loads only those layers of the
    target that its drafter reuses."""
    if not args.no_speculation:
        return load_models(args.model, args.drafter, args.device, dtype, remote=bool(args.remote))
    last = 0 if args.remote else None
    target, tokenizer = load_target(args.model, args.device, dtype, last)
    if not args.remote:  # a plain API's client does not run its target
        pack_together(target, [])
    return Models(target, tokenizer, None)


def choose_method(
    args: Namespace, models: Models, server: tuple[str, int] | None
) -> Method:
    """Return the way to answer prompts that the command line asks for."""
    limits = choose_limits(args, REMOTE_TREE if server else TREE)
    if server:
        link = netsim.link_of(
            args.network,
            latency=args.latency,
            jitter=args.jitter,
            bandwidth=args.bandwidth,
            loss=args.loss,
        )
        new_channel = partial(
            netsim.open_channel,
            server,
            link or netsim.Link(),  # without flags, a link that simulates nothing
            args.seed,
            outage_after=args.disconnect_after,
            outage_for=args.disconnect_for,
            timeout=args.timeout,
        )
        if args.no_speculation:
            return PlainApi(new_channel, models.target.config.vocab_size)
        return OnServer(new_channel, models.drafter, limits, args.lookup)
    if args.no_speculation:
        return Alone(models.target)
    return WithDrafts(models.target, models.drafter, limits, args.lookup)


@dataclass
class Terminal:
    """Answers the prompts of one command line: one prompt, or a chat."""

    args: Namespace
    models: Models
    method: Method
    config: GenerationConfig
    answers: list[Generation] = field(default_factory=list)

    def respond(self, messages: list[dict]) -> Generation:
        """Print the answer to a conversation, and what it cost. Raise KeyboardInterrupt at the end
        if Ctrl-C ended the answer."""
        args = self.args
        tokenizer = self.models.tokenizer
        prompt = tokenizer.chat(messages)
        context = self.models.target.config.max_position_embeddings
        count = answer_length(context, len(prompt), self.config.max_new_tokens)
        config = replace(self.config, max_new_tokens=count)
        if args.trace and args.json:
            print(json.dumps({"prompt": messages[-1]["content"], "tokens": prompt}))
        printer = Printer(TextStream(tokenizer), args.show)
        emit = self.choose_emit(printer)
        generation = self.answer_with_progress(prompt, config, emit)
        if not generation.tokens:  # Ctrl-C came before the first token
            raise KeyboardInterrupt
        text = tokenizer.decode(generation.tokens)
        if not args.json:
            print(f"\n{text}" if args.trace else printer.stream.pending_text(), flush=True)
        self.answers.append(generation)
        self.report(text, generation)
        if generation.interrupted:
            raise KeyboardInterrupt
        return generation

    def choose_emit(self, printer: Printer) -> Emit:
        """Return the function that shows each cycle as it comes."""
        args = self.args
        if args.trace:
            return Trace(self.models.tokenizer, self.config.new_sampling("cpu"), args.json).emit
        return do_nothing if args.json else printer.emit

    def answer_with_progress(
        self, prompt: list[int], config: GenerationConfig, emit: Emit
    ) -> Generation:
        """Answer a prompt, and show progress until the first token has come."""
        progress: terminal.Progress
        if self.args.remote:
            progress = terminal.WaitingNote()
        else:
            progress = terminal.PromptBar(len(prompt))

        def close_and_emit(cycle: TimedCycle) -> None:
            progress.close()  # a token has come
            emit(cycle)

        with closing(progress):
            return answer(self.method, prompt, config, close_and_emit, progress.update)

    def report(self, text: str, generation: Generation) -> None:
        """Print what an answer cost, and whether the network was down."""
        args = self.args
        stopped = terminal.why_stopped(generation.tokens, self.config.stop_ids, args.max_new_tokens)
        if generation.interrupted:
            stopped = "interrupted"
        statistics = {**generation.statistics(), "stopped": stopped, "seed": args.seed}
        terminal.report(text, generation.tokens, statistics, args.json)
        if generation.outage:
            print(
                f"the server was lost ({generation.outage}): {generation.unverified} of "
                f"{len(generation.tokens)} tokens are the drafter's own, unverified",
                file=sys.stderr,
            )
        elif generation.disconnected:
            print("the network was down for a while; all tokens are the target's", file=sys.stderr)

    def chat(self, greeting: str) -> None:
        """Answer one question after the other, with the conversation so far as context."""
        messages: list[dict] = []
        usage = "Ask something. Ctrl-C ends an answer; exit, quit or Ctrl-D ends the chat."
        print(f"{greeting}\n{usage}", file=sys.stderr)
        for question in terminal.read_questions():
            try:
                messages = self.take_turn([*messages, {"role": "user", "content": question}])
            except KeyboardInterrupt:
                print("this question is left out of the conversation", file=sys.stderr)
            except InputError as error:  # too long, or the server is gone: the chat goes on
                print(f"\nerror: {error}", file=sys.stderr)
        if self.answers:
            tokens = sum(len(g.tokens) for g in self.answers)
            answers = "1 answer" if len(self.answers) == 1 else f"{len(self.answers)} answers"
            print(
                f"{answers}, {tokens} tokens, {tokens_per_second(self.answers):.3g} tokens "
                f"per second, acceptance length {acceptance_length(self.answers):.3g}",
                file=sys.stderr,
            )

    def take_turn(self, messages: list[dict]) -> list[dict]:
        """Answer the last of these messages. Return the messages with the answer, but without turns
        that the context has no room for.

        Raise KeyboardInterrupt if Ctrl-C cut the answer short. The caller then leaves out the turn,
        because later answers would take the cut answer for a complete one.
        """
        tokenizer = self.models.tokenizer
        context = self.models.target.config.max_position_embeddings
        room = min(self.config.max_new_tokens, context // 2)  # tokens left free for an answer
        messages = drop_oldest_exchanges(
            messages, lambda kept: len(tokenizer.chat(kept)), context, room
        )
        generation = self.respond(messages)
        return [*messages, {"role": "assistant", "content": tokenizer.decode(generation.tokens)}]


def run_terminal(args: Namespace, dtype: torch.dtype) -> None:
    """Answer one prompt, or chat."""
    chatting = args.prompt is None and sys.stdin is not None and sys.stdin.isatty()
    # Read before the models are loaded: if there is nothing to read, no time is lost.
    question = "" if chatting else read_prompt(args.prompt)
    models = load_needed_models(args, dtype)
    server = args.remote
    if server == OWN_SERVER:
        server = netsim.start_server(args.model, args.drafter, args.device, dtype, ExactVerifier)
    method = choose_method(args, models, server)
    stop_ids = frozenset(models.tokenizer.stop_ids)
    config = GenerationConfig(
        args.max_new_tokens, args.temperature, args.top_p, args.seed, stop_ids
    )
    client = Terminal(args, models, method, config)
    if chatting:
        place = "on this machine"
        if server:
            host, port = server
            place = f"on the server at {host}:{port}"
        client.chat(f"The target is {args.model}, {place}.")
        return
    client.respond([{"role": "user", "content": question}])


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    check_arguments(parser, args)
    dtype = DTYPES[choose_dtype(args.device, args.dtype)]
    if args.serve:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        models = load_needed_models(args, dtype)
        netsim.serve(args.serve, models, ExactVerifier, netsim.announce_on_terminal)
    else:
        run_terminal(args, dtype)


if __name__ == "__main__":
    run_command(main)
