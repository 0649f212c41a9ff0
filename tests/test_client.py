"""The client's channel: a real connection on which a network is simulated, with outages. And the
drafter's side of an outage."""
import argparse
import contextlib
import math
import socket
import time

import pytest
import torch
from test_messages import EXAMPLE, frame, raw, serving
from tiny_models import PROMPT, new_drafter, new_target

from app import client
from app.client import (
    Channel,
    InterruptedPath,
    Outage,
    RemoteDraftState,
    add_link_arguments,
    link_of,
)
from llama import Sampling
from moa import DraftLimits, DraftState
from netsim import PROFILES, Link
from plumbing import messages
from plumbing.messages import HEADER, MAGIC, VERSION, MessageServer

# --- Outages ---


def test_an_outage_meets_what_is_in_flight_after_its_tokens_have_come_and_before_it_ends():
    outage = Outage(after=20, seconds=2.0)
    outage.begin_if_due(19, 1.0)
    outage.begin_if_due(20, 3.0)
    outage.begin_if_due(21, 4.0)
    assert not outage.overlaps(1.5, 2.5)
    assert outage.overlaps(2.9, 3.1)
    assert outage.overlaps(4.9, 5.1)
    assert not outage.overlaps(5.0, 5.1)


def path_with_outage(link: Link, seconds: float) -> InterruptedPath:
    """The outage begins at 1.0."""
    return InterruptedPath(link, 0, Outage(after=1, seconds=seconds, begins=1.0))


def test_a_message_stands_still_in_an_outage_and_goes_on_one_timeout_after_its_end():
    path = path_with_outage(Link(latency=0.02), 0.3)
    assert path.arrival_of(0.97, 100) == pytest.approx(0.99)  # arrives before the outage
    resumed = 1.3 + 0.04 + 0.2
    assert path.arrival_of(0.99, 100) == pytest.approx(resumed + 0.01)  # half of its way is left
    assert path.arrival_of(1.10, 100) == pytest.approx(resumed + 0.02)
    assert path.arrival_of(1.40, 100) == pytest.approx(resumed + 0.02)  # TCP delivers in order
    assert path.arrival_of(2.00, 100) == pytest.approx(2.02)


def test_a_long_message_loses_the_whole_outage_and_no_more():
    path = path_with_outage(Link(bandwidth=1e6), 0.3)
    assert path.arrival_of(0.5, 10**6) == pytest.approx(8.5 + 0.3 + 0.2)


def test_what_meets_an_outage_without_end_never_arrives():
    path = path_with_outage(Link(0.01), math.inf)
    assert path.arrival_of(0.97, 100) == pytest.approx(0.98)
    assert path.arrival_of(1.5, 100) == math.inf


def test_a_new_connection_does_not_wait_for_what_is_in_flight_over_the_old_one():
    path = InterruptedPath(Link(latency=0.01, bandwidth=1e6), 0, Outage())
    assert path.arrival_of(0.5, 10**7) == pytest.approx(80.51)
    path.begin_connection()
    assert path.arrival_of(1.1, 12500) == pytest.approx(1.21)


# --- The channel ---

GREETING = {"drafter": "test"}  # of the session in test_messages.py


def channel_to(server: MessageServer, link: Link = Link(), timeout: float | None = None,
               seed: int = 0, **outage) -> Channel:
    return Channel(server.server_address[:2], link, seed, Outage(**outage), timeout)


@contextlib.contextmanager
def connected(link: Link = Link(), timeout: float | None = None, **outage):
    """A channel to a server of its own."""
    with serving() as server:
        with contextlib.closing(channel_to(server, link, timeout, **outage)) as channel:
            channel.connect()
            yield channel


X = torch.arange(3)


def ask(channel: Channel, *work: float) -> list[dict]:
    """The replies of a Session."""
    channel.send({"work": work or [0.0], "x": X})
    return [channel.receive() for _ in work or [0.0]]


def test_replies_come_after_the_way_up_the_servers_work_and_the_way_down():
    """And all bytes, round trips and the network's share of the time are counted."""
    with connected(Link(0.01, bandwidth=1e5)) as channel:
        traffic = channel.traffic
        assert (traffic.bytes_up, traffic.bytes_down) == (0, len(frame(GREETING)))
        work = [0.03, 0.2]
        start = time.monotonic()
        channel.send({"work": work, "x": X})
        worked = 0.0
        for seconds in work:
            received = traffic.bytes_down
            assert channel.receive()["x"].equal(X)
            moment = time.monotonic() - start
            worked += seconds
            size = traffic.bytes_down - received
            assert size > len(frame({"x": X}))  # there is "elapsed", too
            assert moment >= 2 * 0.01 + 8 * (traffic.bytes_up + size) / 1e5 + worked
        assert traffic.bytes_up == len(frame({"work": work, "x": X}))
        assert traffic.round_trips == channel.number == 1
        assert 0.02 <= traffic.network_seconds <= moment - 0.2


def test_a_slow_link_delays_a_new_connection_and_does_not_break_it(monkeypatch):
    monkeypatch.setattr(client, "CONNECT_SECONDS", 0.25)  # the limit of the real messages
    start = time.monotonic()
    with connected(Link(0.07)):
        assert time.monotonic() >= start + 4 * 0.07  # two simulated ways up, two down


def test_a_new_connection_has_time_for_a_first_packet_that_is_lost(monkeypatch):
    monkeypatch.setattr(client, "INITIAL_RTO", 0.2)
    monkeypatch.setattr(client, "MIN_TIMEOUT", 0.02)
    with connected() as channel:
        ask(channel)
        arrival_of = channel.up.arrival_of
        delays = iter([0.2, 0.0])  # the first packet is lost once

        def delayed(sent: float, size: int) -> float:
            return arrival_of(sent, size) + next(delays)

        monkeypatch.setattr(channel.up, "arrival_of", delayed)
        start = time.monotonic()
        assert 10 * channel.slowest < 0.2
        channel.connect()
        assert time.monotonic() >= start + 0.2


def test_the_first_reply_of_a_new_connection_has_as_long_as_the_very_first(monkeypatch):
    monkeypatch.setattr(client, "MIN_TIMEOUT", 0.02)
    with connected() as channel:
        ask(channel)
        assert channel.reply_timeout() < client.FIRST_REPLY_SECONDS
        channel.connect()
        ask(channel, 0.3)  # seconds of work, as if to read a long text
        channel.slowest = 0.0
        with pytest.raises(TimeoutError, match="timed out"):
            ask(channel, 0.3)


def test_an_outage_that_outlasts_the_reply_timeout_ends_a_stream_at_its_deadline():
    with connected(timeout=0.3, after=3, seconds=1.0) as channel:
        channel.send({"work": [0.02] * 8, "x": X})
        for count in (1, 2, 3):
            channel.receive()
            last = time.monotonic()
            channel.outage.begin_if_due(count, last)
        with pytest.raises(TimeoutError, match="timed out"):
            channel.receive()
        assert last + 0.3 <= time.monotonic() < last + 1.0  # before the outage ends


def test_a_late_reply_is_lost_after_ten_times_the_slowest_and_a_new_connection_works(monkeypatch):
    monkeypatch.setattr(client, "MIN_TIMEOUT", 0.01)
    with connected(Link(0.02), after=3, seconds=1.0) as channel:
        ask(channel)
        assert channel.slowest > 0.03  # both ways, less the time to send
        channel.slowest = 0.03  # also on a busy machine
        start = time.monotonic()
        channel.outage.begin_if_due(3, start + 0.01)  # while the next request is in flight
        with pytest.raises(TimeoutError):
            ask(channel)
        assert time.monotonic() > start + 10 * 0.03
        with pytest.raises(ConnectionError, match="the network is down"):
            channel.connect()
        with pytest.raises(ConnectionError, match="not connected"):
            ask(channel)
        while channel.outage.overlaps(time.monotonic(), time.monotonic()):
            time.sleep(0.01)
        channel.connect()
        ask(channel)
        assert channel.traffic.round_trips == 3  # one of them without a reply


@contextlib.contextmanager
def sending(monkeypatch, *sent: bytes | None):
    """A channel to a server that sends these bytes instead of its own; after None it closes."""
    queue = list(sent)

    def send(sock: socket.socket, fields: dict) -> None:
        sock.sendall(queue.pop(0))

    with monkeypatch.context() as patch, serving() as server:
        patch.setattr(messages, "send_message", send)
        with contextlib.closing(channel_to(server, timeout=0.2)) as channel:
            yield channel


HUGE = HEADER.pack(MAGIC, VERSION, 2, 2**60)
NOISE = b"HTTP/1.1 400 Bad Request\r\n\r\n"
WRONG_REPLIES = [None, b"", NOISE, HUGE, frame(EXAMPLE)[:40], frame({})]
WRONG_REPLIES += [frame({"elapsed": seconds}) for seconds in (None, [], "x", 10**400, math.inf)]


@pytest.mark.parametrize("reply", WRONG_REPLIES, ids=lambda reply: repr(reply)[17:60])
def test_a_reply_that_is_none_is_an_error_of_one_line(reply, monkeypatch):
    with sending(monkeypatch, frame({}), reply) as channel:
        channel.connect()
        with pytest.raises(OSError) as lost:
            ask(channel)
        assert str(lost.value) and "\n" not in str(lost.value)


def test_an_impossible_time_of_work_is_no_failure(monkeypatch):
    impossible = [frame({"elapsed": seconds}) for seconds in (-1.0, -1e308, math.nan)]
    with sending(monkeypatch, frame({}), *impossible) as channel:
        channel.connect()
        for _ in impossible:
            assert len(ask(channel)) == 1
            assert channel.traffic.network_seconds >= 0


@pytest.mark.parametrize("greeting", [
    NOISE, HUGE, raw(b"[]"), frame({})[:-1], frame({"refused": "full"})])
def test_a_greeting_that_is_none_is_an_error_of_one_line(greeting, monkeypatch):
    monkeypatch.setattr(client, "CONNECT_SECONDS", 0.3)
    with sending(monkeypatch, greeting) as channel:
        with pytest.raises(OSError) as lost:
            channel.connect()
        assert str(lost.value) and "\n" not in str(lost.value)


@pytest.mark.parametrize("fingerprints, other", [
    ({}, None),
    ({"drafter": "test"}, None),
    ({"drafter": "mine"}, "drafter"),
    ({"target": "mine", "drafter": "test"}, "target")], ids=str)
def test_a_server_with_another_target_or_drafter_is_refused(fingerprints, other):
    with serving() as server, contextlib.closing(channel_to(server)) as channel:
        channel.fingerprints = fingerprints
        if other is None:
            channel.connect()
        else:
            with pytest.raises(ConnectionError, match=f"the server has another {other}; start"):
                channel.connect()


@pytest.mark.parametrize("host", ["127.0.0.1", "a..b"])
def test_an_address_without_a_server_is_an_error_of_one_line(host):
    with pytest.raises(OSError) as lost:
        Channel((host, 9)).connect()
    assert str(lost.value) and "\n" not in str(lost.value)


# --- Drafting on alone ---


@pytest.fixture(params=[0, 2], ids="N={}".format)
def states(request) -> tuple[RemoteDraftState, DraftState]:
    """Of one text: a state that can go on alone, and a plain one."""
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=request.param)
    cache = target.new_cache(64)
    target.hidden(torch.tensor([PROMPT]), cache)
    pair = RemoteDraftState(drafter, 64, Sampling()), DraftState(drafter, 64, Sampling())
    for state in pair:
        state.append_verified(drafter.cache_update(PROMPT, cache))
        state.target_cache = cache
    return pair


def verify(state: DraftState, tokens: list[int]) -> None:
    """Let the target read tokens, and the drafter's caches grow."""
    cache = state.target_cache
    state.drafter.target.hidden(torch.tensor([tokens]), cache)
    state.append_verified(state.drafter.cache_update(tokens, cache))


def test_unverified_tokens_go_on_as_one_draft_would_until_others_are_verified_in_their_place(
        states):
    state, plain = states
    chain = plain.draft(2, DraftLimits(8)).tokens
    begun = state.draft_unverified(2, 4)
    state.draft(9, DraftLimits(2))  # this draft is dropped again
    assert state.draft_unverified(begun[-1], 4) == chain[5:]
    assert begun == chain[1:5]
    lengths = state.self_cache.length, state.ca_cache.length, state.unverified
    assert lengths == (len(PROMPT) + 8, len(PROMPT), 8)
    verify(state, [2, *chain[1:3]])  # and not the other six
    plain.append_verified(plain.drafter.cache_update([2, *chain[1:3]], state.target_cache))
    assert state.draft(5, DraftLimits(6)).tokens == plain.draft(5, DraftLimits(6)).tokens


def test_while_the_server_is_out_of_reach_nothing_is_drafted_for_it(states):
    state, _ = states
    online = state.draft(2, DraftLimits(3)).tokens
    assert [2] + state.draft_unverified(2, 3) == online  # the text goes on
    state.append_verified(None)
    assert state.draft(2, DraftLimits(3)).tokens == [2]
    verify(state, online)  # the server is back
    assert len(state.draft(5, DraftLimits(3)).tokens) == 4


# --- Flags ---


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
