"""The chapter's loop, by itself: at temperature 0 it writes the target's own tokens.

test_losslessness.py tests that above temperature 0 the text is distributed as the target's own.
"""
import math
from collections import Counter

import pytest
import torch
from tiny_models import PROMPT, chi_square, new_drafter, new_target, target_alone

from llama import GenerationConfig, Llama, probabilities
from moa import Draft, Drafter, DraftLimits, likeliest_candidates
from speculate import (
    Cycle,
    LocalVerifier,
    TreeSampler,
    accept_draft,
    accept_greedy,
    draw_candidates,
    gumbel_topk,
    speculate,
)

CHAIN_OF_4 = DraftLimits(4)
TREE_OF_8 = DraftLimits(4, top_k=2, total_tokens=8)


def run(
    target: Llama, drafter: Drafter, limits: DraftLimits, count: int, **choices
) -> list[Cycle]:
    """Answer PROMPT with `count` tokens. choices: other fields of the GenerationConfig."""
    config = GenerationConfig(count, **choices)
    sampling = config.new_sampling("cpu")
    verifier = LocalVerifier(target, drafter, 128, sampling)
    state = TreeSampler(drafter, 128, sampling)
    return list(speculate(verifier, state, PROMPT, config, limits))


def text(cycles: list[Cycle]) -> list[int]:
    return [token for cycle in cycles for token in cycle.tokens]


# --- Greedy acceptance ---


def new_draft(tokens: list[int], parents: list[int]) -> Draft:
    draft = Draft(0)
    for token, parent in zip(tokens, parents):
        draft.add(token, parent, probability=1.0)
    return draft


def chain(*tokens: int) -> Draft:
    return new_draft(list(tokens), list(range(len(tokens))))


CHOICES = [
    (chain(3, 1, 4), [3, 1, 4, 1], [0, 1, 2, 3], 1),
    (chain(3, 1, 0), [3, 1, 4, 1], [0, 1, 2], 4),
    (chain(3, 0, 4), [3, 1, 4, 1], [0, 1], 1),
    (chain(0, 1, 4), [3, 1, 4, 1], [0], 3),
    (chain(), [3], [0], 3),
]
BRANCHES = new_draft([3, 1, 4, 4, 2], [0, 0, 1, 2, 2])
CHOICES += [
    (BRANCHES, [1, 0, 4, 0, 2, 3], [0, 2, 4], 2),  # not the 4 of the other branch
    (BRANCHES, [1, 0, 2, 0, 2, 3], [0, 2, 5], 3),
    (BRANCHES, [3, 0, 2, 0, 2, 3], [0, 1], 0),
]


@pytest.mark.parametrize("draft, choices, path, token", CHOICES)
def test_greedy_acceptance_follows_the_targets_choices_as_far_as_they_were_drafted_then_takes_one(
    draft, choices, path, token
):
    acceptance = accept_greedy(choices, draft)
    assert (acceptance.path, acceptance.token) == (path, token)


# --- Whole answers at temperature 0: the target's own tokens ---

LIMITS = [
    DraftLimits(1),
    DraftLimits(8),
    DraftLimits(1, top_k=2, total_tokens=5),
    TREE_OF_8,
    DraftLimits(3, top_k=4, total_tokens=30),
    DraftLimits(6, top_k=4, total_tokens=8),  # expands more leaves than it proposes tokens
    DraftLimits(6, 3, 8, min_confidence=0.15, min_probability=0.04),
]


@pytest.mark.parametrize("choices", [
    dict(target_layer_inference=0),
    dict(target_layer_inference=2),
    dict(target_layer_inference=4, likeness=0.8),
    dict(target_layer_inference=4, likeness=1.0),
], ids=str)
def test_greedy_tokens_are_those_of_the_target_alone(choices):
    target = new_target(16)
    drafter = new_drafter(target, **choices)
    alone = target_alone(target, 20)
    for limits in LIMITS:
        assert text(run(target, drafter, limits, 20)) == alone
    # At such a temperature distributions are next to certain.
    assert text(run(target, drafter, TREE_OF_8, 20, temperature=1e-5)) == alone


@pytest.mark.parametrize(
    "temperature, limits", [(0.0, CHAIN_OF_4), (0.8, CHAIN_OF_4), (0.0, TREE_OF_8)], ids=str
)
def test_a_drafter_that_is_the_target_is_always_accepted(temperature, limits):
    target = new_target(16, sharpness=10.0)  # its own choice is always among the best leaves
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)
    cycles = run(target, drafter, limits, 21, temperature=temperature, top_p=0.9)
    assert [len(cycle.tokens) for cycle in cycles] == [1, 5, 5, 5, 5]


def test_a_tree_is_accepted_further_than_a_chain():
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.6)
    chains = run(target, drafter, CHAIN_OF_4, 48)
    trees = run(target, drafter, DraftLimits(4, top_k=4, total_tokens=64), 48)
    assert 10 < len(trees) < len(chains) < 48


@pytest.mark.parametrize("choices", [{}, dict(target_layer_inference=4, likeness=1.0)], ids=str)
@pytest.mark.parametrize("limits", [DraftLimits(8), TREE_OF_8], ids=str)
def test_an_answer_ends_at_the_length_asked_for_or_with_a_stop_token(choices, limits):
    target = new_target(16, context=len(PROMPT) + 20)  # the answer fills the context
    drafter = new_drafter(target, **choices)
    alone = target_alone(target, 20)
    for count in (1, 2, 5, 20):
        assert text(run(target, drafter, limits, count)) == alone[:count]
    for stop in set(alone):
        stopped = text(run(target, drafter, limits, 20, stop_ids=frozenset([stop])))
        assert stopped == alone[:alone.index(stop) + 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_logits_that_are_nan_are_an_error(temperature, damage):
    sampling = GenerationConfig(temperature=temperature).new_sampling("cpu")
    draft = chain(3)
    draft.q[0] = torch.ones(4) / 4
    logits = torch.zeros(2, 4)
    logits[1, 2] = damage
    with pytest.raises(FloatingPointError):
        accept_draft(logits, draft, sampling)


# --- Sampled trees: how they are drawn ---


def test_gumbel_topk_draws_without_replacement_in_the_order_of_sampling():
    p = torch.tensor([0.5, 0.25, 0.15, 0.0, 0.1])
    generator = torch.Generator().manual_seed(0)
    pairs = torch.tensor([gumbel_topk(p, 2, generator) for _ in range(10_000)])
    drawn = 5 * pairs[:, 0] + pairs[:, 1]
    joint = p[:, None] * p / (1 - p)[:, None]  # a, then b: p(a) p(b) / (1 - p(a))
    joint.fill_diagonal_(0)
    assert chi_square(drawn, joint.flatten()) < 31.3  # 11 degrees of freedom: 1 seed in 1000
    assert chi_square(drawn, joint.T.flatten()) > 31.3  # the other order is noticed


@pytest.mark.parametrize("count", [1, 4, 9])
def test_how_many_children_each_node_has_is_settled_before_they_are_drawn(count):
    draft = new_draft([1, 2, 3], [0, 0, 0])
    q = probabilities(torch.randn(3, 8), 0.5, 0.95)
    likeliest = likeliest_candidates(draft, [1, 2, 3], q, count, 0.0)
    counts = Counter(choice.row for choice in likeliest)
    generator = torch.Generator().manual_seed(0)
    draws = [draw_candidates(counts, q, generator) for _ in range(20)]
    for drawn in draws:
        assert Counter(choice.row for choice in drawn) == counts
        assert len({(choice.row, choice.token) for choice in drawn}) == len(drawn)
        for choice in drawn:
            assert choice.probability == q[choice.row, choice.token] > 0
    assert len(set(map(tuple, draws))) > 1
