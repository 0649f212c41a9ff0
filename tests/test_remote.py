"""Client and server: the target's own tokens over any network, and a whole answer whatever becomes
of the server."""
import contextlib
import fcntl
import hmac
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple

import pytest
import torch
from conftest import ROOT
from test_netsim import LIMIT, channel_to, frame, serving, soon
from tiny_models import PROMPT, WORDS, ask, new_drafter, new_target, target_alone

import netsim
import speculate
from llama import (
    GenerationConfig,
    InputError,
    Llama,
    TextStream,
    generate,
    probabilities,
    run_command,
)
from moa import Drafter, TreeConfig, save_drafter, start_drafting
from netsim import (
    DIGEST,
    NONCE,
    PROFILES,
    Channel,
    Link,
    Message,
    MessageServer,
    Network,
    Outage,
    receive_message,
)
from speculate import (
    OFFLINE_TOKENS,
    Cycle,
    Generation,
    LocalTarget,
    Method,
    Models,
    Origin,
    Prompt,
    RemoteTarget,
    TargetSession,
    Terminal,
    announce_on_terminal,
    bench,
    dequantize_memory,
    offline_quality,
    print_table,
    quantize_memory,
    remote_methods,
    summarize,
)

CHAIN = TreeConfig(4)
TREE = TreeConfig(4, top_k=2, total_tokens=8)
CONFIG = GenerationConfig(24)

Pair = tuple[Llama, Drafter]


# --- What the tests share: servers, and methods that answer over a channel ---


@contextlib.contextmanager
def serving_models(target: Llama, drafter: Drafter, secret: str = ""):
    """A server in threads of this process."""
    drafter.checkpoint_hash = "test"
    with ThreadPoolExecutor(1) as worker:
        worker.submit(int).result()  # its thread is none of the server's
        with serving(partial(TargetSession, target, drafter, worker), secret) as server:
            yield server


@contextlib.contextmanager
def serving_elsewhere(target: Llama, drafter: Drafter, port: int = 0):
    """A server in a process of its own: the process and the address. Afterwards it is gone."""
    drafter.checkpoint_hash = "test"
    ours, theirs = multiprocessing.Pipe()

    def serve() -> None:
        with ThreadPoolExecutor(1) as worker:
            new_session = partial(TargetSession, target, drafter, worker)
            server = MessageServer(("127.0.0.1", port), "", new_session)
            theirs.send(server.server_address)
            server.serve_forever()

    process = multiprocessing.get_context("fork").Process(target=serve)
    process.start()
    theirs.close()
    try:
        with ours:
            yield process, ours.recv()  # an EOFError if it could not start
    finally:
        process.kill()
        process.join()


@pytest.fixture(scope="module")
def models() -> Pair:
    target = new_target(16)
    return target, new_drafter(target)


@pytest.fixture
def impatient(monkeypatch):
    """A client that gives up a reply after a fifth of a second, and tries again at once."""
    monkeypatch.setattr(netsim, "MIN_TIMEOUT", 0.2)
    monkeypatch.setattr(speculate, "INITIAL_BACKOFF", 0.0)


def over(channel: Channel, pair: Pair, tree: TreeConfig = CHAIN, lookup: bool = False) -> Method:
    """By drafts that the server at the other end of a channel verifies."""
    model, drafter = pair
    return Method(model, drafter, tree, lookup, new_channel=lambda prompt: channel)


def api_over(channel: Channel, target: Llama) -> Method:
    """By plain use of an API."""
    return Method(target, new_channel=lambda prompt: channel)


class CountedOutage(Network):
    """Its outage ends when so many tokens have come, however long they take."""

    def __init__(self, first: int, until: float = math.inf, link: Link = Link()):
        super().__init__(link, outage=CountedEnd(first))
        self.outage.until = until  # tokens


class CountedEnd(Outage):
    until = math.inf

    def begin_if_due(self, count: int, now: float) -> None:
        super().begin_if_due(count, now)
        if count >= self.until:
            self.seconds = 0.0


def connect(
    server: MessageServer, secret: str = "", after: bytes = b""
) -> tuple[socket.socket, dict]:
    """A connection that has answered the server's nonce, and the greeting's fields."""
    sock = socket.create_connection(server.server_address, timeout=30)
    nonce = sock.recv(NONCE, socket.MSG_WAITALL)
    sock.sendall(hmac.digest(secret.encode(), nonce, "sha256") + after)
    return sock, greeting(sock).fields


def greeting(sock: socket.socket) -> Message:
    return receive_message(sock, LIMIT, soon())


def wait_for(condition) -> None:
    deadline = soon(30)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# --- The target's own tokens ---


@pytest.mark.parametrize("choices", [
    dict(target_layer_inference=0),
    dict(target_layer_inference=2)], ids=str)
def test_a_memory_in_8_bits_is_off_by_hardly_more_than_half_a_step_of_each_key_and_value(choices):
    target = new_target(16)
    drafter = new_drafter(target, **choices)
    cache = target.new_cache(9)
    hidden = target.hidden(torch.tensor([PROMPT]), cache)
    memory = drafter.memory_update(PROMPT, cache, hidden)
    tensors = quantize_memory(memory)
    received = dequantize_memory(tensors, PROMPT, start_drafting(drafter, 9, remote=True))
    assert received.tokens == PROMPT
    assert {tensor.dtype for tensor in tensors.values()} == {torch.int8, torch.half}
    for sent, got in ((memory.cross_kv, received.cross_kv), (memory.reused_kv, received.reused_kv)):
        assert got.shape == sent.shape
        halves = sent.unflatten(-1, (2, -1))
        step = halves.abs().amax(-1, keepdim=True) / 127
        error = (got - sent).unflatten(-1, (2, -1)).abs()
        assert (error <= 0.6 * step + 1e-6).all()


@pytest.mark.parametrize("choices", [
    dict(target_layer_inference=0),
    dict(target_layer_inference=2),
    dict(use_layer_self_attention=False),
    dict(target_layer_inference=4, likeness=0.8)], ids=str)
def test_greedy_tokens_are_those_of_the_target_alone_over_every_network(choices, monkeypatch):
    target = new_target(16)
    pair = (target, new_drafter(target, **choices))
    alone = target_alone(target, 24)
    monkeypatch.setattr(netsim, "MIN_RTO_MARGIN", 0.002)
    monkeypatch.setattr(netsim, "INITIAL_RTO", 0.002)

    def run(link: Link, seed: int, count: int, tree: TreeConfig, lookup: bool) -> None:
        method = over(channel_to(server, link, seed=seed), pair, tree, lookup)
        result = method.answer(PROMPT, GenerationConfig(count))
        assert result.tokens == alone[:count]
        assert result.outage == "" and result.unverified == 0
        assert result.network["round_trips"] == 1 + result.target_calls

    runs = []
    with serving_models(*pair) as server, ThreadPoolExecutor(4) as clients:
        for tree, lookup in ((CHAIN, False), (TREE, False), (TREE, True)):
            if choices == dict(target_layer_inference=2):  # a link does not know its drafter
                for link in PROFILES.values():
                    runs.append(clients.submit(run, link, 0, 6, tree, lookup))
            for seed in range(2):
                lossy = Link(0.001, 0.001, 1e7, loss=0.2)
                runs.append(clients.submit(run, lossy, seed, 24, tree, lookup))
        for done in runs:
            done.result()


@pytest.mark.parametrize("likeness, tree", [
    (1.0, CHAIN),
    (0.0, TREE),
    (1.0, TreeConfig(8, top_k=40, total_tokens=64))], ids=str)
def test_prompt_and_answer_may_fill_the_context_to_its_end(likeness, tree):
    target = new_target(16)
    pair = (target, new_drafter(target, target_layer_inference=4, likeness=likeness))
    count = target.config.max_position_embeddings - len(PROMPT)
    with serving_models(*pair) as server:
        result = over(channel_to(server), pair, tree).answer(PROMPT, GenerationConfig(count))
    assert result.tokens == target_alone(target, count)
    assert result.unverified == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_plain_use_of_an_api_streams_what_the_target_writes_alone_with_the_same_seed(
        models, temperature):
    target, _ = models
    with serving_models(*models) as server:
        for seed, stop_ids in ((3, []), (4, []), (4, [5, 7])):
            config = GenerationConfig(24, temperature, 0.9, seed, frozenset(stop_ids))
            cycles = []
            result = api_over(channel_to(server), target).answer(PROMPT, config, cycles.append)
            assert result.tokens == list(generate(target, PROMPT, config))
            assert [cycle.tokens for cycle in cycles] == [[token] for token in result.tokens]
            assert result.origins == [Origin.TARGET] * len(result.tokens)
            assert result.network["round_trips"] == 1


def test_plain_use_of_an_api_ends_where_the_server_is_lost_for_good(models):
    target, _ = models
    cycles = []
    with serving_models(*models) as server:
        channel = channel_to(server, timeout=0.3, after=2)
        with pytest.raises(InputError, match="the answer ends here: no answer from the server"):
            api_over(channel, target).answer(PROMPT, CONFIG, cycles.append)
    tokens = [cycle.tokens[0] for cycle in cycles]
    assert 2 <= len(tokens) < 24  # those that had arrived, and no more
    assert tokens == target_alone(target, 24)[:len(tokens)]


@pytest.mark.parametrize("tree", [None, CHAIN], ids=["plain API use", "drafts"])
def test_an_outage_shorter_than_the_timeout_delays_tokens_and_loses_none(models, tree):
    target, _ = models
    link = Link(0.005)
    moments = []  # of each cycle
    counts = []  # of its tokens

    def emit(cycle: Cycle) -> None:
        moments.append(time.monotonic())
        counts.append(len(cycle.tokens))

    with serving_models(*models) as server:
        channel = channel_to(server, link, after=5, seconds=0.3)
        method = over(channel, models, tree) if tree else api_over(channel, target)
        result = method.answer(PROMPT, CONFIG, emit)
    assert result.tokens == target_alone(target, 24)
    assert result.unverified == 0 and result.outage == ""
    assert result.network["round_trips"] == (1 + result.target_calls if tree else 1)
    totals = list(itertools.accumulate(counts))
    next_cycle = 1 + [total >= 5 for total in totals].index(True)
    outage_ends = channel.network.outage.begins + 0.3
    assert moments[next_cycle - 1] < outage_ends
    assert moments[next_cycle] >= outage_ends + link.retransmission_timeout()


def test_sampled_tokens_are_distributed_as_the_targets_own():
    """The second and the third of an answer: every pair as often as its probability says, within
    four and a half deviations. (Enumeration, in test_losslessness.py, takes draws for independent;
    here client and server really draw.)"""
    target = new_target(5, layers=1)
    drafter = new_drafter(target)
    counts = torch.zeros(5, 5)
    with serving_models(target, drafter) as server:
        for seed in range(150):
            config = GenerationConfig(3, temperature=0.8, top_p=0.9, seed=seed)
            method = over(channel_to(server), (target, drafter), TreeConfig(2, 2, 4))
            _, second, third = method.answer(PROMPT, config).tokens
            counts[second, third] += 1
    p = torch.zeros(5, 5)
    for tokens in itertools.product(range(5), repeat=3):
        first, second, third = tokens
        logits = target(torch.tensor([PROMPT + [first, second]]))[0, len(PROMPT) - 1:]
        steps = probabilities(logits, 0.8, 0.9)  # (3, V)
        p[second, third] += steps[0, first] * steps[1, second] * steps[2, third]
    deviation = (150 * p * (1 - p)).sqrt()
    assert ((counts - 150 * p).abs() <= 4.5 * deviation + 1e-6).all()


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_server_rejects_by_the_very_q_that_the_drafts_were_drawn_from(tree, monkeypatch):
    target = new_target(300, sharpness=5.0, context=128)  # more tokens than are sent of q
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)
    verify_remote = RemoteTarget.verify_remote
    verify = LocalTarget.verify
    sent = []
    received = []
    monkeypatch.setattr(RemoteTarget, "verify_remote", lambda remote, draft: (
        sent.append(draft) or verify_remote(remote, draft)))
    monkeypatch.setattr(LocalTarget, "verify", lambda local, draft: (
        received.append(draft) or verify(local, draft)))
    with serving_models(target, drafter) as server:
        config = GenerationConfig(100, temperature=1.5, top_p=0.3)
        over(channel_to(server), (target, drafter), tree).answer(PROMPT, config)
    assert len(sent) == len(received) > 10
    for ours, theirs in zip(sent, received):
        assert ours.tokens == theirs.tokens and ours.parents == theirs.parents
        assert ours.q.keys() == theirs.q.keys() == set(ours.parents[1:])
        for parent, token in zip(ours.parents[1:], ours.tokens[1:]):
            assert ours.q[parent][token] > 0
            assert ours.q[parent].equal(theirs.q[parent])


def test_eight_clients_at_once_get_their_own_answers_from_one_thread(monkeypatch):
    threads = set()
    prefill = LocalTarget.prefill
    verify = LocalTarget.verify

    def noting_thread(method: Callable) -> Callable:
        return lambda *call: threads.add(threading.get_ident()) or method(*call)

    monkeypatch.setattr(LocalTarget, "prefill", noting_thread(prefill))
    monkeypatch.setattr(LocalTarget, "verify", noting_thread(verify))
    target = new_target(16, context=2048)
    pair = (target, new_drafter(target, target_layer_inference=2))
    long = [i * i % 13 for i in range(562)]
    prompts = [PROMPT + [number] for number in range(6)] + [long, long[:256]]

    def run(prompt: list[int]) -> Generation:
        return over(channel_to(server), pair, TREE).answer(prompt, CONFIG)

    with serving_models(*pair) as server, ThreadPoolExecutor(8) as clients:
        results = list(clients.map(run, prompts))
    for prompt, result in zip(prompts, results):
        assert result.tokens == list(generate(target, prompt, CONFIG))
        assert result.network["round_trips"] == 1 + result.target_calls
    assert len(threads) == 1


# --- Without the server ---


def check(target: Llama, result: Generation, cycles: list[Cycle], count: int) -> list[bool]:
    """Of an answer during which the server was lost: no token is lost or comes twice, and those
    that are called verified are the target's own choice after all text before them.

    Returns which are verified.
    """
    tokens = []
    verified = []
    for cycle in cycles:
        tokens += cycle.tokens
        verified += [origin != Origin.UNVERIFIED for origin in cycle.origins]
    ids = torch.tensor([PROMPT + tokens[:-1]])
    best = target(ids)[0, len(PROMPT) - 1:].argmax(-1).tolist()
    assert tokens == result.tokens and len(tokens) == count
    for i, sure in enumerate(verified):
        assert tokens[i] == best[i] or not sure
    assert result.unverified == verified.count(False)
    assert (result.outage != "") == (False in verified)
    return verified


@pytest.mark.parametrize("choices, tree, lookup, after, until", [
    ({}, CHAIN, False, 1, 30),
    ({}, TREE, True, 20, math.inf),
    (dict(target_layer_inference=2), CHAIN, False, 10, 12),
    (dict(target_layer_inference=2), TREE, False, 39, 70),
    (dict(use_layer_self_attention=False), CHAIN, False, 5, math.inf),
    (dict(use_layer_self_attention=False), TREE, True, 15, 50)], ids=str)
def test_an_outage_costs_verification_only_for_as_long_as_it_lasts(
        choices, tree, lookup, after, until, impatient):
    target = new_target(16, context=128)
    pair = (target, new_drafter(target, **choices))
    open_files = len(os.listdir("/proc/self/fd"))
    cycles = []
    with serving_models(*pair) as server:
        network = CountedOutage(after, until, Link(0.002, 0.002))
        channel = Channel(server.server_address, "", network)
        method = over(channel, pair, tree, lookup)
        result = method.answer(PROMPT, GenerationConfig(100), cycles.append)
        wait_for(lambda: not server.sockets)
    assert len(os.listdir("/proc/self/fd")) == open_files
    verified = check(target, result, cycles, 100)
    first_lost = (verified + [False]).index(False)
    assert first_lost >= after
    if until > after + tree.depth:
        assert first_lost <= after + tree.depth
    end = min(until, 100)
    assert not any(verified[first_lost:end])
    if until < math.inf:
        assert all(verified[until + OFFLINE_TOKENS:])
    offline = [cycle for cycle in cycles if cycle.link == "offline"]
    for cycle in offline[1:]:
        assert lookup or cycle.draft.tokens[1:] == []  # nothing is drafted for nobody


@pytest.mark.parametrize("deed, moment, N", [
    ("kill", 1, 0),
    ("kill", 20, 2),
    ("kill", 50, 0),
    ("kill", 70, 2),
    ("restart", 30, 0),
    ("restart", 60, 2),
    ("stop", 30, 2)])
def test_a_server_that_is_lost_costs_verification_until_it_is_back(
        deed, moment, N, impatient, monkeypatch):
    """When `moment` tokens have come. A kill happens up to 10 ms later, at any point of a cycle."""
    target = new_target(16, context=128)
    drafter = new_drafter(target, target_layer_inference=N)
    delay = random.Random(moment).uniform(0, 0.01)
    threads = threading.active_count()
    cycles = []
    states = []

    def emit(cycle: Cycle) -> None:
        before = sum(len(earlier.tokens) for earlier in cycles)
        cycles.append(cycle)
        states.append(cycle.link)
        if not before < moment <= before + len(cycle.tokens):
            return
        if deed == "kill":
            killer.start()
        elif deed == "stop":
            monkeypatch.setattr(netsim, "CONNECT_SECONDS", 0.1)
            os.kill(server.pid, signal.SIGSTOP)
        else:
            server.kill()
            server.join()
            stack.enter_context(serving_elsewhere(target, drafter, port))

    with contextlib.ExitStack() as stack:
        server, address = stack.enter_context(serving_elsewhere(target, drafter))
        _, port = address
        killer = threading.Timer(delay, server.kill)
        channel = Channel(address, "", Network(Link()))
        method = over(channel, (target, drafter))
        result = method.answer(PROMPT, GenerationConfig(100), emit)
        if deed == "kill":
            killer.join()
    assert threading.active_count() == threads
    verified = check(target, result, cycles, 100)
    assert verified[:moment] == [True] * moment
    if deed == "restart":
        assert all(verified)
        assert states.count("reconnected") == 1 and "offline" not in states
    else:
        assert not verified[-1]
        assert verified == sorted(verified, reverse=True)  # what is gone stays so
        assert set(states) == {"connected", "offline"}


def test_a_server_that_is_lost_while_it_reads_the_prompt_is_asked_again(
        models, impatient, monkeypatch):
    target, _ = models
    read = TargetSession.read
    reads = []

    def read_second(session: TargetSession, fields: dict, tensors: dict):
        reads.append(fields)
        return read(session, fields, tensors if len(reads) > 1 else {})  # malformed at first

    monkeypatch.setattr(TargetSession, "read", read_second)
    with serving_models(*models) as server:
        result = over(channel_to(server), models).answer(PROMPT, CONFIG)
    assert len(reads) == 2
    assert result.tokens == target_alone(target, 24) and result.unverified == 0


def damaged(shape: list[int] | None, value: float, dtype: torch.dtype):
    """A function of a tensor: one filled with a value, of another shape or of the same."""
    return lambda right: torch.full(shape or right.shape, value, dtype=dtype)


WRONG_FIELDS = [{"token": token} for token in (16, -1, True, 2.0, 10**400)]
WRONG_FIELDS += [{"accepted": accepted} for accepted in ([3] * 9, None, [[]])]
WRONG_TENSORS = [
    damaged([3], 0.0, torch.float32),
    damaged(None, math.nan, torch.float32),
    damaged(None, 1e300, torch.float64),  # infinite in float32
]
MALFORMED = [(fields, None, None) for fields in WRONG_FIELDS]
for tensor_name in ("cross", "cross_scale", "reused", "reused_scale"):
    MALFORMED += [({}, tensor_name, damage) for damage in WRONG_TENSORS]


@pytest.mark.parametrize("fields, name, damage", MALFORMED, ids=lambda value: str(value)[:20])
def test_malformed_replies_count_as_lost(fields, name, damage, impatient, monkeypatch):
    target = new_target(16, context=128)
    pair = (target, new_drafter(target, target_layer_inference=1))
    send = netsim.ClientHandler.send
    replies = itertools.count()
    cycles = []
    states = []

    def emit(cycle: Cycle) -> None:
        cycles.append(cycle)
        states.append(cycle.link)

    def send_malformed(connection, right_fields: dict, right_tensors: dict) -> None:
        if "drafter" in right_fields or next(replies) < 5:
            send(connection, right_fields, right_tensors)
        else:
            changed = {name: damage(right_tensors[name])} if name else {}
            send(connection, right_fields | fields, right_tensors | changed)

    monkeypatch.setattr(netsim.ClientHandler, "send", send_malformed)
    with serving_models(*pair) as server:
        method = over(channel_to(server), pair)
        result = method.answer(PROMPT, GenerationConfig(24), emit)
    verified = check(target, result, cycles, 24)
    assert states[-1] == "offline"
    assert verified.index(False) >= 5 and verified.count(False) > 5


def test_accepted_tokens_of_a_reply_are_ints_even_if_it_says_floats(monkeypatch):
    target = new_target(16)
    pair = (target, new_drafter(target, target_layer_inference=4, likeness=1.0))
    send = netsim.ClientHandler.send

    def send_floats(connection, fields: dict, tensors: dict) -> None:
        floats = {"accepted": [float(token) for token in fields.get("accepted", [])]}
        send(connection, fields | floats, tensors)

    monkeypatch.setattr(netsim.ClientHandler, "send", send_floats)
    with serving_models(*pair) as server:
        result = over(channel_to(server), pair).answer(PROMPT, CONFIG)
    assert result.tokens == target_alone(target, 24)
    assert result.origins.count(Origin.DRAFT) > 10
    assert {type(token) for token in result.tokens} == {int}


def test_the_pause_after_a_failed_reconnection_begins_when_it_has_failed_and_doubles(monkeypatch):
    target = speculate.RemoteTarget(None, None, GenerationConfig())

    def fail() -> None:
        time.sleep(0.03)
        raise netsim.ConnectionLost("no reply")

    monkeypatch.setattr(target, "connect_and_read", fail)
    for pause in (0.5, 1.0, 2.0):
        target.retry_at = 0.0
        with pytest.raises(netsim.ConnectionLost, match="no reply"):
            target.reconnect()
        assert target.retry_at - time.monotonic() == pytest.approx(pause, abs=0.02)
        with pytest.raises(netsim.ConnectionLost, match="too early"):
            target.reconnect()


def test_a_server_with_another_drafter_is_refused(models):
    target, drafter = models
    other = new_drafter(target)
    other.checkpoint_hash = "other"
    with serving_models(target, drafter) as server:
        with pytest.raises(InputError, match="another drafter; start both sides with the same"):
            over(channel_to(server), (target, other)).answer(PROMPT, CONFIG)


def test_a_target_that_produces_nan_ends_in_one_line(impatient, capsys):
    target = new_target(16)
    drafter = new_drafter(target)
    target.layers[0].input_layernorm.weight.data.fill_(math.nan)
    with serving_models(target, drafter) as server:
        with pytest.raises(InputError, match="NaN") as error:
            over(channel_to(server), (target, drafter)).answer(PROMPT, CONFIG)
    assert "\n" not in str(error.value)
    assert "Traceback" not in capsys.readouterr().err


def test_the_benchmark_takes_every_network_and_cuts_each_once(
        models, capsys, impatient, monkeypatch):
    monkeypatch.setattr(speculate.tqdm, "monitor_interval", 0)  # its thread is none of the server's
    target, drafter = models
    links = {"wan": Link(), "4g": Link(0.001)}

    args = parse(["--bench", "--remote", "--max-new-tokens", "8", "--draft-length", "4"])
    with serving_models(target, drafter) as server:
        loaded = Models(target, WORDS, {"": drafter})
        args.remote = server.server_address
        methods = remote_methods(loaded, args, links)
        results = bench(loaded, methods, [Prompt("a", ["one"])], GenerationConfig(8))
        turns = {"a": [turn for _, turn in results]}
    rows = summarize(target, methods, turns, GenerationConfig(8))
    overall = {row["method"]: row for row in rows if row["category"] == "overall"}
    kinds = ("api", "remote", "remote+lookup", "disconnected")
    assert set(overall) == {":".join(pair) for pair in itertools.product(kinds, links)}
    for name, row in overall.items():
        if name.startswith("disconnected"):
            assert 0 < row["unverified_tokens"] <= 8 - 2
        else:
            assert row["identical"] == 1 and "unverified_tokens" not in row
        assert row["bytes_up_per_token"] > 0 and row["bytes_down_per_token"] > 0
        assert row["round_trips_per_token"] > 0
    print_table(rows)
    assert "agreement" in capsys.readouterr().out


def test_the_benchmark_judges_what_was_written_offline_wherever_it_stands():
    target = new_target(16, context=128)
    alone = target_alone(target, 60)
    offline = (2, 3, 7)
    base = Generation(PROMPT, alone, [Origin.TARGET] * 60)
    ours = Generation(PROMPT, list(alone), [Origin.TARGET] * 60)
    ours.tokens[3] = (alone[3] + 1) % 16
    for i in offline:
        ours.origins[i] = Origin.UNVERIFIED
    log_p = target(torch.tensor([PROMPT + ours.tokens]))[0, len(PROMPT) - 1:].log_softmax(-1)
    nll = [-log_p[i, ours.tokens[i]].item() for i in offline]
    assert offline_quality(target, [ours], [base]) == {
        "agreement": 2 / 3,
        "perplexity": pytest.approx(math.exp(sum(nll) / 3), rel=1e-4),
    }


# --- The server and its clients ---


def test_a_wrong_secret_is_refused_in_constant_time_before_more_is_read(
        models, impatient, monkeypatch, capsys):
    target, _ = models
    compare_digest = hmac.compare_digest
    start_session = TargetSession.__init__
    compared = []
    sessions = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare_digest(a, b)

    def start(session: TargetSession, *arguments) -> None:
        sessions.append(session)
        start_session(session, *arguments)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    monkeypatch.setattr(TargetSession, "__init__", start)
    with serving_models(*models, secret="tulip") as server:
        attempts = [("", b""), ("tulips", frame({"call": "read"})), ("tuli", bytes(1000))]
        for secret, after in attempts:
            sock, fields = connect(server, secret, after)
            sock.close()
            assert fields["refused"].startswith("wrong secret")
        with (
            socket.create_connection(server.server_address) as sock,
            socket.create_connection(server.server_address) as other,
        ):
            nonce = sock.recv(NONCE, socket.MSG_WAITALL)
            other.recv(NONCE, socket.MSG_WAITALL)
            other.sendall(hmac.digest(b"tulip", nonce, "sha256"))  # not to its own nonce
            assert greeting(other).fields["refused"].startswith("wrong secret")
        wrong = Channel(server.server_address, "rose", Network(Link()))
        complaint = "no first token from the server: the server refused: 'wrong secret"
        with pytest.raises(InputError, match=complaint):
            over(wrong, models).answer(PROMPT, CONFIG)
        assert sessions == []
        result = over(channel_to(server), models).answer(PROMPT, CONFIG)
        assert result.tokens == target_alone(target, 24)
    assert len(sessions) == 1
    assert set(compared) == {(DIGEST, DIGEST)}
    assert set(capsys.readouterr().err.splitlines()) == {"127.0.0.1: wrong secret"}


def test_neither_unauthenticated_clients_nor_ones_beyond_the_limit_keep_others_out(
        models, monkeypatch):
    monkeypatch.setattr(netsim, "MAX_CLIENTS", 2)
    target, _ = models
    alone = target_alone(target, 24)
    with serving_models(*models) as server, contextlib.ExitStack() as stack:
        silent = []
        for _ in range(40):
            sock = socket.create_connection(server.server_address, 30)
            silent.append(stack.enter_context(sock))
        assert over(channel_to(server), models).answer(PROMPT, CONFIG).tokens == alone
        assert len(server.unauthenticated) <= 8
        assert silent[0].recv(99)[NONCE:] == b""  # the oldest was disconnected
        greetings = []
        with contextlib.ExitStack() as clients:
            for _ in range(3):
                sock, fields = connect(server)
                clients.enter_context(sock)
                greetings.append(fields)
        accepted = {"drafter": "test"}
        assert greetings == [accepted, accepted, {"refused": "it has 2 clients, its limit"}]
        wait_for(lambda: set(server.sockets) == set(server.unauthenticated))
        assert over(channel_to(server), models).answer(PROMPT, CONFIG).tokens == alone


@pytest.mark.parametrize("part", [b"", b"MoAs"])
def test_a_client_that_sends_nothing_more_is_disconnected(
        models, part, monkeypatch, capsys):
    monkeypatch.setattr(netsim, "IDLE_SECONDS", 0.1)
    with serving_models(*models) as server:
        sock, _ = connect(server)
        with sock:
            sock.sendall(part)
            assert sock.recv(1) == b""
    assert capsys.readouterr().err == "127.0.0.1: no whole request within 0.1 s\n"


READ = {
    "call": "read",
    "max_new_tokens": 3,
    "temperature": 0.8,
    "top_p": 1.0,
    "seed": 0,
    "stop_ids": [],
}
VERIFY = {"call": "verify", "drafts": [1, 2, 1], "parents": [0, 1, 0]}  # a small tree
TEXT = torch.tensor(PROMPT, dtype=torch.int32)
IDS = torch.arange(16, dtype=torch.int32).expand(2, 16).contiguous()  # of two parents
WEIGHTS = torch.full((2, 16), 9, dtype=torch.uint8)
WRONG_TEXTS = [
    {"call": "stop"},
    {"call": []},
    {"tokens": None},
    {"tokens": TEXT.long()},
    {"tokens": TEXT[None]},
    {"tokens": TEXT[:0]},
    {"tokens": TEXT + 12},  # the target has 16 tokens
    {"tokens": TEXT - 1},
    {"tokens": TEXT.repeat(16)},  # as many as the context
    {"max_new_tokens": 0},
    {"max_new_tokens": 61},  # with the prompt one too many for the context
    {"max_new_tokens": 2.0},
    {"max_new_tokens": None},
    {"temperature": -1},
    {"temperature": math.nan},
    {"temperature": 101},
    {"temperature": "warm"},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_p": math.nan},
    {"seed": -1},
    {"seed": 2**63},
    {"seed": True},
    {"stop_ids": None},
    {"stop_ids": [[]]},
]
WRONG_DRAFTS = [
    {"drafts": None},
    {"drafts": [1, 2, 16]},
    {"drafts": [1, 2, -1]},
    {"drafts": [1, 2, 1.0]},
    {"drafts": [1, 2, True]},
    {"drafts": [1, 2]},
    {"drafts": [1] * 65, "parents": [0] * 65},
    {"parents": None},
    {"parents": [0, 1]},
    {"parents": [-1, 1, 0]},
    {"parents": [0, 2, 0]},  # itself
    {"parents": [0, 3, 0]},  # a later one
    {"parents": [0, 1.0, 0]},
    {"parents": [0, 0, 0]},  # fewer parents than distributions
    {"ids": None},
    {"ids": IDS.float()},
    {"ids": IDS[:1]},
    {"ids": IDS[:, :15]},
    {"ids": IDS + 1},
    {"weights": None},
    {"weights": WEIGHTS.int()},
    {"weights": WEIGHTS[:, :15]},
    {"weights": WEIGHTS * torch.tensor([[1], [0]], dtype=torch.uint8)},
    {"weights": WEIGHTS * (IDS != 2)},  # a token that cannot have been drawn
]


def request(right: dict, changes: dict) -> tuple[dict, dict]:
    """Fields and tensors of a request with these changes. None: without it."""
    changed = right | {"tokens": TEXT, "ids": IDS, "weights": WEIGHTS} | changes
    fields = {}
    tensors = {}
    for name, value in changed.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif value is not None:
            fields[name] = value
    return fields, tensors


@pytest.mark.parametrize("right, wrong", [
    *((READ, wrong) for wrong in WRONG_TEXTS + [{"known": -1}, {"known": 4}, {"known": "all"}]),
    *((READ | {"call": "generate"}, wrong) for wrong in ({"tokens": None}, {"max_new_tokens": 61})),
    *((VERIFY, wrong) for wrong in WRONG_DRAFTS)], ids=lambda value: str(value)[:40])
def test_a_malformed_request_is_refused_and_a_right_one_after_it_is_answered(models, right, wrong):
    with ThreadPoolExecutor(1) as worker:
        session = TargetSession(*models, worker)
        if right is VERIFY:
            with pytest.raises(ValueError, match="drafts must follow a text"):
                list(session.answer(*request(VERIFY, {})))
            list(session.answer(*request(READ, {})))
        with pytest.raises((LookupError, TypeError, ValueError)):
            list(session.answer(*request(right, wrong)))
        (fields, _), *more = session.answer(*request(right, {}))
        assert 0 <= fields["token"] < 16
        assert len(more) == (2 if right["call"] == "generate" else 0)


@pytest.mark.parametrize("verified, parents, most", [
    (0, list(range(64)), 64),  # a chain whose end is beyond the context
    (5, [0] * 64, 72)], ids=["chain", "siblings"])  # what the server's cache has room for
def test_drafts_beyond_what_was_asked_for_are_refused(models, verified, parents, most):
    with ThreadPoolExecutor(1) as worker:
        session = TargetSession(*models, worker)
        list(session.answer(*request(READ, {"temperature": 0})))
        for _ in range(verified):  # each adds a token to the server's cache
            list(session.answer(*request(VERIFY, {"drafts": [], "parents": []})))
        too_many = {"drafts": [1] * 64, "parents": parents}
        with pytest.raises(ValueError, match=f"expected an int from 0 to {most}$"):
            list(session.answer(*request(VERIFY, too_many)))


ODD = [
    None, -1, 0, 1, 3, 10**9, 2**70, 10**400, "0", [], {}, 1.5, math.nan, math.inf, True, [-1],
    [[]], "\ud800",
]
SHAPES = [(0,), (1,), (3,), (2, 16), (2, 16), (70,), (), (2**40, 0)]


def random_request(generator: random.Random) -> tuple[dict, dict]:
    """Fields and tensors of a request that is nearly right."""
    fields = READ | VERIFY
    fields["call"] = generator.choice(["read", "verify", "generate", "verify", "stop"])
    fields["temperature"] = generator.choice([0, 0.8])
    for name in generator.sample(sorted(fields), generator.choice([0, 1, 1, 3])):
        fields[name] = generator.choice(ODD)
    tensors = {}
    for name in ("tokens", "ids", "weights"):
        if generator.random() < 0.9:
            end = generator.choice([2, 16, 17])
            dtype = generator.choice([torch.int32, torch.uint8, torch.half])
            tensors[name] = torch.randint(-1, end, generator.choice(SHAPES)).to(dtype)
    if generator.random() < 0.5:
        tensors["ids"] = IDS
    return fields, tensors


def random_message(number: int, whole: bytes, generator: random.Random) -> bytes:
    """A message that is cut short, one with some bytes replaced, or three requests that are nearly
    right after at most two that are."""
    start = generator.randrange(len(whole))
    kind = number % 8
    if kind < 5:
        if number % 2 == 0:
            return whole[:start]
        end = start + generator.randrange(9)
        return whole[:start] + generator.randbytes(generator.randrange(9)) + whole[end:]
    message = whole * (kind - 5)
    for _ in range(3):
        fields, tensors = random_request(generator)
        message += frame(fields, tensors)
    return message


def test_hundreds_of_malformed_frames_leave_the_server_serving(capsys):
    target = new_target(16, layers=1)
    pair = (target, new_drafter(target))
    generator = random.Random(0)
    whole = frame(READ, {"tokens": TEXT})
    with serving_models(*pair) as server:
        for number in range(500):
            sock = socket.create_connection(server.server_address, timeout=30)
            with sock, contextlib.suppress(OSError):
                if number % 8 == 0:  # before the secret is known
                    sock.sendall(generator.randbytes(generator.randrange(64)))
                    continue
                digest = hmac.digest(b"", sock.recv(NONCE, socket.MSG_WAITALL), "sha256")
                sock.sendall(digest + random_message(number, whole, generator))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
        wait_for(lambda: not server.sockets)
        result = over(channel_to(server), pair).answer(PROMPT, CONFIG)
        assert result.tokens == target_alone(target, 24)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 200
    assert all(line.startswith("127.0.0.1: ") for line in lines)


# --- What a user sees of it ---


@pytest.fixture(scope="module")
def tiny(checkpoint) -> Models:
    """The same models in this process."""
    args = parse(checkpoint + ["--prompt", "Hi"])
    return speculate.load_models(args)


def parse(arguments: list[str]) -> Namespace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["speculate.py", *arguments])
        return speculate.parse_arguments()


@pytest.fixture
def command(checkpoint, monkeypatch, capsys):
    """Runs speculate.py in this process: (exit status, stdout, stderr)."""
    on_terminate = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["speculate.py", *checkpoint, *arguments])
        status = 0
        try:
            run_command(speculate.main)
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        return status, out, err

    yield run
    signal.signal(signal.SIGTERM, on_terminate)  # a server's handler is not for this process


def terminal_over(
    networks: list[Network], server: MessageServer, tiny: Models, *flags: str
) -> Terminal:
    """What answers each of its prompts over the next of these networks, as with --remote."""
    connections = iter(networks)

    def new_channel(prompt: list[int]) -> Channel:
        return Channel(server.server_address, "", next(connections))

    args = parse(["--remote", "--max-new-tokens", "48", *flags])
    method = Method(tiny.target, tiny.drafter, CHAIN, False, new_channel)
    config = GenerationConfig(args.max_new_tokens, args.temperature)
    return Terminal(args, tiny, method, config)


LOST = "[the link is lost: what follows is the drafter's own text, unverified]"
BACK = "[the link is back: the target goes on]"


def link_lines(err: str) -> list[str]:
    return [line for line in err.splitlines() if "link" in line]


@pytest.mark.parametrize("first, until, lines", [
    (10, 30, [LOST, BACK]),
    (math.inf, math.inf, [])])
def test_one_line_says_when_the_link_is_lost_and_one_when_it_is_back(
        tiny, impatient, capsys, first, until, lines):
    with serving_models(tiny.target, tiny.drafter) as server:
        terminal = terminal_over([CountedOutage(first, until)], server, tiny)
        generation = terminal.respond(ask("Hi"))
    out, err = capsys.readouterr()
    assert link_lines(err) == lines
    assert out == tiny.tokenizer.decode(generation.tokens)
    assert ("the server was out of reach" in err) == (lines != [])
    assert ("of these tokens are the drafter's own" in err) == (lines != [])


def test_show_colors_what_was_written_without_the_target_on_a_terminal(
        tiny, impatient, capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with serving_models(tiny.target, tiny.drafter) as server:
        terminal = terminal_over([CountedOutage(10, 30)], server, tiny, "--show")
        generation = terminal.respond(ask("Hi"))
    out = capsys.readouterr().out
    stream = TextStream(tiny.tokenizer)
    unverified = ""
    for token, origin in zip(generation.tokens, generation.origins):
        text = stream.add(token)
        unverified += text if origin == Origin.UNVERIFIED else ""
    assert "".join(re.findall("\033\\[33m(.*?)\033\\[0m", out, re.DOTALL)) == unverified != ""
    assert re.sub("\033\\[[0-9]+m", "", out) == tiny.tokenizer.decode(generation.tokens)


@pytest.mark.parametrize("latency, count, said", [
    (0.1, "1", "connecting ...\n"),  # eight ways to the first token
    (0.02, "48", "")])
def test_a_link_that_takes_long_to_the_first_token_says_that_it_is_connecting(
        tiny, capsys, monkeypatch, latency, count, said):
    monkeypatch.setattr(speculate, "PATIENCE", 0.5)
    with serving_models(tiny.target, tiny.drafter) as server:
        network = Network(Link(latency))
        terminal = terminal_over([network], server, tiny, "--json", "--max-new-tokens", count)
        generation = terminal.respond(ask("Hi"))
    out, err = capsys.readouterr()
    assert generation.seconds > 0.5
    assert err == said
    assert json.loads(out)["new_tokens"] == int(count)


def test_a_trace_has_the_link_with_its_bytes_and_all_tokens_also_those_written_offline(
        tiny, impatient, capsys):
    with serving_models(tiny.target, tiny.drafter) as server:
        terminal = terminal_over([CountedOutage(10, 30)], server, tiny, "--trace", "--json")
        terminal.respond(ask("Hi"))
    *cycles, generation = map(json.loads, capsys.readouterr().out.splitlines())
    assert sum([cycle["tokens"] for cycle in cycles], []) == generation["tokens"]
    states = [cycle["link"]["state"] for cycle in cycles]
    assert [state for state, _ in itertools.groupby(states)] == [
        "connected", "offline", "reconnected", "connected"]
    assert states.count("reconnected") == 1
    offline = [cycle for cycle in cycles if cycle["offline"]]
    assert len(offline) == states.count("offline")
    assert sum(len(cycle["tokens"]) for cycle in offline) == generation["unverified_tokens"] > 0
    for name in ("bytes_up", "bytes_down"):
        assert sum(cycle["link"][name] for cycle in cycles) == generation[name]
    for cycle in cycles:
        drawn = "\n".join(speculate.draw_cycle(cycle))
        link = cycle["link"]
        traffic = f"{link['bytes_up']} bytes up, {link['bytes_down']} down, "
        assert f"  link: {link['state']}, {traffic}" in drawn
        assert ("offline: the drafter alone wrote" in drawn) == cycle["offline"]


def test_a_sampled_trace_says_no_more_of_a_draft_than_the_server_does(tiny, capsys):
    flags = "--trace", "--json", "--temperature", "1"
    with serving_models(tiny.target, tiny.drafter) as server:
        terminal_over([Network(Link())], server, tiny, *flags).respond(ask("Hi"))
    *cycles, _ = map(json.loads, capsys.readouterr().out.splitlines())
    reasons = {draft["reason"] for cycle in cycles for draft in cycle["drafts"]}
    assert reasons == {"accepted", "not kept", "not reached"}


def test_a_chat_goes_on_after_an_outage_and_after_a_server_that_is_not_there(
        tiny, impatient, capsys, monkeypatch):
    networks = [
        CountedOutage(10, 30),
        Network(Link(), outage=Outage(after=0)),  # for both attempts to connect
        CountedOutage(20),
        Network(Link()),
    ]
    networks[1].outage.begin_if_due(0, 0.0)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n\nthree\nfour\n"))
    with serving_models(tiny.target, tiny.drafter) as server:
        terminal = terminal_over(networks, server, tiny)
        terminal.chat()
    one, three, four = terminal.answers
    assert one.outage and three.outage and not four.outage
    conversation = ask("one")
    for answer, question in ((one, "three"), (three, "four")):
        text = tiny.tokenizer.decode(answer.tokens)
        conversation += [{"role": "assistant", "content": text}, *ask(question)]
    assert four.prompt == tiny.tokenizer.chat(conversation)
    assert four.tokens == list(generate(tiny.target, four.prompt, GenerationConfig(48)))
    err = capsys.readouterr().err
    assert link_lines(err) == [LOST, BACK, LOST]
    complaint = "error: no first token from the server: the network is down"
    assert err.splitlines().count(complaint) == 1
    assert "3 answers, 144 tokens" in err


def test_a_server_says_how_to_connect_and_that_no_secret_is_set(monkeypatch, capsys):
    monkeypatch.delenv("MOA_SECRET", raising=False)
    announce_on_terminal(("127.0.0.1", 7000))
    out, err = capsys.readouterr()
    assert out == "127.0.0.1:7000\n"
    assert "connect with: python speculate.py --remote 127.0.0.1:7000" in err
    assert "no secret is set" in err


# --- Whole command lines, in processes of their own ---


class Processes(NamedTuple):
    """All are started at once, because most of their time is that of imports."""

    piped: subprocess.Popen  # its prompt comes from a pipe; all else, on a CPU, is the default
    server: subprocess.Popen  # with the secret "tulip"
    alone: subprocess.Popen  # without drafts, from a server of its own, for minutes
    chat: subprocess.Popen  # on a terminal, over a slow link: its answers take a minute
    terminal: int  # our end of it


def start(*arguments: str, secret: str | None = None, **streams) -> subprocess.Popen:
    environment = os.environ | {"TERM": "dumb"}
    environment.pop("MOA_SECRET", None)
    if secret is not None:
        environment["MOA_SECRET"] = secret
    return subprocess.Popen(
        [sys.executable, "speculate.py", *arguments],
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        preexec_fn=take_terminal,
        **streams,
    )


STREAMS = "stdin", "stdout", "stderr"


def take_terminal() -> None:
    """Let Ctrl-C on the terminal, if stdin is one, reach this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's & ignores it
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture(scope="module")
def processes(checkpoint):
    pipe = subprocess.PIPE
    outputs = dict(stdout=pipe, stderr=pipe, text=True)
    slow = ["--remote", "--max-new-tokens", "1700", *checkpoint]
    api = ["--no-speculation", "--bandwidth", "5kbit"]
    terminal, theirs = os.openpty()
    started = Processes(
        piped=start("--remote", "--latency", "21ms", "--device", "cpu", stdin=pipe, **outputs),
        server=start("--serve", "127.0.0.1:0", *checkpoint, secret="tulip", **outputs),
        alone=start("--prompt", "Why?", *api, *slow, **outputs),
        chat=start("--trace", "--latency", "30ms", *slow, **dict.fromkeys(STREAMS, theirs)),
        terminal=terminal,
    )
    os.close(theirs)
    started.piped.stdin.write("Say hi.\n")
    started.piped.stdin.close()
    yield started
    os.close(terminal)
    *all_started, _ = started
    for process in all_started:
        process.kill()
        with process:
            pass  # closes its pipes and waits for its end


def is_running(pid: str) -> bool:
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return "State:\tZ" not in status  # a zombie has ended
    return False


def own_processes(client: subprocess.Popen) -> list[str]:
    """What a client has started: its server."""
    children = Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text().split()
    assert children and all(map(is_running, children))
    return children


def read_until(terminal: int, pattern: str) -> str:
    """What comes from a terminal until it matches."""
    text = ""
    deadline = soon(60)
    while not re.search(pattern, text, re.DOTALL):
        ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
        assert ready, text
        text += os.read(terminal, 1 << 16).decode(errors="replace")
    return text


def test_ctrl_c_on_a_terminal_ends_an_answer_and_neither_the_chat_nor_its_server(processes):
    terminal = processes.terminal
    read_until(terminal, "Ask something.*> ")
    servers = []
    for question in (b"one\n", b"two\n"):
        os.write(terminal, question)
        read_until(terminal, "cycle 2: ")
        servers.append(own_processes(processes.chat))
        os.write(terminal, b"\x03")
        read_until(terminal, "unverified tokens 0, disconnected False.*> ")
    assert servers[0] == servers[1]


def test_a_server_of_our_own_may_be_a_plain_api_and_ends_however_its_client_ends(processes, tiny):
    alone = processes.alone
    text = alone.stdout.read(20)  # it is in the midst of its answer
    prompt = tiny.tokenizer.chat(ask("Why?"))
    whole = tiny.tokenizer.decode(list(generate(tiny.target, prompt, GenerationConfig(60))))
    assert whole.startswith(text) and len(text) == 20
    its_server = own_processes(alone)
    alone.kill()
    assert alone.wait(30) == -signal.SIGKILL
    wait_for(lambda: not any(map(is_running, its_server)))

    chat = processes.chat
    os.write(processes.terminal, b"three\n")
    read_until(processes.terminal, "cycle 2: ")
    its_server = own_processes(chat)
    os.write(processes.terminal, b"\x03")
    read_until(processes.terminal, "disconnected False.*> ")
    os.write(processes.terminal, b"\x04")
    read_until(processes.terminal, "answers, .* acceptance length")
    assert chat.wait(30) == 0
    wait_for(lambda: not any(map(is_running, its_server)))


def test_the_command_line_gives_the_same_tokens_with_the_target_on_a_server(
        processes, command, tiny, monkeypatch):
    monkeypatch.setenv("MOA_SECRET", "tulip")
    monkeypatch.setattr(netsim, "MIN_TIMEOUT", 0.2)
    prompt = tiny.tokenizer.chat(ask("Why?"))
    alone = list(generate(tiny.target, prompt, CONFIG))
    server = processes.server
    address = server.stdout.readline().strip()
    question = ["--prompt", "Why?", "--max-new-tokens", "24", "--remote", address]
    for more in (["--network", "4g"], ["--network", "wan", "--no-speculation"]):
        status, out, _ = command(*question, "--json", *more)
        result = json.loads(out)
        assert status == 0 and result["tokens"] == alone
        assert result["disconnected"] is False and result["unverified_tokens"] == 0
        for name in ("bytes_up", "bytes_down", "round_trips", "network_seconds"):
            assert result[name] > 0
    status, out, err = command(*question, "--disconnect-after", "9")
    assert status == 0 and link_lines(err) == [LOST]
    assert "new tokens 24" in err and "disconnected True" in err
    server.terminate()
    assert server.wait(30) == 0
    advice = f"connect with: python speculate.py --remote {address}"
    advice += " (and this side's --model and --drafter)\n"
    assert server.stderr.read() == advice + "and the same MOA_SECRET on the other side\n"


def test_the_prompt_may_come_from_a_pipe_and_the_target_from_a_server_of_our_own(
        processes, smollm2):
    model, tokenizer = smollm2
    out = processes.piped.stdout.read()
    err = processes.piped.stderr.read()
    prompt = tokenizer.chat(ask("Say hi."))
    config = GenerationConfig(256, stop_ids=frozenset(tokenizer.stop_ids))
    assert processes.piped.wait(30) == 0, err
    assert out == tokenizer.decode(list(generate(model, prompt, config)))
    network_seconds = re.search(r"network seconds ([0-9.]+)", err).group(1)
    assert float(network_seconds) > 0.021
    assert "unverified tokens 0, disconnected False" in err


# --- Bad input ---

REMOTE = ["--prompt", "Hi", "--remote"]


@pytest.mark.parametrize("arguments, complaint", [
    ([*REMOTE, "--latency", "21"], "a duration like"),
    ([*REMOTE, "--disconnect-after", "0"], "--disconnect-after"),
    ([*REMOTE, "--network", "3g"], "--network"),
    ([*REMOTE, "here"], "HOST:PORT"),
    ([*REMOTE, "localhost:99999"], "HOST:PORT"),
    (["--serve", "1234"], "HOST:PORT"),
    (["--serve", "0.0.0.0:0"], "to serve beyond this machine, set a secret"),
    ([*REMOTE, "a..b:7000"], "no server at a..b:7000"),
    ([*REMOTE, "127.0.0.1:9"], "no server at 127.0.0.1:9"),
    ([*REMOTE, "127.0.0.1:9", "--no-speculation"], "no server at 127.0.0.1:9")], ids=str)
def test_bad_input_ends_in_one_line_and_exit_status_2(
        arguments, complaint, command, impatient, monkeypatch):
    monkeypatch.delenv("MOA_SECRET", raising=False)
    status, out, err = command(*arguments)
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and complaint in err


@pytest.mark.parametrize("flags", [REMOTE, ["--serve", "127.0.0.1:0"]], ids=str)
def test_a_drafter_without_ca_is_refused_if_its_target_is_elsewhere(flags, checkpoint, tmp_path):
    drafter = new_drafter(new_target(258, context=2048), use_cross_attention=False)
    save_drafter(drafter, tmp_path)
    args = parse([*checkpoint, *flags])
    args.drafter = [str(tmp_path)]
    with pytest.raises(InputError, match="need a drafter with CA"):
        speculate.load_models(args)
