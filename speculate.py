"""Speculative decoding with a Mixture of Attentions: draft, verify, accept (paper, algorithm 1).

The target needs one pass for each token that it writes, and most of a pass is spent reading its
weights. To save passes, a drafter proposes the next few tokens, and one pass of the target checks
all of them. The target keeps the drafted tokens up to the first that it rejects, and adds a token
of its own. Wherever the drafter is right, a pass yields several tokens, and the text is still the
target's.

`speculate` is the loop, and `LocalVerifier` is the target's side of it. The section *Acceptance*
decides which drafted tokens are kept, and proves that the text is distributed exactly as the
target's own. The section *Sampled trees* draws trees above temperature 0, and proves the same.

    python speculate.py --prompt "Explain why the sky is blue." --show   # accepted tokens are green

or, in a notebook, with a target, its drafter and a prompt of token ids:

    config = GenerationConfig(max_new_tokens=100, temperature=0.8)
    limits = DraftLimits(depth=6, top_k=3, total_tokens=8)
    sampling = config.new_sampling("cpu")
    capacity = len(prompt) + 100 + 32  # slots of the caches: for the text, and for a draft
    verifier = LocalVerifier(target, drafter, capacity, sampling)
    state = TreeSampler(drafter, capacity, sampling)
    for cycle in speculate(verifier, state, prompt, config, limits): ...

Shapes: T tokens, K drafted tokens, S tokens in the cache, E hidden size, F nodes on the frontier of
a draft, V vocabulary.
"""
from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Iterator, Protocol

import torch
from torch import Tensor

from llama import (
    GenerationConfig,
    Llama,
    Sampling,
    check_logits,
    likeliest,
    probabilities,
    read_prompt,
    sample,
    sample_next,
)
from moa import (
    CacheUpdate,
    Candidate,
    Draft,
    Drafter,
    DraftLimits,
    DraftState,
    add_candidates,
    draft_mask,
    likeliest_candidates,
    likeliest_paths,
    worth_expanding,
)

# --- The loop ---


@dataclass
class VerifyResult:
    """The result of one pass of the target over a prompt or a draft. (After a prompt nothing is
    accepted, because nothing was drafted.)"""

    accepted: list[int]  # the drafted tokens that the target keeps
    token: int  # the target's own token, which comes after the accepted ones
    update: CacheUpdate  # of what the pass verified: the prompt, or the root and the accepted


class Verifier(Protocol):
    """The target's side of one conversation: here `LocalVerifier`, in netsim.py a client's."""

    def prefill(self, prompt: list[int]) -> VerifyResult:
        """Read a prompt, and choose the token after it."""

    def verify(self, draft: Draft) -> VerifyResult:
        """Decide which tokens of a draft to keep."""


@dataclass
class Cycle:
    """What one round of the loop brings. The first round reads the prompt, and drafts nothing."""

    result: VerifyResult
    tokens: list[int]  # the new tokens of the answer


@torch.inference_mode()
def speculate(
    verifier: Verifier,
    state: DraftState,
    prompt: list[int],
    config: GenerationConfig,
    limits: DraftLimits,
) -> Iterator[Cycle]:
    """Run algorithm 1. Yield each cycle as soon as it is complete.

    The first cycle has the token after the prompt. The last one ends with a stop token, or with
    token number max_new_tokens, which is at least 1. Prompt and answer must fit the context.

    Of `config` only max_new_tokens and stop_ids are used here. The temperature is in the `Sampling`
    that the verifier and the state hold.

    state: a `TreeSampler`. (For chains, and at temperature 0, a plain `DraftState` will do.)
    """
    remaining = config.max_new_tokens
    result = verifier.prefill(prompt)  # the first token, and the prompt's keys and values
    while True:
        tokens = truncate_at_stop(result.accepted + [result.token], config.stop_ids)
        yield Cycle(result, tokens)
        remaining -= len(tokens)
        if remaining <= 0 or tokens[-1] in config.stop_ids:
            return
        state.append_verified(result.update)  # grow the drafter's caches, CA's above all
        # The target adds a token of its own, so at most remaining - 1 drafted ones can be used.
        depth = min(limits.depth, remaining - 1)  # if 0, nothing is drafted
        draft = state.draft(result.token, replace(limits, depth=depth))
        result = verifier.verify(draft)  # accepted tokens, next token, update of what is verified


def truncate_at_stop(tokens: list[int], stop_ids: frozenset[int]) -> list[int]:
    """Return the tokens up to and including the first stop token."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[:i + 1]
    return tokens


# --- The verifier ---


class LocalVerifier:
    """The target's side of one conversation with a model on this machine: the model, its KV cache,
    and LSA.

    LSA is a part of the drafter, but it reads the target's cache. When the target is on a server,
    the server therefore runs LSA, and sends only what CA needs of LSA's output.
    """

    def __init__(self, model: Llama, drafter: Drafter, capacity: int, sampling: Sampling):
        """drafter: only its `cache_update`, which runs LSA, is used here. capacity: how many tokens
        of text and draft the cache has room for."""
        self.model = model
        self.drafter = drafter
        self.sampling = sampling
        self.cache = model.new_cache(capacity)

    def prefill(self, prompt: list[int]) -> VerifyResult:
        """Read a prompt, and choose the token after it."""
        hidden = read_prompt(self.model, prompt, self.cache)  # (E)
        token = sample_next(self.model.lm_head(hidden), self.sampling)
        return VerifyResult([], token, self.drafter.cache_update(prompt, self.cache))

    def verify(self, draft: Draft) -> VerifyResult:
        """Decide which tokens of a draft to keep. The cache keeps the root and the accepted
        tokens."""
        start = self.cache.length
        logits = self.read_draft(draft)  # (1 + K, V)
        acceptance = accept_draft(logits, draft, self.sampling)
        self.cache.keep_path(start, acceptance.path)
        verified = [draft.tokens[node] for node in acceptance.path]  # the root, then accepted ones
        update = self.drafter.cache_update(verified, self.cache)
        return VerifyResult(verified[1:], acceptance.token, update)

    def read_draft(self, draft: Draft) -> Tensor:
        """Run the target on a draft. Returns logits (1 + K, V): row i is what follows node i.

        One pass over the draft is enough, because a transformer predicts the token after every
        token that it reads. The pass reads the root and a chain of K drafted tokens, and returns
        1 + K distributions. (The root is the newest token. The target has chosen it, but has not
        read it yet.) The distribution after the root decides on drafted token 1, the distribution
        after drafted token 1 decides on drafted token 2, and so on. If all are accepted, the last
        distribution supplies the target's own token. (In a tree, the distribution after a node
        decides on all its children.)

        (In exact arithmetic the distribution after a token is that of a pass over the token alone,
        with the same tokens before it in the cache. Floats are rounded in another order, so at a
        near tie another token may be the likeliest. app/exact.py sees to it that on a CPU both
        passes round alike.)
        """
        positions, mask = draft_layout(draft, self.cache.length, self.model.device)
        ids = torch.tensor([draft.tokens], device=self.model.device)  # (1, 1 + K)
        hidden = self.model.hidden(ids, self.cache, positions, mask)  # (1, 1 + K, E)
        return self.model.lm_head(hidden[0])


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
    mask = draft_mask(draft, nodes, nodes, start)
    return torch.tensor(positions, device=device), mask.to(device)


# --- Acceptance ---


@dataclass
class Acceptance:
    """The decision on a draft."""

    path: list[int]  # the nodes to keep: the root, then the accepted nodes
    token: int  # the target's own token after them


def accept_draft(logits: Tensor, draft: Draft, sampling: Sampling) -> Acceptance:
    """Decide which drafted tokens to keep. Row i of logits (1 + K, V) is what the target predicts
    after node i of the draft. Raise FloatingPointError if the largest logit is not finite."""
    check_logits(logits)
    if sampling.temperature == 0:
        return accept_greedy(likeliest(logits).tolist(), draft)
    p = probabilities(logits, sampling.temperature, sampling.top_p)
    # One call draws a random number in [0, 1) for each token. Some of them may not be needed.
    u = torch.rand(len(draft.tokens), generator=sampling.generator, device=p.device).tolist()
    # The rule for trees would give the same result for a chain. The plain rule is easier to read.
    rule = rejection_sample if draft.is_chain else rejection_sample_tree
    return rule(p, draft, u, sampling.generator)


def accept_greedy(favorites: list[int], draft: Draft) -> Acceptance:
    """At temperature 0, accept a drafted token if it is the target's favorite, the likeliest one.
    favorites (1 + K): after each node."""
    path = [0]
    while True:
        favorite = favorites[path[-1]]  # after the newest accepted token
        child = draft.child(path[-1], favorite)
        if child is None:
            return Acceptance(path, favorite)
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
    excess = (p - q).clamp(min=0)
    if not excess.any():
        # p exceeds q nowhere. Both sum to 1, so they are equal up to rounding, and the rejection
        # was a rounding error. Draw from p instead (0 / 0 would be NaN).
        return p
    return excess / excess.sum()


# --- Sampled trees ---
#
# Above temperature 0 a tree's tokens are drawn from q, and tried against p one after the other:
# how they are drawn comes first, then the rule that tries them and why it is exact.


class TreeSampler(DraftState):
    """A `DraftState` that also draws trees, above temperature 0.

    It spends its budget on likely paths, as EAGLE-2 does, but draws tokens without replacement, as
    Jeon et al. 2024 do. (EAGLE-2 proposes the likeliest tokens at any temperature, without drawing.
    That is exact, too, with q(x) = 1 for a token that is certain to be proposed.
    experiments/fixed_tree.py compares the two.)
    """

    def draft(self, root: int, limits: DraftLimits) -> Draft:
        """Draft a chain, or a tree. At each level of a tree that is drawn:

        1. Divide the tokens that are left by the levels that are left, rounded up: the `share`.
        2. Find the `share` likeliest tokens after the frontier, and count those after each node.
        3. After each node, draw as many tokens as were counted from the node's q, without
           replacement. They need not be the likeliest ones.
        4. The drawn tokens with the `top_k` likeliest paths are the next frontier. The other tokens
           are not expanded, but they are also proposed.
        """
        if limits.top_k == 1 or self.sampling.temperature == 0:
            return super().draft(root, limits)
        self.discard_draft()  # an earlier draft, if nothing was verified since
        draft = Draft(root)
        frontier = [0]
        for level in range(limits.depth):
            budget = limits.total_tokens - (len(draft.tokens) - 1)
            share = math.ceil(budget / (limits.depth - level))
            if share == 0 or not worth_expanding(draft, frontier, limits):
                break
            q = self.next_distributions(draft, frontier)  # (F, V)
            candidates = likeliest_candidates(draft, frontier, q, share, limits.min_probability)
            # How many children each row's node gets is fixed before any of them is drawn.
            counts = Counter(candidate.row for candidate in candidates)
            drawn = draw_candidates(counts, q, self.sampling.generator)
            children = add_candidates(draft, frontier, drawn)
            for row in counts:
                draft.q[frontier[row]] = q[row]  # (V)
            frontier = likeliest_paths(draft, children, limits.top_k)
        return draft


def draw_candidates(
    counts: Counter[int], q: Tensor, generator: torch.Generator
) -> list[Candidate]:
    """Draw counts[row] tokens from each q[row] without replacement. q (F, V)"""
    drawn = []
    for row, count in counts.items():
        for token in gumbel_topk(q[row], count, generator):
            drawn.append(Candidate(row, token, float(q[row, token])))
    return drawn


def gumbel_topk(p: Tensor, k: int, generator: torch.Generator) -> list[int]:
    """Draw k tokens from p (V) without replacement. Returns them in the order drawn.

    With e_x ~ Exp(1), e_x / p_x is the time until a random clock of rate p_x rings. If each token
    has such a clock, x rings first with probability p_x, and the order in which the clocks ring is
    that of draws without replacement. The first to ring has the largest p_x / e_x. (This is the
    Gumbel top-k trick of Kool et al. 2019: log(p_x / e_x) is log p_x plus Gumbel noise.)
    """
    possible = (p > 0).nonzero().squeeze(-1)  # after top-p few of V: the others need no clock
    p = p[possible]
    e = torch.empty_like(p).exponential_(generator=generator)
    first = (p / e).topk(k).indices
    return possible[first].tolist()


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

    Take p and q of the example in `rejection_sample`, and say that b was drawn first, then c. b is
    accepted with probability 0.3 / 0.5 = 0.6. If b is rejected, p_left is (1, 0, 0) and q_left
    (0.8, 0, 0.2), so c is rejected, too. Now p_left is (1, 0, 0) again, and a comes out.

    Why is that exact? It needs this of the draft (say p = q = (0.6, 0.4) for tokens a and b):

    (1) Every child is drawn from its parent's q, without replacement.
    (2) Every child that is drawn is proposed. If one token is drawn, and b is dropped as unlikely,
        the target then draws itself: a comes out with probability 0.6 + 0.4 * 0.6 = 0.84.
    (3) Children are tried in the order drawn. If both are drawn, but the likelier a is tried first,
        a is always accepted.
    (4) Whether there is one more child is decided before it is drawn. The decision may depend on q,
        on the levels above and on the children before. (`TreeSampler` fixes their number first.)
    (5) Each child has a random number u of its own, which is independent of all draws.

    The proof is an induction over the number of children that are left. Claim: given which children
    were rejected so far, the token that comes out is distributed as p_left.

    No child is left: the token is drawn from p_left.

    Else there is a next child x. It was drawn from q_left, by (1). Does it matter that the children
    before x were rejected? No: the rejections were decided by those children and their u, and x was
    drawn without regard to these, by (3) and (5). That x is there at all tells nothing about which
    token it is, by (2) and (4). So x is accepted with probability min(1, p_left(x) / q_left(x)).
    If x is rejected, the new p_left is p' = scaled(max(p_left - q_left, 0)), one child less is
    left, and by induction the token is distributed as p'. That is the chain's rule with p_left and
    q_left in place of p and q, so the token is distributed as p_left.

    Before the first child is tried, p_left is p. The token is therefore distributed as p. So is the
    next one, a level deeper: given all draws and verdicts up to a node, its children are fresh
    draws from its q. (How many there are may depend on the draws of the levels above, by (4): these
    are over before the first child is drawn.) And as each token is distributed as p after the
    tokens before it, the whole text is distributed as the target's.
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


if __name__ == "__main__":  # the command line is in app/, and imports this file as `speculate`
    from app.speculate_command import main
    main()
