"""Client and server: the target's own tokens over any network, and a whole answer whatever becomes of the server."""
import contextlib
import hmac
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, run_script
from test_netsim import LIMIT, channel_to, frame, serving, soon
from test_speculate import (LENGTH, PROMPT, TEMPERATURE, VOCABULARY, WORDS, exact_distribution, excess, new_drafter,
                            new_target, target_alone)

import netsim
import speculate
from llama import GenerationConfig, InputError, Llama, generate, run_command
from moa import PROMPT_CHUNK, Drafter, TreeConfig, start_drafting
from netsim import DIGEST, NONCE, PROFILES, Channel, Link, MessageServer, Network, receive_message
from speculate import (OFFLINE_TOKENS, Generation, LocalTarget, Origin, RemoteTarget, TargetSession, answer, bench,
                       offline_quality, parse_reply, print_table, quantize_memory, remote_methods)

CHAIN, TREE = TreeConfig(4), TreeConfig(4, top_k=2, total_tokens=8)
CONFIG = GenerationConfig(24)
NAN = torch.full((1, 1, 1, 2, 8), math.nan)
QUESTION, HI = ["--prompt", "Why is the sky blue?", "--device", "cpu"], ["--prompt", "Hi", "--remote"]


@contextlib.contextmanager
def serving_models(target: Llama, drafter: Drafter, **choices):
    drafter.checkpoint_hash = "test"
    with ThreadPoolExecutor(1) as worker:
        worker.submit(int).result()  # its thread is none of the server's
        with serving(partial(TargetSession, target, drafter, worker), **choices) as server:
            yield server


@contextlib.contextmanager
def serving_elsewhere(target: Llama, drafter: Drafter, port: int = 0):
    """A server in a process of its own: the process and the address. Afterwards it is gone."""
    drafter.checkpoint_hash = "test"

    def serve() -> None:
        with ThreadPoolExecutor(1) as worker:
            server = MessageServer(("127.0.0.1", port), "", partial(TargetSession, target, drafter, worker))
            theirs.send(server.server_address)
            server.serve_forever()

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve)
    with ours, theirs:
        process.start()
        try:
            yield process, ours.recv()
        finally:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def models() -> tuple[Llama, Drafter]:
    target = new_target(16)
    return target, new_drafter(target)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(netsim, "MIN_TIMEOUT", 0.2)
    monkeypatch.setattr(speculate, "INITIAL_BACKOFF", 0.0)


def connect(server: MessageServer, secret: str = "", after: bytes = b"") -> tuple[socket.socket, dict]:
    """A connection that has answered the server's nonce, and the greeting."""
    sock = socket.create_connection(server.server_address, timeout=30)
    sock.sendall(hmac.digest(secret.encode(), sock.recv(NONCE, socket.MSG_WAITALL), "sha256") + after)
    return sock, receive_message(sock, LIMIT, soon())[0]


def wait_for(condition) -> None:
    deadline = soon(30)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# The target's own tokens ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("choices", [dict(target_layer_inference=2), dict(use_cross_attention=False)], ids=str)
def test_a_memory_in_8_bits_is_off_by_hardly_more_than_half_a_step_of_each_key_and_value(choices):
    target = new_target(16)
    drafter, cache = new_drafter(target, **choices), target.new_cache(9)
    memory = drafter.build_memory(PROMPT, cache, [0, 1, 2, 3], target.hidden(torch.tensor([PROMPT]), cache))
    tensors = quantize_memory(memory)
    _, received = parse_reply({"token": 0}, tensors, len(PROMPT), start_drafting(drafter, 9))
    assert {x.dtype for x in tensors.values()} == {torch.int8, torch.half}
    for sent, got in zip((memory.cross_kv, memory.reused_kv), received):
        step = sent.reshape(-1, 2, sent.shape[-1] // 2).abs().amax(-1, keepdim=True) / 127
        error = (got - sent).reshape(-1, 2, sent.shape[-1] // 2).abs()
        assert got.shape == sent.shape and (error <= 0.6 * step + 1e-6).all()


@pytest.mark.parametrize("choices", [
    dict(target_layer_inference=0), dict(target_layer_inference=2), dict(use_cross_attention=False),
    dict(use_layer_self_attention=False), dict(target_layer_inference=4, likeness=0.8)], ids=str)
def test_greedy_tokens_are_those_of_the_target_alone_over_every_network(choices, monkeypatch):
    target = new_target(16)
    drafter, alone = new_drafter(target, **choices), target_alone(target, 24)
    monkeypatch.setattr(netsim, "MIN_RETRANSMISSION", 0.002)
    links = [(link, 6, 0) for link in PROFILES.values()] + [(Link(0.001, 0.001, 1e7, 0.2), 24, n) for n in range(3)]
    ways = (CHAIN, False), (TREE, False), (TREE, True)
    with serving_models(target, drafter) as server, ThreadPoolExecutor(4) as clients:
        def run(link: Link, count: int, seed: int, *how) -> None:
            config, channel = GenerationConfig(count), channel_to(server, link, seed=seed)
            result = answer(target, drafter, PROMPT, config, *how, channel)
            assert result.tokens == alone[:count] and not result.disconnected
            assert result.stats["round_trips"] == 1 + result.stats["target_calls"]
        for done in [clients.submit(run, *link, *way) for link, way in itertools.product(links, ways)]:
            done.result()


@pytest.mark.parametrize("likeness, tree", [
    (0.0, CHAIN), (1.0, CHAIN), (0.0, TREE), (1.0, TREE), (1.0, TreeConfig(8, top_k=40, total_tokens=64))], ids=str)
def test_prompt_and_answer_may_fill_the_context_to_its_end(likeness, tree):
    target = new_target(16)
    drafter, count = new_drafter(target, target_layer_inference=4, likeness=likeness), 64 - len(PROMPT)
    with serving_models(target, drafter) as server:
        result = answer(target, drafter, PROMPT, GenerationConfig(count), tree, channel=channel_to(server))
    assert result.tokens == target_alone(target, count) and not result.disconnected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_plain_use_of_an_api_streams_what_the_target_writes_alone_with_the_same_seed(models, temperature):
    target = models[0]
    with serving_models(*models) as server:
        for seed, stop_ids in ((3, frozenset()), (4, frozenset()), (4, frozenset([5, 7]))):
            config = GenerationConfig(24, temperature, 0.9, seed, stop_ids)
            result = answer(target, None, PROMPT, config, tree=None, channel=channel_to(server))
            assert result.tokens == list(generate(target, PROMPT, config)) and result.stats["round_trips"] == 1
        with pytest.raises(InputError, match="the answer ends here"):
            answer(target, None, PROMPT, config, None, channel=channel_to(server, timeout=0.2, outage_after=2))


def sequences(target: Llama, drafter: Drafter, top_p: float, count: int, *how) -> torch.Tensor:
    counts = torch.zeros(VOCABULARY ** LENGTH)
    with serving_models(target, drafter) as server:
        for seed in range(count):
            config = GenerationConfig(LENGTH, TEMPERATURE, top_p, seed)
            tokens = answer(target, drafter, PROMPT, config, *how, channel_to(server)).tokens
            counts[sum(token * VOCABULARY ** i for i, token in enumerate(reversed(tokens)))] += 1
    return counts


@pytest.mark.parametrize("tree, top_p, lookup, choices", [
    (TreeConfig(2), 1.0, False, {}), (TreeConfig(2, 2, 4), 1.0, True, {}),
    (TreeConfig(2, 3, 6), 0.8, False, dict(target_layer_inference=1)),
    (TreeConfig(2, 2, 4), 1.0, False, dict(draft_vocabulary=(0, 2, 4)))], ids=str)
def test_whole_sequences_are_distributed_as_the_targets_own(tree, top_p, lookup, choices):
    target = new_target(VOCABULARY, layers=1)
    counts = sequences(target, new_drafter(target, **choices), top_p, 280, tree, lookup)
    assert excess(counts, exact_distribution(target, top_p)) < 4


def test_the_same_test_rejects_a_server_that_takes_another_q(monkeypatch):
    target, dequantize = new_target(VOCABULARY, layers=1), speculate.dequantize_probabilities
    monkeypatch.setattr(speculate, "dequantize_probabilities", lambda *sent: F.normalize(dequantize(*sent)**8, p=1))
    counts = sequences(target, new_drafter(target), 1.0, 400, TreeConfig(2), False)
    assert excess(counts, exact_distribution(target)) > 6


@pytest.mark.parametrize("tree", [TreeConfig(1), CHAIN, TREE], ids=["one", "chain", "tree"])
def test_the_server_rejects_by_the_very_q_that_the_drafts_were_drawn_from(tree, monkeypatch):
    target, sent, received = new_target(300, sharpness=5.0, context=128), [], []
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)
    ask, verify = RemoteTarget.verify_remote, LocalTarget.verify
    monkeypatch.setattr(RemoteTarget, "verify_remote", lambda self, draft: sent.append(draft) or ask(self, draft))
    monkeypatch.setattr(LocalTarget, "verify", lambda self, draft: received.append(draft) or verify(self, draft))
    with serving_models(target, drafter) as server:
        answer(target, drafter, PROMPT, GenerationConfig(100, 1.5, 0.3), tree, channel=channel_to(server))
    assert len(sent) == len(received) > 10
    for ours, theirs in zip(sent, received):
        assert (ours.token, ours.tokens, ours.parents) == (theirs.token, theirs.tokens, theirs.parents)
        if ours.tokens:
            row = {parent: i for i, parent in enumerate(sorted(set(ours.parents)))}
            assert all(ours.q[row[parent], token] > 0 for parent, token in zip(ours.parents, ours.tokens))
            assert ours.q.equal(theirs.q)


def test_eight_clients_at_once_each_get_their_own_answer_and_the_memory_of_a_long_prompt_comes_in_pieces():
    target = new_target(16, context=2048)
    drafter, long = new_drafter(target, target_layer_inference=2), [i * i % 13 for i in range(2 * PROMPT_CHUNK + 50)]
    prompts = [PROMPT + [number] for number in range(6)] + [long, long[:PROMPT_CHUNK]]
    with serving_models(target, drafter, max_clients=8) as server, ThreadPoolExecutor(8) as clients:
        results = clients.map(
            lambda prompt: answer(target, drafter, prompt, CONFIG, TREE, channel=channel_to(server)), prompts)
    for prompt, result in zip(prompts, results):
        assert result.tokens == list(generate(target, prompt, CONFIG))
        assert result.stats["round_trips"] == 1 + result.stats["target_calls"]


# Without the server --------------------------------------------------------------------------------------------------

def check(target: Llama, result: Generation, emitted: list[tuple[int, Origin]], count: int) -> list[bool]:
    """Of an answer during which the server was lost: no token lost or twice, and those that are called verified are the
    target's own choice after all text before them. Returns which are verified."""
    tokens, verified = [token for token, _ in emitted], [origin != Origin.UNVERIFIED for _, origin in emitted]
    own = target(torch.tensor([PROMPT + tokens[:-1]]))[0, len(PROMPT) - 1:].argmax(-1).tolist()
    assert tokens == result.tokens and len(tokens) == count
    assert all(token == best for token, best, sure in zip(tokens, own, verified) if sure)
    assert result.unverified() == verified.count(False)
    assert bool(result.disconnected) == (False in verified)
    return verified


@pytest.mark.parametrize("seed", range(12))
def test_an_outage_at_any_moment_costs_verification_only_for_as_long_as_it_lasts(seed, impatient):
    rng, target, emitted = random.Random(seed), new_target(16, context=128), []
    drafter = new_drafter(target, **rng.choice([{}, dict(target_layer_inference=2), dict(use_cross_attention=False)]))
    after = rng.randrange(1, 40)
    until, sockets = rng.choice([after + rng.randrange(45), math.inf]), len(os.listdir("/proc/self/fd"))
    tree, lookup = rng.choice([CHAIN, TREE]), rng.random() < 0.3

    def emit(*event) -> None:
        emitted.append(event)
        if len(emitted) >= until:
            channel.network.outage_seconds = 0.0

    with serving_models(target, drafter) as server:
        channel = channel_to(server, Link(0.002, 0.002), outage_after=after)
        result = answer(target, drafter, PROMPT, GenerationConfig(100), tree, lookup, channel, emit)
        wait_for(lambda: not server.connections)
    verified = check(target, result, emitted, 100)
    first, back = (verified + [False]).index(False), min(until, 100)
    assert first >= after and first < after + 6 + (until < first) * 100
    assert not any(verified[first:back]) and (until == math.inf or all(verified[back + OFFLINE_TOKENS:]))
    assert len(os.listdir("/proc/self/fd")) == sockets


@pytest.mark.parametrize("deed, seed", [("kill", n) for n in range(8)] + [("restart", 0), ("restart", 1), ("stop", 0)])
def test_a_server_that_is_lost_at_any_moment_costs_verification_until_it_is_back(deed, seed, impatient, monkeypatch):
    rng, target, emitted, threads = random.Random(seed), new_target(16, context=128), [], threading.active_count()
    drafter, moment = new_drafter(target, target_layer_inference=rng.choice([0, 2])), rng.randrange(1, 80)
    with contextlib.ExitStack() as stack:
        server, address = stack.enter_context(serving_elsewhere(target, drafter))
        killer = threading.Timer(rng.uniform(0, 0.01), server.kill)

        def emit(*event) -> None:
            emitted.append(event)
            if len(emitted) == moment and deed == "kill":
                killer.start()
            elif len(emitted) == moment and deed == "restart":
                server.kill()
                server.join()
                stack.enter_context(serving_elsewhere(target, drafter, address[1]))
            elif len(emitted) == moment:
                monkeypatch.setattr(netsim, "CONNECT_SECONDS", 0.1)
                os.kill(server.pid, signal.SIGSTOP)

        channel = Channel(address, "", Network(Link()))
        result = answer(target, drafter, PROMPT, GenerationConfig(100), CHAIN, channel=channel, emit=emit)
        [killer.join() for _ in range(deed == "kill")]
    verified = check(target, result, emitted, 100)
    assert all(verified) == (deed == "restart") and verified[:moment] == [True] * moment
    assert verified == sorted(verified, reverse=True) and threading.active_count() == threads  # what is gone stays so


def test_a_server_that_is_lost_while_it_reads_the_prompt_is_asked_again(models, impatient, monkeypatch):
    read, reads = TargetSession.read, []
    monkeypatch.setattr(TargetSession, "read", lambda session, *request: reads.append(request) or read(
        session, *(request if len(reads) > 1 else ({}, {}))))  # the first time, that is malformed
    with serving_models(*models) as server:
        result = answer(*models, PROMPT, CONFIG, CHAIN, channel=channel_to(server))
    assert len(reads) == 2 and result.tokens == target_alone(models[0], 24) and not result.unverified()


@pytest.mark.parametrize("fields, tensors", [
    *(({"token": token}, {}) for token in (16, -1, True, 2.0, "a", None, 10**400)),
    *(({"accepted": accepted}, {}) for accepted in ([3] * 9, None, [[]], 1)),
    *(({}, {name: tensor}) for name in ("cross", "cross_scale", "reused", "reused_scale") for tensor in (
        torch.zeros(3), torch.zeros(0), NAN, NAN.half(), torch.full_like(NAN, 1e300, dtype=torch.float64)))],
    ids=lambda value: str(value)[:20])
def test_malformed_replies_count_as_lost(fields, tensors, impatient, monkeypatch):
    target, emitted, replies, send = new_target(16, context=128), [], itertools.count(), netsim.Connection.send
    drafter = new_drafter(target, target_layer_inference=1)

    def send_malformed(connection, right: dict, right_tensors: dict = {}) -> None:
        wrong = "drafter" not in right and next(replies) >= 5
        send(connection, right | fields if wrong else right, right_tensors | tensors if wrong else right_tensors)

    monkeypatch.setattr(netsim.Connection, "send", send_malformed)
    with serving_models(target, drafter) as server:
        result = answer(target, drafter, PROMPT, GenerationConfig(60), CHAIN, emit=lambda *event: emitted.append(event),
                        channel=channel_to(server, timeout=0.3))
    verified = check(target, result, emitted, 60)  # only a verdict states what is accepted: a new connection helps
    assert verified.count(False) > 30 and verified.index(False) >= 5 or all(verified) and "accepted" in fields


def test_a_server_with_another_drafter_is_refused(models):
    with serving_models(models[0], new_drafter(models[0])) as server, pytest.raises(InputError, match="another"):
        models[1].checkpoint_hash = "other"
        answer(*models, PROMPT, CONFIG, CHAIN, channel=channel_to(server))


def test_a_target_that_produces_nan_ends_in_one_line(impatient, capsys):
    target = new_target(16)
    drafter = new_drafter(target)
    target.layers[0].input_layernorm.weight.data.fill_(math.nan)
    with serving_models(target, drafter) as server, pytest.raises(InputError, match="NaN") as error:
        answer(target, drafter, PROMPT, CONFIG, channel=channel_to(server))
    assert "\n" not in str(error.value) and "Traceback" not in capsys.readouterr().err


def test_the_benchmark_takes_every_network_and_cuts_each_once(models, capsys, impatient, monkeypatch):
    monkeypatch.setattr(speculate.tqdm, "monitor_interval", 0)  # its thread is none of the server's
    target, drafter, links = *models, {"wan": Link(), "4g": Link(0.001)}
    with serving_models(target, drafter) as server:
        channel = lambda link, seed, after=math.inf: channel_to(server, link, outage_after=after)
        methods = remote_methods(target, drafter, CHAIN, links, channel)
        rows = bench(target, methods, WORDS, [("a", ["one", "two"])], GenerationConfig(8))
    overall = {row["method"]: row for row in rows if row["category"] == "overall"}
    kinds = {name.split(":")[0] for name in overall}
    assert kinds == {"api", "remote", "remote+lookup", "disconnected"} and len(overall) == 2 * len(kinds)
    for name, row in overall.items():
        assert row["unverified_tokens"] > 0 if name.startswith("disconnected") else row["identical"] == 1
        assert row["bytes_up_per_token"] > 0 and row["round_trips_per_token"] > 0
    print_table(rows)
    assert "agreement" in capsys.readouterr().out


def test_the_benchmark_judges_what_was_written_offline_wherever_it_stands():
    target = new_target(16, context=128)
    base, mine = (Generation(PROMPT, target_alone(target, 60), [Origin.TARGET] * 60) for _ in range(2))
    mine.tokens[3] = (base.tokens[3] + 1) % VOCABULARY
    mine.origins = [Origin.UNVERIFIED if i in (2, 3, 7) else Origin.TARGET for i in range(60)]
    log_p = target(torch.tensor([PROMPT + mine.tokens]))[0].log_softmax(-1)
    nll = -sum(log_p[len(PROMPT) + i - 1, mine.tokens[i]].item() for i in (2, 3, 7)) / 3
    assert offline_quality(target, [mine], [base]) == {
        "unverified_tokens": 3, "agreement": 2 / 3, "perplexity": pytest.approx(math.exp(nll), rel=1e-4)}


# The server and its clients ------------------------------------------------------------------------------------------

def test_a_wrong_secret_is_refused_in_constant_time_before_more_is_read(models, impatient, monkeypatch, capsys):
    compared, sessions, compare, init = [], [], hmac.compare_digest, TargetSession.__init__
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or compare(a, b))
    monkeypatch.setattr(TargetSession, "__init__", lambda self, *models: sessions.append(1) or init(self, *models))
    with serving_models(*models, secret="tulip") as server:
        for secret, after in (("", b""), ("tulips", frame({"call": "read"})), ("tuli", bytes(1000))):
            sock, greeting = connect(server, secret, after)
            sock.close()
            assert greeting["refused"].startswith("wrong secret") and sessions == []
        with (socket.create_connection(server.server_address) as sock,
              socket.create_connection(server.server_address) as other):
            nonce, _ = (end.recv(NONCE, socket.MSG_WAITALL) for end in (sock, other))
            other.sendall(hmac.digest(b"tulip", nonce, "sha256"))  # an answer to another connection's nonce
            assert receive_message(other, LIMIT, soon())[0]["refused"].startswith("wrong secret")
        with pytest.raises(InputError, match="lost before its first token: the server refused: 'wrong secret"):
            answer(*models, PROMPT, CONFIG, channel=Channel(server.server_address, "rose", Network(Link())))
        assert answer(*models, PROMPT, CONFIG, CHAIN, channel=channel_to(server)).tokens == target_alone(models[0], 24)
    assert compared == [(DIGEST, DIGEST)] * 7 and len(sessions) == 1
    assert capsys.readouterr().err == "127.0.0.1: wrong secret\n" * 6


def test_neither_unauthenticated_clients_nor_ones_beyond_the_limit_keep_others_out(models):
    with serving_models(*models, max_clients=2) as server, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(server.server_address, 30)) for _ in range(40)]
        assert answer(*models, PROMPT, CONFIG, CHAIN, channel=channel_to(server)).tokens == target_alone(models[0], 24)
        assert len(server.unauthenticated) <= 8 and silent[0].recv(99)[NONCE:] == b""  # the oldest was disconnected
        socks = [connect(server) for _ in range(3)]
        assert [*socks[1][1]] == ["drafter"] and socks[2][1] == {"refused": "it has 2 clients, its limit"}
        [sock.close() for sock, _ in socks]
        wait_for(lambda: set(server.connections) == set(server.unauthenticated))
        assert answer(*models, PROMPT, CONFIG, CHAIN, channel=channel_to(server)).tokens == target_alone(models[0], 24)


@pytest.mark.parametrize("part, reason", [(b"", "disconnected after 0.1 s without a request"), (b"MoAs", "timed out")])
def test_a_client_that_sends_nothing_more_is_disconnected(models, part, reason, monkeypatch, capsys):
    with serving_models(*models, idle_seconds=0.1) as server:
        sock, _ = connect(server)
        monkeypatch.setattr(netsim, "CONNECT_SECONDS", 0.1)
        with sock:
            sock.sendall(part)
            assert sock.recv(1) == b""
    assert capsys.readouterr().err == f"127.0.0.1: {reason}\n"


READ = {"call": "read", "max_new_tokens": 3, "temperature": 0.8, "top_p": 1.0, "seed": 0, "stop_ids": []}


def random_request(rng: random.Random) -> tuple[dict, dict]:
    """A request that is nearly right."""
    odd = [None, -1, 0, 1, 3, 10**9, 2**70, 10**400, "0", [], {}, 1.5, math.nan, math.inf, True, [-1], [[]], "\ud800"]
    fields = READ | {"call": rng.choice(["read", "verify", "generate", "verify", "stop"]), "drafts": [1, 2, 1],
                     "parents": [-1, 0, -1], "temperature": rng.choice([0, 0.8])}
    fields |= {name: rng.choice(odd) for name in rng.sample(sorted(fields), rng.choice([0, 1, 1, 3]))}
    shapes, kinds = [(0,), (1,), (3,), (2, 16), (2, 16), (70,), (), (2**40, 0)], [torch.int32, torch.uint8, torch.half]
    tensors = {name: torch.randint(-1, rng.choice([2, 16, 17]), rng.choice(shapes)).to(rng.choice(kinds))
               for name in ("tokens", "ids", "weights") if rng.random() < 0.9}
    tensors |= {"ids": torch.randint(0, 16, (2, 16), dtype=torch.int32)} if rng.random() < 0.5 else {}
    return fields, tensors


def test_thousands_of_malformed_frames_leave_the_server_serving(models, capsys):
    rng, whole = random.Random(0), frame(READ, {"tokens": torch.tensor(PROMPT, dtype=torch.int32)})
    with serving_models(*models) as server:
        for number in range(3000):
            with socket.create_connection(server.server_address, timeout=30) as sock, contextlib.suppress(OSError):
                if number % 8 == 0:  # before the secret is known
                    sock.sendall(rng.randbytes(rng.randrange(64)))
                    continue
                at, cut, message = rng.randrange(len(whole)), rng.randrange(9), whole
                if number % 8 < 5:
                    message = whole[:at] + (rng.randbytes(rng.randrange(9)) + whole[at + cut:] if number % 2 else b"")
                else:
                    message = b"".join([whole][:number % 8 - 5] + [frame(*random_request(rng)) for _ in range(3)])
                sock.sendall(hmac.digest(b"", sock.recv(NONCE, socket.MSG_WAITALL), "sha256") + message)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
        wait_for(lambda: not server.connections)
        assert answer(*models, PROMPT, CONFIG, CHAIN, channel=channel_to(server)).tokens == target_alone(models[0], 24)
    lines = capsys.readouterr().err.splitlines()
    assert {line.split(":")[0] for line in lines} == {"127.0.0.1"} and len(lines) > 1500


# The command line ----------------------------------------------------------------------------------------------------

def test_the_command_line_gives_the_same_tokens_with_the_target_on_a_server(smollm2, monkeypatch, capsys):
    model, tokenizer = smollm2
    monkeypatch.setenv("MOA_SECRET", "tulip")
    command = [sys.executable, ROOT / "speculate.py", "--serve", "127.0.0.1:0", "--device", "cpu"]
    with (subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server,
          contextlib.ExitStack() as stack):
        stack.callback(server.terminate)
        alone = list(generate(model, tokenizer.chat([{"role": "user", "content": QUESTION[1]}]), CONFIG))
        address = server.stdout.readline().strip()
        for more in (["--network", "4g"], ["--network", "wan", "--no-speculation"]):
            arguments = ["--remote", address, "--json", "--max-new-tokens", "24", *QUESTION, *more]
            monkeypatch.setattr(sys, "argv", ["speculate.py", *arguments])
            run_command(speculate.main)
            result = json.loads(capsys.readouterr().out)
            assert result["tokens"] == alone and result["disconnected"] is False and result["unverified_tokens"] == 0
            assert min(result[name] for name in ("bytes_up", "bytes_down", "round_trips", "network_seconds")) > 0
        server.terminate()
        assert server.wait(30) == 0 and server.stderr.read() == ""


def test_the_command_line_finishes_its_answer_without_the_network():
    done = run_script("speculate.py", "--remote", "--disconnect-after", 9, "--max-new-tokens", 20, "--show", *QUESTION)
    assert done.returncode == 0 and "\033[33m" in done.stdout and "the drafter's own" in done.stderr


def is_running(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # a zombie has ended
    return False


def test_however_a_client_ends_its_own_server_ends_too():
    command = [sys.executable, ROOT / "speculate.py", "--remote", "--max-new-tokens", "1000", *QUESTION]
    start = partial(subprocess.Popen, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                    preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL))  # a shell's & ignores it
    with start() as interrupted, start() as killed:
        for client, end, status in ((interrupted, signal.SIGINT, 130), (killed, signal.SIGKILL, -9)):
            client.stdout.read(1)  # it is in the midst of its answer
            children = Path(f"/proc/{client.pid}/task/{client.pid}/children").read_text().split()
            assert children and all(map(is_running, children))
            os.killpg(client.pid, end) if end == signal.SIGINT else client.send_signal(end)  # Ctrl-C goes to both
            assert client.wait(30) == status and client.stderr.read() == b""
            wait_for(lambda: not any(map(is_running, children)))


@pytest.mark.parametrize("arguments, complaint", [
    ([*HI, "--latency", "21"], "a duration like"), ([*HI, "--loss", "5"], "a share like"),
    ([*HI, "--bandwidth", "5"], "a bandwidth like"), ([*HI, "--disconnect-after", "0"], "--disconnect-after"),
    ([*HI, "--network", "3g"], "--network"), ([*HI, "here"], "HOST:PORT"), ([*HI, "localhost:99999"], "HOST:PORT"),
    (["--serve", "1234"], "HOST:PORT"), (["--serve", "127.0.0.1:0", "--prompt", "Hi"], "not allowed with"),
    (["--serve", "0.0.0.0:0"], "to serve beyond this machine, set a secret"),
    (["--serve", "a..b:7000"], "cannot serve at a..b:7000"),
    ([*HI, "--total-tokens", "65"], "64"), ([*HI, "a..b:7000"], "no server at a..b:7000"),
    ([*HI, "127.0.0.1:9"], "no server at 127.0.0.1:9"), ([*HI, "--model", "some/model"], "no drafter is shipped"),
    ([*HI, "127.0.0.1:9", "--no-speculation"], "no server at 127.0.0.1:9")], ids=str)
def test_bad_input_ends_in_one_line_and_exit_status_2(arguments, complaint, impatient, monkeypatch, capsys, smollm2):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # a server's handler is not for this process
    monkeypatch.setattr(speculate, "load_target", lambda *_: smollm2)
    monkeypatch.setattr(Llama, "pack", lambda model: model)  # or it would be for all tests
    monkeypatch.delenv("MOA_SECRET", raising=False)
    monkeypatch.setattr(sys, "argv", ["speculate.py", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as exit:
        run_command(speculate.main)
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == "" and err.count("\n") == 1 and complaint in err
