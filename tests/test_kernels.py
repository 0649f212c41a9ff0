"""What is found out of a CPU's kernels."""
import pytest
import torch

from plumbing.kernels import (
    KEY_BLOCK,
    MAX_ROWS,
    AttentionLimits,
    has_fast_bfloat16,
    packed_product,
    probe_attention,
    probe_rows,
    reorder_weight,
)

DTYPES = [torch.float32]
if has_fast_bfloat16():
    DTYPES.append(torch.bfloat16)
LIMITS = AttentionLimits(
    query_multiple=1, most_tokens=32, unit=16, grain=1, lengths=(192, 512), splits=(192, 384, 512)
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_found_holds_for_other_numbers_too(dtype):
    torch.manual_seed(7)
    assert probe_attention(64, 3, dtype, seed=7) == probe_attention(64, 3, dtype)
    for outputs, inputs in ((576, 1536), (960, 576), (77, 33)):
        min_rows = probe_rows(outputs, inputs, dtype)
        assert probe_rows(outputs, inputs, dtype, seed=7) == min_rows
        weight = reorder_weight(torch.randn(outputs, inputs).to(dtype))
        x = torch.randn(MAX_ROWS, inputs).to(dtype)
        together = packed_product(x, weight)
        for count in range(1, MAX_ROWS):
            assert torch.equal(packed_product(x[:count], weight, min_rows), together[:count])
            assert torch.equal(packed_product(x[-count:], weight, min_rows), together[-count:])


def test_all_outputs_of_a_wide_layer_agree_if_some_do():
    torch.manual_seed(7)
    for dtype in DTYPES:
        weight = reorder_weight(torch.randn(20_000, 64).to(dtype))
        x = torch.randn(MAX_ROWS, 64).to(dtype)
        alone = packed_product(x[0], weight, probe_rows(20_000, 64, dtype))
        assert torch.equal(alone, packed_product(x, weight)[0])


def test_probing_leaves_the_random_numbers_of_the_caller_alone():
    before = torch.get_rng_state()
    probe_attention(16, 1, torch.float32, seed=8)
    probe_rows(16, 16, torch.float32, seed=8)
    assert torch.equal(torch.get_rng_state(), before)


def test_keys_are_padded_to_a_length_whose_sums_are_split_like_those_of_longer_ones():
    found = probe_attention(64, 3, torch.float32)
    assert found.lengths[-1] == found.splits[-1] == KEY_BLOCK
    assert found.padded(KEY_BLOCK) == KEY_BLOCK
    assert found.unit <= found.padded(1) <= KEY_BLOCK
    assert [LIMITS.padded(n) for n in (1, 192, 193, 512, 513)] == [192, 192, 512, 512, 704]
    assert [LIMITS.next_split(n) for n in (0, 191, 192, 511, 512)] == [192, 192, 384, 512, 704]
    assert LIMITS.same_sum(0, 191) and not LIMITS.same_sum(191, 192)
