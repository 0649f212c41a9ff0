"""Claims about packed weights: the same results, for any number of tokens, and nothing silent."""
import copy
from dataclasses import replace

import pytest
import torch
from conftest import TIED, UNTIED
from tiny_models import PROMPT, new_drafter, new_target

from app.exact import ExactLlama
from app.loading import load_model
from app.packed import (
    PackedAttention,
    PackedLinear,
    can_pack,
    pack,
    pack_models,
)
from llama import Llama, Sampling
from moa import Draft, Drafter, DraftLimits, DraftState
from plumbing import kernels, onednn

TOKENS = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(0))
N2 = {"target_layer_inference": 2}
PARTIAL = {"draft_vocabulary": (3, 5, 8, 13, 19)}
packs = pytest.mark.skipif(not can_pack(torch.ones(1)), reason="nothing is packed on this CPU")


@pytest.mark.parametrize("dtype, tolerance", [
    (torch.float32, 2e-5), (torch.bfloat16, 0.05),
], ids=str)
@pytest.mark.parametrize("folder", [UNTIED, TIED], ids=lambda path: path.name)
def test_a_packed_model_gives_the_same_logits_for_any_number_of_tokens(folder, dtype, tolerance):
    model = load_model(folder, dtype=dtype)
    packed = pack(load_model(folder, dtype=dtype))
    if can_pack(torch.ones(1, dtype=dtype)):  # otherwise the model stays as it is
        assert [name for name, _ in packed.named_parameters()] == ["embed_tokens.weight"]
    cache = model.new_cache(200)
    packed_cache = packed.new_cache(200)
    for count in (*range(1, 18), 1, 40):
        expected = model(TOKENS[:1, :count], cache).float()
        logits = packed(TOKENS[:1, :count], packed_cache).float()
        assert (logits - expected).abs().max() < tolerance * expected.abs().max()


def draft_of(drafter: Drafter, limits: DraftLimits) -> Draft:
    """A draft after PROMPT, which the drafter's target reads."""
    target = drafter.target
    cache = target.new_cache(len(PROMPT))
    target.hidden(torch.tensor([PROMPT]), cache)
    state = DraftState(drafter, 64, Sampling())
    state.append_verified(drafter.cache_update(PROMPT, cache))
    return state.draft(2, limits)


@pytest.mark.parametrize("choices", [{}, N2, PARTIAL], ids=str)
def test_a_packed_drafter_drafts_the_same(choices):
    target = new_target(20)
    drafter = new_drafter(target, **choices)
    twin = copy.deepcopy(drafter)
    packed = pack_models(twin.target, [twin])
    assert twin.target is packed
    assert twin.rotary.dtype == torch.float32
    if can_pack(torch.ones(1)):
        assert isinstance(twin.self_attention.self_attn, PackedAttention)
        assert isinstance(twin.lm_head, PackedLinear)
        assert (twin.lm_head is packed.lm_head) == ("draft_vocabulary" not in choices)
    limits = DraftLimits(3, 4, 12)
    expected = draft_of(drafter, limits)
    draft = draft_of(twin, limits)
    assert (draft.tokens, draft.parents) == (expected.tokens, expected.parents)
    assert draft.probabilities == pytest.approx(expected.probabilities, rel=1e-4)


@packs
def test_the_model_that_was_packed_is_used_up_and_what_was_packed_is_neither_saved_nor_moved():
    model = new_target(20)
    packed = pack(model)
    assert isinstance(packed, ExactLlama)
    with pytest.raises(AttributeError, match="layers"):
        model(TOKENS[:, :3] % 20)
    with pytest.raises(RuntimeError, match="packed weights cannot be saved"):
        packed.state_dict()
    for move in (packed.half, lambda: packed.to("cpu"), lambda: packed.norm.to("meta")):
        with pytest.raises(RuntimeError, match="packed weights cannot be moved"):
            move()


def test_a_model_whose_dtype_cannot_be_packed_stays_as_it_is():
    model = load_model(UNTIED, dtype=torch.float16)
    assert pack(model) is model
    assert type(model) is Llama


@packs
@pytest.mark.parametrize("module, name", [
    (torch.ops.mkldnn, "_reorder_linear_weight"), (torch.ops.mkldnn, "_linear_pointwise"),
])
def test_where_pytorch_lacks_onednns_functions_products_are_plain(module, name, monkeypatch):
    def differs(*_):
        raise TypeError("other arguments")

    expected = new_target(20)(TOKENS % 20)
    monkeypatch.setattr(module, name, differs)
    onednn.can_multiply.cache_clear()
    model = new_target(20)
    assert pack(model) is model
    assert torch.equal(model(TOKENS % 20), expected)
    onednn.can_multiply.cache_clear()


@packs
def test_where_pytorch_lacks_the_attention_that_is_probed_a_model_is_packed_and_not_exact(
        monkeypatch):
    model = Llama(replace(new_target(20).config, head_dim=6))  # a size that was not probed before
    expected = model(TOKENS % 20)

    def differs(*_, **__):
        raise RuntimeError("other arguments")

    monkeypatch.setattr(kernels.Trial, "attend", differs)
    packed = pack(model)
    assert packed is model and isinstance(model.lm_head, PackedLinear)
    products = [part for part in model.modules() if isinstance(part, PackedLinear)]
    assert all(part.min_rows == 1 for part in products)  # nothing is padded in vain
    torch.testing.assert_close(packed(TOKENS % 20), expected)
    kernels.probe_attention.cache_clear()
