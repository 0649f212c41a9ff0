"""Speculative decoding with a Mixture of Attentions: draft, verify, accept (paper, algorithm 1).

The target needs one pass for each token it writes, and most of a pass is spent reading its weights.
So a drafter proposes the next few tokens, and one pass of the target verifies all of them. It keeps
them up to the first that it would not have written itself, and adds a token of its own. Wherever
the drafter is right, a pass brings several tokens. `speculate` is the loop, `LocalTarget` the
target's side of it.

One pass is enough, because a transformer predicts the token after every token that it reads. Given
the newest token (the root of the draft) and a chain of K drafted ones, it returns 1 + K
distributions. The first is that of the token after the root, and judges the first drafted token.
The second judges the next, and so on. The last is that of the token after all of them.

Which drafted tokens are kept is decided so that the text is distributed exactly as the target's own
(Leviathan et al. 2023; Chen et al. 2023). With p the target's distribution, q the drafter's, and
scaled(f) = f / sum f:

    accept x ~ q with probability min(1, p(x) / q(x));  if rejected, draw from scaled(max(p - q, 0))

Why that is exact. A token x comes out in two ways, with these probabilities:

    drafted and accepted      q(x) min(1, p(x) / q(x))                  = min(p(x), q(x))
    drawn after a rejection   P(rejection) * scaled(max(p - q, 0))(x)   = max(p(x) - q(x), 0)

because P(rejection) = 1 - sum min(p, q) = sum p - sum min(p, q) = sum max(p - q, 0), and that is
what `scaled` divides by. The two add up to p(x), whatever q is.

That is for one token, after a given text. The next drafted token is tried only if this one was
accepted. Then p and q are the distributions after just the text that stands there, and the same
holds again. After a rejection the rest of the draft is thrown away: it follows a token that is not
in the text. So the whole text is distributed as the target's own. (At temperature 0 nothing is
drawn: a drafted token is accepted if it is the target's likeliest.)

An example with three tokens, p = (0.6, 0.3, 0.1) and q = (0.4, 0.5, 0.1). They are accepted with
probability 1, 0.6 and 1. The second is drafted and rejected with probability 0.5 * 0.4 = 0.2. Then
scaled(max(p - q, 0)) = (1, 0, 0) puts the first in its place. So they come out with probabilities
0.4 + 0.2, 0.5 * 0.6 and 0.1, which is p. A bad drafter costs time, never text.

    python speculate.py --prompt "Explain why the sky is blue." --show   # accepted tokens are green
    python speculate.py                                                  # a chat
    python speculate.py --remote --latency 21ms                          # the target on a server

Read as far as the bar, the line that says where the method ends.

Shapes: T tokens, K drafted tokens, S tokens in the cache, E hidden size, V vocabulary.
"""
from __future__ import annotations

# What the method uses:
from dataclasses import dataclass, field, replace
from typing import Iterator, NamedTuple

import torch
from torch import Tensor

from llama import GenerationConfig, Llama, Sampling, probabilities, sample, sample_next
from moa import Draft, Drafter, DraftState, MemoryUpdate, TreeConfig

# What only the code below the bar uses:
import json
import math
import os
import random
import signal
import sys
from argparse import Namespace
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from socket import gethostname
from statistics import fmean
from threading import Thread, Timer
from time import monotonic, perf_counter, sleep
from timeit import repeat
from typing import Callable

from tqdm import tqdm

from llama import (
    DEFAULT_MODEL,
    TOY_MODEL,
    Batch,
    InputError,
    KVCache,
    PackedLinear,
    Parser,
    Request,
    TextStream,
    Tokenizer,
    add_generation_arguments,
    add_model_arguments,
    answer_length,
    generate,
    input_errors,
    load_target,
    number,
    positive_int,
    ragged_hidden,
    read_json,
    read_prompt,
    report,
    run_command,
)
from moa import (
    Q_TOKENS,
    BatchDraftState,
    RemoteDraftState,
    dequantize_probabilities,
    draft_distributions,
    load_drafter,
    pack_together,
    quantize_probabilities,
    start_drafting,
    to_bfloat16,
)
from netsim import (
    PROFILES,
    SECRET,
    Address,
    Channel,
    ConnectionLost,
    Link,
    MessageServer,
    Network,
    Outage,
    Tensors,
    Traffic,
    add_link_arguments,
    address,
    duration,
    link_of,
    time_limit,
)


# --- The loop ---


@dataclass
class VerifyResult:
    """What one pass of the target brings. (Over the prompt: nothing was drafted, so nothing is
    accepted.)"""

    accepted: list[int]  # the drafted tokens that it keeps
    token: int  # its own, which comes after them
    memory: MemoryUpdate  # of what is now verified: the prompt, or the root and accepted tokens


@dataclass
class LocalResult(VerifyResult):
    """What `LocalTarget.verify` returns, with what --trace shows besides."""

    logits: Tensor  # (1 + K, V)
    acceptance: Acceptance


@torch.inference_mode()
def speculate(
    target: LocalTarget,  # or RemoteTarget, or another that answers `prefill` and `verify`
    state: DraftState,  # or another that answers `append_verified` and `draft`
    prompt: list[int],
    config: GenerationConfig,
    tree: TreeConfig,
) -> Iterator[list[int]]:
    """Run algorithm 1. Yields the token after the prompt, then for each cycle (one draft, verified)
    the tokens it brought. Ends with a stop token, or with max_new_tokens. Prompt and answer must
    fit the model's context."""
    left = config.max_new_tokens
    result = target.prefill(prompt)  # the first token, and the memory of the prompt
    while True:
        tokens = cut(result.accepted + [result.token], config.stop_ids)
        yield tokens
        left -= len(tokens)
        if left == 0 or tokens[-1] in config.stop_ids:
            return
        state.append_verified(result.memory)  # grow the cross-attention memory
        # The target adds a token of its own: so at most left - 1 drafted ones can be used.
        depth = min(tree.depth, left - 1)  # if 0, nothing is drafted
        draft = state.draft(result.token, replace(tree, depth=depth))
        result = target.verify(draft)  # accepted tokens, next token, memory of what is verified


def cut(tokens: list[int], stop_ids: frozenset[int]) -> list[int]:
    """Drop what comes after the first stop token."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[:i + 1]
    return tokens


class LocalTarget:
    """The target of one conversation, on this machine. (In the loop `target` is this object, and
    `model` the Llama that the other files call the target.) LSA runs on its side, where its cache
    is."""

    def __init__(self, model: Llama, drafter: Drafter, capacity: int, sampling: Sampling):
        """drafter: of it only `memory_update` is used here. capacity: tokens of text and draft
        together."""
        self.model = model
        self.drafter = drafter
        self.sampling = sampling
        self.cache = model.new_cache(capacity)

    def prefill(self, prompt: list[int]) -> VerifyResult:
        """Read a prompt, and choose the token after it."""
        ids = torch.tensor([prompt], device=self.model.device)
        hidden = self.model.hidden(ids, self.cache)  # (1, T, E)
        token = sample_next(self.model.lm_head(hidden[0, -1]), self.sampling)
        return VerifyResult([], token, self.drafter.memory_update(prompt, self.cache, hidden))

    def verify(self, draft: Draft) -> LocalResult:
        """Run one pass over a draft. The cache keeps its root and what is accepted. (A LocalResult
        is a VerifyResult, with more for --trace.)"""
        start = self.cache.length
        ids = torch.tensor([draft.tokens], device=self.model.device)  # (1, 1 + K)
        positions, mask = draft_layout(draft, start, self.model.device)
        hidden = self.model.hidden(ids, self.cache, positions, mask)  # (1, 1 + K, E)
        logits = self.model.lm_head(hidden[0])  # (1 + K, V)
        acceptance = accept_draft(logits, draft, self.sampling)
        path = acceptance.path
        self.cache.keep_path(start, path)
        verified = [draft.tokens[node] for node in path]  # the root, then what is accepted
        memory = self.drafter.memory_update(verified, self.cache, hidden[:, path])
        return LocalResult(verified[1:], acceptance.token, memory, logits, acceptance)


def draft_layout(draft: Draft, start: int, device) -> tuple[Tensor, Tensor]:
    """Lay out a draft after `start` tokens of text. Returns the positions of its tokens (1 + K),
    and a mask of which slots each of them may look at (1 + K, S), with S = start + 1 + K.

    The branches of a tree lie side by side in the slots of the cache. Two tokens that may follow
    the same one have the same position, and each sees the text, its ancestors and itself, but no
    other branch. After 10 tokens of text, for example:

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


class Trial(NamedTuple):
    """A drafted token x is accepted if u < ratio."""

    u: float  # a random number, uniform in [0, 1)
    ratio: float  # p(x) / q(x); after a rejected sibling, of what is left of both


@dataclass
class Acceptance:
    """What is decided on a draft. `LocalTarget.verify` turns its nodes into tokens."""

    path: list[int]  # the nodes that are kept: the root, then accepted tokens
    token: int  # the target's own, which comes after them
    trials: dict[int, Trial] = field(default_factory=dict)  # by node, for --trace


def accept_draft(logits: Tensor, draft: Draft, sampling: Sampling) -> Acceptance:
    """Decide which drafted tokens to keep. Row i of logits (1 + K, V) is what the target predicts
    after node i of the draft."""
    if sampling.temperature == 0:
        choices = logits.float().argmax(-1)  # in float32: on CPUs ten times as fast as bfloat16
        return accept_greedy(choices.tolist(), draft)
    p = probabilities(logits, sampling.temperature, sampling.top_p)
    # A uniform number for each token, all in one call. Those of tokens that are never tried are not
    # used.
    u = torch.rand(len(draft.tokens), generator=sampling.generator, device=p.device).tolist()
    if draft.is_chain:
        return rejection_sample(p, draft, u, sampling.generator)
    # (A chain is a tree, too. But it needs only the plain rule, which is easier to read.)
    return rejection_sample_tree(p, draft, u, sampling.generator)


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
    """Accept tokens of a chain so that the text is distributed as p (1 + K, V).

    This is speculative sampling (Leviathan et al. 2023, algorithm 1), also called modified
    rejection sampling (Chen et al. 2023, algorithm 2). u (1 + K): random numbers, uniform in
    [0, 1), one for each token. The root's is not used.
    """
    path = [0]
    trials = {}  # for --trace
    for i in range(1, len(draft.tokens)):
        x = draft.tokens[i]
        # In a chain node i follows node i - 1: so both distributions are those after i - 1.
        p_here = p[i - 1]  # the target's, (V)
        q_here = draft.q[i - 1]  # the drafter's, which x was drawn from, (V)
        ratio = float(p_here[x] / q_here[x])
        trials[i] = Trial(u[i], ratio)
        accepted = u[i] < ratio  # with probability min(1, p(x) / q(x))
        if not accepted:
            return Acceptance(path, sample(residual(p_here, q_here), generator), trials)
        path.append(i)
    return Acceptance(path, sample(p[-1], generator), trials)  # all are accepted


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return scaled(max(p - q, 0)): by how much p exceeds q, as a distribution. p, q (V)."""
    left = (p - q).clamp(min=0)
    if not left.any():
        # Nowhere p > q. Both sum to 1, so they are equal up to rounding, and it was rounding that
        # rejected. To draw from p is then as good, and 0 / 0 would be NaN.
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
    residual of p. Second, the sibling was drawn from q without the rejected token. So it is tried
    with these two in place of p and q: p_left and q_left in the code. If all are rejected, the
    token is drawn from what is left of p.

    An example with tokens 1, 2 and 3, p = (0.6, 0.3, 0.1), q = (0.4, 0.5, 0.1), and the children 2
    and 1, drawn in this order. Token 2 is accepted with probability 0.3 / 0.5 = 0.6. If it is
    rejected, p_left is (1, 0, 0) and q_left (0.8, 0, 0.2): so token 1 is accepted.

    Why that is exact. Claim: given what was rejected so far, the token that in the end follows this
    node is distributed as the p_left of that moment. From the last child backwards:

    1. The last child was drawn from its q_left. If it is rejected, the token is drawn from the
       residual of p_left. That is the chain's rule, so p_left comes out.
    2. A child before it was drawn from its q_left, too. If it is rejected, the residual becomes the
       next p_left, and by the claim for the next child that is what comes out. So this rejection,
       too, is followed by a token from the residual: the chain's rule again.
    3. For the first child p_left is p. So p comes out.

    This needs that each child was drawn from its q_left, whatever came out. So after a node the
    number of children has to be fixed first; then they are drawn; then all that were drawn are
    proposed. `sample_tree` of moa.py, below its bar, drafts in this way.
    """
    path = [0]
    trials = {}
    while True:
        last = path[-1]
        p_left = p[last]  # (V)
        q_left = draft.q.get(last)  # (V); None, and not used, if it has no children
        accepted = None
        for child in draft.children(last):
            x = draft.tokens[child]
            ratio = float(p_left[x] / q_left[x])
            trials[child] = Trial(u[child], ratio)
            if u[child] < ratio:
                accepted = child
                break
            p_left = residual(p_left, q_left)
            q_left = without(q_left, x)
        if accepted is None:
            return Acceptance(path, sample(p_left, generator), trials)
        path.append(accepted)


def without(q: Tensor, x: int) -> Tensor:
    """Return the distribution of the next draw if x was drawn from q (V) and not put back."""
    rest = q.clone()
    rest[x] = 0.0
    # If x was all of q, the rest sums to 0. Then no sibling follows, and the result is not used:
    # the clamp only avoids 0 / 0.
    return rest / rest.sum().clamp(min=torch.finfo(q.dtype).tiny)


# --- The method ends here: what follows makes it fast and practical ---
#
# Each part builds on those before it, but for `serve`, which calls `load_models`.
#
#     Lookup                       drafts without a drafter
#     Many conversations at once   the loop, for all rows of a batch
#     Client and server            `RemoteTarget` here, `TargetSession` there
#     One answer                   `Method.answer` runs the loop, and counts what it costs
#     Watching                     the answer in colors; --trace
#     The models                   what a command line names, loaded
#     The benchmark                every prompt by every method
#     Command line                 flags, the chat, `main`


# --- Lookup: copy what followed the same tokens before ---


@dataclass
class Lookup:
    """Prompt lookup (Saxena 2023). Where the newest tokens occurred before, the draft is what
    followed them there. Elsewhere the drafter is asked, if there is one."""

    state: DraftState | None  # the drafter's
    vocab_size: int
    sampling: Sampling
    history: list[int] = field(default_factory=list)  # all tokens before the root

    def append_verified(self, update: MemoryUpdate | None) -> None:
        """update: None while a remote target is out of reach (see `RemoteResult`)."""
        if update is not None:
            self.history += update.tokens
        if self.state is not None:
            self.state.append_verified(update)

    def draft(self, root: int, tree: TreeConfig) -> Draft:
        """Draft a chain that is copied from the text. Where there is nothing to copy, ask the
        drafter."""
        text = self.history + [root]
        count = min(tree.depth, tree.total_tokens)
        # Copy where the last 3 tokens occurred before, else where the last 2 did, else the last 1.
        # Beside a drafter only 3: after a shorter match the drafter is right more often than a
        # copy.
        sizes = (3, 2, 1) if self.state is None else (3,)
        for size in sizes:
            place = find_earlier(text, size)
            if place is not None:
                # Beyond the end of the text, what is copied repeats. If 2 tokens are enough, 5 7 8
                # 7 8 is followed by 7 8 7 8 7 ...
                copied = text[place:place + count]
                return self.certain_draft(root, (copied * count)[:count])
        if self.state is None:
            return Draft(root)
        return self.state.draft(root, tree)

    def certain_draft(self, root: int, tokens: list[int]) -> Draft:
        """Make a chain of tokens that were not drawn.

        Above temperature 0 the rule of acceptance asks for q. It gets the one from which only this
        token is drawn, q(x) = 1. So x is accepted with probability p(x), and if it is rejected, the
        residual is p without x, scaled to sum to 1. (EAGLE-2 treats its trees so, whose tokens are
        the likeliest and not drawn, at any temperature.)
        """
        draft = Draft(root)
        for parent, token in enumerate(tokens):  # in a chain each follows the one before it
            draft.add(token, parent, probability=1.0)
            if self.sampling.temperature > 0:
                q = torch.zeros(self.vocab_size, device=self.sampling.generator.device)
                q[token] = 1.0
                draft.q[parent] = q
        return draft


def find_earlier(text: list[int], size: int) -> int | None:
    """Find the newest place where the last `size` tokens occurred before. Returns the index of what
    followed them there, None if there is no such place."""
    newest = text[-size:]
    for start in reversed(range(len(text) - size)):  # without the place where they are now
        if text[start:start + size] == newest:
            return start + size
    return None


class NoDrafter:
    """Stands in for a drafter where drafts come from lookup alone: nobody needs a memory."""

    def memory_update(self, tokens: list[int], cache: KVCache, hidden: Tensor) -> MemoryUpdate:
        return MemoryUpdate(tokens, cross_kv=None, reused_kv=None)


# --- Many conversations at once ---
#
# One `advance` with K = 3. Row 0 has 20 tokens left to generate, row 1 has 2:
#
#     row   drafted   accepted   then the target's   new tokens   verified
#      0     a b c      a b             x              a b x       root a b
#      1     d e f     d e f            y              d e         root d
#
# Row 1 is cut to its two. Its e is the newest token then, and does not count as verified.


class ChainBatch(Batch):
    """The loop for many conversations: a chain of K drafted tokens for each row of the caches, and
    one pass that verifies them all. Each row accepts a length of its own. (Chains only: what a row
    keeps of a chain is its beginning. So nothing moves in the cache, only the length changes.)"""

    def __init__(self, model: Llama, drafter: Drafter, rows: int, capacity: int, K: int):
        super().__init__(model, rows, capacity + K)
        self.K = K
        self.state = BatchDraftState(drafter, rows, capacity + K)
        self.caches += self.state.caches  # so that `Batch` moves their rows, too

    def on_prefill(self, row: int, prompt: list[int], hidden: Tensor) -> None:
        """`Batch` calls this when the target has read a prompt."""
        self.state.append_verified(row, prompt, self.cache.rows[row], hidden)

    def advance(self) -> list[list[int]]:
        """Draft, verify and accept once, for all rows. Returns the new tokens of each."""
        samplings = [request.sampling for request in self.requests]
        newest = [request.tokens[-1] for request in self.requests]
        # As many as the row with the most left can use: the target adds a token of its own.
        most_left = max(request.left for request in self.requests)
        K = min(self.K, most_left - 1)
        drafts = self.state.draft_chains(newest, K, samplings)
        ids = torch.tensor([draft.tokens for draft in drafts])  # (B, 1 + K)
        hidden = ragged_hidden(self.model, ids.to(self.model.device), self.cache)  # (B, 1 + K, E)
        logits = self.model.lm_head(hidden)  # (B, 1 + K, V)
        new_tokens = []
        for row, draft in enumerate(drafts):
            acceptance = accept_draft(logits[row], draft, samplings[row])
            kept = draft.tokens[:len(acceptance.path)]  # of a chain: the root, what is accepted
            # All rows draft K tokens, even one that has fewer left. It may accept some beyond the
            # end of its answer, or of the context, where there are no positions. From the new
            # tokens `Request.extend` cuts them off, and here they do not count as verified.
            new_tokens.append(kept[1:] + [acceptance.token])
            verified = kept[:self.requests[row].left]
            cache = self.cache.rows[row]
            cache.length += len(verified)
            verified_hidden = hidden[row:row + 1, :len(verified)]  # (1, T, E)
            self.state.append_verified(row, verified, cache, verified_hidden)
        return new_tokens


# --- Client and server: the drafter here, the target there (paper, section 5) ---
#
# The server greets a client with the hash of its drafter. Then the client calls:
#
#     call        sends                                gets back
#     read        a text, GenerationConfig, known      accepted [], token, memory of the text
#     verify      drafts, parents, q of each parent    accepted, token, memory of what is verified
#     generate    a text, GenerationConfig             token: a reply for each
#
# "read" and "verify" are the target's two calls in `speculate`, prefill and verify. "generate" is a
# plain API. The text's tokens, memory (in 8 bits) and q are tensors, all else are fields.
#
# known: the client has the memory of so many tokens already, and the reply leaves theirs out.
# q goes up, quantized, if the tokens were drawn from it. An example, a chain of two of which the
# target accepts one:
#
#     client                                     server
#     read     tokens 5 9 2, known 0       ->    reads 5 9 2
#                                          <-    accepted [], token 7, memory of 5 9 2
#     verify   drafts [4 8], parents [0 1] ->    reads 7 4 8 in one pass
#                                          <-    accepted [4], token 1, memory of 7 4
#
# With "verify" the root, 7, does not go up: the server chose it.

MAX_DRAFT_TOKENS = 64  # of a draft: the server refuses a longer one
OFFLINE_TOKENS = 8  # that the drafter writes alone, before it looks again whether to reconnect
INITIAL_BACKOFF = 0.5  # seconds between two attempts; doubles with each that fails
MAX_BACKOFF = 30.0
Replies = Iterator[tuple[dict, Tensors]]


# What crosses the network.


def quantize_memory(memory: MemoryUpdate, skip: int = 0) -> Tensors:
    """Turn a memory, without its first `skip` tokens, into what crosses the network: int8
    (..., 2, D), and for each key and each value a float16 scale (..., 2, 1)."""
    tensors = {}
    for name, kv in (("cross", memory.cross_kv), ("reused", memory.reused_kv)):
        kv = kv[..., skip:, :].float().contiguous()
        kv = kv.unflatten(-1, (2, -1))  # keys and values apart
        largest = kv.abs().amax(-1, keepdim=True)
        # At least float16's smallest normal number: to divide by a scale of 0 would make NaN. And
        # from there on float16 rounds by 1/2048 at most, so that no integer exceeds 127.
        scale = (largest / 127).clamp(min=2**-14).half()
        tensors[name] = (kv / scale).round().to(torch.int8).cpu()
        tensors[name + "_scale"] = scale.cpu()
    return tensors


def dequantize_memory(tensors: Tensors, tokens: list[int], state: DraftState) -> MemoryUpdate:
    """Read the memory of these tokens off a reply. Raises LookupError, RuntimeError, ValueError."""
    count = len(tokens)
    # Any `count` slots of our caches: the memory must have their shape, dtype and device.
    cross_kv = dequantize(tensors, "cross", state.cross_cache.kv[0, :, :, :count])
    reused_kv = dequantize(tensors, "reused", state.reused_cache.kv[:, :, :, :count])
    return MemoryUpdate(tokens, cross_kv, reused_kv)


def dequantize(tensors: Tensors, name: str, like: Tensor) -> Tensor:
    """Return keys and values of the shape and dtype of `like` (..., 2D), on its device."""
    halves = like.unflatten(-1, (2, -1))  # (..., 2, D)
    integers = tensors[name].view_as(halves)
    scale = tensors[name + "_scale"].view_as(halves[..., :1])
    x = integers.float() * scale.float()
    if not x.isfinite().all():
        raise ValueError("the memory holds NaN or infinity")
    return x.flatten(-2).to(like)


def text_request(call: str, text: list[int], config: GenerationConfig) -> tuple[dict, Tensors]:
    """Return fields and tensors of a request that sends a text and how to go on after it."""
    fields = {"call": call, **vars(config), "stop_ids": sorted(config.stop_ids)}
    return fields, {"tokens": torch.tensor(text, dtype=torch.int32)}


# The client.


@dataclass
class RemoteResult(VerifyResult):
    """What a cycle with a target on a server brings.

    Offline the tokens are the drafter's: all but the last in `accepted`, the last in `token`, as it
    is the next root. Nobody has a memory of them: `memory` is None.
    """

    link: str = "connected"  # "reconnected": the draft was lost; or "offline"
    reason: str = ""  # why it is offline


class RemoteTarget:
    """The target of one conversation, on a server.

    Say that the prompt was 5 9 2, and the server's token after it 7, the next root. The drafter has
    a memory of 5 9 2. When the server does not answer, a new connection is made, over which it
    reads the text again, and only the draft is lost. As long as that fails, the target is offline:
    the loop's draft (only `Lookup` still makes one) is thrown away, `draft_offline` lets the
    drafter write alone, and its text is unverified. Then the text may be 5 9 2 7 4 8, still with a
    memory of 5 9 2. The first reply after the outage brings that of 7 4 8.
    """

    def __init__(self, channel: Channel, state: RemoteDraftState, config: GenerationConfig):
        self.channel = channel
        self.state = state
        self.config = config
        self.text: list[int] = []  # prompt and answer, with the newest token, the next root
        self.full_length = 0  # of the text with the longest answer that is allowed
        self.retry_at = 0.0  # when to reconnect at the earliest, by time.monotonic
        self.backoff = INITIAL_BACKOFF  # seconds

    def prefill(self, prompt: list[int]) -> VerifyResult:
        """Connect, and let the server read the prompt. Tries twice, then raises InputError: without
        a memory the drafter cannot begin."""
        self.text = list(prompt)
        self.full_length = len(prompt) + self.config.max_new_tokens
        with input_errors("no first token from the server", ConnectionLost):
            try:
                return self.connect_and_read()
            except ConnectionLost:
                sleep(INITIAL_BACKOFF)
                return self.connect_and_read()

    def verify(self, draft: Draft) -> RemoteResult:
        """Let the server verify a draft. If it does not answer, reconnect at once: it may only have
        restarted, or closed an idle connection. If that fails too, let the drafter go on alone."""
        try:
            return self.verify_remote(draft)
        except ConnectionLost as loss:
            try:
                return self.reconnect()  # the draft is lost: the server goes on after its root
            except ConnectionLost as error:
                return self.draft_offline(f"{loss}; then {error}")

    def draft_offline(self, reason: str) -> RemoteResult:
        """Let the drafter go on alone."""
        count = min(OFFLINE_TOKENS, self.full_length - len(self.text))
        tokens = self.state.draft_unverified(self.text[-1], count)
        self.text += tokens
        return RemoteResult(tokens[:-1], tokens[-1], memory=None, link="offline", reason=reason)

    def verify_remote(self, draft: Draft) -> RemoteResult:
        """Let the server verify a draft. Raises ConnectionLost."""
        # Without the root, which the server knows.
        fields = {"call": "verify", "drafts": draft.tokens[1:], "parents": draft.parents[1:]}
        tensors = {}
        if draft.q:
            # In the order of the parents. Quantizing loses nothing: q was quantized before tokens
            # were drawn from it, and a second time gives the same weights.
            q = torch.stack([draft.q[parent] for parent in sorted(draft.q)])
            ids, weights = quantize_probabilities(q)
            tensors = {"ids": ids.cpu(), "weights": weights.cpu()}
        return self.request(fields, tensors, draft)

    def reconnect(self) -> RemoteResult:
        """`connect_and_read`, unless it is too early after an attempt that failed. Raises
        ConnectionLost."""
        if monotonic() < self.retry_at:
            raise ConnectionLost("too early to try again")
        try:
            result = self.connect_and_read()
        except ConnectionLost:
            self.retry_at = monotonic() + self.backoff
            self.backoff = min(2 * self.backoff, MAX_BACKOFF)
            raise
        self.backoff = INITIAL_BACKOFF
        return replace(result, link="reconnected")

    def connect_and_read(self) -> RemoteResult:
        """Make a new connection, over which the server reads all text so far. Returns its token
        after that, and the memory that the drafter lacks. Raises ConnectionLost."""
        greeting = self.channel.connect()
        if greeting.get("drafter") != self.state.drafter.checkpoint_hash:
            self.channel.close()
            raise ConnectionLost(
                "the server has another drafter; start both sides with the same --drafter"
            )
        # The server draws from a seed of its own. With the drafter's, its random numbers would be
        # those that made the draft, and not be independent of it.
        generator = self.state.sampling.generator
        seed = torch.randint(2**31 - 1, (), generator=generator, device=generator.device)
        left = self.full_length - len(self.text)
        config = replace(self.config, max_new_tokens=left, seed=int(seed))
        fields, tensors = text_request("read", self.text, config)
        fields["known"] = self.state.verified
        return self.request(fields, tensors, Draft(self.text[-1]))  # nothing is drafted

    def request(self, fields: dict, tensors: Tensors, draft: Draft) -> RemoteResult:
        """Send a request, and read the result off the reply. Raises ConnectionLost."""
        with self.channel.closed_on_failure():
            reply = next(self.channel.request(fields, tensors))
            path = match_path(draft, reply.fields["accepted"])
            accepted = [draft.tokens[node] for node in path[1:]]  # our ints: a reply may say 9.0
            vocab_size = self.state.drafter.target.config.vocab_size
            token = check_int(reply.fields["token"], 0, vocab_size - 1)
            # What has a memory from now on: the text that had none yet (the root and, after an
            # outage, what was written offline), then what is accepted.
            verified = self.text[self.state.verified:] + accepted
            memory = dequantize_memory(reply.tensors, verified, self.state)
        self.text += accepted + [token]
        return RemoteResult(accepted, token, memory)


def match_path(draft: Draft, accepted: list) -> list[int]:
    """Find the path of accepted tokens from the root. Raises ValueError if there is none."""
    path = [0]
    for token in accepted:
        child = draft.child(path[-1], token)
        if child is None:
            raise ValueError(f"token {token!r:.20} was not drafted there")
        path.append(child)
    return path


def call_api(
    channel: Channel, prompt: list[int], config: GenerationConfig, vocab_size: int
) -> Iterator[int]:
    """Use the server as a plain API: it decodes alone. Raises InputError when it is lost."""
    with input_errors("the answer ends here", ConnectionLost):
        channel.connect()
        with channel.closed_on_failure():
            replies = channel.request(*text_request("generate", prompt, config))
            for reply in islice(replies, config.max_new_tokens):
                token = check_int(reply.fields["token"], 0, vocab_size - 1)
                yield token
                if token in config.stop_ids:
                    return


# The server's side of one client.


@dataclass
class TargetSession:
    """The server's side of one client, a session of MessageServer.

    One worker thread does the models' passes of all clients in turn: PyTorch keeps a pool of
    threads for each thread that calls it, and several pools would fight for the cores.
    """

    model: Llama
    drafter: Drafter
    worker: ThreadPoolExecutor
    target: LocalTarget | None = None  # of the text that was read last
    root: int = 0  # of the next draft: the newest token

    @property
    def greeting(self) -> dict:
        return {"drafter": self.drafter.checkpoint_hash}

    def answer(self, fields: dict, tensors: Tensors) -> Replies:
        """Reply to a request. Raises one of many exceptions if it is malformed: at once, before a
        reply is made."""
        calls = {"read": self.read, "verify": self.verify, "generate": self.generate}
        return self.run_models(calls[fields["call"]](fields, tensors))

    def run_models(self, replies: Replies) -> Replies:
        """Run the models for each reply, in the worker's thread: `replies` does so when it is asked
        for the next one."""
        make_next = torch.inference_mode()(next)
        while True:
            reply = self.worker.submit(make_next, replies, None).result()
            if reply is None:
                return
            yield reply

    def parse_text(self, fields: dict, tensors: Tensors) -> tuple[list[int], GenerationConfig]:
        """Read a text off a request, and how to go on after it within the context."""
        context = self.model.config.max_position_embeddings
        tokens = check_ids(tensors["tokens"], self.model.config.vocab_size)
        length = check_int(len(tokens), 1, context - 1)
        temperature = float(fields["temperature"])
        top_p = float(fields["top_p"])
        if not 0 <= temperature <= 100 or not 0 < top_p <= 1:
            raise ValueError(f"invalid sampling: temperature {temperature}, top-p {top_p}")
        config = GenerationConfig(
            max_new_tokens=check_int(fields["max_new_tokens"], 1, context - length),
            temperature=temperature,
            top_p=top_p,
            seed=check_int(fields["seed"], 0, 2**63 - 1),
            stop_ids=frozenset(fields["stop_ids"]),
        )
        return tokens, config

    def read(self, fields: dict, tensors: Tensors) -> Replies:
        """Begin a text, or begin it again after a lost connection."""
        tokens, config = self.parse_text(fields, tensors)
        known = check_int(fields.get("known", 0), 0, len(tokens) - 1)
        # The whole text, and after it a draft that may yet be rejected: its root and its tokens.
        capacity = len(tokens) + config.max_new_tokens + 1 + MAX_DRAFT_TOKENS
        return self.begin(tokens, known, capacity, config.new_sampling(self.model.device))

    def begin(self, tokens: list[int], known: int, capacity: int, sampling: Sampling) -> Replies:
        """Make room for the text, and read it. (Not in `read`: where memory runs out, the request
        was not malformed.)"""
        self.target = LocalTarget(self.model, self.drafter, capacity, sampling)
        yield from self.call_target(self.target.prefill, tokens, known)

    def verify(self, fields: dict, tensors: Tensors) -> Replies:
        """Verify a draft that follows the newest token."""
        draft = self.parse_draft(fields, tensors)
        return self.call_target(self.target.verify, draft)

    def call_target(self, call: Callable, argument: list[int] | Draft, known: int = 0) -> Replies:
        """Call the target, and note the next root. The reply leaves out the memory of the first
        `known` tokens."""
        result = call(argument)
        self.root = result.token
        fields = {"accepted": result.accepted, "token": result.token}
        yield fields, quantize_memory(result.memory, known)

    def parse_draft(self, fields: dict, tensors: Tensors) -> Draft:
        """Read a draft off a request. It must fit the model, the text and its context."""
        if self.target is None:
            raise ValueError("drafts must follow a text")
        sizes = self.model.config
        tokens = fields["drafts"]
        check_int(len(tokens), 0, MAX_DRAFT_TOKENS)
        draft = Draft(self.root)
        for i, (token, parent) in enumerate(zip(tokens, fields["parents"], strict=True)):
            check_int(token, 0, sizes.vocab_size - 1)
            check_int(parent, 0, i)  # the root, or a token before this one
            draft.add(token, parent, probability=1.0)  # which nobody reads on this side
        cache = self.target.cache
        longest = max(map(len, draft.paths))
        check_int(cache.length + longest, 0, sizes.max_position_embeddings)  # positions
        check_int(cache.length + len(draft.tokens), 0, cache.kv.shape[3])  # slots
        if self.target.sampling.temperature > 0 and tokens:
            draft.q = self.parse_distributions(draft, tensors)
        return draft

    def parse_distributions(self, draft: Draft, tensors: Tensors) -> dict[int, Tensor]:
        """Read off a request what the children of each parent were drawn from."""
        vocab_size = self.model.config.vocab_size
        parents = sorted(set(draft.parents[1:]))
        ids = tensors["ids"]
        weights = tensors["weights"]
        shape = (len(parents), min(Q_TOKENS, vocab_size))
        check_ids(ids.flatten(), vocab_size)
        if ids.shape != shape or weights.shape != shape or weights.dtype != torch.uint8:
            raise ValueError("q does not fit the drafts")
        q = dequantize_probabilities(ids, weights, vocab_size)  # NaN where all weights are 0
        rows = [parents.index(parent) for parent in draft.parents[1:]]
        if not (q[rows, draft.tokens[1:]] > 0).all():
            raise ValueError("q does not fit the drafts: one cannot have been drawn from it")
        return dict(zip(parents, q.to(self.model.device)))

    def generate(self, fields: dict, tensors: Tensors) -> Replies:
        """Write alone, as a plain API does: a reply for each token."""
        tokens, config = self.parse_text(fields, tensors)
        stream = generate(self.model, tokens, config)
        return (({"token": token}, {}) for token in stream)


def check_int(value: object, low: int, high: int) -> int:
    """Return the value if it is an int within [low, high]. Raises ValueError."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"invalid value {value!r:.40}: expected an int from {low} to {high}")
    return value


def check_ids(tensor: Tensor, end: int) -> list[int]:
    """Return the values of an int32 vector if they are within [0, end). Raises ValueError."""
    if tensor.dtype != torch.int32 or tensor.dim() != 1:
        raise ValueError("expected an int32 vector")
    return [check_int(value, 0, end - 1) for value in tensor.tolist()]


# The server's process.


def serve(args: Namespace, announce: Callable[[Address], None]) -> None:
    """Serve without end. `announce` is told the address."""
    models = load_models(args)
    host, port = args.serve
    with ThreadPoolExecutor(1) as worker:
        new_session = partial(TargetSession, models.target, models.drafter, worker)
        with input_errors(f"cannot serve at {host}:{port}", OSError, ValueError):
            server = MessageServer(args.serve, os.environ.get(SECRET, ""), new_session)
        with server:
            announce(server.server_address)
            server.serve_forever()


def announce_on_terminal(bound: Address) -> None:
    """Tell where the server listens, and what a client needs."""
    host, port = bound
    print(f"{host}:{port}", flush=True)  # for scripts
    if host == "0.0.0.0":
        host = gethostname()
    command = f"python speculate.py --remote {host}:{port}"
    print(f"connect with: {command} (and this side's --model and --drafter)", file=sys.stderr)
    if os.environ.get(SECRET):
        print(f"and the same {SECRET} on the other side", file=sys.stderr)
    else:
        print("no secret is set: any program on this machine may connect", file=sys.stderr)


def serve_until_parent_ends(args: Namespace, pipe) -> None:
    """Serve until the parent process ends, however it ends."""

    def end_with_parent() -> None:
        parent_process().join()
        os._exit(0)

    Thread(target=end_with_parent, daemon=True).start()
    run_command(lambda: serve(args, pipe.send))


def start_server(args: Namespace) -> Address:
    """Start a server in a process of its own. Returns its address."""
    os.environ.setdefault(SECRET, os.urandom(16).hex())
    # More threads hardly speed a drafter up, and the server needs the cores.
    torch.set_num_threads(max(1, torch.get_num_threads() // 4))
    context = get_context("spawn")
    pipe, server_pipe = context.Pipe()
    # (With --no-speculation, too, the server has a drafter, because its greeting names one.)
    changes = {"serve": ("127.0.0.1", 0), "remote": None, "no_speculation": False}
    server_args = Namespace(**(vars(args) | changes))
    # Ctrl-C in a terminal reaches both processes. It is meant for this one.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the server inherits
    process_args = (server_args, server_pipe)
    context.Process(target=serve_until_parent_ends, args=process_args, daemon=True).start()
    signal.signal(signal.SIGINT, on_interrupt)
    server_pipe.close()
    try:
        return pipe.recv()
    except EOFError:
        raise InputError("the server did not start: see above")


# --- One answer, and what it cost ---
#
# `Method.answer` runs `speculate` on a `Recorder`, which stands in for the target: it passes the
# calls on, and notes each round as a `Cycle`. `Generation.add` sums these up, and `emit`, of a
# `Printer` or a `Trace`, shows them. `speculate` itself knows nothing of clocks, colors or
# networks.

GREEN = "\033[32m"
YELLOW = "\033[33m"
RED = "\033[31m"
PLAIN = "\033[0m"


class Origin(Enum):
    """Who wrote a token. The value is its color with --show."""

    TARGET = ""
    DRAFT = GREEN
    UNVERIFIED = YELLOW


@dataclass
class Cycle:
    """One round of the loop: a draft and its verification. Nothing is drafted in the prompt's pass,
    nor with the target alone, where a cycle is one token."""

    draft: Draft
    result: VerifyResult
    draft_seconds: float
    verify_seconds: float
    tokens: list[int] = field(default_factory=list)  # that it brought
    traffic: Traffic | None = None  # with a target on a server

    @property
    def link(self) -> str:
        """Return the state of the link to a server. A target on this machine is "connected"."""
        return getattr(self.result, "link", "connected")

    @property
    def origins(self) -> list[Origin]:
        """Who wrote each token."""
        if self.link == "offline":
            return [Origin.UNVERIFIED] * len(self.tokens)
        origins = [Origin.DRAFT] * len(self.result.accepted) + [Origin.TARGET]
        return origins[:len(self.tokens)]

    @property
    def path(self) -> list[int]:
        """The nodes of the draft that are in the answer: the root, then accepted ones."""
        return match_path(self.draft, self.tokens[:self.origins.count(Origin.DRAFT)])


@dataclass
class Recorder:
    """The target that `speculate` is given: it passes each call on to the real one, and notes in a
    Cycle what passes and how long it takes.

    What comes before a call, since the loop went on, counts as drafting. (On an accelerator the
    memory is still being computed when `verify` returns: its time, too, counts as the next
    draft's.)
    """

    target: LocalTarget | RemoteTarget
    cycle: Cycle | None = None  # the newest
    resumed: float = field(default_factory=perf_counter)  # when the loop went on after it

    def prefill(self, prompt: list[int]) -> VerifyResult:
        return self.record(Draft(prompt[-1]), self.target.prefill, prompt)

    def verify(self, draft: Draft) -> VerifyResult:
        return self.record(draft, self.target.verify, draft)

    def record(self, draft: Draft, call: Callable, argument: list[int] | Draft) -> VerifyResult:
        called = perf_counter()
        result = call(argument)
        self.cycle = Cycle(draft, result, called - self.resumed, perf_counter() - called)
        return result


@dataclass
class Generation:
    """One answer, and what it cost. The prompt's pass is left out of target_calls, draft_seconds
    and verify_seconds. (But the drafter's work on the prompt is in the first draft's time.)"""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    seconds: float = 0.0
    target_calls: int = 0
    drafted: int = 0  # tokens, in cycles that the target answered
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    network: Counter = field(default_factory=Counter)  # the sums of a channel's Traffic
    outage: str = ""  # why the server was out of reach the first time; empty if it was not
    interrupted: bool = False  # by Ctrl-C

    def add(self, cycle: Cycle) -> None:
        """Add a cycle. Of the first, the prompt's, only the token: acceptance lengths and times are
        of what follows the prompt."""
        if self.tokens:  # not the first cycle, the prompt's
            self.draft_seconds += cycle.draft_seconds
            self.verify_seconds += cycle.verify_seconds
            if cycle.link == "offline":
                self.outage = self.outage or cycle.result.reason
            else:
                self.target_calls += 1
            if cycle.link == "connected":  # the draft has arrived
                self.drafted += len(cycle.draft.tokens) - 1  # without the root
        self.tokens += cycle.tokens
        self.origins += cycle.origins

    @property
    def unverified(self) -> int:
        return self.origins.count(Origin.UNVERIFIED)

    def statistics(self) -> dict:
        """Return what `report` shows besides text, tokens and speed."""
        statistics = {
            "target_calls": self.target_calls,
            "acceptance_length": acceptance_length([self]),
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
        }
        if self.network:
            statistics |= self.network
            statistics["unverified_tokens"] = self.unverified
            statistics["disconnected"] = self.outage != ""
        return statistics


def acceptance_length(answers: list[Generation]) -> float:
    """Return new tokens per target call, both without the prompts'."""
    new_tokens = sum(len(g.tokens) - 1 - g.unverified for g in answers)
    return new_tokens / max(1, sum(g.target_calls for g in answers))


def rate(answers: list[Generation]) -> float:
    """Return tokens per second."""
    return sum(len(g.tokens) for g in answers) / sum(g.seconds for g in answers)


Emit = Callable[[Cycle], None]  # what a caller does with each cycle, as soon as it is complete


def ignore(cycle: Cycle) -> None:
    pass


@dataclass
class Method:
    """A way to answer a prompt, by its fields:

        tree     drafter   lookup   new_channel
        None     any       any      None           the target alone
        None     any       any      given          a server, used as a plain API
        given    given     False    None           drafts, verified here
        given    given     True     None           copies where it can, else drafts
        given    None      True     None           copies only
        given    given     either   given          drafts or copies, verified on a server
    """

    model: Llama
    drafter: Drafter | None = None
    tree: TreeConfig | None = None  # None: the target alone
    lookup: bool = False
    new_channel: Callable[[list[int]], Channel] | None = None  # to a server, for a prompt
    base: str = "target"  # the method that a benchmark compares it with

    @torch.inference_mode()
    def answer(
        self, prompt: list[int], config: GenerationConfig, emit: Emit = ignore
    ) -> Generation:
        """Answer a prompt. `emit` gets each cycle as it happens, and Ctrl-C ends the answer.

        Raises InputError if a server sends no first token or, without drafts, no further one: then
        there is nobody who could go on.
        """
        generation = Generation(prompt)
        channel = self.new_channel(prompt) if self.new_channel else None
        start = perf_counter()
        cycles = self.cycles_alone if self.tree is None else self.cycles_with_drafts
        try:
            for cycle in cycles(prompt, config, channel):
                generation.add(cycle)
                if channel is not None:
                    cycle.traffic = channel.traffic
                    channel.traffic = Traffic()  # of the next cycle
                    generation.network.update(vars(cycle.traffic))
                    # The simulated outage begins after so many tokens.
                    channel.network.outage.begin_if_due(len(generation.tokens), monotonic())
                emit(cycle)
        except KeyboardInterrupt:
            generation.interrupted = True
        finally:
            generation.seconds = perf_counter() - start
            if channel is not None:
                channel.close()
        return generation

    def cycles_alone(
        self, prompt: list[int], config: GenerationConfig, channel: Channel | None
    ) -> Iterator[Cycle]:
        """Let the target write alone, here or behind an API."""
        if channel is None:
            stream = generate(self.model, prompt, config)
        else:
            stream = call_api(channel, prompt, config, self.model.config.vocab_size)
        draft = Draft(prompt[-1])  # of nothing
        start = perf_counter()
        for token in stream:
            result = VerifyResult([], token, memory=None)
            yield Cycle(draft, result, 0.0, perf_counter() - start, [token])
            start = perf_counter()

    def cycles_with_drafts(
        self, prompt: list[int], config: GenerationConfig, channel: Channel | None
    ) -> Iterator[Cycle]:
        """Let a drafter, lookup, or both draft, and let the target verify, here or on a server."""
        tree = self.tree
        sampling = config.new_sampling(self.model.device)
        # Room after the text for a draft: in the target's cache its tokens, at most total_tokens;
        # in the drafter's the nodes that were expanded, at most top_k on each level.
        draft_slots = max(tree.total_tokens, tree.depth * tree.top_k)
        capacity = len(prompt) + config.max_new_tokens + 1 + draft_slots
        state = None
        if self.drafter is not None:
            state = start_drafting(self.drafter, capacity, sampling, remote=channel is not None)
        if channel is not None:
            target = RemoteTarget(channel, state, config)
        else:
            target = LocalTarget(self.model, self.drafter or NoDrafter(), capacity, sampling)
        if self.lookup:
            state = Lookup(state, self.model.config.vocab_size, sampling)
        recorder = Recorder(target)
        for tokens in speculate(recorder, state, prompt, config, tree):
            recorder.cycle.tokens = tokens
            yield recorder.cycle
            recorder.resumed = perf_counter()


# --- Watching: the answer as it comes, and every cycle of it with --trace ---


def paint(text: str, color: str) -> str:
    """Put text in a color, if stdout is a terminal and NO_COLOR is not set (no-color.org)."""
    if not color or not text or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return color + text + PLAIN


@dataclass
class Printer:
    """Prints an answer as it comes, and says when the server is lost and when it is back."""

    stream: TextStream
    show: bool  # in colors
    offline: bool = False

    def emit(self, cycle: Cycle) -> None:
        offline = cycle.link == "offline"
        if offline != self.offline:
            self.offline = offline
            note = "the link is back: the target goes on"
            if offline:
                note = "the link is lost: what follows is the drafter's own text, unverified"
            print(f"\n[{note}]", file=sys.stderr)
        for token, origin in zip(cycle.tokens, cycle.origins):
            text = self.stream.add(token)
            print(paint(text, origin.value) if self.show else text, end="", flush=True)


@dataclass
class Trace:
    """Shows every cycle: what was drafted, what was kept, and why not more.

    `record` makes the object that --trace --json prints, and `draw_cycle` draws it. A drafted token
    in the object, and part of a drawing (p and u are known on this machine only; with a server the
    object has "link", the cycle's state and traffic):

        {"token": 2, "text": " in", "parent": -1, "q": 0.75, "p": 0.6, "accepted": true,
         "reason": "accepted: u 0.31 < p/q 0.80"}

          " lies"
          ├ " in"                      q 0.75  p 0.60  accepted: u 0.31 < p/q 0.80
          │ └ " the"                   q 0.80  p 0.40  rejected: u 0.66 >= p/q 0.50
          └ " within"                  q 0.08  p 0.11  not tried
    """

    tokenizer: Tokenizer
    sampling: Sampling  # the target's
    as_json: bool
    cycles: int = 0

    def emit(self, cycle: Cycle) -> None:
        self.cycles += 1
        record = self.record(cycle)
        lines = [json.dumps(record)] if self.as_json else draw_cycle(record)
        print(*lines, sep="\n", flush=True)

    def record(self, cycle: Cycle) -> dict:
        """Return a line of --trace --json."""
        offline = cycle.link == "offline"
        shown = cycle.tokens if offline else [cycle.result.token]
        record = {
            "cycle": self.cycles,
            "root": self.tokenizer.decode(cycle.draft.tokens[:1]),
            "drafts": self.drafted_nodes(cycle),
            "token": cycle.result.token,
            "text": self.tokenizer.decode(shown),
            "source": self.source(cycle),
            "tokens": cycle.tokens,
            "offline": offline,
            "draft_seconds": cycle.draft_seconds,
            "verify_seconds": cycle.verify_seconds,
        }
        if cycle.traffic is not None:
            record["link"] = {"state": cycle.link, **vars(cycle.traffic)}
        return record

    def drafted_nodes(self, cycle: Cycle) -> list[dict]:
        """Describe each drafted token. parent: an index of this list, -1 for the root."""
        if cycle.link != "connected":
            return []  # the draft was lost
        draft = cycle.draft
        path = cycle.path
        p = None  # a server does not send it
        if isinstance(cycle.result, LocalResult):
            p = draft_distributions(cycle.result.logits, self.sampling)  # as q is, (1 + K, V)
        nodes = []
        for i, token in enumerate(draft.tokens[1:], start=1):
            parent = draft.parents[i]
            node = {
                "token": token,
                "text": self.tokenizer.decode([token]),
                "parent": parent - 1,  # node 1 has index 0
                "q": draft.probabilities[i],
                "p": None if p is None else float(p[parent, token]),
                "accepted": i in path,
                "reason": reason(cycle, path, i),
            }
            nodes.append(node)
        return nodes

    def source(self, cycle: Cycle) -> str:
        """Say what the target's own token comes from. A server does not tell, and after an accepted
        stop token there is none."""
        if cycle.traffic is not None or Origin.TARGET not in cycle.origins:
            return ""
        if self.sampling.temperature == 0:
            return "its likeliest"
        if cycle.draft.children(cycle.path[-1]):  # and all of them were rejected
            return "drawn from what p - q leaves"
        return "drawn from p"


def reason(cycle: Cycle, path: list[int], node: int) -> str:
    """Say why a drafted token was accepted or not. path: the cycle's."""
    draft = cycle.draft
    parent = draft.parents[node]
    if parent not in path or draft.depth(parent) == len(cycle.tokens):
        return "not reached"  # after a token that was not accepted, or that ended the answer
    accepted = node in path
    verdict = "accepted" if accepted else "rejected"
    if not draft.q:
        return verdict  # at temperature 0 there is no more to say
    if not isinstance(cycle.result, LocalResult):  # a server does not say which siblings it tried
        return "accepted" if accepted else "not kept"
    trial = cycle.result.acceptance.trials.get(node)
    if trial is None:
        return "not tried"  # a sibling before it was accepted
    sign = "<" if accepted else ">="
    # After the rejection of a sibling, what was left of p and q: not those that are shown.
    is_first = node == min(draft.children(parent))
    ratio = "p/q" if is_first else "p'/q'"
    return f"{verdict}: u {trial.u:.2f} {sign} {ratio} {trial.ratio:.2f}"


def draw_cycle(record: dict) -> Iterator[str]:
    """Draw a cycle for a person, line by line: on 80 columns, if the draft is of the default
    size."""
    drafts = record["drafts"]
    accepted = sum(node["accepted"] for node in drafts)
    times = f"draft {1e3 * record['draft_seconds']:.1f} ms"
    times += f", verification {1e3 * record['verify_seconds']:.1f} ms"
    yield f"cycle {record['cycle']}: {len(drafts)} drafted, {accepted} accepted; {times}"
    if "link" in record:
        link = record["link"]
        traffic = f"{link['bytes_up']} bytes up, {link['bytes_down']} down"
        yield f"  link: {link['state']}, {traffic}, {1e3 * link['network_seconds']:.0f} ms"
    if drafts:
        # A chain goes straight down, however long it is: an indent for each level would not fit.
        is_chain = all(node["parent"] == i - 1 for i, node in enumerate(drafts))
        yield f"  {quote(record['root'])}"
        yield from draw_branch(drafts, parent=-1, indent="  ", is_chain=is_chain)
    if record["offline"]:
        yield paint("  offline: the drafter alone wrote, unverified,", YELLOW)
        yield paint(f"  {json.dumps(record['text'], ensure_ascii=False)}", YELLOW)
    elif len(record["tokens"]) > accepted:  # no stop token came before it
        source = f", {record['source']}" if record["source"] else ""
        yield f"  the target's own: {quote(record['text'])}{source}"


def draw_branch(drafts: list[dict], parent: int, indent: str, is_chain: bool) -> Iterator[str]:
    """Draw the tokens after a parent, and what follows each."""
    children = [i for i, node in enumerate(drafts) if node["parent"] == parent]
    for i in children:
        node = drafts[i]
        last = i == children[-1]
        label = f"{indent}{'└' if last else '├'} {quote(node['text'])}"
        numbers = f"q {node['q']:.2f}"
        if node["p"] is not None:
            numbers += f"  p {node['p']:.2f}"
        verdict, _, _ = node["reason"].partition(":")
        color = {"accepted": GREEN, "rejected": RED}.get(verdict, "")
        yield f"{label:<32} {numbers}  {paint(node['reason'], color)}"
        below = indent
        if not is_chain:
            below += "  " if last else "│ "
        yield from draw_branch(drafts, i, below, is_chain)


def quote(text: str) -> str:
    """Put a token's text in quotes, no longer than a line has room for."""
    return json.dumps(text[:16] or "<end>", ensure_ascii=False)


# --- The models: what a command line names, loaded ---

WEIGHTS = Path(__file__).parent / "weights"
SHIPPED = {DEFAULT_MODEL: WEIGHTS / DEFAULT_MODEL, TOY_MODEL: WEIGHTS / "toy" / "drafter"}


@dataclass
class Models:
    target: Llama
    tokenizer: Tokenizer
    drafters: dict[str, Drafter]

    @property
    def drafter(self) -> Drafter | None:
        return next(iter(self.drafters.values()), None)


def load_models(args: Namespace) -> Models:
    """Load target, drafters and tokenizer of the command line, packed.

    A client's target has only the layers that its drafter reuses, unless --bench is to evaluate
    text that was written offline.
    """
    if args.no_speculation:
        folders = []
    elif args.drafter:
        folders = args.drafter
    elif args.model in SHIPPED:
        folders = [SHIPPED[args.model]]
    else:
        raise InputError(
            f"no drafter is shipped for {args.model}: train one (python train.py --model "
            f"{args.model} --data FILE) and name it with --drafter. (To let the target answer a "
            "prompt alone: --no-speculation)"
        )
    last = None  # all
    if args.remote and not args.bench:
        last = max(map(reused_layers, folders), default=0)
    target, tokenizer = load_target(args, last)
    drafters = {}
    for folder in folders:
        drafter = load_drafter(folder, target)
        if (args.remote or args.serve or args.batch) and not drafter.config.use_cross_attention:
            raise InputError(f"{folder}: --remote, --serve and --batch need a drafter with CA")
        drafters[str(folder)] = to_bfloat16(drafter)
    pack_together(target, list(drafters.values()))
    return Models(target, tokenizer, drafters)


def reused_layers(folder: str | Path) -> int:
    """Return N of the drafter in a folder. A wrong value counts as 0: `load_drafter` refuses it."""
    N = read_json(Path(folder) / "config.json").get("target_layer_inference", 0)
    return N if type(N) is int and N >= 0 else 0


# --- The benchmark: every prompt by every method, in turn ---
#
# `bench` yields a `Turn` for each turn of a prompt, and `summarize` makes a row of each category
# and method. A method is compared with its `base`: the target alone or, for one on a network, such
# as "remote:4g", plain use of an API there, "api:4g".

Methods = dict[str, Method]  # by name
Turn = dict[str, Generation]  # each method's answer to one question


class Prompt(NamedTuple):
    category: str
    turns: list[str]  # what the user says, one after the other


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a file, one a line. Raises InputError."""
    form = '{"prompt": text} or {"category": name, "turns": [text, ...]}'
    wrong = (ValueError, LookupError, TypeError, RecursionError)
    with input_errors(f"{path}: cannot be read", OSError, UnicodeDecodeError):
        # (splitlines() would also split at U+2028, which a JSON string may hold.)
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    prompts = []
    for line_number, line in enumerate(lines, 1):
        with input_errors(f"{path}, line {line_number}: expected {form}", *wrong):
            if line.strip():
                prompts.append(parse_prompt(json.loads(line)))
    if not prompts:
        raise InputError(f"{path}: no prompts")
    return prompts


def parse_prompt(record: dict) -> Prompt:
    turns = [record["prompt"]] if "prompt" in record else record["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError("no turns")
    # A TypeError if a turn is no string. A ValueError if one holds half of a surrogate pair, which
    # JSON can spell and no tokenizer can read.
    "".join(turns).encode()
    category = str(record.get("category") or "all")
    if category == "overall":
        raise ValueError("the category 'overall' is reserved for the rows of all prompts")
    return Prompt(category, turns)


def local_methods(alone: Llama, models: Models, chain: TreeConfig, tree: TreeConfig) -> Methods:
    """List what is measured on one machine: for several drafters, chains and trees of each.

    alone: the target as it is fastest without drafts.
    """
    target = models.target
    methods = {"target": Method(alone)}
    several = len(models.drafters) > 1
    for name, drafter in models.drafters.items():
        suffix = f" {name}" if several else ""
        methods["chain" + suffix] = Method(target, drafter, chain)
        methods["tree" + suffix] = Method(target, drafter, tree)
    if not several:
        methods["lookup"] = Method(target, None, chain, lookup=True)
        methods["tree+lookup"] = Method(target, models.drafter, tree, lookup=True)
    return methods


def open_channel(args: Namespace, link: Link, outage_after: float, prompt: list[int]) -> Channel:
    """Return a channel for one answer. Its delays are seeded by the prompt, so that they come again
    when the answer is asked for again. outage_after: tokens."""
    outage = Outage(outage_after, args.disconnect_for)
    network = Network(link, args.seed + sum(prompt), outage)
    return Channel(args.remote, os.environ.get(SECRET, ""), network, args.timeout)


def remote_methods(models: Models, args: Namespace, links: dict[str, Link]) -> Methods:
    """List what is measured on each network. "disconnected" goes down after a quarter of the
    tokens."""
    methods = {}
    for name, link in links.items():
        api = f"api:{name}"
        connect = partial(open_channel, args, link, math.inf)
        lose = partial(open_channel, args, link, args.max_new_tokens // 4)
        ours = Method(models.target, models.drafter, args.tree, new_channel=connect, base=api)
        methods |= {
            api: replace(ours, tree=None),
            f"remote:{name}": ours,
            f"remote+lookup:{name}": replace(ours, lookup=True),
            f"disconnected:{name}": replace(ours, new_channel=lose),
        }
    return methods


def bench(
    models: Models, methods: Methods, prompts: list[Prompt], config: GenerationConfig
) -> Iterator[tuple[str, Turn]]:
    """Answer every turn of every prompt by all methods, after a warm-up. Yields the category and
    the answers.

    All methods get the same conversation: its earlier answers are the first method's.
    """
    first = next(iter(methods))
    warm_up = Prompt("", ["Hello"])
    for seed, prompt in enumerate(tqdm([warm_up, *prompts], unit=" prompts")):
        messages = []
        for question in prompt.turns:
            messages.append({"role": "user", "content": question})
            ids = models.tokenizer.chat(messages)
            try:
                count = answer_length(models.target, ids, config.max_new_tokens)
            except InputError as error:
                tqdm.write(f"{question[:40]!r} is left out: {error}", file=sys.stderr)
                break
            turn = {}
            # In a random order, so that a machine that slows down hurts all methods alike.
            for name in random.Random(seed).sample(list(methods), len(methods)):
                turn[name] = methods[name].answer(ids, replace(config, max_new_tokens=count))
                if turn[name].interrupted:
                    raise KeyboardInterrupt
            answer = models.tokenizer.decode(turn[first].tokens)
            messages.append({"role": "assistant", "content": answer})
            if prompt is not warm_up:
                yield prompt.category, turn


def summarize(
    model: Llama, methods: Methods, turns: dict[str, list[Turn]], config: GenerationConfig
) -> list[dict]:
    """Return a row of each category and method, with totals over the category's turns, and
    quartiles over them. Then rows of all turns together."""
    is_greedy = config.temperature == 0  # only then the tokens have to be the same
    rows = []
    for category, group in [*turns.items(), ("overall", sum(turns.values(), []))]:
        for name, method in methods.items():
            ours = [turn[name] for turn in group]
            bases = [turn[method.base] for turn in group]
            tokens = sum(len(g.tokens) for g in ours)
            unverified = sum(g.unverified for g in ours)
            calls = sum(g.target_calls for g in ours)
            seconds = sum(g.seconds for g in ours)
            speedups = torch.tensor([rate([g]) / rate([b]) for g, b in zip(ours, bases)])
            row = {
                "category": category,
                "method": name,
                "tokens_per_second": rate(ours),
                "speedup": rate(ours) / rate(bases),
                "speedup_quartiles": speedups.quantile(torch.tensor([0.25, 0.75])).tolist(),
                "acceptance_length": acceptance_length(ours),
                "target_calls": calls,
                "new_tokens": tokens,
                "drafted_per_call": sum(g.drafted for g in ours) / max(1, calls),
                "draft_share": sum(g.draft_seconds for g in ours) / seconds,
            }
            if is_greedy:
                same = sum(g.tokens == base.tokens for g, base in zip(ours, bases))
                row["identical"] = same / len(group)
            if ours[0].network:
                for key in ("round_trips", "bytes_up", "bytes_down"):
                    total = sum(g.network[key] for g in ours)
                    row[f"{key}_per_token"] = total / (tokens - unverified)
            if unverified > 0:
                row["unverified_tokens"] = unverified
                if is_greedy:
                    row |= offline_quality(model, ours, bases)
            rows.append(row)
    return rows


@torch.inference_mode()
def offline_quality(model: Llama, ours: list[Generation], bases: list[Generation]) -> dict:
    """Judge text written offline, greedily: the share that the target has at the same place, and
    the target's perplexity of it."""
    agreed = []
    nll = []
    for g, base in zip(ours, bases):
        ids = torch.tensor([g.prompt + g.tokens], device=model.device)
        hidden = model.hidden(ids)[0, len(g.prompt) - 1:-1]  # (T, E)
        log_p = model.lm_head(hidden).float().log_softmax(-1)  # (T, V)
        for i, token in enumerate(g.tokens):
            if g.origins[i] == Origin.UNVERIFIED:
                # (Slices, as the base's answer may have ended before.)
                agreed.append(base.tokens[i:i + 1] == [token])
                nll.append(-log_p[i, token].item())
    return {"agreement": fmean(agreed), "perplexity": math.exp(fmean(nll))}


@torch.inference_mode()
def bench_batch(
    models: Models, prompts: list[Prompt], config: GenerationConfig, batches: list[int], K: int
) -> list[dict]:
    """Answer all first turns by the target alone and by chains of K. batches: how many at a
    time."""
    target = models.target
    questions = [{"role": "user", "content": prompt.turns[0]} for prompt in prompts]
    texts = [models.tokenizer.chat([question]) for question in questions]
    longest = max(texts, key=len)
    capacity = len(longest) + config.max_new_tokens
    context = target.config.max_position_embeddings
    if capacity > context:
        raise InputError(
            f"a prompt with its answer needs {capacity} tokens and the context is {context}: lower "
            "--max-new-tokens, or leave the prompt out"
        )
    alone = []  # the target's answer to each by itself
    if config.temperature == 0:
        alone = [list(generate(target, text, config)) for text in texts]
    warm_up = ChainBatch(target, models.drafter, 1, capacity, K)
    run_batch(warm_up, texts[:1], config)
    rows = []
    for size in tqdm(batches):
        count = min(size, len(texts))  # more rows would stay empty
        target_batch = Batch(target, count, capacity)
        chain_batch = ChainBatch(target, models.drafter, count, capacity, K)
        for method, batch in (("target", target_batch), ("chain", chain_batch)):
            start = perf_counter()
            ended = run_batch(batch, texts, config)
            seconds = perf_counter() - start
            tokens = sum(len(request.tokens) for request in ended)
            calls = sum(request.target_calls for request in ended)
            row = {
                "category": "overall",
                "method": method,
                "batch": size,
                "tokens_per_second": tokens / seconds,
                "acceptance_length": (tokens - len(ended)) / max(1, calls),
            }
            base = row if method == "target" else rows[-1]
            row["speedup"] = row["tokens_per_second"] / base["tokens_per_second"]
            if alone:
                same = sum(request.tokens == alone[request.key] for request in ended)
                row["identical"] = same / len(ended)
            rows.append(row)
    return rows


def run_batch(
    batch: Batch, prompts: list[list[int]], config: GenerationConfig
) -> list[Request]:
    """Answer all prompts, as many at a time as the batch has rows."""
    waiting = list(enumerate(prompts))
    ended = []
    while len(ended) < len(prompts):
        while waiting and batch.has_room:
            key, prompt = waiting.pop(0)
            batch.add(key, prompt, config)
        ended += batch.step()
    return ended


COLUMNS = {
    "tokens_per_second": "new tokens per second, the prompt's time included",
    "speedup": "over the target alone or, with --remote, over plain API use on the same network",
    "speedup_quartiles": "of the speed-up over the turns",
    "acceptance_length": "new tokens per target pass, the prompt's left out",
    "draft_share": "share of the time that drafting takes",
    "identical": "share of turns whose tokens are those of the target alone",
    "batch": "conversations at a time, at most",
    "round_trips_per_token": "messages up that wait for one down",
    "bytes_up_per_token": "to the server, the prompt included",
    "bytes_down_per_token": "from the server, the prompt's memory included",
    "unverified_tokens": "written offline by the drafter alone: with \"disconnected\" the network "
    "goes down for good after a quarter of --max-new-tokens",
    "agreement": "share of these that the target has at the same place",
    "perplexity": "the target's, of these",
}


def print_table(rows: list[dict]) -> None:
    """Print rows under their columns, then what each column means."""
    measured = set().union(*rows)  # the keys of all
    names = [name for name in COLUMNS if name in measured]
    columns = []
    for name in ["category", "method", *names]:
        column = [name] + [table_cell(row.get(name, "")) for row in rows]
        width = max(map(len, column))
        justify = str.rjust if name in names else str.ljust
        columns.append([justify(text, width) for text in column])
    for i in range(1 + len(rows)):
        print(*[column[i] for column in columns])
    print()
    for name in names:
        print(f"{name}: {COLUMNS[name]}")


def table_cell(value: float | list[float] | str) -> str:
    if isinstance(value, list):
        return f"{value[0]:.2f} to {value[1]:.2f}"
    if isinstance(value, float):
        return f"{value:.2f}"
    return str(value)


def faster_alone(args: Namespace, packed: Llama) -> Llama:
    """Return the target as it decodes fastest by itself: packed or, on some CPUs, not."""
    if not isinstance(packed.lm_head, PackedLinear):
        return packed
    plain, _ = load_target(args)

    def seconds(model: Llama) -> float:
        """Time a short answer, to any prompt: the fastest of three."""
        config = GenerationConfig(max_new_tokens=16)
        return min(repeat(lambda: list(generate(model, [0], config)), number=1, repeat=3))

    return min((packed, plain), key=seconds)


# --- Command line ---

PROMPTS = Path(__file__).parent / "tests" / "prompts.jsonl"
# Tuned on 48 prompts of Spec-Bench, not on PROMPTS. A size on the command line switches the limits
# of confidence off.
TREE = TreeConfig(depth=6, top_k=3, total_tokens=8, min_confidence=0.15, min_probability=0.04)
CHAIN = TreeConfig(depth=6, min_confidence=0.2)
REMOTE_TREE = TreeConfig(
    depth=16, top_k=3, total_tokens=32, min_confidence=0.1, min_probability=0.02
)
BATCH_DRAFT_LENGTH = 3
OWN_SERVER = ("", 0)  # --remote without an address
MIN_ANSWER = 32  # tokens that the context must leave for an answer in a chat
PATIENCE = 1.0  # seconds without a first token, after which "connecting ..." is printed


def make_parser() -> Parser:
    parser = Parser(description="Generate with a drafter: the target's own text, sooner.")
    task = parser.add_mutually_exclusive_group().add_argument
    task("--prompt", help="default: standard input or, on a terminal, a chat")
    task("--bench", type=Path, nargs="?", const=PROMPTS, metavar="FILE",
         help="measure all methods on the prompts of a .jsonl file (default: ours)")
    task("--serve", type=address, metavar="HOST:PORT", help="be the server for --remote")
    add = parser.add_argument
    add("--batch", type=number(int, 1, 1024), nargs="+", metavar="ROWS",
        help="with --bench: this many conversations at a time")
    add_model_arguments(parser)
    add("--drafter", action="append", metavar="DIR",
        help="default: the shipped one; with --bench, any number")
    size = number(int, 1, MAX_DRAFT_TOKENS)
    add("--draft-length", type=size, metavar="K", help="draft chains of K tokens instead of trees")
    add("--depth", type=size,
        help=f"of a tree (default: {TREE.depth}, remote {REMOTE_TREE.depth})")
    add("--top-k", type=number(int, 2, MAX_DRAFT_TOKENS),
        help=f"of a tree (default: {TREE.top_k}, remote {REMOTE_TREE.top_k})")
    add("--total-tokens", type=size,
        help=f"of a tree (default: {TREE.total_tokens}, remote {REMOTE_TREE.total_tokens})")
    add("--lookup", action="store_true",
        help="draft what followed the last three tokens before, else by the drafter")
    add("--no-speculation", action="store_true", help="the target alone")
    add("--show", action="store_true", help="color accepted tokens green, unverified text yellow")
    add("--trace", action="store_true", help="show every cycle as it happens")
    add_generation_arguments(parser)
    remote = parser.add_argument_group("the target on a server")
    add = remote.add_argument
    add("--remote", nargs="?", const=OWN_SERVER, type=address, metavar="HOST:PORT",
        help="there or, without an address, in a process of our own")
    add_link_arguments(remote)
    add("--timeout", type=time_limit,
        help="for a reply (default: ten times the slowest; a minute for that to a text)")
    add("--disconnect-after", type=positive_int, default=math.inf, metavar="N",
        help="the network goes down when N tokens have come")
    add("--disconnect-for", type=duration, default=math.inf, metavar="TIME",
        help="and is back after so long (default: never)")
    return parser


# Groups of flags, which `check_arguments` refuses together.
TREE_FLAGS = "depth", "top_k", "total_tokens"
DRAFT_FLAGS = "lookup", "draft_length", *TREE_FLAGS, "show", "trace"
NETWORK_FLAGS = (
    "network", "latency", "jitter", "bandwidth", "loss", "timeout", "disconnect_after",
    "disconnect_for",
)
SERVER_FLAGS = {"serve", "model", "drafter", "device", "dtype"}  # all others are refused
NOT_FOR_BENCH = (
    "lookup", "no_speculation", "show", "trace", "disconnect_after", "disconnect_for",
)


def parse_arguments() -> Namespace:
    """Read and check the command line. Adds `chain` and `tree`, the limits of drafts."""
    parser = make_parser()
    args = parser.parse_args()
    check_arguments(parser, args)
    args.chain = TreeConfig(args.draft_length) if args.draft_length else CHAIN
    args.tree = REMOTE_TREE if args.remote else TREE
    sizes = {name: getattr(args, name) for name in TREE_FLAGS if getattr(args, name)}
    if sizes:  # who asks for a size gets it, however unsure the drafter is
        args.tree = replace(args.tree, **sizes, min_confidence=0.0, min_probability=0.0)
    # A benchmark on one machine measures both. Elsewhere chains take the place of trees.
    if args.draft_length and (args.remote or not args.bench):
        parser.refuse(args, TREE_FLAGS, "is a size of a tree, and --draft-length makes chains")
        args.tree = args.chain
    return args


def check_arguments(parser: Parser, args: Namespace) -> None:
    """Refuse flags that contradict each other."""
    refuse = partial(parser.refuse, args)
    if args.serve:
        client_flags = sorted(vars(args).keys() - SERVER_FLAGS)
        refuse(client_flags, "is for the client: it has no effect with --serve")
    if args.bench:
        refuse(NOT_FOR_BENCH, "is not for --bench, which runs every method")
    else:
        refuse(["batch"], "needs --bench")
    if args.batch:
        refuse(["remote", *TREE_FLAGS], "is not for --batch, which runs chains here")
    if args.remote or args.batch or not args.bench:
        if args.drafter and len(args.drafter) > 1:
            parser.error("several drafters need --bench, without --remote or --batch")
    if not args.remote:
        refuse(NETWORK_FLAGS, "needs --remote")
    if args.disconnect_after == math.inf:
        refuse(["disconnect_for"], "needs --disconnect-after")
    if args.no_speculation:
        refuse(DRAFT_FLAGS, "is not for --no-speculation, which drafts nothing")
    if args.trace or args.json:
        refuse(["show"], "has no effect with --trace or --json")


@dataclass
class Terminal:
    """Answers the prompts of one command line: one prompt, or a chat."""

    args: Namespace
    models: Models
    method: Method
    config: GenerationConfig
    answers: list[Generation] = field(default_factory=list)

    def respond(self, messages: list[dict]) -> Generation:
        """Print the answer to a conversation, and what it cost. Raises KeyboardInterrupt if Ctrl-C
        comes before its first token."""
        args = self.args
        tokenizer = self.models.tokenizer
        prompt = tokenizer.chat(messages)
        count = answer_length(self.models.target, prompt, self.config.max_new_tokens)
        config = replace(self.config, max_new_tokens=count)
        printer = Printer(TextStream(tokenizer), args.show)
        emit = printer.emit
        if args.trace:
            emit = Trace(tokenizer, config.new_sampling("cpu"), args.json).emit
        elif args.json:
            emit = ignore
        generation = self.answer(prompt, config, emit)
        if args.trace and not args.json:
            print(f"\n{tokenizer.decode(generation.tokens)}")
        print(printer.stream.rest(), end="", flush=True)  # nothing, unless the printer was used
        if not generation.tokens:  # only Ctrl-C can do that
            raise KeyboardInterrupt
        self.answers.append(generation)
        report(
            tokenizer,
            generation.tokens,
            generation.seconds,
            args,
            generation.interrupted,
            **generation.statistics(),
        )
        if generation.outage:
            print(
                f"the server was out of reach ({generation.outage}): {generation.unverified} of "
                "these tokens are the drafter's own",
                file=sys.stderr,
            )
        return generation

    def answer(self, prompt: list[int], config: GenerationConfig, emit: Emit) -> Generation:
        """Answer a prompt. If the first token of a server takes long, say so."""
        connecting = Timer(PATIENCE, print, ["connecting ..."], {"file": sys.stderr})

        def emit_connected(cycle: Cycle) -> None:
            connecting.cancel()
            emit(cycle)

        if self.args.remote:
            connecting.start()
        try:
            return self.method.answer(prompt, config, emit_connected)
        finally:
            connecting.cancel()

    def chat(self) -> None:
        """Answer one question a line, with the conversation so far as context, until Ctrl-D."""
        try:
            import readline  # noqa: F401 (lets a terminal edit lines and recall them)
        except ImportError:
            pass
        messages: list[dict] = []
        print("Ask something. Ctrl-C ends an answer, Ctrl-D the chat.", file=sys.stderr)
        while True:
            try:
                question = self.read_question()
                if question.strip():
                    context = self.newest_turns([*messages, {"role": "user", "content": question}])
                    generation = self.respond(context)
                    answer = self.models.tokenizer.decode(generation.tokens)
                    messages = [*context, {"role": "assistant", "content": answer}]
            except EOFError:
                break
            except KeyboardInterrupt:  # a line, or a question without an answer, is forgotten
                print(file=sys.stderr)
            except InputError as error:  # too long, or the server is gone: the chat goes on
                print(f"\nerror: {error}", file=sys.stderr)
        print(file=sys.stderr)
        if self.answers:
            tokens = sum(len(g.tokens) for g in self.answers)
            print(
                f"{len(self.answers)} answers, {tokens} tokens, {rate(self.answers):.3g} tokens "
                f"per second, acceptance length {acceptance_length(self.answers):.3g}",
                file=sys.stderr,
            )

    def read_question(self) -> str:
        """Read a line. Raises EOFError at the end of the file, and InputError."""
        with input_errors("that line is not valid text", UnicodeError):
            if sys.stdout.isatty() and not self.args.json:
                return input("> ")
            print("> ", end="", file=sys.stderr, flush=True)  # nothing but answers on stdout
            return input()

    def newest_turns(self, messages: list[dict]) -> list[dict]:
        """Return as many of the newest turns as leave room for an answer in the context."""
        context = self.models.target.config.max_position_embeddings
        newest = messages
        length = len(self.models.tokenizer.chat(newest))
        while len(newest) > 1 and length > context - MIN_ANSWER:
            newest = newest[2:]  # without the oldest turn: a question and its answer
            length = len(self.models.tokenizer.chat(newest))
        left_out = (len(messages) - len(newest)) // 2
        if left_out and length < context:  # else the question itself is too long, and refused
            print(f"the context is full: the oldest {left_out} turns are left out", file=sys.stderr)
        return newest


def main() -> None:
    args = parse_arguments()
    if args.serve:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        serve(args, announce_on_terminal)
    elif args.bench:
        run_bench(args)
    else:
        run_terminal(args)


def prepare(args: Namespace) -> tuple[Models, GenerationConfig]:
    """Load the models, and start a server if it is to be our own: then args.remote becomes its
    address."""
    models = load_models(args)
    if args.remote == OWN_SERVER:
        args.remote = start_server(args)
    stop_ids = frozenset(models.tokenizer.stop_ids)
    config = GenerationConfig(
        args.max_new_tokens, args.temperature, args.top_p, args.seed, stop_ids
    )
    return models, config


def run_terminal(args: Namespace) -> None:
    """Answer one prompt, or chat."""
    chatting = args.prompt is None and sys.stdin is not None and sys.stdin.isatty()
    # Read before the models are loaded: if there is nothing to read, no time is lost.
    question = "" if chatting else read_prompt(args.prompt)
    models, config = prepare(args)
    connect = None
    if args.remote:
        link = link_of(args) or Link()  # which simulates nothing
        connect = partial(open_channel, args, link, args.disconnect_after)
    tree = None if args.no_speculation else args.tree
    method = Method(models.target, models.drafter, tree, args.lookup, connect)
    terminal = Terminal(args, models, method, config)
    if chatting:
        terminal.chat()
        return
    generation = terminal.respond([{"role": "user", "content": question}])
    if generation.interrupted:
        raise KeyboardInterrupt


def run_bench(args: Namespace) -> None:
    """Measure what the command line asks for: batches, networks, or the methods on this machine."""
    prompts = read_prompts(args.bench)
    models, config = prepare(args)
    if args.batch:
        K = args.draft_length or BATCH_DRAFT_LENGTH
        print_rows(args, bench_batch(models, prompts, config, args.batch, K))
        return
    if args.remote:
        link = link_of(args)
        links = PROFILES if link is None else {args.network or "link": link}
        methods = remote_methods(models, args, links)
    else:
        alone = faster_alone(args, models.target)
        methods = local_methods(alone, models, args.chain, args.tree)
    turns: dict[str, list[Turn]] = {}  # by category
    try:
        for category, turn in bench(models, methods, prompts, config):
            turns.setdefault(category, []).append(turn)
            speeds = [f"{name} {rate([turn[name]]):.1f}" for name in methods]
            tqdm.write(f"{category}: tokens/s {', '.join(speeds)}", file=sys.stderr)
    except (KeyboardInterrupt, InputError):  # Ctrl-C, or a server that is lost
        if turns:
            print("stopped: the rows are of the prompts that were done", file=sys.stderr)
        raise
    finally:
        if turns:
            print_rows(args, summarize(models.target, methods, turns, config))
    if not turns:
        raise InputError("no prompt fits the model's context")


def print_rows(args: Namespace, rows: list[dict]) -> None:
    if args.json:
        print(json.dumps({"rows": rows}))
    else:
        print_table(rows)


if __name__ == "__main__":
    run_command(main)
