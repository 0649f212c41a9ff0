"""The network between drafter and target: a simulated link, a real protocol (paper, section 5).

The drafter runs on a consumer device and the target on a server. How much that slows them down
depends on the network between them. Here any network can be tried on one machine. Messages cross a
real TCP socket at once, so they have their real sizes. When a reply is here, the client computes
when it would have arrived over the simulated link, and sleeps until that moment. A seed repeats the
random draws: jitter and lost packets.

    python speculate.py --remote --network 4g --prompt "Why is the sky blue?" --trace

The server may also be on another machine. Then a round trip takes as long as the slower of the two
networks, the real and the simulated one. Without flags such as --network nothing is simulated.

The link comes first and stands alone. The client's channel follows, a real connection on which the
link is simulated. Then come the paper's client, `RemoteVerifier`, its server, `TargetSession`, and
the contents of their messages. Last are plain API use, with which the paper compares, and the flags
that describe a link.

Everywhere, durations are in seconds, sizes in bytes and bandwidths in bits per second. A moment is
a value of time.monotonic().
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
# The client has the reply after 30 ms, sleeps for another 43.1 ms, and then uses it. The server
# knows nothing of the simulation. Each reply only states how long the server took for it, and
# everything else is arithmetic of the client: see `Channel.receive`.
#
# A packet can be lost. TCP sends it again if the other side has not confirmed it within the
# retransmission timeout (RTO), and doubles this timeout each time. Real TCP often notices a loss
# sooner, by later packets that are confirmed or by a probe. That is left out, so losses cost too
# much here, above all with drafts, which wait for every reply. Congestion control, slow start and
# other people's traffic are left out, too.

MSS = 1460  # bytes of a message in one packet: Ethernet's 1500, less the headers of IP and TCP
INITIAL_RTO = 1.0  # seconds, as long as no round trip has been measured (RFC 6298)
MIN_RTO_MARGIN = 0.2  # seconds: Linux adds no less to the mean round trip (its tcp_rto_min)


@dataclass(frozen=True)
class Link:
    """The properties of one direction of a network.

    A message's latency is drawn from a normal distribution. A negative draw becomes 0, which makes
    the mean a little longer: 10.8 ms for 10 with a jitter of 10.
    """

    latency: float = 0.0  # seconds: the mean of that distribution
    jitter: float = 0.0  # seconds: its standard deviation
    bandwidth: float = math.inf  # bits per second
    loss: float = 0.0  # share of the packets, from 0 to 1

    def retransmission_timeout(self) -> float:
        """Return the RTO in seconds, once TCP has measured round trips: their mean, plus four times
        their mean deviation (RFC 6298). Linux adds at least MIN_RTO_MARGIN to the mean."""
        # A round trip is the sum of two draws, so its standard deviation is sqrt(2) jitter. The
        # mean deviation of a normal distribution is sqrt(2 / pi) of that. On 4g: 42 + 200 ms.
        deviation = 2 * self.jitter / math.sqrt(math.pi)
        return 2 * self.latency + max(4 * deviation, MIN_RTO_MARGIN)


# The paper's networks, the same both ways. It gives 5G no bandwidth: the 100 Mbit/s are assumed.
PROFILES = {  # latency, jitter, bandwidth, loss
    "wan": Link(0.0045, 0.000, 50e6),
    "5g": Link(0.0100, 0.010, 100e6, 0.001),
    "4g": Link(0.0210, 0.019, 20e6, 0.001),
}


@dataclass
class Outage:
    """The one outage that a network may have, in both directions. It begins when `after` tokens
    have come, and lasts `seconds`.

    It loses no message for good, because TCP sends again until it gets through. A message that is
    in flight during the outage is late by as much of the outage as comes after it is sent, plus one
    RTO. An example: an outage from 1.0 s to 1.3 s on a link of 20 ms, whose RTO is 0.24 s.

        sent      would arrive    outage left    arrives
        0.99 s       1.01 s          0.3 s       1.01 + 0.3 + 0.24 = 1.55 s
        1.10 s       1.12 s          0.2 s       1.12 + 0.2 + 0.24 = 1.56 s
        1.40 s       1.42 s          nothing     1.56 s: in order, after the one before

    If the outage never ends, none of the three arrives, and the client gives up at a deadline (see
    Channel.reply_timeout). Real TCP takes longer to notice the end of a long outage, as it doubles
    its timeout. By then the client will usually have given up.
    """

    after: float = math.inf  # tokens
    seconds: float = math.inf
    begins: float = math.inf  # a moment, which `begin_if_due` sets

    def begin_if_due(self, count: int, now: float) -> None:
        """Begin at the moment `now`, if `count` tokens are enough and it has not begun yet."""
        if count >= self.after:
            self.begins = min(self.begins, now)

    @property
    def ends(self) -> float:
        return self.begins + self.seconds  # infinity if it never begins, or never ends

    def overlaps(self, sent: float, arrival: float) -> bool:
        """Tell whether it meets a message that is in flight from `sent` to `arrival`."""
        return sent < self.ends and self.begins <= arrival


class SimulatedPath:
    """Computes when messages arrive that are sent over a link, with random draws of its own."""

    def __init__(self, link: Link, outage: Outage, seed: int):
        self.link = link
        self.outage = outage
        self.random = random.Random(seed)
        self.reset()

    def reset(self) -> None:
        """Begin a new connection: what is still in flight belongs to the old one."""
        self.busy_until = 0.0  # the moment when all bytes so far have left
        self.last_arrival = 0.0  # the moment when the last message so far arrives
        self.rto = INITIAL_RTO  # of the next message

    def send(self, sent: float, size: int) -> float:
        """Send a message of `size` bytes at the moment `sent`. Returns the moment when it arrives:
        infinity if an outage without end meets it. Call it in the order of sending."""
        # Its bytes leave one after the other, and after those of the messages before it.
        self.busy_until = max(self.busy_until, sent) + 8 * size / self.link.bandwidth
        propagation = max(0.0, self.random.gauss(self.link.latency, self.link.jitter))
        arrival = self.busy_until + propagation

        # All packets are sent. Those that are lost are sent again after the RTO, which doubles each
        # time, until none is missing.
        rto = self.rto
        missing = max(1, math.ceil(size / MSS))  # at least one: a handshake's has no bytes of ours
        while missing > 0:
            missing = sum(self.random.random() < self.link.loss for _ in range(missing))
            if missing > 0:
                arrival += rto
                rto *= 2
        self.rto = self.link.retransmission_timeout()  # of later messages

        # Nothing moves during an outage. Then TCP sends again, one RTO later.
        if self.outage.overlaps(sent, arrival):
            stopped = max(sent, self.outage.begins)
            arrival += self.outage.ends - stopped + self.rto

        # TCP delivers in order.
        self.last_arrival = max(self.last_arrival, arrival)
        return self.last_arrival


class Network:
    """The same link in both directions, and perhaps an outage."""

    def __init__(self, link: Link, seed: int = 0, outage: Outage | None = None):
        self.outage = outage or Outage()  # which never begins
        self.up = SimulatedPath(link, self.outage, 2 * seed)  # two seeds, so that the two differ
        self.down = SimulatedPath(link, self.outage, 2 * seed + 1)


def wait(arrival: float, deadline: float) -> None:
    """Sleep until the moment `arrival`. Raises TimeoutError if the moment `deadline` comes
    first."""
    sleep(max(0.0, min(arrival, deadline) - monotonic()))
    if arrival > deadline:
        raise TimeoutError("timed out")


# --- The client's channel ---
#
# If the server takes too long, the client gives the connection up. It waits
#
#     for the first reply     at least FIRST_REPLY_SECONDS, because the server has a text to read
#     for any other reply     ten times as long as for the slowest so far, at least MIN_TIMEOUT
#     for a new connection    as long as it would for a reply over the old one, plus INITIAL_RTO
#                             for one lost packet
#
# With --timeout it waits that long for every reply.

FIRST_REPLY_SECONDS = 60.0  # the first of each connection: after a loss a text is read again
MIN_TIMEOUT = 1.0  # seconds: mostly enough for a packet that is lost twice
CONNECT_SECONDS = 10.0  # at most for the real handshake: a server may not be there
MAX_REPLY = 1 << 30  # bytes: enough for the memory of a prompt of 131,072 tokens, 8,000 bytes each


class ConnectionLost(Exception):
    """The server cannot be reached, refuses, is too late, or sends what cannot be understood."""


@dataclass
class Traffic:
    """What a client has sent, received and waited for. Of connecting, only bytes are counted."""

    bytes_up: int = 0
    bytes_down: int = 0
    round_trips: int = 0  # requests
    network_seconds: float = 0.0  # to send and to wait for replies, less the server's own time


@dataclass
class Channel:
    """The client's end of a connection on which a network is simulated.

    `send` sends a request, and each call of `receive` waits for one reply to it. Call both, and
    use what has come, within `closed_on_failure`: if anything fails there, the connection is
    closed. `connect` makes the first one and, if the caller wants to go on, another.
    """

    address: Address
    network: Network
    timeout: float | None = None  # seconds to wait for every reply; None: see reply_timeout
    sock: socket.socket | None = None
    is_new: bool = True  # no reply has come over this connection yet
    slowest: float = 0.0  # seconds waited for the slowest reply, over all connections
    server_clock: float = 0.0  # simulated: when it had the request or its last reply ready
    traffic: Traffic = field(default_factory=Traffic)

    def connect(self) -> dict:
        """Make a new connection. Returns the fields of the server's greeting. Raises
        ConnectionLost."""
        self.close()
        network = self.network
        network.up.reset()
        network.down.reset()
        start = monotonic()
        if network.outage.overlaps(start, start):  # now, that is
            raise ConnectionLost("the network is down")
        # `reply_timeout` is still that of the connection before. If replies came over it, this is
        # short, so that a dead network is noticed soon.
        timeout = INITIAL_RTO + self.reply_timeout()
        deadline = start + min(CONNECT_SECONDS, timeout)  # of the real handshake
        host, port = self.address
        with self.closed_on_failure(f"no connection to {host}:{port}"):
            self.sock = socket.create_connection(self.address, deadline - start)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send at once
            greeting = receive_message(self.sock, MAX_FIELDS, deadline)
            self.traffic.bytes_down += greeting.size
            # Two round trips: SYN and SYN-ACK of TCP, then its ACK and the greeting.
            arrival = start
            for down_size in (0, greeting.size):
                arrival = network.up.send(arrival, 0)
                arrival = network.down.send(arrival, down_size)
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
        """Close the connection and raise ConnectionLost if an OSError occurs in here, or if what
        has come is malformed."""
        try:
            with refuse_malformed("data"):  # an invalid host name, like a..b, is a ValueError, too
                yield
        except OSError as error:
            self.close()
            raise ConnectionLost(f"{complaint}: {error}")

    def reply_timeout(self) -> float:
        """Return how many seconds to wait for the next reply.

        The first reply, for which the server reads a text, is usually the slowest. It counts for
        the later ones, too: while the server reads another client's text, they take as long.
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
        self.server_clock = self.network.up.send(sent, size)

    def receive(self) -> Message:
        """Return the next reply, at the moment when it would arrive over the simulated network.

        Its `elapsed` is how long it took the server, since it had the request or, if it is a
        further reply, since the one before was ready.
        """
        start = monotonic()
        deadline = start + self.reply_timeout()
        reply = receive_message(self.sock, MAX_REPLY, deadline)
        elapsed = max(0.0, float(reply.fields["elapsed"]))  # NaN becomes 0
        self.server_clock += elapsed
        arrival = self.network.down.send(self.server_clock, reply.size)
        wait(arrival, deadline)
        waited = monotonic() - start
        self.traffic.network_seconds += max(0.0, waited - elapsed)
        self.traffic.bytes_down += reply.size
        self.slowest = max(self.slowest, waited)
        self.is_new = False
        return reply


# --- The paper's client and server: what they say to each other ---
#
# The server greets a client with the hash of its drafter. Then the client calls:
#
#     call        sends                                gets back
#     read        a text, GenerationConfig, known      accepted [], token, memory of the text
#     verify      drafts, parents, q of each parent    accepted, token, memory of what is verified
#     generate    a text, GenerationConfig             token: a reply for each
#
# "read" and "verify" are the two calls of a verifier in `speculate`, prefill and verify. "generate"
# is a plain API. The text's tokens, memory (in 8 bits) and q are tensors, everything else is in
# fields.
#
# known: the client already has the memory of this many tokens, and the reply leaves it out.
# q goes up, quantized, if the drafted tokens were drawn from it. An example, a chain of two of
# which the target accepts one:
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


# --- The paper's client: the drafter is here ---


@dataclass
class RemoteResult(VerifyResult):
    """What a cycle with a target on a server brings.

    Offline the tokens are the drafter's: all but the last in `accepted`, the last in `token`, as it
    is the next root. They have no memory, so `memory` is None.
    """

    link: str = "connected"  # "reconnected": the draft was lost; or "offline"
    reason: str = ""  # why it is offline


class RemoteVerifier:
    """Verifies the drafts of one conversation by a target on a server.

    When the server is lost, it is asked over a new connection to read the text so far. If it does,
    only the draft is lost. If not, the drafter writes alone, and what it writes is unverified. The
    next call tries again. An example, in which `text` always ends with the next root:

        what happens                                       text              has a memory
        prefill: the server's token is 7                   5 9 2 7           5 9 2
        verify: no reply, the drafter writes 4 8 alone     5 9 2 7 4 8       5 9 2
        verify: connected again, the server's token is 1   5 9 2 7 4 8 1     5 9 2 7 4 8

    A server that reads generated text again reads many tokens at once, as in a prompt. So the last
    bits of its logits may differ from before and, in rare cases, the text: see plumbing/kernels.py.
    """

    def __init__(self, channel: Channel, state: RemoteDraftState, config: GenerationConfig):
        self.channel = channel
        self.state = state
        self.config = config
        self.text: list[int] = []  # prompt and answer, up to the next root
        self.full_length = 0  # of the text with the longest answer that is allowed
        self.retry_at = 0.0  # the moment from which on to reconnect
        self.backoff = INITIAL_BACKOFF  # seconds

    def prefill(self, prompt: list[int]) -> RemoteResult:
        """Connect, and let the server read the prompt. Raises InputError if it does not answer:
        without a memory the drafter cannot begin."""
        self.text = list(prompt)
        self.full_length = len(prompt) + self.config.max_new_tokens
        with input_errors("no first token from the server", ConnectionLost):
            return self.connect_and_read()

    def verify(self, draft: Draft) -> RemoteResult:
        """Let the server verify a draft. If it does not answer, reconnect at once: it may only have
        restarted, or closed an idle connection. If that fails too, let the drafter write alone."""
        try:
            return self.verify_remote(draft)
        except ConnectionLost as loss:
            try:
                return self.reconnect()  # the draft is lost: the server goes on after its root
            except ConnectionLost as error:
                return self.draft_offline(f"{loss}; then {error}")

    def draft_offline(self, reason: str) -> RemoteResult:
        """Let the drafter write alone, in place of a draft that nobody would verify."""
        count = min(OFFLINE_TOKENS, self.full_length - len(self.text))
        draft = Draft(self.text[-1])  # of nothing
        tokens = self.state.draft_unverified(draft.tokens[0], count)
        self.text += tokens
        return RemoteResult(
            tokens[:-1], tokens[-1], memory=None, draft=draft, link="offline", reason=reason
        )

    def verify_remote(self, draft: Draft) -> RemoteResult:
        """Let the server verify a draft. Raises ConnectionLost."""
        if not draft.q:  # nothing was drawn, so the order is free
            draft = draft.likeliest_first()  # a server without room for all leaves out the last
        # All but the root, which the server knows.
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
        """`connect_and_read`, unless it is too early after an attempt that failed. Raises
        ConnectionLost."""
        if monotonic() < self.retry_at:
            raise ConnectionLost("too early to try again")
        try:
            result = self.connect_and_read()
        except ConnectionLost:
            self.retry_at = monotonic() + self.backoff
            self.backoff *= 2
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
                "the server has another drafter; start both sides with the same --model and "
                "--drafter"
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
            self.channel.send(fields, tensors)
            reply = self.channel.receive()
            path = draft.path_of(reply.fields["accepted"])
            accepted = [draft.tokens[node] for node in path[1:]]  # ints, even if the reply has 9.0
            vocab_size = self.state.drafter.target.config.vocab_size
            token = check_int(reply.fields["token"], 0, vocab_size - 1)
            # The reply has the memory of all text that had none yet, which is the root and, after
            # an outage, what was written offline, and of what is accepted.
            verified = self.text[self.state.verified:] + accepted
            memory = dequantize_memory(reply.tensors, verified, self.state)
        self.text += accepted + [token]
        return RemoteResult(accepted, token, memory, draft)


def text_request(call: str, text: list[int], config: GenerationConfig) -> tuple[dict, Tensors]:
    """Return fields and tensors of a request that sends a text and how to go on after it."""
    fields = {"call": call, **vars(config), "stop_ids": sorted(config.stop_ids)}
    return fields, {"tokens": torch.tensor(text, dtype=torch.int32)}


# --- The paper's server: the target is there ---


class CachedVerifier(Verifier, Protocol):
    """What TargetSession uses of `speculate.LocalVerifier`."""

    model: Llama
    cache: KVCache
    sampling: Sampling


# The int is the capacity of its cache, in slots.
NewVerifier = Callable[[Llama, Drafter, int, Sampling, OnPiece], CachedVerifier]


@dataclass
class TargetSession:
    """The server's side of one client: a `Session` of plumbing/messages.py.

    One worker thread does the models' passes of all clients in turn: PyTorch keeps a pool of
    threads for each thread that calls it, and several pools would fight for the cores.
    """

    model: Llama
    drafter: Drafter
    worker: futures.ThreadPoolExecutor
    new_verifier: NewVerifier
    has_left: HasLeft
    verifier: CachedVerifier | None = None  # of the text that was read last
    root: int = 0  # of the next draft: the newest token

    @property
    def greeting(self) -> dict:
        return {"drafter": self.drafter.checkpoint_hash}

    def parse(self, fields: dict, tensors: Tensors) -> Callable[[], Replies]:
        """Check a request. Returns a function that makes its replies."""
        call = fields["call"]
        if call == "verify":
            work = partial(self.verify, parse_draft(fields, tensors, self.verifier, self.root))
        elif call == "read":
            tokens, config = parse_text(fields, tensors, self.model)
            known = check_int(fields.get("known", 0), 0, len(tokens) - 1)
            work = partial(self.read, tokens, config, known)
        elif call == "generate":
            work = partial(self.generate, *parse_text(fields, tensors, self.model))
        else:
            raise ValueError(f"unknown call {call!r:.40}")
        return partial(self.run_in_worker, work)

    def read(self, tokens: list[int], config: GenerationConfig, known: int) -> Replies:
        """Begin a text, or begin it again after a lost connection."""
        # The whole text, and after it a draft that may yet be rejected: its root and its tokens.
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
        """Note the next root. The reply leaves out the memory of the first `known` tokens."""
        self.root = result.token
        fields = {"accepted": result.accepted, "token": result.token}
        return fields, quantize_memory(result.memory, known)

    def generate(self, tokens: list[int], config: GenerationConfig) -> Replies:
        """Write alone, as a plain API does: a reply for each token."""
        for token in generate(self.model, tokens, config, self.stop_if_client_left):
            yield {"token": token}, {}

    def run_in_worker(self, work: Callable[[], Replies]) -> Replies:
        """Let the worker make each reply of `work`, when it is asked for. Raises ConnectionError as
        soon as the client has left."""
        replies = work()
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
        self.stop_if_client_left()  # it may have left while others were served
        return next(replies, None)

    def stop_if_client_left(self, tokens_read: int = 0) -> None:
        """Raise ConnectionError if the client has left, so that no more work is done for it. This
        is also called after each piece of a prompt, with the number of tokens read so far."""
        if self.has_left():
            raise ConnectionError("the client has left")


def serve(
    address: Address,
    models: Models,
    new_verifier: NewVerifier,
    announce: Callable[[Address], None],
) -> None:
    """Serve without end. `announce` is told the address. Raises InputError."""
    with futures.ThreadPoolExecutor(1) as worker:
        new_session = partial(TargetSession, models.target, models.drafter, worker, new_verifier)
        serve_sessions(address, new_session, announce)


def announce_on_terminal(address: Address) -> None:
    """Tell where the server listens, and how to connect."""
    host, port = address
    if ":" in host:  # a number of IPv6
        host = f"[{host}]"
    print(f"{host}:{port}", flush=True)  # for scripts
    command = f"python speculate.py --remote {host}:{port}"
    print(f"connect with: {command} (and this side's --model and --drafter)", file=sys.stderr)


def start_server(
    model: str, drafter: str | None, device: str, dtype: torch.dtype, new_verifier: NewVerifier
) -> Address:
    """Start a server in a process of its own, which loads the models. Returns its address.

    This process gets by with a quarter of its threads from then on: more of them hardly speed a
    drafter up, and the server needs the cores.
    """
    torch.set_num_threads(max(1, torch.get_num_threads() // 4))
    context = get_context("spawn")
    pipe, server_pipe = context.Pipe()
    process_args = (server_pipe, new_verifier, model, drafter, device, dtype)
    # Ctrl-C in a terminal reaches both processes. It is meant for this one.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the server inherits
    context.Process(target=serve_until_parent_ends, args=process_args, daemon=True).start()
    signal.signal(signal.SIGINT, on_interrupt)
    server_pipe.close()
    try:
        return pipe.recv()
    except EOFError:
        raise InputError("the server did not start: see above")


def serve_until_parent_ends(pipe: Connection, new_verifier: NewVerifier, *what_to_load) -> None:
    """Load models and serve until the parent process ends, however it ends. The pipe takes the
    server's address. what_to_load: the arguments of `load_models`."""

    def end_with_parent() -> None:
        parent_process().join()
        os._exit(0)

    def load_and_serve() -> None:
        serve(("localhost", 0), load_models(*what_to_load), new_verifier, pipe.send)

    threading.Thread(target=end_with_parent, daemon=True).start()
    run_command(load_and_serve)


# --- What their messages hold: memories in 8 bits, texts and drafts ---


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


# The next functions check what has come over the network. If it is malformed, they raise one of the
# exceptions that `refuse_malformed` catches.


def parse_text(fields: dict, tensors: Tensors, model: Llama) -> tuple[list[int], GenerationConfig]:
    """Read a text off a request, and how to go on after it within the context."""
    context = model.config.max_position_embeddings
    tokens = check_ids(tensors["tokens"], model.config.vocab_size)
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


def parse_draft(fields: dict, tensors: Tensors, verifier: Verifier | None, root: int) -> Draft:
    """Read a draft off a request. It must fit the model, the text and its context."""
    if verifier is None:
        raise ValueError("drafts must follow a text")
    sizes = verifier.model.config
    tokens = fields["drafts"]
    check_int(len(tokens), 0, MAX_DRAFT_TOKENS)
    draft = Draft(root)
    for i, (token, parent) in enumerate(zip(tokens, fields["parents"], strict=True)):
        check_int(token, 0, sizes.vocab_size - 1)
        check_int(parent, 0, i)  # the root, or a token before this one
        # The client sends likelier tokens first. Equal probabilities keep that order.
        draft.add(token, parent, probability=1.0)
    cache = verifier.cache
    longest = max(map(len, draft.paths))
    check_int(cache.length + longest, 0, sizes.max_position_embeddings)  # positions
    check_int(cache.length + len(draft.tokens), 0, cache.kv.shape[3])  # slots
    if verifier.sampling.temperature > 0 and tokens:
        draft.q = parse_distributions(draft, tensors, verifier.model)
    return draft


def parse_distributions(draft: Draft, tensors: Tensors, model: Llama) -> dict[int, Tensor]:
    """Read off a request what the children of each parent were drawn from."""
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


# --- Plain API use, with which the paper compares ---


def call_api(
    channel: Channel, prompt: list[int], config: GenerationConfig, vocab_size: int
) -> Iterator[int]:
    """Use the server as a plain API: it decodes alone. Raises InputError when it is lost."""
    with input_errors("the answer ends here", ConnectionLost):
        channel.connect()
        with channel.closed_on_failure():
            channel.send(*text_request("generate", prompt, config))
            for _ in range(config.max_new_tokens):
                token = check_int(channel.receive().fields["token"], 0, vocab_size - 1)
                yield token
                if token in config.stop_ids:
                    return


# --- Command line: a link from flags ---


def add_link_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `link_of` takes."""
    add = parser.add_argument
    add("--network", choices=PROFILES, help="simulate this network; the next four override it")
    add("--latency", type=flags.duration, help="one way, like 21ms")
    add("--jitter", type=flags.duration, help="standard deviation of the latency, like 19ms")
    add("--bandwidth", type=flags.bandwidth, help="each way, like 20Mbit")
    add("--loss", type=flags.loss_rate, help="of packets, like 0.1%%")


def link_of(network: str | None, **flagged: float | None) -> Link | None:
    """Return the link that these flags describe, None if they describe none. flagged: any of Link's
    fields, by name."""
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
    """Return a channel for one answer. The prompt is a part of the seed: each has delays of its
    own, and asking one again repeats them. outage_after: tokens."""
    outage = Outage(outage_after, outage_for)
    return Channel(address, Network(link, seed + sum(prompt), outage), timeout)
