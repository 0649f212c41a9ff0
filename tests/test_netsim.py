"""The network: links against their formulas, outages, framed messages, the client's channel."""
import argparse
import contextlib
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
from netsim import (DIGEST, HEADER, MAGIC, MIN_RETRANSMISSION, MSS, NONCE, PROFILES, VERSION, Channel, Connection,
                    ConnectionClosed, ConnectionLost, Direction, Link, MessageServer, Network, ProtocolError, bandwidth,
                    duration, loss_rate, receive_message, send_message)

LIMIT = 1 << 20


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


# The link ------------------------------------------------------------------------------------------------------------

def delays(link: Link, size: int = 100) -> list[float]:
    direction = Direction(link, 1)  # of 20 000 messages that do not meet
    return [direction.arrival(i * 10000.0, size) - i * 10000.0 for i in range(20000)]


def assert_share(observed: list[bool], p: float) -> None:
    assert abs(sum(observed) / len(observed) - p) < 4 * math.sqrt(p * (1 - p) / len(observed))


@pytest.mark.parametrize("name, paper", [("5g", Link(0.01, 0.01, 1e8, 0.001)), ("4g", Link(0.021, 0.019, 2e7, 0.001))])
def test_the_profiles_are_the_papers_and_their_propagation_is_normal_but_never_negative(name, paper):
    assert PROFILES["wan"] == Link(0.009 / 2, 0.0, 50e6) and PROFILES[name] == paper
    link, normal = replace(PROFILES[name], loss=0.0, bandwidth=math.inf), statistics.NormalDist()
    observed, z = delays(link), link.latency / link.jitter
    mean = link.latency * normal.cdf(z) + link.jitter * normal.pdf(z)  # of max(0, N(latency, jitter))
    square = (link.latency**2 + link.jitter**2) * normal.cdf(z) + link.latency * link.jitter * normal.pdf(z)
    deviation = math.sqrt(square - mean**2)
    assert min(observed) >= -1e-9 and abs(statistics.fmean(observed) - mean) < 4 * deviation / math.sqrt(20000)
    assert abs(statistics.stdev(observed) - deviation) < 4 * deviation / math.sqrt(20000)
    assert_share([d < 1e-6 for d in observed], normal.cdf(-z))


def test_bytes_take_their_time_and_queue_after_the_bytes_before_them():
    direction = Direction(Link(latency=0.01, bandwidth=1e6), 0)
    assert direction.arrival(0.0, 12500) == pytest.approx(0.11)
    assert direction.arrival(0.05, 12500) == pytest.approx(0.21)  # starts at 0.1
    assert direction.arrival(0.5, 10**7) == pytest.approx(80.51)  # the link has been idle since 0.2
    direction.reset()
    assert direction.arrival(1.1, 12500) == pytest.approx(1.21)  # over a new connection


def test_a_lost_packet_costs_a_timeout_that_doubles_with_every_further_loss():
    loss, observed = 0.3, delays(Link(latency=0.001, loss=0.3))
    for losses in range(4):
        cost = 0.001 + MIN_RETRANSMISSION * (2**losses - 1)
        assert_share([abs(d - cost) < 1e-3 for d in observed], loss**losses * (1 - loss))
    assert_share([d > 0.1 for d in delays(Link(loss=0.01), 10 * MSS)], 1 - 0.99**10)  # waits for all of its packets
    trips = [sum(pair) for pair in zip(*[iter(delays(Link(latency=0.5, jitter=0.1)))] * 2)]
    mean = statistics.fmean(trips)
    timeout = mean + 4 * statistics.fmean(abs(t - mean) for t in trips)  # RFC 6298, of a slow link
    assert Link(latency=0.5, jitter=0.1).retransmission_timeout() == pytest.approx(timeout, rel=0.02)


def test_messages_stay_in_order_and_a_seed_repeats_exactly_but_no_two_directions_share_their_random_draws():
    networks = [Network(Link(0.02, 0.02, loss=0.05), seed) for seed in (0, 1, 2, 2)]
    arrivals = [[way.arrival(i * 0.001, 100) for i in range(3000)] for n in networks for way in (n.up, n.down)]
    assert all(moments == sorted(moments) for moments in arrivals)
    assert arrivals[4:6] == arrivals[6:] and len(set(map(tuple, arrivals))) == 6


def test_an_outage_hits_what_is_in_flight_from_the_moment_when_its_tokens_have_come_until_it_ends():
    network = Network(Link(), outage_after=20, outage_seconds=2.0)
    for count, moment in ((19, 1.0), (20, 3.0), (21, 4.0)):
        network.count_tokens(count, moment)
    hit = [network.is_down(*flight) for flight in ((1.5, 2.5), (2.9, 3.1), (4.9, 5.1), (5.0, 5.1))]
    assert hit == [False, True, True, False]


# Framed messages -----------------------------------------------------------------------------------------------------

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


def frame(fields: dict, tensors: dict = {}) -> bytes:
    near, far = socket.socketpair()
    with near, far:
        return far.recv(send_message(near, fields, tensors, soon()))


def outcome(message: bytes) -> str:
    """What receive_message makes of these bytes and a close after them: "received", or the one line of its error."""
    near, far = socket.socketpair()
    with near, far:
        near.sendall(message)
        near.close()
        try:
            receive_message(far, LIMIT, soon())
        except ProtocolError as error:
            assert str(error) and "\n" not in str(error)
            return str(error)
    return "received"


EXAMPLE = ({"accepted": 3, "note": "Grüße"},
           {"kv": torch.arange(24, dtype=torch.int8).view(2, 3, 4), "scale": torch.tensor([0.5, 2], dtype=torch.half)})


@pytest.mark.parametrize("shape", [(), (5, 3), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.half, torch.float32], ids=str)
def test_a_message_arrives_as_it_was_sent_unless_it_is_too_long(ends, dtype, shape):
    for sent in ({"a": torch.tensor([True]), "x": (torch.rand(shape) * 9).to(dtype), "y": torch.zeros(2)}, {}):
        size = send_message(ends[0], EXAMPLE[0], sent, soon())
        fields, received, received_size = receive_message(ends[1], size, soon())
        assert fields == EXAMPLE[0] and received_size == size and received.keys() == sent.keys()
        assert all(received[name].dtype == x.dtype and received[name].equal(x) for name, x in sent.items())
    send_message(ends[0], *EXAMPLE, soon())
    with pytest.raises(ProtocolError, match="too long"):
        receive_message(ends[1], len(frame(*EXAMPLE)) - 1, soon())


def test_every_truncation_is_noticed_and_a_close_between_two_messages_is_told_from_one_within(ends):
    whole = frame(*EXAMPLE)
    assert {outcome(whole[:length]) for length in range(len(whole))} == {"the peer closed the connection"}
    ends[0].sendall(whole + whole[:-1])
    ends[0].close()
    receive_message(ends[1], LIMIT, soon())
    for kind in (ProtocolError, ConnectionClosed):
        with pytest.raises(ProtocolError) as error:
            receive_message(ends[1], LIMIT, soon())
        assert error.type is kind


def test_random_frames_and_frames_with_flipped_bits_raise_a_protocol_error_and_nothing_else():
    generator, whole, received = random.Random(0), frame(*EXAMPLE), 0
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(whole) - 28)] ^= 1 << generator.randrange(8)  # 24 + 4 may be anything
        received += outcome(damaged) == "received"  # a name or a number may have become another one
        noise = generator.randbytes(generator.randint(1, 200))
        assert "received" not in (outcome(noise), outcome(raw(noise)), outcome(raw(b"{}", noise)))
    assert received < 2000


@pytest.mark.parametrize("message", [
    raw(b"{}", magic=b"HTTP"), raw(b"{}", version=VERSION - 1), raw(b"{}", b"\xff" * 9), raw(b"{}", bytes(8)),
    *map(raw, (b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 60000, b'{"x": ' * 5000, b"1" * 60000)),
    *map(one_tensor, (None, "I8", {}, {"dtype": "I8"}, *(
        {"dtype": dtype, "shape": [n], "data_offsets": [0, end]} for dtype, n, end in (
            ("I8", 3, 4), ("F4", 8, 4), ("I8", -4, 4), ("I8", 4.0, 4), ("I8", 2**40, 2**40), ("I8", 10**30, 4)))))],
    ids=lambda message: repr(message[17:80]))
def test_a_malformed_message_is_refused_in_one_line(message):
    assert "malformed message" in outcome(message)


@pytest.mark.parametrize("sizes", [(2**32 - 1, 0), (2, 2**64 - 1), (2**17, 0), (2, 2**28 + 1), (2, 2**27)], ids=str)
def test_a_length_that_is_announced_takes_no_memory(ends, sizes):
    ends[0].sendall(HEADER.pack(MAGIC, VERSION, *sizes) + b"{}" + bytes(1000))
    ends[0].close()
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="closed" if sizes[1] == 2**27 else "too long"):
        receive_message(ends[1], 1 << 28, soon())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 19


def test_a_peer_that_sends_or_takes_too_little_is_held_to_the_deadline(ends):
    for seconds in (0.3, -0.1):  # in the past, although there is something to be read
        timers = [threading.Timer(0.1 * i, ends[0].sendall, [b"MoAs"[i:i + 1]]) for i in range(4)]
        [timer.start() for timer in timers]
        with pytest.raises(TimeoutError, match="timed out"):
            receive_message(ends[1], LIMIT, soon(seconds))
        [timer.join() for timer in timers]
    with pytest.raises(TimeoutError):
        send_message(ends[1], {}, {"x": torch.zeros(1 << 22)}, soon(0.1))


# The channel ---------------------------------------------------------------------------------------------------------

class Session:
    """Answers {"work": [seconds, ...]} with as many replies, each after so long and with the request's tensors."""

    greeting = {"drafter": "test"}

    def answer(self, fields, tensors):
        for i, seconds in enumerate(fields["work"], 1):
            time.sleep(seconds)
            yield {"more": i < len(fields["work"])}, tensors


@contextlib.contextmanager
def serving(new_session=Session, secret: str = "", **choices):
    """A server in threads of this process; afterwards none of them is left."""
    before = threading.active_count()
    with MessageServer(("127.0.0.1", 0), secret, new_session, **choices) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
    assert threading.active_count() == before and not server.connections and not server.unauthenticated


def channel_to(server: MessageServer, link: Link = Link(), timeout: float | None = None, **outage) -> Channel:
    return Channel(server.server_address, server.secret, Network(link, **outage), timeout)


def ask(channel: Channel, *work: float) -> list[tuple[dict, dict, float]]:
    request = channel.request({"work": work or [0.0]}, {"x": torch.arange(3)}, lambda *reply: reply)
    return [(*reply, time.monotonic()) for reply in request]


def test_replies_come_after_the_way_up_the_servers_work_and_the_way_down_and_all_bytes_are_counted():
    with serving() as server, contextlib.closing(channel_to(server, Link(0.01, bandwidth=1e5))) as channel:
        assert channel.connect() == {"drafter": "test"}
        up, down, start = channel.bytes_up, channel.bytes_down, time.monotonic()
        assert (up, down) == (DIGEST, NONCE + len(frame({"drafter": "test"})))
        replies, sizes = ask(channel, 0.03, 0.02), [len(frame({"work": [0.03, 0.02]}, {"x": torch.arange(3)}))]
        for (fields, tensors, moment), work in zip(replies, (0.03, 0.05), strict=True):
            sizes.append(len(frame(fields, tensors)))
            assert moment >= start + 2 * 0.01 + work + 8 * (sizes[0] + sizes[-1]) / 1e5 and fields["elapsed"] >= 0.02
            assert tensors["x"].equal(torch.arange(3))
        assert [channel.bytes_up - up, channel.bytes_down - down] == [sizes[0], sum(sizes[1:])]
        assert channel.round_trips == 1 and channel.network_seconds >= 0.02


def test_a_slow_link_delays_a_new_connection_and_does_not_break_it(monkeypatch):
    monkeypatch.setattr(netsim, "CONNECT_SECONDS", 0.4)  # for the real messages; six simulated one-way trips take longer
    with serving() as server, contextlib.closing(channel_to(server, Link(0.1))) as channel:
        start = time.monotonic()
        assert channel.connect() == {"drafter": "test"} and time.monotonic() >= start + 6 * 0.1


def test_what_meets_an_outage_is_lost_after_ten_times_the_slowest_reply_and_a_new_connection_works(monkeypatch):
    monkeypatch.setattr(netsim, "MIN_TIMEOUT", 0.01)
    with serving() as server:
        channel = channel_to(server, Link(0.02), outage_after=3, outage_seconds=1.5)
        channel.connect()
        ask(channel)
        start, slowest = time.monotonic(), channel.slowest
        channel.network.count_tokens(3, time.monotonic() + 0.01)  # while the next request is in flight
        for call, reason in ((ask, "no answer from the server"), (ask, "not connected"),
                             (Channel.connect, "the network is down")):
            with pytest.raises(ConnectionLost, match=reason):
                call(channel)
        assert time.monotonic() > start + 10 * slowest > start + 0.3
        while channel.network.is_down(time.monotonic(), time.monotonic()):
            time.sleep(0.01)
        channel.connect()
        ask(channel)
        channel.close()
    assert channel.round_trips == 2


@contextlib.contextmanager
def sending(monkeypatch, *messages: bytes | None):
    """A channel to a server that sends these bytes instead of its own; after None it closes."""
    queue = list(messages)
    with monkeypatch.context() as patch, serving() as server:
        patch.setattr(Connection, "send", lambda self, fields, tensors={}: self.request.sendall(queue.pop(0)))
        with contextlib.closing(channel_to(server, timeout=0.2)) as channel:
            yield channel


HUGE, NOISE = HEADER.pack(MAGIC, VERSION, 2, 2**60), b"HTTP/1.1 400 Bad Request\r\n\r\n"


@pytest.mark.parametrize("reply", [None, b"", NOISE, HUGE, frame(*EXAMPLE)[:40], frame({}), *(
    frame({"elapsed": e}) for e in (None, [], {}, "x", "", 10**400, math.inf, 1e308))], ids=lambda x: repr(x)[17:60])
def test_a_server_that_fails_is_lost_in_one_line_and_nothing_else_happens(reply, monkeypatch):
    with sending(monkeypatch, frame({}), *(frame({"elapsed": e}) for e in (-1.0, -1e308, math.nan)), reply) as channel:
        channel.connect()
        for _ in range(3):  # an impossible time is no failure
            assert len(ask(channel)) == 1 and channel.network_seconds >= 0
        for _ in range(2):
            with pytest.raises(ConnectionLost) as lost:
                ask(channel)
            assert str(lost.value) and "\n" not in str(lost.value) and channel.sock is None


@pytest.mark.parametrize("greeting", [NOISE, HUGE, raw(b"[]"), frame({})[:-1], frame({"refused": "full"})], ids=repr)
def test_a_connection_that_cannot_be_made_is_lost_in_one_line(greeting, monkeypatch):
    with sending(monkeypatch, greeting) as channel:
        monkeypatch.setattr(netsim, "CONNECT_SECONDS", 0.3)
        with pytest.raises(ConnectionLost, match="full" if b"full" in greeting else "no server at 127.0.0.1:"):
            channel.connect()
        assert channel.sock is None
    for host in ("127.0.0.1", "a..b"):
        with pytest.raises(ConnectionLost, match=f"no server at {host}:9: "):
            Channel((host, 9), "", Network(Link())).connect()


# Quantities ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("parse, text, value", [
    (duration, "21ms", 0.021), (duration, "0.5s", 0.5), (duration, "0ms", 0.0), (duration, ".5s", 0.5),
    (bandwidth, "20Mbit", 2e7), (bandwidth, "300kbit", 3e5), (bandwidth, "1.5Gbit", 1.5e9), (loss_rate, "0.1%", 0.001)])
def test_quantities_are_read_with_their_units(parse, text, value):
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize("parse", [duration, bandwidth, loss_rate])
@pytest.mark.parametrize("text", ["", "21", "ms", "-1ms", "nanms", "infs", "1e3s", "1 s", "1m", "2h", "-1%", "100%",
                                  "1..2s", "0Mbit", "-3Mbit", "Mbit", "20MB", "inf", "١s", "1s\n", "9" * 400 + "s"])
def test_an_invalid_quantity_is_one_line_that_says_how_to_write_one(parse, text):
    with pytest.raises(argparse.ArgumentTypeError, match="like") as error:
        parse(text)
    assert "\n" not in str(error.value)
