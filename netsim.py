"""The network between drafter and target: real messages over a real socket, with simulated delays (paper, section 5).

Three layers, which know nothing of models:

    Link, Network     when a message that is sent now would arrive: delay, jitter, bandwidth, loss, outages
    Channel           the client: connects, authenticates, sends a request and waits for its replies
    MessageServer     the server: admits clients that know the secret, and answers their requests in order

A message really crosses a TCP socket, at once. The client computes when it would have arrived, and waits until then;
the server does not notice. A reply states how long the server worked for it ("elapsed"):

    sent --up.arrival()--> at the server --elapsed--> answered --down.arrival()--> arrived
    arrival = propagation ~ N(latency, jitter), never negative + time-outs of lost packets + 8 bytes / bandwidth,
              queued after the bytes before it and never before the message before it

A message is a header (magic, version, two lengths), a JSON object of fields, and tensors as safetensors bytes.
Nothing is encrypted: across an open network use a tunnel.

Units: moments and durations in seconds, sizes in bytes, bandwidth in bits per second, loss as a share of packets.
"""
import argparse
import hmac
import ipaddress
import json
import math
import os
import random
import re
import select
import socket
import socketserver
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Callable, Iterator

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

MSS = 1460  # bytes that a TCP segment carries over Ethernet
MIN_RETRANSMISSION = 0.2  # seconds, as in Linux
HEADER = struct.Struct("!4sBIQ")  # magic, version, length of the fields, length of the tensors
MAGIC, VERSION, MAX_FIELDS = b"MoAs", 2, 1 << 16
NONCE, DIGEST = 32, 32  # bytes
CONNECT_SECONDS = 10.0  # to connect and authenticate, and for the rest of a message that has begun
FIRST_REPLY_SECONDS, MIN_TIMEOUT = 60.0, 1.0  # to wait for the first reply; for any other

class ProtocolError(Exception):
    """The peer broke the rules of framing, or the connection broke. The message is one line."""

class ConnectionClosed(ProtocolError):
    """The peer closed the connection between two messages: its ordinary end."""

class ConnectionLost(Exception):
    """No reply: not in time, or not any more. The message is one line."""


# --- The link --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Link:
    """One direction of a network. `jitter` is the standard deviation of the propagation, drawn for every message."""

    latency: float = 0.0
    jitter: float = 0.0
    bandwidth: float = math.inf
    loss: float = 0.0

    def retransmission_timeout(self) -> float:
        """TCP's, once settled: mean round trip + 4 mean deviations of it (RFC 6298)."""
        deviation = self.jitter * math.sqrt(2) * math.sqrt(2 / math.pi)  # of the sum of two normal delays
        return max(MIN_RETRANSMISSION, 2 * self.latency + 4 * deviation)

PROFILES = {  # the paper's values, the same both ways; it states no bandwidth for 5G: 100 Mbit/s is assumed
    "wan": Link(latency=0.0045, bandwidth=50e6),
    "5g": Link(latency=0.010, jitter=0.010, bandwidth=100e6, loss=0.001),
    "4g": Link(latency=0.021, jitter=0.019, bandwidth=20e6, loss=0.001),
}

class Direction:
    """The messages of a connection in one direction of a link, with random draws of its own."""

    def __init__(self, link: Link, seed: int):
        self.link, self.random = link, random.Random(seed)
        self.reset()

    def reset(self) -> None:
        """A new connection: what is in flight belongs to the old one."""
        self.busy_until = self.last_arrival = 0.0

    def arrival(self, sent: float, size: int) -> float:
        """When a message of `size` bytes, sent at `sent` (never before the one before it), has arrived.

        A lost packet is sent again after a time-out, twice as long each time; the message waits for its unluckiest
        packet. (Fast retransmission needs three packets after the lost one: our messages are rarely that long.)
        """
        link = self.link
        self.busy_until = max(self.busy_until, sent) + 8 * size / link.bandwidth
        delay, timeout = max(0.0, self.random.gauss(link.latency, link.jitter)), link.retransmission_timeout()
        packets = math.ceil(size / MSS)
        while packets := sum(self.random.random() < link.loss for _ in range(packets)):  # those that are lost
            delay, timeout = delay + timeout, 2 * timeout
        self.last_arrival = max(self.last_arrival, self.busy_until + delay)
        return self.last_arrival

class Network:
    """A link both ways, and one outage: for `outage_seconds` from the moment when `outage_after` tokens have come."""

    def __init__(self, link: Link, seed: int = 0, outage_after: float = math.inf, outage_seconds: float = math.inf):
        self.up, self.down = Direction(link, 2 * seed), Direction(link, 2 * seed + 1)
        self.outage_after, self.outage_seconds, self.outage_begins = outage_after, outage_seconds, math.inf

    def count_tokens(self, count: int, now: float) -> None:
        """Tell the network that `count` tokens have come by now."""
        if count >= self.outage_after:
            self.outage_begins = min(self.outage_begins, now)

    def is_down(self, sent: float, arrival: float) -> bool:
        """Whether the outage hits a message that is in flight from `sent` to `arrival`."""
        return sent < self.outage_begins + self.outage_seconds and self.outage_begins <= arrival


# --- Framed messages -------------------------------------------------------------------------------------------------
def send_message(sock: socket.socket, fields: dict, tensors: dict[str, Tensor], deadline: float) -> int:
    """Send one message by `deadline` (of time.monotonic); its size in bytes. Raises OSError."""
    text, data = json.dumps(fields, separators=(",", ":")).encode(), safetensors.torch.save(tensors) if tensors else b""
    message = HEADER.pack(MAGIC, VERSION, len(text), len(data)) + text + data
    set_deadline(sock, deadline)
    sock.sendall(message)
    return len(message)

def receive_message(sock: socket.socket, limit: int, deadline: float) -> tuple[dict, dict[str, Tensor], int]:
    """The next message: its fields, its tensors and its size in bytes.

    All of it must have come by `deadline`, however the peer spreads it. Raises ConnectionClosed if the peer closed
    before its first byte, ProtocolError if it is longer than `limit` bytes, malformed, cut short or late.
    """
    message = bytearray()
    receive_exactly(message, HEADER.size, sock, deadline)
    magic, version, text_size, data_size = HEADER.unpack(message)
    if (magic, version) != (MAGIC, VERSION):
        raise ProtocolError("malformed message: unknown magic bytes or version")
    start, size = HEADER.size + text_size, HEADER.size + text_size + data_size
    if text_size > MAX_FIELDS or size > limit:
        raise ProtocolError(f"a message of {size} bytes, {text_size} of them JSON, is too long")
    receive_exactly(message, size, sock, deadline)
    try:
        fields = json.loads(message[HEADER.size:start])
        tensors = safetensors.torch.load(bytes(message[start:])) if data_size else {}
    except (ValueError, RecursionError, SafetensorError, KeyError, RuntimeError):
        raise ProtocolError("malformed message: neither JSON nor tensors can be read") from None
    if not isinstance(fields, dict):
        raise ProtocolError("malformed message: its fields are not a JSON object")
    return fields, tensors, size

def receive_exactly(message: bytearray, size: int, sock: socket.socket, deadline: float) -> None:
    """Read on until the message has `size` bytes. Memory is taken for what has come, not for what was announced."""
    while len(message) < size:
        try:
            set_deadline(sock, deadline)
            piece = sock.recv(min(size - len(message), 1 << 16))
        except TimeoutError:
            raise ProtocolError("timed out") from None
        except ConnectionError as error:
            raise (ProtocolError if message else ConnectionClosed)(f"the connection broke: {error}") from None
        if not piece:
            raise (ProtocolError if message else ConnectionClosed)("the peer closed the connection")
        message += piece

def set_deadline(sock: socket.socket, deadline: float) -> None:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    sock.settimeout(left)


# --- The client ------------------------------------------------------------------------------------------------------
class Channel:
    """The client's end of a connection, seen through a network.

    Counts `bytes_up` and `bytes_down` (of messages and authentication), `round_trips` (requests with all their replies)
    and `network_seconds` (waiting for replies, less the server's work). Whatever is lost, the connection is closed with
    it: `connect` makes another.
    """

    def __init__(self, address: tuple[str, int], secret: str, network: Network, timeout: float | None = None,
                 limit: int = 1 << 28):
        """timeout: after which a reply counts as lost; default: ten times the slowest yet. limit: bytes of a reply."""
        self.address, self.secret, self.network, self.timeout, self.limit = address, secret, network, timeout, limit
        self.bytes_up = self.bytes_down = self.round_trips = 0
        self.network_seconds = self.slowest = 0.0
        self.sock: socket.socket | None = None

    def connect(self) -> dict:
        """Connect and authenticate; returns the server's greeting. Raises ConnectionLost.

        Three round trips, delayed like all others: TCP's handshake, the server's nonce, our answer to it.
        """
        self.close()
        if self.network.is_down(time.monotonic(), time.monotonic()):
            raise ConnectionLost("the network is down")
        self.network.up.reset()
        self.network.down.reset()
        start, nonce = time.monotonic(), bytearray()
        deadline = start + min(CONNECT_SECONDS, self.reply_timeout())
        try:
            self.sock = socket.create_connection(self.address, deadline - start)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            receive_exactly(nonce, NONCE, self.sock, deadline)
            self.sock.sendall(answer_nonce(self.secret, nonce))
            fields, _, size = receive_message(self.sock, MAX_FIELDS, deadline)
        except (OSError, UnicodeError, ProtocolError) as error:  # UnicodeError: for a name like a..b
            self.close()
            raise ConnectionLost(f"no server at {self.address[0]}:{self.address[1]}: {error}") from None
        arrived = start
        for up, down in ((0, 0), (0, NONCE), (DIGEST, size)):
            arrived = self.network.down.arrival(self.network.up.arrival(arrived, up), down)
        sleep_until(min(arrived, deadline))
        self.bytes_up, self.bytes_down = self.bytes_up + DIGEST, self.bytes_down + NONCE + size
        if "refused" in fields or arrived > deadline:
            self.close()
            raise ConnectionLost(f"the server refused: {fields.get('refused', 'timed out')}")
        return fields

    def close(self) -> None:
        if self.sock:
            self.sock.close()
        self.sock = None

    def reply_timeout(self) -> float:
        """Seconds after which a reply counts as lost."""
        if self.timeout is not None:
            return self.timeout
        return max(MIN_TIMEOUT, 10 * self.slowest) if self.slowest else FIRST_REPLY_SECONDS

    def request(self, fields: dict, tensors: dict[str, Tensor], parse: Callable) -> Iterator:
        """Send a request; yields parse(fields, tensors) of its replies, as they arrive. Raises ConnectionLost, also
        where `parse` raises an exception: the reply is malformed."""
        if self.sock is None:
            raise ConnectionLost("not connected")
        try:
            sent = time.monotonic()
            size = send_message(self.sock, fields, tensors, sent + CONNECT_SECONDS)
            self.bytes_up += size
            answered, more = self.network.up.arrival(sent, size), True
            while more:
                start = time.monotonic()
                deadline = start + self.reply_timeout()
                fields, tensors, size = receive_message(self.sock, self.limit, deadline)
                self.bytes_down += size
                more, elapsed, parsed = fields.get("more") is True, float(fields["elapsed"]), parse(fields, tensors)
                answered += max(elapsed, 0.0)
                arrival = self.network.down.arrival(answered, size)
                if arrival > deadline or self.network.is_down(sent, arrival):
                    sleep_until(deadline)
                    raise TimeoutError("timed out")
                sleep_until(arrival)
                self.slowest = max(self.slowest, time.monotonic() - start)
                self.network_seconds += max(0.0, time.monotonic() - start - elapsed)
                self.round_trips += not more
                yield parsed
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            self.close()
            raise ConnectionLost(f"malformed reply: {error!r:.200}") from None
        except (OSError, ProtocolError) as error:
            self.close()
            raise ConnectionLost(f"no answer from the server: {error}") from None

def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))

def answer_nonce(secret: str, nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(errors="surrogateescape"), nonce, "sha256")


# --- The server ------------------------------------------------------------------------------------------------------
class MessageServer(socketserver.ThreadingTCPServer):
    """Listens, and gives every client that knows the secret a session and a thread of its own. A session has fields to
    greet with, `greeting`, and a generator `answer(fields, tensors)` of replies to a request, (fields, tensors) too; in
    all but the last "more" is True. It raises ValueError, LookupError or TypeError for a malformed request."""

    allow_reuse_address, request_queue_size = True, 128

    def __init__(self, address: tuple[str, int], secret: str, new_session: Callable, limit: int = 1 << 20,
                 max_clients: int = 8, idle_seconds: float = 300.0):
        """limit: bytes of a request. Raises OSError or ValueError where it cannot or must not listen."""
        self.secret, self.new_session, self.limit, self.idle_seconds = secret, new_session, limit, idle_seconds
        self.slots = threading.BoundedSemaphore(max_clients)
        self.max_clients, self.connections = max_clients, set()
        self.unauthenticated: dict[socket.socket, None] = {}  # the oldest first
        super().__init__(address, Connection)
        if not secret and not ipaddress.ip_address(self.server_address[0]).is_loopback:
            super().server_close()
            raise ValueError("to serve beyond this machine, set a secret in MOA_SECRET on both sides")

    def process_request(self, request: socket.socket, client_address) -> None:
        """Accept a connection; of those that have not authenticated yet the oldest has to go if there are many."""
        excess = len(self.unauthenticated) + 1 - 4 * self.max_clients
        for oldest in list(self.unauthenticated)[:max(0, excess)]:
            self.disconnect(oldest)
        self.connections.add(request)
        self.unauthenticated[request] = None
        super().process_request(request, client_address)

    def disconnect(self, connection: socket.socket) -> None:
        self.unauthenticated.pop(connection, None)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: socket.socket) -> None:
        self.connections.discard(request)
        self.unauthenticated.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Disconnect everyone, and wait for their threads."""
        for connection in list(self.connections):
            self.disconnect(connection)
        super().server_close()

class Connection(socketserver.BaseRequestHandler):
    """One client's connection. A client that breaks a rule is disconnected, with a line on stderr."""

    def handle(self) -> None:
        try:
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.authenticate()
            self.server.unauthenticated.pop(self.request, None)
            if not self.server.slots.acquire(blocking=False):
                return self.send({"refused": f"it has {self.server.max_clients} clients, its limit"})
            try:
                session = self.server.new_session()
                self.send(session.greeting)
                while True:
                    self.answer_request(session)
            finally:
                self.server.slots.release()
        except (ConnectionClosed, ConnectionError):  # the client has gone
            pass
        except (ProtocolError, OSError) as error:
            print(f"{self.client_address[0]}: {error}", file=sys.stderr)

    def authenticate(self) -> None:
        """Check that the client knows the secret, before anything else of it is read. Raises ProtocolError."""
        nonce, digest = os.urandom(NONCE), bytearray()
        self.request.sendall(nonce)
        receive_exactly(digest, DIGEST, self.request, time.monotonic() + CONNECT_SECONDS)
        if not hmac.compare_digest(digest, answer_nonce(self.server.secret, nonce)):
            self.send({"refused": "wrong secret; both sides take it from MOA_SECRET"})
            raise ProtocolError("wrong secret")

    def answer_request(self, session) -> None:
        if not select.select([self.request], [], [], self.server.idle_seconds)[0]:
            raise ProtocolError(f"disconnected after {self.server.idle_seconds:g} s without a request")
        fields, tensors, _ = receive_message(self.request, self.server.limit, time.monotonic() + CONNECT_SECONDS)
        since = time.perf_counter()
        try:
            for fields, tensors in session.answer(fields, tensors):
                now = time.perf_counter()
                self.send({**fields, "elapsed": round(now - since, 6)}, tensors)
                since = now
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise ProtocolError(f"malformed request: {error!r:.200}") from None

    def send(self, fields: dict, tensors: dict[str, Tensor] = {}) -> None:
        send_message(self.request, fields, tensors, time.monotonic() + CONNECT_SECONDS)


# --- On the command line ---------------------------------------------------------------------------------------------
def quantity(units: dict[str, float], low: float, high: float, what: str) -> Callable[[str], float]:
    """An argparse type: a plain decimal number with one of these units, within [low, high] of the base unit."""
    def parse(text: str) -> float:
        match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([A-Za-z%]+)", text)
        value = float(match[1]) * units.get(match[2], math.nan) if match else math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"invalid value {text!r}: expected {what}")
        return value
    return parse

duration = quantity({"ms": 1e-3, "s": 1.0}, 0.0, 3600.0, "a duration like 21ms or 0.5s, an hour at most")  # seconds
bandwidth = quantity({"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}, 1e3, 1e15,  # bits per second
                     "a bandwidth like 300kbit, 20Mbit or 1Gbit, 1kbit at least")
loss_rate = quantity({"%": 1e-2}, 0.0, 0.9, "a share like 0.1%, 90% at most")

def address(text: str) -> tuple[str, int]:
    """"HOST:PORT" -> host and port."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"invalid value {text!r}: expected HOST:PORT")
    return host, int(port)

def add_link_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--network", choices=PROFILES, help="simulate this network to the server")
    parser.add_argument("--latency", type=duration, help="one way, like 21ms; this and the next override --network")
    parser.add_argument("--jitter", type=duration, help="standard deviation of the latency, like 19ms")
    parser.add_argument("--bandwidth", type=bandwidth, help="each way, like 20Mbit")
    parser.add_argument("--loss", type=loss_rate, help="of packets, like 0.1%%")

def links_of(args: argparse.Namespace) -> dict[str, Link]:
    """The link that the command line describes, by its name; without a description, none."""
    stated = {name: getattr(args, name) for name in vars(Link()) if getattr(args, name) is not None}
    if args.network or stated:
        return {args.network or "link": replace(PROFILES.get(args.network, Link()), **stated)}
    return {}
