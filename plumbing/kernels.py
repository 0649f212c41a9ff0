"""Kernels of a CPU, and why the same sum has two values.

A floating-point sum depends on the order of its terms, because each partial sum is rounded. In
float32 (1e8 - 1e8) + 1 is 1, but (1 + 1e8) - 1e8 is 0. A kernel (the code that multiplies two
matrices, or attends) chooses its order by the shapes that it is given. So the logits of a token
differ in their last bits between a pass over that token alone and a pass over a whole draft, and
once in a while another token is then the likeliest.

They do not differ if every pass gives the kernel a token's terms in the same way:

    linear layers   few rows (tokens) are padded, until the kernel takes its usual path; the results
                    of added rows are dropped
    attention       few queries or keys are padded, until the kernel splits its sums as it does for
                    many; an added key is masked, and what is masked adds an exact zero

(And in a tree of drafted tokens each must see its keys where the text would have them: see
plumbing/layout.py.)

How many to add depends on the processor and on the version of its libraries. No manual says it, so
it is found out here, once for each shape in a process. With ordinary numbers two orders differ in
the last bit or not at all. So the kernels are tried on terms that cancel: 1e8, 1, -1e8 and -1 add
up to 0, but in float32 from left to right to -1, because 1e8 + 1 is 1e8. What comes out is nothing
but rounding errors, and they show the order. That is evidence, not proof: one input is tried for
each shape. So tests/test_exact.py compares whole answers, too.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens of a pass that is exact, at most. On an AMD EPYC and on an Intel Xeon a row's result is the
# same with any number of rows up to this. With AMX, 33 rows are multiplied in another order.
MAX_ROWS = 32
# A product of one row takes longer than one of four, as the weights are read more slowly: measured
# on an AMD EPYC and, with AMX, on an Intel Xeon.
MIN_ROWS = 4
KEY_BLOCK = 512  # PyTorch's attention reads so many keys at a time
MAX_UNIT = 64  # of its lanes, see below: no CPU that was tried has more than 32


# --- Linear layers ---


def reorder_weight(weight: Tensor) -> Tensor:
    """Store a weight (out, in) in the order in which oneDNN's kernel reads it, in blocks."""
    rows_expected = 16  # the layout is chosen for about so many, and serves any number
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows_expected)


def packed_product(x: Tensor, weight: Tensor, min_rows: int = 1) -> Tensor:
    """Return x W^T (..., out) for x (..., in) and a reordered weight. To fewer rows than `min_rows`
    some are added, whose results are dropped.

    PyTorch has no public call for this, which is why requirements.txt states its version.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count < min_rows:
        rows = F.pad(rows, (0, 0, 0, min_rows - count))
    # None: no bias. The rest: no activation after it.
    out = torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
    return out[:count].reshape(*x.shape[:-1], -1)


def has_fast_bfloat16() -> bool:
    """Tell whether this CPU multiplies bfloat16 faster than float32."""
    if not torch.backends.mkldnn.is_available():  # as on some Macs
        return False
    can_multiply = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return can_multiply and torch.cpu._is_avx512_bf16_supported()  # (a CPU with AMX has both)


def scattered(*shape: int) -> Tensor:
    """Return random numbers of many magnitudes, so that even sums of bfloat16 are rounded."""
    magnitudes = torch.randint(-10, 11, shape)
    return torch.randn(shape) * 2.0**magnitudes


@cache
@torch.random.fork_rng(devices=[])  # the caller's random numbers are left alone
def probe_rows(outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> int:
    """Return how many rows, and no less than MIN_ROWS, `packed_product` must be given so that a
    row's result is the same to the bit as that of the first among MAX_ROWS, and as that of any row
    among any number in between.

    4,096 outputs are enough, even of a wide layer (an LM head has 49,152). Each is a sum of its
    own, whose order depends on how the kernel cuts the inputs, not on how many outputs there are.
    """
    torch.manual_seed(seed)
    # Each term w x comes with its negative: the second half of w is the first half negated.
    half = (inputs + 1) // 2
    outputs = min(outputs, 4096)
    w = scattered(outputs, half)
    w = torch.cat([w, -w], dim=1)
    w = w[:, :inputs].to(dtype)  # (out, in)
    weight = reorder_weight(w)
    x = scattered(1, half).repeat(1, 2)
    x = x[:, :inputs].to(dtype)  # (1, in)

    def results(count: int) -> Tensor:
        """Return the products of so many equal rows, which should be equal, too."""
        return packed_product(x.repeat(count, 1), weight)  # (count, out)

    expected = results(MAX_ROWS)[:1]  # (1, out)
    count = MAX_ROWS
    while count > MIN_ROWS and (results(count - 1) == expected).all():
        count -= 1
    return count


# --- Attention ---
#
# On a CPU PyTorch's attention reads KEY_BLOCK keys at a time, and adds up what it gets from each
# block. Within a block the order is found out here. It is as if the keys went into *lanes*, which
# are added up at the end. A block of 24 keys with four lanes, for example:
#
#     slot    0  1  2  3   4  5  6  7   8  9 10 11 | 12 13 14 15  16 17 18 19  20 21 22 23
#     lane    0  1  2  3   0  1  2  3   0  1  2  3 |  0  1  2  3   0  1  2  3   0  1  2  3
#
# Slots 0, 4 and 8 go into lane 0, one after the other. The number of lanes is the *unit*: a key
# that lies a unit later goes into the same lane. At a *split*, here after 12 keys, the lanes are
# added up, and begin again. Some kernels first add up a *grain*, a few neighbours, and only then
# put them into a lane: then a grain may only move as a whole.
#
# On an AMD EPYC in bfloat16, for heads of 64 numbers, the unit is 32 and the grain 1. A block of
# 512 keys has splits at 192, 384 and 512. Blocks of 32, 64, ..., 192 keys are summed as the
# beginning of a full one is, but one of 256 is split elsewhere.


@dataclass(frozen=True)
class AttentionLimits:
    """What attention needs to add up the keys of a query in the same order in every pass."""

    query_multiple: int  # pad the queries of a kv head to a multiple of this
    most_tokens: int  # in a pass over more than these they no longer agree
    unit: int  # slots after which the lanes repeat
    grain: int  # keys that only move together; the first is in a slot that is a multiple of this
    splits: tuple[int, ...]  # of a block
    lengths: tuple[int, ...]  # pad the keys of the last block to one of these

    def attention_mask(self, mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """Repeat a mask of tokens (T, S) for each of the `group` query heads that share a kv head,
        and pad it. Added queries see everything, and nobody sees added keys. What is returned is
        to be added to the scores: 0, or -inf."""
        mask = torch.cat([mask] * group)  # (group T, S)
        queries, keys = mask.shape
        mask = F.pad(mask, (0, self.padded(keys) - keys), value=False)
        mask = F.pad(mask, (0, 0, 0, -queries % self.query_multiple), value=True)
        return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)

    def padded(self, length: int) -> int:
        """Return how many keys attention must be given for `length` keys."""
        last = length % KEY_BLOCK  # keys of the last block
        if last == 0:
            return length
        padded_last = min(size for size in self.lengths if size >= last)
        return length - last + padded_last

    def next_split(self, slot: int) -> int:
        """Return where the sum ends that a key in this slot belongs to."""
        place = slot % KEY_BLOCK  # in its block
        split = min(split for split in self.splits if split > place)
        return slot - place + split

    def same_sum(self, slot: int, other: int) -> bool:
        """Tell whether keys in these two slots go into the same sum."""
        return self.next_split(slot) == self.next_split(other)


@cache
@torch.random.fork_rng(devices=[])
def probe_attention(
    head_dim: int, group: int, dtype: torch.dtype, seed: int = 0
) -> AttentionLimits:
    """Find out the limits for heads of this size, of which `group` share a kv head: each token has
    so many queries for it."""
    torch.manual_seed(seed)
    queries = torch.randn(64, 1, head_dim)  # with a single one an error may not show
    # Half of the queries are for the sum of values, the others for the sum that softmax divides by
    # (see `cancelling_keys_values`).
    queries[0::2, :, -1] = 0.0
    queries[1::2, :, -1] = head_dim**0.5
    queries = queries.to(dtype)
    few = queries[:8]  # the next line takes the longest
    multiple, most_queries = probe_queries(few, group * MAX_ROWS)
    copies = queries.repeat(1, multiple, 1)
    unit = probe_unit(copies)
    grain = probe_grain(copies, unit or MAX_UNIT)
    lengths, splits = probe_lengths(copies, unit or MAX_UNIT)
    most_tokens = min(MAX_ROWS, most_queries // group)
    if most_tokens < 2 or unit is None:
        # (On no CPU that was tried.) Drafts work all the same, but sums may be rounded otherwise.
        print("no exact attention was found on this CPU: texts may differ", file=sys.stderr)
        most_tokens = MAX_ROWS
    return AttentionLimits(
        query_multiple=multiple,
        most_tokens=most_tokens,
        unit=unit or MAX_UNIT,
        grain=grain,
        splits=tuple(splits),
        lengths=tuple(lengths),
    )


def probe_queries(queries: Tensor, most: int) -> tuple[int, int]:
    """Find out which multiples of a query's copies agree: the least one, and how many copies there
    may be, of `most`. queries: (B, 1, D), each to be tried with copies of itself."""
    slots = torch.arange(KEY_BLOCK)
    kv = cancelling_keys_values(KEY_BLOCK, queries)

    def results(count: int) -> Tensor:
        return attend(queries.repeat(1, count, 1), kv, slots, KEY_BLOCK)

    many = 32  # a multiple of all that are tried
    expected = results(many)[:, :1]

    def agrees(count: int) -> bool:
        same = results(count) == expected
        return bool(same.all())

    for multiple in (1, 2, 4, 8, 16, 32):
        counts = range(multiple, most + multiple, multiple)
        most_agreeing = max(takewhile(agrees, counts), default=0)
        if most_agreeing >= many:
            break
    return multiple, most_agreeing


def probe_unit(queries: Tensor) -> int | None:
    """Find out the unit of `AttentionLimits`, with queries (B, T, D): half of the keys are moved by
    it, and the results must not change. None: no unit was found, perhaps because there is a split
    among the first 192 slots."""
    slots = torch.arange(2 * MAX_UNIT)
    kv = cancelling_keys_values(len(slots), queries)
    expected = attend(queries, kv, slots, KEY_BLOCK)
    for unit in (16, 32, MAX_UNIT):
        moved = slots + unit * (slots >= MAX_UNIT)
        if torch.equal(attend(queries, kv, moved, KEY_BLOCK), expected):
            return unit
    return None


def probe_grain(queries: Tensor, unit: int) -> int:
    """Find out the grain of `AttentionLimits`, with queries (B, T, D): one grain is moved by a unit
    and what follows it by three, and the results must not change, wherever it is."""
    slots = torch.arange(MAX_UNIT + unit)
    kv = cancelling_keys_values(len(slots), queries)
    expected = attend(queries, kv, slots, KEY_BLOCK)

    def may_move(first: int, grain: int) -> bool:
        moved = slots + unit * (slots >= first) + 2 * unit * (slots >= first + grain)
        return torch.equal(attend(queries, kv, moved, KEY_BLOCK), expected)

    grain = 1
    while grain < unit:
        places = range(MAX_UNIT, MAX_UNIT + unit, grain)
        if all(may_move(first, grain) for first in places):
            return grain
        grain *= 2
    return unit


def probe_lengths(queries: Tensor, unit: int) -> tuple[list[int], list[int]]:
    """Find out the lengths and splits of `AttentionLimits`, with queries (B, T, D)."""
    lengths = []
    splits = []
    for end in range(unit, KEY_BLOCK + 1, unit):
        slots = torch.arange(end)
        kv = cancelling_keys_values(end, queries)
        in_full_block = attend(queries, kv, slots, KEY_BLOCK)
        if torch.equal(attend(queries, kv, slots, end), in_full_block):
            lengths.append(end)
        if end == KEY_BLOCK:
            splits.append(end)
            break
        # If no sum ends here, the last unit of keys may as well lie one unit later.
        slots[-unit:] += unit
        if not torch.equal(attend(queries, kv, slots, KEY_BLOCK), in_full_block):
            splits.append(end)
    return lengths, splits


def cancelling_keys_values(count: int, queries: Tensor) -> Tensor:
    """Return keys and values for these queries, side by side (count, 2D), in random order. Each key
    is there twice, with a value and with its negative.

    Softmax's sum has no negative terms. To show its order, two of its terms are 1 (the largest
    score is subtracted from all), and the others about exp(-17) = 4e-8. In float32 2 + 4e-8 is 2,
    but 2 + 16e-8 is 2.0000002: added one by one they are lost, and four of them together are not. A
    query whose last number is sqrt(D) has these scores. For one whose last number is 0 all scores
    are ordinary.
    """
    half = count // 2
    head_dim = queries.shape[-1]
    k = torch.randn(half, head_dim)
    k[1:, -1] = -17.0
    k[0, -1] = 0.0
    k = k.repeat(2, 1)
    v = scattered(half, head_dim)
    v = torch.cat([v, -v])
    kv = torch.cat([k, v], dim=1)
    return kv[torch.randperm(count)].to(queries.dtype)


def attend(queries: Tensor, kv: Tensor, slots: Tensor, length: int) -> Tensor:
    """Let queries (B, T, D) attend to keys and values (n, 2D) that lie in these n of `length`
    slots, with the others masked. Returns (B, T, D + 1): what they read and, because the outputs
    are rounded to their dtype, the logarithm of the softmax's divisor, which is in float32."""
    batch, count, _ = queries.shape
    cache = torch.zeros(1, 1, length, kv.shape[1], dtype=kv.dtype)
    cache[:, :, slots] = kv
    k, v = cache.expand(batch, -1, -1, -1).chunk(2, dim=-1)
    mask = torch.full((count, length), -torch.inf, dtype=kv.dtype)  # is added to the scores
    mask[:, slots] = 0.0
    # This is what F.scaled_dot_product_attention calls on a CPU. It also returns the divisor.
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, divisor = kernel(queries.unsqueeze(1), k, v, attn_mask=mask)
    out = out.squeeze(1).float()
    return torch.cat([out, divisor.view(batch, count, 1)], dim=-1)
