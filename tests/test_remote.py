"""Client and server: the target's own tokens over any network, and a whole answer whatever becomes
of the server."""
import contextlib
import itertools
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Callable, Iterator

import pytest
import torch
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
from test_messages import serving, wait_for
from tiny_models import PROMPT, new_drafter, new_target, target_alone

from app import client
from app.answers import Generation, Method, OnServer, Origin, PlainApi, TimedCycle, answer
from app.client import (
    OFFLINE_TOKENS,
    Channel,
    Outage,
    ReconnectingVerifier,
    RemoteDraftState,
)
from app.server import Service, TargetSession
from llama import GenerationConfig, Llama, generate, probabilities
from moa import Draft, Drafter, DraftLimits
from netsim import PROFILES, Link, retransmission_timeout
from plumbing import messages
from plumbing.errors import InputError
from plumbing.messages import MessageServer, send_message
from speculate import LocalVerifier, speculate

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
    for seed, stop_ids in ((3, []), (4, []), (4, [5, 7])):
        config = GenerationConfig(24, temperature, 0.9, seed, frozenset(stop_ids))
        cycles = []
        with serving_models(*models) as server:
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
        with pytest.raises(InputError, match="the answer ends here: timed out"):
            watch(api_over(channel, target), PROMPT, CONFIG, cycles.append)
    tokens = [cycle.tokens[0] for cycle in cycles]
    assert 2 <= len(tokens) < 24  # those that had arrived, and no more
    assert tokens == target_alone(target, 24)[:len(tokens)]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain API use", "drafts"])
def test_an_outage_shorter_than_the_timeout_delays_tokens_and_loses_none(models, drafts):
    target, drafter = models
    link = Link(0.02)
    count = 24 if drafts else 48  # an API sends many at once
    moments = []  # when each cycle was complete
    with serving_models(*models) as server:
        channel = channel_to(server, link, after=5, seconds=0.3)
        method = over(channel, drafter) if drafts else api_over(channel, target)
        result = watch(
            method, PROMPT, GenerationConfig(count), lambda cycle: moments.append(time.monotonic())
        )
    assert result.tokens == target_alone(target, count)
    assert result.unverified == 0 and result.outage == "" and result.disconnected
    assert result.network["round_trips"] == (1 + result.target_calls if drafts else 1)
    begins = channel.outage.begins
    resumed = begins + 0.3 + retransmission_timeout(link)
    # (Some replies of an API may have arrived before the outage, but wait on a busy machine.)
    silence = [moment for moment in moments if begins + 0.15 < moment < resumed]
    assert silence == [] and moments[-1] > resumed


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
    (2, TREE, False, 19, 40)], ids=str)
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
        result = watch(method, PROMPT, GenerationConfig(60), cycles.append)
        wait_for(lambda: not server.connections)
    assert len(os.listdir("/proc/self/fd")) == open_files
    verified = check(target, result, cycles, 60)
    first_lost = (verified + [False]).index(False)
    assert first_lost >= after
    if until > after + limits.depth:
        assert first_lost <= after + limits.depth
    end = min(until, 60)
    assert not any(verified[first_lost:end])
    if until < math.inf:
        assert all(verified[until + OFFLINE_TOKENS:])
    offline = [cycle.result for cycle in cycles if cycle.is_offline]
    for result in offline[1:]:
        assert lookup or result.draft.tokens[1:] == []  # no server would verify a draft


@pytest.mark.parametrize("deed, moment, N", [
    ("kill", 1, 0),
    ("kill", 10, 2),
    ("kill", 25, 0),
    ("kill", 40, 2),
    ("restart", 15, 0),
    ("restart", 35, 2),
    ("stop", 15, 2)])
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
        result = watch(method, PROMPT, GenerationConfig(60), emit)
        if deed == "kill":
            killer.join()
    assert threading.active_count() == threads
    verified = check(target, result, cycles, 60)
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


WRONG_TENSORS = [
    lambda right: [1, 2],
    damaged([3], 0.0, torch.float32),
    damaged(None, math.nan, torch.float32),
    damaged(None, 1e300, torch.float64),  # infinite in float32
]
DAMAGES = [("token", lambda right, wrong=token: wrong) for token in (16, -1, True, 2.0, 10**400)]
DAMAGES += [("accepted", lambda right, wrong=wrong: wrong) for wrong in ([3] * 9, None, [[]])]
for tensor_name in ("ca", "ca_scale", "tli", "tli_scale"):
    DAMAGES += [(tensor_name, damage) for damage in WRONG_TENSORS]


@pytest.mark.parametrize("name, damage", DAMAGES, ids=lambda value: str(value)[:20])
def test_malformed_replies_count_as_lost(name, damage, impatient, monkeypatch):
    target = new_target(16, context=128)
    drafter = new_drafter(target, target_layer_inference=1)
    replies = itertools.count()
    cycles = []

    def send_malformed(sock, right: dict) -> None:
        if name in right and next(replies) >= 5:
            right = right | {name: damage(right[name])}
        send_message(sock, right)

    monkeypatch.setattr(messages, "send_message", send_malformed)
    with serving_models(target, drafter) as server:
        method = over(channel_to(server), drafter)
        result = watch(method, PROMPT, GenerationConfig(24), cycles.append)
    verified = check(target, result, cycles, 24)
    assert cycles[-1].is_offline
    assert verified.index(False) >= 5 and verified.count(False) > 5


@pytest.mark.parametrize("step, error", [
    ("app.client.send_message", TypeError("a bug")),
    ("app.client.wait", RuntimeError("a bug")),
    ("netsim.dequantize_kv", torch.OutOfMemoryError("CUDA out of memory")),
    ("netsim.dequantize_kv", RuntimeError("you tried to allocate 8 bytes"))], ids=repr)
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

    def send_floats(sock, reply: dict) -> None:
        if "accepted" in reply:
            reply = reply | {"accepted": [float(token) for token in reply["accepted"]]}
        send_message(sock, reply)

    monkeypatch.setattr(messages, "send_message", send_floats)
    with serving_models(target, drafter) as server:
        result = answer(over(channel_to(server), drafter), PROMPT, CONFIG)
    assert result.tokens == target_alone(target, 24)
    assert {type(token) for token in result.tokens} == {int}


def test_the_pause_after_a_failed_reconnection_begins_when_it_has_failed_and_doubles(monkeypatch):
    channel = Channel(("", 0))
    verifier = ReconnectingVerifier(channel, None, GenerationConfig())

    def fail() -> None:
        time.sleep(0.03)
        raise TimeoutError("no reply")

    def lose(draft: Draft) -> None:
        raise ConnectionError("not connected")

    monkeypatch.setattr(channel, "connect", fail)
    monkeypatch.setattr(verifier, "verify_online", lose)
    monkeypatch.setattr(verifier, "draft_offline", lambda reason: reason)
    for pause in (0.5, 1.0, 2.0):
        verifier.retry_at = 0.0
        assert verifier.verify(Draft(0)) == "no reply"
        assert verifier.retry_at - time.monotonic() == pytest.approx(pause, abs=0.02)
        assert verifier.verify(Draft(0)) == "not connected"  # too early to try again


REFUSALS = {
    "another target": "the server has another target; start both sides with the same",
    "NaN": "refused: .*NaN.*float32",
    "malformed request": "refused: .*invalid max_new_tokens 1000",
}


@pytest.mark.parametrize("drafts", [False, True], ids=["plain API use", "drafts"])
@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_ends_an_answer_in_one_line_that_says_why(kind, drafts):
    target = new_target(16)
    drafter = new_drafter(target)
    config = CONFIG
    with serving_models(target, drafter) as server:
        channel = channel_to(server)
        if kind == "another target":
            channel.fingerprints = {"target": "another"}
        elif kind == "NaN":
            target.norm.weight.data.fill_(math.nan)  # so the memory has none
        else:
            config = GenerationConfig(1000)  # more than the context has room for
        method = over(channel, drafter) if drafts else api_over(channel, target)
        with pytest.raises(InputError, match=REFUSALS[kind]) as error:
            answer(method, PROMPT, config)
    assert "\n" not in str(error.value)


# --- A verdict once drawn stands ---


@contextlib.contextmanager
def dropping(monkeypatch, *dropped: int):
    """Of the replies to an answer, which are numbered from 0, those of these numbers are lost."""
    receive = Channel.receive
    numbers = itertools.count()

    def receive_or_lose(channel: Channel) -> dict:
        reply = receive(channel)
        if next(numbers) in dropped:
            raise TimeoutError("timed out")
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "receive", receive_or_lose)
        yield


@pytest.mark.parametrize("lost, links", [
    ([3], ["reconnected"] * 2),  # the reply to a draft; then the text is read
    ([3, 4], ["reconnected"] * 2),  # and the same reply again
    ([3, 5], ["reconnected"] * 2 + ["reconnected"]),  # the reply to the draft, and that to the text
    ([3, 4, 5], ["offline", "reconnected"])], ids=str)
def test_a_verdict_that_was_drawn_stands_as_long_as_its_reply_can_be_repeated(
        lost, links, impatient, monkeypatch):
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.9)
    config = GenerationConfig(24, temperature=1.0, seed=5)
    verdicts = []
    cycles = []
    decide = TargetSession.decide

    def note(session: TargetSession, *request) -> Iterator[dict]:
        for reply in decide(session, *request):
            verdicts.append(reply["accepted"] + [reply["token"]])
            yield reply

    monkeypatch.setattr(TargetSession, "decide", note)
    with serving_models(target, drafter) as server, dropping(monkeypatch, *lost):
        result = watch(over(channel_to(server), drafter), PROMPT, config, cycles.append)
    seen = [cycle.result.link for cycle in cycles]
    assert seen == ["connected"] * 3 + links + ["connected"] * (len(cycles) - 3 - len(links))
    assert result.disconnected
    if "offline" not in links:
        # Every verdict is in the answer, once and in order.
        written = [cycle.result.accepted + [cycle.result.token] for cycle in cycles]
        assert written == verdicts
        assert result.outage == "" and len(verdicts[3]) > 1
        assert cycles[3].result.draft.path_of(verdicts[3][:-1])  # it is about this very draft


class LateReplies(Channel):
    """A channel to a server in this process. The reply to a draft is late if the draft is accepted
    in part: the larger a reply, the likelier it is late."""

    def __init__(self, service: Service):
        super().__init__(("", 0))
        self.service = service

    def connect(self) -> None:
        self.server = TargetSession(self.service)
        self.session = self.server.name
        self.number = 0

    def send(self, fields: dict) -> None:
        self.number += 1
        self.call = fields["call"]
        self.replies = self.server.parse(dict(fields))

    def receive(self) -> dict:
        reply = next(self.replies)
        if self.call == "verify" and reply["accepted"]:
            raise TimeoutError("timed out")
        return reply


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
    monkeypatch.setattr(Service, "keep", lambda *reply: None)
    assert answers_with_late_replies(chance, cycles=1).off > CLEARLY
