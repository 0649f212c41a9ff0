"""Client and server: the drafter here, the target elsewhere, a network between (paper, section 5).

The drafter is small enough for a laptop or a phone. The target needs a server. (A client also holds
the target's embeddings and LM head, which the drafter uses, and with N > 0 the reused layers. Here
both sides share them.) The loop is still `speculate` of speculate.py. Only its verifier is
elsewhere:

    client                                        server
    drafts a few tokens             draft  ->     verifies them in one pass of the target
    drafts on after the kept ones   <-  reply     runs LSA on the tokens that it keeps

So a cycle costs one round trip. A message takes the latency of the network, plus the time that its
bytes need to leave. With 21 ms each way and 20 Mbit/s, for example:

    the client sends a draft of 250 bytes         0.0 ms
    the server has the draft                     21.1 ms    21 ms, and 8 * 250 bits at 20e6/s
    the server sends a reply of 2500 bytes       51.1 ms    30 ms of work
    the client has the reply                     73.1 ms    21 ms, and 8 * 2500 bits at 20e6/s

The target alone, behind a plain API, streams its tokens, and so needs one round trip for a whole
answer. Drafts pay off if a cycle yields enough tokens to make up for its round trip. (A fair rival
was not measured: target and drafter both on the server, which streams what they write. It sends no
drafts, but when the network is down, its client has nothing to write on with.)

This file has three parts: the link, on which messages take that time; the messages, and how small
they are; server and client, here in one process:

    connection = Connection(Server(target, drafter), PROFILES["4g"])
    sampling = config.new_sampling("cpu")
    verifier = RemoteVerifier(connection, config, sampling)
    state = QuantizedDraftState(drafter, capacity, sampling)
    for cycle in speculate(verifier, state, prompt, config, limits):
        print(cycle.tokens, connection.traffic)

Durations are in seconds, sizes in bytes, bandwidths in bits per second. A moment is a value of
time.monotonic(). Shapes: those of moa.py.
"""
from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from time import monotonic, sleep

import torch
from torch import Tensor

from llama import GenerationConfig, Llama, Sampling
from moa import CacheUpdate, Draft, Drafter
from speculate import LocalVerifier, TreeSampler, VerifyResult

# --- The link ---
#
# The network is simulated by arithmetic and `sleep`: compute when a message would arrive, and use
# it no sooner. Congestion control, slow start and other people's traffic are left out.


@dataclass(frozen=True)
class Link:
    """The properties of one direction of a network.

    A message's latency is drawn from a normal distribution. A negative draw becomes 0, which raises
    the mean a little: with a jitter of 10 ms, from 10 to 10.8 ms.
    """

    latency: float = 0.0  # seconds: the mean of the normal distribution
    jitter: float = 0.0  # seconds: its standard deviation
    bandwidth: float = math.inf  # bits per second
    loss: float = 0.0  # share of the packets that are lost, less than 1


# The paper's networks, which have the same link in both directions. The paper states no bandwidth
# for 5G; the 100 Mbit/s are our assumption.
PROFILES = {  # latency, jitter, bandwidth, loss
    "wan": Link(0.0045, 0.000, 50e6),
    "5g": Link(0.0100, 0.010, 100e6, 0.001),
    "4g": Link(0.0210, 0.019, 20e6, 0.001),
}


class SimulatedPath:
    """One direction of a connection: computes when messages arrive, with random draws of its own.

    Call `arrival_of` once for each message, in the order of sending.
    """

    def __init__(self, link: Link, seed: int):
        self.link = link
        self.random = random.Random(seed)
        self.busy_until = 0.0  # the moment when all bytes so far have left
        self.last_arrival = 0.0  # the moment when the last message so far arrives
        self.first_rto = INITIAL_RTO  # seconds: see `resend_lost`

    def arrival_of(self, sent: float, size: int) -> float:
        """Return the moment when a message of `size` bytes, sent at the moment `sent`, arrives.
        Messages stay in order: one that overtakes an earlier one waits for it."""
        self.last_arrival = max(self.last_arrival, self.travel(sent, size))
        return self.last_arrival

    def travel(self, sent: float, size: int) -> float:
        """Return the moment when the last byte of a message gets through."""
        # The bytes leave one after the other, and after those of earlier messages.
        self.busy_until = max(self.busy_until, sent) + 8 * size / self.link.bandwidth
        latency = max(0.0, self.random.gauss(self.link.latency, self.link.jitter))
        return self.resend_lost(self.busy_until + latency, size)

    def resend_lost(self, arrival: float, size: int) -> float:
        """Return the moment when a message is complete, if those of its packets that are not lost
        arrive at the moment `arrival`.

        TCP sends a lost packet again after a timeout (RTO), which doubles each time. Real TCP often
        notices a loss sooner, so losses cost too much here.
        """
        rto = self.first_rto
        missing = max(1, math.ceil(size / MSS))  # packets; even a message without bytes is one
        while missing > 0:
            missing = sum(self.random.random() < self.link.loss for _ in range(missing))
            if missing > 0:
                arrival += rto
                rto *= 2
        self.first_rto = retransmission_timeout(self.link)  # TCP has now measured a round trip
        return arrival


MSS = 1460  # bytes of a message in one packet: Ethernet's 1500, less the headers of IP and TCP
INITIAL_RTO = 1.0  # seconds, as long as no round trip has been measured (RFC 6298)
MIN_RTO_MARGIN = 0.2  # seconds: the least that Linux adds to the mean round trip (its tcp_rto_min)


def retransmission_timeout(link: Link) -> float:
    """Return the RTO in seconds, once TCP has measured round trips: their mean, plus four times
    their mean deviation (RFC 6298). On 4g: 42 + 200 ms."""
    # A round trip is the sum of two draws, so its standard deviation is sqrt(2) jitter. In a normal
    # distribution the mean deviation is sqrt(2 / pi) times the standard deviation.
    deviation = 2 * link.jitter / math.sqrt(math.pi)
    return 2 * link.latency + max(4 * deviation, MIN_RTO_MARGIN)


# --- The messages ---
#
# The client makes two kinds of request, which are the two calls of a `Verifier`. In this example it
# has a text of three tokens, drafts a chain of two more, and the target accepts the first:
#
#     client                                     server
#     Read     tokens 5 9 2                ->    reads 5 9 2
#                                          <-    accepted [], token 7, update of 5 9 2
#     Verify   tokens [7 4 8]              ->    reads 7 4 8 in one pass
#                                          <-    accepted [4], token 1, update of 7 4

MAX_DRAFT_TOKENS = 64  # for which the server's cache has room


@dataclass
class Read:
    """A request to read a text, and to choose the token after it."""

    tokens: Tensor  # int32 (T)
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int  # of the server's random draws

    @property
    def config(self) -> GenerationConfig:
        return GenerationConfig(self.max_new_tokens, self.temperature, self.top_p, self.seed)

    @property
    def slots(self) -> int:
        """How many slots the target's cache needs: for the text, its continuation, and then for the
        root and the tokens of a draft, which may yet be rejected."""
        return len(self.tokens) + self.max_new_tokens + 1 + MAX_DRAFT_TOKENS


@dataclass
class Verify:
    """A request to verify a draft."""

    tokens: list[int]  # the root, then the drafted tokens
    parents: list[int]  # the node that each drafted token follows: 0 is the root
    # Above temperature 0, the q of each node that is a parent, quantized: (parents, 64) each.
    ids: Tensor | None = None
    weights: Tensor | None = None


@dataclass
class Reply:
    """The answer to both: a `VerifyResult`, with the two tensors of its update quantized."""

    accepted: list[int]
    token: int
    ca: Tensor
    ca_scale: Tensor
    tli: Tensor
    tli_scale: Tensor


def message_size(message: Read | Verify | Reply) -> int:
    """Return how many bytes a message takes: its tensors as they are, everything else as JSON. The
    headers that it would have on a socket, some hundred bytes, are not counted."""
    size = 0
    fields = {}
    for name, value in vars(message).items():
        if isinstance(value, Tensor):
            size += value.nbytes
        elif value is not None:
            fields[name] = value
    return size + len(json.dumps(fields))


# --- How small the messages are ---
#
# What does the client have to know of a token that was verified? LSA reads the token's keys and
# values in all layers of the target. These are large, so LSA runs on the server, and the paper's
# server sends LSA's output, the memory. Here the server also computes CA's keys and values from the
# memory, and sends these. That division of the work is ours, because they are smaller still:
#
#     bytes for each token                                   Llama-3-8B    SmolLM2-135M
#     the target's cache, in 16 bits    32 * 2 * 8 * 128 * 2 =  131,072          23,040
#     the memory, in 8 bits                         4096 + 2 =    4,098             578
#     CA's keys and values, in 8 bits      2 * 4 * (128 + 2) =    1,040             396
#
# (A vector in 8 bits has a scale of 2 bytes. The cache of Llama-3-8B has 32 layers, with 8 kv heads
# of size 128; CA has 4 kv heads, and 3 of size 64 in the drafter that is shipped for SmolLM2. With
# N > 0 the target's keys and values in its last N layers are sent as well.) Over 4g, at 20 Mbit/s,
# a prompt of 1,000 tokens would take 52, 1.6 or 0.4 seconds.
#
# In the other direction go the drafted tokens, a few bytes each. Above temperature 0 acceptance
# also needs q, a number for each of V tokens. Of each q only the 64 likeliest tokens are kept:
#
#     q of a whole vocabulary, in float32      128,256 * 4 =  513,024 bytes    205 ms
#     64 tokens, with weights in 8 bits       64 * (4 + 1) =      320 bytes    0.1 ms
#
# A rounded update may make drafts worse (how much was not measured), but no draft changes how the
# text is distributed. Nor does a rounded q, as long as tokens are drawn from the very q that is
# sent.

Q_TOKENS = 64


def quantize_kv(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Round keys and values (..., 2D) to int8 (..., 2, D). Each key and each value has a float16
    scale of its own (..., 2, 1), by which its integers are multiplied."""
    kv = kv.float().unflatten(-1, (2, -1))  # keys and values apart
    largest = kv.abs().amax(-1, keepdim=True)
    # The scale is at least float16's smallest normal number. A scale of 0 would produce NaN, and a
    # smaller number would be rounded too coarsely: from 2**-14 on float16 rounds by 1/2048 at most,
    # so that no integer exceeds 127.
    scale = (largest / 127).clamp(min=2**-14).half()
    return (kv / scale).round().to(torch.int8).cpu(), scale.cpu()


def dequantize_kv(integers: Tensor, scale: Tensor) -> Tensor:
    """Return keys and values (..., 2D), float32."""
    return (integers.float() * scale.float()).flatten(-2)


def quantize_probabilities(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 64 likeliest tokens of each q (n, V), int32 (n, 64), and their weights, uint8 (n,
    64). The likeliest has the weight 255, the others in proportion to their probabilities."""
    top = q.topk(min(Q_TOKENS, q.shape[-1]))
    weights = 255 * top.values / top.values[..., :1]
    return top.indices.int(), weights.round().to(torch.uint8)


def dequantize_probabilities(ids: Tensor, weights: Tensor, vocab_size: int) -> Tensor:
    """Return the distributions (n, vocab_size) with these weights. Client and server get the same
    floats, because each float is one division of two integers."""
    q = weights.float() / weights.sum(-1, keepdim=True)
    return q.new_zeros(len(q), vocab_size).scatter_(-1, ids.long(), q)


class QuantizedDraftState(TreeSampler):
    """Quantizes q *before* tokens are drawn from it, so that the drafter draws from exactly the q
    that the server will receive.

    Any q will do, but it must be the one that the tokens were drawn from. Say that p = q = (0.6,
    0.4), and that q is sent as (1, 0), but tokens are drawn from (0.6, 0.4). The first token would
    then be accepted with probability 0.6 instead of 1, and come out with 0.36 instead of 0.6.
    """

    def next_distributions(self, draft: Draft, frontier: list[int]) -> Tensor:
        q = super().next_distributions(draft, frontier)  # (F, V)
        if self.sampling.temperature == 0:
            return q  # nothing is drawn, and q is not sent
        ids, weights = quantize_probabilities(q)
        return dequantize_probabilities(ids, weights, q.shape[-1])


# --- From drafts and results to messages, and back ---


def make_read(tokens: list[int], config: GenerationConfig, seed: int) -> Read:
    text = torch.tensor(tokens, dtype=torch.int32)
    return Read(text, config.max_new_tokens, config.temperature, config.top_p, seed)


def make_verify(draft: Draft) -> Verify:
    if not draft.q:  # nothing was drawn
        return Verify(draft.tokens, draft.parents[1:])
    # `QuantizedDraftState` has quantized each q before. To do so again gives the same weights.
    q = torch.stack([draft.q[parent] for parent in sorted(draft.q)])
    ids, weights = quantize_probabilities(q)
    return Verify(draft.tokens, draft.parents[1:], ids.cpu(), weights.cpu())


def parse_verify(request: Verify, model: Llama) -> Draft:
    root, *drafted = request.tokens
    draft = Draft(root)
    for token, parent in zip(drafted, request.parents, strict=True):
        draft.add(token, parent, probability=1.0)  # the server does not need the drafter's
    if request.ids is not None:
        q = dequantize_probabilities(request.ids, request.weights, model.config.vocab_size)
        parents = sorted(set(request.parents))
        draft.q = dict(zip(parents, q.to(model.device), strict=True))
    return draft


def make_reply(result: VerifyResult) -> Reply:
    ca = quantize_kv(result.update.ca_kv)
    tli = quantize_kv(result.update.tli_kv)
    return Reply(result.accepted, result.token, *ca, *tli)


def parse_reply(reply: Reply, verified: list[int]) -> VerifyResult:
    """verified: the tokens of the update. They are not sent, because the client knows them."""
    ca_kv = dequantize_kv(reply.ca, reply.ca_scale)
    tli_kv = dequantize_kv(reply.tli, reply.tli_scale)
    return VerifyResult(reply.accepted, reply.token, CacheUpdate(verified, ca_kv, tli_kv))


# --- The server: the target, LSA, and CA's keys and values ---


class Server:
    """The target's side of one conversation. `LocalVerifier` does the work, as it does on one
    machine. Here it takes its arguments from messages, and its results become messages."""

    def __init__(self, model: Llama, drafter: Drafter):
        """drafter: only its `cache_update` is used here."""
        self.model = model
        self.drafter = drafter
        self.verifier: LocalVerifier | None = None  # of the text that was read last

    def answer(self, request: Read | Verify) -> Reply:
        """Return the reply to a request. (A `Verify` is about the text that was read last.)"""
        if isinstance(request, Read):
            sampling = request.config.new_sampling(self.model.device)
            self.verifier = LocalVerifier(self.model, self.drafter, request.slots, sampling)
            result = self.verifier.prefill(request.tokens.tolist())
        else:
            result = self.verifier.verify(parse_verify(request, self.model))
        return make_reply(result)


# --- The client: a connection, and a verifier that uses it ---
#
# The drafter itself runs here, in a `QuantizedDraftState`. (The paper's server has three times the
# client's throughput in float16. Here both share one machine.)


@dataclass
class Traffic:
    """What a client has sent, received and waited for."""

    bytes_up: int = 0
    bytes_down: int = 0
    round_trips: int = 0  # requests
    network_seconds: float = 0.0  # spent waiting for replies, less the server's own time


class Connection:
    """Carries requests to a server in this process and replies back, over a simulated network."""

    def __init__(self, server: Server, link: Link, seed: int = 0):
        """link: of both directions. Each has random draws of its own."""
        self.server = server
        self.up = SimulatedPath(link, 2 * seed)
        self.down = SimulatedPath(link, 2 * seed + 1)
        self.traffic = Traffic()

    def request(self, message: Read | Verify) -> Reply:
        """Return the server's reply, at the moment when it would arrive. In the example at the top
        of this file the reply is there after 30 ms, and this sleeps for another 43.1 ms."""
        sent = monotonic()
        reply = self.server.answer(message)
        elapsed = monotonic() - sent  # the server's work, in real time

        bytes_up = message_size(message)
        bytes_down = message_size(reply)
        received = self.up.arrival_of(sent, bytes_up)  # by the server, on the simulated clock
        arrival = self.down.arrival_of(received + elapsed, bytes_down)
        sleep(max(0.0, arrival - monotonic()))

        self.traffic.bytes_up += bytes_up
        self.traffic.bytes_down += bytes_down
        self.traffic.round_trips += 1
        self.traffic.network_seconds += monotonic() - sent - elapsed
        return reply


class RemoteVerifier:
    """The `Verifier` of one conversation whose target is on a server."""

    def __init__(self, connection: Connection, config: GenerationConfig, sampling: Sampling):
        """sampling: the drafter's, which also draws a seed for the server."""
        self.connection = connection
        self.config = config
        self.sampling = sampling

    def prefill(self, prompt: list[int]) -> VerifyResult:
        """Let the server read the prompt."""
        seed = draw_seed(self.sampling.generator)
        reply = self.connection.request(make_read(prompt, self.config, seed))
        return parse_reply(reply, prompt)

    def verify(self, draft: Draft) -> VerifyResult:
        """Let the server verify a draft."""
        reply = self.connection.request(make_verify(draft))
        root = draft.tokens[0]
        return parse_reply(reply, [root] + reply.accepted)


def draw_seed(generator: torch.Generator) -> int:
    """Draw a seed for the server. With the drafter's own seed the server would draw the same random
    numbers as the drafter, but acceptance needs independent ones: a token must not be judged by the
    number that it was drawn with."""
    return int(torch.randint(2**31 - 1, (), generator=generator, device=generator.device))
