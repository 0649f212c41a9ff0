"""What is found out of a CPU's kernels, and windows that are laid out by it."""
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
from plumbing.windows import fitting_nodes, open_windows

DTYPES = [torch.float32]
if has_fast_bfloat16():
    DTYPES.append(torch.bfloat16)
# The root 0 has the children 1, 2 and 3, and 4 follows 1.
PATHS = [[0], [0, 1], [0, 2], [0, 3], [0, 1, 4]]
UNIT = 16
LIMITS = AttentionLimits(
    query_multiple=1, most_tokens=32, unit=UNIT, lengths=(192, 512), splits=(192, 384, 512)
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


def test_each_path_has_a_window_with_the_tail_of_the_text():
    windows = open_windows(PATHS, length=34, unit=UNIT)
    # Windows from slot 32 on: of 0 1 4, of 0 2, of 0 3.
    assert windows.base == 32
    source = windows.source.view(3, UNIT)
    assert source[:, :5].tolist() == [[0, 1, 2, 3, 6], [0, 1, 2, 4, 0], [0, 1, 2, 5, 0]]
    assert windows.positions.tolist() == [34, 35, 35, 35, 36]
    assert windows.slots_of([0, 1, 4]) == [0, 1, 2]
    assert windows.slots_of([0, 2]) == [UNIT, UNIT + 1]
    seen = windows.mask[2].nonzero().flatten().tolist()  # by node 2
    start = 32 + UNIT
    assert seen == [*range(32), *range(start, start + 4)]


def test_paths_without_room_before_the_next_split_are_left_out():
    assert fitting_nodes(PATHS, 100, LIMITS) == [0, 1, 2, 3, 4]
    assert fitting_nodes(PATHS, 383, LIMITS) == [0, 1, 4]  # the first crosses it, as the text will
    assert fitting_nodes(PATHS, 370, LIMITS) == [0, 1, 4]
    assert fitting_nodes(PATHS, 354, LIMITS) == [0, 1, 2, 4]
    assert fitting_nodes(PATHS, 384, LIMITS) == [0, 1, 2, 3, 4]


def test_a_draft_of_too_many_tokens_is_cut():
    chain = [list(range(n)) for n in range(1, 41)]
    assert fitting_nodes(chain, 100, LIMITS) == list(range(32))
