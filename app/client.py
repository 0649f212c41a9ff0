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

A server that cannot be reached, refuses to answer, is too late, or sends something malformed is
lost: whichever it is, an OSError is raised. Durations are in seconds, sizes in bytes. A moment is a
value of time.monotonic().
"""
from __future__ import annotations

import argparse
import math
import socket
from dataclasses import dataclass, field, replace
from time import monotonic, sleep
from typing import Iterator

from torch import Tensor

from app.exact import DetailedResult, likeliest_first
from llama import GenerationConfig
from moa import CacheUpdate, Draft, DraftLimits
from netsim import (
    INITIAL_RTO,
    PROFILES,
    Link,
    QuantizedDraftState,
    Read,
    Reply,
    SimulatedPath,
    Traffic,
    Verify,
    draw_seed,
    make_read,
    make_verify,
    parse_reply,
    retransmission_timeout,
)
from plumbing import flags
from plumbing.errors import explain, input_errors
from plumbing.messages import (
    Address,
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
            arrival += self.outage.ends - stopped + retransmission_timeout(self.link)
        return arrival

    def begin_connection(self) -> None:
        """Begin a new connection, which does not wait for what is in flight over the old one."""
        self.busy_until = 0.0
        self.last_arrival = 0.0
        self.first_rto = INITIAL_RTO


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


@dataclass
class Channel:
    """The client's end of a connection, in place of netsim's `Connection`.

    `connect` makes the first connection, `send` sends a request, and each call of `receive` waits
    for a reply. All three raise an OSError if the server is lost. Then `connect` again, or `close`.
    """

    address: Address
    link: Link = Link()  # simulated, the same in both directions; by default one without delay
    seed: int = 0  # of the delays
    outage: Outage = field(default_factory=Outage)  # by default one that never begins
    timeout: float | None = None  # for every reply; None: see `reply_timeout`
    # Of this side's target and drafter, by app/loading.py. A server with others is refused.
    fingerprints: dict[str, str] = field(default_factory=dict)

    traffic: Traffic = field(default_factory=Traffic)
    sock: socket.socket | None = None
    session: str = ""  # the server's name for this connection
    number: int = 0  # of the newest request over this connection
    is_new: bool = True  # no reply has come over this connection yet
    slowest: float = 0.0  # seconds waited for the slowest reply, over all connections
    server_clock: float = 0.0  # simulated moment of its last event: a request, or a reply

    def __post_init__(self):
        self.up = InterruptedPath(self.link, 2 * self.seed, self.outage)
        self.down = InterruptedPath(self.link, 2 * self.seed + 1, self.outage)

    def connect(self) -> None:
        """Make a new connection to the server, which must have the same target and drafter."""
        self.close()
        self.up.begin_connection()
        self.down.begin_connection()
        start = monotonic()
        if self.outage.overlaps(start, start):  # an outage at this moment
            raise ConnectionError("the network is down")
        timeout = INITIAL_RTO + self.reply_timeout()  # that of the previous connection
        deadline = start + min(CONNECT_SECONDS, timeout)  # of the real handshake
        try:
            with refuse_malformed("address"):  # a host name like a..b raises a ValueError
                self.sock = socket.create_connection(self.address, deadline - start)
        except ConnectionRefusedError:
            host, port = self.address
            raise ConnectionError(
                f"no server listens at {host}:{port}; start one there with "
                f"python speculate.py --serve {port}"
            ) from None
        except OSError as error:
            host, port = self.address
            raise ConnectionError(f"{host}:{port}: {explain(error)}") from None
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send at once
        greeting, size = receive_message(self.sock, MAX_REPLY, deadline)
        # Two round trips: SYN and SYN-ACK of TCP, then its ACK and the greeting.
        arrival = start
        for down_size in (0, size):
            arrival = self.up.arrival_of(arrival, 0)
            arrival = self.down.arrival_of(arrival, down_size)
        wait(arrival, start + timeout)
        self.traffic.bytes_down += size
        for part, ours in self.fingerprints.items():
            if greeting.get(part) != ours:  # with another target, tokens mean something else
                raise ConnectionError(
                    f"the server has another {part}; start both sides with the same --model and "
                    "--drafter"
                )
        self.session = greeting.get("session", "")
        self.number = 0
        self.is_new = True

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self.sock:
            self.sock.close()
        self.sock = None

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

    def send(self, fields: dict) -> None:
        """Send a request."""
        if self.sock is None:
            raise ConnectionError("not connected")
        self.number += 1
        sent = monotonic()
        size = send_message(self.sock, fields)
        self.traffic.bytes_up += size
        self.traffic.round_trips += 1
        self.server_clock = self.up.arrival_of(sent, size)

    def receive(self) -> dict:
        """Return the next reply, at the moment when it would arrive over the simulated network.

        A reply's field "elapsed" says how many seconds the server took: since the request arrived
        or, for a later reply to the same request, since the previous reply was ready.
        """
        start = monotonic()
        deadline = start + self.reply_timeout()
        reply, size = receive_message(self.sock, MAX_REPLY, deadline)
        with refuse_malformed("reply"):
            elapsed = max(0.0, float(reply.pop("elapsed")))  # NaN becomes 0
        self.server_clock += elapsed
        arrival = self.down.arrival_of(self.server_clock, size)
        wait(arrival, deadline)
        waited = monotonic() - start
        self.traffic.network_seconds += max(0.0, waited - elapsed)
        self.traffic.bytes_down += size
        self.slowest = max(self.slowest, waited)
        self.is_new = False
        return reply


# --- Drafting on alone ---

OFFLINE_TOKENS = 8  # tokens that the drafter writes alone before the client may reconnect
INITIAL_BACKOFF = 0.5  # seconds from a failed attempt to reconnect to the next; doubles each time


class RemoteDraftState(QuantizedDraftState):
    """Drafts for a target on a server, and goes on alone while the server is out of reach.

    Then no update arrives, and no draft can be verified. `ReconnectingVerifier` calls
    `draft_unverified`, whose tokens stay in SA's and TLI's caches as if they were verified: they
    count as text. As long as there are such tokens, `draft` returns the root alone. An example: in
    an outage after a text of 10 tokens, the drafter writes four tokens, twice.

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

    unverified = 0  # tokens in SA's and TLI's caches that count as text, without a memory

    @property
    def text_length(self) -> int:
        return self.ca_cache.length + self.unverified

    def append_verified(self, update: CacheUpdate | None) -> None:
        """Grow the caches. update: None while the server is out of reach."""
        if update is not None:
            self.unverified = 0  # the update appends these tokens again, now with a memory
            super().append_verified(update)

    def draft(self, root: int, limits: DraftLimits) -> Draft:
        return Draft(root) if self.unverified else super().draft(root, limits)

    def draft_unverified(self, root: int, count: int) -> list[int]:
        """Return `count` tokens drafted after the root. The caches keep the root and all of these
        tokens but the last as text."""
        draft = super().draft(root, DraftLimits(depth=count))
        self.unverified += len(self.expanded)
        return draft.tokens[1:]


class ReconnectingVerifier:
    """A `Verifier` like netsim's `RemoteVerifier`, which copes with a lost server.

    It makes a new connection, and asks the server for the reply that it missed. **A verdict once
    drawn stands.** Replies that accept many tokens are large, and therefore more often late. To
    have another verdict drawn in place of a late one would favor short ones, and the text would no
    longer be distributed as the target's own. If the server has no such reply, the client asks it
    to read all tokens so far. (The server then has not yet drawn a verdict, or has restarted, or
    has replied to MAX_KEPT_REPLIES other sessions since.)

    If no connection can be made, or if the repeated reply is missed twice, the drafter writes
    alone, and its tokens are unverified. They take the place of a verdict that was missed, which is
    then void. The next call tries again. In the following example the last of `tokens` is the next
    root:

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

    def __init__(self, channel: Channel, state: RemoteDraftState, config: GenerationConfig):
        self.channel = channel
        self.state = state
        self.config = config
        self.tokens: list[int] = []  # prompt and answer; the last token is the next root
        self.full_length = 0  # tokens of the prompt and of the longest answer that is allowed
        self.draft = Draft(0)  # that the newest request asks to verify; empty if it asks to read
        self.has_read = False  # the server has read the text over this connection
        self.missed: tuple[str, int] | None = None  # a request without a reply: session and number
        self.retry_at = 0.0  # do not reconnect before this moment
        self.backoff = INITIAL_BACKOFF  # seconds

    def prefill(self, prompt: list[int]) -> DetailedResult:
        """Connect, and let the server read the prompt. Raise InputError if the server does not
        answer: without a memory the drafter cannot begin."""
        self.tokens = list(prompt)
        self.full_length = len(prompt) + self.config.max_new_tokens
        with input_errors("no first token from the server", OSError):
            self.channel.connect()
            return replace(self.read(), link="connected")

    def verify(self, draft: Draft) -> DetailedResult:
        """Let the server verify a draft. If the server does not answer, reconnect at once: perhaps
        it has only restarted, or closed an idle connection. If this fails as well, let the drafter
        write alone."""
        try:
            return self.verify_online(draft)
        except OSError as error:
            reason = explain(error)
        if monotonic() >= self.retry_at:  # else it is too early after the last failed attempt
            try:
                return self.reconnect()
            except OSError as error:
                reason = explain(error)  # why it is still lost
            self.retry_at = monotonic() + self.backoff
            self.backoff *= 2
        return self.draft_offline(reason)

    def verify_online(self, draft: Draft) -> DetailedResult:
        """Let the server verify a draft, over the present connection."""
        if not self.has_read:
            return self.read()  # the draft is lost
        if not draft.q:  # nothing was drawn, so the order of the tokens is free
            # If the server has no room for all tokens, it leaves out the last ones.
            draft = likeliest_first(draft)
        self.draft = draft
        return self.request("verify", make_verify(draft))

    def read(self) -> DetailedResult:
        """Let the server read all tokens so far. It replies with its token after them, and with an
        update of all of them."""
        self.has_read = False
        self.draft = Draft(self.tokens[-1])
        left = self.full_length - len(self.tokens)
        config = replace(self.config, max_new_tokens=left)
        seed = draw_seed(self.state.sampling.generator)
        result = self.request("read", make_read(self.tokens, config, seed))
        self.has_read = True
        return result

    def request(self, call: str, request: Read | Verify) -> DetailedResult:
        """Send a request. Until its reply has come, it counts as missed."""
        self.channel.send({"call": call, **vars(request)})
        self.missed = self.channel.session, self.channel.number
        return self.result(self.channel.receive())

    def reconnect(self) -> DetailedResult:
        """Connect again. Take the reply that was missed or, if there is none, let the server read
        all tokens."""
        self.channel.connect()
        result = None
        if self.missed is not None:
            try:
                result = self.repeat()
            except OSError:  # the reply is missed again, but the server still has it
                self.channel.connect()
                result = self.repeat()
        result = result or self.read()
        self.backoff = INITIAL_BACKOFF
        return result

    def repeat(self) -> DetailedResult | None:
        """Ask for the reply that was missed. Return None if the server does not have it."""
        session, number = self.missed
        self.channel.send({"call": "repeat", "session": session, "number": number})
        reply = self.channel.receive()
        self.has_read = False  # over the new connection
        return self.result(reply) if reply else None

    def result(self, reply: dict) -> DetailedResult:
        """Check a reply, and return the result that it describes."""
        vocab_size = self.state.drafter.target.config.vocab_size
        with refuse_malformed("reply"):
            reply = Reply(**reply)
            path = self.draft.path_of(reply.accepted)
            accepted = [self.draft.tokens[node] for node in path[1:]]  # our own ints, never 9.0
            check_int(reply.token, 0, vocab_size - 1, "token")
            # The server has read all tokens up to the new one. CA lacks the last ones of these.
            lacking = (self.tokens + accepted)[self.state.ca_cache.length:]
            update = parse_reply(reply, lacking).update
            update.ca_kv = newest(update.ca_kv, len(lacking), self.state.ca_cache.kv[0])
            update.tli_kv = newest(update.tli_kv, len(lacking), self.state.tli_cache.kv)
        self.missed = None
        self.tokens += accepted + [reply.token]
        link = "connected" if self.has_read else "reconnected"
        return DetailedResult(accepted, reply.token, update, self.draft, link=link)

    def draft_offline(self, reason: str) -> DetailedResult:
        """Let the drafter write alone, in place of a draft that no server would verify.

        Return its last token as `token`, because it is the next root, and all others in `accepted`.
        """
        self.channel.close()
        self.missed = None  # these tokens take the place of the reply
        count = min(OFFLINE_TOKENS, self.full_length - len(self.tokens))
        root = self.tokens[-1]
        written = self.state.draft_unverified(root, count)
        self.tokens += written
        return DetailedResult(
            written[:-1], written[-1], None, Draft(root), link="offline", reason=reason
        )


def newest(kv: Tensor, count: int, cache_kv: Tensor) -> Tensor:
    """Return the keys and values of the last `count` tokens (..., count, 2D) that a server has
    sent. Raise ValueError if they do not fit into this cache."""
    kv = kv[..., -count:, :]
    if kv.shape != cache_kv[..., :count, :].shape or not kv.isfinite().all():
        raise ValueError("the update has another shape, or holds NaN or infinity")
    return kv


# --- A plain API's client, with which the paper compares ---


def call_api(
    channel: Channel, prompt: list[int], config: GenerationConfig, vocab_size: int
) -> Iterator[int]:
    """Use the server as a plain API: the target decodes alone. Yield each token when it arrives.
    Raise InputError when the server is lost."""
    request = vars(make_read(prompt, config, config.seed))
    with input_errors("the answer ends here", OSError):
        channel.connect()
        channel.send({"call": "generate", **request, "stop_ids": sorted(config.stop_ids)})
        for _ in range(config.max_new_tokens):
            token = channel.receive().get("token")
            with refuse_malformed("reply"):
                check_int(token, 0, vocab_size - 1, "token")
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
    outage_after: float = math.inf,
    outage_for: float = math.inf,
    **others,
) -> Channel:
    """Return a channel for one answer. outage_after: tokens. others: fields of Channel.

    The sum of the prompt's tokens is a part of the seed. The same prompt therefore meets the same
    delays again, and most other prompts meet different ones.
    """
    outage = Outage(outage_after, outage_for)
    return Channel(address, link, seed + sum(prompt), outage, **others)
