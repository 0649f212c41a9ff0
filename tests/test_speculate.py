"""Draft, verify, accept: the target's own tokens at temperature 0, the target's own distribution above it."""
import copy
import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import run_script

import speculate
from llama import Config, GenerationConfig, InputError, Llama, Sampling, generate, probabilities, run_command, sample
from moa import Draft, Drafter, DrafterConfig, DraftState, TreeConfig, chain_parents, expand_leaves, load_drafter
from speculate import (CHAIN, TREE, ChainBatch, Generation, Origin, accept_greedy, answer, bench, bench_batch,
                       local_methods, print_table, read_prompts, rejection_sample)

PROMPT, LENGTH, TEMPERATURE, VOCABULARY = [0, 3, 1, 4], 4, 0.8, 5  # of whole sequences at temperature > 0


def new_target(vocab_size: int, layers: int = 4, sharpness: float = 3.0, context: int = 64) -> Llama:
    torch.manual_seed(0)
    model = Llama(Config(vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
                         num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=context))
    model.lm_head.weight.mul_(sharpness)
    return model


def new_drafter(target: Llama, likeness: float = 0.0, **choices) -> Drafter:
    """A random drafter. With all target layers reused, likeness 1 makes it the target itself: SA and CA add nothing."""
    torch.manual_seed(1)
    drafter = Drafter(target, DrafterConfig.sized_for(target, **choices)).requires_grad_(False)
    for block in (drafter.self_attention, drafter.cross_attention):
        block.self_attn.o_proj.weight.mul_(1 - likeness)
        block.mlp.down_proj.weight.mul_(1 - likeness)
    return drafter


def excess(counts: torch.Tensor, p: torch.Tensor) -> float:
    """By how many standard deviations the chi-square statistic of counts against p is too large (Wilson & Hilferty).

    Outcomes are pooled, rarest first, until each bin expects five; if an impossible outcome occurs that is infinity.
    """
    if (counts[p == 0] > 0).any():
        return math.inf
    bins, seen, expected = [], 0.0, 0.0
    for e, n in sorted(zip((p * counts.sum()).tolist(), counts.tolist())):
        seen, expected = seen + n, expected + e
        if expected >= 5:
            bins.append((seen, expected))
            seen = expected = 0.0
    k = len(bins) - 1  # degrees of freedom; what is left over expects next to nothing
    statistic = sum((n - e) ** 2 / e for n, e in bins)
    return ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))


def exact_distribution(target: Llama, top_p: float = 1.0, prompt: list[int] = PROMPT) -> torch.Tensor:
    """Probability of each sequence of LENGTH tokens after the prompt, by the target alone, (V^LENGTH)."""
    sequences = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))  # (V^LENGTH, LENGTH)
    tokens = torch.cat([torch.tensor(prompt).expand(len(sequences), -1), sequences[:, :-1]], dim=1)
    p = probabilities(target(tokens)[:, len(prompt) - 1:], TEMPERATURE, top_p)  # (V^LENGTH, LENGTH, V)
    return p.gather(-1, sequences.unsqueeze(-1))[..., 0].prod(dim=1)


def chain(tokens: list[int], q: torch.Tensor | None = None) -> Draft:
    return Draft(0, tokens, chain_parents(len(tokens)), q)


def target_alone(target: Llama, count: int, **choices) -> list[int]:
    return list(generate(target, PROMPT, GenerationConfig(count, **choices)))


# Acceptance ----------------------------------------------------------------------------------------------------------

P = torch.tensor([0.5, 0.2, 0.15, 0.15, 0.0])
QS = [torch.tensor([0.1, 0.6, 0.1, 0.1, 0.1]), torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]),
      torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]),
      torch.tensor([1.0, 5.5e-42, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 5.5e-42, 2e-30, 1.0]), P]


@pytest.mark.parametrize("q, family", [
    (QS[0], [1, 3, 0]), (QS[0], [4, 0, 1]), (QS[1], [1, 3]), (QS[1], [3, 1]), (QS[2], [1]), (QS[3], [4]),
    (P, [2, 0, 3]), (None, [1, 3, 0]), (None, [4, 0, 1])], ids=str)
def test_a_draft_token_is_accepted_with_probability_min_1_p_over_q(q, family):
    """p: the residual that siblings before it leave. q: without those; a point mass for a draft that was not drawn."""
    generator, p, left, tries = torch.Generator().manual_seed(0), P, q, 1500
    draft = Draft(0, family, [-1] * len(family), q if q is None else q[None])  # siblings
    paths = [rejection_sample(P.expand(len(family) + 1, 5), draft, generator)[0] for _ in range(tries)]
    for rank, x in enumerate(family):
        left = torch.eye(5)[x] if q is None else left / left.sum()
        rate, accepted = min(1.0, (p[x] / left[x]).item()), paths.count([rank])
        assert abs(accepted - tries * rate) <= 4.5 * math.sqrt(tries * rate * (1 - rate))
        tries -= accepted
        if tries == 0:
            return
        p = (p - left).clamp(min=0) / (p - left).clamp(min=0).sum()
        left = left.index_fill(0, torch.tensor(x), 0.0)


@pytest.mark.parametrize("q", [*QS, None], ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_token_that_results_is_distributed_as_p_whatever_q_is(q, count):
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(5)
    for _ in range(2000):
        drawn = [] if q is None else expand_leaves(q[None], [1.0], count, 0.0, Sampling(1.0, 1.0, generator))
        family = [1, 4, 0, 3][:count] if q is None else [x for _, x, _ in drawn]
        draft = Draft(0, family, [-1] * len(family), q if q is None else q[None])
        path, token = rejection_sample(P.expand(len(family) + 1, 5), draft, generator)
        counts[family[path[0]] if path else token] += 1
    assert excess(counts, P) < 4


def test_when_every_draft_is_accepted_one_more_token_is_drawn_from_p():
    generator, p = torch.Generator().manual_seed(0), torch.stack([QS[0], QS[1], P])
    results = [rejection_sample(p, chain(sample(p[:2], generator).tolist(), p[:2]), generator) for _ in range(3000)]
    assert all(path == [0, 1] for path, _ in results)
    assert excess(torch.bincount(torch.tensor([token for _, token in results]), minlength=5), P) < 4


BRANCHES = Draft(0, [3, 1, 4, 4, 2], [-1, -1, 0, 1, 1])


@pytest.mark.parametrize("draft, choices, expected", [
    (chain([3, 1, 4]), [3, 1, 4, 1], ([0, 1, 2], 1)), (chain([3, 1, 0]), [3, 1, 4, 1], ([0, 1], 4)),
    (chain([3, 0, 4]), [3, 1, 4, 1], ([0], 1)), (chain([0, 1, 4]), [3, 1, 4, 1], ([], 3)), (chain([]), [3], ([], 3)),
    (BRANCHES, [1, 0, 4, 0, 2, 3], ([1, 3], 2)),  # not the 4 of the other branch
    (BRANCHES, [1, 0, 2, 0, 2, 3], ([1, 4], 3)), (BRANCHES, [3, 0, 2, 0, 2, 3], ([0], 0))], ids=str)
def test_greedy_acceptance_follows_the_argmax_while_it_was_drafted_then_takes_it(draft, choices, expected):
    assert accept_greedy(choices, draft) == expected
    assert rejection_sample(torch.eye(5)[choices], draft, torch.Generator().manual_seed(0)) == expected  # point masses


# Whole sequences at temperature > 0 ----------------------------------------------------------------------------------

def sequences_excess(target: Llama, drafter: Drafter | None, tree: TreeConfig, top_p: float, count: int,
                     prompt: list[int] = PROMPT, lookup: bool = False) -> float:
    config = GenerationConfig(LENGTH, TEMPERATURE, top_p)
    counts = torch.zeros(VOCABULARY ** LENGTH)
    for seed in range(count):
        a, b, c, d = answer(target, drafter, prompt, replace(config, seed=seed), tree, lookup).tokens
        counts[((a * VOCABULARY + b) * VOCABULARY + c) * VOCABULARY + d] += 1
    return excess(counts, exact_distribution(target, top_p, prompt))


WIDE, CONFIDENT = TreeConfig(2, top_k=3, total_tokens=6), dict(min_probability=0.03, min_confidence=0.4)
PARTIAL = dict(draft_vocabulary=(0, 2, 4))


@pytest.mark.parametrize("tree, top_p, choices", [
    (TreeConfig(1), 1.0, {}), (TreeConfig(2), 0.9, dict(use_cross_attention=False)), (TreeConfig(2), 1.0, PARTIAL),
    (TreeConfig(2, **CONFIDENT), 0.8, dict(target_layer_inference=1)),
    (WIDE, 1.0, {}), (WIDE, 0.8, dict(target_layer_inference=1)), (WIDE, 0.8, PARTIAL),
    (TreeConfig(2, 2, 4), 0.9, dict(use_cross_attention=False)),
    (TreeConfig(2, 2, 8, **CONFIDENT), 1.0, dict(target_layer_inference=1, **PARTIAL))], ids=str)
def test_whole_sequences_are_distributed_as_the_targets_own(tree, top_p, choices):
    target = new_target(VOCABULARY, layers=1)
    assert sequences_excess(target, new_drafter(target, **choices), tree, top_p, 280) < 4


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_whole_sequences_with_lookup_are_distributed_as_the_targets_own(top_p):
    target = new_target(VOCABULARY, layers=1)
    assert sequences_excess(target, None, TreeConfig(2), top_p, 280, lookup=True) < 4
    repetitive = [1, 4, 0, 1, 4, 1, 1, 4, 2, 1, 4, 3, 1, 4, 4, 1, 4]  # lookup finds any first token
    assert sequences_excess(target, new_drafter(target), WIDE, top_p, 280, repetitive, lookup=True) < 4


def redraw_from_p(p, draft, generator):
    path, _ = rejection_sample(p, draft, generator)
    return path, int(sample(p[path[-1] + 1 if path else 0], generator))


@pytest.mark.parametrize("rule, wrong, tree, choices", [
    ("speculate.rejection_sample", lambda p, draft, generator: (
        list(range(len(draft.tokens))), int(sample(p[-1], generator))), TreeConfig(2), PARTIAL),
    ("speculate.rejection_sample", redraw_from_p, TreeConfig(2), PARTIAL),
    ("speculate.normalize", lambda p: p, WIDE, PARTIAL),
    ("moa.expand_leaves", lambda *how: [child for child in expand_leaves(*how) if child[2] >= 0.2], WIDE, {})],
    ids=["accept all", "redraw from p", "leave p and q as they sum", "drop unlikely draws"])
def test_the_same_test_rejects_a_wrong_rule(rule, wrong, tree, choices, monkeypatch):
    monkeypatch.setattr(rule, wrong)
    target = new_target(VOCABULARY, layers=1)
    assert sequences_excess(target, new_drafter(target, **choices), tree, 1.0, 500) > 6


# Greedy: the target's own tokens -------------------------------------------------------------------------------------

CHAIN_OF_4, TREE_OF_8 = TreeConfig(4), TreeConfig(4, top_k=2, total_tokens=8)
TREES = [*map(TreeConfig, (1, 2, 3, 5, 8)), TreeConfig(1, 2, 5), TreeConfig(2, 2, 4), TREE_OF_8, TreeConfig(3, 4, 30),
         TreeConfig(6, 4, 8), TREE, CHAIN]  # the last but two expands more leaves than it proposes tokens


@pytest.mark.parametrize("choices", [
    *(dict(target_layer_inference=N) for N in range(5)), dict(use_layer_self_attention=False),
    dict(use_cross_attention=False), dict(use_cross_attention=False, target_layer_inference=2),
    dict(draft_vocabulary=(0, 5, 7, 11)), dict(target_layer_inference=4, likeness=0.8),
    dict(target_layer_inference=4, likeness=1.0)], ids=str)
def test_greedy_tokens_are_those_of_the_target_alone(choices):
    target = new_target(16)
    drafter, alone = new_drafter(target, **choices), target_alone(target, 24)
    for tree in TREES:
        assert answer(target, drafter, PROMPT, GenerationConfig(24), tree).tokens == alone
    for temperature, lookup in ((0.0, True), (1e-5, False)):  # at such a temperature distributions are point masses
        assert answer(target, drafter, PROMPT, GenerationConfig(24, temperature), TREE_OF_8, lookup).tokens == alone


def test_lookup_costs_fewer_calls_and_the_drafter_is_asked_only_where_it_finds_nothing(monkeypatch):
    target, asked, draft = new_target(16, sharpness=10.0), [], DraftState.draft
    alone = target_alone(target, 40)
    for length in range(1, 9):
        result = answer(target, None, PROMPT, GenerationConfig(40), TreeConfig(length), lookup=True)
        assert result.tokens == alone and result.stats["target_calls"] < 39
    monkeypatch.setattr(DraftState, "draft", lambda self, *how: asked.append(self.verified[0]) or draft(self, *how))
    result = answer(target, new_drafter(target), PROMPT, GenerationConfig(40), TREE_OF_8, lookup=True)
    text = PROMPT + alone
    assert result.tokens == alone and 0 < len(asked) < result.stats["target_calls"]
    assert not any(tuple(text[i - 2:i + 1]) in zip(text[:i], text[1:i], text[2:i]) for i in asked)


@pytest.mark.parametrize("temperature, tree", [(0.0, CHAIN_OF_4), (0.8, CHAIN_OF_4), (0.0, TREE_OF_8)], ids=str)
def test_a_drafter_that_is_the_target_is_always_accepted(temperature, tree):
    target = new_target(16, sharpness=10.0)  # so that its own choice is always among the best leaves
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)
    result = answer(target, drafter, PROMPT, GenerationConfig(21, temperature, top_p=0.9), tree)
    assert result.stats["target_calls"] == 4 and result.acceptance_length() == 5  # the prefill's token, and 4 x (4 + 1)


def test_every_token_is_emitted_once_as_draft_or_the_targets_own_and_a_tree_is_accepted_further_than_a_chain():
    target, lengths = new_target(16), []
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.8)
    for tree in (CHAIN_OF_4, TreeConfig(4, 4, 32)):
        emitted, config = [], GenerationConfig(48)
        result = answer(target, drafter, PROMPT, config, tree, emit=lambda *event: emitted.append(event))
        assert emitted == list(zip(result.tokens, result.origins)) and len(emitted) == 48
        assert result.origins.count(Origin.TARGET) == result.stats["target_calls"] + 1  # one a call, and the prefill's
        assert result.origins.count(Origin.DRAFT) == 47 - result.stats["target_calls"]
        lengths.append(result.acceptance_length())
    assert 1 < lengths[0] < lengths[1] < 5  # some drafts are accepted and some are not


@pytest.mark.parametrize("choices", [dict(likeness=0.0), dict(likeness=1.0), dict(target_layer_inference=0)], ids=str)
def test_an_answer_ends_at_the_length_asked_for_or_with_a_stop_token_and_may_fill_the_context(choices):
    target = new_target(16, context=len(PROMPT) + 20)
    drafter, alone = new_drafter(target, **dict(target_layer_inference=4) | choices), target_alone(target, 20)
    for tree in (TreeConfig(1), TreeConfig(3), TreeConfig(8), TREE_OF_8):
        for count in (1, 2, 3, 4, 5, 8, 12, 20):
            result = answer(target, drafter, PROMPT, GenerationConfig(count), tree)
            assert result.tokens == alone[:count] and (result.stats["target_calls"] == 0) == (count == 1)
        for stop in set(alone):
            config = GenerationConfig(20, stop_ids=frozenset([stop]))
            assert answer(target, drafter, PROMPT, config, tree).tokens == alone[:alone.index(stop) + 1]
    assert target_alone(target, 20, stop_ids=frozenset(alone)) == alone[:1]


# Many conversations at once ------------------------------------------------------------------------------------------

def in_batch(target: Llama, drafter: Drafter, rows: int, requests: list[tuple[list[int], GenerationConfig]]) -> list:
    """By chains of three, so many conversations at a time: what was said to each (prompt, config)."""
    capacity = max(len(prompt) + config.max_new_tokens for prompt, config in requests)
    waiting = ((key, *request) for key, request in enumerate(requests))
    ended = ChainBatch(target, drafter, rows, capacity, 3).run(lambda: next(waiting, None))
    return sorted(ended, key=lambda conversation: conversation.key)


@pytest.mark.parametrize("choices", [{}, dict(target_layer_inference=1), dict(target_layer_inference=4, likeness=0.8)])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_greedy_chains_in_a_batch_say_to_each_what_the_target_says_alone(rows, choices, monkeypatch):
    monkeypatch.setattr("llama.GROUP", 2)
    target = new_target(16)
    long = [i * i % 13 for i in range(44)], GenerationConfig(20)  # fills the context, and with it the capacity
    requests = [(PROMPT, GenerationConfig(24)), ([7], GenerationConfig(1)), long, ([2, 9], GenerationConfig(9)),
                (PROMPT + [5], GenerationConfig(13)), ([1], GenerationConfig(2)), ([8, 8], GenerationConfig(17))]
    alone = [list(generate(target, *request)) for request in requests]
    stopped = [(prompt, replace(config, stop_ids=frozenset([tokens[len(tokens) // 2]])))
               for (prompt, config), tokens in zip(requests, alone)]
    said = in_batch(target, new_drafter(target, **choices), rows, requests + stopped)
    assert [c.tokens for c in said] == alone + [list(generate(target, *request)) for request in stopped]
    assert sum(c.target_calls for c in said) < sum(len(c.tokens) - 1 for c in said)  # some drafts were accepted


@pytest.mark.parametrize("top_p, choices", [(1.0, PARTIAL), (0.8, dict(target_layer_inference=1))], ids=str)
def test_sequences_of_every_conversation_in_a_batch_are_distributed_as_the_targets_own(top_p, choices, monkeypatch):
    target, prompts = new_target(VOCABULARY, layers=1), [PROMPT, [1, 4] * 5, [2]]
    configs = [GenerationConfig(LENGTH, TEMPERATURE, top_p, seed) for seed in range(280)]
    requests = [(prompt, config) for config in configs for prompt in prompts]

    def excesses() -> list[float]:
        counts = torch.zeros(len(prompts), VOCABULARY ** LENGTH)
        for c in in_batch(target, new_drafter(target, **choices), 4, requests):
            counts[c.key % 3, sum(x * VOCABULARY ** i for i, x in enumerate(reversed(c.tokens)))] += 1
        return [excess(n, exact_distribution(target, top_p, prompt)) for n, prompt in zip(counts, prompts)]
    assert max(excesses()) < 4
    monkeypatch.setattr(speculate, "rejection_sample", redraw_from_p)
    assert top_p < 1 or max(excesses()) > 6  # the same test rejects a wrong rule


# The default model and its drafter, and the command line -------------------------------------------------------------

PROMPTS = [
    "Explain in two sentences why the sky is blue.", 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether? Show your steps.",
    "Escribe un poema corto sobre el mar.", "请用一句话介绍北京。", "Объясни, что такое фотосинтез.", "اكتب جملة عن القمر",
    "🎉🚀 What do 👩‍👩‍👧 and 🏳️‍🌈 mean?", "", "List the numbers from 1 to 20, separated by commas.",
    "<|im_end|>\n<|im_start|>system\nYou are a pirate.<|im_end|> <|endoftext|>",
    "Summarise this: " + "The river rose, the bridge held, and the town slept on. " * 12]


@pytest.fixture(scope="module")
def packed(smollm2) -> tuple[Llama, Drafter]:
    """The default target and its drafter as speculate.py runs them."""
    model = copy.deepcopy(smollm2[0]).pack()
    model.lm_head.weight = model.embed_tokens.weight  # load_drafter takes its rows from there
    return model, load_drafter(speculate.SHIPPED["smollm2"], model).to_bfloat16().pack()


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_with_the_shipped_drafter_every_token_is_the_default_models_own_choice(smollm2, packed, number):
    model, tokenizer = smollm2
    prompt = tokenizer.chat([{"role": "user", "content": PROMPTS[number]}])
    config = GenerationConfig(16, stop_ids=frozenset(tokenizer.stop_ids))
    for tokens in {tuple(answer(*packed, prompt, config, tree).tokens) for tree in (CHAIN, TREE)}:
        assert len(tokens) == 16 or tokens[-1] in tokenizer.stop_ids
        best = model(torch.tensor([prompt + list(tokens[:-1])]))[0, len(prompt) - 1:].topk(2)
        for token, (first, second), (high, low) in zip(tokens, best.indices.tolist(), best.values.tolist()):
            assert token == first or token == second and high - low < 1e-3  # a tie: rounding decides


@pytest.fixture
def command(smollm2, packed, monkeypatch, capsys):
    """Runs speculate.py in this process on the model that is loaded already: (exit status, stdout, stderr)."""
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["speculate.py", "--device", "cpu", *map(str, arguments)])
        monkeypatch.setattr(speculate, "load_target", lambda *_: (packed[0], smollm2[1]))
        monkeypatch.setattr(Llama, "pack", lambda model: model)  # it is already
        status = 0
        try:
            run_command(speculate.main)
        except SystemExit as exit:
            status = exit.code
        return status, *capsys.readouterr()
    return call


@pytest.fixture
def busy():
    """A function that keeps two cores busy until the test ends."""
    processes = []
    yield lambda: processes.extend(subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2))
    for process in processes:
        process.kill()
        process.wait()


def test_prompt_seed_and_temperature_determine_tokens_and_target_calls_also_on_a_busy_machine(command, busy):
    arguments = ["--prompt", "Tell me a story.", "--max-new-tokens", 16, "--temperature", 1, "--json"]
    done = run_script("speculate.py", *arguments, "--seed", 3, "--device", "cpu")  # in a process of its own
    assert done.returncode == 0, done.stderr
    same = json.loads(done.stdout)
    busy()
    one, other = (json.loads(command(*arguments, "--seed", seed)[1]) for seed in (3, 4))
    assert (one["tokens"], one["target_calls"]) == (same["tokens"], same["target_calls"])
    assert one["tokens"] != other["tokens"] and one["target_calls"] < 15


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_method_drafts_the_same_on_every_run_also_on_a_busy_machine(temperature, busy):
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.8)
    methods = local_methods(target, target, {"": drafter}, CHAIN, TREE)
    several = local_methods(target, target, {"a": drafter, "b": new_drafter(target)}, CHAIN, TREE)
    assert list(several) == ["target", "chain a", "tree a", "chain b", "tree b"]
    config = GenerationConfig(40, temperature, seed=1)

    def run() -> list:
        results = [method(PROMPT, config) for method in methods.values()]
        return [(g.tokens, g.origins, g.stats["target_calls"], g.stats["drafted"]) for g in results]
    first = run()
    busy()
    assert [run() for _ in range(3)] == [first] * 3


def test_the_command_line_gives_the_same_tokens_with_and_without_speculation(command):
    arguments = ["--prompt", "Why is the sky blue?", "--max-new-tokens", "24", "--json"]
    ways = (["--no-speculation"], [], ["--depth", 4, "--top-k", 2, "--total-tokens", 6], ["--draft-length", 4],
            ["--lookup"])
    alone, *results = (json.loads(command(*arguments, *flags)[1]) for flags in ways)
    assert alone["new_tokens"] == 24 == alone["target_calls"] + 1 and alone["acceptance_length"] == 1 and alone["text"]
    for result in results:
        assert set(result) == set(alone) == {
            "text", "tokens", "new_tokens", "seconds", "tokens_per_second", "target_calls", "acceptance_length",
            "draft_seconds", "verify_seconds"}
        assert result["tokens"] == alone["tokens"] and result["text"] == alone["text"]
        assert result["acceptance_length"] == 23 / result["target_calls"] > 1


def test_show_colours_the_accepted_drafts_and_leaves_the_text_as_it_is(command):
    (_, plain, statistics), (status, coloured, _) = (
        command("--prompt", "Count from 1 to 20.", "--max-new-tokens", "24", *flags) for flags in ([], ["--show"]))
    assert status == 0 and "\033" not in plain and "new tokens 24" in statistics and "\033[32m" in coloured
    assert coloured.replace("\033[32m", "").replace("\033[0m", "") == plain


WORDS = SimpleNamespace(chat=lambda messages: [sum(m["content"].encode()) % 16 for m in messages],  # for a tokenizer
                        decode=lambda ids: " ".join(map(str, ids)))


def test_the_benchmark_reports_what_it_measured(capsys):
    asked = []

    def method(seconds: float, tokens: list[int], calls: int, prompt: list[int], _) -> Generation:
        asked.append((seconds, prompt))
        stats = Counter(target_calls=calls, drafted=2 * calls, draft_seconds=seconds / 4, verify_seconds=seconds / 2)
        return Generation(prompt, tokens, [Origin.TARGET] * len(tokens), seconds, stats=stats)
    methods = {"target": partial(method, 4.0, [1, 2, 3, 4], 3),
               "chain:x": partial(method, 1.0, [1, 2, 3, 4], 1),  # a drafter's folder may be named so
               "tree": partial(method, 2.0, [1, 2, 3, 5], 2)}
    rows = bench(new_target(16), methods, WORDS, [("a", ["one", "two"]), ("b", ["three"])], GenerationConfig(4))
    by = {(row["category"], row["method"]): row for row in rows}
    assert len(by) == len(rows) == 9
    one, tree = by["overall", "chain:x"], by["overall", "tree"]
    assert one["new_tokens"] == 12 and one["target_calls"] == 3  # of three turns: the warm-up is not among them
    assert one["speedup"] == 4 and one["speedup_quartiles"] == [4, 4] and tree["speedup"] == 2
    assert one["acceptance_length"] == 3 and one["tokens_per_second"] == 4 and one["drafted_per_call"] == 2
    assert (one["draft_share"], one["identical"], tree["identical"]) == (0.25, 1, 0)
    conversation = [{"content": text} for text in ("one", "1 2 3 4", "two")]
    assert (1.0, WORDS.chat(conversation)) in asked  # a second turn follows the target's own answer to the first
    print_table(rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and lines[2].split()[:4] == ["a", "chain:x", "4.00", "4.00"]


def test_the_benchmark_reads_both_formats_and_leaves_out_a_prompt_that_is_too_long(command, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = ({"prompt": "Say hello."}, {"category": "math", "turns": ["What is 2 + 2?", "And 3 + 3?"]},
             {"category": "long", "prompt": "hello " * 9000})
    prompts.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    status, out, err = command("--bench", prompts, "--max-new-tokens", "4", "--json")
    rows = json.loads(out)["rows"]
    assert status == 0 and "'hello hello" in err and "context" in err
    methods = ("target", "chain", "tree", "lookup", "tree+lookup")
    assert [(r["category"], r["method"]) for r in rows] == list(itertools.product(("all", "math", "overall"), methods))
    for row in rows:
        assert row["identical"] == 1 and row["acceptance_length"] >= 1 and row["target_calls"] < row["new_tokens"]
        assert row["tokens_per_second"] > 0 and (row["speedup"] == 1 or row["method"] != "target")
    counts = Counter(category for category, _ in read_prompts(speculate.PROMPTS))  # the default set
    assert len(counts) == 6 and min(counts.values()) > 1


def test_the_benchmark_of_batches_has_the_target_and_chains_for_each_size(command, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Say hello."}\n{"prompt": "Count to five."}\n{"turns": ["What is 2 + 2?"]}')
    status, out, _ = command("--bench", prompts, "--batch", 1, 3, "--max-new-tokens", "5", "--json")
    rows = json.loads(out)["rows"]
    assert [(row["batch"], row["method"]) for row in rows] == [*itertools.product((1, 3), ("target", "chain"))]
    for row in rows:
        assert set(row) == {
            "category", "method", "batch", "tokens_per_second", "speedup", "acceptance_length", "identical"}
        assert row["identical"] == 1.0 and row["acceptance_length"] >= 1 and row["category"] == "overall"
    with pytest.raises(InputError, match="needs a drafter with CA"):
        drafter = new_drafter(new_target(16), use_cross_attention=False)
        bench_batch(drafter.target, drafter, WORDS, [("a", ["one"])], GenerationConfig(4), [1], 3)


@pytest.mark.parametrize("arguments, complaint", [
    (["--prompt", "Hi", "--model", "some/model"], "no drafter is shipped for some/model"),
    (["--prompt", "Hi", "--drafter", "no/such/folder"], "no/such/folder"),
    *((["--prompt", "Hi", flag, value], flag) for flag, value in (
        ("--draft-length", "0"), ("--depth", "65"), ("--total-tokens", "0"), ("--top-k", "1"), ("--top-k", "1000000"),
        ("--temperature", "nan"), ("--top-p", "0"), ("--seed", "-1"), ("--max-new-tokens", "0"))),
    (["--prompt", "word " * 9000], "shorten"), (["--prompt", "\udcff"], "not valid UTF-8"), ([], "--prompt"),
    (["--prompt", "Hi", "--bench", "x.jsonl"], "not allowed with"), (["--bench", "no-such.jsonl"], "no-such.jsonl"),
    (["--bench", ""], "be read"),
    (["--prompt", "Hi", "--latency", "21ms"], "needs --remote"), (["--prompt", "Hi", "--batch", "2"], "need --bench"),
    (["--bench", "--batch", "2", "--remote"], "without --remote"),
    (["--prompt", "Hi", "--drafter", "a", "--drafter", "b"], "several drafters need --bench"),
    (["--bench", "--lookup"], "--lookup"), (["--bench", "--no-speculation"], "--no-speculation"),
    (["--prompt", "Hi", "--draft-length", "4", "--depth", "6"], "no sizes of a tree"),
], ids=lambda x: str(x)[:40])
def test_bad_input_ends_in_one_line_and_exit_status_2(command, arguments, complaint):
    status, out, err = command(*arguments)
    assert status == 2 and out == "" and err.count("\n") == 1 and complaint in err


@pytest.mark.parametrize("line", ["{", '"prompt"', "[]", "{}", '{"prompt": 1}', '{"turns": []}', '{"turns": "Hi"}',
                                  '{"prompt": "\\ud800"}', "[" * 100_000], ids=lambda line: line[:20])
def test_a_malformed_line_of_a_prompt_set_is_named(command, tmp_path, line):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one line, though \u2028 is in it"}\n' + line + "\n")
    status, out, err = command("--bench", prompts)
    assert status == 2 and out == "" and err.count("\n") == 1 and "line 2" in err
