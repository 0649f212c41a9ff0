"""Client and server: the target's own tokens over any network, and a whole answer whatever becomes
of the server."""
import contextlib
import fcntl
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple

import pytest
import torch
from conftest import ROOT
from test_client import channel_to
from test_losslessness import (  # noqa: F401 (a fixture)
    CLEARLY,
    VOCABULARY,
    Chance,
    Comparison,
    chance,
    compare,
    exact_texts,
)
from test_losslessness import check as check_distribution
from test_messages import LIMIT, frame, serving, soon, wait_for
from tiny_models import PROMPT, ask, new_drafter, new_target, target_alone

from app import client, speculate_command
from app.answers import Generation, Method, OnServer, Origin, PlainApi, TimedCycle, answer
from app.client import (
    OFFLINE_TOKENS,
    Channel,
    ConnectionLost,
    Outage,
    ReconnectingVerifier,
    RemoteDraftState,
)
from app.loading import load_model
from app.packed import pack
from app.server import MAX_KEPT_REPLIES, Service, TargetSession, announce_on_terminal
from llama import GenerationConfig, Llama, generate, probabilities
from moa import Draft, Drafter, DraftLimits
from netsim import INITIAL_RTO, PROFILES, Link, Message, make_read
from plumbing import messages
from plumbing.devices import DTYPES, choose_dtype
from plumbing.errors import InputError
from plumbing.flags import address
from plumbing.messages import (
    MessageServer,
    ReceivedMessage,
    receive_message,
    send_message,
)
from plumbing.tokenizer import Tokenizer, load_tokenizer
from speculate import LocalVerifier, VerifyResult, speculate

CHAIN = DraftLimits(4)
TREE = DraftLimits(4, top_k=2, total_tokens=8)
CONFIG = GenerationConfig(24)

Pair = tuple[Llama, Drafter]


# --- What the tests share: servers, and methods that answer over a channel ---


@contextlib.contextmanager
def serving_models(target: Llama, drafter: Drafter):
    """A server in threads of this process."""
    with ThreadPoolExecutor(1) as worker:
        worker.submit(int).result()  # starts the worker's thread, which is not one of the server's
        with serving(new_session(target, drafter, worker)) as server:
            yield server


FINGERPRINTS = {"target": "t", "drafter": "d"}


def new_session(target: Llama, drafter: Drafter, worker: ThreadPoolExecutor) -> partial:
    return partial(TargetSession, Service(target, drafter, FINGERPRINTS, worker))


@contextlib.contextmanager
def serving_elsewhere(target: Llama, drafter: Drafter, port: int = 0):
    """A server in a process of its own, which ends afterwards: the process and the address."""
    ours, theirs = multiprocessing.Pipe()

    def serve() -> None:
        with ThreadPoolExecutor(1) as worker, MessageServer(("127.0.0.1", port)) as server:
            server.serve(new_session(target, drafter, worker), theirs.send)

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
    """A client that gives up on a reply after a fifth of a second, and tries again at once."""
    monkeypatch.setattr(client, "MIN_TIMEOUT", 0.2)
    monkeypatch.setattr(client, "INITIAL_BACKOFF", 0.0)


def over(
    channel: Channel, drafter: Drafter, limits: DraftLimits = CHAIN, lookup: bool = False
) -> Method:
    """A method of answering: the server at the other end of a channel verifies drafts."""
    return OnServer(lambda prompt: channel, drafter, limits, lookup=lookup)


def api_over(channel: Channel, target: Llama) -> Method:
    """A method of answering: the server at the other end of a channel is a plain API."""
    return PlainApi(lambda prompt: channel, target.config.vocab_size)


Emit = Callable[[TimedCycle], object]


def watch(method: Method, prompt: list[int], config: GenerationConfig, emit: Emit) -> Generation:
    """An answer each of whose cycles is shown to `emit` as soon as it is there."""
    generation = Generation(prompt)
    for cycle in generation.record(method.cycles(prompt, config)):
        emit(cycle)
    return generation


@dataclass
class CountedOutage(Outage):
    """An outage that ends when the answer has `until` tokens, however long they take."""

    until: float = math.inf

    def begin_if_due(self, count: int, now: float) -> None:
        super().begin_if_due(count, now)
        if count >= self.until:
            self.seconds = 0.0


def connect(server: MessageServer) -> tuple[socket.socket, dict]:
    """A connection, and the greeting's fields."""
    sock = socket.create_connection(server.server_address, timeout=30)
    return sock, receive_message(sock, LIMIT, soon()).fields


# --- The target's own tokens ---


@pytest.mark.parametrize("choices", [
    dict(target_layer_inference=0),
    dict(target_layer_inference=2),
    dict(target_layer_inference=4, likeness=0.8)], ids=str)
def test_greedy_tokens_are_those_of_the_target_alone_over_every_network(choices, monkeypatch):
    target = new_target(16)
    drafter = new_drafter(target, **choices)
    alone = target_alone(target, 24)
    monkeypatch.setattr("netsim.MIN_RTO_MARGIN", 0.002)
    monkeypatch.setattr(client, "INITIAL_RTO", 0.002)

    def run(link: Link, seed: int, count: int, limits: DraftLimits, lookup: bool) -> None:
        method = over(channel_to(server, link, seed=seed), drafter, limits, lookup)
        result = answer(method, PROMPT, GenerationConfig(count))
        assert result.tokens == alone[:count]
        assert result.outage == "" and result.unverified == 0
        assert result.network["round_trips"] == 1 + result.target_calls

    runs = []
    with serving_models(target, drafter) as server, ThreadPoolExecutor(4) as clients:
        for limits, lookup in ((CHAIN, False), (TREE, False), (TREE, True)):
            if choices == dict(target_layer_inference=2):  # a link does not know its drafter
                for link in PROFILES.values():
                    runs.append(clients.submit(run, link, 0, 6, limits, lookup))
            for seed in range(2):
                lossy = Link(0.001, 0.001, 1e7, loss=0.2)
                runs.append(clients.submit(run, lossy, seed, 24, limits, lookup))
        for done in runs:
            done.result()


@pytest.mark.parametrize("likeness, limits", [
    (1.0, CHAIN),
    (0.0, TREE),
    (1.0, DraftLimits(8, top_k=40, total_tokens=64))], ids=str)
def test_prompt_and_answer_may_fill_the_context_to_its_end(likeness, limits):
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=likeness)
    config = GenerationConfig(target.config.max_position_embeddings - len(PROMPT))
    with serving_models(target, drafter) as server:
        result = answer(over(channel_to(server), drafter, limits), PROMPT, config)
    assert result.tokens == target_alone(target, config.max_new_tokens)
    assert result.unverified == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_plain_use_of_an_api_streams_what_the_target_writes_alone_with_the_same_seed(
        models, temperature):
    target, _ = models
    with serving_models(*models) as server:
        for seed, stop_ids in ((3, []), (4, []), (4, [5, 7])):
            config = GenerationConfig(24, temperature, 0.9, seed, frozenset(stop_ids))
            cycles = []
            result = watch(api_over(channel_to(server), target), PROMPT, config, cycles.append)
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
            watch(api_over(channel, target), PROMPT, CONFIG, cycles.append)
    tokens = [cycle.tokens[0] for cycle in cycles]
    assert 2 <= len(tokens) < 24  # those that had arrived, and no more
    assert tokens == target_alone(target, 24)[:len(tokens)]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain API use", "drafts"])
def test_an_outage_shorter_than_the_timeout_delays_tokens_and_loses_none(models, drafts):
    target, drafter = models
    link = Link(0.02)
    moments = []  # when each cycle was complete
    counts = []  # how many tokens each cycle had

    def emit(cycle: TimedCycle) -> None:
        moments.append(time.monotonic())
        counts.append(len(cycle.tokens))

    with serving_models(*models) as server:
        channel = channel_to(server, link, after=5, seconds=0.3)
        method = over(channel, drafter) if drafts else api_over(channel, target)
        result = watch(method, PROMPT, GenerationConfig(48), emit)
    assert result.tokens == target_alone(target, 48)
    assert result.unverified == 0 and result.outage == ""
    assert result.network["round_trips"] == (1 + result.target_calls if drafts else 1)
    totals = list(itertools.accumulate(counts))
    next_cycle = 1 + [total >= 5 for total in totals].index(True)
    outage_ends = channel.outage.begins + 0.3
    # (Some replies of an API may have arrived before the outage, but wait on a busy machine.)
    delayed = [moment >= outage_ends for moment in moments].index(True)
    assert delayed == next_cycle if drafts else delayed >= next_cycle
    assert moments[delayed] >= outage_ends + link.retransmission_timeout()


def test_sampled_tokens_are_distributed_as_the_targets_own():
    """The second and the third token of an answer: every pair occurs as often as its probability
    says, within four and a half standard deviations. (The enumeration of test_losslessness.py
    assumes independent draws. Here client and server really draw.)"""
    target = new_target(5, layers=1)
    drafter = new_drafter(target)
    counts = torch.zeros(5, 5)
    with serving_models(target, drafter) as server:
        for seed in range(150):
            config = GenerationConfig(3, temperature=0.8, top_p=0.9, seed=seed)
            method = over(channel_to(server), drafter, DraftLimits(2, 2, 4))
            _, second, third = answer(method, PROMPT, config).tokens
            counts[second, third] += 1
    p = torch.zeros(5, 5)
    for tokens in itertools.product(range(5), repeat=3):
        first, second, third = tokens
        logits = target(torch.tensor([PROMPT + [first, second]]))[0, len(PROMPT) - 1:]
        steps = probabilities(logits, 0.8, 0.9)  # (3, V)
        p[second, third] += steps[0, first] * steps[1, second] * steps[2, third]
    deviation = (150 * p * (1 - p)).sqrt()
    assert ((counts - 150 * p).abs() <= 4.5 * deviation + 1e-6).all()


def test_eight_clients_at_once_get_their_own_answers_from_one_thread(monkeypatch):
    threads = set()
    prefill = LocalVerifier.prefill
    verify = LocalVerifier.verify

    def noting_thread(method: Callable) -> Callable:
        return lambda *call: threads.add(threading.get_ident()) or method(*call)

    monkeypatch.setattr(LocalVerifier, "prefill", noting_thread(prefill))
    monkeypatch.setattr(LocalVerifier, "verify", noting_thread(verify))
    target = new_target(16, context=2048)
    drafter = new_drafter(target, target_layer_inference=2)
    long = [i * i % 13 for i in range(562)]
    prompts = [PROMPT + [number] for number in range(6)] + [long, long[:256]]

    def run(prompt: list[int]) -> Generation:
        return answer(over(channel_to(server), drafter, TREE), prompt, CONFIG)

    with serving_models(target, drafter) as server, ThreadPoolExecutor(8) as clients:
        results = list(clients.map(run, prompts))
    for prompt, result in zip(prompts, results):
        assert result.tokens == list(generate(target, prompt, CONFIG))
        assert result.network["round_trips"] == 1 + result.target_calls
    assert len(threads) == 1


# --- Without the server ---


def check(target: Llama, result: Generation, cycles: list[TimedCycle], count: int) -> list[bool]:
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


@pytest.mark.parametrize("N, limits, lookup, after, until", [
    (0, CHAIN, False, 1, 30),
    (0, TREE, True, 20, math.inf),
    (2, CHAIN, False, 10, 12),
    (2, TREE, False, 39, 70)], ids=str)
def test_an_outage_costs_verification_only_for_as_long_as_it_lasts(
        N, limits, lookup, after, until, impatient):
    target = new_target(16, context=128)
    drafter = new_drafter(target, target_layer_inference=N)
    open_files = len(os.listdir("/proc/self/fd"))
    cycles = []
    with serving_models(target, drafter) as server:
        outage = CountedOutage(after, until=until)
        channel = Channel(server.server_address, Link(0.002, 0.002), outage=outage)
        method = over(channel, drafter, limits, lookup)
        result = watch(method, PROMPT, GenerationConfig(100), cycles.append)
        wait_for(lambda: not server.connections)
    assert len(os.listdir("/proc/self/fd")) == open_files
    verified = check(target, result, cycles, 100)
    first_lost = (verified + [False]).index(False)
    assert first_lost >= after
    if until > after + limits.depth:
        assert first_lost <= after + limits.depth
    end = min(until, 100)
    assert not any(verified[first_lost:end])
    if until < math.inf:
        assert all(verified[until + OFFLINE_TOKENS:])
    offline = [cycle.result for cycle in cycles if cycle.is_offline]
    for result in offline[1:]:
        assert lookup or result.draft.tokens[1:] == []  # no server would verify a draft


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
    """The deed happens when the answer has `moment` tokens. A kill happens up to 10 ms later, at
    any point of a cycle."""
    target = new_target(16, context=128)
    drafter = new_drafter(target, target_layer_inference=N)
    delay = random.Random(moment).uniform(0, 0.01)
    threads = threading.active_count()
    cycles = []
    states = []

    def emit(cycle: TimedCycle) -> None:
        before = sum(len(earlier.tokens) for earlier in cycles)
        cycles.append(cycle)
        states.append(cycle.result.link)
        if not before < moment <= before + len(cycle.tokens):
            return
        if deed == "kill":
            killer.start()
        elif deed == "stop":
            monkeypatch.setattr(client, "CONNECT_SECONDS", 0.1)
            os.kill(server.pid, signal.SIGSTOP)
        else:
            server.kill()
            server.join()
            stack.enter_context(serving_elsewhere(target, drafter, port))

    with contextlib.ExitStack() as stack:
        server, address = stack.enter_context(serving_elsewhere(target, drafter))
        _, port = address
        killer = threading.Timer(delay, server.kill)
        method = over(Channel(address), drafter)
        result = watch(method, PROMPT, GenerationConfig(100), emit)
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
        assert verified == sorted(verified, reverse=True)  # a server that is gone stays away
        assert set(states) == {"connected", "offline"}


def damaged(shape: list[int] | None, value: float, dtype: torch.dtype):
    """A function that replaces a tensor: by one filled with a value, of this shape or the same."""
    return lambda right: torch.full(shape or right.shape, value, dtype=dtype)


WRONG_FIELDS = [{"token": token} for token in (16, -1, True, 2.0, 10**400)]
WRONG_FIELDS += [{"accepted": accepted} for accepted in ([3] * 9, None, [[]])]
WRONG_TENSORS = [
    damaged([3], 0.0, torch.float32),
    damaged(None, math.nan, torch.float32),
    damaged(None, 1e300, torch.float64),  # infinite in float32
]
MALFORMED = [(fields, None, None) for fields in WRONG_FIELDS]
for tensor_name in ("ca", "ca_scale", "tli", "tli_scale"):
    MALFORMED += [({}, tensor_name, damage) for damage in WRONG_TENSORS]


@pytest.mark.parametrize("fields, name, damage", MALFORMED, ids=lambda value: str(value)[:20])
def test_malformed_replies_count_as_lost(fields, name, damage, impatient, monkeypatch):
    target = new_target(16, context=128)
    drafter = new_drafter(target, target_layer_inference=1)
    replies = itertools.count()
    cycles = []
    states = []

    def emit(cycle: TimedCycle) -> None:
        cycles.append(cycle)
        states.append(cycle.result.link)

    def send_malformed(sock, right_fields: dict, right_tensors: dict) -> None:
        if "drafter" in right_fields or next(replies) < 5:
            send_message(sock, right_fields, right_tensors)
        else:
            changed = {name: damage(right_tensors[name])} if name else {}
            send_message(sock, right_fields | fields, right_tensors | changed)

    monkeypatch.setattr(messages, "send_message", send_malformed)
    with serving_models(target, drafter) as server:
        method = over(channel_to(server), drafter)
        result = watch(method, PROMPT, GenerationConfig(24), emit)
    verified = check(target, result, cycles, 24)
    assert states[-1] == "offline"
    assert verified.index(False) >= 5 and verified.count(False) > 5


@pytest.mark.parametrize("step, error", [
    ("app.client.send_message", TypeError("a bug")),
    ("app.client.wait", RuntimeError("a bug")),
    ("netsim.dequantize_update", torch.OutOfMemoryError("CUDA out of memory")),
    ("netsim.dequantize_update", RuntimeError("you tried to allocate 8 bytes"))], ids=repr)
def test_a_bug_or_a_lack_of_memory_is_not_reported_as_a_lost_connection(
        step, error, models, monkeypatch):
    target, drafter = models
    module, name = step.rsplit(".", 1)
    working = getattr(sys.modules[module], name)
    calls = itertools.count()

    def fail_later(*arguments):
        if next(calls) < 5:
            return working(*arguments)
        raise error

    monkeypatch.setattr(step, fail_later)
    with serving_models(target, drafter) as server:
        with pytest.raises(type(error)) as raised:
            answer(over(channel_to(server), drafter), PROMPT, CONFIG)
    assert raised.value is error


def test_accepted_tokens_of_a_reply_are_ints_even_if_it_says_floats(monkeypatch):
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)

    def send_floats(sock, fields: dict, tensors: dict) -> None:
        floats = {"accepted": [float(token) for token in fields.get("accepted", [])]}
        send_message(sock, fields | floats, tensors)

    monkeypatch.setattr(messages, "send_message", send_floats)
    with serving_models(target, drafter) as server:
        result = answer(over(channel_to(server), drafter), PROMPT, CONFIG)
    assert result.tokens == target_alone(target, 24)
    assert result.origins.count(Origin.DRAFT) > 10
    assert {type(token) for token in result.tokens} == {int}


def test_the_pause_after_a_failed_reconnection_begins_when_it_has_failed_and_doubles(monkeypatch):
    channel = Channel(("", 0))
    verifier = ReconnectingVerifier(channel, None, GenerationConfig())

    def fail() -> None:
        time.sleep(0.03)
        raise ConnectionLost("no reply")

    def lose(draft: Draft) -> None:
        raise ConnectionLost("not connected")

    monkeypatch.setattr(channel, "connect", fail)
    monkeypatch.setattr(verifier, "verify_online", lose)
    monkeypatch.setattr(verifier, "draft_offline", lambda reason: reason)
    for pause in (0.5, 1.0, 2.0):
        verifier.retry_at = 0.0
        assert verifier.verify(Draft(0)) == "not connected; then no reply"
        assert verifier.retry_at - time.monotonic() == pytest.approx(pause, abs=0.02)
        assert verifier.verify(Draft(0)) == "not connected"  # too early to try again


@pytest.mark.parametrize("drafts", [False, True], ids=["plain API use", "drafts"])
def test_a_server_with_another_target_is_refused(models, drafts):
    target, drafter = models
    with serving_models(target, drafter) as server:
        channel = channel_to(server)
        channel.fingerprints = {"target": "another"}
        method = over(channel, drafter) if drafts else api_over(channel, target)
        with pytest.raises(InputError, match="another target; start both sides with the same"):
            answer(method, PROMPT, CONFIG)


@pytest.mark.parametrize("drafts", [False, True], ids=["plain API use", "drafts"])
def test_a_target_that_produces_nan_ends_in_one_line(drafts, capsys):
    target = new_target(16)
    drafter = new_drafter(target)
    target.norm.weight.data.fill_(math.nan)  # so the memory has none
    with serving_models(target, drafter) as server:
        channel = channel_to(server)
        method = over(channel, drafter) if drafts else api_over(channel, target)
        with pytest.raises(InputError, match="refused: .*NaN.*float32") as error:
            answer(method, PROMPT, CONFIG)
    assert "\n" not in str(error.value)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("drafts", [False, True], ids=["plain API use", "drafts"])
def test_the_reason_why_a_request_is_refused_reaches_the_client(models, drafts):
    target, drafter = models
    config = GenerationConfig(1000)  # more than the context has room for
    with serving_models(target, drafter) as server:
        channel = channel_to(server)
        method = over(channel, drafter) if drafts else api_over(channel, target)
        with pytest.raises(InputError, match="refused: .*invalid max_new_tokens 1000") as error:
            answer(method, PROMPT, config)
    assert "\n" not in str(error.value)


# --- A verdict once drawn stands ---


def test_the_verdict_that_was_drawn_before_its_reply_was_lost_is_the_one_in_the_answer(
        monkeypatch):
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.9)
    verdicts = []
    cycles = []
    verify = TargetSession.verify

    def verify_slowly(session: TargetSession, draft: Draft) -> VerifyResult:
        result = verify(session, draft)
        verdicts.append(result.accepted + [result.token])
        if len(verdicts) == 3:
            time.sleep(0.5)
        return result

    monkeypatch.setattr(TargetSession, "verify", verify_slowly)
    with serving_models(target, drafter) as server:
        method = over(channel_to(server, timeout=0.3), drafter)
        watch(method, PROMPT, GenerationConfig(24, temperature=1.0, seed=5), cycles.append)
    assert len(verdicts[2]) > 1 and cycles[3].tokens == verdicts[2]
    assert cycles[3].result.draft.path_of(verdicts[2][:-1])  # it is about this very draft
    links = [cycle.result.link for cycle in cycles]
    assert links.index("reconnected") == 4 and links.count("connected") == len(cycles) - 1


class LateReplies(Channel):
    """A channel to a server in this process. The reply to a draft is late if the draft is accepted
    in part: the larger a reply, the likelier it is late."""

    def __init__(self, service: Service):
        super().__init__(("", 0))
        self.service = service

    def connect(self) -> None:
        self.server = TargetSession(self.service, has_left=lambda: False)
        self.session = self.server.name
        self.sock = socket.socket()  # which nobody uses

    def send(self, fields: dict, tensors: dict) -> None:
        self.call = fields["call"]
        self.replies = self.server.parse(fields, tensors)()

    def receive(self) -> ReceivedMessage:
        fields, tensors = next(self.replies)
        if self.call == "verify" and fields["accepted"]:
            raise TimeoutError("timed out")
        return ReceivedMessage(fields, tensors, size=0)


def answers_with_late_replies(chance: Chance, cycles: int) -> Comparison:
    """Of answers that are interrupted after so many drafts."""
    target = new_target(VOCABULARY, layers=1)
    drafter = new_drafter(target)
    config = GenerationConfig(16, temperature=0.8)
    with ThreadPoolExecutor(1) as worker:
        service = Service(target, drafter, {}, worker)

        def run() -> list[int]:
            state = RemoteDraftState(drafter, 64, config.new_sampling("cpu"))
            verifier = ReconnectingVerifier(LateReplies(service), state, config)
            tokens = []
            answer = speculate(verifier, state, [0, 2, 1, 1], config, DraftLimits(1))
            for cycle in itertools.islice(answer, 1 + cycles):  # the first one is the prompt's
                tokens += cycle.tokens
            return tokens

        return compare(chance.branches(run), exact_texts(target, config, [0, 2, 1, 1]))


def test_where_large_replies_are_late_an_answer_is_distributed_as_the_targets_own(chance):
    check_distribution(answers_with_late_replies(chance, cycles=2))


def test_the_same_check_rejects_a_second_verdict_in_place_of_a_late_one(chance, monkeypatch):
    monkeypatch.setattr(Service, "find", lambda *request: None)
    assert answers_with_late_replies(chance, cycles=1).off > CLEARLY


def test_the_newest_reply_of_a_session_is_kept_for_a_while_and_for_nobody_else(models):
    with ThreadPoolExecutor(1) as worker:
        sessions = []
        connect = new_session(*models, worker)
        for _ in range(MAX_KEPT_REPLIES + 1):
            sessions.append(connect(lambda: False))
            [reply] = reply_to(sessions[-1], READ, {})

        def repeated(session: str, number: object) -> dict:
            request = {"call": "repeat", "session": session, "missed": number}
            [(fields, _)] = reply_to(sessions[-1], request, {})
            return fields

        newest = sessions[-1].name
        assert repeated(newest, 1) == reply[0]
        for session, number in ((newest, 2), (newest, "1"), ("", 1), (sessions[0].name, 1)):
            assert repeated(session, number) == {}
        reply_to(sessions[1], VERIFY, {"drafts": [], "parents": []})
        assert repeated(sessions[1].name, 1) == {} != repeated(sessions[1].name, 2)


# --- The server and its clients ---


@pytest.mark.parametrize("part", [b"", b"MoAs"])
def test_a_client_that_sends_nothing_more_is_disconnected(models, part, monkeypatch, capsys):
    monkeypatch.setattr(messages, "IDLE_SECONDS", 0.1)
    with serving_models(*models) as server:
        sock, _ = connect(server)
        with sock:
            sock.sendall(part)
            assert sock.recv(1) == b""
    assert capsys.readouterr().err == "127.0.0.1: timed out\n"


def read_text(sock: socket.socket, text: list[int], count: int = 24) -> None:
    """Ask for the token after a text, and do not wait for it."""
    fields, tensors = make_read(text, GenerationConfig(count), seed=0)
    send_message(sock, {**fields, "number": 1}, tensors)


def test_one_client_too_many_is_refused_in_one_line_until_another_leaves(models, monkeypatch):
    monkeypatch.setattr(messages, "PLACE_SECONDS", 0.1)
    target, drafter = models
    with serving_models(*models) as server, contextlib.ExitStack() as stack:
        sockets = []
        for _ in range(messages.MAX_CLIENTS):
            sock, _ = connect(server)
            sockets.append(stack.enter_context(sock))
        with pytest.raises(InputError, match="refused: .* already has 8 clients") as error:
            answer(over(channel_to(server), drafter), PROMPT, CONFIG)
        assert "\n" not in str(error.value)
        for sock in sockets[1:]:  # the server goes on serving the clients that it has
            read_text(sock, PROMPT)
            receive_message(sock, LIMIT, soon())
        sockets[0].close()
        monkeypatch.setattr(messages, "PLACE_SECONDS", 10.0)
        result = answer(over(channel_to(server), drafter), PROMPT, CONFIG)
    assert result.tokens == target_alone(target, 24)


def test_a_client_that_was_disconnected_while_it_was_idle_reconnects(models, monkeypatch):
    monkeypatch.setattr(messages, "IDLE_SECONDS", 0.3)
    target, drafter = models
    pauses = []

    def emit(cycle: TimedCycle) -> None:
        if len(pauses) < 3:
            pauses.append(cycle)
            time.sleep(0.5)

    with serving_models(*models) as server:
        result = watch(over(channel_to(server), drafter), PROMPT, CONFIG, emit)
    assert result.tokens == target_alone(target, 24)
    assert result.unverified == 0 and result.network["round_trips"] >= 1 + result.target_calls + 3


@contextlib.contextmanager
def stopped_worker(target: Llama, drafter: Drafter):
    """A server whose worker does nothing, and the event that lets it begin."""
    begin = threading.Event()
    with ThreadPoolExecutor(1) as worker:
        worker.submit(begin.wait)
        with serving(new_session(target, drafter, worker)) as server:
            yield server, begin
            begin.set()


def test_the_work_of_clients_that_have_left_is_dropped_and_their_places_are_free_at_once(
        models, monkeypatch):
    requests = []
    prefills = []
    parse = TargetSession.parse
    prefill = LocalVerifier.prefill
    monkeypatch.setattr(TargetSession, "parse", lambda *call: (
        requests.append(call) or parse(*call)))
    monkeypatch.setattr(LocalVerifier, "prefill", lambda *call: (
        prefills.append(call) or prefill(*call)))
    target, drafter = models
    with stopped_worker(*models) as (server, begin):
        for _ in range(20):  # more than there are places
            sock, _ = connect(server)
            with sock:
                read_text(sock, PROMPT)
                wait_for(lambda: requests)
            wait_for(lambda: not server.connections)
            requests.clear()
        threading.Timer(0.3, begin.set).start()
        result = answer(over(channel_to(server), drafter), PROMPT, CONFIG)
    assert result.tokens == target_alone(target, 24)
    assert len(prefills) == 1


def test_a_prompt_whose_client_has_left_is_not_read_to_its_end(monkeypatch):
    target = new_target(16, context=8192)
    drafter = new_drafter(target)
    pieces = []
    stop_if_client_left = TargetSession.stop_if_client_left

    def slow_piece(session: TargetSession, *progress) -> None:
        pieces.append(progress)
        time.sleep(0.05)
        stop_if_client_left(session)

    monkeypatch.setattr(TargetSession, "stop_if_client_left", slow_piece)
    for call in ("read", "generate"):
        pieces.clear()
        with serving_models(target, drafter) as server:
            sock, _ = connect(server)
            with sock:
                fields, tensors = make_read(PROMPT * 2000, GenerationConfig(24), seed=0)
                changes = {"call": call, "number": 1, "stop_ids": []}
                send_message(sock, fields | changes, tensors)
                wait_for(lambda: len(pieces) >= 2)
            wait_for(lambda: not server.connections)
        assert len(pieces) < 8  # a prompt of 8000 tokens has more


READ = {
    "call": "read",
    "number": 1,
    "max_new_tokens": 3,
    "temperature": 0.8,
    "top_p": 1.0,
    "seed": 0,
}
GENERATE = READ | {"call": "generate", "stop_ids": []}
VERIFY = {"call": "verify", "number": 2, "drafts": [1, 2, 1], "parents": [0, 1, 0]}  # a small tree
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
]
WRONG_NUMBERS = [{"number": number} for number in (None, 0, -1, 1.0, "1", 2**64)]
WRONG_DRAFTS = [
    *WRONG_NUMBERS,
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


def reply_to(session: TargetSession, right: dict, changes: dict) -> list[tuple[dict, dict]]:
    """All replies to such a request."""
    compute_replies = session.parse(*request(right, changes))
    return list(compute_replies())


@pytest.mark.parametrize("right, wrong", [
    *((READ, wrong) for wrong in WRONG_TEXTS + WRONG_NUMBERS),
    *((READ, {"known": known}) for known in (-1, 4, "all")),
    *((GENERATE, wrong) for wrong in ({"tokens": None}, {"max_new_tokens": 61})),
    *((GENERATE, {"stop_ids": stop_ids}) for stop_ids in (None, [[]])),
    *((VERIFY, wrong) for wrong in WRONG_DRAFTS)], ids=lambda value: str(value)[:40])
def test_a_malformed_request_is_refused_and_a_right_one_after_it_is_answered(models, right, wrong):
    with ThreadPoolExecutor(1) as worker:
        session = new_session(*models, worker)(lambda: False)
        if right is VERIFY:
            with pytest.raises(ValueError, match="drafts must follow a text"):
                reply_to(session, VERIFY, {})
            reply_to(session, READ, {})
        with pytest.raises((LookupError, TypeError, ValueError)):
            reply_to(session, right, wrong)
        (fields, _), *more = reply_to(session, right, {})
        assert 0 <= fields["token"] < 16
        assert len(more) == (2 if right["call"] == "generate" else 0)


@pytest.mark.parametrize("verified, parents, complaint", [
    (0, list(range(64)), "positions [0-9]+: expected an int from 0 to 64"),  # the context
    (5, [0] * 64, "slots in the cache [0-9]+: expected an int from 0 to 72")],
    ids=["chain", "siblings"])
def test_drafts_beyond_what_was_asked_for_are_refused(models, verified, parents, complaint):
    with ThreadPoolExecutor(1) as worker:
        session = new_session(*models, worker)(lambda: False)
        reply_to(session, READ, {"temperature": 0})
        for _ in range(verified):  # each adds a token to the server's cache
            reply_to(session, VERIFY, {"drafts": [], "parents": []})
        too_many = {"drafts": [1] * 64, "parents": parents}
        with pytest.raises(ValueError, match=f"invalid number of {complaint}$"):
            reply_to(session, VERIFY, too_many)


ODD = [
    None, -1, 0, 1, 3, 10**9, 2**70, 10**400, "0", [], {}, 1.5, math.nan, math.inf, True, [-1],
    [[]], "\ud800",
]
SHAPES = [(0,), (1,), (3,), (2, 16), (2, 16), (70,), (), (2**40, 0)]


def random_request(generator: random.Random) -> tuple[dict, dict]:
    """Fields and tensors of a request that is nearly right."""
    fields = GENERATE | VERIFY | {"session": "", "missed": 1}
    calls = ["read", "verify", "generate", "verify", "repeat", "stop"]
    fields["call"] = generator.choice(calls)
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
    drafter = new_drafter(target)
    generator = random.Random(0)
    whole = frame(READ, {"tokens": TEXT})
    with serving_models(target, drafter) as server:
        for number in range(500):
            sock = socket.create_connection(server.server_address, timeout=30)
            with sock, contextlib.suppress(OSError):
                sock.sendall(random_message(number, whole, generator))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
        wait_for(lambda: not server.connections)
        result = answer(over(channel_to(server), drafter), PROMPT, CONFIG)
        assert result.tokens == target_alone(target, 24)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 200
    assert all(line.startswith("127.0.0.1: ") for line in lines)


# --- Whole command lines, in processes of their own ---


class Processes(NamedTuple):
    """All are started at once, because most of their time is that of imports."""

    piped: subprocess.Popen  # its prompt comes from a pipe; all else, on a CPU, is the default
    server: subprocess.Popen  # until Ctrl-C
    alone: subprocess.Popen  # without drafts, from a server of its own, for minutes
    chat: subprocess.Popen  # on a terminal, over a slow link: its answers take a minute
    terminal: int  # our end of it


def start(*arguments: str, **streams) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "speculate.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"TERM": "dumb"},
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
def tiny(checkpoint) -> tuple[Llama, Tokenizer]:
    """The target of these command lines, and its tokenizer."""
    folder = checkpoint[1]
    return load_model(folder), load_tokenizer(folder)


@pytest.fixture
def command(checkpoint, monkeypatch, capsys):
    """Runs speculate.py in this process: (exit status, stdout, stderr)."""
    on_terminate = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["speculate.py", *checkpoint, *arguments])
        status = 0
        try:
            speculate_command.main()
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        return status, out, err

    yield run
    signal.signal(signal.SIGTERM, on_terminate)  # a server's handler is not for this process


@pytest.fixture(scope="module")
def processes(checkpoint):
    pipe = subprocess.PIPE
    outputs = dict(stdout=pipe, stderr=pipe, text=True)
    slow = ["--remote", "--max-new-tokens", "1700", *checkpoint]
    api = ["--no-speculation", "--bandwidth", "5kbit"]
    terminal, theirs = os.openpty()
    started = Processes(
        piped=start("--remote", "--latency", "21ms", "--device", "cpu", stdin=pipe, **outputs),
        server=start("--serve", "0", *checkpoint, **outputs),
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
    """The processes that a client has started: its server."""
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
    text = alone.stdout.read(20)  # the answer has begun
    target, tokenizer = tiny
    prompt = tokenizer.chat(ask("Why?"))
    whole = tokenizer.decode(list(generate(target, prompt, GenerationConfig(60))))
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


def test_the_command_line_gives_the_same_tokens_with_the_target_on_a_server_that_ctrl_c_ends(
        processes, command, tiny, monkeypatch):
    monkeypatch.setattr(client, "MIN_TIMEOUT", 0.2)
    target, tokenizer = tiny
    alone = list(generate(target, tokenizer.chat(ask("Why?")), CONFIG))
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
    assert status == 0
    assert "new tokens 24" in err and "disconnected True" in err
    host, port = address.split(":")
    with contextlib.ExitStack() as stack:
        idle = stack.enter_context(socket.create_connection((host, int(port))))
        busy = stack.enter_context(socket.create_connection((host, int(port))))
        receive_message(idle, LIMIT, soon())
        receive_message(busy, LIMIT, soon())
        fields, tensors = make_read(PROMPT, GenerationConfig(2000), seed=0)
        send_message(busy, fields | {"call": "generate", "stop_ids": []}, tensors)
        receive_message(busy, LIMIT, soon())  # the first token of many
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 130
    advice = f"connect with: python speculate.py --remote {address}"
    assert server.stderr.read() == f"{advice} (and this side's --model and --drafter)\n"


def test_the_prompt_may_come_from_a_pipe_and_the_target_from_a_server_of_our_own(
        processes, smollm2):
    _, tokenizer = smollm2
    dtype = DTYPES[choose_dtype("cpu", None)]
    model = pack(load_model("smollm2", "cpu", dtype))  # exact, also in bfloat16
    out = processes.piped.stdout.read()
    err = processes.piped.stderr.read()
    prompt = tokenizer.chat(ask("Say hi."))
    config = GenerationConfig(256, stop_ids=frozenset(tokenizer.stop_ids))
    assert processes.piped.wait(30) == 0, err
    assert out == tokenizer.decode(list(generate(model, prompt, config))) + "\n"
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
    ([*REMOTE, "http://localhost:7000"], "HOST:PORT"),
    ([*REMOTE, "localhost:99999"], "HOST:PORT"),
    (["--serve", "0.0.0.0:7000"], "ssh -L 7000:localhost:7000 server"),
    ([*REMOTE, "a..b:7000"], "no connection to a..b:7000"),
    ([*REMOTE, "127.0.0.1:9"], "no connection to 127.0.0.1:9"),
    ([*REMOTE, "[::1]:9"], "no connection to ::1:9"),
    ([*REMOTE, "127.0.0.1:9", "--no-speculation"], "no connection to 127.0.0.1:9")], ids=str)
def test_bad_input_ends_in_one_line_and_exit_status_2(arguments, complaint, command, impatient):
    status, out, err = command(*arguments)
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and complaint in err
