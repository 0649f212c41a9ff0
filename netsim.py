"""The network between drafter and target: real messages over a real socket, with simulated delays (paper, section 5).

A message crosses a TCP socket at once. The client computes when it would have arrived, and waits until then. Each reply
states how long the server worked for it ("elapsed"):

    sent --up.arrival()--> at the server --elapsed--> answered --down.arrival()--> arrived
    arrival = propagation ~ N(latency, jitter), never negative + time-outs of lost packets + 8 size / bandwidth,
              queued after the bytes before it and never before the message before it

Nothing is encrypted. Units: seconds, bytes, and bits per second.
"""
import argparse
import hmac
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
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic, perf_counter, sleep
from typing import Callable, Iterator

import safetensors.torch
from torch import Tensor

MSS = 1460  # bytes of a TCP segment over Ethernet
MIN_RETRANSMISSION = 0.2  # as in Linux
HEADER = struct.Struct("!4sBIQ")  # magic, version, lengths of fields and tensors
MAGIC, VERSION, MAX_FIELDS = b"MoAs", 2, 1 << 16
NONCE, DIGEST, MAX_REPLY = 32, 32, 1 << 28
CONNECT_SECONDS = 10.0  # to connect and authenticate; for the rest of a message
FIRST_REPLY_SECONDS, MIN_TIMEOUT = 60.0, 1.0  # to wait for the first reply; for any other

@dataclass(frozen=True)
class Link:
    """One direction of a network."""

    latency: float = 0.0  # of the propagation, drawn for every message: its mean, before negative draws become 0
    jitter: float = 0.0  # its standard deviation
    bandwidth: float = math.inf  # bits per second
    loss: float = 0.0  # share of packets

    def retransmission_timeout(self) -> float:
        """TCP's, once settled: mean round trip + 4 mean deviations of it (RFC 6298)."""
        deviation = 2 * self.jitter / math.sqrt(math.pi)  # of the sum of two delays
        return max(MIN_RETRANSMISSION, 2 * self.latency + 4 * deviation)

PROFILES = {  # the paper's, the same both ways; 5G's bandwidth is assumed
    "wan": Link(latency=0.0045, bandwidth=50e6),
    "5g": Link(latency=0.010, jitter=0.010, bandwidth=100e6, loss=0.001),
    "4g": Link(latency=0.021, jitter=0.019, bandwidth=20e6, loss=0.001),
}

class Direction:
    """One direction of a connection, with random draws of its own."""

    def __init__(self, link: Link, seed: int):
        self.link, self.random = link, random.Random(seed)
        self.reset()

    def reset(self) -> None:
        self.busy_until = self.last_arrival = 0.0  # what is in flight belongs to the old connection

    def arrival(self, sent: float, size: int) -> float:
        """When a message of `size` bytes, sent at `sent` (no earlier than the last), has arrived. It waits for its
        unluckiest packet: each loss costs a time-out, twice the last. (Most messages are too short for TCP's faster
        ways.)"""
        link = self.link
        self.busy_until = max(self.busy_until, sent) + 8 * size / link.bandwidth
        delay, timeout = max(0.0, self.random.gauss(link.latency, link.jitter)), link.retransmission_timeout()
        packets = math.ceil(size / MSS)
        while packets := sum(self.random.random() < link.loss for _ in range(packets)):  # lost ones
            delay, timeout = delay + timeout, 2 * timeout
        self.last_arrival = max(self.last_arrival, self.busy_until + delay)
        return self.last_arrival

class Network:
    """A link both ways, and one outage: for `outage_seconds` from the moment when `outage_after` tokens have come."""

    def __init__(self, link: Link, seed: int = 0, outage_after: float = math.inf, outage_seconds: float = math.inf):
        self.up, self.down = Direction(link, 2 * seed), Direction(link, 2 * seed + 1)
        self.outage_after, self.outage_seconds, self.outage_begins = outage_after, outage_seconds, math.inf

    def count_tokens(self, count: int, now: float) -> None:
        if count >= self.outage_after:
            self.outage_begins = min(self.outage_begins, now)

    def is_down(self, sent: float, arrival: float) -> bool:
        """Whether the outage hits a message in flight from `sent` to `arrival`."""
        return sent < self.outage_begins + self.outage_seconds and self.outage_begins <= arrival

    def wait(self, sent: float, arrival: float, deadline: float) -> None:
        """Sleep until a message has arrived. Raises TimeoutError, at the deadline, if it is late or lost."""
        lost = arrival > deadline or self.is_down(sent, arrival)
        sleep(max(0.0, (deadline if lost else arrival) - monotonic()))
        if lost:
            raise TimeoutError("timed out")


# --- Messages, client and server ---
class ProtocolError(OSError):
    """The peer broke the rules."""

class ConnectionClosed(ProtocolError, ConnectionError):
    """The peer closed the connection between two messages."""

class ConnectionLost(Exception):
    """No reply, or none in time."""

def send_message(sock: socket.socket, fields: dict, tensors: dict[str, Tensor], deadline: float) -> int:
    """Send a message by `deadline` (of time.monotonic); returns its size in bytes. Raises OSError."""
    text, data = json.dumps(fields, separators=(",", ":")).encode(), safetensors.torch.save(tensors) if tensors else b""
    message = HEADER.pack(MAGIC, VERSION, len(text), len(data)) + text + data
    set_deadline(sock, deadline)
    sock.sendall(message)
    return len(message)

def receive_message(sock: socket.socket, limit: int, deadline: float) -> tuple[dict, dict[str, Tensor], int]:
    """The next message: its fields, its tensors and its size in bytes. Raises OSError: ConnectionClosed if none came,
    TimeoutError at `deadline`, ProtocolError if it is malformed, cut short or longer than `limit`."""
    message = bytearray()
    receive_exactly(message, HEADER.size, sock, deadline)
    magic, version, text_size, data_size = HEADER.unpack(message)
    if (magic, version) != (MAGIC, VERSION):
        raise ProtocolError("malformed message: wrong magic bytes or version")
    start = HEADER.size + text_size
    size = start + data_size
    if text_size > MAX_FIELDS or size > limit:
        raise ProtocolError(f"a message of {size} bytes is too long")
    receive_exactly(message, size, sock, deadline)
    try:
        fields = {**json.loads(message[HEADER.size:start])}  # TypeError if no object
        tensors = safetensors.torch.load(bytes(message[start:])) if data_size else {}
    except (ValueError, TypeError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
        raise ProtocolError(f"malformed message: {error!r:.200}") from None
    return fields, tensors, size

def receive_exactly(message: bytearray, size: int, sock: socket.socket, deadline: float) -> None:
    """Read on until the message has `size` bytes. Memory is taken for what has come, not for what was announced."""
    while len(message) < size:
        set_deadline(sock, deadline)
        if not (piece := sock.recv(min(size - len(message), 1 << 16))):
            raise (ProtocolError if message else ConnectionClosed)("the peer closed the connection")
        message += piece

def set_deadline(sock: socket.socket, deadline: float) -> None:
    if (left := deadline - monotonic()) <= 0:
        raise TimeoutError("timed out")
    sock.settimeout(left)

@dataclass(repr=False)  # it holds a secret
class Channel:
    """The client's end of a connection, which is closed when anything is lost: `connect` makes another. A round trip is
    a request with its replies; `network_seconds` is waiting less the server's work."""

    address: tuple[str, int]
    secret: str
    network: Network
    timeout: float | None = None  # after which a reply counts as lost; default: ten times the slowest yet
    sock: socket.socket | None = None
    bytes_up = bytes_down = round_trips = 0
    network_seconds = slowest = 0.0

    def connect(self) -> dict:
        """Connect and authenticate; returns the server's greeting. Raises ConnectionLost."""
        self.close()
        self.network.up.reset()
        self.network.down.reset()
        arrival = start = monotonic()
        deadline, nonce = start + min(CONNECT_SECONDS, self.reply_timeout()), bytearray()
        if self.network.is_down(start, start):
            raise ConnectionLost("the network is down")
        try:
            self.sock = socket.create_connection(self.address, deadline - start)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            receive_exactly(nonce, NONCE, self.sock, deadline)
            self.sock.sendall(answer_nonce(self.secret, nonce))
            greeting, _, size = receive_message(self.sock, MAX_FIELDS, deadline)
            self.bytes_up += DIGEST
            self.bytes_down += NONCE + size
            for up, down in ((0, 0), (0, NONCE), (DIGEST, size)):  # TCP's handshake, the nonce, digest and greeting
                arrival = self.network.down.arrival(self.network.up.arrival(arrival, up), down)
            self.network.wait(start, arrival, start + self.reply_timeout())
        except (OSError, UnicodeError) as error:  # the latter: a name like a..b
            self.close()
            raise ConnectionLost(f"no server at {self.address[0]}:{self.address[1]}: {error}") from None
        if "refused" in greeting:
            self.close()
            raise ConnectionLost(f"the server refused: {greeting['refused']!r:.200}")
        return greeting

    def close(self) -> None:
        if self.sock:
            self.sock.close()
        self.sock = None

    def reply_timeout(self) -> float:
        default = max(MIN_TIMEOUT, 10 * self.slowest) if self.slowest else FIRST_REPLY_SECONDS
        return default if self.timeout is None else self.timeout

    def request(self, fields: dict, tensors: dict[str, Tensor], parse: Callable) -> Iterator:
        """Send a request; yields parse(fields, tensors) of its replies, as they arrive. Raises ConnectionLost, also if
        `parse` raises an exception."""
        if self.sock is None:
            raise ConnectionLost("not connected")
        try:
            sent = monotonic()
            size = send_message(self.sock, fields, tensors, sent + CONNECT_SECONDS)
            self.bytes_up += size
            answered, more = self.network.up.arrival(sent, size), True  # when the server replies, as simulated
            while more:
                start = monotonic()
                deadline = start + self.reply_timeout()
                fields, tensors, size = receive_message(self.sock, MAX_REPLY, deadline)
                self.bytes_down += size
                more, parsed = fields.get("more") is True, parse(fields, tensors)
                elapsed = max(0.0, float(fields["elapsed"]))  # 0 for NaN
                answered += elapsed
                self.network.wait(sent, self.network.down.arrival(answered, size), deadline)
                waited = monotonic() - start
                self.slowest = max(self.slowest, waited)
                self.network_seconds += max(0.0, waited - elapsed)
                self.round_trips += not more
                yield parsed
        except (OSError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            self.close()
            reason = error if isinstance(error, OSError) else f"malformed reply: {error!r:.200}"
            raise ConnectionLost(f"no answer from the server: {reason}") from None

def answer_nonce(secret: str, nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(errors="surrogateescape"), nonce, "sha256")

class MessageServer(socketserver.ThreadingTCPServer):
    """Gives every client that knows the secret a thread and a session, which has fields to greet with, `greeting`, and
    `answer(fields, tensors)`, a generator of replies (fields, tensors), all but the last with "more": True. It raises
    ValueError, LookupError or TypeError for a malformed request."""

    allow_reuse_address, request_queue_size = True, 128

    def __init__(self, address: tuple[str, int], secret: str, new_session: Callable, limit: int = 1 << 20,
                 max_clients: int = 8, idle_seconds: float = 300.0):
        """limit: bytes of a request. Raises OSError or ValueError where it cannot or must not listen."""
        self.secret, self.new_session, self.limit, self.idle_seconds = secret, new_session, limit, idle_seconds
        self.slots = threading.Semaphore(max_clients)
        self.max_clients, self.connections = max_clients, set()
        self.unauthenticated = {}  # ordered, the oldest first
        super().__init__(address, Connection)
        if not secret and not self.server_address[0].startswith("127."):
            super().server_close()
            raise ValueError("to serve beyond this machine, set a secret in MOA_SECRET on both sides")

    def process_request(self, request: socket.socket, address) -> None:
        self.disconnect(list(self.unauthenticated)[:1 - 4 * self.max_clients])  # the oldest, if too many
        self.connections.add(request)
        self.unauthenticated[request] = None
        super().process_request(request, address)

    def shutdown_request(self, request: socket.socket) -> None:
        self.connections.discard(request)
        self.unauthenticated.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        self.disconnect(list(self.connections))
        super().server_close()  # waits for their threads

    def disconnect(self, connections: list[socket.socket]) -> None:
        for sock in connections:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

class Connection(socketserver.BaseRequestHandler):
    """A client's connection. One that breaks a rule is closed, with a line on stderr."""

    def handle(self) -> None:
        nonce, digest = os.urandom(NONCE), bytearray()
        try:
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.request.sendall(nonce)
            receive_exactly(digest, DIGEST, self.request, monotonic() + CONNECT_SECONDS)
            if not hmac.compare_digest(digest, answer_nonce(self.server.secret, nonce)):
                self.send({"refused": "wrong secret; both sides take it from MOA_SECRET"})
                raise ProtocolError("wrong secret")
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
        except OSError as error:
            if not isinstance(error, ConnectionError):  # the client's leaving
                print(f"{self.client_address[0]}: {error}", file=sys.stderr)

    def answer_request(self, session) -> None:
        if not select.select([self.request], [], [], self.server.idle_seconds)[0]:
            raise ProtocolError(f"disconnected after {self.server.idle_seconds:g} s without a request")
        fields, tensors, _ = receive_message(self.request, self.server.limit, monotonic() + CONNECT_SECONDS)
        since = perf_counter()
        try:
            for reply, its_tensors in session.answer(fields, tensors):
                now = perf_counter()
                self.send({**reply, "elapsed": round(now - since, 6)}, its_tensors)
                since = now
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise ProtocolError(f"malformed request: {error!r:.200}") from None

    def send(self, fields: dict, tensors: dict[str, Tensor] = {}) -> None:
        send_message(self.request, fields, tensors, monotonic() + CONNECT_SECONDS)


# --- Command line ---
def quantity(units: dict[str, float], low: float, high: float, what: str) -> Callable[[str], float]:
    """An argparse type: a decimal number with a unit, within [low, high] of the base unit."""
    def parse(text: str) -> float:
        match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([A-Za-z%]+)", text)
        value = float(match[1]) * units.get(match[2], math.nan) if match else math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"invalid value {text!r}: expected {what}")
        return value
    return parse

duration = quantity({"ms": 1e-3, "s": 1.0}, 0.0, 3600.0, "a duration like 21ms or 0.5s, an hour at most")
bandwidth = quantity({"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}, 1e3, 1e15,
                     "a bandwidth like 300kbit, 20Mbit or 1Gbit, 1kbit at least")
loss_rate = quantity({"%": 1e-2}, 0.0, 0.9, "a share like 0.1%, 90% at most")

def address(text: str) -> tuple[str, int]:
    """"HOST:PORT" -> host and port."""
    match = re.fullmatch("(.+):([0-9]{1,5})", text)
    if not match or int(match[2]) > 65535:
        raise argparse.ArgumentTypeError(f"invalid value {text!r}: expected HOST:PORT")
    return match[1], int(match[2])

def add_link_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--network", choices=PROFILES, help="simulate this network to the server")
    parser.add_argument("--latency", type=duration, help="one way, like 21ms; this and the next override --network")
    parser.add_argument("--jitter", type=duration, help="standard deviation of the latency, like 19ms")
    parser.add_argument("--bandwidth", type=bandwidth, help="each way, like 20Mbit")
    parser.add_argument("--loss", type=loss_rate, help="of packets, like 0.1%%")

def links_of(args: argparse.Namespace) -> dict[str, Link]:
    """The link that the command line describes, if any, by its name."""
    stated = {name: vars(args)[name] for name in vars(Link()) if vars(args)[name] is not None}
    link = replace(PROFILES.get(args.network, Link()), **stated)
    return {args.network or "link": link} if args.network or stated else {}
