"""Many conversations at once: each gets what it would get alone, whatever its neighbours, with and
without chains of drafts."""
import itertools
import math
from dataclasses import replace
from typing import Callable

import pytest
import torch
from test_bench import command, prompt_file, rows_of  # noqa: F401 (a fixture)
from test_losslessness import (
    CLEARLY,
    LAYERS,
    VOCABULARY,
    Comparison,
    accept_all,
    chance,  # noqa: F401 (a fixture)
    check,
    compare,
    exact_texts,
    redraw_from_p,
    sharpen,
)
from tiny_models import PROMPT, chi_square, new_drafter, new_target

from experiments import batching
from experiments.batching import Batch, BatchDraftState, ChainBatch, RaggedKVCache, Request
from llama import GenerationConfig, Llama, Sampling, generate, probabilities, sample_next
from moa import Drafter, DraftLimits
from speculate import TreeSampler

Prompts = list[tuple[list[int], GenerationConfig]]


@torch.inference_mode()
def answer_in(batch: Batch, prompts: Prompts) -> list[Request]:
    """All requests, in the order of the prompts. Each begins as soon as a row is free."""
    waiting = list(enumerate(prompts))
    ended = []
    while len(ended) < len(prompts):
        new = []
        for _ in range(len(batch.cache.rows) - len(batch.requests)):
            if waiting:
                key, (prompt, config) = waiting.pop(0)
                new.append((key, prompt, config))
        batch.add_all(new)
        ended += batch.step()
        assert len(ended) + len(batch.requests) + len(waiting) == len(prompts)
    assert batch.step() == []
    return sorted(ended, key=lambda request: request.key)


@pytest.fixture(scope="module")
def target() -> Llama:
    return new_target(16, context=101)


def random_tokens(count: int) -> list[int]:
    return torch.randint(16, (count,)).tolist()


# --- Without drafts ---

SIZES = [(3, 20), (1, 1), (90, 11), (2, 9), (7, 94), (5, 30), (4, 25)]  # of prompts and answers


@pytest.mark.parametrize("together", [False, True])
def test_a_conversation_in_a_batch_is_the_one_alone_whatever_its_neighbors_and_its_row(
    target, together, monkeypatch
):
    if together:  # as on a GPU
        monkeypatch.setattr(Batch, "add_all", lambda batch, new: new and batch.add_together(new))
    prompts = []
    expected = []
    for i, (size, count) in enumerate(SIZES):  # two of them fill the capacity
        prompt = random_tokens(size)
        top_p = 0.8 if i % 2 else 1.0
        config = GenerationConfig(count, temperature=(1.0, 0.0, 0.7)[i % 3], top_p=top_p, seed=i)
        alone = list(generate(target, prompt, config))
        if i in (0, 5):  # these end at a stop token
            config = replace(config, stop_ids=frozenset({alone[6]}))
            alone = alone[:alone.index(alone[6]) + 1]
        prompts.append((prompt, config))
        expected.append(alone)
    forward = [0, 1, 2, 3, 4, 5, 6]
    mixed = [6, 2, 5, 1, 0, 4, 3]
    for rows, order in ((1, mixed), (3, forward), (9, mixed)):
        answers = answer_in(Batch(target, rows, capacity=101), [prompts[i] for i in order])
        for i, request in zip(order, answers, strict=True):
            assert request.tokens == expected[i]
            assert request.target_calls == len(expected[i]) - 1


def test_tokens_drawn_together_are_those_drawn_alone_as_no_row_uses_up_anothers_random_numbers():
    logits = torch.randn(5, 300)

    def samplings() -> list[Sampling]:
        configs = [GenerationConfig(temperature=1.0, seed=seed) for seed in range(4)]
        configs.append(GenerationConfig(temperature=0.5, seed=4))
        return [config.new_sampling("cpu") for config in configs]

    alone = [sample_next(row, sampling) for row, sampling in zip(logits, samplings())]
    assert batching.sample_together(logits, samplings()) == alone


def test_logits_that_are_nan_are_an_error_also_where_rows_are_sampled_together():
    samplings = [Sampling(), Sampling()]
    with pytest.raises(FloatingPointError, match="NaN"):
        batching.sample_together(torch.tensor([[0.0, 1.0], [math.nan, 0.0]]), samplings)


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_tokens_drawn_together_are_of_their_rows_distributions(top_p):
    logits = torch.tensor([[0.35, 0.0, 0.25, 0.2, 0.1, 0.06, 0.03, 0.01],
                           [0.0, 0.1, 0.5, 0.0, 0.2, 0.2, 0.0, 0.0]]).log()
    temperatures = [1.0, 0.5, 0.0]
    samplings = []
    for temperature in temperatures:
        config = GenerationConfig(temperature=temperature, top_p=top_p)
        samplings.append(config.new_sampling("cpu"))
    drawn = []
    for _ in range(100):
        drawn += batching.sample_together(logits[[0, 1, 1] * 40], samplings * 40)
    drawn = torch.tensor(drawn).view(-1, 3).unbind(1)
    for row in (0, 1):
        p = probabilities(logits[row], temperatures[row], top_p)
        assert chi_square(drawn[row], p) < 22.5  # of 6 degrees of freedom or fewer
    assert set(drawn[2].tolist()) == {2}


# --- With chains ---


@pytest.fixture(scope="module")
def requests(target) -> Prompts:
    """Some end at their length, the others at a stop token. The answer to one fills the context."""
    requests = [
        (PROMPT, GenerationConfig(24)),
        ([7], GenerationConfig(1)),
        (random_tokens(81), GenerationConfig(20)),
        ([2, 9], GenerationConfig(9)),
        (PROMPT + [5], GenerationConfig(13)),
        ([1], GenerationConfig(2)),
        ([8, 8], GenerationConfig(17)),
    ]
    for prompt, config in list(requests):
        alone = list(generate(target, prompt, config))
        stop = frozenset([alone[len(alone) // 2]])
        requests.append((prompt, replace(config, stop_ids=stop)))
    return requests


@pytest.mark.parametrize("rows, choices", [
    (1, dict(target_layer_inference=4, likeness=0.8)),
    (3, {}),
    (3, dict(target_layer_inference=4, likeness=0.8)),
    (8, dict(target_layer_inference=1)),
])
def test_greedy_chains_in_a_batch_answer_each_as_the_target_does_alone(
    rows, choices, target, requests
):
    drafter = new_drafter(target, **choices)
    answers = answer_in(ChainBatch(target, drafter, rows, capacity=101, K=3), requests)
    expected = [list(generate(target, prompt, config)) for prompt, config in requests]
    assert [answer.tokens for answer in answers] == expected
    calls = sum(answer.target_calls for answer in answers)
    assert calls < sum(len(tokens) - 1 for tokens in expected)  # some drafts were accepted


PARTIAL = (3, 5, 8, 13)  # a draft vocabulary
# How many tokens are verified in each row, which may be a new one, and which row then ends.
CYCLES = [
    ([6], None),
    ([1, 3], None),
    ([2, 1, 8], None),
    ([1, 5, 2], 0),
    ([3, 1], None),
    ([2, 4], 1),
    ([3], None),
]


def read_tokens(state: BatchDraftState, cache: RaggedKVCache, tokens: list[list[int]]) -> None:
    """The target reads new tokens in each row, and the drafter their memory."""
    for row, new in enumerate(tokens):
        state.drafter.target.hidden(torch.tensor([new]), cache.rows[row])
        state.append_verified(row, new, cache.rows[row])


@pytest.mark.parametrize("N, temperature, top_p", [(0, 0.0, 1.0), (1, 0.8, 1.0), (1, 0.8, 0.7)])
def test_many_conversations_draft_what_each_would_alone(target, N, temperature, top_p):
    drafter = new_drafter(target, target_layer_inference=N, draft_vocabulary=PARTIAL)
    state = BatchDraftState(drafter, rows=3, capacity=64)
    cache = RaggedKVCache(target.new_cache(64, batch=3).kv)
    texts = []
    for counts, ends in CYCLES:
        if len(counts) > len(texts):
            texts.append([])
        tokens = [random_tokens(count) for count in counts]
        read_tokens(state, cache, tokens)
        for text, new in zip(texts, tokens):
            text += new
        newest = list(range(len(texts)))
        samplings = [sampling_of(row, temperature, top_p) for row in newest]
        for row, draft in enumerate(state.draft_chains(newest, 4, samplings)):
            sampling = sampling_of(row, temperature, top_p)
            alone = draft_alone(drafter, texts[row], row, sampling)
            assert draft.tokens == alone.tokens
            assert draft.parents == alone.parents
            assert draft.probabilities == pytest.approx(alone.probabilities, rel=1e-4)
            torch.testing.assert_close(draft.q, alone.q, atol=1e-4, rtol=1e-4)
        if ends is not None:  # the last row takes its place
            last = texts.pop()
            if ends < len(texts):
                texts[ends] = last
            for each in (cache, *state.caches):
                each.move_row(len(texts), ends)


def sampling_of(row: int, temperature: float, top_p: float) -> Sampling:
    return Sampling(temperature, top_p, torch.Generator().manual_seed(row))


def draft_alone(drafter: Drafter, text: list[int], root: int, sampling: Sampling):
    cache = drafter.target.new_cache(64)
    drafter.target.hidden(torch.tensor([text]), cache)
    state = TreeSampler(drafter, 64, sampling)
    state.append_verified(drafter.cache_update(text, cache))
    return state.draft(root, DraftLimits(depth=4))


# --- Lossless: every branch of what is drawn, as in test_losslessness.py ---

PROMPTS = [PROMPT, [1, 2] * 5, [2]]


@pytest.fixture(autouse=True)
def scripted(request, monkeypatch) -> None:
    """Where draws are scripted, batching.py's are as well."""
    if "chance" in request.fixturenames:
        chance = request.getfixturevalue("chance")
        monkeypatch.setattr(batching, "sample", chance.sample)


def record_another_q(monkeypatch) -> None:
    """Than the one that chains are drawn from."""
    right = BatchDraftState.draft_chains
    sharpened = lambda *args: [sharpen(draft) for draft in right(*args)]
    monkeypatch.setattr(BatchDraftState, "draft_chains", sharpened)


@torch.inference_mode()
def first_tokens(chance, row: int, top_p: float, **choices) -> Comparison:
    """Of one of several conversations. The draws of the others do not branch."""
    target = new_target(VOCABULARY, layers=LAYERS)
    drafter = new_drafter(target, **choices)
    config = GenerationConfig(max_new_tokens=16, temperature=0.8, top_p=top_p)
    chance.seed = row

    def run() -> list[int]:
        batch = ChainBatch(target, drafter, rows=len(PROMPTS), capacity=32, K=2)
        for key, prompt in enumerate(PROMPTS):
            prompt = [token % VOCABULARY for token in prompt]
            batch.add(key, prompt, replace(config, seed=key))
        batch.step()
        return batch.requests[row].tokens

    prompt = [token % VOCABULARY for token in PROMPTS[row]]
    return compare(chance.branches(run), exact_texts(target, config, prompt))


@pytest.mark.parametrize("row, top_p, choices", [
    (0, 1.0, {}),
    (1, 0.8, dict(target_layer_inference=1)),
    (2, 1.0, dict(draft_vocabulary=(0, 2))),
], ids=str)
def test_each_conversation_of_a_batch_is_distributed_as_the_targets_own(
    row, top_p, choices, chance  # noqa: F811
):
    check(first_tokens(chance, row, top_p, **choices))


@pytest.mark.parametrize("wrong_rule", [accept_all, redraw_from_p, record_another_q])
def test_the_same_check_of_a_batch_rejects_each_wrong_rule(
    wrong_rule: Callable, chance, monkeypatch  # noqa: F811
):
    wrong_rule(monkeypatch)
    assert first_tokens(chance, row=2, top_p=1.0, draft_vocabulary=(0, 2)).off > CLEARLY


# --- The program ---


def test_the_program_measures_the_target_and_chains_for_each_batch_size(
    checkpoint, prompt_file  # noqa: F811
):
    prompts = prompt_file(
        {"prompt": "Say hello."}, {"prompt": "Count to five."}, {"turns": ["What is 2 + 2?"]}
    )
    flags = [prompts, *checkpoint, "--rows", 1, 3, "--max-new-tokens", 12]
    rows = rows_of(command(batching, *flags, "--json"))
    names = [(row["batch"], row["method"]) for row in rows]
    assert names == list(itertools.product((1, 3), ("target", "chain")))
    for row in rows:
        assert row["category"] == "overall"
        assert row["tokens_per_second"] > 0 and row["speedup"] > 0
        assert row["identical"] == 1.0
        assert row["new_tokens"] > row["target_calls"] > 0
        assert (row["acceptance_length"] > 1) == (row["method"] == "chain")
    done = command(batching, *flags)
    assert "\nbatch     conversations at a time" in done.out  # the legend
    assert "Fastest: " in done.out and "All texts are identical" in done.out
