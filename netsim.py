"""The network between drafter and target: real messages, simulated delays (paper, section 5).

The drafter runs on a consumer device and the target on a server. How much that slows them down
depends on the network between them. This file lets one machine stand for both ends of any network:

    Messages cross a real TCP socket, at once. When a reply is here, the client computes when it
    would have arrived over the simulated link, the way of the request included, and sleeps until
    that moment.

So the messages have their real sizes and a seed repeats all delays, without a second machine and
without special rights on this one.

An example: the link takes 21 ms each way and 20 Mbit/s. The client sends a request of 250 bytes.
The server works on it for 30 ms, and its reply has 2500 bytes.

    what happens                        real clock    simulated clock
    the client has sent the request         0 ms          0.0 ms
    the server has the request              0 ms         21.1 ms    8 * 250 bits at 20e6/s, + 21 ms
    the server has sent the reply          30 ms         51.1 ms    30 ms of work
    the client has the reply               30 ms         73.1 ms    8 * 2500 bits at 20e6/s, + 21 ms

The client has the reply after 30 ms, sleeps for another 43.1 ms, and then uses it. The server knows
nothing of the simulation: it only states in each reply for how long it has worked ("elapsed"), and
all else is the client's arithmetic.

    python speculate.py --remote --network 4g --prompt "Why is the sky blue?" --trace

The file has five parts: the link and its outage; messages; the client's channel; the server; and
the quantities of the command line. The simulation is the first part, and the arithmetic of
`Channel.connect` and `Channel.request`. The rest is a real protocol, which would work without. So
to understand the simulation read as far as "Messages", then `Channel.request`. The file does not
simulate congestion control, slow start or other people's traffic, and it encrypts nothing.

Everywhere, durations are in seconds, sizes in bytes and bandwidths in bits per second. A moment is
a value of time.monotonic().
"""
import argparse
import hmac
import json
import math
import os
import random
import re
import socket
import socketserver
import struct
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic, sleep
from typing import Callable, Iterator, NamedTuple, Protocol

import safetensors.torch
from torch import Tensor

Address = tuple[str, int]  # host and port
Tensors = dict[str, Tensor]  # by name


# --- The link ---
#
# A packet can be lost. TCP sends it again if the other side has not confirmed it within the
# retransmission timeout (RTO), and doubles this timeout each time. (Real TCP often notices a loss
# sooner, by later packets that are confirmed or by a probe. That is left out: so losses cost too
# much here.)

MSS = 1460  # bytes of a message in one packet: Ethernet's 1500, less the headers of IP and TCP
INITIAL_RTO = 1.0  # seconds, as long as no round trip has been measured (RFC 6298)
MIN_RTO_MARGIN = 0.2  # seconds: Linux adds no less to the mean round trip (its tcp_rto_min)


@dataclass(frozen=True)
class Link:
    """One direction of a network, in numbers.

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
    """The one outage that a network may have, both ways. It begins when `after` tokens have come,
    and lasts `seconds`.

    It loses no message for good, because TCP sends again until it gets through. So a message that
    is in flight while it lasts arrives later: by the rest of the outage, counted from its sending
    or, if the outage begins after that, from its beginning, plus one RTO.

    An example: an outage from 1.0 s to 1.3 s on a link of 20 ms, whose RTO is 0.24 s.

        sent      would arrive    outage left    arrives
        0.99 s       1.01 s          0.3 s       1.01 + 0.3 + 0.24 = 1.55 s
        1.10 s       1.12 s          0.2 s       1.12 + 0.2 + 0.24 = 1.56 s
        1.40 s       1.42 s          nothing     1.56 s: in order, after the one before

    If the outage never ends, none of the three arrives: whoever waits for them gives up at a
    deadline (see Channel.reply_timeout).

    Real TCP needs longer to notice the end of a long outage, as it doubles its timeout. By then
    the client will usually have given up.
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


class Direction:
    """One direction of a network, with random draws of its own."""

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

        # Nothing moves while an outage lasts. Then TCP sends again, one RTO later.
        if self.outage.overlaps(sent, arrival):
            stopped = max(sent, self.outage.begins)
            arrival += self.outage.ends - stopped + self.rto

        # TCP delivers in order.
        self.last_arrival = max(self.last_arrival, arrival)
        return self.last_arrival


class Network:
    """A link both ways, and perhaps an outage."""

    def __init__(self, link: Link, seed: int = 0, outage: Outage | None = None):
        self.outage = outage or Outage()  # which never begins
        self.up = Direction(link, self.outage, 2 * seed)  # two seeds, so that the two differ
        self.down = Direction(link, self.outage, 2 * seed + 1)


def wait(arrival: float, deadline: float) -> None:
    """Sleep until the moment `arrival`. If the moment `deadline` comes first, raises TimeoutError
    then."""
    sleep(max(0.0, min(arrival, deadline) - monotonic()))
    if arrival > deadline:
        raise TimeoutError("timed out")


# --- Messages ---
#
# A message is a header, then fields as a JSON object, then tensors in the safetensors format:
#
#     "MoAs" | version | size of fields | size of tensors | fields | tensors
#        4   |    1    |        4       |        8        |        |            bytes
#
# (The simulation needs none of what follows.) A client first has to prove that it knows the
# server's secret. The server sends a random number, the nonce, and the client answers with an HMAC
# of it, which nobody can compute without the secret. The secret itself never crosses the network,
# and an answer that somebody has overheard is worthless, because the next connection has another
# nonce.

HEADER = struct.Struct("!4sBIQ")  # "!": big-endian, as is usual in networks, and no padding
MAGIC = b"MoAs"  # to notice at once a peer that speaks another protocol
VERSION = 4  # of this format: a peer with another one would misread our messages
MAX_FIELDS = 1 << 16  # bytes: the longest fields, a draft of 64 tokens, have less than a thousand
MAX_REPLY = 1 << 30  # bytes: enough for the memory of a prompt of 131 072 tokens, 8000 bytes each
MAX_PIECE = 1 << 16  # bytes in one call: so memory grows with what comes, not what is announced
NONCE = 32  # bytes: 256 random bits never come twice
DIGEST = 32  # bytes of an HMAC with SHA-256
SECRET = "MOA_SECRET"  # the environment variable that holds the secret of both sides
CONNECT_SECONDS = 10.0  # to connect, or to send a piece: a stalled peer must not hold us


class ProtocolError(OSError):
    """The peer broke the rules."""


@contextmanager
def refuse_malformed(what: str) -> Iterator[None]:
    """To read what is malformed raises one of many exceptions. In here all of them become a
    ProtocolError."""
    wrong = (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)
    try:
        yield
    except (*wrong, safetensors.SafetensorError) as error:
        raise ProtocolError(f"malformed {what}: {error!r:.200}")


class Message(NamedTuple):
    """A message that has been received."""

    fields: dict
    tensors: Tensors
    size: int  # bytes, with the header


def send_message(sock: socket.socket, fields: dict, tensors: Tensors) -> int:
    """Send a message. Returns its size in bytes.

    Raises OSError, for example TimeoutError if the peer does not take a piece in CONNECT_SECONDS.
    """
    text = json.dumps(fields, separators=(",", ":")).encode()
    data = safetensors.torch.save(tensors) if tensors else b""
    message = HEADER.pack(MAGIC, VERSION, len(text), len(data)) + text + data
    sock.settimeout(CONNECT_SECONDS)
    for first in range(0, len(message), MAX_PIECE):  # the timeout is for each of them
        sock.sendall(message[first:first + MAX_PIECE])
    return len(message)


def receive_message(sock: socket.socket, limit: int, deadline: float) -> Message:
    """Receive the next message.

    Raises OSError: ConnectionError if the peer leaves, ProtocolError if the message is malformed or
    longer than `limit` bytes, TimeoutError at the moment `deadline`.
    """
    header = receive_bytes(sock, HEADER.size, deadline)
    magic, version, text_size, data_size = HEADER.unpack(header)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError("malformed message: wrong magic bytes or version")
    size = HEADER.size + text_size + data_size
    if text_size > MAX_FIELDS or size > limit:
        raise ProtocolError(f"a message of {size} bytes is too long")
    text = receive_bytes(sock, text_size, deadline)
    data = receive_bytes(sock, data_size, deadline)
    with refuse_malformed("message"):
        fields = {**json.loads(text)}  # a TypeError unless it is an object
        tensors = safetensors.torch.load(data) if data else {}
    return Message(fields, tensors, size)


def receive_bytes(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Receive the next `size` bytes. Raises OSError: TimeoutError at the moment `deadline`,
    ConnectionError if the peer closes the connection before."""
    received = bytearray()  # it grows with what comes, not with what is announced
    while len(received) < size:
        left = deadline - monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left)
        piece = sock.recv(min(size - len(received), MAX_PIECE))
        if not piece:
            raise ConnectionError("the peer closed the connection")
        received += piece
    return bytes(received)


def answer_nonce(secret: str, nonce: bytes) -> bytes:
    """Return the DIGEST bytes that prove that the client knows the secret."""
    # The secret is an environment variable: fsencode returns its bytes, whatever they are.
    return hmac.digest(os.fsencode(secret), nonce, "sha256")


# --- The client ---
#
# There are two kinds of timeouts. That of the simulated TCP, the RTO, only delays a message. After
# that of the client, `reply_timeout`, the connection is given up.

FIRST_REPLY_SECONDS = 60.0  # for a connection's first reply, for which the server reads a text
MIN_TIMEOUT = 1.0  # seconds for any other: a packet that is lost twice mostly comes in time


class ConnectionLost(Exception):
    """The server did not answer, not in time or not sensibly."""


@dataclass
class Traffic:
    """What a client has sent, received and waited for. (Connecting counts in bytes only.)"""

    bytes_up: int = 0
    bytes_down: int = 0
    round_trips: int = 0  # requests
    network_seconds: float = 0.0  # until each request's first reply, less the server's work on it


@dataclass(repr=False)  # it holds a secret
class Channel:
    """The client's end of a connection. If anything goes wrong, the connection is closed, and
    `connect` makes another."""

    address: Address
    secret: str
    network: Network
    timeout: float | None = None  # seconds to wait for a reply; None: see reply_timeout
    sock: socket.socket | None = None
    is_new: bool = True  # no reply has come over this connection yet
    slowest: float = 0.0  # seconds waited for the slowest reply, over all connections
    traffic: Traffic = field(default_factory=Traffic)

    def connect(self) -> dict:
        """Connect and authenticate. Returns the fields of the server's greeting. Raises
        ConnectionLost."""
        self.close()
        network = self.network
        network.up.reset()
        network.down.reset()
        start = monotonic()
        if network.outage.overlaps(start, start):  # now, that is
            raise ConnectionLost("the network is down")
        # How long the simulated handshake may take: one lost packet, and as long as a reply. (Here
        # `reply_timeout` still speaks of the connection before: a minute if there was none or it
        # brought no reply, else ten times the slowest. So a dead network is noticed soon.)
        timeout = INITIAL_RTO + self.reply_timeout()
        deadline = start + min(CONNECT_SECONDS, timeout)  # in real time
        host, port = self.address
        with self.closed_on_failure(f"no server at {host}:{port}"):
            self.sock = socket.create_connection(self.address, deadline - start)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send at once
            nonce = receive_bytes(self.sock, NONCE, deadline)
            self.sock.sendall(answer_nonce(self.secret, nonce))
            greeting = receive_message(self.sock, MAX_FIELDS, deadline)
            self.traffic.bytes_up += DIGEST
            self.traffic.bytes_down += NONCE + greeting.size

            # Three round trips:   up             down
            #                      SYN            SYN-ACK
            #                      ACK            the nonce
            #                      the digest     the greeting
            #
            # (The server sends the nonce as soon as it has the ACK.)
            arrival = start
            for up_size, down_size in ((0, 0), (0, NONCE), (DIGEST, greeting.size)):
                arrival = network.up.send(arrival, up_size)
                arrival = network.down.send(arrival, down_size)
            wait(arrival, start + timeout)
        self.is_new = True
        if "refused" in greeting.fields:
            self.close()
            raise ConnectionLost(f"the server refused: {greeting.fields['refused']!r:.200}")
        return greeting.fields

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self.sock:
            self.sock.close()
        self.sock = None

    @contextmanager
    def closed_on_failure(self, complaint: str = "no answer from the server") -> Iterator[None]:
        """Use the connection in here, and what comes over it. If any of this fails, the connection
        is closed, and ConnectionLost raised."""
        try:
            with refuse_malformed("data"):  # also a host name like a..b
                yield
        except OSError as error:
            self.close()
            raise ConnectionLost(f"{complaint}: {error}")

    def reply_timeout(self) -> float:
        """Return the seconds after which a reply counts as lost: `timeout`, or else ten times the
        slowest so far, and at least MIN_TIMEOUT (for a connection's first: FIRST_REPLY_SECONDS).

        The reply to the prompt, mostly the slowest, counts, too: while the server reads another
        client's prompt, it answers us as late.
        """
        if self.timeout is not None:
            return self.timeout
        least = FIRST_REPLY_SECONDS if self.is_new else MIN_TIMEOUT
        return max(least, 10 * self.slowest)

    def request(self, fields: dict, tensors: Tensors) -> Iterator[Message]:
        """Send a request. Yields its replies, each when it has arrived: ask for no more than will
        come.

        A reply's `elapsed` is how long the server has worked since the request or, for a further
        reply, since the one before. So server_clock, which begins when the simulated request
        arrives, moves by it from reply to reply.

        Call it, and read its replies, within `closed_on_failure`.
        """
        if self.sock is None:
            raise ConnectionLost("not connected")
        # Moments of one clock: sent, asked and deadline are real; server_clock and arrival, which
        # lie later, are simulated.
        sent = monotonic()
        size = send_message(self.sock, fields, tensors)
        self.traffic.bytes_up += size
        self.traffic.round_trips += 1
        server_clock = self.network.up.send(sent, size)  # simulated: it has the request
        asked = sent
        is_first = True
        while True:  # one round for each reply
            deadline = asked + self.reply_timeout()
            reply = receive_message(self.sock, MAX_REPLY, deadline)
            elapsed = max(0.0, float(reply.fields["elapsed"]))  # NaN becomes 0
            server_clock += elapsed  # it has sent this reply
            arrival = self.network.down.send(server_clock, reply.size)
            wait(arrival, deadline)
            waited = monotonic() - asked
            if is_first:
                self.traffic.network_seconds += max(0.0, waited - elapsed)
            self.traffic.bytes_down += reply.size
            self.slowest = max(self.slowest, waited)
            self.is_new = False
            is_first = False
            yield reply
            asked = monotonic()  # the caller's own work does not count


# --- The server ---
#
# `MessageServer` accepts clients. Each has a `ClientHandler`, in a thread of its own. Once the
# client has proved that it knows the secret, the handler asks a `Session` for its replies.

MAX_REQUEST = 1 << 20  # bytes: a prompt of 131 072 tokens takes half of it
MAX_CLIENTS = 8  # each of them has a KV cache of the target
IDLE_SECONDS = 300.0  # then a client without a request loses its place


class Session(Protocol):
    """What a server does for one client. That of speculate.py is `TargetSession`."""

    greeting: dict  # the fields of the first message to the client

    def answer(self, fields: dict, tensors: Tensors) -> Iterator:
        """Return the replies to a request, each a pair of fields and tensors. Raises what
        `refuse_malformed` expects if the request is malformed: at once, not with the replies."""


class MessageServer(socketserver.ThreadingTCPServer):
    """Give a thread and a session to every client that knows the secret."""

    allow_reuse_address = True  # a restarted server need not wait until its old port is free
    request_queue_size = 128  # not yet accepted: a burst of connections must not be refused

    def __init__(self, address: Address, secret: str, new_session: Callable[[], Session]):
        """Begin to listen. Raises OSError if it cannot listen at the address, ValueError if other
        machines could connect and there is no secret."""
        self.secret = secret
        self.new_session = new_session
        self.places = threading.Semaphore(MAX_CLIENTS)
        self.sockets = set()  # of all clients
        self.unauthenticated = {}  # those of them that have not proved anything, the oldest first
        super().__init__(address, ClientHandler)
        host = self.server_address[0]  # as a number, which is known only now
        if not secret and not host.startswith("127."):
            self.server_close()
            raise ValueError(f"to serve beyond this machine, set a secret: {SECRET} on both sides")

    def process_request(self, request: socket.socket, client_address: Address) -> None:
        """socketserver calls this for a new connection, whose socket it calls a request, before it
        starts the thread. (So server_close knows of it, even if that is called first.)"""
        self.sockets.add(request)
        super().process_request(request, client_address)

    def server_close(self) -> None:
        """Disconnect all clients, and wait for their threads to end."""
        self.disconnect(list(self.sockets))
        super().server_close()

    def disconnect(self, connections: list[socket.socket]) -> None:
        """End connections. Their threads notice, and clean up."""
        for sock in connections:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended already


class ClientHandler(socketserver.StreamRequestHandler):
    """The server's end of a connection to one client. self.connection is its socket."""

    server: MessageServer
    disable_nagle_algorithm = True  # send small messages at once, without waiting for more bytes

    def handle(self) -> None:
        """Serve the client until it leaves. If it breaks a rule, disconnect it, with a line on
        stderr."""
        try:
            self.authenticate()
            self.serve()
        except ConnectionError:
            pass  # the client has left
        except OSError as error:
            print(f"{self.client_address[0]}: {error}", file=sys.stderr)
        finally:
            self.server.sockets.discard(self.connection)

    def authenticate(self) -> None:
        """Let the client prove that it knows the secret. Raises ProtocolError if it does not."""
        unauthenticated = self.server.unauthenticated
        unauthenticated[self.connection] = None
        # Anyone can open connections and say nothing. Keep the newest, four for each place.
        self.server.disconnect(list(unauthenticated)[:-4 * MAX_CLIENTS])
        try:
            nonce = os.urandom(NONCE)
            self.connection.sendall(nonce)
            digest = receive_bytes(self.connection, DIGEST, monotonic() + CONNECT_SECONDS)
        finally:
            del unauthenticated[self.connection]
        # compare_digest takes the same time wherever the two differ, and so gives no hint.
        if not hmac.compare_digest(digest, answer_nonce(self.server.secret, nonce)):
            self.send({"refused": f"wrong secret; both sides take it from {SECRET}"}, {})
            raise ProtocolError("wrong secret")

    def serve(self) -> None:
        """Answer one request after the other, until an OSError ends it, at the latest when the
        client leaves. If no place is free, refuse."""
        if not self.server.places.acquire(blocking=False):
            self.send({"refused": f"it has {MAX_CLIENTS} clients, its limit"}, {})
            return
        try:
            session = self.server.new_session()
            self.send(session.greeting, {})
            while True:
                deadline = monotonic() + IDLE_SECONDS
                try:
                    request = receive_message(self.connection, MAX_REQUEST, deadline)
                except TimeoutError:
                    raise ProtocolError(f"no whole request within {IDLE_SECONDS:g} s")
                since = monotonic()
                with refuse_malformed("request"):
                    replies = session.answer(request.fields, request.tensors)
                for fields, tensors in replies:
                    now = monotonic()
                    self.send({**fields, "elapsed": round(now - since, 6)}, tensors)
                    since = now
        finally:
            self.server.places.release()

    def send(self, fields: dict, tensors: Tensors) -> None:
        """Send a message to the client."""
        send_message(self.connection, fields, tensors)


# --- The command line ---
#
# Types for argparse. What they raise becomes one line that says what was expected.


def quantity(units: dict[str, float], low: float, high: float, expected: str, text: str) -> float:
    """Return the value of "21ms" or the like, in the unit that counts as 1.0. Raises
    ArgumentTypeError unless it lies within [low, high]."""
    value = math.nan  # lies within nothing
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([A-Za-z%]+)", text)
    if match:
        value = float(match[1]) * units.get(match[2], math.nan)
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"invalid value {text!r}: expected {expected}")
    return value


SECONDS = {"ms": 1e-3, "s": 1.0}
BITS = {"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}  # a second
SHARE = {"%": 1e-2}
duration = partial(quantity, SECONDS, 0.0, 3600.0, "a duration like 21ms or 0.5s, an hour at most")
time_limit = partial(quantity, SECONDS, 1e-3, 3600.0, "a duration from 1ms to an hour, like 5s")
bandwidth = partial(quantity, BITS, 1e3, 1e15, "a bandwidth like 20Mbit or 1Gbit, 1kbit at least")
# (If all packets were lost, TCP would never end.)
loss_rate = partial(quantity, SHARE, 0.0, 0.9, "a share like 0.1%, 90% at most")


def address(text: str) -> Address:
    """Return the host and the port of "HOST:PORT". Raises ArgumentTypeError."""
    match = re.fullmatch("(.+):([0-9]{1,5})", text)
    if not match or int(match[2]) > 65535:
        raise argparse.ArgumentTypeError(f"invalid value {text!r}: expected HOST:PORT")
    return match[1], int(match[2])


def add_link_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that link_of reads."""
    add = parser.add_argument
    add("--network", choices=PROFILES, help="simulate this network; the next four override it")
    add("--latency", type=duration, help="one way, like 21ms")
    add("--jitter", type=duration, help="standard deviation of the latency, like 19ms")
    add("--bandwidth", type=bandwidth, help="each way, like 20Mbit")
    add("--loss", type=loss_rate, help="of packets, like 0.1%%")


def link_of(args: argparse.Namespace) -> Link | None:
    """Return the link that the command line describes, None if it describes none."""
    # The flags have the names of Link's fields.
    stated = {name: vars(args)[name] for name in vars(Link()) if vars(args)[name] is not None}
    if args.network is None and not stated:
        return None
    return replace(PROFILES.get(args.network, Link()), **stated)
