"""With drafts, greedy text and the logits behind it are those of the target alone, to the bit."""
import pytest
import torch
from tiny_models import PROMPT as TINY_PROMPT
from tiny_models import new_drafter, new_target
from torch import Tensor

from app.answers import count_slots
from app.exact import DetailedResult, ExactKVCache, ExactLlama, ExactVerifier
from app.loading import load_drafter, load_model
from app.lookup import Lookup
from app.packed import REFINED_TOKENS, RefinedHead, pack, pack_models
from app.speculate_command import REMOTE_TREE, TREE
from llama import GenerationConfig, Llama, Sampling
from moa import Drafter, DraftLimits
from plumbing.hub import SHIPPED_DRAFTERS
from plumbing.kernels import KEY_BLOCK
from plumbing.onednn import has_fast_bfloat16
from speculate import TreeSampler, speculate

# The default type: on a CPU without fast bfloat16 all tests run in float32.
DEFAULT = torch.bfloat16 if has_fast_bfloat16() else torch.float32
CHAIN = DraftLimits(depth=6, min_confidence=0.2)
PROMPT = "Write a story about a fox, a wolf and a crow."


def load_toy(dtype: torch.dtype) -> tuple[ExactLlama, Drafter]:
    target = load_model("toy", "cpu", dtype)
    drafter = load_drafter(SHIPPED_DRAFTERS["toy"], target)
    return pack_models(target, [drafter]), drafter


@torch.inference_mode()
def target_alone(target: ExactLlama, prompt: list[int], count: int):
    """Return the target's tokens after a prompt, and the logits that each was chosen from."""
    cache = target.new_cache(len(prompt) + count)
    new = prompt
    tokens = []
    logits = []
    for _ in range(count):
        hidden = target.hidden(torch.tensor([new]), cache)
        logits.append(target.lm_head(hidden[0, -1]))
        new = [int(logits[-1].float().argmax())]
        tokens += new
    return tokens, logits


def chosen_from(result: DetailedResult) -> list[Tensor]:
    """Return the logits that each new token of a cycle was chosen from."""
    node = 0
    logits = [result.logits[node]]
    for token in result.accepted:
        node = result.draft.child(node, token)
        logits.append(result.logits[node])
    return logits


def with_drafts(target: ExactLlama, drafter: Drafter, prompt, count, limits, lookup):
    """Return the same as `target_alone`, but for the first logits."""
    config = GenerationConfig(count)
    capacity = count_slots(prompt, config, limits)
    verifier = ExactVerifier(target, drafter, capacity, Sampling())
    assert isinstance(verifier.cache, ExactKVCache)
    state = TreeSampler(drafter, capacity, Sampling())
    if lookup:
        state = Lookup(state, target.config.vocab_size, Sampling())
    tokens = []
    logits = []
    for cycle in speculate(verifier, state, prompt, config, limits):
        tokens += cycle.tokens
        if cycle.result.logits is not None:  # the prompt's cycle has none
            logits += chosen_from(cycle.result)
    return tokens, logits


def check(target: ExactLlama, drafter: Drafter, prompt: list[int], count: int, *methods) -> None:
    expected, expected_logits = target_alone(target, prompt, count)
    for limits, lookup in methods:
        tokens, logits = with_drafts(target, drafter, prompt, count, limits, lookup)
        assert tokens == expected
        assert len(logits) >= len(tokens) - 1
        for ours, theirs in zip(logits, expected_logits[1:]):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", sorted({torch.float32, DEFAULT}, key=str))
def test_chains_trees_and_copies_are_exact_with_the_toy(toy, dtype):
    target, drafter = load_toy(dtype)
    prompt = toy[1].chat([{"role": "user", "content": PROMPT}])
    methods = [(CHAIN, False), (TREE, False), (TREE, True), (REMOTE_TREE, False)]
    check(target, drafter, prompt, 40, *methods)
    # Across a split of the kernel's sums, and across its block of keys.
    for length in (180, KEY_BLOCK - 12):
        text = (prompt * KEY_BLOCK)[:length]
        check(target, drafter, text, 24, (TREE, False), (REMOTE_TREE, False))


def test_chains_trees_and_copies_are_exact_with_the_default_target(smollm2, ready_smollm2):
    prompt = smollm2[1].chat([{"role": "user", "content": PROMPT}])
    check(*ready_smollm2, prompt, 12, (CHAIN, False), (TREE, True))
    # Across a block of keys.
    check(*ready_smollm2, (prompt * KEY_BLOCK)[:KEY_BLOCK - 4], 8, (REMOTE_TREE, False))


def test_a_draft_of_too_many_tokens_keeps_its_likelier_paths_and_is_exact(toy):
    target, drafter = load_toy(DEFAULT)
    prompt = toy[1].chat([{"role": "user", "content": PROMPT}])
    wide = DraftLimits(depth=16, top_k=4, total_tokens=60)
    check(target, drafter, prompt, 24, (wide, False), (DraftLimits(40), True))


def test_a_sampled_draft_is_verified_as_it_was_drawn(toy):
    target, drafter = load_toy(DEFAULT)
    prompt = toy[1].chat([{"role": "user", "content": PROMPT}])
    sampling = GenerationConfig(temperature=1.0).new_sampling("cpu")
    verifier = ExactVerifier(target, drafter, 200, sampling)
    state = TreeSampler(drafter, 200, sampling)
    result = verifier.prefill(prompt)
    state.append_verified(result.update)
    draft = state.draft(result.token, DraftLimits(depth=4, top_k=3, total_tokens=12))
    assert verifier.verify(draft).draft is draft


def test_a_pass_that_the_cache_was_not_told_of_is_an_error():
    """It would neither be exact nor mask the cache's unused slots."""
    target = pack(new_target(20))
    tokens = torch.tensor([TINY_PROMPT])
    cache = target.new_cache(8)
    x = target.embed_tokens(tokens)
    with pytest.raises(RuntimeError, match="only ExactLlama.hidden may write to its cache"):
        target.layers[0](x, target.rotary[:, :4], None, cache, 0)
    target.hidden(tokens, cache)  # and after a pass of its own, the same
    with pytest.raises(RuntimeError, match="only ExactLlama.hidden may write to its cache"):
        Llama.hidden(target, tokens, cache)


def test_with_a_target_that_is_not_exact_the_results_are_detailed_too():
    target = new_target(20)
    drafter = new_drafter(target)
    verifier = ExactVerifier(target, drafter, 64, Sampling())
    result = verifier.prefill(TINY_PROMPT)
    assert result.draft.tokens == [TINY_PROMPT[-1]] and result.logits is None
    state = TreeSampler(drafter, 64, Sampling())
    state.append_verified(result.update)
    draft = state.draft(result.token, TREE)
    result = verifier.verify(draft)
    assert result.draft is draft and result.logits.shape == (len(draft.tokens), 20)


def test_positions_without_a_mask_and_a_mask_without_positions_are_refused():
    mask = torch.ones(1, 1, dtype=torch.bool)
    for model in (new_target(20), pack(new_target(20))):
        for given in ({"positions": torch.tensor([0])}, {"mask": mask}):
            with pytest.raises(AssertionError, match="give both positions and a mask, or neither"):
                model.hidden(torch.tensor([[1]]), model.new_cache(8), **given)


# --- Ties of bfloat16 ---


@torch.inference_mode()
def test_the_largest_logits_of_a_refined_head_are_those_of_float32_alone_and_together(toy):
    target, drafter = load_toy(torch.bfloat16)
    head = target.lm_head
    if not isinstance(head, RefinedHead):
        pytest.skip("this CPU does not multiply bfloat16")
    assert drafter.lm_head is head.head  # drafts do without
    weight = target.embed_tokens.weight
    hidden = torch.randn(32, weight.shape[1]).bfloat16()
    together = head(hidden)
    exact = hidden.float() @ weight.float().T
    likeliest = head.head(hidden).float().topk(REFINED_TOKENS).indices
    torch.testing.assert_close(together.gather(1, likeliest), exact.gather(1, likeliest))
    assert torch.equal(together.argmax(-1), exact.argmax(-1))
    for count in range(1, 33):
        assert torch.equal(head(hidden[:count]), together[:count])
        assert torch.equal(head(hidden[count - 1]), together[count - 1])
