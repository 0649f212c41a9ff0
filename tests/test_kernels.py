"""What the trials of a CPU's kernels find out."""
from dataclasses import dataclass

import pytest
import torch

from plumbing.kernels import (
    KEY_BLOCK,
    MAX_ROWS,
    AttentionLimits,
    Trial,
    probe_attention,
    probe_grain,
    probe_lengths,
    probe_period,
    probe_rows,
    probe_splits,
    trial_numbers,
)
from plumbing.onednn import has_fast_bfloat16, packed_product, reorder_weight

DTYPES = [torch.float32]
if has_fast_bfloat16():
    DTYPES.append(torch.bfloat16)
LIMITS = AttentionLimits(
    query_multiple=4,
    most_tokens=32,
    period=16,
    grain=1,
    splits=(192, 384, 512),
    lengths=(192, 512),
)


@dataclass(frozen=True)
class LaneKernel(Trial):
    """A kernel whose order is known: lanes of grains, and splits as on an AMD EPYC. Like the real
    kernel, it splits a block of 193 to 383 keys elsewhere."""

    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    seed: int = 0
    copies: int = 1
    lanes: int = 16
    grain: int = 1

    def attend(self, slots, length=KEY_BLOCK):
        _, kv = trial_numbers(len(slots), self.head_dim, self.dtype, self.seed)
        terms = torch.zeros(length, self.head_dim)
        terms[list(slots)] = kv[0, :, self.head_dim:]  # the values, which have equal weights here
        splits = (64, length) if 192 < length < 384 else (192, 384, KEY_BLOCK)
        total = torch.zeros(self.head_dim)
        start = 0
        for end in splits:
            for lane in self.lane_sums(terms[start:end]):
                total = total + lane
            start = end
        return total

    def lane_sums(self, terms):
        sums = torch.zeros(self.lanes, self.head_dim)
        for row in terms.split(self.lanes * self.grain):
            grains = row.unflatten(0, (-1, self.grain))  # (lanes or fewer, grain, D)
            grain_sums = grains[:, 0]
            for i in range(1, self.grain):
                grain_sums = grain_sums + grains[:, i]
            sums[:len(grains)] += grain_sums
        return sums


@pytest.mark.parametrize("lanes, grain", [(16, 1), (32, 1), (64, 1), (8, 2), (16, 2), (2, 16)])
def test_lanes_grains_splits_and_lengths_are_found(lanes, grain):
    kernel = LaneKernel(lanes=lanes, grain=grain)
    period = lanes * grain
    assert probe_period(kernel) == period
    assert probe_grain(kernel, period) == grain
    assert probe_splits(kernel, period) == (192, 384, 512)
    lengths = range(period, KEY_BLOCK + 1, period)
    assert probe_lengths(kernel, period) == tuple(n for n in lengths if not 192 < n < 384)


def test_fewer_lanes_than_are_tried_are_found_as_a_multiple():
    assert probe_period(LaneKernel(lanes=4)) == 16


def test_no_period_is_found_where_keys_may_not_move():
    assert probe_period(LaneKernel(lanes=128)) is None
    assert probe_period(LaneKernel(lanes=24)) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_found_does_not_depend_on_the_random_numbers_of_a_trial(dtype):
    found = probe_attention(64, 3, dtype)
    for seed in (1, 2, 7):
        assert probe_attention(64, 3, dtype, seed) == found


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rows_that_are_found_make_products_of_other_numbers_exact(dtype):
    torch.manual_seed(7)
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
    assert found.period <= found.padded(1) <= KEY_BLOCK
    assert [LIMITS.padded(n) for n in (1, 192, 193, 512, 513)] == [192, 192, 512, 512, 704]


def test_a_sum_ends_at_the_next_split_of_its_block():
    assert [LIMITS.next_split(n) for n in (0, 191, 192, 511, 512)] == [192, 192, 384, 512, 704]


def test_a_mask_is_repeated_for_each_query_head_and_padded():
    seen = torch.tensor([[True, False, True]])  # one token, three keys
    mask = LIMITS.attention_mask(seen, 3, torch.float32)
    assert mask.shape == (4, 192)  # three query heads, padded to four
    for row in mask[:3]:
        assert row[:3].tolist() == [0.0, -torch.inf, 0.0]
        assert (row[3:] == -torch.inf).all()  # no token sees an added key
    assert (mask[3] == 0.0).all()  # an added query sees everything
