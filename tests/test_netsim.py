"""The network: links against their formulas, outages, framed messages, the client's channel."""
import argparse
import contextlib
import itertools
import json
import math
import random
import socket
import statistics
import struct
import threading
import time
import tracemalloc
from dataclasses import replace

import pytest
import torch

import netsim
from netsim import (
    HEADER,
    INITIAL_RTO,
    MAGIC,
    MSS,
    PROFILES,
    VERSION,
    Channel,
    ConnectionLost,
    Direction,
    Link,
    Message,
    MessageServer,
    Network,
    Outage,
    ProtocolError,
    add_link_arguments,
    announce_on_terminal,
    link_of,
    receive_message,
    send_message,
)
from plumbing.errors import InputError
from plumbing.flags import address

LIMIT = 1 << 20  # bytes of a message
SAMPLES = 20000


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


# --- The link ---

def delays(link: Link, size: int = 100) -> list[float]:
    """Seconds that messages of `size` bytes take which never meet: they are sent hours apart."""
    direction = Network(link, seed=1).up
    direction.send(0.0, 0)  # the first of a connection has another timeout
    observed = []
    for i in range(1, SAMPLES + 1):
        sent = i * 10000.0
        observed.append(direction.send(sent, size) - sent)
    return observed


def assert_share(observed: list[bool], p: float) -> None:
    """So many are true as of independent draws with probability p, within four deviations."""
    deviation = math.sqrt(p * (1 - p) / len(observed))
    assert abs(statistics.fmean(observed) - p) < 4 * deviation


@pytest.mark.parametrize("name, paper", [
    ("wan", Link(0.009 / 2, 0.0, 50e6)),
    ("5g", Link(0.01, 0.01, 100e6, 0.001)),
    ("4g", Link(0.021, 0.019, 20e6, 0.001))])
def test_the_profiles_are_the_papers(name, paper):
    assert PROFILES[name] == paper


@pytest.mark.parametrize("name", ["5g", "4g"])
def test_propagation_is_normal_but_never_negative(name):
    link = replace(PROFILES[name], loss=0.0, bandwidth=math.inf)
    latency = link.latency
    jitter = link.jitter
    observed = delays(link)
    # Mean and variance of max(0, N(latency, jitter)):
    normal = statistics.NormalDist()
    z = latency / jitter
    mean = latency * normal.cdf(z) + jitter * normal.pdf(z)
    square = (latency**2 + jitter**2) * normal.cdf(z) + latency * jitter * normal.pdf(z)
    deviation = math.sqrt(square - mean**2)
    tolerance = 4 * deviation / math.sqrt(SAMPLES)
    assert min(observed) >= -1e-9
    assert abs(statistics.fmean(observed) - mean) < tolerance
    assert abs(statistics.stdev(observed) - deviation) < tolerance
    assert_share([delay < 1e-6 for delay in observed], normal.cdf(-z))


def test_bytes_take_their_time_and_queue_after_the_bytes_before_them():
    direction = Network(Link(latency=0.01, bandwidth=1e6)).up
    assert direction.send(0.0, 12500) == pytest.approx(0.11)
    assert direction.send(0.05, 12500) == pytest.approx(0.21)  # starts at 0.1
    assert direction.send(0.5, 10**7) == pytest.approx(80.51)  # the link is idle since 0.2
    direction.reset()
    assert direction.send(1.1, 12500) == pytest.approx(1.21)  # over a new connection


def test_a_lost_packet_costs_a_timeout_that_doubles_with_every_further_loss():
    link = Link(latency=0.001, loss=0.3)
    timeout = link.retransmission_timeout()
    observed = delays(link)
    for losses in range(4):
        cost = 0.001 + timeout * (2**losses - 1)
        exactly = [abs(delay - cost) < 1e-3 for delay in observed]
        assert_share(exactly, link.loss**losses * (1 - link.loss))


def test_a_message_waits_for_all_of_its_packets():
    observed = delays(Link(loss=0.01), size=10 * MSS)
    assert_share([delay > 0.1 for delay in observed], 1 - 0.99**10)


def test_the_first_message_of_a_connection_waits_a_second_for_a_lost_packet():
    direction = Network(Link(loss=0.3), seed=1).up
    observed = []
    for _ in range(SAMPLES):
        direction.reset()
        observed.append(direction.send(0.0, 0))  # TCP's handshake: a packet without bytes
    for losses in range(4):
        cost = INITIAL_RTO * (2**losses - 1)
        assert_share([abs(delay - cost) < 1e-3 for delay in observed], 0.3**losses * 0.7)
    assert INITIAL_RTO == 1.0


@pytest.mark.parametrize("link", [Link(0.5, 0.1), Link(0.1, 0.04), Link(0.5, 0.0)], ids=str)
def test_the_retransmission_timeout_is_that_of_rfc_6298_with_the_minimum_of_linux(link):
    there = delays(link)
    back = reversed(there)
    round_trips = [up + down for up, down in zip(there, back)]
    mean = statistics.fmean(round_trips)
    mean_deviation = statistics.fmean(abs(trip - mean) for trip in round_trips)
    timeout = mean + max(4 * mean_deviation, 0.2)
    assert link.retransmission_timeout() == pytest.approx(timeout, rel=0.02)


def arrivals_of(direction: Direction) -> list[float]:
    return [direction.send(i * 0.001, 100) for i in range(3000)]


def test_messages_arrive_in_order():
    for seed in range(3):
        arrivals = arrivals_of(Network(Link(0.02, 0.02, loss=0.05), seed).down)
        assert arrivals == sorted(arrivals)


def test_a_seed_repeats_exactly_but_no_two_directions_share_their_random_draws():
    directions = []
    for seed in (0, 1, 2):
        network = Network(Link(0.02, 0.02, loss=0.05), seed)
        directions += [network.up, network.down]
    first = [arrivals_of(direction) for direction in directions]
    assert len(set(map(tuple, first))) == 6
    assert arrivals_of(Network(Link(0.02, 0.02, loss=0.05), 2).down) == first[-1]


# --- The outage ---

def test_an_outage_meets_what_is_in_flight_after_its_tokens_have_come_and_before_it_ends():
    network = Network(Link(), outage=Outage(after=20, seconds=2.0))
    network.outage.begin_if_due(19, 1.0)
    network.outage.begin_if_due(20, 3.0)
    network.outage.begin_if_due(21, 4.0)
    assert not network.outage.overlaps(1.5, 2.5)
    assert network.outage.overlaps(2.9, 3.1)
    assert network.outage.overlaps(4.9, 5.1)
    assert not network.outage.overlaps(5.0, 5.1)


def network_with_outage(link: Link, seconds: float) -> Network:
    """The outage begins at 1.0."""
    network = Network(link, outage=Outage(after=1, seconds=seconds))
    network.outage.begin_if_due(1, 1.0)
    return network


def test_a_message_stands_still_in_an_outage_and_goes_on_one_timeout_after_its_end():
    direction = network_with_outage(Link(latency=0.02), 0.3).down
    assert direction.send(0.97, 100) == pytest.approx(0.99)  # has arrived before
    resumed = 1.3 + 0.04 + 0.2
    assert direction.send(0.99, 100) == pytest.approx(resumed + 0.01)  # half of its way is left
    assert direction.send(1.10, 100) == pytest.approx(resumed + 0.02)
    assert direction.send(1.40, 100) == pytest.approx(resumed + 0.02)  # in order: with the last
    assert direction.send(2.00, 100) == pytest.approx(2.02)


def test_a_long_message_loses_the_whole_outage_and_no_more():
    direction = network_with_outage(Link(bandwidth=1e6), 0.3).up
    assert direction.send(0.5, 10**6) == pytest.approx(8.5 + 0.3 + 0.2)


def test_what_meets_an_outage_without_end_never_arrives():
    direction = network_with_outage(Link(0.01), math.inf).up
    assert direction.send(0.97, 100) == pytest.approx(0.98)
    assert direction.send(1.5, 100) == math.inf


# --- Framed messages ---

@pytest.fixture
def ends():
    """The two ends of a real connection."""
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def raw(text: bytes, data: bytes = b"", magic: bytes = MAGIC, version: int = VERSION) -> bytes:
    return HEADER.pack(magic, version, len(text), len(data)) + text + data


def one_tensor(entry: object) -> bytes:
    """A message of four tensor bytes that are described as this."""
    text = json.dumps({"x": entry}).encode()
    return raw(b"{}", struct.pack("<Q", len(text)) + text + bytes(4))


def described(dtype: str, length: object, end: int) -> bytes:
    return one_tensor({"dtype": dtype, "shape": [length], "data_offsets": [0, end]})


def frame(fields: dict, tensors: dict | None = None) -> bytes:
    """The bytes of a message."""
    near, far = socket.socketpair()
    with near, far:
        return far.recv(send_message(near, fields, tensors or {}))


def receive_from(data: bytes) -> OSError | None:
    """What receive_message raises for these bytes and a close after them: one line, or nothing."""
    near, far = socket.socketpair()
    with near, far:
        near.sendall(data)
        near.close()
        try:
            receive_message(far, LIMIT, soon())
        except (ProtocolError, ConnectionError) as error:
            assert str(error) and "\n" not in str(error)
            return error
    return None


EXAMPLE = ({"accepted": 3, "note": "Grüße"},
           {"kv": torch.arange(24, dtype=torch.int8).view(2, 3, 4),
            "scale": torch.tensor([0.5, 2], dtype=torch.half)})


@pytest.mark.parametrize("shape", [(), (5, 3), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.half,
                                   torch.float32], ids=str)
def test_a_message_arrives_as_it_was_sent(ends, dtype, shape):
    some = {"a": torch.tensor([True]),
            "x": (torch.rand(shape) * 9).to(dtype),
            "y": torch.zeros(2)}
    for sent in (some, {}):
        size = send_message(ends[0], EXAMPLE[0], sent)
        message = receive_message(ends[1], size, soon())
        assert message.fields == EXAMPLE[0]
        assert message.size == size
        assert message.tensors.keys() == sent.keys()
        for name, tensor in sent.items():
            assert message.tensors[name].dtype == tensor.dtype
            assert message.tensors[name].equal(tensor)


def test_a_message_that_is_too_long_is_refused(ends):
    size = send_message(ends[0], *EXAMPLE)
    with pytest.raises(ProtocolError, match="too long"):
        receive_message(ends[1], size - 1, soon())


def test_every_truncation_is_noticed():
    whole = frame(*EXAMPLE)
    assert receive_from(whole) is None
    for length in range(len(whole)):
        assert isinstance(receive_from(whole[:length]), ConnectionError)


def test_random_frames_and_frames_with_flipped_bits_raise_a_protocol_error_and_nothing_else():
    generator = random.Random(0)
    whole = frame(*EXAMPLE)
    received = 0
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            position = generator.randrange(len(whole) - 28)  # not in the tensors' 28 bytes
            damaged[position] ^= 1 << generator.randrange(8)
        if receive_from(damaged) is None:  # a name or a number may have become another one
            received += 1
        noise = generator.randbytes(generator.randint(1, 200))
        assert receive_from(noise) is not None
        assert receive_from(raw(noise)) is not None
        assert receive_from(raw(b"{}", noise)) is not None
    assert received < 667


@pytest.mark.parametrize("message", [
    raw(b"{}", magic=b"HTTP"),
    raw(b"{}", version=VERSION - 1),
    raw(b""),
    raw(b"{"),
    raw(b"[]"),
    raw(b"3"),
    raw(b"null"),
    raw(b"\xff\xfe"),
    raw(b"[" * 60000),
    raw(b'{"x": ' * 5000),
    raw(b"1" * 60000),
    raw(b"{}", b"\xff" * 9),
    raw(b"{}", bytes(8)),
    one_tensor(None),
    one_tensor("I8"),
    one_tensor({}),
    one_tensor({"dtype": "I8"}),
    described("I8", 3, 4),
    described("F4", 8, 4),
    described("I8", -4, 4),
    described("I8", 4.0, 4),
    described("I8", 2**40, 2**40),
    described("I8", 10**30, 4)], ids=lambda message: repr(message[HEADER.size:80]))
def test_a_malformed_message_is_refused_in_one_line(message):
    assert "malformed message" in str(receive_from(message))


@pytest.mark.parametrize("text_size, data_size, complaint", [
    (2**17, 0, "too long"),
    (2, 2**28 + 1, "too long"),
    (2, 2**27, "closed")])
def test_a_length_that_is_announced_takes_no_memory(ends, text_size, data_size, complaint):
    ends[0].sendall(HEADER.pack(MAGIC, VERSION, text_size, data_size) + b"{}" + bytes(1000))
    ends[0].close()
    tracemalloc.start()
    with pytest.raises(OSError, match=complaint):
        receive_message(ends[1], 1 << 28, soon())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 19


@pytest.mark.parametrize("seconds", [0.3, -0.1])  # in the past, although there is something to read
def test_a_peer_that_sends_too_little_is_held_to_the_deadline(ends, seconds):
    timers = []
    for i in range(4):
        timers.append(threading.Timer(0.1 * i, ends[0].sendall, [MAGIC[i:i + 1]]))
    for timer in timers:
        timer.start()
    with pytest.raises(TimeoutError, match="timed out"):
        receive_message(ends[1], LIMIT, soon(seconds))
    for timer in timers:
        timer.join()


def test_a_peer_that_takes_too_little_is_held_to_the_time_to_send(ends, monkeypatch):
    monkeypatch.setattr(netsim, "CONNECT_SECONDS", 0.1)
    with pytest.raises(TimeoutError):
        send_message(ends[1], {}, {"x": torch.zeros(1 << 22)})


# --- The channel ---

class Session:
    """Answers {"work": [seconds, ...]} with as many replies, each after so long and with the
    request's tensors."""

    greeting = {"drafter": "test"}

    def __init__(self, has_left):
        pass

    def answer(self, fields, tensors):
        for number, seconds in enumerate(fields["work"], start=1):
            time.sleep(seconds)
            yield {"number": number}, tensors


def wait_for(condition) -> None:
    deadline = soon(30)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def serving(new_session=Session, host: str = "localhost"):
    """A server in threads of this process; afterwards none of them is left."""
    before = threading.active_count()
    with MessageServer((host, 0), new_session) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
    assert threading.active_count() == before
    assert not server.clients


def channel_to(server: MessageServer, link: Link = Link(), timeout: float | None = None,
               seed: int = 0, **outage) -> Channel:
    network = Network(link, seed, Outage(**outage))
    return Channel(server.server_address[:2], network, timeout)


@contextlib.contextmanager
def connected(link: Link = Link(), timeout: float | None = None, **outage):
    """A channel to a server of its own."""
    with serving() as server:
        with contextlib.closing(channel_to(server, link, timeout, **outage)) as channel:
            assert channel.connect() == {"drafter": "test"}
            yield channel


TENSORS = {"x": torch.arange(3)}


def replies_to(channel: Channel, work: list[float]):
    """Yields the replies of a Session, each when it comes."""
    with channel.closed_on_failure():
        yield from itertools.islice(channel.request({"work": work}, TENSORS), len(work))


def ask(channel: Channel, *work: float) -> list[Message]:
    return list(replies_to(channel, list(work) or [0.0]))


def stream(channel: Channel, work: list[float], moments: list[float]) -> None:
    """Take every reply for a token, and add the moments when they come."""
    for _ in replies_to(channel, work):
        moments.append(time.monotonic())
        channel.network.outage.begin_if_due(len(moments), moments[-1])


def test_replies_come_after_the_way_up_the_servers_work_and_the_way_down():
    with connected(Link(0.01, bandwidth=1e5)) as channel:
        work = [0.03, 0.02]
        request_size = len(frame({"work": work}, TENSORS))
        worked = 0.0
        start = time.monotonic()
        for seconds, reply in zip(work, replies_to(channel, work), strict=True):
            moment = time.monotonic()
            worked += seconds
            transfer = 8 * (request_size + reply.size) / 1e5
            assert moment >= start + 2 * 0.01 + transfer + worked
            assert reply.fields["elapsed"] >= 0.02
            assert reply.tensors["x"].equal(TENSORS["x"])


def test_all_bytes_round_trips_and_the_networks_share_of_the_time_are_counted():
    with connected(Link(0.01, bandwidth=1e5)) as channel:
        down = len(frame({"drafter": "test"}))
        assert (channel.traffic.bytes_up, channel.traffic.bytes_down) == (0, down)
        start = time.monotonic()
        replies = ask(channel, 0.03, 0.2)
        seconds = time.monotonic() - start
        up = len(frame({"work": [0.03, 0.2]}, TENSORS))
        down += sum(len(frame(reply.fields, reply.tensors)) for reply in replies)
        assert (channel.traffic.bytes_up, channel.traffic.bytes_down) == (up, down)
        assert channel.traffic.round_trips == 1
        assert 0.02 <= channel.traffic.network_seconds <= seconds - 0.2


def test_a_slow_link_delays_a_new_connection_and_does_not_break_it(monkeypatch):
    monkeypatch.setattr(netsim, "CONNECT_SECONDS", 0.25)  # the limit of the real messages
    start = time.monotonic()
    with connected(Link(0.07)):
        assert time.monotonic() >= start + 4 * 0.07  # two simulated ways up, two down


def test_a_new_connection_has_time_for_a_first_packet_that_is_lost(monkeypatch):
    monkeypatch.setattr(netsim, "INITIAL_RTO", 0.2)
    monkeypatch.setattr(netsim, "MIN_TIMEOUT", 0.02)
    with connected() as channel:
        ask(channel)
        up = channel.network.up
        send = up.send
        delays = iter([0.2, 0.0])  # the first packet is lost once
        monkeypatch.setattr(up, "send", lambda sent, size: send(sent, size) + next(delays))
        start = time.monotonic()
        assert 10 * channel.slowest < 0.2
        channel.connect()
        assert time.monotonic() >= start + 0.2


def test_the_first_reply_of_a_new_connection_has_as_long_as_the_very_first(monkeypatch):
    monkeypatch.setattr(netsim, "MIN_TIMEOUT", 0.02)
    with connected() as channel:
        ask(channel)
        assert channel.reply_timeout() < netsim.FIRST_REPLY_SECONDS
        channel.connect()
        ask(channel, 0.3)  # seconds of work, as if to read a long text
        channel.slowest = 0.0
        with pytest.raises(ConnectionLost, match="timed out"):
            ask(channel, 0.3)


def test_an_outage_that_outlasts_the_reply_timeout_ends_a_stream_at_its_deadline():
    with connected(timeout=0.3, after=3, seconds=1.0) as channel:
        moments = []
        with pytest.raises(ConnectionLost, match="no answer from the server: timed out"):
            stream(channel, [0.02] * 8, moments)
        lost = time.monotonic()
        assert len(moments) == 3
        assert moments[-1] + 0.3 <= lost < moments[-1] + 1.0  # before the outage ends
        assert channel.sock is None and channel.traffic.round_trips == 1


def test_a_late_reply_is_lost_after_ten_times_the_slowest_and_a_new_connection_works(monkeypatch):
    monkeypatch.setattr(netsim, "MIN_TIMEOUT", 0.01)
    with connected(Link(0.02), after=3, seconds=1.0) as channel:
        ask(channel)
        assert channel.slowest >= 2 * 0.02
        channel.slowest = 0.03  # also on a busy machine
        start = time.monotonic()
        patience = 10 * channel.slowest
        channel.network.outage.begin_if_due(3, start + 0.01)  # while the next request is in flight
        with pytest.raises(ConnectionLost, match="no answer from the server"):
            ask(channel)
        assert time.monotonic() > start + patience
        with pytest.raises(ConnectionLost, match="not connected"):
            ask(channel)
        with pytest.raises(ConnectionLost, match="the network is down"):
            channel.connect()
        while channel.network.outage.overlaps(time.monotonic(), time.monotonic()):
            time.sleep(0.01)
        channel.connect()
        ask(channel)
        assert channel.traffic.round_trips == 3  # one of them without a reply


def replace_replies(monkeypatch, send) -> None:
    """Let a server of this process call `send(sock, fields, tensors)` for its messages."""

    def send_either(sock: socket.socket, fields: dict, tensors: dict) -> int:
        is_request = "work" in fields or "call" in fields
        return (send_message if is_request else send)(sock, fields, tensors)

    monkeypatch.setattr(netsim, "send_message", send_either)


@contextlib.contextmanager
def sending(monkeypatch, *messages: bytes | None):
    """A channel to a server that sends these bytes instead of its own; after None it closes."""
    queue = list(messages)

    def send(sock: socket.socket, fields: dict, tensors: dict) -> None:
        sock.sendall(queue.pop(0))

    with monkeypatch.context() as patch, serving() as server:
        replace_replies(patch, send)
        with contextlib.closing(channel_to(server, timeout=0.2)) as channel:
            yield channel


HUGE = HEADER.pack(MAGIC, VERSION, 2, 2**60)
NOISE = b"HTTP/1.1 400 Bad Request\r\n\r\n"
WRONG_REPLIES = [None, b"", NOISE, HUGE, frame(*EXAMPLE)[:40], frame({})]
WRONG_REPLIES += [frame({"elapsed": seconds})
                  for seconds in (None, [], "x", 10**400, math.inf)]


@pytest.mark.parametrize("reply", WRONG_REPLIES, ids=lambda reply: repr(reply)[17:60])
def test_a_server_that_fails_is_lost_in_one_line_and_nothing_else_happens(reply, monkeypatch):
    with sending(monkeypatch, frame({}), reply) as channel:
        channel.connect()
        for _ in range(2):
            with pytest.raises(ConnectionLost) as lost:
                ask(channel)
            assert str(lost.value) and "\n" not in str(lost.value)
            assert channel.sock is None


def test_an_impossible_time_of_work_is_no_failure(monkeypatch):
    impossible = [frame({"elapsed": seconds}) for seconds in (-1.0, -1e308, math.nan)]
    with sending(monkeypatch, frame({}), *impossible) as channel:
        channel.connect()
        for _ in impossible:
            assert len(ask(channel)) == 1
            assert channel.traffic.network_seconds >= 0


@pytest.mark.parametrize("greeting, complaint", [
    (NOISE, "no server at 127.0.0.1:"),
    (HUGE, "no server at 127.0.0.1:"),
    (raw(b"[]"), "no server at 127.0.0.1:"),
    (frame({})[:-1], "no server at 127.0.0.1:"),
    (frame({"refused": "full"}), "no server at 127.0.0.1:[0-9]+: refused: 'full'")])
def test_a_greeting_that_is_none_is_lost_in_one_line(greeting, complaint, monkeypatch):
    with sending(monkeypatch, greeting) as channel:
        monkeypatch.setattr(netsim, "CONNECT_SECONDS", 0.3)
        with pytest.raises(ConnectionLost, match=complaint) as lost:
            channel.connect()
        assert "\n" not in str(lost.value)
        assert channel.sock is None


@pytest.mark.parametrize("host", ["127.0.0.1", "a..b"])
def test_an_address_without_a_server_is_lost_in_one_line(host):
    with pytest.raises(ConnectionLost, match=f"no server at {host}:9: ") as lost:
        Channel((host, 9), Network(Link())).connect()
    assert "\n" not in str(lost.value)


# --- Who may connect ---

@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_a_server_listens_at_any_loopback_address(host):
    with serving(host=host) as server:
        with contextlib.closing(channel_to(server)) as channel:
            assert channel.connect() == {"drafter": "test"}


@pytest.mark.parametrize("host", [
    "0.0.0.0", "::", "10.0.0.1", "server.example", "127.0.0.1.example"])
def test_a_server_that_other_machines_could_reach_is_refused_in_one_line_that_shows_ssh(host):
    with pytest.raises(InputError, match=f"cannot serve at {host}: ") as error:
        MessageServer((host, 7000), Session)
    assert "ssh -L 7000:localhost:7000 server" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_address_that_a_server_prints_is_one_that_remote_takes(host, capsys):
    announce_on_terminal((host, 7000))
    out, err = capsys.readouterr()
    assert address(out.strip()) == (host, 7000)
    assert f"--remote {out.strip()} " in err


# --- The command line ---

@pytest.mark.parametrize("flags, link", [
    ([], None),
    (["--network", "4g"], PROFILES["4g"]),
    (["--latency", "21ms"], Link(0.021)),
    (["--network", "5g", "--jitter", "0ms", "--loss", "1%", "--bandwidth", "20Mbit"],
     Link(0.01, 0.0, 20e6, 0.01))], ids=str)
def test_flags_describe_a_link_and_override_the_profile_that_they_name(flags, link):
    parser = argparse.ArgumentParser()
    add_link_arguments(parser)
    assert link_of(**vars(parser.parse_args(flags))) == link
