"""Speculative decoding: draft, verify, accept (paper, algorithm 1).

The drafter proposes K tokens, a chain or a tree of them; the target checks all in one pass and keeps a path from the root;
the text is distributed exactly as if the target had written it alone (Leviathan et al. 2023; Chen et al. 2023). With p the
target's and q the drafter's distribution of the token at hand:

    accept x ~ q with probability min(1, p(x) / q(x)); if it is rejected, p becomes norm(max(p - q, 0)) and q loses x; then
    the next sibling is tried against these. When none is left, or behind the last accepted token, draw from p as it then is.

For a chain, with no siblings, that is the algorithm of the two papers; for a tree, SpecInfer's (Miao et al. 2024) with
draws without replacement. A draft that was not drawn, at temperature 0 or by lookup, counts as drawn with q(x) = 1: it is kept
with probability p(x), which at temperature 0 is to say: if it is the target's argmax.

    python speculate.py --prompt "Explain why the sky is blue." --show
    python speculate.py --bench                           # target alone, chain, tree, lookup, and both, interleaved
    python speculate.py --remote --network 4g --prompt "..."   # the target in another process, behind a simulated network
    python speculate.py --serve HOST:PORT                 # the two halves by hand: MOA_SECRET=... for both,
    python speculate.py --remote HOST:PORT --prompt "..." # and of the target the client loads what its drafter needs

The target may be on another machine (`RemoteTarget`, `Server`): the loop is the same. While the server is out of reach the
drafter writes alone, without a guarantee, and once it is back the server takes that as given.

Shapes: T tokens, K drafts, E hidden, V vocabulary.
"""
from __future__ import annotations

import argparse
import hmac
import ipaddress
import itertools
import json
import math
import os
import random
import secrets
import select
import signal
import socket
import socketserver
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from llama import (DEFAULT_MODEL, SIZES, InputError, KVCache, Linear, Llama, Parser, Tokenizer, add_generation_arguments,
                   add_model_arguments, answer_length, check_finite, generate, is_encodable, load_target, natural, number,
                   one_line, probabilities, report, run_command, sample)
from moa import (COARSE_TOKENS, PROMPT_CHUNK, Draft, Drafter, Drafting, Memory, Shape, ancestor_mask, chain_parents,
                 from_coarse, load_drafter, read_config, to_coarse, walk)
from netsim import (PROFILES, Channel, ConnectionClosed, Link, Lost, Outage, ProtocolError, SmoothedTime, VirtualClock,
                    WallClock, duration, rate, receive_exactly, receive_message, send_message, share, symmetric)

SHIPPED = {DEFAULT_MODEL: Path(__file__).parent / "weights" / DEFAULT_MODEL}
PROMPTS = Path(__file__).parent / "tests" / "prompts.jsonl"
CHAIN = Shape(depth=6)
TREE = Shape(depth=6, breadth=3, nodes=8)
REMOTE_CHAIN = Shape(depth=8)  # a round trip is dear: draft further
REMOTE_TREE = Shape(depth=16, breadth=3, nodes=32)
CONFIDENCE = 0.15  # that a draft's next level is worth trying, where measured times may not say: see without_clock
LOOKUP_SIZES = (3,)  # of --lookup


@dataclass(frozen=True)
class Settings:
    """How to generate.

    shapes: what drafts may look like; of several, the one that measures fastest. adaptive: a draft ends where more of it
    would not pay. lookup: sizes n; where the last n tokens occurred before, what followed them is the draft, and the drafter
    is not asked.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    shapes: tuple[Shape, ...] = (CHAIN, TREE)
    adaptive: bool = True
    stop_ids: frozenset[int] = frozenset()
    lookup: tuple[int, ...] = ()


@dataclass
class Figures:
    """What one generation cost."""

    target_calls: int = 0  # verifications and, after an outage, readings of what was written; not the prompt's
    drafted: int = 0  # tokens that the target was asked to verify
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    unverified_tokens: int = 0  # written while the target was out of reach
    disconnected: str = ""  # why it was
    bytes_up: int = 0
    bytes_down: int = 0
    round_trips: int = 0
    network_seconds: float = 0.0

    def count(self, verdict: Verdict, draft_seconds: float, verify_seconds: float) -> None:
        """Add one cycle."""
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds
        self.target_calls += verdict.memory is not None
        self.drafted += verdict.rows - 1


@dataclass
class Verdict:
    """The target's answer: the drafts it accepts, its own next token, and the memory of what is now verified.

    From a target that is out of reach: what the drafter wrote instead, and no memory.
    """

    accepted: list[int]
    token: int
    memory: Memory | None
    checked: bool = True  # whether the target looked at the draft
    pass_seconds: float | None = None  # of the target's work alone; None: as long as `verify` took
    rows: int = 1  # 1 + the drafts it looked at


class Origin(IntEnum):
    """Whose a token is."""

    TARGET = 0
    DRAFT = 1  # and the target accepted it
    UNVERIFIED = 2


def speculate(target: LocalTarget | RemoteTarget, drafting: Drafting | Lookup, prompt: list[int], settings: Settings,
              generator: torch.Generator, figures: Figures, paces: list[Pace]) -> Iterator[list[tuple[int, Origin]]]:
    """The loop. Yields, each cycle, the drafts that were accepted and the target's own token behind them.

    Ends with a stop token or at max_new_tokens: what lies beyond is not yielded.
    """
    s, left = settings, settings.max_new_tokens
    lookup = Lookup(*s.lookup)
    verdict = target.prefill(prompt)
    while True:
        tokens = (verdict.accepted + [verdict.token])[:left]
        count = next((i + 1 for i, token in enumerate(tokens) if token in s.stop_ids), len(tokens))
        left -= count
        origins = [Origin.DRAFT] * len(verdict.accepted) + [Origin.TARGET]
        yield list(zip(tokens[:count], origins if verdict.memory else [Origin.UNVERIFIED] * count))
        if left == 0 or tokens[count - 1] in s.stop_ids:
            return
        began = target.clock()
        pace = Pace.fastest(paces)
        shape = target.adapt(pace.fit() if s.adaptive else pace.shape)
        shape = replace(shape, depth=min(shape.depth, left - 1))
        found = None
        if verdict.memory:
            drafting.observe(verdict.memory)
            lookup.observe(verdict.memory)
            found = lookup.find(verdict.token, shape.depth)
        draft = found or drafting.draft(verdict.token, shape, s.temperature, s.top_p, generator)
        drafted = target.clock()
        verdict = target.verify(draft)  # and remember: LSA and CA's keys and values are the target's side's work
        draft_seconds, verify_seconds = drafted - began, target.clock() - drafted
        if verdict.checked and shape.depth > 0 and not found and figures.target_calls > 0:  # the first one reads the prompt too
            pace.note(draft, verdict, draft_seconds, verify_seconds)
        figures.count(verdict, draft_seconds, verify_seconds)


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

    The siblings behind a kept node are tried in order; a chain has one at a time. Where x was drawn from q:

        u q(x) < p(x), with u uniform: x is kept, that is with probability min(1, p(x) / q(x))
        otherwise: p <- norm(max(p - q, 0)), q <- norm(q without x), and on to the next sibling
        none is left: the token behind the kept node is drawn from what p has become
    """
    drawn_from = {} if draft.q is None else dict(zip(sorted(set(draft.parents)), draft.q))  # parent: q (V)
    path, node = [], -1
    while True:
        p_left, q_left = p[node + 1], drawn_from.get(node)  # (V)
        for child in [i for i, parent in enumerate(draft.parents) if parent == node]:
            x = draft.tokens[child]  # a number: to index by a tensor is to wait for its device
            if draft.q is None:  # nothing was drawn: x had probability 1
                q_left = torch.zeros_like(p_left)
                q_left[x] = 1.0
            if torch.rand((), device=p.device, generator=generator) * q_left[x] < p_left[x]:
                break
            residual = normalised((p_left - q_left).clamp(min=0))
            p_left = torch.where(residual.any(), residual, p_left)  # all 0 where p = q
            q_left = q_left.clone()
            q_left[x] = 0.0
            q_left = normalised(q_left)
        else:
            return path, int(sample(p_left, generator))
        path.append(child)
        node = child


def normalised(p: Tensor) -> Tensor:
    return p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)


class LocalTarget:
    """The target of one conversation, on this machine. LSA and CA's keys and values are computed on its side."""

    def __init__(self, model: Llama, drafter: Drafter | Lookup, capacity: int, settings: Settings,
                 generator: torch.Generator):
        self.model, self.drafter, self.settings, self.generator = model, drafter, settings, generator
        self.cache = model.new_cache(capacity)

    def prefill(self, prompt: list[int]) -> Verdict:
        """Read the prompt, or a piece of one: next token, and the memory of all of it."""
        start = self.cache.length
        hidden = self.model.hidden(torch.tensor([prompt], device=self.cache.kv.device), self.cache)  # (1, T, E)
        check_finite(hidden[0, -1])
        _, token = self.judge(hidden[0, -1:], Draft(prompt[-1], [], []))
        return Verdict([], token, self.drafter.remember(prompt, self.cache, start, hidden))

    def adapt(self, shape: Shape) -> Shape:
        """The shape, as drafts for this target must be."""
        return shape

    def verify(self, draft: Draft) -> Verdict:
        """Check a draft in one pass; the cache keeps its root and the nodes that are accepted."""
        start, tokens = self.cache.length, torch.tensor([[draft.token] + draft.tokens], device=self.cache.kv.device)
        parents = [-1] + [parent + 1 for parent in draft.parents]
        hidden = self.model.hidden(tokens, self.cache, None if draft.is_chain() else ancestor_mask(parents))  # (1, K + 1, E)
        path, token = self.judge(hidden[0], draft)
        rows = [0] + [1 + node for node in path]
        self.cache.keep(start, rows)
        accepted = [draft.tokens[node] for node in path]
        memory = self.drafter.remember([draft.token] + accepted, self.cache, start, hidden[:, rows])
        return Verdict(accepted, token, memory, rows=1 + len(draft.tokens))

    def clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.cache.kv.device.type != "cpu":
            torch.accelerator.synchronize(self.cache.kv.device)
        return time.perf_counter()

    def judge(self, hidden: Tensor, draft: Draft) -> tuple[list[int], int]:
        """Accepted nodes and next token, from the hidden states (K + 1, E) of draft.token and the drafts."""
        logits, s = self.model.lm_head(hidden), self.settings  # (K + 1, V)
        if s.temperature == 0:
            return follow(logits.argmax(-1).tolist(), draft)
        return accept(probabilities(logits, s.temperature, s.top_p), draft, self.generator)


# ---------------------------------------------------------------------------------------------------------------------
# Ours, not the paper's: how far to draft, and drafts by lookup
# ---------------------------------------------------------------------------------------------------------------------

class Cycle(NamedTuple):
    """What one turn of the loop took and brought."""

    levels: int  # drafted
    draft_seconds: float
    rows: int  # of the verifying pass
    pass_seconds: float  # of this pass alone
    verify_seconds: float  # with the way there and back
    tokens: int  # that it brought


class Pace:
    """What drafts of a shape cost and bring on this machine, measured as they are made."""

    RECENT = 64  # cycles that count
    PRIOR = 1 / 40  # of a pass: what one more token in it costs, until there are measurements
    TRIAL = 8  # cycles before a shape is judged

    def __init__(self, shape: Shape):
        self.shape = shape
        self.cycles: deque[Cycle] = deque(maxlen=self.RECENT)

    def note(self, draft: Draft, verdict: Verdict, draft_seconds: float, verify_seconds: float) -> None:
        self.cycles.append(Cycle(max(1, *draft.depths()), draft_seconds, verdict.rows,
                                 verdict.pass_seconds or verify_seconds, verify_seconds, 1 + len(verdict.accepted)))

    @staticmethod
    def fastest(paces: list[Pace]) -> Pace:
        """Each in turn until all are tried, then whichever brought the most tokens a second."""
        least = min(paces, key=lambda pace: len(pace.cycles))
        return least if len(least.cycles) < Pace.TRIAL else max(paces, key=Pace.tokens_per_second)

    def tokens_per_second(self) -> float:
        return sum(c.tokens for c in self.cycles) / sum(c.draft_seconds + c.verify_seconds for c in self.cycles)

    def level_seconds(self) -> float:
        return sum(c.draft_seconds for c in self.cycles) / sum(c.levels for c in self.cycles)

    def row_seconds(self) -> float:
        """Seconds of one more token in a verifying pass: the slope of a line through the measurements, and the prior."""
        rows, seconds = [c.rows for c in self.cycles], [c.pass_seconds for c in self.cycles]
        mean_rows, mean_seconds = statistics.fmean(rows), statistics.fmean(seconds)
        covariance = statistics.fmean(r * s for r, s in zip(rows, seconds)) - mean_rows * mean_seconds
        return max(0.0, (covariance + self.PRIOR * mean_seconds) / (statistics.pvariance(rows) + 1))

    def fit(self) -> Shape:
        """The shape, ending where the expected gain, in tokens, no longer covers the time at the present pace."""
        if not self.cycles:
            return self.shape
        pace, row = self.tokens_per_second(), self.row_seconds()
        return replace(self.shape, token_threshold=pace * row, level_threshold=pace * (self.level_seconds() + row))


class Lookup:
    """Prompt lookup (Saxena 2023): the draft is what followed the last few tokens when they occurred before.

    For the benchmark it takes the place of a Drafter (start, remember) and of its Drafting (observe, draft).
    """

    def __init__(self, *sizes: int):
        """sizes: how many last tokens to look for, one after the other."""
        self.sizes = sizes
        self.history: list[int] = []

    def start(self, capacity: int) -> Lookup:
        return Lookup(*self.sizes)

    def remember(self, tokens: list[int], cache: KVCache, start: int, hidden: Tensor) -> Memory:
        return Memory(tokens)

    def observe(self, memory: Memory) -> None:
        self.history += memory.tokens

    def find(self, token: int, length: int) -> Draft | None:
        """What to follow `token`, at most so long a chain, if there is anything."""
        text = self.history + [token]
        for size in self.sizes:
            for i in reversed(range(len(text) - size)):
                if text[i:i + size] == text[-size:]:
                    found = text[i + size:i + size + length]
                    return Draft(token, found, chain_parents(len(found)))
        return None

    def draft(self, token: int, shape: Shape, temperature: float, top_p: float, generator: torch.Generator) -> Draft:
        return self.find(token, shape.depth) or Draft(token, [], [])


# ---------------------------------------------------------------------------------------------------------------------
# Client and server: the drafter here, the target there (paper, client-server experiments)
#
# A connection opens with a nonce and its HMAC under the shared secret. Then the client asks, in messages of netsim.py:
#     read {start, capacity, float16} + tokens      the cache is cut to `start` and takes these as given: next token, memory
#     verify {start, token} + draft                 one pass more: what of the draft is accepted, next token and memory
#     generate {max_new_tokens, stop_ids} + tokens  plain use of an API: the target's own tokens, one a message
# The first and the last say in temperature, top_p and seed how to sample.
# ---------------------------------------------------------------------------------------------------------------------

SECRET = "MOA_SECRET"  # the environment variable that holds it
MOST_CLIENTS, MOST_DRAFTS, MOST_ON_THE_WAY = 8, 64, 8
IDLE_SECONDS = 300.0  # after which a silent client is dropped
PEER_SECONDS = 10.0  # for a message that has begun, and for the handshake
PREFILL_SECONDS = 60.0  # for a piece of the prompt
OVERDUE_SECONDS = 30.0  # after which a connection that owes a reply is given up for a new one
FIRST_PAUSE = 0.5  # seconds between two attempts to connect; it doubles
NONCE = 32  # bytes


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values side by side (..., 2D) as int8 (..., 2, D) and a float16 scale (..., 2, 1) for each."""
    x = x.float().unflatten(-1, (2, -1))
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=2**-14).half()
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


def pack_memory(memory: Memory, float16: bool) -> dict[str, Tensor]:
    """A memory as it crosses the network: int8 and scales, or float16, which is all but exact."""
    tensors = {}
    for name, x in (("cross", memory.cross_kv), ("reused", memory.reused_kv)):
        if len(x) and float16:
            tensors[name] = x.half()
        elif len(x):
            tensors[name], tensors[name + "_scale"] = quantise(x)
    return {name: x.cpu() for name, x in tensors.items()}  # now, and not while sending: it is the models' time


def unpack_memory(tokens: list[int], tensors: dict[str, Tensor], drafting: Drafting) -> Memory:
    """The memory of these tokens. Raises LookupError, RuntimeError or ValueError if the tensors are not that."""
    def states(name: str, like: Tensor) -> Tensor:  # like (..., capacity, 2D) -> (..., T, 2D)
        *outer, _, width = like.shape
        x = tensors[name].float().view(*outer, len(tokens), 2, width // 2)
        if name + "_scale" in tensors:
            x = x * tensors[name + "_scale"].float().view(*x.shape[:-1], 1)
        if not x.isfinite().all():
            raise ValueError(f"{name} is not finite")
        return x.flatten(-2).to(like)

    reused = drafting.reused_cache.kv  # (N, 1, Hkv, capacity, 2D)
    cross = drafting.cross_cache.kv[0] if drafting.drafter.config.use_cross_attention else drafting.previous
    return Memory(tokens, states("cross", cross), states("reused", reused) if len(reused) else reused[..., :0, :])


def sampling_fields(settings: Settings, generator: torch.Generator) -> dict:
    """How the server is to sample: with chances of its own, which must not be those that drafts were drawn with."""
    seed = int(torch.randint(2**31 - 1, (), generator=generator, device=generator.device))
    return {"temperature": settings.temperature, "top_p": settings.top_p, "seed": seed}


def int32(tokens: list[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


def fingerprint(drafter: Drafter) -> dict:
    """What both sides must agree on: the target's sizes, and a drafter's sizes and, as a sample of its weights, its bias."""
    t, c, bias = drafter.target.config, drafter.config, drafter.Ekv2E.bias
    sizes = [t.vocab_size, t.hidden_size, t.num_hidden_layers, t.num_key_value_heads, t.head_dim, drafter.N,
             c.cross_attention_num_key_value_heads, c.num_attention_heads, int(c.use_cross_attention),
             len(c.draft_vocabulary or ())]
    return {"sizes": sizes, "bias": bias.detach().float()[:16].tolist()}


def same_models(theirs, ours: dict) -> bool:
    """Whether two fingerprints agree, but for what rounding to the type that each side uses makes of the bias."""
    try:
        return theirs["sizes"] == ours["sizes"] and all(
            math.isclose(a, b, rel_tol=0.01, abs_tol=1e-4) for a, b in zip(theirs["bias"], ours["bias"], strict=True))
    except (LookupError, TypeError, ValueError):
        return False


@dataclass(frozen=True)
class Remote:
    """Where a server is, and the network that is simulated on the way."""

    host: str
    port: int
    secret: str = ""
    link: Link = field(default_factory=Link)
    outages: tuple[Outage, ...] = ()
    float16: bool = False  # memories cross in 16 bits, not in 8
    clock: Callable[[], WallClock | VirtualClock] = WallClock

    def channel(self, drafter: Drafter | None, seed: int) -> Channel:
        """A connection for one answer. Raises InputError if there is no server."""
        try:
            sock, up, down = self.connect(drafter, PEER_SECONDS)
        except Lost as error:
            raise InputError(str(error)) from None
        return Channel(sock, symmetric(self.link, seed, self.outages), self.clock(), up=up, down=down)

    def connect(self, drafter: Drafter | None, seconds: float) -> tuple[socket.socket, int, int]:
        """A connection to a server that has this drafter and its target, and the bytes that it took, up and down.

        Raises Lost, after so long at most.
        """
        deadline, sock, nonce = time.monotonic() + seconds, None, bytearray()
        try:
            sock = socket.create_connection((self.host, self.port), seconds)
            receive_exactly(nonce, NONCE, sock, deadline)
            digest = hmac.digest(self.secret.encode(errors="surrogateescape"), nonce, "sha256")
            sock.sendall(digest)
            fields, _, size = receive_message(sock, 4096, deadline)
            if "models" in fields and (drafter is None or same_models(fields["models"], fingerprint(drafter))):
                return sock, len(digest), NONCE + size
            reason = fields.get("refused", "it serves another target or drafter")
        except (OSError, UnicodeError, ProtocolError) as error:  # UnicodeError: for a name like a..b
            reason = error
        if sock:
            sock.close()
        raise Lost(f"no server at {self.host}:{self.port}: {one_line(reason)}")


class Window:
    """How many drafts to have on the way to a server: as many as should bring the most tokens a second.

    A draft's way is drafting, the round trip, and a pass of the target. With w on the way one comes back every w-th part of
    that time, but not sooner than drafting or a pass takes; and where w has been tried, as often as was measured. Each was
    made before the w - 1 passes ahead of its own ended: it helps only if it foresaw what they brought.
    """

    RATE = 1 / 8  # at which means follow
    GAIN = 1.03  # of pace, which a larger size must bring: it asks more passes of the target

    def __init__(self):
        self.size = 1
        self.accepted = 1.0  # drafts that a pass accepts, if it was foreseen
        self.foreseen = 0.3  # how often what one pass brings lies on a path of the draft for the next
        self.periods: dict[int, float] = {}  # seconds from one verdict to the next, by size

    def fit(self, drafting: float, trip: float, work: float) -> int:
        """The size. In seconds: a draft, a round trip, a pass."""
        sizes = range(1, MOST_ON_THE_WAY + 1)
        period = {w: max(drafting, work, (drafting + trip + work) / w) for w in sizes} | self.periods
        pace = {w: (1 + self.accepted * self.foreseen ** (w - 1)) / max(period[w], 1e-6) for w in sizes}
        self.size = min(w for w in pace if self.GAIN * pace[w] >= max(pace.values()))
        self.periods.setdefault(self.size, period[self.size])
        return self.size

    def note(self, seconds: float) -> None:
        """Time from one verdict to the next; one that was late, as a packet was lost, counts for twice the usual at most."""
        period = self.periods.get(self.size, seconds)
        self.periods[self.size] = period + 2 * self.RATE * (min(seconds, 2 * period) - period)

    def judge(self, draft: Draft, passes: int, passed: list[int], accepted: list[int]) -> None:
        """Of a draft: how many passes ended before its own, what they brought, and what its own then accepted."""
        if not draft.tokens:
            return
        foresaw = len(walk(draft.parents, draft.tokens, passed)) == len(passed)
        if foresaw:
            self.accepted += self.RATE * (len(accepted) - self.accepted)
        if passes:
            all_foreseen = self.foreseen ** passes
            self.foreseen = (all_foreseen + self.RATE * (foresaw - all_foreseen)) ** (1 / passes)


class RemoteTarget:
    """The target of one conversation, on a server; it is asked what a LocalTarget is asked.

    Several drafts may be on the way (`Window`), so that the server need not wait for the next one. Each gets one pass of the
    target. At its turn the text has gone on by what the passes of those before it have brought; if that lies on a path of the
    draft, what is left behind it is checked (`Draft.behind`), else the pass brings the target's next token only.

    If nothing comes, the drafter's guess is the answer, and so on, until the server is back and takes what was written
    meanwhile as given.
    """

    def __init__(self, channel: Channel, remote: Remote, drafting: Drafting, capacity: int, settings: Settings,
                 generator: torch.Generator, figures: Figures):
        self.channel, self.remote, self.drafting, self.capacity = channel, remote, drafting, capacity
        self.settings, self.generator, self.figures = settings, generator, figures
        self.tokens: list[int] = []  # of prompt and answer, all there are
        self.prompt_length = 0
        self.verified = 0  # so many of them have a memory, and lie in the server's cache
        self.asked: deque[tuple[int, int, Draft]] = deque()  # on the way: how many were before, position of draft.token, draft
        self.told: float | None = None  # when the last verdict came
        self.window, self.places = Window(), 1  # places: how many more may be sent now
        self.drafted = SmoothedTime()  # how long a draft takes us
        self.worked = SmoothedTime()  # how long a verification takes the server
        self.reading = 0.0  # how long it took, the last time, to read text, or the last piece of a long one
        self.lost = False
        self.context = drafting.drafter.target.config.max_position_embeddings
        self.retry, self.pause = 0.0, FIRST_PAUSE  # when to connect again at the earliest, and for how long not to after that

    def clock(self) -> float:
        return self.channel.clock.now()

    def prefill(self, prompt: list[int]) -> Verdict:
        """Have the prompt read, again if the server dies meanwhile and is soon back. Raises InputError if it is not: without
        any memory the drafter cannot go on alone.
        """
        self.tokens, self.prompt_length = list(prompt), len(prompt)
        try:
            return self.read(0, PREFILL_SECONDS)
        except Lost as error:
            reason, deadline = error, self.clock() + PEER_SECONDS
        while self.channel.dead and self.clock() < deadline:
            with suppress(Lost):
                return self.catch_up()
            self.channel.clock.wait_until(max(self.retry, self.clock() + FIRST_PAUSE))
        raise InputError(f"the server was lost before its first token: {reason}")

    def verify(self, draft: Draft) -> Verdict:
        """The server's next verdict, which may be on an earlier draft. If none comes, the drafter's own text: this draft's
        first path, as if the target had chosen it. In turn:

            lost before           catch_up(): the server's next token if it is back, else Lost
            not lost              send, as far as the window is open, and wait; Lost if it takes too long
            the connection died   catch_up() over another one, at once
            none of these helped  the path's last token stands for the target's, those before it for accepted drafts
        """
        self.channel.clock.work("draft")
        try:
            if self.lost:
                return self.catch_up()
            if self.told is not None and self.places > 0:
                self.drafted.observe(self.clock() - self.told)
            self.ask(draft)
            return self.hear()
        except Lost as error:
            self.lost, self.told, self.figures.disconnected = True, None, self.figures.disconnected or str(error)
        if self.channel.dead:  # the server hung up, on a client that paused or to start anew: it may take another connection
            with suppress(Lost):
                return self.catch_up()
        return self.guess(draft)

    def adapt(self, shape: Shape) -> Shape:
        """Drafts for this target are drawn from a q that can be sent, and only if they will be.

        That is decided here, before one is drawn: if what was drawn decided whether it is sent, the text would follow it.
        """
        drafting, trip, work = self.drafted.mean, self.channel.round_trip.mean, self.worked.mean
        if not self.lost:
            size = 1 if work is None else self.window.fit(drafting or 0.0, trip or 0.0, work)
            self.places = size - len(self.asked)
        return replace(shape, coarse=True, depth=shape.depth if self.lost or self.places > 0 else 0)

    def ask(self, draft: Draft) -> None:
        """Send a draft behind the newest token and, where the window is open further, empty ones: one token each.

        Beside others none is sent whose pass would come after the answer's last token, as each before it brings one, or might
        come after the context's, if all before it were accepted.
        """
        known, end = len(self.tokens), self.prompt_length + self.settings.max_new_tokens
        reach = known
        for _, start, ahead in self.asked:
            reach = max(reach, start + 1 + max(ahead.depths())) + 1  # tokens, once all are accepted
        for _ in range(self.places):
            if self.asked and (known + len(self.asked) >= end or reach >= self.context):
                break
            self.channel.send({"call": "verify", "start": known - 1, "token": draft.token}, pack_draft(draft))
            self.asked.append((len(self.asked), known - 1, draft))
            reach = max(reach, known + max(draft.depths())) + 1
            draft = Draft(draft.token, [], [])

    def hear(self) -> Verdict:
        """The next verdict, when it is there. Raises Lost."""
        passes, start, draft = self.asked[0]
        passed = self.tokens[start + 1:]  # what other passes have brought since it was sent
        left = draft.behind(passed)
        fields, memory = self.receive(self.patience(), lambda fields: along(left, fields["accepted"]))
        self.asked.popleft()
        worked, now = self.channel.clock.worked(fields), self.clock()
        self.worked.observe(worked)
        self.window.judge(draft, passes, passed, memory.tokens[1:])
        if self.told is not None:
            self.window.note(now - self.told)
        self.told = now
        return self.note(Verdict(memory.tokens[1:], fields["token"], memory, pass_seconds=worked, rows=1 + len(left.tokens)))

    def guess(self, draft: Draft) -> Verdict:
        """The drafter's own text: the draft's first path, as if the target had chosen it."""
        s, text = self.settings, draft.first_path()
        if not text:
            text = self.drafting.draft(draft.token, Shape(1, coarse=True), s.temperature, s.top_p, self.generator).tokens
        if not text:
            raise InputError("the drafter computes no numbers: its weights are damaged, or --dtype cannot hold its values")
        self.drafting.assume([draft.token] + text[:-1])
        self.tokens += text
        return Verdict(text[:-1], text[-1], None, checked=False)

    def catch_up(self) -> Verdict:
        """Where the server's own text goes on, if it is back. Raises Lost if it is not."""
        channel = self.channel
        self.asked.clear()
        while channel.requests and not channel.dead:  # first comes what it still owes us
            if channel.ready():
                fields, _ = channel.receive(0)
                self.worked.observe(channel.clock.worked(fields))  # it may have been late because the server is slow
            elif self.clock() - channel.requests[0].sent < OVERDUE_SECONDS:
                raise Lost("nothing yet")
            else:
                channel.dead = "the server does not answer"
        start = self.verified
        if channel.dead:
            now = self.clock()
            if now < self.retry or channel.network.delivery(now, now) > now:
                raise Lost("not yet")
            channel.close()
            patience = min(PEER_SECONDS, max(1.0, 4 * channel.round_trip.timeout()))
            try:
                channel.connect(*self.remote.connect(self.drafting.drafter, patience))
            finally:
                self.retry, self.pause = self.clock() + self.pause, 2 * self.pause
            start = 0
        verdict = self.read(start, self.patience(10))  # to read the text again may take ten times a verification
        self.lost, self.pause, verdict.checked = False, FIRST_PAUSE, False
        return verdict

    def read(self, start: int, patience: float) -> Verdict:
        """The server takes the tokens from `start` on as given: its next one, and the memory of those that had none."""
        s, capacity = self.settings, min(self.capacity, self.context + MOST_DRAFTS)
        self.channel.send({"call": "read", "start": start, "capacity": capacity, "float16": self.remote.float16,
                           **sampling_fields(s, self.generator)}, {"tokens": int32(self.tokens[start:])})
        pieces = [self.tokens[a:a + PROMPT_CHUNK] for a in range(start, len(self.tokens), PROMPT_CHUNK)]
        answers = [self.receive(patience, lambda _: piece) for piece in pieces]
        self.reading = self.channel.clock.worked(answers[-1][0])
        unknown = self.tokens[self.verified:]
        cross, reused = (torch.cat([getattr(memory, name) for _, memory in answers], dim=-2)[..., -len(unknown):, :]
                         for name in ("cross_kv", "reused_kv"))
        return self.note(Verdict([], answers[-1][0]["token"], Memory(unknown, cross, reused)))

    def receive(self, patience: float, tokens_of: Callable[[dict], list[int]]) -> tuple[dict, Memory]:
        """A reply, and its memory of these tokens. Raises Lost, and for a reply that makes no sense too."""
        fields, tensors = self.channel.receive(patience)
        try:
            whole(fields["token"], 0, self.drafting.drafter.target.config.vocab_size - 1)
            return fields, unpack_memory(tokens_of(fields), tensors, self.drafting)
        except (LookupError, TypeError, ValueError, RuntimeError):
            self.channel.dead = "the server answers rubbish"
            raise Lost(self.channel.dead) from None

    def patience(self, verifications: int = 1) -> float:
        """How long to wait for a reply: for work as long as these, and for a network that may lose packets."""
        work = self.worked.timeout() if self.worked.mean else max(self.worked.timeout(), 3 * self.reading)
        return verifications * work + self.channel.round_trip.patience()

    def note(self, verdict: Verdict) -> Verdict:
        """Take down what the server has verified."""
        self.tokens += verdict.accepted + [verdict.token]
        self.verified = len(self.tokens) - 1
        self.channel.network.tokens(len(self.tokens) - self.prompt_length, self.clock())
        return verdict


def pack_draft(draft: Draft) -> dict[str, Tensor]:
    """A draft as it crosses the network, and exactly: it was drawn from a coarse q."""
    tensors = {"drafts": int32(draft.tokens), "parents": int32(draft.parents)}
    if draft.q is not None:
        tensors["ids"], tensors["counts"] = to_coarse(draft.q)
    return tensors


def along(draft: Draft, accepted: list[int]) -> list[int]:
    """draft.token and these tokens behind it. Raises ValueError if they are no path of the draft."""
    path = walk(draft.parents, draft.tokens, accepted)
    if len(path) < len(accepted):
        raise ValueError(f"{accepted} is no path of the draft")
    return [draft.token] + [draft.tokens[node] for node in path]  # not `accepted`, of which 9.0 may be one


def call_api(channel: Channel, prompt: list[int], settings: Settings, generator: torch.Generator) -> Iterator[int]:
    """Plain use of an API: the server decodes alone and streams its tokens. Raises InputError when it is lost."""
    s = settings
    try:
        channel.send({"call": "generate", "max_new_tokens": s.max_new_tokens, "stop_ids": sorted(s.stop_ids),
                      **sampling_fields(s, generator)}, {"tokens": int32(prompt)})
        for count in range(1, s.max_new_tokens + 1):
            fields, _ = channel.receive(PREFILL_SECONDS if count == 1 else OVERDUE_SECONDS)
            channel.network.tokens(count, channel.clock.now())
            yield whole(fields.get("token"), 0, 2**31)
            if not fields.get("more"):
                return
    except (Lost, ValueError) as error:
        raise InputError(f"the answer ends here: {error}") from None


class Server(socketserver.ThreadingTCPServer):
    """The target for several clients, a thread and a cache each.

    All models' work is done in turn by one worker thread: PyTorch keeps a pool of threads for each thread that calls it.
    """

    allow_reuse_address = True

    def __init__(self, model: Llama, drafter: Drafter, host: str, port: int, secret: str = "",
                 most_clients: int = MOST_CLIENTS, idle_seconds: float = IDLE_SECONDS):
        self.model, self.drafter, self.secret = model, drafter, secret
        self.most_clients, self.idle_seconds = most_clients, idle_seconds
        self.places = threading.BoundedSemaphore(most_clients)
        self.connections: set[socket.socket] = set()
        self.strangers: dict[socket.socket, None] = {}  # those that have not shown the secret yet, the oldest first
        self.worker = ThreadPoolExecutor(1)
        for size in (2048, 4096, 8192) if model.captured_pass else ():  # before a client waits, by the thread that will replay
            if size < 2 * max(2048, model.config.max_position_embeddings):
                self.work(warm_up, model, drafter, size)
        try:
            super().__init__((host, port), Session)
        except (OSError, UnicodeError) as error:
            raise InputError(f"cannot serve at {host}:{port}: {error}") from None
        if not (secret or ipaddress.ip_address(self.server_address[0]).is_loopback):
            self.server_close()
            raise InputError(f"to serve beyond this machine, set a secret for both sides in {SECRET}")

    def process_request(self, request: socket.socket, client_address) -> None:
        """Listen to a connection, and to no more strangers than could be clients soon: the oldest has to go."""
        if len(self.strangers) >= 4 * self.most_clients:
            self.hang_up(next(iter(self.strangers)))
        self.connections.add(request)
        self.strangers[request] = None
        super().process_request(request, client_address)

    def hang_up(self, connection: socket.socket) -> None:
        self.strangers.pop(connection, None)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: socket.socket) -> None:
        self.connections.discard(request)
        self.strangers.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Hang up on everyone, and wait for their threads."""
        for connection in list(self.connections):
            self.hang_up(connection)
        super().server_close()
        self.worker.shutdown()

    def work(self, function: Callable, *arguments):
        """What the function returns, called by the worker. A fault of ours must not look like the client's: a RuntimeError."""
        def in_turn():
            try:
                with torch.inference_mode():
                    return function(*arguments)
            except InputError as error:  # what is wrong with the models, in one line
                raise ProtocolError(str(error)) from None
            except (LookupError, TypeError, ValueError) as error:
                raise RuntimeError("the models failed") from error
        return self.worker.submit(in_turn).result()


class Session(socketserver.BaseRequestHandler):
    """One client's connection: who breaks a rule of it is hung up on, with a line on stderr."""

    target: LocalTarget | None = None
    text: list[int] = []  # what is in its cache, and the newest token

    def handle(self) -> None:
        self.model = self.server.model
        try:
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.admit()
            self.server.strangers.pop(self.request, None)
            if not self.server.places.acquire(blocking=False):
                return self.tell({"refused": f"the server is full, it has {self.server.most_clients} clients"})
            try:
                self.tell({"models": fingerprint(self.server.drafter)})
                while True:
                    self.answer_request()
            finally:
                self.server.places.release()
        except (ConnectionClosed, ConnectionError):  # the client has gone
            pass
        except (ProtocolError, InputError, OSError) as error:
            print(f"{self.client_address[0]}: {one_line(error)}", file=sys.stderr)

    def admit(self) -> None:
        """Check that the client knows the secret, before anything else of it is read. Raises ProtocolError."""
        nonce, digest, deadline = os.urandom(NONCE), bytearray(), time.monotonic() + PEER_SECONDS
        self.request.sendall(nonce)
        receive_exactly(digest, 32, self.request, deadline)
        if not hmac.compare_digest(digest, hmac.digest(self.server.secret.encode(errors="surrogateescape"), nonce, "sha256")):
            self.tell({"refused": f"wrong secret; both sides take it from {SECRET}"})
            raise ProtocolError("a wrong secret")

    def tell(self, fields: dict, tensors: dict[str, Tensor] = {}) -> None:
        send_message(self.request, fields, tensors, time.monotonic() + PEER_SECONDS)

    def reply(self, work: str, fields: dict, tensors: dict[str, Tensor] = {}) -> None:
        now = time.perf_counter()
        self.tell({"work": work, "elapsed": round(now - self.since, 6), **fields}, tensors)
        self.since = now

    def answer_request(self) -> None:
        """Wait for a request, and answer it. Raises ProtocolError for one that makes no sense."""
        if not select.select([self.request], [], [], self.server.idle_seconds)[0]:
            raise ProtocolError(f"silent for {self.server.idle_seconds:g} s")
        limit = (1 << 20) + 4 * self.server.model.config.max_position_embeddings
        fields, tensors, _ = receive_message(self.request, limit, time.monotonic() + PEER_SECONDS)
        self.since = time.perf_counter()
        try:
            calls = {"generate": self.generate, "read": self.read, **({"verify": self.verify} if self.target else {})}
            calls[fields["call"]](fields, tensors)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"a request that makes no sense: {error!r}") from None

    def read(self, fields: dict, tensors: dict[str, Tensor]) -> None:
        """Take tokens as given; their memory goes back in pieces, while the next is worked on."""
        vocab_size, context = self.model.config.vocab_size, self.model.config.max_position_embeddings
        tokens = checked_ids(tensors["tokens"], 0, vocab_size)
        if fields["start"] == 0:
            capacity, self.float16 = whole(fields["capacity"], 1, context + MOST_DRAFTS), fields["float16"] is True
            self.target = self.server.work(LocalTarget, self.model, self.server.drafter, capacity, *self.read_sampling(fields))
        elif self.target is None:
            raise ValueError("the first read must start at 0")
        start = whole(fields["start"], 0, self.target.cache.length)
        whole(start + len(tokens), start + 1, min(context, self.target.cache.capacity))
        self.target.cache.truncate(start)
        self.text = self.text[:start] + tokens
        for a in range(0, len(tokens), PROMPT_CHUNK):
            verdict, memory = self.server.work(self.with_memory, self.target.prefill, tokens[a:a + PROMPT_CHUNK])
            self.reply("read", {"token": verdict.token, "more": a + PROMPT_CHUNK < len(tokens)}, memory)
        self.text.append(verdict.token)

    def verify(self, fields: dict, tensors: dict[str, Tensor]) -> None:
        """Check what is left of a draft behind the newest token."""
        vocab_size, length, capacity = self.model.config.vocab_size, self.target.cache.length, self.target.cache.capacity
        start, drafts = whole(fields["start"], 0, length), checked_ids(tensors["drafts"], 0, vocab_size)
        parents, q = checked_ids(tensors["parents"], -1, len(drafts)), None
        whole(fields["token"], self.text[start], self.text[start])
        whole(len(drafts), 0, MOST_DRAFTS)
        if len(parents) != len(drafts) or any(parent >= i for i, parent in enumerate(parents)):
            raise ValueError("the parents of drafts must come before them")
        if self.target.settings.temperature > 0 and "counts" in tensors:
            counts = tensors["counts"]
            size = (len(set(parents)), min(COARSE_TOKENS, vocab_size))
            checked_ids(tensors["ids"].flatten(), 0, vocab_size)
            if not tensors["ids"].shape == counts.shape == size or counts.dtype != torch.uint8 or not counts.sum(-1).all():
                raise ValueError("q does not fit the drafts")
            q = from_coarse(tensors["ids"], counts, vocab_size).to(self.model.device)
        draft = Draft(self.text[start], drafts, parents, q).behind(self.text[start + 1:])
        whole(length + 1 + len(draft.tokens), 0, capacity)
        whole(length + max(draft.depths()), 0, self.model.config.max_position_embeddings - 1)
        verdict, memory = self.server.work(self.with_memory, self.target.verify, draft)
        self.text += verdict.accepted + [verdict.token]
        self.reply("verify", {"accepted": verdict.accepted, "token": verdict.token}, memory)

    def generate(self, fields: dict, tensors: dict[str, Tensor]) -> None:
        """The target's own tokens, one a reply."""
        tokens, stop_ids = checked_ids(tensors["tokens"], 0, self.model.config.vocab_size), set(fields["stop_ids"])
        room = self.model.config.max_position_embeddings - len(tokens)
        count, (settings, generator) = whole(fields["max_new_tokens"], 1, room if tokens else 0), self.read_sampling(fields)
        stream = generate(self.model, tokens, count, stop_ids, settings.temperature, settings.top_p, generator)
        for left in reversed(range(count)):
            token = self.server.work(next, stream)
            more = left > 0 and token not in stop_ids
            self.reply("token", {"token": token, "more": more})
            if not more:
                return

    def read_sampling(self, fields: dict) -> tuple[Settings, torch.Generator]:
        temperature, top_p, seed = float(fields["temperature"]), float(fields["top_p"]), whole(fields["seed"], 0, 2**63 - 1)
        if not 0 <= temperature <= 100 or not 0 < top_p <= 1:
            raise ValueError(f"no such sampling: temperature {temperature}, top-p {top_p}")
        generator = torch.Generator(self.model.device).manual_seed(seed)
        return Settings(temperature=temperature, top_p=top_p), generator

    def with_memory(self, call: Callable, request) -> tuple[Verdict, dict[str, Tensor]]:
        verdict = call(request)
        return verdict, pack_memory(verdict.memory, self.float16)


def whole(value: object, low: int, high: int) -> int:
    """The value, if it is a whole number within [low, high]. Raises ValueError."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{value!r:.40} is not a whole number from {low} to {high}")
    return value


def checked_ids(tensor: Tensor, low: int, end: int) -> list[int]:
    """The values of an int32 vector, if all are within [low, end). Raises ValueError."""
    if tensor.dtype != torch.int32 or tensor.dim() != 1:
        raise ValueError(f"expected an int32 vector, not {tensor.dtype} {list(tensor.shape)}")
    return [whole(value, low, end - 1) for value in tensor.tolist()]


def serve(server: Server, until_eof: bool) -> None:
    """Serve until a signal ends it, or the end of stdin. The address is the one line on stdout."""
    def end_with_stdin() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    with server:
        if until_eof:
            threading.Thread(target=end_with_stdin, daemon=True).start()
        print("{}:{}".format(*server.server_address), flush=True)
        try:
            server.serve_forever()
        finally:  # a second signal must not cut the wait for the threads short: one that Python ends within PyTorch aborts
            for end in (signal.SIGINT, signal.SIGTERM):
                signal.signal(end, signal.SIG_IGN)


@contextmanager
def server_of(args: argparse.Namespace, folder: str | Path) -> Iterator[dict[str, Remote]]:
    """The server behind some `networks`: the one that is named, or a process of our own, which ends with the context.

    However this process ends: the other reads its stdin, which nobody else holds, and ends with it.
    """
    secret = os.environ.get(SECRET, "")
    if args.remote != OWN_SERVER:
        yield networks(args, *args.remote, secret)
        return
    secret = secret or secrets.token_hex(16)
    flags = ["--model", args.model, "--drafter", folder, "--device", args.device]
    flags += ["--dtype", args.dtype] if args.dtype else []
    with subprocess.Popen([sys.executable, __file__, "--serve", "127.0.0.1:0", "--until-eof", *flags], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, SECRET: secret}) as process:
        try:
            line = process.stdout.readline()
            if not line:
                raise InputError("the server did not start")
            yield networks(args, *address(line.strip()), secret)
        finally:
            process.terminate()
            try:
                process.wait(PEER_SECONDS)
            except subprocess.TimeoutExpired:  # it hangs
                process.kill()


# ---------------------------------------------------------------------------------------------------------------------
# One generation, by either method
# ---------------------------------------------------------------------------------------------------------------------

@dataclass
class Generation:
    """Tokens as they come, and the figures once they have all come."""

    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    figures: Figures = field(default_factory=Figures)
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    prompt: list[int] = field(default_factory=list)

    def acceptance_length(self) -> float:
        return (len(self.tokens) - 1 - self.figures.unverified_tokens) / max(1, self.figures.target_calls)


def capacity_of(prompt: list[int], settings: Settings) -> int:
    """Positions that caches need for prompt, answer, and drafts that will be rejected."""
    return len(prompt) + settings.max_new_tokens + max(max(s.nodes, s.depth * s.breadth) for s in settings.shapes)


@torch.inference_mode()
def answer(model: Llama, drafter: Drafter | Lookup | None, prompt: list[int], settings: Settings, seed: int = 0,
           emit=lambda token, origin: None, paces: list[Pace] | None = None, remote: Remote | None = None) -> Generation:
    """One answer to a prompt, speculatively or, without a drafter, by the target alone. `emit` sees each token.

    paces: of earlier answers, to go on from; one a shape. remote: where the target is, of which `model` is then a part.
    Raises InputError if it was never there.
    """
    result, s = Generation(prompt=prompt), settings
    generator = torch.Generator(model.device).manual_seed(seed)
    start, channel = time.perf_counter(), remote and remote.channel(drafter, seed)
    if drafter is None:
        stream = ([(token, Origin.TARGET)] for token in (
            call_api(channel, prompt, s, generator) if remote else
            generate(model, prompt, s.max_new_tokens, s.stop_ids, s.temperature, s.top_p, generator)))
    else:
        capacity = capacity_of(prompt, s)
        if remote:
            capacity += MOST_ON_THE_WAY  # for passes that are asked for before the end is seen
        drafting = drafter.start(capacity)
        target = (RemoteTarget(channel, remote, drafting, capacity, s, generator, result.figures) if remote else
                  LocalTarget(model, drafter, capacity, s, generator))
        stream = speculate(target, drafting, prompt, s, generator, result.figures,
                           paces or [Pace(shape) for shape in s.shapes])
    try:
        for token, origin in itertools.chain.from_iterable(stream):
            result.tokens.append(token)
            result.origins.append(origin)
            result.first_token_seconds = result.first_token_seconds or time.perf_counter() - start
            result.figures.unverified_tokens += origin == Origin.UNVERIFIED
            emit(token, origin)
    finally:
        if channel:
            channel.close()
    result.seconds = time.perf_counter() - start
    if drafter is None:
        result.figures.target_calls = len(result.tokens) - 1
        result.figures.verify_seconds = result.seconds
    if channel:
        for name in ("bytes_up", "bytes_down", "round_trips", "network_seconds"):
            setattr(result.figures, name, getattr(channel, name))
    return result


@torch.inference_mode()
def warm_up(model: Llama, drafter: Drafter | None, capacity: int = 1) -> None:
    """Have all that is captured compiled and recorded for caches of at least this capacity, before time is taken."""
    print("compiling ...", file=sys.stderr)
    for size in SIZES if model.config.max_position_embeddings > SIZES[-1] else ():
        for _ in range(3):  # it compiles, records, replays
            cache = model.new_cache(max(capacity, 1 + size))
            cache.advance(1)
            tokens, siblings = torch.zeros(1, size, dtype=torch.long, device=model.device), torch.eye(size, dtype=torch.bool)
            hidden = model.hidden(tokens, cache, siblings)
            if drafter and drafter.captured_step:
                drafter.remember([0] * size, cache, 1, hidden)
                drafter.start(cache.capacity).replay(tokens, siblings, 1)


# ---------------------------------------------------------------------------------------------------------------------
# The benchmark
# ---------------------------------------------------------------------------------------------------------------------

def read_prompts(path: str) -> list[tuple[str, list[str]]]:
    """(category, turns) of each line of a prompt set: {"prompt": text} or {"category": name, "turns": [text, ...]}."""
    prompts = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            turns = [record["prompt"]] if "prompt" in record else record["turns"]
            if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and is_encodable(t) for t in turns):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(f'{path}, line {line_number}: expected {{"prompt": text}} or '
                             '{"category": name, "turns": [text, ...]}') from None
        category = str(record.get("category") or "all")
        if category == "overall":
            raise InputError(f"{path}, line {line_number}: 'overall' is the name of all categories together; choose another")
        prompts.append((category, turns))
    if not prompts:
        raise InputError(f"{path}: no prompts")
    return prompts


Method = Callable[[list[int], Settings], Generation]


def method(model: Llama, drafter: Drafter | Lookup | None, shapes: tuple[Shape, ...], seed: int,
           remote: Remote | None = None, lookup: tuple[int, ...] = ()) -> Method:
    """One way to answer. What it measures on one prompt it goes on from on the next."""
    paces = [Pace(shape) for shape in shapes]
    return lambda prompt, s: answer(model, drafter, prompt, replace(s, shapes=shapes, lookup=lookup), seed, paces=paces,
                                    remote=remote)


def local_methods(model: Llama, drafter: Drafter, seed: int, chain: Shape, tree: Shape) -> dict[str, Method]:
    return {"target": method(model, None, (chain,), seed), "chain": method(model, drafter, (chain,), seed),
            "tree": method(model, drafter, (tree,), seed), "lookup": method(model, Lookup(3, 2, 1), (chain,), seed),
            "tree+lookup": method(model, drafter, (tree,), seed, lookup=LOOKUP_SIZES)}


def remote_methods(model: Llama, drafter: Drafter, seed: int, shapes: tuple[Shape, ...], remotes: dict[str, Remote],
                   length: int) -> dict[str, Method]:
    """For each network: plain use of an API; ours, without and with lookup; and ours with the network down after a quarter
    of `length` tokens.
    """
    methods = {}
    for name, remote in remotes.items():
        broken = replace(remote, outages=(Outage(tokens=length // 4),))
        methods |= {f"api:{name}": method(model, None, shapes, seed, remote),
                    f"remote:{name}": method(model, drafter, shapes, seed, remote),
                    f"remote+lookup:{name}": method(model, drafter, shapes, seed, remote, LOOKUP_SIZES),
                    f"disconnected:{name}": method(model, drafter, shapes, seed, broken)}
    return methods


def base_of(name: str) -> str:
    """The method that one is compared with: the target alone, by itself or behind an API on the same network."""
    _, _, network = name.partition(":")
    return f"api:{network}" if network else "target"


def bench(model: Llama, methods: dict[str, Method], tokenizer: Tokenizer, prompts: list[tuple[str, list[str]]],
          settings: Settings) -> list[dict]:
    """Every prompt by every method, in turn, after a warm-up. Rows by category, then overall."""
    runs: dict[str, list[dict[str, Generation]]] = {}
    for index, (category, turns) in enumerate(tqdm(prompts[:1] + prompts, unit=" prompts")):
        messages: list[dict] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            prompt, results = tokenizer.chat(messages), {}
            try:
                s = replace(settings, max_new_tokens=answer_length(model, prompt, settings.max_new_tokens))
            except InputError as error:
                tqdm.write(f"{turn[:40]!r} is left out: {error}", file=sys.stderr)
                break
            for name in random.Random(index).sample(list(methods), len(methods)):
                results[name] = methods[name](prompt, s)
            messages.append({"role": "assistant", "content": tokenizer.decode(results[base_of(next(iter(methods)))].tokens)})
            if index > 0:  # the first was the warm-up
                runs.setdefault(category, []).append(results)
    if not runs:
        raise InputError("no prompt fits the model's context")
    together = [("overall", [results for category in runs.values() for results in category])]
    return [row(model, category, name, results) for category, results in [*runs.items(), *together] for name in methods]


def row(model: Llama, category: str, name: str, runs: list[dict[str, Generation]]) -> dict:
    """One line of the benchmark: totals of a method over a category's prompts, and the spread over prompts."""
    mine, bases = [results[name] for results in runs], [results[base_of(name)] for results in runs]
    new_tokens, seconds = sum(len(g.tokens) for g in mine), sum(g.seconds for g in mine)
    calls, unverified = (sum(getattr(g.figures, figure) for g in mine) for figure in ("target_calls", "unverified_tokens"))
    draft, verify = (sum(getattr(g.figures, f"{part}_seconds") for g in mine) / seconds for part in ("draft", "verify"))
    base = sum(g.seconds for g in bases) / sum(len(g.tokens) for g in bases)  # seconds a token
    pace = [b.seconds / len(b.tokens) * len(g.tokens) / g.seconds for g, b in zip(mine, bases)]
    low, _, high = statistics.quantiles(pace, n=4, method="inclusive") if len(pace) > 1 else pace * 3
    result = {"category": category, "method": name, "tokens_per_second": new_tokens / seconds,
              "speedup": base / (seconds / new_tokens), "speedup_quartiles": [low, high],
              "acceptance_length": (new_tokens - unverified - len(mine)) / max(1, calls), "target_calls": calls,
              "new_tokens": new_tokens, "drafted_per_call": sum(g.figures.drafted for g in mine) / max(1, calls),
              "draft_share": draft, "verify_share": verify, "other_share": 1 - draft - verify,
              "identical": sum(g.tokens == b.tokens for g, b in zip(mine, bases)) / len(runs)}
    if ":" in name:
        result |= {"first_token_seconds": statistics.median(g.first_token_seconds for g in mine)}
        result |= {f"{figure}_per_token": sum(getattr(g.figures, figure) for g in mine) / (new_tokens - unverified)
                   for figure in ("round_trips", "bytes_up", "bytes_down")}
    return result | (aftermath(model, mine, bases) if unverified else {})


@torch.inference_mode()
def aftermath(model: Llama, mine: list[Generation], bases: list[Generation]) -> dict:
    """Of the text written without the server: the share that the target wrote too, and the target's perplexity of it."""
    unverified, agreed, nll = 0, 0, 0.0
    for g, base in zip(mine, bases):
        alone = [i for i, origin in enumerate(g.origins) if origin == Origin.UNVERIFIED]
        tokens = torch.tensor(g.prompt + g.tokens, device=model.device)
        places = torch.tensor(alone, dtype=torch.long, device=tokens.device) + len(g.prompt)
        unverified += len(alone)
        agreed += sum(g.tokens[i:i + 1] == base.tokens[i:i + 1] for i in alone)
        logits = model(tokens[None, :-1])[0, places - 1].float()  # (len(alone), V)
        nll += F.cross_entropy(logits, tokens[places], reduction="sum").item()
    return {"unverified_tokens": unverified, "agreement": agreed / unverified, "perplexity": math.exp(nll / unverified)}


@torch.inference_mode()
def pass_costs(model: Llama, past: int = 256, repeats: int = 9) -> dict[int, float]:
    """Seconds of a pass over 1 to 16 tokens behind `past` others: medians, taken in turn."""
    seconds = {count: [] for count in (1, 2, 3, 4, 6, 8, 12, 16)}
    past = min(past, model.config.max_position_embeddings - max(seconds))
    cache = model.new_cache(past + max(seconds))
    for _ in range(repeats):
        for count, times in seconds.items():
            cache.length = past
            start = time.perf_counter()
            model(torch.zeros(1, count, dtype=torch.long, device=model.device), cache).argmax(-1).tolist()
            times.append(time.perf_counter() - start)
    return {count: statistics.median(times) for count, times in seconds.items()}


def reading_seconds(model: Llama, repeats: int = 9) -> float:
    """Seconds to read the weights that a pass multiplies with: of a sum over as many bytes."""
    count = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, Linear))
    size, times = count * model.norm.weight.dtype.itemsize, []
    part = torch.ones(min(size, 2**30) // 4, device=model.device)  # a GB at most, which no cache holds: all may not fit again
    for _ in range(repeats):
        start = time.perf_counter()
        part.sum().item()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * size / part.nbytes


def print_table(rows: list[dict]) -> None:
    print("category         method            tokens/s speed-up   (quartiles) acceptance  calls tokens draft verify rest "
          "identical")
    for r in rows:
        low, high = r["speedup_quartiles"]
        print(f"{r['category']:<16} {r['method']:<17} {r['tokens_per_second']:>8.1f} {r['speedup']:>8.2f} "
              f"({low:>5.2f}-{high:>5.2f}) {r['acceptance_length']:>10.2f} {r['target_calls']:>6} {r['new_tokens']:>6} "
              f"{r['draft_share']:>5.0%} {r['verify_share']:>6.0%} {r['other_share']:>4.0%} {r['identical']:>9.0%}")
    if any("round_trips_per_token" in r for r in rows):
        print("\ncategory         method            first token  per token: round trips  bytes up  bytes down  "
              "unverified  agreement  perplexity")
    for r in rows:
        if "round_trips_per_token" in r:
            print(f"{r['category']:<16} {r['method']:<17} {r['first_token_seconds']:>9.2f} s "
                  f"{r['round_trips_per_token']:>23.2f} {r['bytes_up_per_token']:>9.0f} "
                  f"{r['bytes_down_per_token']:>11.0f}", end="")
            print(f" {r['unverified_tokens']:>11} {r['agreement']:>10.0%} {r['perplexity']:>11.1f}" if "agreement" in r else "")


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------

COLOURS = {Origin.DRAFT: "\033[32m", Origin.UNVERIFIED: "\033[33m"}  # green, yellow
RESET = "\033[0m"
LINK = ("latency", "jitter", "bandwidth", "loss")
OWN_SERVER = ("", 0)


def address(text: str) -> tuple[str, int]:
    """"HOST:PORT" -> host and port."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def add_remote_arguments(parser: Parser) -> None:
    parser.add_argument("--remote", nargs="?", const=OWN_SERVER, type=address, metavar="HOST:PORT",
                        help="the target is on a server: there or, by default, in a process that starts and ends with this one")
    parser.add_argument("--network", choices=PROFILES, help="simulate this on the way to the server")
    parser.add_argument("--latency", type=duration, help="one way, like 21ms; this and the next three override --network")
    parser.add_argument("--jitter", type=duration, help="standard deviation of the latency, like 19ms")
    parser.add_argument("--bandwidth", type=rate, help="each way, like 20Mbit")
    parser.add_argument("--loss", type=share, help="of packets, like 0.1%%")
    parser.add_argument("--disconnect-after", type=natural, metavar="N", help="the network goes down when N tokens have come")
    parser.add_argument("--disconnect-for", type=duration, metavar="TIME", help="and is back after so long (default: never)")
    parser.add_argument("--float16", action="store_true", help="the memory crosses in 16 bits (default: in 8)")


def check_arguments(parser: Parser, args: argparse.Namespace) -> None:
    """Raises InputError for flags that contradict each other or would have no effect."""
    if args.bench and args.no_speculation:
        raise InputError("--bench compares with and without speculation; leave out --no-speculation")
    if args.bench and args.show:
        raise InputError("--show colours a text and --bench prints none; leave out one of them")
    if args.json and args.show:
        raise InputError("--show colours a text and --json prints none; leave out one of them")
    if args.serve and (args.remote or args.no_speculation):
        raise InputError("--serve is the other half of --remote, for a drafter; leave out --remote and --no-speculation")
    if args.serve:
        for name in ("max_new_tokens", "temperature", "top_p", "json", "show", "tree", "lookup", "draft_length", "breadth",
                     "nodes"):
            if getattr(args, name) != parser.get_default(name):
                raise InputError(f"--{name.replace('_', '-')} is the client's to say; leave it out of --serve")
    if args.until_eof and not args.serve:
        raise InputError("--until-eof is for --serve")
    if args.remote and args.compile:
        raise InputError("--compile is for the process that has the target; leave it out, or start the server with it")
    for name in ("network", *LINK, "disconnect_after", "disconnect_for", "float16"):
        value = getattr(args, name)
        if args.remote is None and value is not None and value is not False:
            raise InputError(f"--{name.replace('_', '-')} is about the way to a server; add --remote")
    if args.bench and args.disconnect_after:
        raise InputError("--bench --remote cuts the network on its own; leave out --disconnect-after")
    if args.bench and (args.tree or args.lookup):
        raise InputError("--bench measures chains and trees, without lookup and with it; leave out --tree and --lookup")
    if args.disconnect_for is not None and not args.disconnect_after:
        raise InputError("--disconnect-for: say with --disconnect-after when it begins")
    if args.draft_length and (args.breadth or args.nodes) and not (args.tree or args.bench):
        raise InputError("--draft-length makes chains; for a tree with --breadth and --nodes add --tree")
    if args.no_speculation and (args.tree or args.lookup or args.draft_length or args.breadth or args.nodes):
        raise InputError("--no-speculation drafts nothing; leave out what describes the drafts")
    if args.no_speculation and args.float16:
        raise InputError("--float16 is about the drafter's memory, and --no-speculation needs none; leave out one of them")


def networks(args: argparse.Namespace, host: str, port: int, secret: str) -> dict[str, Remote]:
    """The server behind the network that the command line describes; to be measured, by default behind each profile."""
    override = {name: getattr(args, name) for name in LINK if getattr(args, name) is not None}
    outage = math.inf if args.disconnect_for is None else args.disconnect_for
    outages = (Outage(tokens=args.disconnect_after, seconds=outage),) if args.disconnect_after else ()
    names = [args.network] if args.network or override or not args.bench else PROFILES
    return {name or "link": Remote(host, port, secret, replace(PROFILES.get(name, Link()), **override), outages, args.float16)
            for name in names}


def parse() -> argparse.Namespace:
    parser = Parser(description="Generate with a drafter: the target's own text, sooner.")
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--prompt")
    work.add_argument("--bench", type=Path, nargs="?", const=PROMPTS, metavar="FILE",
                      help="measure all methods on a .jsonl file of prompts (default: a few of our own)")
    work.add_argument("--serve", type=address, metavar="HOST:PORT", help="be the server for --remote, until SIGTERM")
    parser.add_argument("--until-eof", action="store_true", help="with --serve: end when stdin does, too")
    add_model_arguments(parser)
    parser.add_argument("--drafter", metavar="DIR", help="default: the one shipped for the default model")
    size = number(int, 1, MOST_DRAFTS)
    parser.add_argument("--draft-length", type=size, metavar="K",
                        help="draft exactly this far, a chain unless --tree (default: as far as pays, by measured costs)")
    parser.add_argument("--tree", action="store_true",
                        help="draft trees (default: trees or chains, whichever are faster; with --remote trees)")
    parser.add_argument("--breadth", type=size, help=f"leaves expanded together (default: {TREE.breadth})")
    parser.add_argument("--nodes", type=size, help=f"tokens in a tree (default: {TREE.nodes}, remote {REMOTE_TREE.nodes})")
    parser.add_argument("--lookup", action="store_true",
                        help="ask the drafter only where the last three tokens are new, else draft what followed them before")
    parser.add_argument("--no-speculation", action="store_true", help="the target alone")
    parser.add_argument("--show", action="store_true", help="colour accepted drafts green, unverified text yellow")
    add_remote_arguments(parser)
    add_generation_arguments(parser)
    parser.set_defaults(seed=None)  # 0, but then drafts may follow measured times: see without_clock
    args = parser.parse_args()
    check_arguments(parser, args)
    return args


def shapes_of(args: argparse.Namespace) -> tuple[Shape, Shape]:
    """A chain and a tree, as the command line wants them."""
    chain, tree = (REMOTE_CHAIN, REMOTE_TREE) if args.remote else (CHAIN, TREE)
    depth = args.draft_length or chain.depth
    return (replace(chain, depth=depth),
            replace(tree, depth=depth, breadth=args.breadth or tree.breadth, nodes=args.nodes or tree.nodes))


def settings_of(args: argparse.Namespace, tokenizer: Tokenizer) -> Settings:
    chain, tree = shapes_of(args)
    shapes = (tree,) if args.tree else (chain,) if args.draft_length else (tree,) if args.remote else (chain, tree)
    return Settings(args.max_new_tokens, args.temperature, args.top_p, shapes, args.draft_length is None,
                    frozenset(tokenizer.stop_ids), LOOKUP_SIZES if args.lookup else ())


def without_clock(settings: Settings) -> Settings:
    """Drafts that end by the drafter's confidence alone: else what the same seed says would depend on measured times."""
    if not settings.adaptive:
        return settings
    return replace(settings, adaptive=False, shapes=(replace(settings.shapes[0], level_threshold=CONFIDENCE),))


def run_bench(args: argparse.Namespace, model: Llama, drafter: Drafter, tokenizer: Tokenizer,
              prompts: list[tuple[str, list[str]]], remotes: dict[str, Remote]) -> None:
    """The benchmark; with the target here, or on a server behind some networks."""
    settings = settings_of(args, tokenizer)
    seed = args.seed or 0
    methods = (remote_methods(model, drafter, seed, settings.shapes, remotes, args.max_new_tokens) if remotes else
               local_methods(model, drafter, seed, *shapes_of(args)))
    if args.compile:
        warm_up(model, drafter)
    rows = bench(model, methods, tokenizer, prompts, settings)
    costs, reading = ({}, None) if remotes else (pass_costs(model), reading_seconds(model))
    if args.json:
        print(json.dumps({"rows": rows, "pass_seconds": costs, "reading_seconds": reading}))
        return
    print_table(rows)
    if costs:
        print("\ntokens in a pass " + " ".join(f"{count:>6}" for count in costs))
        print("milliseconds     " + " ".join(f"{1000 * seconds:>6.1f}" for seconds in costs.values()))
        print("of one token's   " + " ".join(f"{seconds / costs[1]:>6.2f}" for seconds in costs.values()))
        print(f"a sum over as many bytes as the weights: {1000 * reading:.1f} ms, {reading / costs[1]:.2f} of one token's pass")


def run_prompt(args: argparse.Namespace, model: Llama, drafter: Drafter | None, tokenizer: Tokenizer,
               remote: Remote | None) -> None:
    """One answer, as it comes, and what it cost."""
    prompt = tokenizer.chat([{"role": "user", "content": args.prompt}])
    count, stream = answer_length(model, prompt, args.max_new_tokens), tokenizer.stream()

    def emit(token: int, origin: Origin) -> None:
        text = stream(token)
        if not args.json:
            coloured = args.show and text and origin != Origin.TARGET
            print(f"{COLOURS[origin]}{text}{RESET}" if coloured else text, end="", flush=True)

    settings = replace(settings_of(args, tokenizer), max_new_tokens=count)
    if args.compile:
        warm_up(model, drafter, capacity_of(prompt, settings))
    if args.temperature > 0 and args.seed is not None and remote is None:
        settings = without_clock(settings)
    result = answer(model, drafter, prompt, settings, args.seed or 0, emit, remote=remote)
    f = result.figures
    figures = {"target_calls": f.target_calls, "acceptance_length": result.acceptance_length(),
               "draft_seconds": f.draft_seconds, "verify_seconds": f.verify_seconds}
    if remote:
        figures |= {name: getattr(f, name) for name in ("bytes_up", "bytes_down", "round_trips", "network_seconds",
                                                        "unverified_tokens")}
        figures |= {"disconnected": f.disconnected != ""}
    report(tokenizer, result.tokens, result.seconds, args.json, **figures)
    if f.unverified_tokens:
        print(f"the server was out of reach ({f.disconnected}): {f.unverified_tokens} of these tokens are the drafter's own",
              file=sys.stderr)


def main() -> None:
    args = parse()
    prompts = read_prompts(args.bench) if args.bench else []
    folder = args.drafter or SHIPPED.get(args.model)
    if folder is None and (not args.no_speculation or args.remote == OWN_SERVER):
        instead = "" if args.no_speculation else ", or add --no-speculation"
        raise InputError(f"no drafter is shipped for {args.model}: name one with --drafter (train.py makes them){instead}")
    if args.remote or args.serve:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0 if args.serve else 128 + signal.SIGTERM))
    if args.remote and not args.bench:  # of the target, what the drafter needs
        N = 0 if args.no_speculation else read_config(Path(folder) / "config.json").get("target_layer_inference", 0)
        model, tokenizer = load_target(args, last=N)
    else:
        model, tokenizer = load_target(args)
    drafter = None if args.no_speculation else load_drafter(folder, model).lighten()
    if args.compile:
        model.capture()
        if drafter:
            drafter.capture()
    else:
        if not args.remote or drafter and (drafter.N > 0 or drafter.vocabulary is None):  # else the drafter runs nothing of it
            model.pack()
        if drafter:
            drafter.pack()
    if args.serve:
        return serve(Server(model, drafter, *args.serve, os.environ.get(SECRET, "")), args.until_eof)
    if args.remote == OWN_SERVER:  # which works on the same cores: more threads than these would wait for each other
        torch.set_num_threads(max(1, torch.get_num_threads() // 4))
    with server_of(args, folder) if args.remote else nullcontext({}) as remotes:
        if args.bench:
            run_bench(args, model, drafter, tokenizer, prompts, remotes)
        else:
            run_prompt(args, model, drafter, tokenizer, next(iter(remotes.values()), None))


if __name__ == "__main__":
    run_command(main)
