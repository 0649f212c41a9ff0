"""The network between drafter and target: a simulated link, a real protocol (paper, section 5).

The drafter runs on a consumer device and the target on a server. How much time this division costs
depends on the network between the two machines. Here any network can be tried on one machine. Every
message crosses a real TCP socket without delay, and has its real size. When the client has received
a reply, it computes when the reply would have arrived over the simulated link, and sleeps until
that moment. Jitter and lost packets are drawn at random; the same seed gives the same draws.

    python speculate.py --remote --network 4g --prompt "Why is the sky blue?" --trace

The server may also run on a different machine. A round trip then takes as long as the slower of the
two networks, the real and the simulated one. Without flags such as --network nothing is simulated.

The simulated link comes first, and can be read without the rest. A comment after the link lists the
sections that follow.

Throughout the file, durations are in seconds, sizes in bytes and bandwidths in bits per second. A
moment is a value of time.monotonic().
"""
from __future__ import annotations

import argparse
import math
import os
import random
import signal
import socket
import sys
import threading
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import Callable, Iterator, Protocol

import torch
from torch import Tensor

from llama import GenerationConfig, KVCache, Llama, OnPiece, Sampling, generate
from moa import (
    Q_TOKENS,
    Draft,
    Drafter,
    DraftState,
    MemoryUpdate,
    Models,
    RemoteDraftState,
    Verifier,
    VerifyResult,
    dequantize_probabilities,
    load_models,
    quantize_probabilities,
)
from plumbing import flags
from plumbing.errors import InputError, input_errors, run_command
from plumbing.messages import (
    MAX_FIELDS,
    Address,
    HasLeft,
    Message,
    Replies,
    Tensors,
    check_ids,
    check_int,
    receive_message,
    refuse_malformed,
    send_message,
    serve_sessions,
)

# --- The link ---
#
# An example: the link takes 21 ms each way and carries 20 Mbit/s. The client sends a request of 250
# bytes. The server works on it for 30 ms, and its reply has 2500 bytes.
#
#     what happens                      real clock   simulated clock
#     the client has sent the request       0 ms         0.0 ms
#     the server has the request            0 ms        21.1 ms    21 ms, 8 * 250 bits at 20e6/s
#     the server has sent the reply        30 ms        51.1 ms    30 ms of work
#     the client has the reply             30 ms        73.1 ms    21 ms, 8 * 2500 bits at 20e6/s
#
# The client has the reply after 30 ms, sleeps for another 43.1 ms, and then uses the reply. The
# server knows nothing of the simulation. Each reply only states how long the server worked on it,
# and the client computes everything else: see `Channel.receive`.
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


@dataclass
class Outage:
    """The one outage that a network may have, in both directions. It begins when the answer has
    `after` tokens, and lasts `seconds`.

    No message is lost for good, because TCP sends each one again until it gets through. A message
    that is in flight during the outage is delayed by the part of the outage that is left when the
    message is sent, plus one RTO. An example: an outage from 1.0 s to 1.3 s on a link of 20 ms,
    whose RTO is 0.24 s.

        sent      would arrive    outage left    arrives
        0.99 s       1.01 s          0.3 s       1.01 + 0.3 + 0.24 = 1.55 s
        1.10 s       1.12 s          0.2 s       1.12 + 0.2 + 0.24 = 1.56 s
        1.40 s       1.42 s          none        1.56 s: TCP delivers in order

    If the outage never ends, none of the three arrives, and the client gives up at a deadline (see
    Channel.reply_timeout). Real TCP takes longer to notice the end of a long outage, because it
    keeps doubling its timeout. Usually the client has given up by then.
    """

    after: float = math.inf  # tokens
    seconds: float = math.inf
    begins: float = math.inf  # a moment, which `begin_if_due` sets

    def begin_if_due(self, count: int, now: float) -> None:
        """Begin at the moment `now`, if the answer has enough tokens and no outage has begun.
        count: the answer's tokens."""
        if count >= self.after and self.begins == math.inf:
            self.begins = now

    @property
    def ends(self) -> float:
        return self.begins + self.seconds  # infinity if it never begins, or never ends

    def overlaps(self, sent: float, arrival: float) -> bool:
        """Return whether the outage affects a message in flight from `sent` to `arrival`."""
        return sent < self.ends and self.begins <= arrival


class SimulatedPath:
    """One direction of a network: computes when messages arrive, with random draws of its own."""

    def __init__(self, link: Link, outage: Outage, seed: int):
        self.link = link
        self.outage = outage
        self.random = random.Random(seed)
        self.reset()

    def reset(self) -> None:
        """Begin a new connection, which does not wait for what is in flight over the old one."""
        self.busy_until = 0.0  # the moment when all bytes so far have left
        self.last_arrival = 0.0  # the moment when the last message so far arrives
        self.first_rto = INITIAL_RTO  # seconds: the RTO of the next message, before it doubles

    def arrival_of(self, sent: float, size: int) -> float:
        """Return the moment when a message of `size` bytes, sent at the moment `sent`, arrives:
        infinity if an outage without end stops the message. Call this once for each message, in the
        order of sending, because later messages wait for earlier ones."""
        # The bytes leave one after the other, and after those of earlier messages.
        self.busy_until = max(self.busy_until, sent) + 8 * size / self.link.bandwidth
        propagation = max(0.0, self.random.gauss(self.link.latency, self.link.jitter))
        arrival = self.busy_until + propagation

        # All packets are sent. Those that are lost are sent again after the RTO, which doubles each
        # time, until none is missing.
        rto = self.first_rto
        missing = max(1, math.ceil(size / MSS))  # at least 1: a handshake has no bytes of ours
        while missing > 0:
            missing = sum(self.random.random() < self.link.loss for _ in range(missing))
            if missing > 0:
                arrival += rto
                rto *= 2

        # Nothing moves during an outage. One RTO after its end, TCP sends again.
        measured_rto = self.link.retransmission_timeout()
        if self.outage.overlaps(sent, arrival):
            stopped = max(sent, self.outage.begins)
            arrival += self.outage.ends - stopped + measured_rto
        self.first_rto = measured_rto  # of all later messages over this connection

        # TCP delivers in order.
        self.last_arrival = max(self.last_arrival, arrival)
        return self.last_arrival


class Network:
    """The same link in both directions, and perhaps an outage."""

    def __init__(self, link: Link, seed: int = 0, outage: Outage | None = None):
        self.outage = outage or Outage()  # by default one that never begins
        self.up = SimulatedPath(link, self.outage, 2 * seed)  # each direction has its own seed
        self.down = SimulatedPath(link, self.outage, 2 * seed + 1)


def wait(arrival: float, deadline: float) -> None:
    """Sleep until the moment `arrival`. Raise TimeoutError if the moment `deadline` comes first."""
    sleep(max(0.0, min(arrival, deadline) - monotonic()))
    if arrival > deadline:
        raise TimeoutError("timed out")


# --- The client's channel ---
#
# The simulated network is complete. If you came for the simulation alone, you can stop here. The
# rest of the file has these sections:
#
#     the client's channel     a real connection, on which a network is simulated
#     the protocol             what client and server say to each other
#     the paper's client       `RemoteVerifier`: has drafts verified, and copes with a lost server
#     a plain API's client     what the paper compares its client with
#     the paper's server       `TargetSession`: reads texts and verifies drafts
#     contents of messages     memories in 8 bits, and checks of what a client has sent
#     the command line         from flags to a link and a channel
#
# If the server takes too long, the client gives the connection up: see `Channel.reply_timeout`.

FIRST_REPLY_SECONDS = 60.0  # for the first reply over a connection: the server reads a whole text
MIN_TIMEOUT = 1.0  # seconds: usually enough for a packet that is lost twice
CONNECT_SECONDS = 10.0  # for the real handshake at most: there may be no server at the address
MAX_REPLY = 1 << 30  # bytes: enough for the memory of a prompt of 131,072 tokens, 8,000 bytes each


class ConnectionLost(Exception):
    """The server cannot be reached, refuses to answer, is too late, or sends malformed data."""


@dataclass
class Traffic:
    """What a client has sent, received and waited for. Connecting adds to the bytes only."""

    bytes_up: int = 0
    bytes_down: int = 0
    round_trips: int = 0  # requests
    network_seconds: float = 0.0  # to send and to wait for replies, less the server's own time


@dataclass
class Channel:
    """The client's end of a connection on which a network is simulated.

    `send` sends a request, and each call of `receive` waits for one reply to the request. Call both
    within `closed_on_failure`, which closes the connection if a call fails. `connect` makes the
    first connection, and a new one if the caller wants to go on after a failure.
    """

    address: Address
    network: Network
    timeout: float | None = None  # seconds to wait for every reply; None: see reply_timeout
    sock: socket.socket | None = None
    is_new: bool = True  # no reply has come over this connection yet
    slowest: float = 0.0  # seconds waited for the slowest reply, over all connections
    server_clock: float = 0.0  # simulated time of the server's last event: a request, or a reply
    traffic: Traffic = field(default_factory=Traffic)

    def connect(self) -> dict:
        """Make a new connection. Return the fields of the server's greeting. Raise ConnectionLost
        if the server does not answer in time."""
        self.close()
        network = self.network
        network.up.reset()
        network.down.reset()
        start = monotonic()
        if network.outage.overlaps(start, start):  # an outage at this moment
            raise ConnectionLost("the network is down")
        timeout = INITIAL_RTO + self.reply_timeout()  # that of the previous connection
        deadline = start + min(CONNECT_SECONDS, timeout)  # of the real handshake
        host, port = self.address
        with self.closed_on_failure(f"no connection to {host}:{port}"):
            with refuse_malformed("address"):  # a host name like a..b raises a ValueError
                self.sock = socket.create_connection(self.address, deadline - start)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send at once
            greeting = receive_message(self.sock, MAX_FIELDS, deadline)
            self.traffic.bytes_down += greeting.size
            # Two round trips: SYN and SYN-ACK of TCP, then its ACK and the greeting.
            arrival = start
            for down_size in (0, greeting.size):
                arrival = network.up.arrival_of(arrival, 0)
                arrival = network.down.arrival_of(arrival, down_size)
            wait(arrival, start + timeout)
        self.is_new = True
        return greeting.fields

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self.sock:
            self.sock.close()
        self.sock = None

    @contextmanager
    def closed_on_failure(self, complaint: str = "no answer from the server") -> Iterator[None]:
        """Close the connection and raise ConnectionLost if an OSError occurs in this block.

        A malformed reply raises ProtocolError, which is an OSError. All other exceptions pass
        through: a bug of ours, or too little memory, must not look like a lost server.
        """
        try:
            yield
        except OSError as error:
            self.close()
            raise ConnectionLost(f"{complaint}: {error}")

    def reply_timeout(self) -> float:
        """Return how many seconds to wait for the next reply.

        --timeout sets this time for every reply. Without the flag, the client waits ten times as
        long as the slowest reply so far took, and at least

            FIRST_REPLY_SECONDS    for the first reply over a connection
            MIN_TIMEOUT            for any later reply

        The slowest reply is usually a first one, because the server reads a text for it. Its time
        counts for later replies as well: each of them can take just as long while the server reads
        the text of a different client.

        A new connection has the previous connection's reply timeout, plus INITIAL_RTO for one lost
        packet. If replies came over the previous connection, this time is short, and a dead network
        is noticed soon.
        """
        if self.timeout is not None:
            return self.timeout
        least = FIRST_REPLY_SECONDS if self.is_new else MIN_TIMEOUT
        return max(least, 10 * self.slowest)

    def send(self, fields: dict, tensors: Tensors) -> None:
        """Send a request."""
        if self.sock is None:
            raise ConnectionLost("not connected")
        sent = monotonic()
        size = send_message(self.sock, fields, tensors)
        self.traffic.network_seconds += monotonic() - sent
        self.traffic.bytes_up += size
        self.traffic.round_trips += 1
        self.server_clock = self.network.up.arrival_of(sent, size)

    def receive(self) -> Message:
        """Return the next reply, at the moment when it would arrive over the simulated network.

        A reply's field "elapsed" says how many seconds the server took: since the request arrived
        or, for a later reply to the same request, since the previous reply was ready.
        """
        start = monotonic()
        deadline = start + self.reply_timeout()
        reply = receive_message(self.sock, MAX_REPLY, deadline)
        with refuse_malformed("reply"):
            elapsed = max(0.0, float(reply.fields["elapsed"]))  # NaN becomes 0
        self.server_clock += elapsed
        arrival = self.network.down.arrival_of(self.server_clock, reply.size)
        wait(arrival, deadline)
        waited = monotonic() - start
        self.traffic.network_seconds += max(0.0, waited - elapsed)
        self.traffic.bytes_down += reply.size
        self.slowest = max(self.slowest, waited)
        self.is_new = False
        return reply


# --- The protocol: what client and server say to each other ---
#
# The server greets a client with the hash of its drafter. After the greeting the client may call:
#
#     call        sends                                gets back
#     read        a text, GenerationConfig, known      accepted [], token, memory of the text
#     verify      drafts, parents, q of each parent    accepted, token, memory of what is verified
#     generate    a text, GenerationConfig             token: a reply for each
#
# "read" and "verify" are the two calls of a verifier in `speculate`, prefill and verify. "generate"
# is a plain API. The text's tokens, memory (in 8 bits) and q (quantized) are tensors, everything
# else is in fields. q is sent only above temperature 0.
#
# known: the number of tokens at the beginning of the text whose memory the client already has. The
# reply leaves this memory out. In the following example the draft is a chain of two tokens, and the
# target accepts the first one:
#
#     client                                     server
#     read     tokens 5 9 2, known 0       ->    reads 5 9 2
#                                          <-    accepted [], token 7, memory of 5 9 2
#     verify   drafts [4 8], parents [0 1] ->    reads 7 4 8 in one pass
#                                          <-    accepted [4], token 1, memory of 7 4
#
# With "verify" the root, 7, is not sent: the server chose it.
#
# The paper divides the work between client and server in this way. Some details are our own:
#
# - The paper's server sends the memory. Our server sends the keys and values that CA computes from
#   the memory, which are smaller, and with N > 0 also those of the target's last N layers.
# - q is cut to its 64 likeliest tokens.
# - The client reconnects after growing pauses. Until then the drafter writes in bursts of 8 tokens.

MAX_DRAFT_TOKENS = 64  # the server refuses a longer draft
OFFLINE_TOKENS = 8  # tokens that the drafter writes alone before the client may reconnect
INITIAL_BACKOFF = 0.5  # seconds from a failed attempt to reconnect to the next; doubles each time


# --- The paper's client: the drafter is here ---


@dataclass
class RemoteResult(VerifyResult):
    """The result of a cycle with a target on a server. `link` is one of

        "connected"      the server has read the prompt, or verified the draft
        "reconnected"    the draft was lost, and the server has read the text over a new connection
        "offline"        the server is out of reach, and the drafter has written unverified tokens

    Offline, the last token is in `token`, because it is the next root, and all others are in
    `accepted`. Tokens written offline have no memory, so `memory` is None.
    """

    link: str = "connected"
    reason: str = ""  # why the link is offline


class RemoteVerifier:
    """Lets a target on a server verify the drafts of one conversation.

    When the server is lost, the client makes a new connection and asks the server to read all
    tokens so far. If this works, only the draft is lost. If it fails, the drafter writes alone, and
    its tokens are unverified. The next call tries again. In the following example the last of
    `tokens` is the next root:

        what happens                                       tokens            have a memory
        prefill: the server's token is 7                   5 9 2 7           5 9 2
        verify: no reply, the drafter writes 4 8 alone     5 9 2 7 4 8       5 9 2
        verify: connected again, the server's token is 1   5 9 2 7 4 8 1     5 9 2 7 4 8

    This class keeps the tokens and decides when to reconnect. The other half of writing alone, the
    drafter's caches, is in `RemoteDraftState` of moa.py.

    A server that reads generated text again reads many tokens at once, as in a prompt. The last
    bits of its logits may therefore differ from those of the first reading and, in rare cases, the
    text may differ: see plumbing/kernels.py.
    """

    def __init__(self, channel: Channel, state: RemoteDraftState, config: GenerationConfig):
        self.channel = channel
        self.state = state
        self.config = config
        self.tokens: list[int] = []  # prompt and answer; the last token is the next root
        self.full_length = 0  # tokens of the prompt and of the longest answer that is allowed
        self.retry_at = 0.0  # do not reconnect before this moment
        self.backoff = INITIAL_BACKOFF  # seconds

    def prefill(self, prompt: list[int]) -> RemoteResult:
        """Connect, and let the server read the prompt. Raise InputError if the server does not
        answer: without a memory the drafter cannot begin."""
        self.tokens = list(prompt)
        self.full_length = len(prompt) + self.config.max_new_tokens
        with input_errors("no first token from the server", ConnectionLost):
            return self.connect_and_read()

    def verify(self, draft: Draft) -> RemoteResult:
        """Let the server verify a draft. If the server does not answer, reconnect at once: perhaps
        it has only restarted, or closed an idle connection. If this fails as well, let the drafter
        write alone."""
        try:
            return self.verify_remote(draft)
        except ConnectionLost as error:
            reason = str(error)
        if monotonic() >= self.retry_at:  # else it is too early after the last failed attempt
            try:
                return self.reconnect()  # the draft is lost: the server goes on after its root
            except ConnectionLost as error:
                reason += f"; then {error}"
        return self.draft_offline(reason)

    def draft_offline(self, reason: str) -> RemoteResult:
        """Let the drafter write alone, in place of a draft that no server would verify."""
        count = min(OFFLINE_TOKENS, self.full_length - len(self.tokens))
        root = self.tokens[-1]
        written = self.state.draft_unverified(root, count)
        self.tokens += written
        draft = Draft(root)  # an empty draft
        return RemoteResult(
            written[:-1], written[-1], memory=None, draft=draft, link="offline", reason=reason
        )

    def verify_remote(self, draft: Draft) -> RemoteResult:
        """Let the server verify a draft. Raise ConnectionLost if the server does not answer."""
        if not draft.q:  # nothing was drawn, so the order of the tokens is free
            # If the server has no room for all tokens, it leaves out the last ones.
            draft = draft.likeliest_first()
        # The server knows the root. All other tokens are sent.
        fields = {"call": "verify", "drafts": draft.tokens[1:], "parents": draft.parents[1:]}
        tensors = {}
        if draft.q:
            # The server expects the order of the parents. Quantizing loses nothing: q was quantized
            # before tokens were drawn from it, and a second time gives the same weights.
            q = torch.stack([draft.q[parent] for parent in sorted(draft.q)])
            ids, weights = quantize_probabilities(q)
            tensors = {"ids": ids.cpu(), "weights": weights.cpu()}
        return self.request(fields, tensors, draft)

    def reconnect(self) -> RemoteResult:
        """Connect again, and let the server read all tokens. If this fails, note when to try again,
        and raise ConnectionLost."""
        try:
            result = self.connect_and_read()
        except ConnectionLost:
            self.retry_at = monotonic() + self.backoff
            self.backoff *= 2
            raise
        self.backoff = INITIAL_BACKOFF
        return replace(result, link="reconnected")

    def connect_and_read(self) -> RemoteResult:
        """Make a new connection, over which the server reads all tokens so far. Return the server's
        token after them, and the memory that the drafter lacks. Raise ConnectionLost if the server
        does not answer, or has a different drafter."""
        greeting = self.channel.connect()
        if greeting.get("drafter") != self.state.drafter.checkpoint_hash:
            self.channel.close()
            raise ConnectionLost(
                "the server has another drafter; start both sides with the same --model and "
                "--drafter"
            )
        # The server gets a different seed. With the drafter's seed the server would draw the same
        # random numbers as the drafter, but acceptance needs independent ones.
        generator = self.state.sampling.generator
        seed = torch.randint(2**31 - 1, (), generator=generator, device=generator.device)
        left = self.full_length - len(self.tokens)
        config = replace(self.config, max_new_tokens=left, seed=int(seed))
        fields, tensors = text_request("read", self.tokens, config)
        fields["known"] = self.state.verified
        return self.request(fields, tensors, Draft(self.tokens[-1]))  # nothing is drafted

    def request(self, fields: dict, tensors: Tensors, draft: Draft) -> RemoteResult:
        """Send a request, and read the result from the reply. Raise ConnectionLost if no valid
        reply comes in time. draft: the draft to verify, or an empty one."""
        vocab_size = self.state.drafter.target.config.vocab_size
        with self.channel.closed_on_failure():
            self.channel.send(fields, tensors)
            reply = self.channel.receive()
            with refuse_malformed("reply"):
                path = draft.path_of(reply.fields["accepted"])
                accepted = [draft.tokens[node] for node in path[1:]]  # our own ints, never 9.0
                token = check_int(reply.fields["token"], 0, vocab_size - 1)
                # The reply has the memory of the prompt or, after a draft, of the root, of tokens
                # written offline, and of the accepted tokens.
                verified = self.tokens[self.state.verified:] + accepted
                memory = dequantize_memory(reply.tensors, verified, self.state)
        self.tokens += accepted + [token]
        return RemoteResult(accepted, token, memory, draft)


def text_request(call: str, text: list[int], config: GenerationConfig) -> tuple[dict, Tensors]:
    """Return the fields and tensors of a request: a text, and how to go on after the text."""
    fields = {"call": call, **vars(config), "stop_ids": sorted(config.stop_ids)}
    return fields, {"tokens": torch.tensor(text, dtype=torch.int32)}


# --- A plain API's client, with which the paper compares ---


def call_api(
    channel: Channel, prompt: list[int], config: GenerationConfig, vocab_size: int
) -> Iterator[int]:
    """Use the server as a plain API: the target decodes alone. Yield each token when it arrives.
    Raise InputError when the server is lost."""
    with input_errors("the answer ends here", ConnectionLost):
        channel.connect()
        with channel.closed_on_failure():
            channel.send(*text_request("generate", prompt, config))
            for _ in range(config.max_new_tokens):
                reply = channel.receive()
                with refuse_malformed("reply"):
                    token = check_int(reply.fields["token"], 0, vocab_size - 1)
                yield token
                if token in config.stop_ids:
                    return


# --- The paper's server: the target is there ---


# speculate.py imports this file, so the class of the server's verifier (speculate's
# `ExactVerifier`) is passed in: to `start_server` or `serve`, and from there to `TargetSession`.
class CachedVerifier(Verifier, Protocol):
    """What `TargetSession` uses of the server's verifier."""

    model: Llama
    cache: KVCache
    sampling: Sampling


# The int is the capacity of the verifier's cache, in slots.
NewVerifier = Callable[[Llama, Drafter, int, Sampling, OnPiece], CachedVerifier]


@dataclass
class TargetSession:
    """The server's side of one client: a `Session` of plumbing/messages.py.

    Each client has a thread of its own. All of them share one worker thread, which does the models'
    passes of all clients in turn: PyTorch keeps a pool of threads for each thread that calls it,
    and several pools would fight for the cores.

        a client's thread                                the worker thread
        receives a request, and calls `parse`
        in `run_in_worker`, submits `make_next`     ->   runs `read`, `verify` or `generate` until
        and checks that the client is still there        the function yields its next reply
        sends the reply                             <-
    """

    model: Llama
    drafter: Drafter
    worker: futures.ThreadPoolExecutor
    new_verifier: NewVerifier
    has_left: HasLeft
    verifier: CachedVerifier | None = None  # of the text that was read last
    root: int = 0  # the newest token, which the next draft follows

    @property
    def greeting(self) -> dict:
        return {"drafter": self.drafter.checkpoint_hash}

    def parse(self, fields: dict, tensors: Tensors) -> Callable[[], Replies]:
        """Check a request. Return a function that makes its replies."""
        call = fields["call"]
        # `verify`, `read` and `generate` are generators: they do nothing until asked for a reply.
        if call == "verify":
            replies = self.verify(parse_draft(fields, tensors, self.verifier, self.root))
        elif call == "read":
            tokens, config = parse_text(fields, tensors, self.model)
            known = check_int(fields.get("known", 0), 0, len(tokens) - 1)
            replies = self.read(tokens, config, known)
        elif call == "generate":
            replies = self.generate(*parse_text(fields, tensors, self.model))
        else:
            raise ValueError(f"unknown call {call!r:.40}")
        return partial(self.run_in_worker, replies)

    def read(self, tokens: list[int], config: GenerationConfig, known: int) -> Replies:
        """Begin a text, or begin it again after a lost connection."""
        # The cache needs room for the whole text and, after the text, for the root and the tokens
        # of a draft, which may yet be rejected.
        capacity = len(tokens) + config.max_new_tokens + 1 + MAX_DRAFT_TOKENS
        sampling = config.new_sampling(self.model.device)
        self.verifier = self.new_verifier(
            self.model, self.drafter, capacity, sampling, self.stop_if_client_left
        )
        yield self.make_reply(self.verifier.prefill(tokens), known)

    def verify(self, draft: Draft) -> Replies:
        """Verify a draft that follows the newest token."""
        yield self.make_reply(self.verifier.verify(draft))

    def make_reply(self, result: VerifyResult, known: int = 0) -> tuple[dict, Tensors]:
        """Note the next root, and return the fields and tensors of the reply, which omits the
        memory of the first `known` tokens."""
        self.root = result.token
        fields = {"accepted": result.accepted, "token": result.token}
        return fields, quantize_memory(result.memory, known)

    def generate(self, tokens: list[int], config: GenerationConfig) -> Replies:
        """Write with the target alone, as a plain API does. Yield a reply for each token."""
        for token in generate(self.model, tokens, config, self.stop_if_client_left):
            yield {"token": token}, {}

    def run_in_worker(self, replies: Replies) -> Replies:
        """Let the worker compute each reply when it is asked for. Raise ConnectionError as soon as
        the client has left."""
        while True:
            task = self.worker.submit(self.make_next, replies)
            while not futures.wait([task], timeout=0.1).done:
                self.stop_if_client_left()
            reply = task.result()
            if reply is None:
                return
            yield reply

    @torch.inference_mode()
    def make_next(self, replies: Replies) -> tuple[dict, Tensors] | None:
        self.stop_if_client_left()  # it may have left while the worker served others
        return next(replies, None)

    def stop_if_client_left(self, tokens_read: int = 0) -> None:
        """Raise ConnectionError if the client has left, so that no more work is done for it.
        `read_in_pieces` calls this as its `on_piece`, with tokens_read, which is not used here."""
        if self.has_left():
            raise ConnectionError("the client has left")


def serve(
    address: Address,
    models: Models,
    new_verifier: NewVerifier,
    announce: Callable[[Address], None],
) -> None:
    """Serve without end. `announce` is called with the address once clients can connect. Raise
    InputError if the server cannot listen there."""
    with futures.ThreadPoolExecutor(1) as worker:
        new_session = partial(TargetSession, models.target, models.drafter, worker, new_verifier)
        serve_sessions(address, new_session, announce)


def announce_on_terminal(address: Address) -> None:
    """Tell where the server listens, and how to connect."""
    host, port = address
    if ":" in host:  # an IPv6 address
        host = f"[{host}]"
    print(f"{host}:{port}", flush=True)  # for scripts
    command = f"python speculate.py --remote {host}:{port}"
    print(f"connect with: {command} (and this side's --model and --drafter)", file=sys.stderr)


def start_server(
    model: str, drafter: str | None, device: str, dtype: torch.dtype, new_verifier: NewVerifier
) -> Address:
    """Reduce this process to a quarter of its threads, and start a server in a new process, which
    loads the models. Return the server's address. Raise InputError if the server does not start.

    More threads would hardly speed a drafter up, and the server needs the cores.
    """
    torch.set_num_threads(max(1, torch.get_num_threads() // 4))
    context = get_context("spawn")
    pipe, server_pipe = context.Pipe()  # the two ends: the server will send its address
    process_args = (server_pipe, new_verifier, model, drafter, device, dtype)
    # Ctrl-C in a terminal reaches both processes, but is meant for this one.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server inherits this
    context.Process(target=serve_until_parent_ends, args=process_args, daemon=True).start()
    signal.signal(signal.SIGINT, on_interrupt)
    server_pipe.close()
    try:
        return pipe.recv()
    except EOFError:
        raise InputError("the server did not start: see above")


def serve_until_parent_ends(pipe: Connection, new_verifier: NewVerifier, *what_to_load) -> None:
    """Load models and serve until the parent process ends, however it ends. Send the server's
    address through the pipe. what_to_load: the arguments of `load_models`."""

    def end_with_parent() -> None:
        parent_process().join()
        os._exit(0)

    def load_and_serve() -> None:
        serve(("localhost", 0), load_models(*what_to_load), new_verifier, pipe.send)

    threading.Thread(target=end_with_parent, daemon=True).start()
    run_command(load_and_serve)


# --- The contents of messages: memories in 8 bits, texts and drafts ---


def quantize_memory(memory: MemoryUpdate, skip: int = 0) -> Tensors:
    """Turn a memory, without its first `skip` tokens, into what crosses the network: int8 keys and
    values (..., 2, D), and for each key and each value a float16 scale (..., 2, 1)."""
    tensors = {}
    for name, kv in (("cross", memory.cross_kv), ("reused", memory.reused_kv)):
        kv = kv[..., skip:, :].float().contiguous()
        kv = kv.unflatten(-1, (2, -1))  # keys and values apart
        largest = kv.abs().amax(-1, keepdim=True)
        # The scale is at least float16's smallest normal number. A scale of 0 would produce NaN,
        # and a smaller number would be rounded too coarsely: from 2**-14 on float16 rounds by
        # 1/2048 at most, so that no integer exceeds 127.
        scale = (largest / 127).clamp(min=2**-14).half()
        tensors[name] = (kv / scale).round().to(torch.int8).cpu()
        tensors[name + "_scale"] = scale.cpu()
    return tensors


def dequantize_memory(tensors: Tensors, tokens: list[int], state: DraftState) -> MemoryUpdate:
    """Read the memory of these tokens from a reply's tensors, the reverse of `quantize_memory`.
    Raise LookupError, RuntimeError or ValueError if the tensors are not such a memory."""
    memory = []
    for name, cache in (("cross", state.cross_cache), ("reused", state.reused_cache)):
        layers, batch, kv_heads, _, width = cache.kv.shape  # width: 2D
        shape = (layers, batch, kv_heads, len(tokens), 2)
        integers = tensors[name].view(*shape, width // 2)
        scale = tensors[name + "_scale"].view(*shape, 1)
        kv = integers.float() * scale.float()
        if not kv.isfinite().all():
            raise ValueError("the memory holds NaN or infinity")
        memory.append(kv.flatten(-2).to(cache.kv))  # the cache's dtype and device
    cross_kv, reused_kv = memory
    return MemoryUpdate(tokens, cross_kv[0], reused_kv)  # CA has one layer


# The next three functions check what a client has sent. If it is malformed, they raise one of the
# exceptions that `refuse_malformed` catches.


def parse_text(fields: dict, tensors: Tensors, model: Llama) -> tuple[list[int], GenerationConfig]:
    """Read a text and its GenerationConfig from a request. Text and answer must fit the context."""
    context = model.config.max_position_embeddings
    tokens = check_ids(tensors["tokens"], model.config.vocab_size)
    length = check_int(len(tokens), 1, context - 1, "length of the text")
    temperature = float(fields["temperature"])
    top_p = float(fields["top_p"])
    if not 0 <= temperature <= 100 or not 0 < top_p <= 1:
        raise ValueError(f"invalid sampling: temperature {temperature}, top-p {top_p}")
    config = GenerationConfig(
        max_new_tokens=check_int(fields["max_new_tokens"], 1, context - length, "max_new_tokens"),
        temperature=temperature,
        top_p=top_p,
        seed=check_int(fields["seed"], 0, 2**63 - 1, "seed"),
        stop_ids=frozenset(fields["stop_ids"]),
    )
    return tokens, config


def parse_draft(
    fields: dict, tensors: Tensors, verifier: CachedVerifier | None, root: int
) -> Draft:
    """Read a draft from a request. The draft must fit the model, the text and the context."""
    if verifier is None:
        raise ValueError("drafts must follow a text")
    sizes = verifier.model.config
    tokens = fields["drafts"]
    check_int(len(tokens), 0, MAX_DRAFT_TOKENS, "number of drafted tokens")
    draft = Draft(root)
    for i, (token, parent) in enumerate(zip(tokens, fields["parents"], strict=True)):
        check_int(token, 0, sizes.vocab_size - 1)
        check_int(parent, 0, i)  # the root, or a token before this one
        # The client sends likelier tokens first. Equal probabilities keep that order.
        draft.add(token, parent, probability=1.0)
    cache = verifier.cache
    positions = cache.length + max(map(len, draft.paths))
    slots = cache.length + len(draft.tokens)
    check_int(positions, 0, sizes.max_position_embeddings, "number of positions")
    check_int(slots, 0, cache.kv.shape[3], "number of slots in the cache")
    if verifier.sampling.temperature > 0 and tokens:
        draft.q = parse_distributions(draft, tensors, verifier.model)
    return draft


def parse_distributions(draft: Draft, tensors: Tensors, model: Llama) -> dict[int, Tensor]:
    """Read from a request, for each parent, the distribution (V) that its children were drawn
    from."""
    vocab_size = model.config.vocab_size
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
    return dict(zip(parents, q.to(model.device)))


# --- Command line: from flags to a link, from a link to a channel ---


def add_link_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `link_of` takes."""
    add = parser.add_argument
    add("--network", choices=PROFILES, help="simulate this network; the next four override it")
    add("--latency", type=flags.duration, help="one way, like 21ms")
    add("--jitter", type=flags.duration, help="standard deviation of the latency, like 19ms")
    add("--bandwidth", type=flags.bandwidth, help="each way, like 20Mbit")
    add("--loss", type=flags.loss_rate, help="share of packets that are lost, like 0.1%%")


def link_of(network: str | None, **flagged: float | None) -> Link | None:
    """Return the link that these flags describe, or None if no flag is given. flagged: fields of
    Link by name, each None if its flag is not given."""
    stated = {name: value for name, value in flagged.items() if value is not None}
    if network is None and not stated:
        return None
    return replace(PROFILES.get(network, Link()), **stated)


def open_channel(
    address: Address,
    link: Link,
    seed: int,
    prompt: list[int],
    outage_after: float = math.inf,
    outage_for: float = math.inf,
    timeout: float | None = None,
) -> Channel:
    """Return a channel for one answer. outage_after: tokens.

    The sum of the prompt's tokens is a part of the seed. The same prompt therefore meets the same
    delays again, and most other prompts meet different ones.
    """
    outage = Outage(outage_after, outage_for)
    return Channel(address, Network(link, seed + sum(prompt), outage), timeout)
