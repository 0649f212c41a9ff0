"""Claims about ways to answer a prompt: the target's own tokens, each accounted for, and copied
drafts. (On a server: test_remote.py.)"""
import itertools
import subprocess
import sys

import pytest
import torch
from tiny_models import PROMPT, new_drafter, new_target, target_alone

from app.answers import Alone, Generation, Origin, WithDrafts, acceptance_length, answer
from app.lookup import Lookup
from app.speculate_command import TREE
from experiments.copies import NoDrafter, WithCopies
from llama import GenerationConfig, Llama, Sampling
from moa import CacheUpdate, Draft, Drafter, DraftLimits
from speculate import TreeSampler

CHAIN_OF_4 = DraftLimits(4)
TREE_OF_8 = DraftLimits(4, top_k=2, total_tokens=8)
CHAIN = DraftLimits(depth=6, min_confidence=0.2)


def draft_and_verify(
    target: Llama,
    drafter: Drafter,
    limits: DraftLimits,
    count: int,
    lookup: bool = False,
    **choices,
) -> Generation:
    """Answer PROMPT with `count` tokens. choices: other fields of the GenerationConfig."""
    method = WithDrafts(target, drafter, limits, lookup=lookup)
    return answer(method, PROMPT, GenerationConfig(count, **choices))


# --- Whole answers ---


@pytest.mark.parametrize("choices", [
    dict(target_layer_inference=2),
    dict(draft_vocabulary=(0, 5, 7, 11)),
    dict(target_layer_inference=4, likeness=0.8),
], ids=str)
def test_greedy_tokens_are_those_of_the_target_alone(choices):
    target = new_target(16)
    drafter = new_drafter(target, **choices)
    alone = answer(Alone(target), PROMPT, GenerationConfig(20)).tokens
    assert alone == target_alone(target, 20)
    for limits in (DraftLimits(1), DraftLimits(8), TREE_OF_8, TREE, CHAIN):
        assert draft_and_verify(target, drafter, limits, 20).tokens == alone
    assert draft_and_verify(target, drafter, TREE_OF_8, 20, lookup=True).tokens == alone
    # At such a temperature distributions are next to certain.
    assert draft_and_verify(target, drafter, TREE_OF_8, 20, temperature=1e-5).tokens == alone


def test_every_token_comes_once_as_a_draft_or_as_the_targets_own():
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.8)
    for limits in (CHAIN_OF_4, TREE_OF_8):
        generation = Generation(PROMPT)
        cycles = WithDrafts(target, drafter, limits).cycles(PROMPT, GenerationConfig(48))
        tokens = []
        origins = []
        for cycle in generation.record(cycles):
            tokens += cycle.tokens
            origins += cycle.origins
        assert tokens == generation.tokens and len(tokens) == 48
        assert origins == generation.origins
        # The target has one of its own in each call, and the prefill's.
        assert origins.count(Origin.TARGET) == generation.target_calls + 1
        assert origins.count(Origin.DRAFT) == 47 - generation.target_calls
        assert acceptance_length([generation]) == 47 / generation.target_calls


def test_an_answer_that_is_broken_off_has_its_tokens_and_time_and_closes_its_cycles():
    target = new_target(16)
    cycles = Alone(target).cycles(PROMPT, GenerationConfig(20))
    generation = Generation(PROMPT)
    recorded = generation.record(cycles)
    next(recorded)
    next(recorded)
    recorded.close()
    assert generation.tokens == target_alone(target, 2)
    assert generation.seconds > 0
    assert list(cycles) == []


@pytest.mark.parametrize("choices", [{}, dict(target_layer_inference=4, likeness=1.0)], ids=str)
@pytest.mark.parametrize("limits", [DraftLimits(8), TREE_OF_8], ids=str)
def test_an_answer_may_fill_the_context_and_ends_with_a_stop_token(choices, limits):
    target = new_target(16, context=len(PROMPT) + 20)
    drafter = new_drafter(target, **choices)
    alone = target_alone(target, 20)
    for count in (1, 2, 5, 20):
        result = draft_and_verify(target, drafter, limits, count)
        assert result.tokens == alone[:count]
        assert (result.target_calls == 0) == (count == 1)
    for stop in set(alone):
        result = draft_and_verify(target, drafter, limits, 20, stop_ids=frozenset([stop]))
        assert result.tokens == alone[:alone.index(stop) + 1]


@pytest.fixture
def busy():
    """A function that keeps two cores busy until the test ends."""
    processes = []

    def start() -> None:
        for _ in range(2):
            processes.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_every_method_drafts_the_same_on_every_run_also_on_a_busy_machine(busy):
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.8)

    def run() -> list:
        results = []
        for temperature, limits, lookup in itertools.product(
            (0.0, 0.8), (CHAIN, TREE), (False, True)
        ):
            result = draft_and_verify(
                target, drafter, limits, 16, lookup, temperature=temperature, seed=1
            )
            results.append((result.tokens, result.origins, result.target_calls, result.drafted))
        return results

    first = run()
    busy()
    assert run() == first


# --- Lookup ---


def test_lookup_alone_costs_fewer_calls():
    target = new_target(16, sharpness=10.0)
    alone = target_alone(target, 40)
    for length in (1, 4, 8):
        result = answer(WithCopies(target, DraftLimits(length)), PROMPT, GenerationConfig(40))
        assert result.tokens == alone
        assert result.target_calls < 39


@pytest.mark.parametrize("size, text, root, limits, drafted", [
    (3, [1, 2, 3, 4, 5, 1, 2], 3, DraftLimits(5, total_tokens=2), [4, 5]),  # as many as a tree
    (3, [1, 2, 3, 4, 1, 2, 3, 5, 1, 2], 3, DraftLimits(2), [5, 1]),  # after the newest occurrence
    (2, [5, 7, 8, 7], 8, DraftLimits(5), [7, 8, 7, 8, 7]),  # it goes on with what it has copied
    (3, [5, 7, 8, 7], 8, DraftLimits(5), []),
    (3, [7], 7, DraftLimits(5), []),
])
def test_lookup_copies_what_followed_the_same_tokens_before(size, text, root, limits, drafted):
    lookup = Lookup(NoDrafter(), 16, Sampling(), size)
    lookup.append_verified(CacheUpdate(text, None, None))
    assert lookup.draft(root, limits).tokens == [root, *drafted]


def test_with_lookup_the_drafter_is_asked_only_where_nothing_is_found(monkeypatch):
    target = new_target(16, sharpness=10.0)
    asked = []  # how long the text was
    right = TreeSampler.draft

    def draft(state: TreeSampler, root: int, limits: DraftLimits) -> Draft:
        asked.append(state.text_length + 1)
        return right(state, root, limits)

    monkeypatch.setattr(TreeSampler, "draft", draft)
    result = draft_and_verify(target, new_drafter(target), TREE_OF_8, 40, lookup=True)
    text = PROMPT + target_alone(target, 40)
    assert PROMPT + result.tokens == text
    assert 0 < len(asked) < result.target_calls
    for length in asked:
        newest = text[length - 3:length]
        earlier = [text[start:start + 3] for start in range(length - 3)]
        assert newest not in earlier


# --- The default target and its drafter ---

QUESTIONS = [
    "Explain in two sentences why the sky is blue.",
    "请用一句话介绍北京。",
    "",
    "Summarise this: " + "The river rose, the bridge held, and the town slept on. " * 6,
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda text: ascii(text)[:20])
@torch.inference_mode()
def test_with_the_shipped_drafter_every_token_is_the_default_targets_own_choice(
    smollm2, packed_smollm2, question
):
    model, tokenizer = smollm2
    prompt = tokenizer.chat([{"role": "user", "content": question}])
    config = GenerationConfig(16, stop_ids=frozenset(tokenizer.stop_ids))
    kinds = [TREE, CHAIN] if question == QUESTIONS[0] else [TREE]
    for limits in kinds:  # (a chain takes as long again)
        tokens = answer(WithDrafts(*packed_smollm2, limits), prompt, config).tokens
        assert len(tokens) == 16 or tokens[-1] in tokenizer.stop_ids
        hidden = model.hidden(torch.tensor([prompt + tokens[:-1]]))[0, len(prompt) - 1:]
        logits = model.lm_head(hidden)
        largest = logits.max(dim=-1).values
        for i, token in enumerate(tokens):
            assert logits[i, token] > largest[i] - 1e-3  # a tie: rounding decides
