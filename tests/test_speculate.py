"""Draft, verify, accept: the target's own tokens at temperature 0, the target's own distribution above it."""
import copy
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import speculate
from llama import Config, Llama, probabilities, run_command, sample
from moa import Draft, Drafter, DrafterConfig, Drafting, Shape, children, load_drafter
from speculate import (Cycle, Figures, Generation, Lookup, Origin, Pace, Settings, accept, answer, bench, follow, print_table,
                       read_prompts)

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "weights" / "smollm2"


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


def chain(tokens: list[int], q: torch.Tensor | None = None) -> Draft:
    return Draft(0, tokens, list(range(-1, len(tokens) - 1)), q)


def siblings(tokens: list[int], q: torch.Tensor | None) -> Draft:
    return Draft(0, tokens, [-1] * len(tokens), None if q is None else q[None])


def fixed(shape: Shape, count: int = 24, **choices) -> Settings:
    return Settings(count, shapes=(shape,), adaptive=False, **choices)


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


# Acceptance ----------------------------------------------------------------------------------------------------------

P = torch.tensor([0.5, 0.2, 0.15, 0.15, 0.0])
QS = [torch.tensor([0.1, 0.6, 0.1, 0.1, 0.1]), torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]),
      torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]),
      torch.tensor([1.0, 5.5e-42, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 5.5e-42, 2e-30, 1.0]), P]


@pytest.mark.parametrize("q, family", [
    (QS[0], [1, 3, 0]), (QS[0], [4, 0, 1]), (QS[1], [1, 3]), (QS[1], [3, 1]), (QS[2], [1]), (QS[3], [4]), (P, [2, 0, 3]),
    (None, [1, 3, 0]), (None, [4, 0, 1])], ids=str)
def test_each_sibling_is_accepted_with_probability_min_1_p_over_q(q, family):
    """p: the residual that those before it have left. q: without those before it; a point mass where nothing was drawn."""
    generator, p, left, tries = torch.Generator().manual_seed(0), P, q, 1500
    paths = [accept(P.expand(len(family) + 1, 5), siblings(family, q), generator)[0] for _ in range(tries)]
    for rank, x in enumerate(family):
        left = torch.eye(5)[x] if q is None else left / left.sum()
        rate, kept = min(1.0, (p[x] / left[x]).item()), paths.count([rank])
        assert abs(kept - tries * rate) <= 4.5 * math.sqrt(tries * rate * (1 - rate))
        tries -= kept
        if tries == 0:
            return
        p = (p - left).clamp(min=0) / (p - left).clamp(min=0).sum()
        left = left.index_fill(0, torch.tensor(x), 0.0)


@pytest.mark.parametrize("q", [*QS, None], ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_token_that_results_is_distributed_as_p_whatever_q_is(q, count):
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(5)
    for _ in range(2000):
        drawn = [] if q is None else children(q[None], [1.0], count, 0.0, 1.0, generator)
        family = [1, 4, 0, 3][:count] if q is None else [x for _, x, _ in drawn]
        path, token = accept(P.expand(len(family) + 1, 5), siblings(family, q), generator)
        counts[family[path[0]] if path else token] += 1
    assert excess(counts, P) < 4


def test_when_every_draft_is_accepted_one_more_is_drawn_from_p():
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(5)
    p = torch.stack([QS[0], QS[1], P])
    for _ in range(3000):
        path, token = accept(p, chain(sample(p[:2], generator).tolist(), p[:2]), generator)
        assert path == [0, 1]
        counts[token] += 1
    assert excess(counts, P) < 4


@pytest.mark.parametrize("draft, choices, expected", [
    (chain([3, 1, 4]), [3, 1, 4, 1], ([0, 1, 2], 1)), (chain([3, 1, 0]), [3, 1, 4, 1], ([0, 1], 4)),
    (chain([3, 0, 4]), [3, 1, 4, 1], ([0], 1)), (chain([0, 1, 4]), [3, 1, 4, 1], ([], 3)), (chain([]), [3], ([], 3)),
    (Draft(0, [3, 1, 4, 4, 2], [-1, -1, 0, 1, 1]), [1, 0, 4, 0, 2, 3], ([1, 3], 2)),  # not the 4 of the other branch
    (Draft(0, [3, 1, 4, 4, 2], [-1, -1, 0, 1, 1]), [1, 0, 2, 0, 2, 3], ([1, 4], 3)),
    (Draft(0, [3, 1, 4, 4, 2], [-1, -1, 0, 1, 1]), [3, 0, 2, 0, 2, 3], ([0], 0))], ids=str)
def test_greedy_acceptance_follows_the_argmax_while_it_was_drafted_then_takes_it(draft, choices, expected):
    assert follow(choices, draft) == expected
    assert accept(torch.eye(5)[choices], draft, torch.Generator().manual_seed(0)) == expected  # point masses


# Whole sequences at temperature > 0 ----------------------------------------------------------------------------------

PROMPT, LENGTH, TEMPERATURE, VOCABULARY = [0, 3, 1, 4], 4, 0.8, 5


def exact_distribution(target: Llama, top_p: float) -> torch.Tensor:
    """Probability of each sequence of LENGTH tokens behind PROMPT, by the target alone, (V^LENGTH)."""
    sequences = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))  # (V^LENGTH, LENGTH)
    tokens = torch.cat([torch.tensor(PROMPT).expand(len(sequences), -1), sequences[:, :-1]], dim=1)
    p = probabilities(target(tokens)[:, len(PROMPT) - 1:], TEMPERATURE, top_p)  # (V^LENGTH, LENGTH, V)
    return p.gather(-1, sequences.unsqueeze(-1))[..., 0].prod(dim=1)


def sequences_excess(target: Llama, drafter: Drafter | Lookup, shape: Shape, top_p: float, count: int,
                     lookup: tuple[int, ...] = ()) -> float:
    settings = fixed(shape, LENGTH, temperature=TEMPERATURE, top_p=top_p, lookup=lookup)
    counts = torch.zeros(VOCABULARY ** LENGTH)
    for seed in range(count):
        index = 0
        for token in answer(target, drafter, PROMPT, settings, seed).tokens:
            index = index * VOCABULARY + token
        counts[index] += 1
    return excess(counts, exact_distribution(target, top_p))


WIDE, SELECTIVE = Shape(2, breadth=3, nodes=6), dict(token_threshold=0.03, level_threshold=0.4)  # as adaptive shapes are


@pytest.mark.parametrize("shape, top_p, choices", [
    (Shape(1), 1.0, {}), (Shape(2), 0.9, dict(use_cross_attention=False)), (Shape(2), 1.0, dict(draft_vocabulary=(0, 2, 4))),
    (Shape(2, **SELECTIVE), 0.8, dict(target_layer_inference=1)),
    (WIDE, 1.0, {}), (WIDE, 0.8, dict(target_layer_inference=1)), (WIDE, 0.8, dict(draft_vocabulary=(0, 2, 4))),
    (Shape(2, 2, 4), 0.9, dict(use_cross_attention=False)),
    (Shape(2, 2, 8, **SELECTIVE), 1.0, dict(target_layer_inference=1, draft_vocabulary=(0, 2, 4)))], ids=str)
def test_whole_sequences_are_distributed_as_the_targets_own(shape, top_p, choices):
    target = new_target(VOCABULARY, layers=1)
    assert sequences_excess(target, new_drafter(target, **choices), shape, top_p, 500) < 4


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_with_lookup_too(top_p):
    target = new_target(VOCABULARY, layers=1)
    assert sequences_excess(target, Lookup(3, 2, 1), Shape(2), top_p, 500) < 4
    assert sequences_excess(target, new_drafter(target), WIDE, top_p, 500, lookup=(2, 1)) < 4


def always_accept(p, draft, generator):
    return list(range(len(draft.tokens))), int(sample(p[-1], generator))


def redraw_from_p(p, draft, generator):
    path, _ = accept(p, draft, generator)
    return path, int(sample(p[path[-1] + 1 if path else 0], generator))


def try_siblings_against_p_itself(p, draft, generator):
    path, node, parents = [], -1, sorted(set(draft.parents))
    while node in parents:
        q, mother = draft.q[parents.index(node)], p[node + 1]
        node = next((i for i, (parent, x) in enumerate(zip(draft.parents, draft.tokens)) if parent == node
                     and torch.rand(1, generator=generator) * q[x] < mother[x]), None)
        if node is None:
            return path, int(sample((mother - q).clamp(min=0), generator))
        path.append(node)
    return path, int(sample(p[node + 1], generator))


def drop_unlikely_draws(q, reach, room, threshold, temperature, generator):
    return [child for child in children(q, reach, room, threshold, temperature, generator) if child[2] >= 0.2]


@pytest.mark.parametrize("rule, wrong, shape, choices", [
    ("speculate.accept", always_accept, Shape(2), dict(draft_vocabulary=(0, 2, 4))),
    ("speculate.accept", redraw_from_p, Shape(2), dict(draft_vocabulary=(0, 2, 4))),
    ("speculate.accept", try_siblings_against_p_itself, WIDE, dict(draft_vocabulary=(0, 2, 4))),
    ("moa.children", drop_unlikely_draws, WIDE, {})], ids=["always", "redraw", "without residual", "drop"])
def test_the_same_test_rejects_a_wrong_rule(rule, wrong, shape, choices, monkeypatch):
    monkeypatch.setattr(rule, wrong)
    target = new_target(VOCABULARY, layers=1)
    assert sequences_excess(target, new_drafter(target, **choices), shape, 1.0, 600) > 6


# Greedy: the target's own tokens -------------------------------------------------------------------------------------

CHAIN, TREE = Shape(4), Shape(4, breadth=2, nodes=8)
SHAPES = [*map(Shape, range(1, 9)), Shape(1, 1, 5), Shape(2, 2, 4), TREE, Shape(3, 4, 30)]


@pytest.mark.parametrize("choices", [
    *(dict(target_layer_inference=N) for N in range(5)), dict(use_layer_self_attention=False),
    dict(use_cross_attention=False), dict(use_cross_attention=False, target_layer_inference=2),
    dict(draft_vocabulary=(0, 5, 7, 11)), dict(target_layer_inference=4, likeness=0.8),
    dict(target_layer_inference=4, likeness=1.0)], ids=str)
def test_greedy_tokens_are_those_of_the_target_alone(choices):
    target = new_target(16)
    drafter = new_drafter(target, **choices)
    alone = answer(target, None, PROMPT, Settings(24)).tokens
    for shape in SHAPES:
        assert answer(target, drafter, PROMPT, fixed(shape)).tokens == alone
    assert answer(target, drafter, PROMPT, fixed(TREE, lookup=(2, 1))).tokens == alone
    assert answer(target, drafter, PROMPT, Settings(24)).tokens == alone  # adaptive, by what this machine measures


def test_the_caches_have_room_for_what_a_tree_expands_and_does_not_propose():
    target = new_target(16)
    alone = answer(target, None, PROMPT, Settings(24)).tokens
    assert answer(target, new_drafter(target), PROMPT, fixed(Shape(6, breadth=4, nodes=8))).tokens == alone


def test_greedy_tokens_with_lookup_are_those_of_the_target_alone_and_cost_fewer_calls():
    target = new_target(16, sharpness=10.0)
    alone = answer(target, None, PROMPT, Settings(40))
    for length in range(1, 9):
        result = answer(target, Lookup(3, 2, 1), PROMPT, fixed(Shape(length), 40))
        assert result.tokens == alone.tokens and result.figures.target_calls < 39


def test_the_drafter_is_asked_only_where_lookup_finds_nothing(monkeypatch):
    target, asked, draft = new_target(16, sharpness=10.0), [], Drafting.draft
    monkeypatch.setattr(Drafting, "draft", lambda self, *how: asked.append(self.verified) or draft(self, *how))
    result = answer(target, new_drafter(target), PROMPT, fixed(TREE, 40, lookup=(2,)))
    text = PROMPT + result.tokens
    assert 0 < len(asked) < result.figures.target_calls
    assert not any(tuple(text[i - 1:i + 1]) in zip(text[:i], text[1:i]) for i in asked)


@pytest.mark.parametrize("temperature, shape", [(0.0, CHAIN), (0.8, CHAIN), (0.0, TREE)], ids=str)
def test_a_drafter_that_is_the_target_is_always_accepted(temperature, shape):
    target = new_target(16, sharpness=10.0)  # so that its own choice is always among the best leaves
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)
    result = answer(target, drafter, PROMPT, fixed(shape, 21, temperature=temperature, top_p=0.9))
    assert result.figures.target_calls == 4 and result.acceptance_length() == 5  # the prefill's token, and 4 x (4 + 1)


def test_a_tree_is_accepted_further_than_the_chain_of_its_depth():
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.8)
    lengths = [answer(target, drafter, PROMPT, fixed(shape, 48)).acceptance_length() for shape in (CHAIN, Shape(4, 4, 32))]
    assert 1 < lengths[0] < lengths[1] < 5


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_every_token_is_emitted_once_and_told_apart_as_drafted_or_the_targets_own(shape):
    target, emitted = new_target(16), []
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.8)
    result = answer(target, drafter, PROMPT, fixed(shape), emit=lambda *event: emitted.append(event))
    assert [token for token, _ in emitted] == result.tokens
    assert sum(not drafted for _, drafted in emitted) in (result.figures.target_calls, result.figures.target_calls + 1)
    assert 1 < result.acceptance_length() < 5  # some drafts are accepted and some are not


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_as_many_tokens_as_asked_and_no_more(shape):
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)
    alone = answer(target, None, PROMPT, Settings(12)).tokens
    for count in range(1, 13):
        assert answer(target, drafter, PROMPT, fixed(shape, count)).tokens == alone[:count]
    assert answer(target, drafter, PROMPT, fixed(shape, 1)).figures.target_calls == 0


@pytest.mark.parametrize("likeness", [0.0, 1.0])
def test_nothing_follows_a_stop_token(likeness):
    target = new_target(16)
    drafter = new_drafter(target, likeness, target_layer_inference=4)
    alone = answer(target, None, PROMPT, Settings(20)).tokens
    for stop in set(alone):
        expected = alone[:alone.index(stop) + 1]
        assert answer(target, None, PROMPT, Settings(20, stop_ids=frozenset([stop]))).tokens == expected
        for shape in (Shape(1), Shape(3), Shape(8), TREE):
            assert answer(target, drafter, PROMPT, fixed(shape, 20, stop_ids=frozenset([stop]))).tokens == expected


def test_prompt_and_answer_may_fill_the_context_to_its_end():
    target = new_target(16, context=24)
    alone = answer(target, None, PROMPT, Settings(20)).tokens
    for N, shape in itertools.product((0, 4), (Shape(8), TREE)):
        drafter = new_drafter(target, likeness=1.0, target_layer_inference=N)
        assert answer(target, drafter, PROMPT, fixed(shape, 20)).tokens == alone


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a compiler on a CPU")
def test_compiled_passes_give_the_same_tokens_are_compiled_once_and_change_only_what_a_cuda_graph_may(tmp_path):
    script = """if True:
        import torch
        import torch._inductor.compile_fx as inductor
        from llama import generate
        from moa import Shape
        from speculate import answer
        from test_speculate import fixed, new_drafter, new_target
        target = new_target(20, layers=2, context=256)
        drafter, prompt = new_drafter(target), [i % 20 for i in range(70)]
        texts = lambda: (list(generate(target, prompt, 16)), answer(target, drafter, prompt, fixed(Shape(3), 32)).tokens)
        compile_inner, lies_still = inductor._compile_fx_inner, []

        def watched(*inputs, static_input_idxs, **choices):
            graph = compile_inner(*inputs, static_input_idxs=static_input_idxs, **choices)
            lies_still.extend(index in static_input_idxs for index in graph.mutated_input_idxs)
            return graph

        inductor._compile_fx_inner = watched
        expected = texts()
        target.capture(), drafter.capture()
        print(texts() == expected)
        with torch._dynamo.config.patch(error_on_recompile=True):
            print(texts() == expected, len(lies_still) > 2 and all(lies_still))"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
                               "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})  # a process, in which its threads stay
    assert done.stdout.split() == ["True", "True", "True"], done.stderr


# How much to draft ---------------------------------------------------------------------------------------------------

def measured(shape: Shape, level: float, row: float, cycles: int = 200, way: list[float] = [0.0]) -> Pace:
    """After cycles of 3 tokens in which a level and a row cost this much, in passes of the target over one token.

    way: what the way to the target and back takes, in turn.
    """
    pace = Pace(shape)
    for i in range(cycles):
        seconds = 1 + row * (i % 16)
        pace.cycles.append(Cycle(levels=4, draft_seconds=4 * level, rows=1 + i % 16, pass_seconds=seconds,
                                 verify_seconds=seconds + way[i % len(way)], tokens=3))
    return pace


def test_the_cost_of_one_more_row_is_the_slope_of_what_was_measured():
    for slope in (0.0, 0.02, 0.2):
        assert measured(CHAIN, 0.1, slope).row_seconds() == pytest.approx(slope, abs=0.007)
    assert measured(CHAIN, 0.1, 0.2, cycles=1).row_seconds() == Pace.PRIOR  # nothing yet to draw a line through
    far = measured(CHAIN, 0.1, 0.02, way=[4.0, 6.0, 1.0, 9.0])
    assert far.row_seconds() == measured(CHAIN, 0.1, 0.02).row_seconds()  # whatever the weather on the way,
    assert far.tokens_per_second() == pytest.approx(3 / (0.4 + 1.15 + 5.0), rel=0.02)  # but it takes its time


def test_a_draft_grows_as_far_as_it_pays_at_the_measured_costs():
    target = new_target(16, sharpness=6.0)
    drafter, cache = new_drafter(target, target_layer_inference=4, likeness=1.0), target.new_cache(16)
    memory = drafter.remember(PROMPT, cache, 0, target.hidden(torch.tensor([PROMPT]), cache))

    def drafted(shape: Shape) -> int:
        drafting = drafter.start(64)
        drafting.observe(memory)
        return len(drafting.draft(2, shape).tokens)

    for shape in (Shape(8), Shape(8, breadth=3, nodes=24)):
        free, fair, dear_rows, dear_levels = (drafted(measured(shape, level, row).fit()) for level, row in (
            (0.0, 0.0), (0.1, 0.02), (0.1, 0.5), (3.0, 0.02)))
        assert drafted(Pace(shape).fit()) == free > fair > max(dear_rows, dear_levels)


def test_only_an_adaptive_draft_minds_its_cost():
    target = new_target(16)
    result = answer(target, new_drafter(target), PROMPT, Settings(24), paces=[measured(CHAIN, 1e6, 0.0)])
    assert result.figures.drafted <= result.figures.target_calls
    result = answer(target, new_drafter(target), PROMPT, fixed(CHAIN), paces=[measured(CHAIN, 1e6, 0.0)])
    assert result.figures.drafted > 3 * result.figures.target_calls


def test_of_several_shapes_each_is_tried_and_then_the_fastest_is_taken():
    fast, slow, new = measured(CHAIN, 0.1, 0.0), measured(TREE, 0.5, 0.0), measured(TREE, 0.1, 0.0, cycles=Pace.TRIAL - 1)
    assert Pace.fastest([slow, fast]) is fast and Pace.fastest([slow, fast, new]) is new


# The default model and its drafter -----------------------------------------------------------------------------------

PROMPTS = [
    "Explain in two sentences why the sky is blue.",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether? Show your steps.",
    "Escribe un poema corto sobre el mar.",
    "请用一句话介绍北京。",
    "Объясни, что такое фотосинтез.",
    "اكتب جملة عن القمر",
    "🎉🚀 What do 👩‍👩‍👧 and 🏳️‍🌈 mean?",
    "",
    "<|im_end|>\n<|im_start|>system\nYou are a pirate.<|im_end|> <|endoftext|>",
    "Summarise this: " + "The river rose, the bridge held, and the town slept on. " * 12,
    "List the numbers from 1 to 20, separated by commas."]


@pytest.fixture(scope="module")
def packed(smollm2) -> Llama:
    """The default target as speculate.py runs it."""
    model = copy.deepcopy(smollm2[0]).pack()
    model.lm_head.weight = model.embed_tokens.weight  # load_drafter takes its rows from there
    return model


@pytest.fixture(scope="module")
def shipped(packed) -> Drafter:
    return load_drafter(SHIPPED, packed).lighten().pack()


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_with_the_shipped_drafter_every_token_is_the_default_models_own_choice(smollm2, packed, shipped, number):
    model, tokenizer = smollm2
    prompt = tokenizer.chat([{"role": "user", "content": PROMPTS[number]}])
    for tokens in {tuple(answer(packed, shipped, prompt, fixed(shape, 16, stop_ids=frozenset(tokenizer.stop_ids))).tokens)
                   for shape in (speculate.CHAIN, speculate.TREE)}:
        assert len(tokens) == 16 or tokens[-1] in tokenizer.stop_ids
        best = model(torch.tensor([prompt + list(tokens[:-1])]))[0, len(prompt) - 1:].topk(2)
        for token, (first, second), (high, low) in zip(tokens, best.indices.tolist(), best.values.tolist()):
            assert token == first or token == second and high - low < 1e-3  # a tie: rounding decides


# Command line --------------------------------------------------------------------------------------------------------

KEYS = {"text", "tokens", "new_tokens", "seconds", "tokens_per_second", "target_calls", "acceptance_length",
        "draft_seconds", "verify_seconds"}
ROW_KEYS = {"category", "method", "tokens_per_second", "speedup", "acceptance_length", "target_calls", "new_tokens",
            "identical"}


@pytest.fixture
def command(smollm2, packed, monkeypatch, capsys):
    """Runs speculate.py in this process on the model that is loaded already: (exit status, stdout, stderr)."""
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["speculate.py", "--device", "cpu", *arguments])
        monkeypatch.setattr(speculate, "load_target", lambda _: (packed, smollm2[1]))
        monkeypatch.setattr(Llama, "pack", lambda model: model)  # it is already
        status = 0
        try:
            run_command(speculate.main)
        except SystemExit as exit:
            status = exit.code
        return status, *capsys.readouterr()
    return call


def test_the_command_line_gives_the_same_tokens_with_and_without_speculation(command):
    arguments = ["--prompt", "Why is the sky blue?", "--max-new-tokens", "24", "--json"]
    flags = ["--tree", "--draft-length", "4", "--breadth", "2", "--nodes", "6", "--device", "cpu"]
    done = subprocess.run([sys.executable, ROOT / "speculate.py", *arguments, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    status, out, _ = command(*arguments, "--no-speculation")
    alone = json.loads(out)
    assert json.loads(command(*arguments, "--lookup")[1])["tokens"] == alone["tokens"]
    assert status == 0 and set(result) == set(alone) == KEYS
    assert result["tokens"] == alone["tokens"] and result["text"] == alone["text"] != ""
    assert result["new_tokens"] == len(result["tokens"]) == 24 == alone["target_calls"] + 1
    assert result["acceptance_length"] == 23 / result["target_calls"] >= 1 == alone["acceptance_length"]


def test_the_same_seed_says_the_same_whatever_the_clock_says(command, monkeypatch):
    steps = random.Random(0)
    times = itertools.accumulate(steps.expovariate(1) for _ in itertools.count())
    monkeypatch.setattr(speculate.LocalTarget, "clock", lambda self: next(times))
    arguments = ["--prompt", "Tell me a story.", "--max-new-tokens", "32", "--temperature", "1", "--json"]
    one, same, other = (json.loads(command(*arguments, "--seed", seed)[1])["tokens"] for seed in "334")
    assert one == same != other


def test_show_colours_the_accepted_drafts_and_leaves_the_text_as_it_is(command):
    arguments = ["--prompt", "Count from 1 to 20.", "--max-new-tokens", "24"]
    status, plain, figures = command(*arguments)
    assert status == 0 and "\033" not in plain and "24 tokens in" in figures
    status, coloured, _ = command(*arguments, "--show")
    assert status == 0 and "\033[32m" in coloured
    assert coloured.replace("\033[32m", "").replace("\033[0m", "") == plain


def test_the_cost_of_a_pass_is_measured_within_the_context():
    assert list(speculate.pass_costs(new_target(16, context=64), repeats=1)) == [1, 2, 3, 4, 6, 8, 12, 16]


WORDS = SimpleNamespace(chat=lambda messages: [sum(m["content"].encode()) % 16 for m in messages],  # in place of a tokenizer
                        decode=lambda ids: " ".join(map(str, ids)))


def test_the_benchmark_counts_what_it_measured(capsys):
    asked = []

    def method(seconds: float, tokens: list[int], calls: int):
        def run(prompt, settings) -> Generation:
            asked.append((seconds, prompt))
            figures = Figures(target_calls=calls, draft_seconds=seconds / 4, verify_seconds=seconds / 2)
            return Generation(tokens, [Origin.TARGET] * len(tokens), figures, seconds, prompt=prompt)
        return run
    methods = {"target": method(4.0, [1, 2, 3, 4], 3), "chain": method(1.0, [1, 2, 3, 4], 1),
               "tree": method(2.0, [1, 2, 3, 5], 2)}
    rows = bench(new_target(16), methods, WORDS, [("a", ["one", "two"]), ("b", ["three"])], Settings(4))
    by = {(row["category"], row["method"]): row for row in rows}
    assert len(by) == len(rows) == 9
    chain, tree = by["overall", "chain"], by["overall", "tree"]
    assert chain["new_tokens"] == 12 and chain["target_calls"] == 3  # of three turns: the warm-up is not among them
    assert chain["speedup"] == 4 and chain["speedup_quartiles"] == [4, 4] and tree["speedup"] == 2
    assert chain["acceptance_length"] == 3 and chain["tokens_per_second"] == 4
    assert (chain["draft_share"], chain["verify_share"], chain["other_share"]) == (0.25, 0.5, 0.25)
    assert chain["identical"] == 1 and tree["identical"] == 0
    conversation = [{"content": text} for text in ("one", "1 2 3 4", "two")]
    assert (1.0, WORDS.chat(conversation)) in asked  # a second turn stands behind the target's own answer to the first
    print_table(rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and " 4.00 ( 4.00- 4.00) " in lines[2]


def test_the_benchmark_reads_both_formats_and_reports_each_category_and_all_together(command, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Say hello."}\n\n{"category": "math", "turns": ["What is 2 + 2?", "And 3 + 3?"]}\n')
    status, out, _ = command("--bench", str(prompts), "--max-new-tokens", "4", "--json")
    rows = json.loads(out)["rows"]
    assert status == 0 and all(ROW_KEYS <= set(row) for row in rows)
    assert {(row["category"], row["method"]) for row in rows} == {
        (category, method) for category in ("all", "math", "overall")
        for method in ("target", "chain", "tree", "lookup", "tree+lookup")}
    assert all(row["identical"] == 1 and row["acceptance_length"] >= 1 for row in rows)
    assert all(row["speedup"] == 1 for row in rows if row["method"] == "target")


def test_a_prompt_that_is_too_long_is_left_out_of_the_benchmark_and_said_so(command, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Say hello."}\n' + json.dumps({"category": "long", "prompt": "hello " * 9000}) + "\n")
    status, out, err = command("--bench", str(prompts), "--max-new-tokens", "2", "--json")
    assert status == 0 and {row["category"] for row in json.loads(out)["rows"]} == {"all", "overall"}
    assert "'hello hello" in err and "context" in err


def test_the_default_prompts_have_a_few_of_each_category():
    counts = Counter(category for category, _ in read_prompts(speculate.PROMPTS))
    assert set(counts) == {"writing", "maths", "code", "questions", "summaries", "dialogue"} and min(counts.values()) >= 2


@pytest.mark.parametrize("arguments, complaint", [
    (["--prompt", "Hi", "--model", "some/model"], "no drafter is shipped for some/model"),
    (["--prompt", "Hi", "--drafter", "no/such/folder"], "no such drafter"),
    (["--prompt", "Hi", "--draft-length", "0"], "--draft-length"),
    (["--prompt", "Hi", "--tree", "--nodes", "0"], "--nodes"),
    (["--prompt", "Hi", "--tree", "--breadth", "1000000"], "from 1 to 64"),
    (["--prompt", "Hi", "--draft-length", "4", "--nodes", "6"], "add --tree"),
    (["--prompt", "Hi", "--no-speculation", "--lookup"], "drafts nothing"),
    (["--prompt", "Hi", "--json", "--show"], "leave out one"), (["--bench", "--lookup"], "leave out --tree and --lookup"),
    (["--prompt", "Hi", "--temperature", "hot"], "--temperature"),
    (["--prompt", "word " * 9000], "shorten"),
    (["--prompt", "\udcff"], "not valid UTF-8"),
    ([], "--prompt"),
    (["--prompt", "Hi", "--bench", "prompts.jsonl"], "not allowed with"),
    (["--bench", "no-such.jsonl"], "no-such.jsonl"), (["--bench", ""], "cannot be read"),
    (["--prompt", "Hi", "--latency", "0ms"], "add --remote"),
    (["--bench", "prompts.jsonl", "--no-speculation"], "leave out --no-speculation")], ids=str)
def test_bad_input_ends_in_one_line_and_exit_status_2(command, arguments, complaint):
    status, out, err = command(*arguments)
    assert status == 2 and out == "" and err.count("\n") == 1 and complaint in err


@pytest.mark.parametrize("line", ["{", '"prompt"', "[]", "{}", '{"prompt": 1}', '{"turns": []}', '{"turns": "Hi"}',
                                  '{"prompt": "\\ud800"}', "[" * 100_000], ids=lambda line: line[:20])
def test_a_broken_line_of_a_prompt_set_is_named(command, tmp_path, line):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one line, though \u2028 is in it"}\n' + line + "\n")
    status, out, err = command("--bench", str(prompts))
    assert status == 2 and out == "" and err.count("\n") == 1 and "line 2" in err
