"""Claims about a drafter that drafts only some tokens."""
import torch
from tiny_models import PROMPT, new_drafter, new_target
from torch.testing import assert_close

from llama import Sampling, probabilities, sample
from moa import DraftLimits
from speculate import TreeSampler

VOCABULARY = (3, 5, 8, 13, 19)
OTHERS = [token for token in range(20) if token not in VOCABULARY]


def test_q_is_the_distribution_over_its_vocabulary_and_zero_elsewhere():
    target = new_target(20)
    drafter = new_drafter(target, draft_vocabulary=VOCABULARY)
    hidden = torch.randn(2, 3, 16)
    for sampling in (Sampling(), Sampling(0.7, 0.9)):
        temperature = sampling.temperature or 1.0
        q = drafter.distributions(hidden, sampling)
        logits = target.lm_head(hidden)[..., VOCABULARY]
        assert_close(q[..., VOCABULARY], probabilities(logits, temperature, sampling.top_p))
        assert not q[..., OTHERS].any()


def test_drafts_are_made_of_its_vocabulary_and_drawn_from_the_q_that_they_report():
    target = new_target(20)
    drafter = new_drafter(target, draft_vocabulary=VOCABULARY)
    cache = target.new_cache(len(PROMPT))
    target.hidden(torch.tensor([PROMPT]), cache)
    generator = torch.Generator().manual_seed(0)
    state = TreeSampler(drafter, 64, Sampling(0.7, 1.0, generator))
    state.append_verified(drafter.cache_update(PROMPT, cache))
    twin = torch.Generator().manual_seed(0)
    for _ in range(20):
        draft = state.draft(2, DraftLimits(1))
        assert draft.tokens[1] == sample(draft.q[0], twin)
        assert draft.tokens[1] in VOCABULARY
    tree = state.draft(2, DraftLimits(3, 3, 12))
    assert set(tree.tokens[1:]) <= set(VOCABULARY)
