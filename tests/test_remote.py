"""Client and server: the target's own tokens over any network, and an answer whatever becomes of the server.

The sockets are real. Where time itself is not the matter the clock is virtual.
"""
import contextlib
import copy
import gc
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
from functools import partial

import pytest
import torch

import speculate
from conftest import ROOT, run_script
from llama import InputError, KVCache, Llama, generate, load_model, run_command
from moa import COARSE_TOKENS, PROMPT_CHUNK, Draft, Drafter, Drafting, Shape, chain_parents, from_coarse, to_coarse
from netsim import PROFILES, Link, Outage, VirtualClock, receive_message, send_message
from speculate import (Origin, Remote, Server, Settings, Window, answer, bench, fingerprint, print_table, quantise,
                       remote_methods, same_models)
from test_speculate import KEYS as LOCAL_KEYS
from test_speculate import (LENGTH, PROMPT, TEMPERATURE, VOCABULARY, WORDS, exact_distribution, excess, fixed, new_drafter,
                            new_target)

COSTS = {"draft": 0.002, "read": 0.03, "verify": 0.03, "token": 0.03}
SLOW_DRAFTS = partial(VirtualClock, {**COSTS, "draft": 0.1})  # so that an outage ends before the answer does
CHAIN, TREE = Shape(4), Shape(4, breadth=2, nodes=8)


@contextlib.contextmanager
def serving(target: Llama, drafter: Drafter, **choices):
    """A server in threads of this process; afterwards none of them is left."""
    before = threading.active_count()
    with Server(target, drafter, "127.0.0.1", 0, **choices) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
    assert threading.active_count() == before and not server.connections


def remote_to(server: Server, **choices) -> Remote:
    return Remote("127.0.0.1", server.server_address[1], **{"clock": partial(VirtualClock, COSTS), **choices})


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# What is sent --------------------------------------------------------------------------------------------------------

def test_a_memory_in_8_bits_is_off_by_half_a_step_of_its_own_scale():
    x = torch.randn(1, 3, 7, 2 * 8) * torch.logspace(-3, 3, 7).view(1, 1, 7, 1)
    values, scale = quantise(x)
    assert values.dtype == torch.int8 and scale.dtype == torch.float16 and scale.shape == (1, 3, 7, 2, 1)
    assert ((values * scale.float()).flatten(-2) - x).abs().le(0.51 * scale.float().expand(values.shape).flatten(-2)).all()


def test_a_counted_q_is_a_distribution_over_few_tokens_that_comes_through_unchanged():
    q = torch.softmax(3 * torch.randn(5, 300), dim=-1)
    sent = to_coarse(q)
    counted = from_coarse(*sent, 300)
    assert torch.allclose(counted.sum(-1), torch.ones(5)) and ((counted > 0).sum(-1) <= COARSE_TOKENS).all()
    assert (counted - q).abs().max() < 0.05
    assert torch.equal(from_coarse(*to_coarse(counted), 300), counted)


# The target's own tokens ---------------------------------------------------------------------------------------------

LINKS = {**PROFILES, "lossy": Link(0.02, 0.02, 1e6, 0.3)}


@pytest.mark.parametrize("choices", [
    dict(target_layer_inference=0), dict(target_layer_inference=2), dict(use_cross_attention=False),
    dict(use_layer_self_attention=False), dict(target_layer_inference=4, likeness=0.8)], ids=str)
def test_greedy_tokens_are_those_of_the_target_alone_over_every_network(choices):
    target = new_target(16)
    drafter = new_drafter(target, **choices)
    alone = answer(target, None, PROMPT, Settings(24)).tokens
    with serving(target, drafter) as server:
        for (name, link), float16, shape in itertools.product(LINKS.items(), (False, True), (CHAIN, TREE)):
            result = answer(target, drafter, PROMPT, fixed(shape), remote=remote_to(server, link=link, float16=float16))
            assert result.tokens == alone and not result.figures.disconnected, name
        for seed in range(12):
            lossy = remote_to(server, link=Link(0.02, 0.02, 1e6, 0.2))
            result = answer(target, drafter, PROMPT, fixed(CHAIN), seed=seed, remote=lossy)
            assert result.tokens == alone and not result.figures.disconnected, seed
        looking = fixed(TREE, lookup=(2, 1))
        assert answer(target, drafter, PROMPT, looking, remote=remote_to(server, link=LINKS["4g"])).tokens == alone
        assert answer(target, None, PROMPT, Settings(24), remote=remote_to(server)).tokens == alone  # plain use of an API


def test_the_handshake_counts_among_the_bytes_that_were_sent():
    target = new_target(16)
    drafter = new_drafter(target)
    with serving(target, drafter) as server:
        channel = remote_to(server).channel(drafter, 0)
        with socket.create_connection(server.server_address, timeout=30) as sock:
            sock.sendall(hmac.digest(b"", sock.recv(32, socket.MSG_WAITALL), "sha256"))
            assert (channel.bytes_up, channel.bytes_down) == (32, 32 + receive_message(sock, 4096)[2])
        channel.close()


def test_the_memory_of_a_long_prompt_comes_in_pieces():
    target, prompt = new_target(16, context=2048), [i * i % 13 for i in range(2 * PROMPT_CHUNK + 50)]
    drafter = new_drafter(target, target_layer_inference=2)
    with serving(target, drafter) as server:
        remote = answer(target, drafter, prompt, fixed(CHAIN, 12), remote=remote_to(server))
    assert remote.tokens == answer(target, None, prompt, Settings(12)).tokens
    assert remote.figures.round_trips == 1 + remote.figures.target_calls


@pytest.mark.parametrize("likeness", [0.0, 0.7, 1.0])
def test_drafts_on_the_way_save_the_time_that_the_server_would_wait(likeness, monkeypatch):
    target, fit = new_target(16, sharpness=3.0), Window.fit
    drafter, seconds = new_drafter(target, target_layer_inference=4, likeness=likeness), []
    with serving(target, drafter) as server:
        remote = remote_to(server, link=Link(0.1))
        for size in (fit, lambda *_: 1):
            monkeypatch.setattr(Window, "fit", size)
            result = answer(target, drafter, PROMPT, fixed(CHAIN, 60), remote=remote)
            assert result.tokens == answer(target, None, PROMPT, Settings(60)).tokens
            seconds.append(result.figures.verify_seconds)
    assert seconds[0] < 0.85 * seconds[1]


def test_a_window_grows_only_where_that_is_measured_to_bring_more():
    def settled(period) -> int:
        window, draft = Window(), Draft(1, [2, 3, 4], chain_parents(3))
        for _ in range(200):
            passes = window.fit(0.01, 0.06, 0.03) - 1
            window.judge(draft, passes, [2] if passes else [], [3])  # all is foreseen
            window.note(period(window.size))
        return window.size
    assert settled(lambda w: max(0.03, 0.1 / w)) == 4  # as its model has it: until passes follow each other
    assert settled(lambda w: 0.05 + 0.05 * w) == 1  # drafts delay each other, for a reason of which the model knows nothing


def test_on_a_long_way_bad_drafts_cost_hardly_more_than_plain_use_of_an_api():
    target, seconds = new_target(16, context=128), []
    drafter = new_drafter(target)
    with serving(target, drafter) as server:
        for whose in (drafter, None):
            clock = VirtualClock(COSTS)
            answer(target, whose, PROMPT, fixed(CHAIN, 100), remote=remote_to(server, link=Link(0.1), clock=lambda: clock))
            seconds.append(clock.now())
    assert seconds[0] < 1.3 * seconds[1]  # and not one round trip, seven passes long, for every token or two


def test_no_pass_is_asked_for_beyond_the_end_of_an_answer(monkeypatch):
    target, passes, verify = new_target(16, context=44), [], speculate.LocalTarget.verify
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)
    monkeypatch.setattr(speculate.LocalTarget, "verify", lambda self, draft: passes.append(draft) or verify(self, draft))
    for likeness, shape, way in itertools.product((0.0, 1.0), (CHAIN, TREE), (0.0, 0.3)):
        passes.clear()
        drafter = new_drafter(target, target_layer_inference=4, likeness=likeness)
        with serving(target, drafter) as server:
            result = answer(target, drafter, PROMPT, fixed(shape, 40), remote=remote_to(server, link=Link(way)))
            assert result.tokens == answer(target, None, PROMPT, Settings(40)).tokens  # to the context's last token
        assert len(passes) <= result.figures.target_calls + 7


@pytest.mark.parametrize("shape, top_p, choices, window", [
    (Shape(2), 1.0, {}, 1), (Shape(2, 2, 4), 1.0, dict(lookup=(2, 1)), 1),
    (Shape(2, 3, 6), 0.8, dict(target_layer_inference=1), 1),
    (Shape(2, 2, 4), 1.0, dict(draft_vocabulary=(0, 2, 4)), 1),
    (Shape(2), 1.0, {}, 2), (Shape(2, 3, 6), 0.8, {}, 2), (Shape(2, 2, 8), 1.0, dict(draft_vocabulary=(0, 2, 4)), 3)], ids=str)
def test_whole_sequences_are_distributed_as_the_targets_own(shape, top_p, choices, window, monkeypatch):
    target, choices = new_target(VOCABULARY, layers=1), dict(choices)
    settings = fixed(shape, LENGTH, temperature=TEMPERATURE, top_p=top_p, lookup=choices.pop("lookup", ()))
    drafter, counts = new_drafter(target, **choices), torch.zeros(VOCABULARY ** LENGTH)
    monkeypatch.setattr(Window, "fit", lambda *_: window)
    with serving(target, drafter) as server:
        remote = remote_to(server, link=PROFILES["4g"])
        for seed in range(600):
            tokens = answer(target, drafter, PROMPT, settings, seed, remote=remote).tokens
            counts[sum(token * VOCABULARY ** i for i, token in enumerate(reversed(tokens)))] += 1
    assert excess(counts, exact_distribution(target, top_p)) < 4


@pytest.mark.parametrize("shape", [Shape(1), CHAIN, TREE], ids=str)
@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_server_judges_drafts_by_the_very_q_that_they_were_drawn_from(shape, window, monkeypatch):
    target, said, heard = new_target(300, sharpness=5.0, context=128), [], []
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)
    pack, verify = speculate.pack_draft, speculate.LocalTarget.verify
    monkeypatch.setattr(speculate, "pack_draft", lambda draft: said.append((len(told), draft)) or pack(draft))
    monkeypatch.setattr(speculate.LocalTarget, "verify",
                        lambda self, draft: heard.append((self.cache.length, draft)) or verify(self, draft))
    monkeypatch.setattr(Window, "fit", lambda *_: window)
    late = 0
    with serving(target, drafter) as server:
        for seed in range(4):
            said.clear(), heard.clear(), (told := list(PROMPT))
            text = PROMPT + answer(target, drafter, PROMPT, fixed(shape, 100, temperature=1.5, top_p=0.3), seed,
                                   emit=lambda token, _: told.append(token), remote=remote_to(server, link=Link(0.05))).tokens
            wait_for(lambda: not server.connections)
            for (known, ours), (length, theirs) in zip(said, heard):
                if length >= len(text):
                    break  # a pass that was on its way when the answer was complete
                left = ours.behind(text[known:length + 1])
                assert (left.tokens, left.parents) == (theirs.tokens, theirs.parents)
                if ours.tokens:
                    family = {parent: i for i, parent in enumerate(sorted(set(ours.parents)))}
                    assert all(ours.q[family[parent], token] > 0 for parent, token in zip(ours.parents, ours.tokens))
                if left.tokens:
                    assert left.q.equal(theirs.q)
                    late += known <= length
    assert late > 10 or 1 in (window, shape.depth)  # nothing is left of a single draft behind another


def test_eight_clients_at_once_each_get_their_own_answer():
    target = new_target(16)
    drafter, results = new_drafter(target, target_layer_inference=2), {}
    with serving(target, drafter, most_clients=8) as server:
        def client(number: int) -> None:
            results[number] = answer(target, drafter, PROMPT + [number], fixed(TREE), remote=remote_to(server)).tokens
        clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        [thread.start() for thread in clients]
        [thread.join() for thread in clients]
    assert results == {number: answer(target, None, PROMPT + [number], Settings(24)).tokens for number in range(8)}


# Without the server --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("choices", [{}, dict(target_layer_inference=2), dict(use_cross_attention=False)], ids=str)
def test_to_assume_drafts_and_draft_on_is_to_draft_further(choices):
    target = new_target(16)
    drafter, cache = new_drafter(target, **choices), target.new_cache(16)
    memory = drafter.remember(PROMPT, cache, 0, target.hidden(torch.tensor([PROMPT]), cache))
    long, short, tree = (drafter.start(64) for _ in range(3))
    for drafting in (long, short, tree):
        drafting.observe(memory)
    expected, text, guess = long.draft(2, Shape(9)).tokens, [2], [2]
    for depth in (2, 3, 1, 3):
        draft = short.draft(text[-1], Shape(depth))
        short.assume([text[-1]] + draft.tokens[:-1])
        text += draft.tokens
    assert text == [2] + expected
    for depth in (2, 3, 1, 3):  # and other branches are forgotten
        draft = tree.draft(guess[-1], Shape(depth, 3, 12))
        path = long.draft(5, Shape(0)).tokens or [expected[len(guess) - 1 + i] for i in range(depth)]
        tree.assume([guess[-1]] + path[:-1])
        guess += path
    assert tree.draft(guess[-1], Shape(3)).tokens == short.draft(text[-1], Shape(3)).tokens


@pytest.mark.parametrize("seed", range(50))
def test_an_outage_costs_the_targets_word_only_for_as_long_as_it_lasts(seed):
    rng = random.Random(seed)
    target = new_target(16, context=128)
    drafter = new_drafter(target, **rng.choice([{}, dict(target_layer_inference=2), dict(use_cross_attention=False)]))
    after, seconds, emitted = rng.randrange(1, 40), rng.choice([0.05, 2.0, 2.4, math.inf]), []
    sockets = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    with serving(target, drafter) as server:
        remote = remote_to(server, link=PROFILES["4g"], outages=(Outage(tokens=after, seconds=seconds),), clock=SLOW_DRAFTS)
        result = answer(target, drafter, PROMPT, fixed(rng.choice([CHAIN, TREE]), 100), seed,
                        emit=lambda *event: emitted.append(event), remote=remote)
        wait_for(lambda: not server.connections)
    tokens = [token for token, _ in emitted]
    assert tokens == result.tokens and len(tokens) == 100  # nothing twice, nothing lost
    verified = [origin != Origin.UNVERIFIED for _, origin in emitted]
    known = verified.index(False) if False in verified else 100
    assert known >= after or known == 100
    assert tokens[:known] == answer(target, None, PROMPT, Settings(100)).tokens[:known]
    assert result.figures.unverified_tokens == verified.count(False)
    assert bool(result.figures.disconnected) == (False in verified)
    own = target(torch.tensor([PROMPT + tokens[:-1]]))[0, len(PROMPT) - 1:].argmax(-1).tolist()
    assert all(token == best for token, best, sure in zip(tokens, own, verified) if sure)  # given what was written before
    if seconds == math.inf:
        assert not any(verified[known:])
    assert not sockets or len(os.listdir("/proc/self/fd")) == sockets


def test_after_an_outage_that_ends_the_target_has_the_word_again():
    target = new_target(16, context=512)
    drafter = new_drafter(target)
    with serving(target, drafter) as server:
        remote = remote_to(server, link=Link(0.02), outages=(Outage(tokens=10, seconds=4.0),), clock=SLOW_DRAFTS)
        origins = []
        answer(target, drafter, PROMPT, fixed(CHAIN, 400), emit=lambda _, origin: origins.append(origin), remote=remote)
    assert Origin.UNVERIFIED in origins and origins[-1] != Origin.UNVERIFIED


def test_the_benchmark_takes_every_network_and_cuts_each_once(capsys, monkeypatch):
    monkeypatch.setattr(speculate.tqdm, "monitor_interval", 0)  # its thread is none of the server's
    target = new_target(16)
    drafter = new_drafter(target)
    with serving(target, drafter) as server:
        remotes = {name: remote_to(server) for name in ("wan", "4g")}
        methods = remote_methods(target, drafter, 0, (Shape(3),), remotes, 8)
        rows = bench(target, methods, WORDS, [("a", ["one", "two"])], Settings(8, adaptive=False))
    overall = {row["method"]: row for row in rows if row["category"] == "overall"}
    assert set(overall) == {f"{kind}:{name}" for name in remotes for kind in ("api", "remote", "remote+lookup", "disconnected")}
    for name, row in overall.items():
        assert row["unverified_tokens"] > 0 if name.startswith("disconnected") else row["identical"] == 1
        assert row["bytes_up_per_token"] > 0 and row["round_trips_per_token"] > 0
    print_table(rows)
    assert "agreement" in capsys.readouterr().out


def test_the_benchmark_judges_what_was_written_without_the_server_wherever_it_stands():
    target = new_target(16, context=512)
    drafter = new_drafter(target)
    base = answer(target, None, PROMPT, Settings(60))
    mine = answer(target, None, PROMPT, Settings(60))
    mine.tokens[3] = (base.tokens[3] + 1) % VOCABULARY
    mine.origins = [Origin.UNVERIFIED if i in (2, 3, 7) else Origin.TARGET for i in range(60)]
    figures = speculate.aftermath(target, [mine], [base])
    log_p = target(torch.tensor([PROMPT + mine.tokens]))[0].log_softmax(-1)
    nll = -sum(log_p[len(PROMPT) + i - 1, mine.tokens[i]].item() for i in (2, 3, 7)) / 3
    assert figures == {"unverified_tokens": 3, "agreement": 2 / 3, "perplexity": pytest.approx(math.exp(nll), rel=1e-4)}


def test_plain_use_of_an_api_says_when_the_server_is_gone(monkeypatch):
    target = new_target(16)
    drafter, waits = new_drafter(target), []
    receive = speculate.Channel.receive
    monkeypatch.setattr(speculate.Channel, "receive", lambda self, timeout: waits.append(timeout) or receive(self, timeout))
    with serving(target, drafter) as server, pytest.raises(InputError, match="the answer ends here"):
        answer(target, None, PROMPT, Settings(24), remote=remote_to(server, outages=(Outage(tokens=2),)))
    assert waits == [speculate.PREFILL_SECONDS] + [speculate.OVERDUE_SECONDS] * (len(waits) - 1)


@pytest.mark.parametrize("slow, after", [(4.0, 0), (2.0, 30)])
def test_a_server_that_is_slow_is_not_taken_for_one_that_is_gone(slow, after):
    target, costs, origins = new_target(16, context=512), {**COSTS, "draft": 0.1}, []
    drafter = new_drafter(target)

    def emit(token: int, origin: Origin) -> None:
        origins.append(origin)
        if len(origins) == after:
            costs.update(read=slow, verify=slow)

    with serving(target, drafter) as server:
        if after == 0:
            costs.update(read=slow, verify=slow)
        remote = remote_to(server, link=Link(0.02), clock=partial(VirtualClock, costs))
        result = answer(target, drafter, PROMPT, fixed(CHAIN, 400), emit=emit, remote=remote)
    assert Origin.UNVERIFIED not in origins[:after] and Origin.UNVERIFIED not in origins[200:]
    assert after > 0 or result.figures.unverified_tokens == 0
    calls = origins.count(Origin.TARGET) - 1  # each brings one token of the target's own; the limit may cut off the last
    assert result.figures.target_calls in (calls, calls + 1)


@contextlib.contextmanager
def forked(target: Llama, drafter: Drafter, port: int = 0):
    """A server in a process of its own: the process and the port. Afterwards it is gone."""
    ours, theirs = multiprocessing.Pipe()

    def child() -> None:
        server = Server(target, drafter, "127.0.0.1", port)
        theirs.send(server.server_address[1])
        server.serve_forever()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    try:
        yield process, ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()
        theirs.close()


def end_of_truth(emitted: list[tuple[int, Origin]], alone: list[int]) -> int:
    """How many tokens came before the first unverified one; they are the target's."""
    known = [origin for _, origin in emitted + [(0, Origin.UNVERIFIED)]].index(Origin.UNVERIFIED)
    assert [token for token, _ in emitted[:known]] == alone[:known]
    return known


@pytest.mark.parametrize("seed", range(50))
def test_a_server_that_is_killed_at_any_moment_costs_its_word_and_nothing_else(seed):
    rng, target, emitted, threads = random.Random(seed), new_target(16, context=128), [], threading.active_count()
    drafter = new_drafter(target, target_layer_inference=rng.choice([0, 2]))
    with forked(target, drafter) as (process, port):
        killer = threading.Timer(rng.uniform(0, 0.15), process.kill)

        def emit(*event) -> None:
            emitted.append(event)
            if len(emitted) == 1:
                killer.start()

        remote = Remote("127.0.0.1", port, clock=partial(VirtualClock, COSTS))
        result = answer(target, drafter, PROMPT, fixed(CHAIN, 100), seed, emit, remote=remote)
        killer.join()
    assert len(emitted) == 100 and [token for token, _ in emitted] == result.tokens
    known = end_of_truth(emitted, answer(target, None, PROMPT, Settings(100)).tokens)
    assert result.figures.unverified_tokens == 100 - known
    assert threading.active_count() == threads


def test_a_server_that_restarts_between_two_messages_is_told_everything_again():
    target, emitted = new_target(16, context=128), []
    drafter = new_drafter(target, target_layer_inference=2)
    with contextlib.ExitStack() as stack:
        first, port = stack.enter_context(forked(target, drafter))

        def emit(*event) -> None:
            emitted.append(event)
            if len(emitted) == 20:
                first.kill()
                first.join()
                stack.enter_context(forked(target, drafter, port))

        remote = Remote("127.0.0.1", port, clock=partial(VirtualClock, COSTS))
        result = answer(target, drafter, PROMPT, fixed(CHAIN, 100), emit=emit, remote=remote)
    assert len(emitted) > 20 and result.tokens == answer(target, None, PROMPT, Settings(100)).tokens


def test_a_server_that_dies_while_it_reads_the_prompt_and_restarts_is_asked_again(monkeypatch):
    target, read, reads = new_target(16), speculate.Session.read, []
    drafter = new_drafter(target)

    def hang_up_once(session, *request) -> None:
        reads.append(request)
        if len(reads) == 1:
            raise ConnectionError
        read(session, *request)

    monkeypatch.setattr(speculate.Session, "read", hang_up_once)
    with serving(target, drafter) as server:
        result = answer(target, drafter, PROMPT, fixed(CHAIN), remote=remote_to(server))
    assert len(reads) == 2 and result.tokens == answer(target, None, PROMPT, Settings(24)).tokens
    assert not result.figures.disconnected and not result.figures.unverified_tokens


def test_a_server_that_hung_up_on_a_client_that_paused_is_asked_again():
    target, emitted = new_target(16, context=128), []
    drafter = new_drafter(target)

    def emit(*event) -> None:
        emitted.append(event)
        if len(emitted) == 20:
            time.sleep(1)

    with serving(target, drafter, idle_seconds=0.3) as server:
        remote = Remote("127.0.0.1", server.server_address[1])
        result = answer(target, drafter, PROMPT, fixed(CHAIN, 60), emit=emit, remote=remote)
    assert result.tokens == answer(target, None, PROMPT, Settings(60)).tokens and result.figures.unverified_tokens == 0


@pytest.mark.parametrize("speculative", [True, False])
def test_what_is_wrong_with_the_servers_models_it_says_in_one_line(speculative, capsys):
    target = new_target(16)
    drafter = new_drafter(target)
    target.norm.weight.fill_(math.nan)
    with serving(target, drafter) as server, pytest.raises(InputError):
        answer(target, drafter if speculative else None, PROMPT, fixed(CHAIN), remote=remote_to(server))
    message, = set(capsys.readouterr().err.splitlines())  # of every attempt
    assert "the model computes no numbers" in message


def test_a_drafter_that_computes_no_numbers_is_said_to():
    target = new_target(16)
    drafter = new_drafter(target)
    with serving(target, drafter) as server, pytest.raises(InputError, match="the drafter computes no numbers"):
        spoilt = copy.deepcopy(drafter)
        spoilt.self_attention.mlp.down_proj.weight.fill_(math.nan)
        answer(target, spoilt, PROMPT, fixed(CHAIN), remote=remote_to(server, outages=(Outage(tokens=3),)))


def test_a_connection_whose_reply_is_long_overdue_is_given_up_for_a_new_one(monkeypatch):
    target, emitted, stopped = new_target(16, context=128), [], []
    drafter, verify, never = new_drafter(target), speculate.Session.verify, threading.Event()

    def stop_once(session, *request) -> None:
        if len(emitted) > 20 and not stopped:
            stopped.append(True)
            never.wait()
        else:
            verify(session, *request)

    monkeypatch.setattr(speculate, "OVERDUE_SECONDS", 0.0)
    monkeypatch.setattr(speculate.Session, "verify", stop_once)
    with serving(target, drafter) as server:
        result = answer(target, drafter, PROMPT, fixed(CHAIN, 100), emit=lambda *event: emitted.append(event),
                        remote=Remote("127.0.0.1", server.server_address[1]))
        never.set()
    assert 20 <= end_of_truth(emitted, answer(target, None, PROMPT, Settings(100)).tokens) < 100
    assert result.figures.unverified_tokens > 0 and emitted[-1][1] != Origin.UNVERIFIED


def test_a_server_with_another_drafter_of_the_same_size_is_refused():
    target = new_target(16)
    drafter, other = new_drafter(target), new_drafter(target)
    torch.nn.init.normal_(other.Ekv2E.bias)
    with serving(target, other) as server, pytest.raises(InputError, match="another target or drafter"):
        answer(target, drafter, PROMPT, fixed(CHAIN), remote=remote_to(server))


def test_a_server_that_hangs_is_waited_for_no_longer_than_its_round_trips_suggest():
    target, emitted = new_target(16, context=128), []
    drafter = new_drafter(target)
    with forked(target, drafter) as (process, port):
        def emit(*event) -> None:
            emitted.append(event)
            if len(emitted) == 60:
                os.kill(process.pid, signal.SIGSTOP)

        result = answer(target, drafter, PROMPT, fixed(CHAIN, 100), emit=emit, remote=Remote("127.0.0.1", port))
    assert len(result.tokens) == 100 and "no answer" in result.figures.disconnected
    assert end_of_truth(emitted, answer(target, None, PROMPT, Settings(100)).tokens) >= 60


NOISE = torch.full((1, 1, 1, 2, 8), math.nan, dtype=torch.float16)


def test_accepted_tokens_are_those_of_the_draft_whatever_the_server_calls_them():
    tokens = speculate.along(Draft(2, [9, 6], [-1, 0]), [9.0, 6.0])
    assert tokens == [2, 9, 6] and all(type(token) is int for token in tokens)


@pytest.mark.parametrize("rubbish", [
    lambda fields, tensors: ({}, {}), lambda fields, tensors: (fields | {"work": "?"}, tensors),
    lambda fields, tensors: (fields | {"token": 16}, tensors), lambda fields, tensors: (fields | {"token": "a"}, tensors),
    lambda fields, tensors: (fields | {"accepted": [3, 3, 3, 3, 3]}, tensors),
    lambda fields, tensors: (fields | {"accepted": {}}, tensors),
    lambda fields, tensors: (fields | {"accepted": [[]]}, tensors),
    lambda fields, tensors: (fields, {}), lambda fields, tensors: (fields, tensors | {"cross": torch.zeros(3)}),
    lambda fields, tensors: (fields, {"cross": NOISE}), lambda fields, tensors: (fields, tensors | {"cross_scale": NOISE}),
    None], ids=str)
def test_a_server_that_answers_rubbish_is_as_good_as_gone(rubbish, monkeypatch):
    target, emitted, replies, reply = new_target(16, context=128), [], itertools.count(), speculate.Session.reply
    drafter = new_drafter(target)

    def misreply(session, work: str, fields: dict, tensors: dict) -> None:
        if next(replies) < 5:
            return reply(session, work, fields, tensors)
        if rubbish is None:
            return session.request.sendall(random.Random(0).randbytes(1000))
        fields, tensors = rubbish({"work": work, "elapsed": 0.0, "accepted": [], **fields}, tensors)
        send_message(session.request, fields, tensors)

    monkeypatch.setattr(speculate.Session, "reply", misreply)
    with serving(target, drafter) as server:
        result = answer(target, drafter, PROMPT, fixed(Shape(4), 60), emit=lambda *event: emitted.append(event),
                        remote=remote_to(server))
    assert len(result.tokens) == 60 and result.figures.unverified_tokens > 30
    assert end_of_truth(emitted, answer(target, None, PROMPT, Settings(60)).tokens) >= 5


# The server and its peers --------------------------------------------------------------------------------------------

READ = {"call": "read", "start": 0, "capacity": 99, "float16": False, "temperature": 0.8, "top_p": 1.0, "seed": 0}


def connect(server: Server, secret: str = "") -> socket.socket:
    """A connection that has passed the handshake."""
    sock = socket.create_connection(server.server_address, timeout=30)
    sock.sendall(hmac.digest(secret.encode(), sock.recv(32, socket.MSG_WAITALL), "sha256"))
    receive_message(sock, 4096)
    return sock


def test_silent_strangers_keep_nobody_out():
    target = new_target(16)
    drafter = new_drafter(target)
    with serving(target, drafter, most_clients=2) as server:
        strangers = [socket.create_connection(server.server_address, timeout=30) for _ in range(40)]
        assert answer(target, drafter, PROMPT, fixed(CHAIN), remote=remote_to(server)).tokens
        assert len(server.strangers) <= 8 and strangers[0].recv(99)[32:] == b""  # the oldest was hung up on
        for stranger in strangers:
            stranger.close()


def test_a_client_without_the_secret_is_told_so_and_nothing_else(capsys):
    target = new_target(16)
    drafter = new_drafter(target)
    with serving(target, drafter, secret="tulip") as server:
        for wrong in ("", "tulips"):
            with pytest.raises(InputError, match="wrong secret"):
                answer(target, drafter, PROMPT, fixed(CHAIN), remote=remote_to(server, secret=wrong))
        tokens = answer(target, drafter, PROMPT, fixed(CHAIN), remote=remote_to(server, secret="tulip")).tokens
    assert tokens == answer(target, None, PROMPT, Settings(24)).tokens
    assert capsys.readouterr().err.count("\n") == 2


def test_an_answer_to_the_secrets_question_is_good_for_one_connection_only():
    target = new_target(16)
    with serving(target, new_drafter(target), secret="tulip") as server:
        for kind in ("models", "refused"):  # said once, and then again by someone who has listened
            with socket.create_connection(server.server_address, 10) as sock:
                nonce = sock.recv(32, socket.MSG_WAITALL)
                digest = hmac.digest(b"tulip", nonce, "sha256") if kind == "models" else digest  # noqa: F821
                sock.sendall(digest)
                assert kind in receive_message(sock, 4096)[0]


def test_a_place_that_cannot_be_served_at_is_an_input_error():
    target = new_target(16)
    drafter = new_drafter(target)
    with serving(target, drafter) as server:
        for host, port in (server.server_address, ("no.such.host.invalid", 7000)):
            with pytest.raises(InputError, match="cannot serve at"):
                Server(target, drafter, host, port)


def test_beyond_this_machine_a_secret_is_required():
    target = new_target(16)
    with pytest.raises(InputError, match="MOA_SECRET"):
        Server(target, new_drafter(target), "0.0.0.0", 0)
    with Server(target, new_drafter(target), "0.0.0.0", 0, secret="tulip"):
        pass


def test_a_drafter_is_the_same_to_both_sides_in_whatever_type_each_has_it():
    drafter = new_drafter(new_target(16))
    drafter.Ekv2E.bias.data.normal_()  # float32, as a checkpoint may be stored
    marks = [fingerprint(drafter.to(dtype)) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    assert all(same_models(a, b) for a in marks for b in marks)
    drafter.Ekv2E.bias.data[3] += 0.1
    assert not same_models(fingerprint(drafter), marks[0])
    words = marks[0] | {"bias": ["x"] * len(marks[0]["bias"])}
    assert not any(same_models(rubbish, marks[0]) for rubbish in (None, 1, [], {}, words))


def test_both_sides_must_speak_of_the_same_models():
    target = new_target(16)
    with serving(target, new_drafter(target)) as server:
        with pytest.raises(InputError, match="another target or drafter"):
            answer(target, new_drafter(target, target_layer_inference=1), PROMPT, fixed(CHAIN), remote=remote_to(server))


def test_a_client_too_many_is_told_that_the_server_is_full():
    target = new_target(16)
    drafter = new_drafter(target)
    with serving(target, drafter, most_clients=2) as server:
        guests = [connect(server), connect(server)]
        with pytest.raises(InputError, match="full"):
            answer(target, drafter, PROMPT, fixed(CHAIN), remote=remote_to(server))
        guests.pop().close()
        wait_for(lambda: len(server.connections) == 1)
        assert answer(target, drafter, PROMPT, fixed(CHAIN), remote=remote_to(server)).tokens
        guests.pop().close()


def test_a_silent_client_is_dropped_and_its_cache_freed(capsys):
    target = new_target(16)
    drafter = new_drafter(target)
    caches = lambda: sum(type(thing) is KVCache and thing.capacity == 99 for thing in gc.get_objects())
    with serving(target, drafter, idle_seconds=0.2) as server:
        sock = connect(server)
        send_message(sock, READ, {"tokens": torch.tensor(PROMPT, dtype=torch.int32)})
        receive_message(sock, 1 << 20)
        assert caches() == 1
        wait_for(lambda: not server.connections)
        assert caches() == 0 and sock.recv(1) == b""
        sock.close()
    assert "silent" in capsys.readouterr().err


def random_request(rng: random.Random) -> tuple[dict, dict]:
    """A request that is nearly right."""
    odd = [None, -1, 0, 1, 3, 10**9, 2**70, "0", [], {}, 1.5, math.nan, math.inf, True]
    fields = READ | {"call": rng.choice(["read", "verify", "generate", "verify", "stop", None, []]), "token": 1,
                     "start": rng.choice([0, 4]), "temperature": rng.choice([0, 0.8]), "max_new_tokens": 3, "stop_ids": []}
    fields |= {name: rng.choice(odd) for name in rng.sample(sorted(fields), rng.choice([0, 1, 1, 3]))}
    shapes = [(0,), (1,), (3,), (3,), (3,), (70,), (2, 2), (), (3, 16)]
    kinds = [torch.int32, torch.int32, torch.uint8, torch.float16, torch.int64]
    tensors = {name: torch.randint(-1, rng.choice([2, 16, 17]), rng.choice(shapes)).to(rng.choice(kinds))
               for name in ("tokens", "drafts", "parents", "ids", "counts") if rng.random() < 0.9}
    return fields, tensors


def test_thousands_of_bad_frames_harm_nobody_else(capsys):
    rng, target, (near, far) = random.Random(0), new_target(16), socket.socketpair()
    drafter = new_drafter(target)
    send_message(near, READ, {"tokens": torch.tensor(PROMPT, dtype=torch.int32)})
    whole = far.recv(1 << 16)  # the bytes of a good message
    near.close()
    far.close()
    with serving(target, drafter) as server:
        for number in range(1500):
            if number % 10 == 0:  # before the secret is known
                with socket.create_connection(server.server_address, timeout=30) as sock:
                    sock.sendall(rng.randbytes(rng.randrange(64)))
                continue
            with connect(server) as sock, contextlib.suppress(OSError):
                if number % 3 == 0:
                    sock.sendall(whole[:rng.randrange(len(whole))])
                elif number % 3 == 1:
                    at = rng.randrange(len(whole))
                    sock.sendall(whole[:at] + rng.randbytes(rng.randrange(9)) + whole[at + rng.randrange(9):])
                else:
                    sock.sendall(whole)
                    for _ in range(3):
                        send_message(sock, *random_request(rng))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
        wait_for(lambda: not server.connections)
        tokens = answer(target, drafter, PROMPT, fixed(CHAIN), remote=remote_to(server)).tokens
    assert tokens == answer(target, None, PROMPT, Settings(24)).tokens
    assert "Traceback" not in capsys.readouterr().err


# The default model, and the command line -----------------------------------------------------------------------------

def test_a_client_needs_only_the_layers_that_its_drafter_reuses(smollm2):
    whole, part = smollm2[0], load_model("smollm2", last=2)
    assert len(part.layers) == 2 and part.config == whole.config
    theirs = dict(whole.layers[-2:].named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in part.layers.named_parameters())
    assert torch.equal(part.lm_head.weight, whole.lm_head.weight)


REMOTE_KEYS = {"bytes_up", "bytes_down", "round_trips", "network_seconds", "unverified_tokens", "disconnected"}


def servers() -> set[str]:
    """Processes of this machine that serve."""
    return set(subprocess.run(["pgrep", "-f", f"{ROOT}/speculate.py --serve"], capture_output=True, text=True).stdout.split())


def test_the_command_line_gives_the_same_tokens_with_the_target_elsewhere(smollm2):
    model, tokenizer = smollm2
    prompt, before = tokenizer.chat([{"role": "user", "content": "Why is the sky blue?"}]), servers()
    done = run_script("speculate.py", "--remote", "--latency", "21ms", "--prompt", "Why is the sky blue?",
                      "--max-new-tokens", "24", "--json", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == LOCAL_KEYS | REMOTE_KEYS and result["bytes_down"] > result["bytes_up"] > 0
    assert result["disconnected"] or result["tokens"] == list(generate(model, prompt, 24))  # unless this machine stalls
    assert servers() == before


def test_the_command_line_finishes_its_answer_without_the_network():
    before = servers()
    done = run_script("speculate.py", "--remote", "--network", "4g", "--disconnect-after", "20", "--max-new-tokens", "40",
                      "--prompt", "Why is the sky blue?", "--show", "--device", "cpu")
    assert done.returncode == 0 and "\033[33m" in done.stdout
    assert "the drafter's own" in done.stderr and servers() == before


@pytest.mark.parametrize("end, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_however_the_client_ends_its_server_ends_too(end, status):
    before = servers()
    client = subprocess.Popen([sys.executable, ROOT / "speculate.py", "--remote", "--latency", "5ms", "--device", "cpu",
                               "--max-new-tokens", "1000", "--prompt", "Tell me a long story."],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                              preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL))  # a shell's & ignores it
    with client:
        client.stdout.read(1)  # it is in the midst of its answer
        assert len(servers() - before) == 1
        os.killpg(client.pid, end) if end == signal.SIGINT else client.send_signal(end)  # Ctrl-C goes to both
        assert client.wait(30) == status and client.stderr.read() == b""
    wait_for(lambda: servers() <= before)


@pytest.mark.parametrize("arguments, complaint", [
    (["--prompt", "Hi", "--until-eof"], "--serve"),
    (["--prompt", "Hi", "--latency", "21ms"], "add --remote"), (["--prompt", "Hi", "--network", "4g"], "add --remote"),
    (["--prompt", "Hi", "--remote", "--latency", "21"], "is not a duration"),
    (["--prompt", "Hi", "--remote", "--loss", "5"], "share"),
    (["--prompt", "Hi", "--remote", "a..b:7000"], "no server at a..b"),
    (["--prompt", "Hi", "--remote", "--no-speculation", "--float16"], "--float16"),
    (["--serve", "127.0.0.1:0", "--json"], "--json"), (["--serve", "127.0.0.1:0", "--temperature", "0.5"], "--temperature"),
    (["--serve", "127.0.0.1:0", "--draft-length", "3"], "--draft-length"), (["--bench", "--show"], "--show"),
    (["--prompt", "Hi", "--remote", "--network", "3g"], "--network"), (["--prompt", "Hi", "--remote", "here"], "HOST:PORT"),
    (["--prompt", "Hi", "--remote", "localhost:99999"], "HOST:PORT"), (["--serve", "1234"], "HOST:PORT"),
    (["--prompt", "Hi", "--remote", "--disconnect-for", "2s"], "--disconnect-after"),
    (["--serve", "127.0.0.1:0", "--remote"], "--serve"), (["--serve", "127.0.0.1:0", "--prompt", "Hi"], "not allowed with"),
    (["--prompt", "Hi", "--remote", "--nodes", "65"], "from 1 to 64"),
    (["--prompt", "Hi", "--remote", "--model", "some/model", "--no-speculation"], "no drafter is shipped"),
    (["--prompt", "Hi", "--remote", "127.0.0.1:9"], "no server at 127.0.0.1:9")], ids=str)
def test_bad_input_ends_in_one_line_and_exit_status_2(arguments, complaint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["speculate.py", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as exit:
        run_command(speculate.main)
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == "" and err.count("\n") == 1 and complaint in err
