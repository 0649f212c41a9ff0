"""The network: links against their formulas, outages, the client's channel."""
import argparse
import contextlib
import math
import socket
import statistics
import time
from dataclasses import replace

import pytest
import torch
from test_messages import EXAMPLE, frame, raw, serving

import netsim
from netsim import (
    INITIAL_RTO,
    MSS,
    PROFILES,
    Channel,
    ConnectionLost,
    Link,
    Network,
    Outage,
    SimulatedPath,
    add_link_arguments,
    announce_on_terminal,
    link_of,
)
from plumbing import messages
from plumbing.flags import address
from plumbing.messages import HEADER, MAGIC, VERSION, Message, MessageServer

SAMPLES = 20000


# --- The link ---

def delays(link: Link, size: int = 100) -> list[float]:
    """Seconds that messages of `size` bytes take if they never meet: they are sent hours apart."""
    path = Network(link, seed=1).up
    path.arrival_of(0.0, 0)  # the first message of a connection has a different timeout
    observed = []
    for i in range(1, SAMPLES + 1):
        sent = i * 10000.0
        observed.append(path.arrival_of(sent, size) - sent)
    return observed


def assert_share(observed: list[bool], p: float) -> None:
    """The share of true values is that of independent draws with probability p, within four
    standard deviations."""
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
    path = Network(Link(latency=0.01, bandwidth=1e6)).up
    assert path.arrival_of(0.0, 12500) == pytest.approx(0.11)
    assert path.arrival_of(0.05, 12500) == pytest.approx(0.21)  # starts at 0.1
    assert path.arrival_of(0.5, 10**7) == pytest.approx(80.51)  # the link is idle since 0.2
    path.reset()
    assert path.arrival_of(1.1, 12500) == pytest.approx(1.21)  # over a new connection


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
    path = Network(Link(loss=0.3), seed=1).up
    observed = []
    for _ in range(SAMPLES):
        path.reset()
        observed.append(path.arrival_of(0.0, 0))  # TCP's handshake: a packet without bytes
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


def arrivals_of(path: SimulatedPath) -> list[float]:
    return [path.arrival_of(i * 0.001, 100) for i in range(3000)]


def test_messages_arrive_in_order():
    for seed in range(3):
        arrivals = arrivals_of(Network(Link(0.02, 0.02, loss=0.05), seed).down)
        assert arrivals == sorted(arrivals)


def test_a_seed_repeats_exactly_but_no_two_directions_share_their_random_draws():
    paths = []
    for seed in (0, 1, 2):
        network = Network(Link(0.02, 0.02, loss=0.05), seed)
        paths += [network.up, network.down]
    first = [arrivals_of(path) for path in paths]
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
    path = network_with_outage(Link(latency=0.02), 0.3).down
    assert path.arrival_of(0.97, 100) == pytest.approx(0.99)  # arrives before the outage
    resumed = 1.3 + 0.04 + 0.2
    assert path.arrival_of(0.99, 100) == pytest.approx(resumed + 0.01)  # half of its way is left
    assert path.arrival_of(1.10, 100) == pytest.approx(resumed + 0.02)
    assert path.arrival_of(1.40, 100) == pytest.approx(resumed + 0.02)  # TCP delivers in order
    assert path.arrival_of(2.00, 100) == pytest.approx(2.02)


def test_a_long_message_loses_the_whole_outage_and_no_more():
    path = network_with_outage(Link(bandwidth=1e6), 0.3).up
    assert path.arrival_of(0.5, 10**6) == pytest.approx(8.5 + 0.3 + 0.2)


def test_what_meets_an_outage_without_end_never_arrives():
    path = network_with_outage(Link(0.01), math.inf).up
    assert path.arrival_of(0.97, 100) == pytest.approx(0.98)
    assert path.arrival_of(1.5, 100) == math.inf


# --- The channel ---

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
    """Yield the replies of a Session, each when it arrives."""
    with channel.closed_on_failure():
        channel.send({"work": work}, TENSORS)
        for _ in work:
            yield channel.receive()


def ask(channel: Channel, *work: float) -> list[Message]:
    return list(replies_to(channel, list(work) or [0.0]))


def stream(channel: Channel, work: list[float], moments: list[float]) -> None:
    """Take every reply for a token, and add the moments when they arrive."""
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
        arrival_of = up.arrival_of
        delays = iter([0.2, 0.0])  # the first packet is lost once

        def delayed(sent: float, size: int) -> float:
            return arrival_of(sent, size) + next(delays)

        monkeypatch.setattr(up, "arrival_of", delayed)
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
        assert channel.slowest > 0.03  # both ways, less the time to send
        assert channel.traffic.network_seconds >= 2 * 0.02
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


@contextlib.contextmanager
def sending(monkeypatch, *sent: bytes | None):
    """A channel to a server that sends these bytes instead of its own; after None it closes."""
    queue = list(sent)

    def send(sock: socket.socket, fields: dict, tensors: dict) -> None:
        sock.sendall(queue.pop(0))

    with monkeypatch.context() as patch, serving() as server:
        patch.setattr(messages, "send_message", send)
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


def test_a_bug_of_the_client_is_not_reported_as_a_lost_connection():
    with connected() as channel:
        with pytest.raises(TypeError, match="not JSON serializable"):
            list(replies_to(channel, [{1, 2}]))
        assert len(ask(channel)) == 1  # the connection still works


def test_an_impossible_time_of_work_is_no_failure(monkeypatch):
    impossible = [frame({"elapsed": seconds}) for seconds in (-1.0, -1e308, math.nan)]
    with sending(monkeypatch, frame({}), *impossible) as channel:
        channel.connect()
        for _ in impossible:
            assert len(ask(channel)) == 1
            assert channel.traffic.network_seconds >= 0


@pytest.mark.parametrize("greeting, complaint", [
    (NOISE, "no connection to 127.0.0.1:"),
    (HUGE, "no connection to 127.0.0.1:"),
    (raw(b"[]"), "no connection to 127.0.0.1:"),
    (frame({})[:-1], "no connection to 127.0.0.1:"),
    (frame({"refused": "full"}), "no connection to 127.0.0.1:[0-9]+: refused: 'full'")])
def test_a_greeting_that_is_none_is_lost_in_one_line(greeting, complaint, monkeypatch):
    with sending(monkeypatch, greeting) as channel:
        monkeypatch.setattr(netsim, "CONNECT_SECONDS", 0.3)
        with pytest.raises(ConnectionLost, match=complaint) as lost:
            channel.connect()
        assert "\n" not in str(lost.value)
        assert channel.sock is None


@pytest.mark.parametrize("host", ["127.0.0.1", "a..b"])
def test_an_address_without_a_server_is_lost_in_one_line(host):
    with pytest.raises(ConnectionLost, match=f"no connection to {host}:9: ") as lost:
        Channel((host, 9), Network(Link())).connect()
    assert "\n" not in str(lost.value)


# --- The command line ---

@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_address_that_a_server_prints_is_one_that_remote_takes(host, capsys):
    announce_on_terminal((host, 7000))
    out, err = capsys.readouterr()
    assert address(out.strip()) == (host, 7000)
    assert f"--remote {out.strip()} " in err


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
