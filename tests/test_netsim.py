"""The chapter on client and server: links against their formulas, what crosses them, both sides."""
import math
import statistics
import time
from dataclasses import replace

import pytest
import torch
from tiny_models import PROMPT, new_drafter, new_target, target_alone

import netsim
from llama import GenerationConfig, probabilities, sample
from moa import CacheUpdate, DraftLimits
from netsim import (
    INITIAL_RTO,
    MSS,
    PROFILES,
    Connection,
    Link,
    QuantizedDraftState,
    Read,
    RemoteVerifier,
    Reply,
    Server,
    SimulatedPath,
    dequantize_probabilities,
    make_read,
    make_reply,
    make_verify,
    message_size,
    parse_reply,
    parse_verify,
    quantize_probabilities,
    retransmission_timeout,
)
from speculate import VerifyResult, speculate

SAMPLES = 20000


# --- The link ---


def delays(link: Link, size: int = 100) -> list[float]:
    """Seconds that messages of `size` bytes take if they never meet: they are sent hours apart."""
    path = SimulatedPath(link, seed=2)
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
    path = SimulatedPath(Link(latency=0.01, bandwidth=1e6), seed=0)
    assert path.arrival_of(0.0, 12500) == pytest.approx(0.11)
    assert path.arrival_of(0.05, 12500) == pytest.approx(0.21)  # starts at 0.1
    assert path.arrival_of(0.5, 10**7) == pytest.approx(80.51)  # the link is idle since 0.2


def test_a_lost_packet_costs_a_timeout_that_doubles_with_every_further_loss():
    link = Link(latency=0.001, loss=0.3)
    timeout = retransmission_timeout(link)
    observed = delays(link)
    for losses in range(4):
        cost = 0.001 + timeout * (2**losses - 1)
        exactly = [abs(delay - cost) < 1e-3 for delay in observed]
        assert_share(exactly, link.loss**losses * (1 - link.loss))


def test_a_message_waits_for_all_of_its_packets():
    observed = delays(Link(loss=0.01), size=10 * MSS)
    assert_share([delay > 0.1 for delay in observed], 1 - 0.99**10)


def test_the_first_message_of_a_connection_waits_a_second_for_a_lost_packet():
    observed = []
    for seed in range(SAMPLES):
        path = SimulatedPath(Link(loss=0.3), seed)
        observed.append(path.arrival_of(0.0, 0))  # a packet without bytes
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
    assert retransmission_timeout(link) == pytest.approx(timeout, rel=0.02)


def arrivals_of(path: SimulatedPath) -> list[float]:
    return [path.arrival_of(i * 0.001, 100) for i in range(3000)]


def test_messages_arrive_in_order():
    for seed in range(3):
        arrivals = arrivals_of(SimulatedPath(Link(0.02, 0.02, loss=0.05), seed))
        assert arrivals == sorted(arrivals)


def test_a_seed_repeats_exactly_but_no_two_directions_share_their_random_draws():
    link = Link(0.02, 0.02, loss=0.05)
    paths = []
    for seed in (0, 1, 2):
        connection = Connection(None, link, seed)
        paths += [connection.up, connection.down]
    arrivals = [arrivals_of(path) for path in paths]
    assert len(set(map(tuple, arrivals))) == 6
    assert arrivals_of(Connection(None, link, seed=2).down) == arrivals[-1]


# --- What crosses it ---


@pytest.mark.parametrize("N", [0, 2])
def test_an_update_in_8_bits_is_off_by_hardly_more_than_half_a_step_of_each_key_and_value(N):
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=N)
    cache = target.new_cache(9)
    target.hidden(torch.tensor([PROMPT]), cache)
    update = drafter.cache_update(PROMPT, cache)
    reply = make_reply(VerifyResult([3], 7, update))
    result = parse_reply(reply, PROMPT)
    received = result.update
    assert (result.accepted, result.token, received.tokens) == ([3], 7, PROMPT)
    assert reply.ca.dtype == reply.tli.dtype == torch.int8
    assert reply.ca_scale.dtype == reply.tli_scale.dtype == torch.half
    for sent, got in ((update.ca_kv, received.ca_kv), (update.tli_kv, received.tli_kv)):
        assert got.shape == sent.shape
        halves = sent.unflatten(-1, (2, -1))
        step = halves.abs().amax(-1, keepdim=True) / 127
        error = (got - sent).unflatten(-1, (2, -1)).abs()
        assert (error <= 0.6 * step + 1e-6).all()


@pytest.mark.parametrize("kv_heads, N, size", [(4, 0, 1040), (4, 1, 1040 + 2080), (3, 0, 396)])
def test_an_update_takes_as_many_bytes_as_the_chapter_says(kv_heads, N, size):
    head_dim = 128 if kv_heads == 4 else 64
    ca_kv = torch.ones(1, kv_heads, 1, 2 * head_dim)
    tli_kv = torch.ones(N, 1, 8, 1, 256)  # Llama-3-8B's kv heads
    reply = make_reply(VerifyResult([], 7, CacheUpdate([7], ca_kv, tli_kv)))
    assert message_size(reply) == len('{"accepted": [], "token": 7}') + size


def test_a_quantized_q_is_close_to_q_and_unchanged_by_quantizing_it_again():
    q = torch.randn(5, 300).mul(4).softmax(-1)
    ids, weights = quantize_probabilities(q)
    assert ids.shape == weights.shape == (5, 64)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.uint8
    coarse = dequantize_probabilities(ids, weights, 300)
    torch.testing.assert_close(coarse.sum(-1), torch.ones(5))
    assert torch.equal(coarse.argmax(-1), q.argmax(-1))
    assert (coarse - q).abs().sum(-1).max() < 0.1
    assert torch.equal(dequantize_probabilities(*quantize_probabilities(coarse), 300), coarse)


def connect(target, drafter, link: Link, config: GenerationConfig, seed: int = 0):
    """The client's objects of a conversation with a server of its own."""
    state = QuantizedDraftState(drafter, 128, config.new_sampling("cpu"))
    connection = Connection(Server(target, drafter), link, seed)
    return RemoteVerifier(connection, config, state.sampling), state


def prefilled(target, drafter, config: GenerationConfig) -> QuantizedDraftState:
    """A draft state that has received the update of PROMPT."""
    verifier, state = connect(target, drafter, Link(), config)
    state.append_verified(verifier.prefill(PROMPT).update)
    return state


def test_tokens_are_drawn_from_exactly_the_q_that_is_quantized(monkeypatch):
    monkeypatch.setattr(netsim, "Q_TOKENS", 2)
    target = new_target(16)
    drafter = new_drafter(target)
    config = GenerationConfig(temperature=0.7, top_p=0.9)
    state = prefilled(target, drafter, config)
    twin = torch.Generator()
    twin.set_state(state.sampling.generator.get_state())
    for _ in range(20):
        draft = state.draft(2, DraftLimits(1))
        assert sample(draft.q[0], twin) == draft.tokens[1]
    state.discard_draft()
    hidden = state.step(draft, [0])
    own = probabilities(target.lm_head(hidden), 0.7, 0.9)
    assert own.count_nonzero() > 2
    coarse = dequantize_probabilities(*quantize_probabilities(own), 16)
    torch.testing.assert_close(draft.q[0], coarse[0])


@pytest.mark.parametrize("limits", [DraftLimits(4), DraftLimits(4, top_k=2, total_tokens=8)])
def test_the_server_gets_the_very_q_that_the_drafts_were_drawn_from(limits):
    target = new_target(300, sharpness=5.0)  # q is sent for fewer tokens than these
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)
    state = prefilled(target, drafter, GenerationConfig(temperature=1.5))
    for root in range(10):
        draft = state.draft(root, limits)
        received = parse_verify(make_verify(draft), target)
        assert (received.tokens, received.parents) == (draft.tokens, draft.parents)
        assert received.q.keys() == draft.q.keys() == set(draft.parents[1:])
        for parent, token in zip(draft.parents[1:], draft.tokens[1:]):
            assert received.q[parent].equal(draft.q[parent])
            assert received.q[parent][token] > 0


# --- Both sides ---


@pytest.mark.parametrize("N, limits", [
    (0, DraftLimits(4)),
    (2, DraftLimits(4, top_k=2, total_tokens=8))], ids=str)
def test_over_4g_the_loop_writes_the_targets_own_tokens(N, limits):
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=N)
    config = GenerationConfig(16)
    verifier, state = connect(target, drafter, PROFILES["4g"], config)
    start = time.monotonic()
    cycles = list(speculate(verifier, state, PROMPT, config, limits))
    seconds = time.monotonic() - start
    tokens = [token for cycle in cycles for token in cycle.tokens]
    assert tokens == target_alone(target, 16)
    traffic = verifier.connection.traffic
    assert traffic.round_trips == len(cycles)
    assert 0.2 * len(cycles) * 0.042 < traffic.network_seconds <= seconds


def test_a_reply_comes_after_the_way_up_the_servers_work_and_the_way_down():
    class Slow:
        def answer(self, request: Read) -> Reply:
            time.sleep(0.03)
            empty = torch.zeros(0)
            return Reply([], 7, torch.zeros(250, dtype=torch.int8), empty, empty, empty)

    connection = Connection(Slow(), Link(0.01, bandwidth=1e5))
    request = make_read(PROMPT, GenerationConfig(), seed=0)
    start = time.monotonic()
    reply = connection.request(request)
    seconds = time.monotonic() - start
    up = message_size(request)
    down = message_size(reply)
    assert up == 16 + len('{"max_new_tokens": 256, "temperature": 0.0, "top_p": 1.0, "seed": 0}')
    assert down == 250 + len('{"accepted": [], "token": 7}')
    network = 2 * 0.01 + 8 * (up + down) / 1e5
    assert network + 0.03 <= seconds < network + 0.03 + 0.05
    assert network <= connection.traffic.network_seconds < network + 0.05
    assert (connection.traffic.bytes_up, connection.traffic.bytes_down) == (up, down)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_server_draws_with_another_seed_than_the_drafter(temperature):
    target = new_target(16)
    config = GenerationConfig(8, temperature, seed=3)
    verifier, state = connect(target, new_drafter(target), Link(), config)
    verifier.prefill(PROMPT)
    server = verifier.connection.server.verifier.sampling
    assert server.temperature == state.sampling.temperature == temperature
    assert server.generator.initial_seed() != state.sampling.generator.initial_seed() == 3
