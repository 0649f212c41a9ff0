"""Fixed trees write the target's own distribution, and are compared with drawn ones."""
import itertools

import pytest
from test_bench import command, prompt_file, rows_of  # noqa: F401 (a fixture)
from test_losslessness import (
    CLEARLY,
    LAYERS,
    PROMPT,
    VOCABULARY,
    Chance,
    Comparison,
    chance,  # noqa: F401 (a fixture)
    check,
    compare,
    exact_texts,
)
from tiny_models import new_drafter, new_target
from torch import Tensor

from experiments import fixed_tree
from experiments.fixed_tree import WithFixedTrees
from llama import GenerationConfig, Sampling, sample_next
from moa import Draft, DraftLimits
from speculate import Acceptance

TREE = DraftLimits(2, top_k=2, total_tokens=3)
CAUTIOUS_TREE = DraftLimits(3, top_k=2, total_tokens=6, min_confidence=0.5, min_probability=0.1)


def answers(
    chance: Chance, limits: DraftLimits, ranking: Sampling | None = None, drafts: int = 1
) -> Comparison:
    """Of answers that are interrupted after so many drafts."""
    target = new_target(VOCABULARY, layers=LAYERS)
    config = GenerationConfig(16, temperature=0.8, top_p=0.95)
    method = WithFixedTrees(target, new_drafter(target), limits, ranking)

    def run() -> list[int]:
        tokens = []
        cycles = method.cycles(PROMPT, config)
        for cycle in itertools.islice(cycles, 1 + drafts):  # the first one is the prompt's
            tokens += cycle.tokens
        return tokens

    return compare(chance.branches(run), exact_texts(target, config, PROMPT))


@pytest.mark.parametrize("choices", [
    dict(limits=TREE, drafts=2),
    dict(limits=TREE, ranking=Sampling(1.0)),
    dict(limits=CAUTIOUS_TREE),
], ids=["two trees", "tree, q at 1", "limits"])
def test_an_answer_with_fixed_trees_is_distributed_as_the_targets_own(
    choices, chance  # noqa: F811
):
    check(answers(chance, **choices))


def accept_what_is_drafted(logits: Tensor, draft: Draft, sampling: Sampling) -> Acceptance:
    path = [0]
    while draft.children(path[-1]):
        path.append(draft.children(path[-1])[0])
    return Acceptance(path, sample_next(logits[path[-1]], sampling))


def draw_again(logits: Tensor, draft: Draft, sampling: Sampling) -> Acceptance:
    """After a token that was not drafted."""
    path = [0]
    while True:
        child = draft.child(path[-1], sample_next(logits[path[-1]], sampling))
        if child is None:
            return Acceptance(path, sample_next(logits[path[-1]], sampling))
        path.append(child)


def draw_after_the_root(logits: Tensor, draft: Draft, sampling: Sampling) -> Acceptance:
    """Whatever was accepted."""
    return right_rule(logits[:1].expand_as(logits), draft, sampling)


right_rule = fixed_tree.accept_own_draws


@pytest.mark.parametrize("rule", [accept_what_is_drafted, draw_again, draw_after_the_root])
def test_the_same_check_rejects_a_wrong_rule(rule, chance, monkeypatch):  # noqa: F811
    monkeypatch.setattr(fixed_tree, "accept_own_draws", rule)
    assert answers(chance, TREE).off > CLEARLY


def test_the_command_compares_each_size_with_drawn_trees_of_that_size(
    prompt_file, checkpoint  # noqa: F811
):
    file = prompt_file({"prompt": "a(1)"}, {"prompt": "b(2)"})
    flags = [file, *checkpoint, "--seeds", 2, "--total-tokens", 4, 9, "--max-new-tokens", 6]
    rows = rows_of(command(fixed_tree, *flags, "--json"))
    names = ["chain"]
    for total in (4, 9):
        names += [f"drawn {total}", f"fixed {total}", f"fixed {total}, q at 1"]
    assert [row["method"] for row in rows] == names
    for row in rows:
        low, high = row["acceptance_interval"]
        assert 1 <= low <= row["acceptance_length"] <= high
        low, high = row["difference_interval"]
        assert low <= row["difference"] <= high
        assert (low == high == 0) or not row["method"].startswith("drawn")
        assert row["cpu_ms_per_call"] > 0
