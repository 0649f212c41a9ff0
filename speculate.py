"""Speculative decoding: draft, verify, accept (paper, algorithm 1).

The drafter proposes K tokens, a chain or a tree of them; the target verifies all in one pass and keeps a path from the
root. The text is distributed exactly as if the target had written it alone (Leviathan et al. 2023; Chen et al. 2023).
With p the target's and q the drafter's distribution of the token at hand:

    accept x ~ q with probability min(1, p(x) / q(x)); if it is rejected, p becomes norm(max(p - q, 0)) and q loses x;
    then try the next sibling against these. When none is left, or after the last accepted token, draw from p as it is.

For a chain, which has no siblings, that is the two papers' algorithm; for a tree, SpecInfer's (Miao et al. 2024) with
siblings drawn without replacement. At temperature 0 it says: accept x if it is the target's argmax.

Shapes: T tokens, K drafts, E hidden, V vocabulary.
"""
from __future__ import annotations

import json
import math
import os
import signal
import sys
from argparse import Namespace
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from random import Random
from statistics import fmean, median
from threading import Thread
from time import monotonic, perf_counter, sleep
from typing import Callable, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from llama import (DEFAULT_MODEL, Batch, GenerationConfig, InputError, Llama, Parser, Sampling, Tokenizer,
                   add_generation_arguments, add_model_arguments, answer_length, generate, input_errors, load_target,
                   number, positive_int, probabilities, read_json, report, run_command, sample, sample_next)
from moa import (PROMPT_CHUNK, Q_TOKENS, BatchDraftState, Draft, Drafter, DraftState, Memory, TreeConfig, ancestor_mask,
                 chain_parents, dequantize_probabilities, load_drafter, quantize_probabilities, start_drafting)
from netsim import (PROFILES, Channel, ConnectionLost, Link, MessageServer, Network, add_link_arguments, address,
                    duration, links_of)

SHIPPED = {DEFAULT_MODEL: Path(__file__).parent / "weights" / DEFAULT_MODEL}
PROMPTS = Path(__file__).parent / "tests" / "prompts.jsonl"
# Tuned on 48 prompts of Spec-Bench, not on PROMPTS. Sizes from the command line go without limits of confidence.
TREE = TreeConfig(depth=6, top_k=3, total_tokens=8, min_confidence=0.15, min_probability=0.04)
CHAIN = TreeConfig(depth=6, min_confidence=0.2)
REMOTE_TREE = TreeConfig(depth=16, top_k=3, total_tokens=32, min_confidence=0.1, min_probability=0.02)
BATCH_DRAFTS = 3

@dataclass
class VerifyResult:
    """The target's answer to a draft. From a target that is out of reach: the drafter's own text, and no memory."""

    accepted: list[int]
    token: int  # after them, the target's own
    memory: Memory | None  # of what is now verified
    drafted: int = 0  # tokens that it was asked to verify
    seconds: float = 0.0  # that this took


# --- Acceptance ---
def accept_greedy(choices: list[int], draft: Draft) -> tuple[list[int], int]:
    """The accepted nodes, and the token after them. choices (K + 1): the target's argmax after draft.token and after
    each draft."""
    child, path, node = draft.children(), [], -1
    while (node, choices[node + 1]) in child:
        node = child[node, choices[node + 1]]
        path.append(node)
    return path, choices[node + 1]

def rejection_sample(p: Tensor, draft: Draft, generator: torch.Generator) -> tuple[list[int], int]:
    """The accepted nodes, and the token after them: by the rule above distributed as p (K + 1, V), whatever q is. A
    draft that was not drawn (by lookup) counts as drawn with q(x) = 1."""
    drawn_from = {} if draft.q is None else dict(zip(sorted(set(draft.parents)), draft.q))  # parent: q (V)
    path, node = [], -1
    while True:
        p_left, q_left = p[node + 1], drawn_from.get(node)  # (V)
        for child in [i for i, parent in enumerate(draft.parents) if parent == node]:
            x = draft.tokens[child]
            if draft.q is None:
                q_left = torch.zeros_like(p_left)
                q_left[x] = 1.0
            u = torch.rand((), device=p.device, generator=generator)
            if u * q_left[x] < p_left[x]:  # with probability min(1, p(x) / q(x))
                break
            residual = normalize((p_left - q_left).clamp(min=0))  # all 0 where p = q
            p_left = torch.where(residual.any(), residual, p_left)
            q_left = q_left.clone()
            q_left[x] = 0.0
            q_left = normalize(q_left)
        else:  # no child was accepted
            return path, int(sample(p_left, generator))
        path.append(child)
        node = child

def normalize(p: Tensor) -> Tensor:
    return p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)

def accept_draft(logits: Tensor, draft: Draft, s: Sampling) -> tuple[list[int], int]:
    """The same from the target's logits (K + 1, V)."""
    if s.temperature == 0:
        return accept_greedy(logits.float().argmax(-1).tolist(), draft)
    return rejection_sample(probabilities(logits, s.temperature, s.top_p), draft, s.generator)

class LocalTarget:
    """The target of one conversation, on this machine. LSA and CA's keys and values are computed on its side."""

    def __init__(self, model: Llama, drafter: Drafter | None, capacity: int, sampling: Sampling):
        self.model, self.drafter, self.sampling, self.cache = model, drafter, sampling, model.new_cache(capacity)

    def prefill(self, prompt: list[int]) -> VerifyResult:
        """Read the prompt, or a piece of one."""
        hidden = self.model.hidden(torch.tensor([prompt], device=self.model.device), self.cache)  # (1, T, E)
        token, = sample_next(self.model.head(hidden[:, -1]), [self.sampling])
        return VerifyResult([], token, self.build_memory(prompt, hidden))

    def verify(self, draft: Draft) -> VerifyResult:
        """One pass over a draft; the cache keeps its root and what is accepted."""
        began, start, tokens = perf_counter(), self.cache.length, [draft.token] + draft.tokens
        parents = [-1] + [parent + 1 for parent in draft.parents]
        ancestors = None if parents == chain_parents(len(tokens)) else ancestor_mask(parents)
        ids = torch.tensor([tokens], device=self.model.device)
        hidden = self.model.hidden(ids, self.cache, ancestors)  # (1, K + 1, E)
        path, token = accept_draft(self.model.head(hidden[0]), draft, self.sampling)  # of (K + 1, V)
        kept = [0] + [1 + node for node in path]
        self.cache.keep_path(start, kept)
        memory = self.build_memory([tokens[i] for i in kept], hidden[:, kept])
        return VerifyResult(memory.tokens[1:], token, memory, len(draft.tokens), perf_counter() - began)

    def build_memory(self, tokens: list[int], hidden: Tensor) -> Memory:
        if self.drafter is None:  # lookup needs tokens only
            return Memory(tokens, [], None, None)
        places = list(range(self.cache.length - len(tokens), self.cache.length))
        return self.drafter.build_memory(tokens, self.cache, places, hidden)


# --- The loop ---
def speculate(target: LocalTarget | RemoteTarget, state: DraftState | Lookup, prompt: list[int],
              config: GenerationConfig, tree: TreeConfig) -> Iterator[tuple[list[int], VerifyResult]]:
    """Algorithm 1. Yields each cycle's new tokens: accepted drafts, then the target's own; up to a stop token or
    max_new_tokens."""
    left = config.max_new_tokens
    result = target.prefill(prompt)  # the first token, and the memory of the prompt
    while True:
        tokens = (result.accepted + [result.token])[:left]
        end = next((i + 1 for i, token in enumerate(tokens) if token in config.stop_ids), None)
        yield tokens[:end], result
        left -= len(tokens)
        if left == 0 or end:
            return
        draft = Draft(result.token, [], [])
        if result.memory:  # else the target is out of reach
            state.append_verified(result.memory)  # grow the cross-attention memory
            depth = min(tree.depth, left - 1)  # the target adds a token of its own
            draft = state.draft(result.token, replace(tree, depth=depth))
        result = target.verify(draft)  # accepted tokens, next token, memory of what was accepted

class ChainBatch(Batch):
    """The loop for many conversations at once: a chain of K drafts for each row, and one pass to verify them all."""

    def __init__(self, model: Llama, drafter: Drafter, rows: int, capacity: int, K: int):
        super().__init__(model, rows, capacity + K)
        self.K, self.state = K, BatchDraftState(drafter, capacity + K, rows=rows)
        self.caches += [self.state.self_cache, self.state.cross_cache, self.state.reused_cache]
        for cache in self.caches:
            cache.lengths = []

    def read(self, prompt: list[int]) -> Tensor:
        hidden, row = super().read(prompt), len(self.conversations) - 1
        for cache in self.caches[1:]:
            cache.lengths.append(0)
        self.append_verified(prompt, [row] * len(prompt), list(range(len(prompt))), hidden)
        return hidden

    def append_verified(self, tokens: list[int], rows: list[int], places: list[int], hidden: Tensor) -> None:
        self.state.append_verified(self.state.drafter.build_memory(tokens, self.cache, places, hidden, rows))

    def advance(self) -> list[list[int]]:
        samplings, starts = [c.sampling for c in self.conversations], self.cache.lengths
        left = [c.config.max_new_tokens - len(c.tokens) for c in self.conversations]
        newest, K = [c.tokens[-1] for c in self.conversations], min(self.K, max(left))
        drafts = self.state.draft_rows(newest, K, samplings)
        ids = torch.tensor([[draft.token, *draft.tokens] for draft in drafts], device=self.model.device)  # (B, K + 1)
        hidden, new = self.model.hidden(ids, self.cache), []  # (B, K + 1, E)
        for draft, logits, sampling, room in zip(drafts, self.model.head(hidden), samplings, left):
            path, token = accept_draft(logits, draft, sampling)
            new.append((draft.tokens[:len(path)] + [token])[:room])
        self.cache.lengths = [start + len(tokens) for start, tokens in zip(starts, new)]
        # Each row keeps its newest token of before and accepted drafts, as many as are new.
        rows, steps = zip(*[(row, i) for row, tokens in enumerate(new) for i in range(len(tokens))])
        places = [starts[row] + i for row, i in zip(rows, steps)]
        self.append_verified(ids[rows, steps].tolist(), list(rows), places, hidden[rows, steps][None])
        return new

class Lookup:
    """Prompt lookup (Saxena 2023): a draft is what followed the last few tokens before, else the drafter's, if any."""

    def __init__(self, state: DraftState | None):
        self.state, self.history = state, []
        self.sizes = (3,) if state else (3, 2, 1)  # of last tokens to look for

    def append_verified(self, memory: Memory) -> None:
        self.history += memory.tokens
        if self.state:
            self.state.append_verified(memory)

    def draft(self, token: int, tree: TreeConfig) -> Draft:
        text = self.history + [token]
        for size in self.sizes:
            for i in reversed(range(len(text) - size)):
                if text[i:i + size] == text[-size:]:
                    found = text[i + size:i + size + tree.depth]
                    return Draft(token, found, chain_parents(len(found)))
        return self.state.draft(token, tree) if self.state else Draft(token, [], [])


# --- Client and server: the drafter here, the target there (paper, section 5) ---
#
# The server greets with the hash of its drafter. Then the client asks, with tensors after the +:
#     read {a GenerationConfig} + tokens      the text so far: next token and memory, a reply a piece
#     verify {drafts, parents} + q            what of the draft is accepted, next token and memory
#     generate {a GenerationConfig} + tokens  plain use of an API: the target's own tokens, one a reply

SECRET = "MOA_SECRET"  # an environment variable
MAX_DRAFTS = 64
OFFLINE_TOKENS = 8  # written by the drafter alone between two attempts to reconnect
INITIAL_BACKOFF = 0.5  # seconds between them, at least; doubles, up to 30
Tensors = dict[str, Tensor]
Replies = Iterator[tuple[dict, Tensors]]

def quantize_memory(memory: Memory) -> Tensors:
    """A memory as it crosses the network: int8 (..., 2, D), with a float16 scale (..., 2, 1) for each key and value."""
    tensors = {}
    for name, x in (("cross", memory.cross_kv), ("reused", memory.reused_kv)):
        x = x.float().contiguous().unflatten(-1, (2, -1))
        scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=2**-14).half()
        tensors[name], tensors[name + "_scale"] = (x / scale).round().clamp(-127, 127).to(torch.int8).cpu(), scale.cpu()
    return tensors

def parse_reply(fields: dict, tensors: Tensors, count: int, state: DraftState) -> tuple[int, list[Tensor]]:
    """The next token; cross_kv and reused_kv of `count` tokens. Raises LookupError, RuntimeError or ValueError."""
    c = state.drafter.target.config
    token, memory = check_int(fields["token"], 0, c.vocab_size - 1), []
    cross, reused = state.cross_cache.kv[0, :, :, :count], state.reused_cache.kv[:, :, :, :count]  # for their shapes
    if not state.drafter.config.use_cross_attention:
        cross = cross.new_empty(1, count, c.hidden_size)
    for name, like in (("cross", cross), ("reused", reused)):
        shape = *like.shape[:-1], 2, like.shape[-1] // 2
        x = tensors[name].view(shape).float() * tensors[name + "_scale"].view(*shape[:-1], 1).float()
        if not x.isfinite().all():
            raise ValueError(f"{name} holds NaN")
        memory.append(x.flatten(-2).to(like))
    return token, memory

def text_request(call: str, text: list[int], config: GenerationConfig) -> tuple[dict, Tensors]:
    fields = {"call": call, **vars(config), "stop_ids": sorted(config.stop_ids)}
    return fields, {"tokens": torch.tensor(text, dtype=torch.int32)}

class RemoteTarget:
    """The target of one conversation, on a server, in one of three states:

    connected: a draft goes up, the server's result comes down
    reconnecting: over a new connection the server reads all text so far, also what was written offline
    offline: as long as that fails, the drafter writes a chain alone, unverified
    """

    def __init__(self, channel: Channel, state: DraftState, config: GenerationConfig):
        self.channel, self.state, self.config = channel, state, config
        self.disconnected = ""  # or the reason of the first outage
        self.retry_at, self.backoff = 0.0, INITIAL_BACKOFF  # when to reconnect at the earliest

    def prefill(self, prompt: list[int]) -> VerifyResult:
        """Raises InputError if the server is not there, twice: the drafter needs a memory."""
        self.text, self.end = list(prompt), len(prompt) + self.config.max_new_tokens  # with the answer
        try:
            return self.reconnect()
        except ConnectionLost:
            sleep(self.backoff)
        with input_errors("the server was lost before its first token", ConnectionLost):
            return self.reconnect()

    def verify(self, draft: Draft) -> VerifyResult:
        began = perf_counter()
        try:
            result = self.verify_remote(draft)
        except ConnectionLost as error:
            try:
                result = self.reconnect()  # at once: a server may disconnect an idle client, or restart
            except ConnectionLost:
                self.disconnected = self.disconnected or str(error)
                result = self.draft_offline(draft.token)
        result.seconds = perf_counter() - began
        return result

    def verify_remote(self, draft: Draft) -> VerifyResult:
        """Connected: the server's result. Raises ConnectionLost."""
        def parse(fields: dict, tensors: Tensors) -> tuple:
            accepted, child, node = [], draft.children(), -1
            for token in fields["accepted"]:
                node = child[node, token]
                accepted.append(draft.tokens[node])  # not the reply's own, which may be 9.0
            return *parse_reply(fields, tensors, 1 + len(accepted), self.state), accepted

        q = {}
        if draft.q is not None:  # exact: drafts are drawn from a quantised q
            q["ids"], q["weights"] = (x.cpu() for x in quantize_probabilities(draft.q))
        request = {"call": "verify", "drafts": draft.tokens, "parents": draft.parents}
        return self.result(*next(self.channel.request(request, q, parse)), len(draft.tokens))

    def reconnect(self) -> VerifyResult:
        """A new connection whose prompt is all text so far: the server's next token. Raises ConnectionLost."""
        if monotonic() < self.retry_at:
            raise ConnectionLost("too early")
        try:
            greeting = self.channel.connect()
        finally:
            self.retry_at, self.backoff = monotonic() + self.backoff, min(2 * self.backoff, 30.0)
        if greeting.get("drafter") != self.state.drafter.checkpoint_hash:
            raise InputError("the server has another drafter; start both sides with the same --drafter")
        generator = self.state.sampling.generator
        seed = int(torch.randint(2**31 - 1, (), generator=generator, device=generator.device))  # not that of drafts
        config = replace(self.config, max_new_tokens=self.end - len(self.text), seed=seed)
        pieces = [len(self.text[a:a + PROMPT_CHUNK]) for a in range(0, len(self.text), PROMPT_CHUNK)]
        replies = self.channel.request(*text_request("read", self.text, config),
                                       lambda *reply: parse_reply(*reply, pieces.pop(0), self.state))
        tokens, memories = zip(*replies)
        if pieces:
            self.channel.close()
            raise ConnectionLost("malformed reply: its memory ends early")
        self.retry_at, self.backoff = 0.0, INITIAL_BACKOFF
        memory = [torch.cat(x, dim=-2)[..., self.state.verified[0]:, :] for x in zip(*memories)]
        return self.result(tokens[-1], memory, [])

    def result(self, token: int, memory: list[Tensor], accepted: list[int], drafted: int = 0) -> VerifyResult:
        """Verified is now all text so far, and what is accepted."""
        start = self.state.verified[0]
        tokens = self.text[start:] + accepted
        self.text += accepted + [token]
        memory = Memory(tokens, list(range(start, start + len(tokens))), *memory)
        return VerifyResult(accepted, token, memory, drafted)

    def draft_offline(self, token: int) -> VerifyResult:
        tokens = self.state.draft_unverified(token, min(OFFLINE_TOKENS, self.end - len(self.text)))
        self.text += tokens
        return VerifyResult(tokens[:-1], tokens[-1], None)

def call_api(channel: Channel, prompt: list[int], config: GenerationConfig) -> Iterator[int]:
    """Plain use of an API: the server decodes alone. Raises InputError when it is lost."""
    with input_errors("the answer ends here", ConnectionLost):
        channel.connect()
        yield from channel.request(*text_request("generate", prompt, config),
                                   lambda fields, _: check_int(fields["token"], 0, 2**31))

class TargetSession:
    """The server's side of one client, a session of MessageServer. One worker thread does all models' work in turn:
    PyTorch keeps a pool of threads for each thread that calls it."""

    def __init__(self, model: Llama, drafter: Drafter, worker: ThreadPoolExecutor):
        self.model, self.drafter, self.worker = model, drafter, worker
        self.target: LocalTarget | None = None
        self.token = 0  # which drafts follow
        self.greeting = {"drafter": drafter.checkpoint_hash}

    def answer(self, fields: dict, tensors: Tensors) -> Replies:
        return {"read": self.read, "verify": self.verify, "generate": self.generate}[fields["call"]](fields, tensors)

    def work(self, function: Callable, *arguments):
        def in_turn():
            try:
                with torch.inference_mode():
                    return function(*arguments)
            except (LookupError, TypeError, ValueError) as error:  # a bug of ours, not a malformed request
                raise RuntimeError("the models failed") from error
        return self.worker.submit(in_turn).result()

    def ask_target(self, call: Callable, request) -> tuple[VerifyResult, Tensors]:
        result = call(request)
        self.token = result.token
        return result, quantize_memory(result.memory)

    def parse_text(self, fields: dict, tensors: Tensors) -> tuple[list[int], GenerationConfig]:
        """A text and how to go on after it, within the context."""
        context = self.model.config.max_position_embeddings
        tokens = check_ids(tensors["tokens"], self.model.config.vocab_size)
        count = check_int(fields["max_new_tokens"], 1, context - check_int(len(tokens), 1, context))
        temperature, top_p = float(fields["temperature"]), float(fields["top_p"])
        if not 0 <= temperature <= 100 or not 0 < top_p <= 1:
            raise ValueError(f"invalid sampling: temperature {temperature}, top-p {top_p}")
        seed = check_int(fields["seed"], 0, 2**63 - 1)
        return tokens, GenerationConfig(count, temperature, top_p, seed, frozenset(fields["stop_ids"]))

    def read(self, fields: dict, tensors: Tensors) -> Replies:
        """The text so far. Its memory goes back in pieces, while the next is worked on."""
        tokens, config = self.parse_text(fields, tensors)
        capacity = len(tokens) + config.max_new_tokens + 1 + MAX_DRAFTS
        self.target = LocalTarget(self.model, self.drafter, capacity, config.sampling(self.model.device))
        for a in range(0, len(tokens), PROMPT_CHUNK):
            result, memory = self.work(self.ask_target, self.target.prefill, tokens[a:a + PROMPT_CHUNK])
            yield {"token": result.token, "more": a + PROMPT_CHUNK < len(tokens)}, memory

    def verify(self, fields: dict, tensors: Tensors) -> Replies:
        vocab_size, q = self.model.config.vocab_size, None
        drafts = [check_int(token, 0, vocab_size - 1) for token in fields["drafts"]]
        parents = [check_int(parent, -1, i - 1) for i, parent in enumerate(fields["parents"])]
        if self.target is None or len(parents) != check_int(len(drafts), 0, MAX_DRAFTS):
            raise ValueError("drafts must follow a read, and each have a parent")
        if self.target.sampling.temperature > 0 and "weights" in tensors:
            ids, weights, shape = tensors["ids"], tensors["weights"], (len(set(parents)), min(Q_TOKENS, vocab_size))
            check_ids(ids.flatten(), vocab_size)
            if {ids.shape, weights.shape} != {shape} or weights.dtype != torch.uint8 or not weights.sum(-1).all():
                raise ValueError("q does not fit the drafts")
            q = dequantize_probabilities(ids, weights, vocab_size).to(self.model.device)
        depth, cache = int(ancestor_mask(parents).sum(-1).max()) if drafts else 0, self.target.cache
        check_int(cache.length + 1 + len(drafts), 0, cache.kv.shape[3])
        check_int(cache.length + 1 + depth, 0, self.model.config.max_position_embeddings)
        result, memory = self.work(self.ask_target, self.target.verify, Draft(self.token, drafts, parents, q))
        yield {"accepted": result.accepted, "token": result.token}, memory

    def generate(self, fields: dict, tensors: Tensors) -> Replies:
        tokens, config = self.parse_text(fields, tensors)
        stream, left, more = generate(self.model, tokens, config), config.max_new_tokens, True
        while more:
            token, left = self.work(next, stream), left - 1
            more = left > 0 and token not in config.stop_ids
            yield {"token": token, "more": more}, {}

def check_int(value: object, low: int, high: int) -> int:
    """The value, an int within [low, high]. Raises ValueError."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"invalid value {value!r:.40}: expected an int from {low} to {high}")
    return value

def check_ids(tensor: Tensor, end: int) -> list[int]:
    """The values of an int32 vector, within [0, end). Raises ValueError."""
    if tensor.dtype != torch.int32 or tensor.dim() != 1:
        raise ValueError("expected an int32 vector")
    return [check_int(value, 0, end - 1) for value in tensor.tolist()]

def serve(args: Namespace, announce: Callable) -> None:
    """Serve until SIGTERM. `announce` is told the address."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    model, drafters, _ = load_models(args)
    with ThreadPoolExecutor(1) as worker:
        with input_errors("cannot serve at {}:{}".format(*args.serve), OSError, ValueError):
            new_session = partial(TargetSession, model, next(iter(drafters.values())), worker)
            server = MessageServer(args.serve, os.environ.get(SECRET, ""), new_session)
        with server:
            announce(server.server_address)
            server.serve_forever()

def serve_parent(args: Namespace, pipe) -> None:
    """Serve until the parent ends, however it ends."""
    def end_with_parent() -> None:
        parent_process().join()
        os._exit(0)

    Thread(target=end_with_parent, daemon=True).start()
    run_command(lambda: serve(args, pipe.send))

def start_server(args: Namespace) -> tuple[str, int]:
    """A server in a process of our own: its address."""
    os.environ.setdefault(SECRET, os.urandom(16).hex())
    torch.set_num_threads(max(1, torch.get_num_threads() // 4))  # the server needs cores too
    context = get_context("spawn")
    pipe, its_pipe = context.Pipe()
    its_args = Namespace(**vars(args) | {"serve": ("127.0.0.1", 0), "remote": None})
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the server inherits
    context.Process(target=serve_parent, args=(its_args, its_pipe), daemon=True).start()  # terminated at exit
    signal.signal(signal.SIGINT, on_interrupt)
    its_pipe.close()
    with input_errors("the server did not start", EOFError):
        return pipe.recv()


# --- One generation, by any method ---
class Origin(Enum):
    """Whose a token is, and how --show prints it."""

    TARGET = "{}"
    DRAFT = "\033[32m{}\033[0m"  # accepted
    UNVERIFIED = "\033[33m{}\033[0m"  # yellow

@dataclass
class Generation:
    """One answer, and what it cost."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    seconds: float = 0.0
    stats: Counter = field(default_factory=lambda: Counter(
        target_calls=0, drafted=0, draft_seconds=0.0, verify_seconds=0.0))
    disconnected: str = ""  # or why the server was out of reach

    def record(self, tokens: list[int], result: VerifyResult, cycle_seconds: float) -> None:
        """Add a cycle of the loop. The first, the prompt's, does not count."""
        origins = [Origin.DRAFT] * len(result.accepted) + [Origin.TARGET]
        if result.memory is None:
            origins = [Origin.UNVERIFIED] * len(tokens)
        if self.tokens:
            self.stats.update(target_calls=result.memory is not None, drafted=result.drafted,
                              draft_seconds=cycle_seconds - result.seconds, verify_seconds=result.seconds)
        self.tokens += tokens
        self.origins += origins[:len(tokens)]

    def unverified(self) -> int:
        return self.origins.count(Origin.UNVERIFIED)

    def acceptance_length(self) -> float:
        return (len(self.tokens) - 1 - self.unverified()) / max(1, self.stats["target_calls"])

@torch.inference_mode()
def answer(model: Llama, drafter: Drafter | None, prompt: list[int], config: GenerationConfig,
           tree: TreeConfig | None = TREE, lookup: bool = False, channel: Channel | None = None,
           emit=lambda token, origin: None) -> Generation:
    """One answer to a prompt; `emit(token, origin)` sees each token as it comes. tree None: by the target alone; else
    with drafts, without a drafter by lookup. channel: to a server with the target, of which `model` is then a part.
    Raises InputError if it was never there."""
    g, start, target = Generation(prompt), perf_counter(), None
    if tree is None:
        stream = call_api(channel, prompt, config) if channel else generate(model, prompt, config)
        cycles = (([token], VerifyResult([], token, Memory([], [], None, None))) for token in stream)
    else:
        drafts = max(tree.total_tokens, tree.depth * tree.top_k, OFFLINE_TOKENS)
        capacity, sampling = len(prompt) + config.max_new_tokens + 1 + drafts, config.sampling(model.device)
        state = start_drafting(drafter, capacity, sampling, channel is not None) if drafter else None
        target = RemoteTarget(channel, state, config) if channel else LocalTarget(model, drafter, capacity, sampling)
        cycles = speculate(target, Lookup(state) if lookup else state, prompt, config, tree)
    since = start
    for tokens, result in cycles:
        g.record(tokens, result, perf_counter() - since)
        if channel:
            channel.network.count_tokens(len(g.tokens), monotonic())
        for token, origin in zip(tokens, g.origins[-len(tokens):]):
            emit(token, origin)
        since = perf_counter()
    g.seconds = since - start
    if tree is None:
        g.stats["verify_seconds"], g.stats["draft_seconds"] = g.seconds, 0.0
    if channel:
        channel.close()
        for name in ("bytes_up", "bytes_down", "round_trips", "network_seconds"):
            g.stats[name] = getattr(channel, name)
        g.disconnected = getattr(target, "disconnected", "")
    return g


# --- The benchmark: a method makes a Generation of a prompt and a config ---
Prompts = list[tuple[str, list[str]]]

def read_prompts(path: Path) -> Prompts:
    """(category, turns) of each line. Raises InputError."""
    prompts = []
    with input_errors(f"{path}: cannot be read", OSError, UnicodeDecodeError):
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        expected = f'{path}, line {i}: expected {{"prompt": text}} or {{"category": name, "turns": [text, ...]}}'
        with input_errors(expected, ValueError, LookupError, TypeError, RecursionError):
            record = json.loads(line)
            turns = [record["prompt"]] if "prompt" in record else record["turns"]
            if not isinstance(turns, list) or not turns:
                raise ValueError
            "".join(turns).encode()  # raises for what is not text
            prompts.append((str(record.get("category") or "all"), turns))
    if not prompts:
        raise InputError(f"{path}: no prompts")
    return prompts

def local_methods(alone: Llama, model: Llama, drafters: dict[str, Drafter], chain: TreeConfig,
                  tree: TreeConfig) -> dict[str, Callable]:
    """What is measured on one machine: for several drafters, chains and trees of each."""
    methods = {"target": partial(answer, alone, None, tree=None)}
    for name, drafter in drafters.items():
        suffix, ours = f" {name}" if len(drafters) > 1 else "", partial(answer, model, drafter)
        methods |= {"chain" + suffix: partial(ours, tree=chain), "tree" + suffix: partial(ours, tree=tree)}
    if len(drafters) == 1:
        methods |= {"lookup": partial(answer, model, None, tree=chain, lookup=True),
                    "tree+lookup": partial(ours, tree=tree, lookup=True)}
    return methods

def remote_methods(model: Llama, drafter: Drafter, tree: TreeConfig, links: dict[str, Link],
                   channel: Callable[..., Channel]) -> dict[str, Callable]:
    """What is measured on each network. "disconnected": it goes down after a quarter of the tokens."""
    def run(link, tree, lookup, outage, prompt, config) -> Generation:
        outage_after = config.max_new_tokens // 4 if outage else math.inf
        seed = config.seed + sum(prompt)  # other delays for another prompt, the same for all methods
        return answer(model, drafter, prompt, config, tree, lookup, channel(link, seed, outage_after))

    kinds = {"api": (None, False, False), "remote": (tree, False, False), "remote+lookup": (tree, True, False),
             "disconnected": (tree, False, True)}
    return {f"{kind}:{name}": partial(run, link, *how) for name, link in links.items() for kind, how in kinds.items()}

def bench(model: Llama, methods: dict[str, Callable], tokenizer: Tokenizer, prompts: Prompts,
          config: GenerationConfig) -> list[dict]:
    """Every prompt by every method, in turn, after a warm-up. Rows by category, then all."""
    runs, base = {}, next(iter(methods))  # by category, for each turn: method: Generation
    for index, (category, turns) in enumerate(tqdm(prompts[:1] + prompts)):
        messages = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            prompt, results = tokenizer.chat(messages), {}
            try:
                count = answer_length(model, prompt, config.max_new_tokens)
            except InputError as error:
                tqdm.write(f"{turn[:40]!r} is left out: {error}", file=sys.stderr)
                break
            for name in Random(index).sample(list(methods), len(methods)):
                results[name] = methods[name](prompt, replace(config, max_new_tokens=count))
            messages.append({"role": "assistant", "content": tokenizer.decode(results[base].tokens)})
            if index > 0:  # the first was the warm-up
                runs.setdefault(category, []).append(results)
    if not runs:
        raise InputError("no prompt fits the model's context")
    runs["overall"] = [results for category in runs.values() for results in category]
    return [summarize(model, category, name, results) for category, results in runs.items() for name in methods]

def summarize(model: Llama, category: str, name: str, runs: list[dict[str, Generation]]) -> dict:
    """A method's totals over a category, and quartiles over its turns."""
    def rate(answers: list[Generation]) -> float:
        return sum(len(g.tokens) for g in answers) / sum(g.seconds for g in answers)

    base = next(b for b in ("api:" + name.partition(":")[2], "target") if b in runs[0])  # on the same network, or here
    ours, bases = [results[name] for results in runs], [results[base] for results in runs]
    total = sum((g.stats for g in ours), Counter())
    new_tokens, seconds = sum(len(g.tokens) for g in ours), sum(g.seconds for g in ours)
    verified, calls = new_tokens - sum(g.unverified() for g in ours), max(1, total["target_calls"])
    speedups = torch.tensor([rate([g]) / rate([b]) for g, b in zip(ours, bases)])
    row = {"category": category, "method": name, "tokens_per_second": rate(ours), "speedup": rate(ours) / rate(bases),
           "speedup_quartiles": speedups.quantile(torch.tensor([0.25, 0.75])).tolist(),
           "acceptance_length": (verified - len(ours)) / calls, "target_calls": total["target_calls"],
           "new_tokens": new_tokens, "drafted_per_call": total["drafted"] / calls,
           "draft_share": total["draft_seconds"] / seconds,
           "identical": sum(g.tokens == b.tokens for g, b in zip(ours, bases)) / len(runs)}
    if base != "target":
        row |= {f"{key}_per_token": total[key] / verified for key in ("round_trips", "bytes_up", "bytes_down")}
    return row | (offline_quality(model, ours, bases) if verified < new_tokens else {})

@torch.inference_mode()
def offline_quality(model: Llama, ours: list[Generation], bases: list[Generation]) -> dict:
    """Of the text written offline: the share that the target has there, its perplexity."""
    agreed, nll = [], []
    for g, base in zip(ours, bases):
        ids = torch.tensor([g.prompt + g.tokens[:-1]], device=model.device)
        log_p = model(ids)[0, len(g.prompt) - 1:].float().log_softmax(-1)  # (T, V)
        alone = [i for i, origin in enumerate(g.origins) if origin == Origin.UNVERIFIED]
        agreed += [g.tokens[i:i + 1] == base.tokens[i:i + 1] for i in alone]
        nll += [-log_p[i, g.tokens[i]].item() for i in alone]
    return {"unverified_tokens": len(nll), "agreement": fmean(agreed), "perplexity": math.exp(fmean(nll))}

@torch.inference_mode()
def bench_batch(model: Llama, drafter: Drafter, tokenizer: Tokenizer, prompts: Prompts, config: GenerationConfig,
                batches: list[int], K: int) -> list[dict]:
    """All first turns by the target alone and by chains of K, so many at a time."""
    requests = [(index, tokenizer.chat([{"role": "user", "content": turns[0]}]), config)
                for index, (_, turns) in enumerate(prompts)]
    if not drafter.config.use_cross_attention:
        raise InputError("--batch needs a drafter with CA")
    capacity = max(len(prompt) for _, prompt, _ in requests) + config.max_new_tokens
    if capacity > model.config.max_position_embeddings:
        raise InputError(f"a prompt with its answer needs a context of {capacity} tokens")
    alone = [list(generate(model, prompt, config)) for _, prompt, _ in requests]
    rows = []
    for size in tqdm(batches):
        rates = []
        for name, batch in (("target", Batch(model, size, capacity)),
                            ("chain", ChainBatch(model, drafter, size, capacity, K))):
            waiting, start = iter(requests), perf_counter()
            ended = list(batch.run(lambda: next(waiting, None)))
            count, calls = sum(len(c.tokens) for c in ended), sum(c.target_calls for c in ended)
            rates.append(count / (perf_counter() - start))
            rows.append({"category": "overall", "method": name, "batch": size, "tokens_per_second": rates[-1],
                         "speedup": rates[-1] / rates[0], "acceptance_length": (count - len(ended)) / max(1, calls),
                         "identical": sum(c.tokens == alone[c.key] for c in ended) / len(ended)})
    return rows

def print_table(rows: list[dict]) -> None:
    left_out = ("category", "method", "speedup_quartiles", "target_calls", "new_tokens", "drafted_per_call")
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in left_out]
    width = max(len(row["method"]) for row in rows)
    print(f"{'category':<14} {'method':<{width}}", *columns)
    for row in rows:
        print(f"{row['category']:<14} {row['method']:<{width}}",
              *(f"{row[key]:{len(key)}.2f}" if key in row else " " * len(key) for key in columns))

def faster_alone(args: Namespace, packed: Llama) -> Llama:
    """The target as it decodes fastest by itself: packed or, on some CPUs, not."""
    def seconds(model: Llama) -> float:
        times = [perf_counter() for _ in generate(model, [0], GenerationConfig(17))]
        return median(b - a for a, b in zip(times, times[1:]))

    return packed if packed.head.packed is None else min((packed, load_target(args)[0]), key=seconds)


# --- Command line ---
OWN_SERVER = ("", 0)

def parse_arguments() -> Namespace:
    parser = Parser(description="Generate with a drafter: the target's own text, sooner.")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--prompt")
    task.add_argument("--bench", type=Path, nargs="?", const=PROMPTS, metavar="FILE",
                      help="measure all methods on the prompts of a .jsonl file (default: ours)")
    task.add_argument("--serve", type=address, metavar="HOST:PORT", help="be the server for --remote, until SIGTERM")
    parser.add_argument("--batch", type=positive_int, nargs="+", metavar="ROWS",
                        help="with --bench: so many conversations at a time")
    add_model_arguments(parser)
    parser.add_argument("--drafter", action="append", metavar="DIR",
                        help="default: the shipped one; with --bench, any number")
    parser.add_argument("--draft-length", type=number(int, 1, MAX_DRAFTS), metavar="K",
                        help="draft chains of K tokens instead of trees")
    for name, least in (("depth", 1), ("top_k", 2), ("total_tokens", 1)):
        parser.add_argument("--" + name.replace("_", "-"), type=number(int, least, MAX_DRAFTS),
                            help=f"of a tree (default: {vars(TREE)[name]}, remote {vars(REMOTE_TREE)[name]})")
    for flag, text in (("--lookup", "draft what followed the last three tokens before, else by the drafter"),
                       ("--no-speculation", "the target alone"),
                       ("--show", "colour accepted drafts green, unverified text yellow")):
        parser.add_argument(flag, action="store_true", help=text)
    add_generation_arguments(parser)
    remote = parser.add_argument_group("the target on a server")
    remote.add_argument("--remote", nargs="?", const=OWN_SERVER, type=address, metavar="HOST:PORT",
                        help="there or in a process of our own")
    add_link_arguments(remote)
    remote.add_argument("--timeout", type=duration, help="for a reply (default: ten times the slowest)")
    remote.add_argument("--disconnect-after", type=positive_int, default=math.inf, metavar="N",
                        help="the network goes down when N tokens have come")
    remote.add_argument("--disconnect-for", type=duration, default=math.inf, metavar="TIME",
                        help="and is back after so long (default: never)")
    args = parser.parse_args()
    sizes = {name: value for name, value in vars(args).items() if name in vars(TREE) and value}
    wrong = {"a simulated network needs --remote":
             (links_of(args) or args.disconnect_after < math.inf) and not args.remote,
             "--batch and several drafters need --bench, without --remote":
             (args.batch or len(args.drafter or ()) > 1) and (args.remote or not args.bench),
             "--bench runs every method: no --lookup, --no-speculation or --show":
             args.bench and (args.lookup or args.no_speculation or args.show),
             "--draft-length makes chains: no sizes of a tree": args.draft_length and sizes and not args.bench}
    if any(wrong.values()):
        parser.error(next(filter(wrong.get, wrong)))
    args.chain = TreeConfig(args.draft_length) if args.draft_length else CHAIN
    args.tree = REMOTE_TREE if args.remote else TREE
    if sizes:
        args.tree = replace(args.tree, **sizes, min_confidence=0.0, min_probability=0.0)
    return args

def load_models(args: Namespace) -> tuple[Llama, dict[str, Drafter], Tokenizer]:
    """Target, drafters and tokenizer of the command line, packed. A client's target has only the layers that the
    drafter reuses, unless --bench is to evaluate text written offline."""
    folders, last = args.drafter or list(filter(None, [SHIPPED.get(args.model)])), None
    if args.no_speculation and not (args.serve or args.bench):
        folders = []
    elif not folders:
        raise InputError(f"no drafter is shipped for {args.model}: name one with --drafter, or add --no-speculation")
    if args.remote and not args.bench:
        last = read_json(Path(folders[0]) / "config.json").get("target_layer_inference", 0) if folders else 0
    model, tokenizer = load_target(args, last if type(last) is int and last >= 0 else None)
    drafters = {str(folder): load_drafter(folder, model).to_bfloat16().pack() for folder in folders}
    return model.pack(), drafters, tokenizer

def run_prompt(args: Namespace, model: Llama, drafter: Drafter | None, tokenizer: Tokenizer,
               config: GenerationConfig, channel: Channel | None) -> None:
    """One answer, as it comes."""
    prompt, stream = tokenizer.chat([{"role": "user", "content": args.prompt}]), partial(tokenizer.stream, [])
    config = replace(config, max_new_tokens=answer_length(model, prompt, config.max_new_tokens))
    tree = None if args.no_speculation else args.chain if args.draft_length else args.tree

    def emit(token: int, origin: Origin) -> None:
        text = stream(token)
        if not args.json:
            print(origin.value.format(text) if args.show and text else text, end="", flush=True)

    g = answer(model, drafter, prompt, config, tree, args.lookup, channel, emit)
    stats = {name: value for name, value in g.stats.items() if name != "drafted"}
    if channel:
        stats |= {"unverified_tokens": g.unverified(), "disconnected": g.disconnected != ""}
    report(tokenizer, g.tokens, g.seconds, args.json, acceptance_length=g.acceptance_length(), **stats)
    if g.disconnected:
        print(f"the server was out of reach ({g.disconnected}): {g.unverified()} of these tokens are the drafter's own",
              file=sys.stderr)

def main() -> None:
    args = parse_arguments()
    if args.serve:
        return serve(args, lambda address: print(*address, sep=":", flush=True))
    model, drafters, tokenizer = load_models(args)
    drafter = next(iter(drafters.values()), None)
    config = GenerationConfig(args.max_new_tokens, args.temperature, args.top_p, args.seed,
                              frozenset(tokenizer.stop_ids))
    server = start_server(args) if args.remote == OWN_SERVER else args.remote

    def channel(link: Link, seed: int, outage_after: float = args.disconnect_after) -> Channel:
        network = Network(link, seed, outage_after, args.disconnect_for)
        return Channel(server, os.environ.get(SECRET, ""), network, args.timeout)

    links = links_of(args)
    if args.prompt is not None:
        link, = links.values() or [Link()]
        return run_prompt(args, model, drafter, tokenizer, config, channel(link, args.seed) if server else None)
    prompts = read_prompts(args.bench)
    if args.batch:
        rows = bench_batch(model, drafter, tokenizer, prompts, config, args.batch, args.draft_length or BATCH_DRAFTS)
    else:
        tree = args.chain if args.draft_length else args.tree
        methods = (remote_methods(model, drafter, tree, links or PROFILES, channel) if server else
                   local_methods(faster_alone(args, model), model, drafters, args.chain, args.tree))
        rows = bench(model, methods, tokenizer, prompts, config)
    print(json.dumps({"rows": rows})) if args.json else print_table(rows)

if __name__ == "__main__":
    run_command(main)
