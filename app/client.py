"""A client over a real socket, which survives the loss of its server.

netsim.py joins client and server in one process. Here the same messages cross a TCP socket to a
server in another process, or on another machine (app/server.py), and the same arithmetic delays
them. A round trip takes as long as the slower of the two networks, the real and the simulated one.
Without flags such as --network nothing is simulated.

    python speculate.py --remote --network 4g --prompt "Why is the sky blue?" --trace
    python speculate.py --remote --latency 21ms --disconnect-after 20 --disconnect-for 2s --show

What a network can do to a client, and what the client does about it:

    a reply is late          wait, but not forever: `Channel.reply_timeout`
    the connection breaks    make a new one, and ask for the reply that was missed
    there is no network      let the drafter write alone, and try again after growing pauses

Durations are in seconds, sizes in bytes. A moment is a value of time.monotonic().
"""
from __future__ import annotations

import argparse
import math
import socket
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic, sleep
from typing import Iterator

import torch

from app.exact import likeliest_first
from app.results import DetailedResult
from llama import GenerationConfig, Sampling
from moa import CacheUpdate, Draft, Drafter, DraftLimits
from netsim import (
    INITIAL_RTO,
    PROFILES,
    Link,
    Message,
    QuantizedDraftState,
    RemoteVerifier,
    SimulatedPath,
    Tensors,
    Traffic,
    make_read,
)
from plumbing import flags
from plumbing.errors import input_errors
from plumbing.messages import (
    MAX_FIELDS,
    Address,
    ReceivedMessage,
    check_int,
    receive_message,
    refuse_malformed,
    send_message,
)

# --- Outages ---


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


class InterruptedPath(SimulatedPath):
    """A simulated path with an outage. (The outage is the same object for both directions.)"""

    def __init__(self, link: Link, seed: int, outage: Outage):
        super().__init__(link, seed)
        self.outage = outage

    def travel(self, sent: float, size: int) -> float:
        """Return infinity if an outage without end stops the message."""
        arrival = super().travel(sent, size)
        if self.outage.overlaps(sent, arrival):  # nothing moves; one RTO later, TCP sends again
            stopped = max(sent, self.outage.begins)
            arrival += self.outage.ends - stopped + self.link.retransmission_timeout()
        return arrival

    def begin_connection(self) -> None:
        """Begin a new connection, which does not wait for what is in flight over the old one."""
        self.busy_until = 0.0
        self.last_arrival = 0.0
        self.rto = INITIAL_RTO


def wait(arrival: float, deadline: float) -> None:
    """Sleep until the moment `arrival`. Raise TimeoutError if the moment `deadline` comes first."""
    sleep(max(0.0, min(arrival, deadline) - monotonic()))
    if arrival > deadline:
        raise TimeoutError("timed out")


# --- The channel: a real connection, on which a network is simulated ---

FIRST_REPLY_SECONDS = 60.0  # for the first reply over a connection: the server reads a whole text
MIN_TIMEOUT = 1.0  # seconds: usually enough for a packet that is lost twice
CONNECT_SECONDS = 10.0  # for the real handshake at most: there may be no server at the address
MAX_REPLY = 1 << 30  # bytes: enough for the update of a prompt of 131,072 tokens, 8,000 bytes each


class ConnectionLost(Exception):
    """The server cannot be reached, refuses to answer, is too late, or sends malformed data."""


class Channel:
    """The client's end of a connection, in place of netsim's `Connection`.

    Where the same message gets several replies, `send` sends it and each call of `receive` waits
    for a reply. Call both within `closed_on_failure`, which closes the connection if a call fails.
    `connect` makes the first connection, and a new one if the caller wants to go on after a
    failure.
    """

    def __init__(
        self,
        address: Address,
        link: Link = Link(),
        seed: int = 0,
        outage: Outage | None = None,
        timeout: float | None = None,
        fingerprints: dict[str, str] | None = None,
    ):
        """link: simulated, the same in both directions; by default one without delay. timeout: for
        every reply; None: see `reply_timeout`. fingerprints: of this side's target and drafter, by
        app/loading.py. A server with others is refused."""
        self.address = address
        self.outage = outage or Outage()  # by default one that never begins
        self.up = InterruptedPath(link, 2 * seed, self.outage)
        self.down = InterruptedPath(link, 2 * seed + 1, self.outage)
        self.timeout = timeout
        self.fingerprints = fingerprints or {}
        self.traffic = Traffic()
        self.sock: socket.socket | None = None
        self.is_new = True  # no reply has come over this connection yet
        self.slowest = 0.0  # seconds waited for the slowest reply, over all connections
        self.server_clock = 0.0  # simulated moment of its last event: a request, or a reply
        self.session = ""  # the server's name for this connection
        self.number = 0  # of the newest request, counted over all connections
        # The session and the number of a request whose reply was missed.
        self.unanswered: tuple[str, int] | None = None

    def connect(self) -> None:
        """Make a new connection. Raise ConnectionLost if the server does not answer in time, or has
        another target or drafter."""
        self.close()
        self.up.begin_connection()
        self.down.begin_connection()
        start = monotonic()
        if self.outage.overlaps(start, start):  # an outage at this moment
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
                arrival = self.up.arrival_of(arrival, 0)
                arrival = self.down.arrival_of(arrival, down_size)
            wait(arrival, start + timeout)
        self.is_new = True
        self.session = greeting.fields.get("session", "")
        self.check_fingerprints(greeting.fields)

    def check_fingerprints(self, greeting: dict) -> None:
        """Raise ConnectionLost if the server has another target or drafter: drafts would be useless
        and, with another target, tokens would mean something else."""
        for part, ours in self.fingerprints.items():
            if greeting.get(part) != ours:
                self.close()
                raise ConnectionLost(
                    f"the server has another {part}; start both sides with the same --model and "
                    "--drafter"
                )

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

    def request(self, message: Message) -> Message:
        """Send a request, and return its reply. Raise ConnectionLost if no reply comes in time.

        Requests are numbered. If the reply is missed, `unanswered` says which one it was.
        """
        fields, tensors = message
        self.number += 1
        with self.closed_on_failure():
            if self.sock is not None:
                self.unanswered = (self.session, self.number)
            self.send({**fields, "number": self.number}, tensors)
            reply = self.receive()
        self.unanswered = None
        return reply.fields, reply.tensors

    def send(self, fields: dict, tensors: Tensors) -> None:
        """Send a request."""
        if self.sock is None:
            raise ConnectionLost("not connected")
        sent = monotonic()
        size = send_message(self.sock, fields, tensors)
        self.traffic.network_seconds += monotonic() - sent
        self.traffic.bytes_up += size
        self.traffic.round_trips += 1
        self.server_clock = self.up.arrival_of(sent, size)

    def receive(self) -> ReceivedMessage:
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
        arrival = self.down.arrival_of(self.server_clock, reply.size)
        wait(arrival, deadline)
        waited = monotonic() - start
        self.traffic.network_seconds += max(0.0, waited - elapsed)
        self.traffic.bytes_down += reply.size
        self.slowest = max(self.slowest, waited)
        self.is_new = False
        return reply


# --- Drafting on alone ---

OFFLINE_TOKENS = 8  # tokens that the drafter writes alone before the client may reconnect
INITIAL_BACKOFF = 0.5  # seconds from a failed attempt to reconnect to the next; doubles each time


class RemoteDraftState(QuantizedDraftState):
    """Drafts for a target on a server, and goes on alone while the server is out of reach.

    Then no update arrives, and no draft can be verified. `draft` returns the root alone, and
    `ReconnectingVerifier` calls `draft_unverified`, whose tokens stay in SA's and TLI's caches as
    if they were verified: they count as text. An example: in an outage after a text of 10 tokens,
    the drafter writes four tokens, twice.

                                             tokens in the caches:   SA   CA   TLI   unverified
        before                                                       10   10   10        0
        draft_unverified(root, 4)                                    14   10   14        4
        draft_unverified(root, 4)                                    18   10   18        8
        append_verified of 9 tokens: the server is back              19   19   19        0

    Each call caches its root and the first three of its four tokens. The fourth token is the next
    root. The 9 verified tokens are the first root and the 8 tokens written offline, which the
    server has now read as part of the text. The server did not choose these 8 tokens, so an
    answer's statistics still count them as unverified.
    """

    def __init__(self, drafter: Drafter, capacity: int, sampling: Sampling):
        super().__init__(drafter, capacity, sampling)
        self.offline = False
        self.unverified = 0  # tokens in SA's and TLI's caches that count as text, without a memory

    @property
    def text_length(self) -> int:
        return self.ca_cache.length + self.unverified

    def append_verified(self, update: CacheUpdate | None) -> None:
        """Grow the caches. update: None while the server is out of reach."""
        self.offline = update is None
        if update is not None:
            self.unverified = 0  # the update appends these tokens again, now with a memory
            super().append_verified(update)

    def draft(self, root: int, limits: DraftLimits) -> Draft:
        if self.offline:
            return Draft(root)
        return super().draft(root, limits)

    def draft_unverified(self, root: int, count: int) -> list[int]:
        """Return `count` tokens drafted after the root. The caches keep the root and all of these
        tokens but the last as text."""
        # super(): while offline, our own `draft` drafts nothing.
        draft = super().draft(root, DraftLimits(depth=count))
        self.unverified += len(self.expanded)
        return draft.tokens[1:]


class ReconnectingVerifier(RemoteVerifier):
    """A `RemoteVerifier` that copes with a lost server.

    It makes a new connection, and asks the server for the reply that it missed. **A verdict once
    drawn stands.** Replies that accept many tokens are large, and therefore more often late. To
    have another verdict drawn in place of a late one would favor short ones, and the text would no
    longer be distributed as the target's own. If the server has no such reply, no verdict was drawn
    (or the server has restarted). The client then asks it to read all tokens so far.

    If no connection can be made, the drafter writes alone, and its tokens are unverified. (They
    take the place of a verdict that was missed, which is then void.) The next call tries again. In
    the following example the last of `tokens` is the next root:

        what happens                                         tokens               have a memory
        prefill: the server's token is 7                     5 9 2 7              5 9 2
        verify [4 8]: the reply, 4 accepted and then 6,
            is late; it is repeated over a new connection    5 9 2 7 4 6          5 9 2 7 4
        verify [3 3]: the server has not read this text yet
            over the new connection; it does, and draws 8    5 9 2 7 4 6 8        5 9 2 7 4 6
        verify: no network, the drafter writes 4 8 alone     5 9 2 7 4 6 8 4 8    5 9 2 7 4 6
        verify: connected again, the server's token is 1     ... 4 6 8 4 8 1      ... 4 6 8 4 8

    This class keeps the tokens and decides when to reconnect. The other half of writing alone, the
    drafter's caches, is in `RemoteDraftState`.

    A server that reads generated text again reads many tokens at once, as in a prompt. The last
    bits of its logits may therefore differ from those of the first reading and, in rare cases, the
    text may differ: see plumbing/kernels.py.
    """

    connection: Channel
    state: RemoteDraftState

    def __init__(self, channel: Channel, state: RemoteDraftState, config: GenerationConfig):
        super().__init__(channel, state, config)
        self.full_length = 0  # tokens of the prompt and of the longest answer that is allowed
        self.draft = Draft(0)  # that the newest request asks to verify; empty if it asks to read
        self.has_read = False  # the server has read the text over this connection
        self.retry_at = 0.0  # do not reconnect before this moment
        self.backoff = INITIAL_BACKOFF  # seconds

    def prefill(self, prompt: list[int]) -> DetailedResult:
        """Connect, and let the server read the prompt. Raise InputError if the server does not
        answer: without a memory the drafter cannot begin."""
        self.tokens = list(prompt)
        self.full_length = len(prompt) + self.config.max_new_tokens
        with input_errors("no first token from the server", ConnectionLost):
            self.connection.connect()
            return replace(self.read(), link="connected")

    def verify(self, draft: Draft) -> DetailedResult:
        """Let the server verify a draft. If the server does not answer, reconnect at once: perhaps
        it has only restarted, or closed an idle connection. If this fails as well, let the drafter
        write alone."""
        try:
            return self.verify_online(draft)
        except ConnectionLost as error:
            reason = str(error)
        if monotonic() >= self.retry_at:  # else it is too early after the last failed attempt
            try:
                return self.reconnect()
            except ConnectionLost as error:
                reason += f"; then {error}"
        return self.draft_offline(reason)

    def verify_online(self, draft: Draft) -> DetailedResult:
        """Let the server verify a draft. Raise ConnectionLost if it does not answer."""
        if not self.has_read:
            return self.read()  # the draft is lost
        if not draft.q:  # nothing was drawn, so the order of the tokens is free
            # If the server has no room for all tokens, it leaves out the last ones.
            draft = likeliest_first(draft)
        self.draft = draft
        return super().verify(draft)

    def read(self) -> DetailedResult:
        """Let the server read all tokens so far. It replies with its token after them, and with the
        update that the drafter lacks."""
        self.has_read = False
        self.draft = Draft(self.tokens[-1])
        left = self.full_length - len(self.tokens)
        config = replace(self.config, max_new_tokens=left)
        fields, tensors = make_read(self.tokens, config, self.new_seed())
        fields["known"] = self.state.ca_cache.length
        result = self.request((fields, tensors))
        self.has_read = True
        return result

    def reconnect(self) -> DetailedResult:
        """Connect again. Take the reply that was missed or, if there is none, let the server read
        all tokens. If this fails, note when to try again, and raise ConnectionLost."""
        missed = self.connection.unanswered
        try:
            self.connection.connect()
            result = self.repeat(*missed) if missed else None
            if result is None:
                result = self.read()
        except ConnectionLost:
            self.retry_at = monotonic() + self.backoff
            self.backoff *= 2
            raise
        self.backoff = INITIAL_BACKOFF
        return result

    def repeat(self, session: str, number: int) -> DetailedResult | None:
        """Ask for the reply to an earlier request. Return None if the server does not have it."""
        fields = {"call": "repeat", "session": session, "missed": number}
        fields, tensors = self.connection.request((fields, {}))
        if "token" not in fields:
            return None
        result = self.parse_reply(fields, tensors)
        self.has_read = False  # over the new connection
        return result

    def parse_reply(self, fields: dict, tensors: Tensors) -> DetailedResult:
        """Check a reply, and return the result that it describes. Raise ConnectionLost if the reply
        is malformed."""
        vocab_size = self.state.drafter.target.config.vocab_size
        with self.connection.closed_on_failure(), refuse_malformed("reply"):
            path = self.draft.path_of(fields["accepted"])
            accepted = [self.draft.tokens[node] for node in path[1:]]  # our own ints, never 9.0
            token = check_int(fields["token"], 0, vocab_size - 1)
            check_update(tensors)
            result = super().parse_reply({"accepted": accepted, "token": token}, tensors)
        link = "connected" if self.has_read else "reconnected"
        return DetailedResult(accepted, token, result.update, self.draft, link=link)

    def draft_offline(self, reason: str) -> DetailedResult:
        """Let the drafter write alone, in place of a draft that no server would verify.

        Return its last token as `token`, because it is the next root, and all others in `accepted`.
        """
        self.connection.unanswered = None  # other tokens take the place of a reply that was missed
        count = min(OFFLINE_TOKENS, self.full_length - len(self.tokens))
        root = self.tokens[-1]
        written = self.state.draft_unverified(root, count)
        self.tokens += written
        return DetailedResult(
            written[:-1], written[-1], None, Draft(root), link="offline", reason=reason
        )


def check_update(tensors: Tensors) -> None:
    """Raise ValueError if what a server has sent cannot be an update. (Its sizes are checked where
    it is put into shape.)"""
    for name in ("ca", "tli"):
        scale = tensors[name + "_scale"]
        if tensors[name].dtype != torch.int8 or scale.dtype != torch.half:
            raise ValueError("the update has another dtype")
        if not scale.isfinite().all():
            raise ValueError("the update holds NaN or infinity")


# --- A plain API's client, with which the paper compares ---


def call_api(
    channel: Channel, prompt: list[int], config: GenerationConfig, vocab_size: int
) -> Iterator[int]:
    """Use the server as a plain API: the target decodes alone. Yield each token when it arrives.
    Raise InputError when the server is lost."""
    with input_errors("the answer ends here", ConnectionLost):
        channel.connect()
        fields, tensors = make_read(prompt, config, config.seed)
        fields |= {"call": "generate", "stop_ids": sorted(config.stop_ids)}
        with channel.closed_on_failure():
            channel.send(fields, tensors)
            for _ in range(config.max_new_tokens):
                reply = channel.receive()
                with refuse_malformed("reply"):
                    token = check_int(reply.fields["token"], 0, vocab_size - 1)
                yield token
                if token in config.stop_ids:
                    return


# --- From flags to a link, from a link to a channel ---


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
    fingerprints: dict[str, str] | None = None,
    outage_after: float = math.inf,
    outage_for: float = math.inf,
    timeout: float | None = None,
) -> Channel:
    """Return a channel for one answer. outage_after: tokens.

    The sum of the prompt's tokens is a part of the seed. The same prompt therefore meets the same
    delays again, and most other prompts meet different ones.
    """
    outage = Outage(outage_after, outage_for)
    return Channel(address, link, seed + sum(prompt), outage, timeout, fingerprints)
