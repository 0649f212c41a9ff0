"""Claims about the comparison of drafters: that all arms are of one size, that what is computed
along a text is what drafting gives, and that a training that was killed comes to the same end."""
import pytest
import torch
from tiny_models import new_target
from torch import Tensor

from app.answers import answer
from experiments.along_text import Text, acceptance_by_depth, count_passes
from experiments.arms import ARMS, WithArm, count_parameters, new_drafter_of, read
from llama import GenerationConfig, Llama, Sampling, generate, probabilities
from moa import Drafter, DraftLimits
from train import Example, TrainConfig, distill, loss_mask

PROMPT = [0, 3, 1, 4]
DEPTH = 3


@pytest.fixture(scope="module")
def target() -> Llama:
    return new_target(6, layers=6)


def drafter_of(name: str, target: Llama, width: int = 24) -> Drafter:
    """A random drafter. With six tokens it is right by chance now and then."""
    drafter = new_drafter_of(ARMS[name], target, width, None, seed=1)
    with torch.no_grad():
        for parameter in drafter.trained_parameters().values():
            parameter.mul_(3.0)  # so that it is sure of something
    return drafter.requires_grad_(False)


def passes_along(name: str, drafter: Drafter, text: Text) -> float:
    reading = read(drafter.target, text.tokens.unsqueeze(0))
    [accepted] = acceptance_by_depth(drafter, ARMS[name], reading, [text], DEPTH)
    return count_passes(accepted, text.prompt, len(text.tokens))


@pytest.mark.parametrize("name", ARMS)
def test_greedy_chains_take_as_many_passes_along_a_text_as_while_drafting(name, target):
    drafter = drafter_of(name, target)
    config = GenerationConfig(max_new_tokens=40)
    method = WithArm(target, drafter, DraftLimits(depth=DEPTH))
    calls = 0
    for first in range(6):
        prompt = [first, *PROMPT]
        generation = answer(method, prompt, config)
        text = Text(torch.tensor(prompt + generation.tokens), len(prompt), 0.0)
        assert passes_along(name, drafter, text) == generation.target_calls
        calls += generation.target_calls
    assert calls < 6 * 39  # some drafts were accepted
