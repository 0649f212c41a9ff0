"""The network between drafter and target: its delays simulated, its messages real (paper, client-server experiments).

Messages cross a real TCP socket at once. When they *count* as arrived is computed in the client, from a seeded `Link`
per direction and the seconds the server says it worked, and the client is not told of a reply before its clock is there:

    sent --up.arrival()--> at the server --worked--> answered --down.arrival()--> arrived
    arrival = propagation ~ N(latency, jitter), never negative + time-outs of lost packets + bytes / bandwidth,
              queued behind the bytes before it and never before the message before it

On a `WallClock` the client waits for that moment; on a `VirtualClock` it jumps there and every named piece of work costs
what a table says, so that an hour of 4G takes seconds and repeats exactly. The calling code is the same:

    network = symmetric(PROFILES["4g"], seed=0, outages=[Outage(tokens=20)])
    clock = VirtualClock({"draft": 0.002, "verify": 0.03})    # or WallClock()
    channel = Channel(socket.create_connection(address), network, clock)
    channel.send({"call": "verify"}, {"drafts": drafts})
    while not channel.ready():                                # draft on while the verdict is on its way
        ...
        clock.work("draft")
    fields, tensors = channel.receive(timeout=1.0)            # raises Lost: nothing in time, or the server is dead

The server needs neither clock nor network: it calls `receive_message` and answers every request, in order, with
`send_message`. A reply's fields hold "elapsed", the seconds worked since the request or the reply before it, "work", the
name by which a virtual clock looks up that cost, and "more" (true) if further replies to the same request follow.

Units: moments and durations in seconds, sizes in bytes, bandwidth in bits per second, loss as a share of packets.
"""
import argparse
import json
import math
import random
import re
import select
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

PACKET = 1460  # bytes that a TCP segment carries over Ethernet
FLIGHT = 10 * PACKET  # what TCP sends without waiting for an acknowledgement (RFC 6928)
LEAST_TIMEOUT = 0.2  # of a retransmission, as in Linux
FIRST_TIMEOUT = 1.0  # before any round trip has been seen (RFC 6298)
MOST_PATIENCE = 30.0  # seconds, or three time-outs: however many packets a link may lose

HEADER = struct.Struct("!4sBIQ")  # magic, version, length of the JSON part, length of the tensor bytes
MAGIC, VERSION = b"MoAs", 1
LONGEST_JSON, MOST_DIMENSIONS = 1 << 16, 8
DTYPES = {name: getattr(torch, name) for name in
          ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32")}


class ProtocolError(Exception):
    """The peer broke the rules of framing, or the connection broke. The message is one line."""


class ConnectionClosed(ProtocolError):
    """The peer closed the connection between two messages: its ordinary end."""


class Lost(Exception):
    """No reply: not in time, or never again. The message is one line."""


# ---------------------------------------------------------------------------------------------------------------------
# The link
# ---------------------------------------------------------------------------------------------------------------------

@dataclass
class Link:
    """One direction of a network. `jitter` is the standard deviation of the propagation, drawn for every message."""

    latency: float = 0.0
    jitter: float = 0.0
    bandwidth: float = math.inf
    loss: float = 0.0
    seed: int = 0

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.busy_until = self.last_arrival = 0.0

    def arrival(self, sent: float, size: int) -> float:
        """When a message of `size` bytes, handed over at `sent` (never before the one before it), has arrived.

        A lost packet is sent again after a time-out, twice as long each time; the message waits for its unluckiest
        packet. (Fast retransmission needs three packets behind the lost one: our messages are rarely that long.)
        """
        self.busy_until = max(self.busy_until, sent) + 8 * size / self.bandwidth
        delay = max(0.0, self.random.gauss(self.latency, self.jitter))
        timeout, packets = self.timeout(), math.ceil(size / PACKET)
        while packets := sum(self.random.random() < self.loss for _ in range(packets)):  # those still not through
            delay, timeout = delay + timeout, 2 * timeout
        self.last_arrival = max(self.last_arrival, self.busy_until + delay)
        return self.last_arrival

    def forget(self) -> None:
        """What is on its way belongs to a connection that is no more."""
        self.busy_until = self.last_arrival = 0.0

    def timeout(self) -> float:
        """TCP's first retransmission time-out, settled: mean round trip + 4 mean deviations of it (RFC 6298)."""
        deviation = self.jitter * math.sqrt(2) * math.sqrt(2 / math.pi)  # of the sum of two normal delays
        return max(LEAST_TIMEOUT, 2 * self.latency + 4 * deviation)


PROFILES = {  # the paper's figures, the same both ways; it states no bandwidth for 5G: 100 Mbit/s is assumed
    "wan": Link(latency=0.0045, bandwidth=50e6),
    "5g": Link(latency=0.010, jitter=0.010, bandwidth=100e6, loss=0.001),
    "4g": Link(latency=0.021, jitter=0.019, bandwidth=20e6, loss=0.001),
}


@dataclass
class Outage:
    """The network is down for `seconds` from the moment `begins`, or from the moment at which `tokens` have come."""

    begins: float = math.inf
    seconds: float = math.inf
    tokens: float = math.inf


@dataclass
class Network:
    """A link up, a link down, and the times when neither carries anything."""

    up: Link
    down: Link
    outages: list[Outage] = field(default_factory=list)

    def tokens(self, count: int, now: float) -> None:
        """Tell the network that `count` tokens have come by now: outages that waited for them begin."""
        for outage in self.outages:
            if outage.tokens <= count:
                outage.begins = min(outage.begins, now)

    def delivery(self, sent: float, arrival: float) -> float:
        """When a message on its way from `sent` to `arrival` gets there, outages counted; inf if it never does.

        One that meets an outage is lost and sent again as TCP would, after a time-out that doubles every time.
        """
        timeout = self.up.timeout()
        while any(sent < outage.begins + outage.seconds and outage.begins <= arrival for outage in self.outages):
            sent, arrival, timeout = sent + timeout, arrival + timeout, 2 * timeout  # up to inf, if it lasts for good
        return arrival


def symmetric(link: Link, seed: int = 0, outages: Iterable[Outage] = ()) -> Network:
    """A network with the same conditions, but not the same chances, both ways."""
    return Network(replace(link, seed=2 * seed), replace(link, seed=2 * seed + 1), [replace(o) for o in outages])


@dataclass
class SmoothedTime:
    """A mean that follows what is observed, and its deviation: as TCP estimates its round trip (RFC 6298)."""

    mean: float | None = None
    deviation: float = 0.0
    count: int = 0
    late: int = 0  # of these, how many took longer than the time-out: a packet was lost

    def observe(self, seconds: float) -> None:
        """Count one more, for no more than two time-outs: else the first one after an outage would rule all."""
        self.count += 1
        self.late += self.mean is not None and seconds > self.timeout()
        seconds = min(seconds, 2 * self.timeout())
        if self.mean is None:
            self.mean, self.deviation = seconds, seconds / 2
        else:
            self.deviation += (abs(self.mean - seconds) - self.deviation) / 4
            self.mean += (seconds - self.mean) / 8

    def timeout(self) -> float:
        """After so long a packet is taken for lost. One loss costs one time-out; two cost three, as the second is doubled."""
        return FIRST_TIMEOUT if self.mean is None else max(LEAST_TIMEOUT, self.mean + 4 * self.deviation)

    def patience(self) -> float:
        """After so long silence is an outage, and no longer bad luck.

        k losses in a row cost 2^k - 1 time-outs. How likely one is shows in the share of answers that were late (at first one
        in 22); k, at most 6, is where that share to the power of k falls below 1 / 10 000. A user waits for half a minute at
        most, but where round trips are very long.
        """
        share = (1 + self.late) / (22 + self.count)
        losses = min(6, math.ceil(math.log(1e-4) / math.log(min(share, 1 / 2))))
        return min((2**losses - 1) * self.timeout(), max(MOST_PATIENCE, 3 * self.timeout()))


# ---------------------------------------------------------------------------------------------------------------------
# Clocks
# ---------------------------------------------------------------------------------------------------------------------

class WallClock:
    """Real time, from 0. `patience`: for how many real seconds a message that has begun may keep its reader."""

    def __init__(self, patience: float = 5.0):
        self.patience, self.start = patience, time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self.start

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))

    def work(self, name: str) -> None:
        """Say that a piece of work is done. Its time has passed by itself."""

    def worked(self, fields: dict) -> float:
        """How long the server worked for this reply: as it says."""
        return fields["elapsed"]

    def readable(self, sock: socket.socket, until: float) -> bool:
        """Whether something comes over the socket by the moment `until`."""
        return bool(select.select([sock], [], [], max(0.0, until - self.now()))[0])


class VirtualClock:
    """Time as a number, from 0: waiting is a jump, work advances it by costs[name] seconds.

    `patience`: for how many real seconds to wait for a reply, whose virtual arrival is not known before it is here.
    """

    def __init__(self, costs: dict[str, float], patience: float = 300.0):
        self.costs, self.patience, self.moment = costs, patience, 0.0

    def now(self) -> float:
        return self.moment

    def wait_until(self, moment: float) -> None:
        self.moment = max(self.moment, moment)

    def work(self, name: str) -> None:
        """Say that a piece of work is done: its cost passes."""
        self.moment += self.costs[name]

    def worked(self, fields: dict) -> float:
        """How long the server worked for this reply: as the table says."""
        return self.costs[fields["work"]]

    def readable(self, sock: socket.socket, until: float) -> bool:
        """Always: read on, with patience, and see when the reply will have arrived."""
        return True


# ---------------------------------------------------------------------------------------------------------------------
# The channel: a connection as the client sees it
# ---------------------------------------------------------------------------------------------------------------------

@dataclass
class Request:
    sent: float
    delivered: float  # at the server
    answered: bool = False  # at least in part


@dataclass
class Reply:
    fields: dict
    tensors: dict[str, Tensor]
    size: int
    departed: float  # from the server
    arrival: float  # by the link; an outage may come between
    read: float  # when it was really here


class Channel:
    """The client's end of a connection, seen through a network and a clock.

    Counts `bytes_up` and `bytes_down` (really sent), `round_trips` (requests with all their replies), `network_seconds`
    (spent waiting in receive) and estimates `round_trip`, of which the server's work is no part. Replies longer than
    `limit` bytes are refused. A time-out is not the end: the reply of a link that is back still arrives. After any other
    loss the channel is dead until it is given another connection. A reply is noticed only when ready() or receive() is
    called: ask between pieces of work.
    """

    def __init__(self, sock: socket.socket, network: Network, clock: WallClock | VirtualClock, limit: int = 1 << 28,
                 up: int = 0, down: int = 0):
        self.network, self.clock, self.limit = network, clock, limit
        self.bytes_up = self.bytes_down = self.round_trips = 0
        self.network_seconds, self.round_trip = 0.0, SmoothedTime()
        self.connect(sock, up, down)

    def connect(self, sock: socket.socket, up: int = 0, down: int = 0) -> None:
        """Take a connection, which has cost so many bytes already: the first, or after close() another one.

        What the old one still owed is forgotten.
        """
        self.bytes_up += up
        self.bytes_down += down
        with suppress(OSError):  # macOS minds if the peer has gone already; the first use will tell
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.dead = sock, ""  # or why it is
        self.requests: deque[Request] = deque()  # not, or not wholly, answered
        self.reply: Reply | None = None  # read, but not yet told
        self.server_free = self.clock.now()  # when it is done with all that it has answered
        self.network.up.forget()
        self.network.down.forget()

    def close(self) -> None:
        self.sock.close()

    def send(self, fields: dict, tensors: dict[str, Tensor]) -> None:
        """Hand a request over. Raises Lost if the connection is dead."""
        if self.dead:
            raise Lost(self.dead)
        sent = self.clock.now()
        try:
            size = send_message(self.sock, fields, tensors, time.monotonic() + self.clock.patience)
        except OSError as error:
            self.dead = f"the server is gone: it takes no message ({error})"
            raise Lost(self.dead)
        self.bytes_up += size
        self.requests.append(Request(sent, self.network.delivery(sent, self.network.up.arrival(sent, size))))

    def ready(self) -> bool:
        """Whether receive() has something to tell now, be it a reply or a loss, without waiting."""
        self.poll(self.clock.now())
        return bool(self.dead) or self.arrival() <= self.clock.now()

    def receive(self, timeout: float) -> tuple[dict, dict[str, Tensor]]:
        """Wait for the next reply: its fields and tensors. Raises Lost, after `timeout` seconds at the latest."""
        start, lay_here = self.clock.now(), self.ready()
        self.poll(start + timeout)
        arrival = self.arrival()
        if not self.dead:
            self.clock.wait_until(min(arrival, start + timeout))
        self.network_seconds += self.clock.now() - start
        if self.dead:
            raise Lost(self.dead)
        if arrival > start + timeout:
            raise Lost(f"no answer from the server within {timeout:.3g} s")
        request, reply, self.reply = self.requests[0], self.reply, None
        if not request.answered and reply.size <= FLIGHT:  # longer messages measure the bandwidth
            there, back = request.delivered - request.sent, arrival - reply.departed
            if lay_here:  # since when? At most since the link says so. Take it for as late as usual, within these bounds
                least = self.network.delivery(reply.departed, reply.arrival) - reply.departed
                back = min(back, max(least, (self.round_trip.mean or 0.0) - there))
            self.round_trip.observe(there + back)
        request.answered = True
        if not reply.fields.get("more"):
            self.requests.popleft()
            self.round_trips += 1
        return reply.fields, reply.tensors

    def arrival(self) -> float:
        """When the reply at hand arrives, by all that is known of outages now; inf without one."""
        if self.reply is None:
            return math.inf
        return max(self.network.delivery(self.reply.departed, self.reply.arrival), self.reply.read)

    def poll(self, until: float) -> None:
        """Read the next reply, if one is owed and really comes by the moment `until`."""
        if self.dead or self.reply or not self.requests or not self.clock.readable(self.sock, until):
            return
        try:
            fields, tensors, size = receive_message(self.sock, self.limit, time.monotonic() + self.clock.patience)
            self.bytes_down += size
            worked = self.clock.worked(fields)
            if not isinstance(worked, (int, float)) or not 0 <= float(worked) < math.inf:
                raise ValueError
        except ProtocolError as error:
            self.dead = f"the server is gone: {error}"
        except (LookupError, TypeError, ValueError, OverflowError):
            self.dead = "the server answers rubbish: a reply does not say for how long it worked"
        else:
            self.server_free = max(self.server_free, self.requests[0].delivered) + worked
            arrival = self.network.down.arrival(self.server_free, size)
            self.reply = Reply(fields, tensors, size, self.server_free, arrival, self.clock.now())


# ---------------------------------------------------------------------------------------------------------------------
# Framed messages: header, JSON part {"fields": {...}, "tensors": {name: [dtype, shape]}}, tensor bytes (little-endian)
# ---------------------------------------------------------------------------------------------------------------------

def send_message(sock: socket.socket, fields: dict, tensors: dict[str, Tensor], deadline: float = math.inf) -> int:
    """Send one message by `deadline` (of time.monotonic); its size in bytes. Raises OSError if the peer does not take it."""
    layout = {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()}
    data = b"".join(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                    for tensor in tensors.values())
    text = json.dumps({"fields": fields, "tensors": layout}, separators=(",", ":")).encode()
    message = HEADER.pack(MAGIC, VERSION, len(text), len(data)) + text + data
    wait_no_longer_than(deadline, sock)
    sock.sendall(message)
    return len(message)


def receive_message(sock: socket.socket, limit: int, deadline: float = math.inf) -> tuple[dict, dict[str, Tensor], int]:
    """The next message: its fields, its tensors and its size in bytes.

    All of it must have come by `deadline` (of time.monotonic), however the peer spreads it. Raises ConnectionClosed if the
    peer closed before its first byte, ProtocolError if it is longer than `limit` bytes, malformed, cut short or late.
    """
    message = bytearray()
    receive_exactly(message, HEADER.size, sock, deadline)
    magic, version, text_size, data_size = HEADER.unpack(message)
    start = HEADER.size + text_size  # of the tensor bytes
    size = start + data_size
    if (magic, version) != (MAGIC, VERSION):
        raise ProtocolError("what came is not a message of ours, or of another version")
    if text_size > LONGEST_JSON or size > limit:
        raise ProtocolError(f"a message of {size} bytes, {text_size} of them JSON, is too long")
    receive_exactly(message, start, sock, deadline)
    fields, layout = parse_description(message[HEADER.size:])
    sizes = [math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in layout.values()]
    if sum(sizes) != data_size:
        raise ProtocolError("the tensors of a message do not add up to its length")
    receive_exactly(message, size, sock, deadline)
    pieces = torch.from_numpy(np.frombuffer(message, np.uint8, offset=start)).split(sizes)
    tensors = {name: piece.clone().view(DTYPES[dtype]).view(shape)  # cloned: aligned, and free of the message
               for (name, (dtype, shape)), piece in zip(layout.items(), pieces)}
    return fields, tensors, size


def parse_description(text: bytes) -> tuple[dict, dict[str, list]]:
    """The fields and the tensors' [dtype, shape] of a message's JSON part. Raises ProtocolError."""
    try:
        description = json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolError("the JSON part of a message is not JSON")
    match description:
        case {"fields": dict(fields), "tensors": dict(layout)} if all(map(is_tensor, layout.values())):
            return fields, layout
    raise ProtocolError("the JSON part of a message does not describe fields and tensors")


def is_tensor(entry: object) -> bool:
    """Whether this is a [dtype, shape] that can be; an empty tensor's other sizes must not be absurd either."""
    match entry:
        case [str(dtype), list(shape)] if len(shape) <= MOST_DIMENSIONS and all(type(n) is int and n >= 0 for n in shape):
            return dtype in DTYPES and math.prod(max(1, n) for n in shape) < 2**60
    return False


def receive_exactly(message: bytearray, size: int, sock: socket.socket, deadline: float) -> None:
    """Read on until the message has `size` bytes. Memory is taken for what has come, not for what was announced."""
    while len(message) < size:
        try:
            wait_no_longer_than(deadline, sock)
            piece = sock.recv(min(size - len(message), 1 << 16))
        except TimeoutError:
            raise ProtocolError("a message took too long")
        except OSError as error:
            if isinstance(error, ConnectionError) and not message:
                raise ConnectionClosed("it hung up")
            raise ProtocolError(f"the connection broke ({error})")
        if not piece:
            raise ProtocolError("the connection ended within a message") if message else ConnectionClosed("it hung up")
        message += piece


def wait_no_longer_than(deadline: float, sock: socket.socket) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    sock.settimeout(None if left == math.inf else left)


# ---------------------------------------------------------------------------------------------------------------------
# Quantities on the command line
# ---------------------------------------------------------------------------------------------------------------------

def quantity(units: dict[str, float], low: float, high: float, what: str) -> Callable[[str], float]:
    """An argparse type: a plain decimal number with one of these units, within [low, high] of the base unit."""
    def parse(text: str) -> float:
        match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([A-Za-z%]+)", text)
        value = float(match[1]) * units.get(match[2], math.nan) if match else math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value
    return parse


duration = quantity({"ms": 1e-3, "s": 1.0}, 0.0, 3600.0, "a duration like 21ms or 0.5s, an hour at most")  # seconds
rate = quantity({"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}, 1e3, 1e15,  # bits per second
                "a rate like 300kbit, 20Mbit or 1Gbit, 1kbit at least")
share = quantity({"%": 1e-2}, 0.0, 0.9, "a share like 0.1%, 90% at most")
