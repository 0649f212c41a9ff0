"""The network: links against their formulas, outages, both clocks, framed messages and their abuse, a client's channel."""
import argparse
import contextlib
import json
import math
import random
import socket
import statistics
import threading
import time
import tracemalloc
from dataclasses import replace

import pytest
import torch

from netsim import (DTYPES, FIRST_TIMEOUT, HEADER, LEAST_TIMEOUT, MAGIC, MOST_PATIENCE, PACKET, PROFILES, VERSION, Channel,
                    ConnectionClosed, Link, Lost, Network, Outage, ProtocolError, SmoothedTime, VirtualClock, WallClock,
                    duration, rate, receive_message, send_message, share, symmetric)

LIMIT = 1 << 20
COSTS = {"draft": 0.002, "verify": 0.03}


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def delays(link: Link, count: int, size: int = 100, apart: float = 10.0) -> list[float]:
    """Of messages that do not meet."""
    return [link.arrival(i * apart, size) - i * apart for i in range(count)]


# The link ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["5g", "4g"])
def test_propagation_is_normal_and_never_negative(name):
    link = replace(PROFILES[name], loss=0.0, bandwidth=math.inf, seed=1)
    observed, n = delays(link, 20000), 20000
    normal, z = statistics.NormalDist(), link.latency / link.jitter
    mean = link.latency * normal.cdf(z) + link.jitter * normal.pdf(z)  # of max(0, N(latency, jitter))
    square = (link.latency**2 + link.jitter**2) * normal.cdf(z) + link.latency * link.jitter * normal.pdf(z)
    spread = math.sqrt(square - mean**2)
    assert min(observed) >= -1e-9
    assert abs(statistics.fmean(observed) - mean) < 4 * spread / math.sqrt(n)
    assert abs(statistics.stdev(observed) - spread) < 4 * spread / math.sqrt(n)  # a normal's error is spread / sqrt(2n)
    assert abs(sum(d < 1e-9 for d in observed) / n - normal.cdf(-z)) < 4 / math.sqrt(4 * n)


def test_without_jitter_the_delay_is_latency_plus_bytes_over_bandwidth():
    link = Link(latency=0.021, bandwidth=20e6)
    assert link.arrival(1.0, 2500) == pytest.approx(1.0 + 0.001 + 0.021)


def test_bytes_queue_behind_the_bytes_before_them():
    link = Link(latency=0.01, bandwidth=1e6)
    assert link.arrival(0.0, 12500) == pytest.approx(0.11)
    assert link.arrival(0.05, 12500) == pytest.approx(0.21)  # starts at 0.1
    assert link.arrival(0.5, 12500) == pytest.approx(0.61)  # the link has been idle since 0.2


def test_messages_stay_in_order():
    link = Link(latency=0.02, jitter=0.02, loss=0.05, seed=2)
    arrivals = [link.arrival(i * 0.001, 100) for i in range(5000)]
    assert arrivals == sorted(arrivals)


def test_a_lost_packet_costs_a_timeout_that_doubles_with_every_further_loss():
    loss, n = 0.3, 20000
    link = Link(latency=0.001, loss=loss, seed=3)
    observed = delays(link, n, apart=10000.0)
    assert link.timeout() == LEAST_TIMEOUT
    for losses in range(4):
        cost = 0.001 + LEAST_TIMEOUT * (2**losses - 1)
        expected = loss**losses * (1 - loss)
        met = sum(abs(d - cost) < 1e-3 for d in observed) / n
        assert abs(met - expected) < 4 * math.sqrt(expected * (1 - expected) / n)


def test_a_message_waits_for_every_one_of_its_packets():
    n, packets, loss = 20000, 10, 0.01
    observed = delays(Link(loss=loss, seed=4), n, size=packets * PACKET, apart=1000.0)
    expected = 1 - (1 - loss)**packets
    assert abs(sum(d > 0.1 for d in observed) / n - expected) < 4 * math.sqrt(expected * (1 - expected) / n)


def test_the_timeout_of_a_slow_link_follows_its_round_trips():
    link, generator = Link(latency=0.5, jitter=0.1), random.Random(5)
    trips = [generator.gauss(0.5, 0.1) + generator.gauss(0.5, 0.1) for _ in range(20000)]
    mean = statistics.fmean(trips)
    assert link.timeout() == pytest.approx(mean + 4 * statistics.fmean(abs(t - mean) for t in trips), rel=0.01)


def test_a_seed_repeats_exactly_and_another_does_not():
    one, same, other = (delays(replace(PROFILES["4g"], seed=seed), 500) for seed in (7, 7, 8))
    assert one == same != other


def test_both_directions_share_conditions_but_not_chances():
    network = symmetric(PROFILES["4g"], seed=1)
    assert replace(network.up, seed=0) == replace(network.down, seed=0) == PROFILES["4g"]
    assert delays(network.up, 10) != delays(network.down, 10)


def test_the_profiles_are_the_papers():
    assert 2 * PROFILES["wan"].latency == pytest.approx(0.009) and PROFILES["wan"].bandwidth == 50e6
    assert (PROFILES["5g"].latency, PROFILES["5g"].jitter, PROFILES["5g"].loss) == (0.010, 0.010, 0.001)
    assert PROFILES["4g"] == Link(0.021, 0.019, 20e6, 0.001)


# Outages and round trips ---------------------------------------------------------------------------------------------

def test_what_meets_an_outage_for_good_never_arrives():
    network = symmetric(Link(), outages=[Outage(begins=5.0)])
    assert network.delivery(4.0, 4.1) == 4.1
    assert network.delivery(4.95, 5.05) == math.inf  # was on its way
    assert network.delivery(6.0, 6.1) == math.inf


def test_what_meets_a_passing_outage_is_sent_again_after_doubling_timeouts():
    network = symmetric(Link(), outages=[Outage(begins=5.0, seconds=1.0)])
    assert network.delivery(5.0, 5.02) == pytest.approx(5.02 + 0.2 + 0.4 + 0.8)  # the trials at 5.2 and 5.6 meet it too
    assert network.delivery(5.99, 6.01) == pytest.approx(6.21)  # handed over while it was down
    assert network.delivery(6.0, 6.02) == 6.02


def test_an_outage_after_tokens_begins_once_they_have_come():
    network = symmetric(Link(), outages=[Outage(tokens=20, seconds=2.0)])
    network.tokens(19, 1.0)
    assert network.delivery(1.5, 1.6) == 1.6
    network.tokens(21, 3.0)
    network.tokens(22, 4.0)  # does not begin again
    assert network.delivery(2.9, 2.95) == 2.95
    assert network.delivery(2.9, 3.1) > 5.0
    assert network.delivery(5.5, 5.6) == 5.6


def test_the_round_trip_is_smoothed_as_in_rfc_6298():
    trip = SmoothedTime()
    assert trip.timeout() == 1.0
    trip.observe(0.4)
    assert (trip.mean, trip.timeout()) == (0.4, pytest.approx(3 * 0.4))
    trip.observe(0.8)
    assert trip.mean == pytest.approx(0.4 * 7 / 8 + 0.8 / 8)
    assert trip.deviation == pytest.approx(0.2 * 3 / 4 + 0.4 / 4)  # with the mean before it


def test_patience_covers_more_losses_in_a_row_the_more_answers_were_late():
    assert SmoothedTime().patience() == (1 + 2 + 4) * FIRST_TIMEOUT
    for late, losses in ((0, 2), (5, 4), (20, 6), (100, 6)):
        trip = SmoothedTime(mean=0.1, deviation=0.05, count=100, late=late)
        assert trip.patience() == (2**losses - 1) * trip.timeout()
    assert SmoothedTime(mean=1.0, count=100, late=100).patience() == MOST_PATIENCE
    assert SmoothedTime(mean=40.0, count=100, late=100).patience() == 3 * 40.0


def test_the_first_round_trip_is_not_late_however_long_it_takes():
    trip = SmoothedTime()
    trip.observe(5 * FIRST_TIMEOUT)
    assert trip.late == 0


def test_the_smoothed_round_trip_finds_the_true_one_and_an_outage_does_not_spoil_it():
    trip, link = SmoothedTime(), Link(latency=0.06, jitter=0.01, seed=6)
    for delay in delays(link, 200):
        trip.observe(delay)
    assert trip.mean == pytest.approx(0.06, abs=0.015)
    assert trip.timeout() == LEAST_TIMEOUT
    trip.observe(3600.0)
    assert trip.timeout() < 1.0
    for _ in range(40):  # a link that has become slow is found to be slow nevertheless
        trip.observe(2.0)
    assert trip.mean == pytest.approx(2.0, rel=0.05)


# Framed messages -----------------------------------------------------------------------------------------------------

@pytest.fixture
def ends():
    """The two ends of a real connection."""
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def framed(fields: dict, tensors: dict) -> bytes:
    near, far = socket.socketpair()
    with near, far:
        return far.recv(send_message(near, fields, tensors))


def raw(description: object, data: bytes = b"") -> bytes:
    text = json.dumps(description).encode()
    return HEADER.pack(MAGIC, VERSION, len(text), len(data)) + text + data


EXAMPLE = ({"accepted": 3, "token": 17, "note": "Grüße"},
           {"kv": torch.arange(24, dtype=torch.int8).view(2, 3, 4), "scale": torch.tensor([0.5, 2.0], dtype=torch.float16)})


@pytest.mark.parametrize("shape", [(), (1,), (5, 3), (0,), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_message_arrives_as_it_was_sent(ends, dtype, shape):
    tensors = {"odd": torch.ones(3, dtype=torch.uint8), "x": (torch.randn(shape) * 9).to(dtype), "y": torch.zeros(2)}
    sent = send_message(ends[0], EXAMPLE[0], tensors)
    fields, received, size = receive_message(ends[1], LIMIT, soon())
    assert fields == EXAMPLE[0] and size == sent and list(received) == list(tensors)
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype and received[name].shape == tensor.shape
        assert torch.equal(received[name], tensor)


def test_a_strided_tensor_and_a_message_of_no_tensors_arrive(ends):
    x = torch.arange(12.0).view(3, 4)
    send_message(ends[0], {}, {"x": x.T[1:]})
    send_message(ends[0], {}, {})
    assert torch.equal(receive_message(ends[1], LIMIT)[1]["x"], x.T[1:])
    assert receive_message(ends[1], LIMIT)[:2] == ({}, {})


def test_a_message_at_the_limit_arrives_and_one_byte_more_does_not(ends):
    size = send_message(ends[0], *EXAMPLE)
    receive_message(ends[1], size)
    send_message(ends[0], *EXAMPLE)
    with pytest.raises(ProtocolError, match="too long"):
        receive_message(ends[1], size - 1)


def test_a_close_between_messages_is_not_a_close_within_one(ends):
    near, far = ends
    send_message(near, *EXAMPLE)
    near.close()
    receive_message(far, LIMIT)
    with pytest.raises(ConnectionClosed):
        receive_message(far, LIMIT)


def outcome(frame: bytes) -> str:
    """What receive_message makes of these bytes and a close behind them: "received", or one line of protest."""
    near, far = socket.socketpair()
    with near, far:
        near.sendall(frame)
        near.close()
        try:
            receive_message(far, LIMIT, soon())
        except ProtocolError as error:
            assert str(error) and "\n" not in str(error)
            return str(error)
    return "received"


def test_every_truncation_is_noticed():
    frame = framed(*EXAMPLE)
    assert outcome(frame) == "received"
    for length in range(len(frame)):
        assert outcome(frame[:length]) == ("the connection ended within a message" if length else "it hung up")


def test_random_frames_and_frames_with_flipped_bits_meet_a_protocol_error_and_nothing_else():
    generator, frame = random.Random(0), framed(*EXAMPLE)
    described = len(frame) - 28  # the tensor bytes, 24 + 4, may be anything
    received = 0
    for _ in range(3000):
        damaged = bytearray(frame)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(described)] ^= 1 << generator.randrange(8)
        received += outcome(damaged) == "received"  # a name or a number may have become another one
    assert received < 2000
    for _ in range(1000):
        noise = generator.randbytes(generator.randint(1, 200))
        assert outcome(noise) != "received"
        assert outcome(HEADER.pack(MAGIC, VERSION, len(noise), generator.randint(0, 99)) + noise) != "received"


@pytest.mark.parametrize("description", [
    [], 3, None, {}, {"fields": {}}, {"fields": [], "tensors": {}}, {"fields": {}, "tensors": []},
    *({"fields": {}, "tensors": {"x": entry}} for entry in (
        None, "int8", [], ["int8"], ["int8", 4], ["int8", [4], 0], ["int8", [4.0]], ["int8", [True, 4]], ["int8", ["4"]],
        ["int8", [-1, -4]], ["int8", [2, 3]], ["float32", [4]], ["bool", [4]], ["complex64", [1]], ["object", [4]], [[], [4]],
        ["int8", [4] + [1] * 8], ["int8", [10**30]])),
    *({"fields": {}, "tensors": {"x": entry, "y": ["int8", [4]]}} for entry in (
        ["int8", [4]], ["int8", [0, 10**30]], ["int8", [0, 2**40, 2**40]])),
], ids=lambda description: json.dumps(description)[:60])
def test_tensors_that_do_not_fit_their_description_are_refused(description):
    assert outcome(raw(description, bytes(4))) not in ("received", "the connection ended within a message")


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 60000, b'{"fields": ' * 5000, b"1" * 60000],
                         ids=lambda text: repr(text[:9]))
def test_json_that_is_none_is_refused(text):
    assert "not JSON" in outcome(HEADER.pack(MAGIC, VERSION, len(text), 0) + text)


@pytest.mark.parametrize("header", [(MAGIC, VERSION, 2**32 - 1, 0), (MAGIC, VERSION, 2, 2**64 - 1),
                                    (MAGIC, VERSION, 2**17, 0), (MAGIC, VERSION, 2, 2**29 + 1)], ids=str)
def test_a_length_beyond_the_limit_takes_no_memory(ends, header):
    ends[0].sendall(HEADER.pack(*header) + bytes(100))
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="too long"):
        receive_message(ends[1], 1 << 29, soon())
    assert tracemalloc.get_traced_memory()[1] < 1 << 16
    tracemalloc.stop()


def test_a_length_within_the_limit_takes_memory_only_as_bytes_come(ends):
    text = json.dumps({"fields": {}, "tensors": {"x": ["uint8", [2**28]]}}).encode()
    ends[0].sendall(HEADER.pack(MAGIC, VERSION, len(text), 2**28) + text + bytes(1000))
    ends[0].close()
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="within a message"):
        receive_message(ends[1], 1 << 29, soon())
    assert tracemalloc.get_traced_memory()[1] < 1 << 19
    tracemalloc.stop()


def test_a_deadline_holds_even_if_more_is_always_there(ends):
    send_message(ends[0], *EXAMPLE)
    with pytest.raises(ProtocolError, match="took too long"):
        receive_message(ends[1], LIMIT, soon(-0.1))


def test_a_peer_that_drips_meets_the_deadline(ends):
    near, far = ends
    stop = threading.Event()

    def drip():
        for byte in framed(*EXAMPLE):  # all of it would take 8 s
            if not stop.wait(0.05):
                near.sendall(bytes([byte]))

    dripping = threading.Thread(target=drip)
    dripping.start()
    start = time.monotonic()
    with pytest.raises(ProtocolError, match="took too long"):
        receive_message(far, LIMIT, soon(0.3))
    seconds = time.monotonic() - start
    stop.set()
    dripping.join()
    assert 0.25 < seconds < 5.0


# The channel ---------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def serving(handle):
    """A real server on loopback that hands one connection to `handle`; yields its address."""
    def serve():
        connection, _ = listener.accept()
        with connection, contextlib.suppress(ConnectionClosed, OSError):
            handle(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        thread.join(10)
        assert not thread.is_alive()


@contextlib.contextmanager
def channel_to(handle, network, clock):
    with serving(handle) as address:
        channel = Channel(socket.create_connection(address), network, clock)
        try:
            yield channel
        finally:
            channel.close()


def verifying(connection):
    """Answers every request with its number; works, as it says, 30 ms for each."""
    while True:
        fields, _, _ = receive_message(connection, LIMIT)
        send_message(connection, {"number": fields["number"], "elapsed": 0.03, "work": "verify"}, {})


def test_a_round_trip_takes_up_work_and_down_exactly():
    network, clock = symmetric(Link(latency=0.02, bandwidth=1e5)), VirtualClock(COSTS)
    with channel_to(verifying, network, clock) as channel:
        channel.send({"number": 0}, {"draft": torch.arange(4)})
        assert clock.now() == 0.0
        assert channel.receive(timeout=1.0)[0]["number"] == 0
        moment = 2 * 0.02 + 0.03 + 8 * (channel.bytes_up + channel.bytes_down) / 1e5
    assert clock.now() == channel.network_seconds == pytest.approx(moment)
    assert channel.round_trip.mean == pytest.approx(moment - 0.03)


def test_the_client_drafts_on_while_a_verdict_is_on_its_way():
    network, clock = symmetric(Link(latency=0.02)), VirtualClock(COSTS)
    with channel_to(verifying, network, clock) as channel:
        channel.send({"number": 0}, {})
        drafted = 0
        while not channel.ready():
            clock.work("draft")
            drafted += 1
        channel.receive(timeout=1.0)
    assert drafted == math.ceil((2 * 0.02 + 0.03) / 0.002)
    assert clock.now() == pytest.approx(drafted * 0.002)
    assert channel.network_seconds == 0.0
    assert channel.round_trip.mean == pytest.approx(0.04)  # and not until it was asked for


def test_two_requests_on_their_way_are_worked_on_one_after_the_other():
    network, clock = symmetric(Link(latency=0.02)), VirtualClock(COSTS)
    with channel_to(verifying, network, clock) as channel:
        for number in range(2):
            channel.send({"number": number}, {})
        moments = [(channel.receive(timeout=1.0)[0]["number"], clock.now()) for _ in range(2)]
    assert moments == [(0, pytest.approx(0.07)), (1, pytest.approx(0.10))]
    assert channel.round_trips == 2


def streaming(connection):
    """Answers a request piece by piece, each after 30 ms of work."""
    fields, _, _ = receive_message(connection, LIMIT, soon())
    for left in reversed(range(fields["pieces"])):
        send_message(connection, {"more": left > 0, "elapsed": 0.03, "work": "verify"}, {"x": torch.zeros(left)})
    receive_message(connection, LIMIT, soon())


def test_a_request_may_have_several_replies_each_after_its_own_work():
    clock, moments = VirtualClock(COSTS), []
    with channel_to(streaming, symmetric(Link(latency=0.02)), clock) as channel:
        channel.send({"pieces": 4}, {})
        for left in reversed(range(4)):
            assert len(channel.receive(timeout=1.0)[1]["x"]) == left
            moments.append(clock.now())
        assert not channel.ready()  # nothing is owed
    assert moments == pytest.approx([0.04 + 0.03 * i for i in range(1, 5)])
    assert channel.round_trips == 1


def test_what_is_counted_is_what_was_really_sent():
    counted = {"up": 0, "down": 0}

    def counting(connection):
        while True:
            counted["up"] += receive_message(connection, LIMIT, soon())[2]
            counted["down"] += send_message(connection, {"work": "verify"}, {"kv": torch.zeros(3, 5)})

    with channel_to(counting, symmetric(PROFILES["4g"], seed=3), VirtualClock(COSTS)) as channel:
        for count in range(50):
            channel.send({"n": count}, {"draft": torch.arange(count)})
            channel.receive(timeout=100.0)
    assert (channel.bytes_up, channel.bytes_down) == (counted["up"], counted["down"])
    assert channel.round_trips == 50


def conversation(clock, network, count: int) -> list[float]:
    """When each of `count` verdicts comes."""
    moments = []
    with channel_to(verifying, network, clock) as channel:
        for number in range(count):
            channel.send({"number": number}, {"draft": torch.arange(8)})
            assert channel.receive(timeout=100.0)[0]["number"] == number
            moments.append(clock.now())
    return moments


def test_an_hour_of_4g_takes_seconds_and_repeats_exactly():
    costs = {"verify": 3.0}
    one, again, other = (conversation(VirtualClock(costs), symmetric(PROFILES["4g"], seed), 1200) for seed in (0, 0, 1))
    assert one == again != other
    assert one[-1] > 3600


def test_the_virtual_clock_tells_the_time_of_the_wall_clock():
    link = replace(PROFILES["4g"], loss=0.02)
    virtual = conversation(VirtualClock(COSTS), symmetric(link, seed=5), 25)
    wall = conversation(WallClock(patience=60.0), symmetric(link, seed=5), 25)
    late = [w - v for w, v in zip(wall, virtual)]
    assert min(late) > -1e-6
    assert statistics.median(b - a for a, b in zip(late, late[1:])) < 0.05  # waking up takes a while


def test_on_the_wall_clock_a_reply_is_not_told_before_it_is_really_there():
    def slow(connection):
        receive_message(connection, LIMIT, soon())
        time.sleep(0.2)
        send_message(connection, {"elapsed": 0.0}, {})
        connection.recv(1)

    clock = WallClock()
    with channel_to(slow, symmetric(Link()), clock) as channel:
        channel.send({}, {})
        start = clock.now()
        assert not channel.ready()
        channel.receive(timeout=5.0)
        assert 0.15 < clock.now() - start < 5.0
    assert channel.round_trip.mean > 0.15  # a real network's round trips count as well as simulated ones


def test_long_messages_and_later_replies_are_not_taken_for_round_trips():
    def answering(connection):
        for sizes in ([10**5], [10, 10]):
            receive_message(connection, LIMIT, soon())
            for i, size in enumerate(sizes, 1):
                send_message(connection, {"more": i < len(sizes), "work": "verify"}, {"x": torch.zeros(size)})

    network = Network(Link(latency=0.02), Link(latency=0.02, bandwidth=1e6))
    with channel_to(answering, network, VirtualClock(COSTS)) as channel:
        channel.send({}, {})
        channel.receive(timeout=10.0)
        assert channel.round_trip.mean is None
        channel.send({}, {})
        channel.receive(timeout=10.0)
        first = replace(channel.round_trip)
        channel.receive(timeout=10.0)
    assert channel.round_trip == first and first.mean == pytest.approx(0.04, abs=0.002)


# Losses --------------------------------------------------------------------------------------------------------------

def test_the_reply_to_a_link_that_is_back_still_arrives():
    network, clock = symmetric(Link(latency=0.02), outages=[Outage(begins=0.01, seconds=5.0)]), VirtualClock(COSTS)
    with channel_to(verifying, network, clock) as channel:
        channel.send({"number": 0}, {})
        with pytest.raises(Lost, match="within 0.5 s"):
            channel.receive(timeout=0.5)
        assert clock.now() == channel.network_seconds == 0.5
        while not channel.ready():
            clock.work("draft")
        assert 5.0 < clock.now() < 2 * 5.0 + 1
        assert channel.receive(timeout=0.0)[0]["number"] == 0
        assert channel.round_trip.mean <= 2.0  # an outage is not a round trip
        channel.send({"number": 1}, {})
        assert channel.receive(timeout=0.5)[0]["number"] == 1


def test_a_request_that_meets_an_outage_reaches_the_server_later():
    network, clock = symmetric(Link(latency=0.02), outages=[Outage(begins=0.005, seconds=0.01)]), VirtualClock(COSTS)
    with channel_to(verifying, network, clock) as channel:
        channel.send({"number": 0}, {})
        channel.receive(timeout=1.0)
    assert clock.now() == pytest.approx(LEAST_TIMEOUT + 0.07)


def test_an_outage_stops_what_is_already_on_its_way_and_nothing_that_has_arrived():
    network, clock = symmetric(Link(latency=0.02), outages=[Outage(tokens=3)]), VirtualClock(COSTS)
    with channel_to(verifying, network, clock) as channel:
        channel.send({"number": 0}, {})
        clock.wait_until(1.0)
        network.tokens(3, clock.now())
        assert channel.receive(timeout=1.0)[0]["number"] == 0  # arrived at 0.07, unread until 1.0
        channel.send({"number": 1}, {})
        with pytest.raises(Lost):
            channel.receive(timeout=1.0)
    network, clock = symmetric(Link(latency=0.02), outages=[Outage(tokens=3)]), VirtualClock(COSTS)
    with channel_to(verifying, network, clock) as channel:
        channel.send({"number": 0}, {})
        clock.wait_until(0.06)
        assert not channel.ready()  # read, but 10 ms away
        network.tokens(3, clock.now())
        with pytest.raises(Lost):
            channel.receive(timeout=1.0)


def dying(connection):
    receive_message(connection, LIMIT, soon())


def resetting(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close sends a reset


def hanging(connection):
    receive_message(connection, LIMIT, soon())
    connection.recv(1)  # until the client gives up


def replying(frame: bytes):
    def handle(connection):
        receive_message(connection, LIMIT, soon())
        connection.sendall(frame)
        connection.recv(1)
    return handle


FAULTS = {
    "dies": dying, "resets": resetting, "hangs": hanging,
    "noise": replying(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "half": replying(framed(*EXAMPLE)[:40]),
    "huge": replying(HEADER.pack(MAGIC, VERSION, 2, 2**60)),
    **{f"worked {text}": replying(raw({"fields": {"elapsed": elapsed, "work": elapsed}, "tensors": {}})) for text, elapsed in
       {"nan": math.nan, "inf": math.inf, "negative": -1.0, "list": [], "text": "x", "digits": "1", "long": 10**400,
        "null": None}.items()},
    "silent on work": replying(raw({"fields": {}, "tensors": {}})),
}


@pytest.mark.parametrize("clock", [lambda: WallClock(patience=0.3), lambda: VirtualClock(COSTS, patience=0.3)],
                         ids=["wall", "virtual"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_is_lost_in_one_line_and_nothing_else_happens(fault, clock):
    start = time.monotonic()
    with channel_to(FAULTS[fault], symmetric(Link(latency=0.001)), clock()) as channel:
        with pytest.raises(Lost) as lost:
            channel.send({"number": 0}, {})
            channel.receive(timeout=0.6)
        assert str(lost.value) and "\n" not in str(lost.value)
        if fault != "hangs":  # on the wall clock it might still answer
            assert channel.ready()
            for call in (lambda: channel.receive(timeout=0.6), lambda: channel.send({}, {})):
                with pytest.raises(Lost):
                    call()
    assert time.monotonic() - start < 20.0


def test_a_server_that_takes_nothing_does_not_hold_the_client():
    release = threading.Event()
    with channel_to(lambda connection: release.wait(10), symmetric(Link()), WallClock(patience=0.3)) as channel:
        with pytest.raises(Lost, match="takes no message"):
            channel.send({}, {"big": torch.zeros(1 << 24)})
        release.set()


def test_a_channel_goes_on_over_another_connection_with_the_same_figures():
    network, clock = symmetric(Link(latency=0.02)), VirtualClock(COSTS)
    with channel_to(dying, network, clock) as channel:
        channel.send({"number": 0}, {})
        with pytest.raises(Lost):
            channel.receive(timeout=1.0)
        channel.close()
        sent = channel.bytes_up
        with serving(verifying) as address:
            channel.connect(socket.create_connection(address))
            channel.send({"number": 1}, {})
            assert channel.receive(timeout=1.0)[0]["number"] == 1
            channel.close()
    assert channel.bytes_up == 2 * sent and channel.round_trips == 1


def test_another_connection_does_not_wait_for_what_the_first_one_still_owed():
    network, clock = symmetric(Link(latency=0.02), outages=[Outage(begins=1.0, seconds=60.0)]), VirtualClock(COSTS)
    with channel_to(verifying, network, clock) as channel:
        clock.wait_until(1.5)
        channel.send({"number": 0}, {})
        clock.wait_until(62.0)
        assert not channel.ready() and channel.arrival() > 100  # by then TCP tries again only every minute
        channel.close()
        with serving(verifying) as address:
            channel.connect(socket.create_connection(address))
            channel.send({"number": 1}, {})
            assert channel.receive(timeout=1.0)[0]["number"] == 1 and clock.now() == pytest.approx(62.07)
            channel.close()


# Quantities ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("parse, text, value", [
    (duration, "21ms", 0.021), (duration, "0.5s", 0.5), (duration, "0ms", 0.0), (duration, ".5s", 0.5),
    (rate, "20Mbit", 20e6), (rate, "300kbit", 300e3), (rate, "1.5Gbit", 1.5e9), (share, "0.1%", 0.001), (share, "0%", 0.0)])
def test_quantities_are_read_with_their_units(parse, text, value):
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize("parse", [duration, rate, share])
@pytest.mark.parametrize("text", ["", "21", "ms", "-1ms", "nanms", "infs", "1e3s", "1 s", "1m", "2h", "-1%", "100%", "nan%",
                                  "1..2s", "0Mbit", "-3Mbit", "Mbit", "20MB", "inf", "١s", "1s\n", "9" * 400 + "s",
                                  "9" * 400 + "Mbit"])
def test_what_is_no_quantity_is_one_line_that_says_how_to_write_one(parse, text):
    with pytest.raises(argparse.ArgumentTypeError, match="like") as error:
        parse(text)
    assert "\n" not in str(error.value)
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--x", type=parse)
    with pytest.raises(argparse.ArgumentError, match="like"):  # argparse shows it
        parser.parse_args(["--x=" + text])
