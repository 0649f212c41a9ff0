"""Client and server: the drafter here, the target elsewhere, a network between (paper, section 5).

The drafter is small enough for a laptop or a phone. The target needs a server. Each cycle of
speculative decoding then costs a round trip over the network: the client sends a draft, the server
verifies it in one pass of the target, runs LSA on what it accepted, and answers. An ordinary API
streams its tokens and so pays for one round trip only. Drafts pay off if a cycle yields enough
tokens to make up for its round trip, and how many that is depends on the network.

This file has three parts, each of which uses the ones before it:

    the link        when a message would arrive over a network of this latency, bandwidth and loss
    the contents    what client and server tell each other, in as few bytes as possible
    both sides      the paper's server and client, in one process, joined by two simulated paths

The loop is still `speculate` of speculate.py. Only its verifier is different:

    connection = Connection(Server(target, drafter), PROFILES["4g"])
    state = QuantizedDraftState(drafter, capacity, config.new_sampling("cpu"))
    verifier = RemoteVerifier(connection, state, config)
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
from moa import CacheUpdate, Draft, Drafter, DraftState
from speculate import LocalVerifier, TreeSampler, VerifyResult

# --- The link ---
#
# The network is simulated by arithmetic and `sleep`: compute when a message would arrive, and use
# it no sooner. The work of client and server takes the time that it takes. An example: the link
# takes 21 ms each way and carries 20 Mbit/s. The client sends a request of 250 bytes. The server
# works on it for 30 ms, and its reply has 2500 bytes.
#
#     what happens                      real clock   simulated clock
#     the client has sent the request       0 ms         0.0 ms
#     the server has the request            0 ms        21.1 ms    21 ms, 8 * 250 bits at 20e6/s
#     the server has sent the reply        30 ms        51.1 ms    30 ms of work
#     the client has the reply             30 ms        73.1 ms    21 ms, 8 * 2500 bits at 20e6/s
#
# The client has the reply after 30 ms, sleeps for another 43.1 ms, and then uses the reply. The
# server knows nothing of the simulation: `Connection`, at the end, does all of this.
#
# A packet can be lost. TCP sends it again if the other side has not confirmed it within the
# retransmission timeout (RTO), and doubles this timeout each time. Real TCP often notices a loss
# sooner, because later packets are confirmed or with the help of a probe. Neither is simulated, so
# losses cost too much here, above all with drafts, where the client waits for every reply.
# Congestion control, slow start and other people's traffic are left out as well.

MSS = 1460  # bytes of a message in one packet: Ethernet's 1500, less the headers of IP and TCP
INITIAL_RTO = 1.0  # seconds, as long as no round trip has been measured (RFC 6298)
MIN_RTO_MARGIN = 0.2  # seconds: the least that Linux adds to the mean round trip (its tcp_rto_min)


@dataclass(frozen=True)
class Link:
    """The properties of one direction of a network.

    A message's latency is drawn from a normal distribution. A negative draw becomes 0, which raises
    the mean a little: with a jitter of 10 ms, from 10 to 10.8 ms.
    """

    latency: float = 0.0  # seconds: the mean of the normal distribution
    jitter: float = 0.0  # seconds: its standard deviation
    bandwidth: float = math.inf  # bits per second
    loss: float = 0.0  # share of the packets, from 0 to 1

    def retransmission_timeout(self) -> float:
        """Return the RTO in seconds, once TCP has measured round trips: their mean, plus four times
        their mean deviation (RFC 6298). Linux adds at least MIN_RTO_MARGIN to the mean."""
        # A round trip is the sum of two draws, so its standard deviation is sqrt(2) jitter. In a
        # normal distribution the mean deviation is sqrt(2 / pi) times the standard deviation. On 4g
        # the RTO is 42 + 200 ms.
        deviation = 2 * self.jitter / math.sqrt(math.pi)
        return 2 * self.latency + max(4 * deviation, MIN_RTO_MARGIN)


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
        self.rto = INITIAL_RTO  # seconds: the RTO of the next message, before it doubles

    def arrival_of(self, sent: float, size: int) -> float:
        """Return the moment when a message of `size` bytes, sent at the moment `sent`, arrives. TCP
        delivers in order: a message that overtakes an earlier one waits for it."""
        self.last_arrival = max(self.last_arrival, self.travel(sent, size))
        return self.last_arrival

    def travel(self, sent: float, size: int) -> float:
        """Return the moment when the last packet of a message gets through."""
        # The bytes leave one after the other, and after those of earlier messages.
        self.busy_until = max(self.busy_until, sent) + 8 * size / self.link.bandwidth
        propagation = max(0.0, self.random.gauss(self.link.latency, self.link.jitter))
        arrival = self.busy_until + propagation

        # All packets are sent. Those that are lost are sent again after the RTO, which doubles each
        # time, until none is missing.
        rto = self.rto
        missing = max(1, math.ceil(size / MSS))  # even a message without bytes is a packet
        while missing > 0:
            missing = sum(self.random.random() < self.link.loss for _ in range(missing))
            if missing > 0:
                arrival += rto
                rto *= 2
        self.rto = self.link.retransmission_timeout()  # measured by the first message
        return arrival


# --- The contents: what crosses the network, and how small it is ---
#
# What does the client need to know of the tokens that were just verified? LSA reads the target's
# whole KV cache, which is large, so LSA runs on the server. The paper's server sends its output,
# the memory. Ours goes one small step further and sends the keys and values that CA computes from
# the memory, the `CacheUpdate` of moa.py, because they are smaller still. (The paper's messages are
# also compressed.) With Llama-3-8B they are 126 times smaller than what LSA reads:
#
#     bytes for one token                         Llama-3-8B               SmolLM2-135M
#     the target's cache, in 16 bits    32 * 2 * 8 * 128 * 2 = 131,072     23,040
#     its memory, in float32                        4096 * 4 =  16,384      2,304
#     CA's keys and values, in float32        2 * 4 * 128 * 4 =  4,096      1,536
#     the same in 8 bits, with scales   4 * 2 * (128 + 2)     =  1,040        396
#
# (Layers, key and value, kv heads, head size, bytes a number. The drafters have 4 kv heads of size
# 128 and 3 of size 64. With N > 0 the update also has the target's keys and values in its last N
# layers: 2,080 bytes more for each with Llama-3-8B.) On 4g, at 20 Mbit/s, 1,040 bytes take 0.4 ms,
# and 131,072 bytes 52 ms.
#
# In the other direction go the drafted tokens, a few bytes each. Above temperature 0 acceptance
# also needs q, a number for each of V tokens. Of each q only the 64 likeliest tokens are kept:
#
#     q of a whole vocabulary, in float32      128,256 * 4 = 513,024 bytes: 205 ms
#     64 tokens, with weights in 8 bits           64 * (4 + 1) = 320 bytes: 0.1 ms
#
# Both are rounded, and neither changes what text comes out. A coarser update can only make drafts a
# little worse. A coarser q is exact as long as the drafter draws from the very q that it reports.

Tensors = dict[str, Tensor]  # by name
Message = tuple[dict, Tensors]  # its fields are ints, floats, strings and lists of them

Q_TOKENS = 64


def quantize_update(update: CacheUpdate) -> Tensors:
    """Round the keys and values of an update to int8 (..., 2, D). Each key and each value has a
    float16 scale of its own (..., 2, 1), by which the integers are multiplied."""
    tensors = {}
    for name, kv in (("ca", update.ca_kv), ("tli", update.tli_kv)):
        kv = kv.float().contiguous().unflatten(-1, (2, -1))  # keys and values apart
        largest = kv.abs().amax(-1, keepdim=True)
        # The scale is at least float16's smallest normal number. A scale of 0 would produce NaN,
        # and a smaller number would be rounded too coarsely: from 2**-14 on float16 rounds by
        # 1/2048 at most, so that no integer exceeds 127.
        scale = (largest / 127).clamp(min=2**-14).half()
        tensors[name] = (kv / scale).round().to(torch.int8).cpu()
        tensors[name + "_scale"] = scale.cpu()
    return tensors


def dequantize_update(tensors: Tensors, tokens: list[int], state: DraftState) -> CacheUpdate:
    """Return the update for these tokens, in the shape, dtype and device of the state's caches."""
    restored = []
    for name, cache in (("ca", state.ca_cache), ("tli", state.tli_cache)):
        layers, batch, kv_heads, _, width = cache.kv.shape  # width: 2D
        shape = (layers, batch, kv_heads, len(tokens), 2)
        integers = tensors[name].view(*shape, width // 2)
        scale = tensors[name + "_scale"].view(*shape, 1)
        kv = integers.float() * scale.float()
        restored.append(kv.flatten(-2).to(cache.kv))
    ca_kv, tli_kv = restored
    return CacheUpdate(tokens, ca_kv[0], tli_kv)  # CA has one layer


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


# What client and server say to each other: two calls, those of a `Verifier`.
#
#     call      the client sends                      the server replies
#     read      a text, and how to sample after it    accepted [], token, update of the text
#     verify    drafts, parents, q of each parent     accepted, token, update of what is verified
#
# The text's tokens, the update and q are tensors, everything else is in fields. In this example
# the draft is a chain of two tokens, and the target accepts the first one:
#
#     client                                     server
#     read     tokens 5 9 2                ->    reads 5 9 2
#                                          <-    accepted [], token 7, update of 5 9 2
#     verify   drafts [4 8], parents [0 1] ->    reads 7 4 8 in one pass
#                                          <-    accepted [4], token 1, update of 7 4
#
# With "verify" the root, 7, is not sent: the server chose it. Each message has a function that
# makes it, for the sender, and one that parses it, for the receiver.

MAX_DRAFT_TOKENS = 64  # for which the server's cache has room


def message_size(message: Message) -> int:
    """Return how many bytes a message takes: its fields as JSON, its tensors as they are."""
    fields, tensors = message
    return len(json.dumps(fields)) + sum(tensor.nbytes for tensor in tensors.values())


def make_read(tokens: list[int], config: GenerationConfig, seed: int) -> Message:
    fields = {
        "call": "read",
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "seed": seed,
    }
    return fields, {"tokens": torch.tensor(tokens, dtype=torch.int32)}


def parse_read(fields: dict, tensors: Tensors) -> tuple[list[int], GenerationConfig]:
    """Return a text, and how to go on after it."""
    config = GenerationConfig(
        max_new_tokens=fields["max_new_tokens"],
        temperature=fields["temperature"],
        top_p=fields["top_p"],
        seed=fields["seed"],
    )
    return tensors["tokens"].tolist(), config


def make_verify(draft: Draft) -> Message:
    fields = {"call": "verify", "drafts": draft.tokens[1:], "parents": draft.parents[1:]}
    if not draft.q:
        return fields, {}
    # Quantizing again loses nothing: `QuantizedDraftState` has, and the weights stay the same.
    q = torch.stack([draft.q[parent] for parent in sorted(draft.q)])
    ids, weights = quantize_probabilities(q)
    return fields, {"ids": ids.cpu(), "weights": weights.cpu()}


def parse_verify(fields: dict, tensors: Tensors, root: int, model: Llama) -> Draft:
    """Return a draft that follows the root."""
    draft = Draft(root)
    for token, parent in zip(fields["drafts"], fields["parents"], strict=True):
        draft.add(token, parent, probability=1.0)  # the server does not need the drafter's
    if "ids" in tensors:
        q = dequantize_probabilities(tensors["ids"], tensors["weights"], model.config.vocab_size)
        parents = sorted(set(draft.parents[1:]))
        draft.q = dict(zip(parents, q.to(model.device), strict=True))
    return draft


def make_reply(result: VerifyResult) -> Message:
    fields = {"accepted": result.accepted, "token": result.token}
    return fields, quantize_update(result.update)


# --- The paper's server: the target and LSA ---


class Server:
    """The target's side of one conversation. `LocalVerifier` does the work, as it does on one
    machine. Here it reads its arguments from messages, and its results become messages."""

    def __init__(self, model: Llama, drafter: Drafter):
        """drafter: only its `cache_update` is used here, which runs LSA."""
        self.model = model
        self.drafter = drafter
        self.verifier: LocalVerifier | None = None  # of the text that was read last
        self.root = 0  # the newest token, which the next draft follows

    def answer(self, message: Message) -> Message:
        """Return the reply to a request."""
        fields, tensors = message
        if fields["call"] == "read":
            result = self.read(*parse_read(fields, tensors))
        else:
            result = self.verify(parse_verify(fields, tensors, self.root, self.model))
        return make_reply(result)

    def read(self, tokens: list[int], config: GenerationConfig) -> VerifyResult:
        """Begin a text."""
        # The cache needs room for the whole text and, after the text, for the root and the tokens
        # of a draft, which may yet be rejected.
        capacity = len(tokens) + config.max_new_tokens + 1 + MAX_DRAFT_TOKENS
        self.verifier = self.new_verifier(capacity, config.new_sampling(self.model.device))
        result = self.verifier.prefill(tokens)
        self.root = result.token
        return result

    def new_verifier(self, capacity: int, sampling: Sampling) -> LocalVerifier:
        return LocalVerifier(self.model, self.drafter, capacity, sampling)

    def verify(self, draft: Draft) -> VerifyResult:
        """Verify a draft that follows the newest token."""
        result = self.verifier.verify(draft)
        self.root = result.token
        return result


# --- The paper's client: SA, CA and TLI ---


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

    def request(self, message: Message) -> Message:
        """Return the server's reply, at the moment when it would arrive."""
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
    """Lets a server verify the drafts of one conversation: the `Verifier` of speculate.py whose
    target is elsewhere."""

    def __init__(
        self, connection: Connection, state: QuantizedDraftState, config: GenerationConfig
    ):
        """state: the drafter's caches, for which the server's updates are meant. Here only their
        shapes and lengths are read: the loop appends the updates."""
        self.connection = connection
        self.state = state
        self.config = config
        self.tokens: list[int] = []  # prompt and answer; the last token is the next root

    def prefill(self, prompt: list[int]) -> VerifyResult:
        """Let the server read the prompt."""
        self.tokens = list(prompt)
        return self.request(make_read(prompt, self.config, self.new_seed()))

    def verify(self, draft: Draft) -> VerifyResult:
        """Let the server verify a draft."""
        return self.request(make_verify(draft))

    def new_seed(self) -> int:
        """Draw a seed for the server. With the drafter's own seed the server would draw the same
        random numbers as the drafter, but acceptance needs independent ones: a token must not be
        judged by the number that it was drawn with."""
        generator = self.state.sampling.generator
        seed = torch.randint(2**31 - 1, (), generator=generator, device=generator.device)
        return int(seed)

    def request(self, message: Message) -> VerifyResult:
        """Send a request, and return the result that the reply describes."""
        fields, tensors = self.connection.request(message)
        return self.parse_reply(fields, tensors)

    def parse_reply(self, fields: dict, tensors: Tensors) -> VerifyResult:
        accepted = fields["accepted"]
        token = fields["token"]
        # The server has read all tokens up to the new one. The update covers those that CA lacks:
        # the prompt or, after a draft, the root and the accepted tokens.
        verified = self.tokens[self.state.ca_cache.length:] + accepted
        update = dequantize_update(tensors, verified, self.state)
        self.tokens += accepted + [token]
        return VerifyResult(accepted, token, update)
