"""How many rows, queries and keys to add to a pass, so that greedy text is exact on a CPU.

You do not need this file to understand the paper. Speculative decoding promises that greedy text is
the target's own, and in exact arithmetic it is: a token has the same logits in a pass over that
token alone and in one over a whole draft. But a computer rounds each partial sum, so the value of a
sum depends on its order:

    (1e8 + 1) - 1e8 = 0        in float32, which rounds 1e8 + 1 to 1e8
    (1e8 - 1e8) + 1 = 1

A kernel, the code that multiplies two matrices or attends, chooses its order by the shapes that it
is given. For example, let a linear layer have 1536 inputs, in float32 on an AMD EPYC. The same row
of inputs gives one output as

    -16.507423      in a pass over this row alone
    -16.507454      in a pass over this row and 31 others

Such a difference grows from layer to layer, and once in a while another token is then the
likeliest. The remedy is padding. No pass is given a shape for which the order is another one:

    linear layers   If a pass has few rows (tokens), rows are added. Their results are dropped.
    attention       If a pass has few queries, queries are added. Their results are dropped. Keys
                    are added, too, and masked. A masked key has weight 0 and changes no sum.

How much padding it takes depends on the processor and on the version of PyTorch, and no manual says
it. So `probe_rows` and `probe_attention` find it out by trial, once for each shape in a process.
If two passes give the same bits, they are taken to add up in the same order. That is evidence, not
proof, which is why tests/test_exact.py also compares whole answers.

With most numbers two orders often round to the same result, so the trials use numbers that cancel.
1e8 + 1 - 1e8 - 1 is 0, but from left to right float32 makes it -1. Such a sum is made of rounding
errors alone, and another order makes other errors.

A tree of drafted tokens needs one thing more: see plumbing/layout.py.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from plumbing.onednn import packed_product, reorder_weight

# The trials try passes over up to 32 rows. So an exact pass has at most 32 tokens: the newest one
# and a draft of 31. On an Intel Xeon with AMX a product of 33 rows adds up in another order than a
# product of 32.
MAX_ROWS = 32
# An exact pass has at least four rows, even where fewer would be exact. On an AMD EPYC and on an
# Intel Xeon with AMX a product of four rows was faster than a product of one: for one row oneDNN
# reads the weights more slowly.
MIN_ROWS = 4
KEY_BLOCK = 512  # keys that PyTorch's attention on a CPU reads at a time


# --- Linear layers ---


@cache
def probe_rows(outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> int | None:
    """Return the `min_rows` that make `packed_product` exact, with a weight of this shape.

    It is the least number n, from MIN_ROWS up, for which passes over n, n + 1, ..., MAX_ROWS equal
    rows give every row the same result. None if not even the rows of one pass over MAX_ROWS agree.

    At most 4,096 outputs are tried, of the 49,152 of an LM head. We assume that the number of
    outputs does not matter: each is a sum of its own, over the inputs.
    """
    generator = Generator().manual_seed(seed)
    # The sums cancel: for each term w x there is another one, -w x. The second half of w is the
    # first half negated, and the second half of x is the first half again.
    half = (inputs + 1) // 2
    w = scattered(min(outputs, 4096), half, generator)
    w = torch.cat([w, -w], dim=1)
    w = w[:, :inputs].to(dtype)  # (out, in)
    weight = reorder_weight(w)
    x = scattered(1, half, generator).repeat(1, 2)
    x = x[:, :inputs].to(dtype)  # (1, in)

    def results(count: int) -> Tensor:
        """Return the products of `count` equal rows."""
        return packed_product(x.repeat(count, 1), weight)  # (count, out)

    expected = results(MAX_ROWS)[:1]  # (1, out)
    least = None
    for count in range(MAX_ROWS, MIN_ROWS - 1, -1):
        if not (results(count) == expected).all():
            break
        least = count
    return least


def scattered(rows: int, columns: int, generator: Generator) -> Tensor:
    """Return random numbers of many magnitudes, so that even sums of bfloat16 are rounded."""
    magnitudes = torch.randint(-10, 11, (rows, columns), generator=generator)
    return torch.randn(rows, columns, generator=generator) * 2.0**magnitudes


# --- Attention: what keeps its order ---
#
# For each query attention adds up exp(score), which softmax divides by, and exp(score) * value over
# all keys. PyTorch's kernel does so for a block of KEY_BLOCK keys at a time, and adds up the blocks
# one after the other. Within a block it is as if the keys went into *lanes*, each a sum of its own,
# that are added up at the end. Here are the slots (places in the cache) of 24 keys in 4 lanes:
#
#     lane     0   1   2   3
#
#     slot     0   1   2   3
#              4   5   6   7
#              8   9  10  11
#             --------------   a split: the four lanes are added up, and begin again
#             12  13  14  15
#             16  17  18  19
#             20  21  22  23
#             --------------   a split, and the end of the block
#
# `AttentionLimits` has four facts about the keys of such a kernel. The first three say where a key
# may lie:
#
#     period    The lanes repeat after a period of slots, here 4. The key of slot 5 may lie in slot
#               9 instead, if slot 5 is masked: its lane is the same, and so is the key before it in
#               the lane, that of slot 1.
#     grain     Some kernels add up a few neighbours first, a grain, and put their sum into a lane.
#               Then a grain can only move as a whole. A grain of 1, as here, is a key on its own.
#     splits    At these slots the lanes are added up, here at 12 and 24. A key may not move beyond.
#     lengths   A last block of fewer keys may be split elsewhere. At these lengths it is not: it is
#               summed as the beginning of a full block is, so it is padded to one of them.
#
# Two more are about queries: see `probe_queries`. On an AMD EPYC in bfloat16, for heads of 64
# numbers, three of which share a kv head, all six are the following. A last block of 200 keys is
# padded to 384: blocks of 224 to 352 are split elsewhere.
#
#     AttentionLimits(
#         query_multiple=4,
#         most_tokens=32,
#         period=32,
#         grain=1,
#         splits=(192, 384, 512),
#         lengths=(32, 64, 96, 128, 160, 192, 384, 416, 448, 480, 512),
#     )


@dataclass(frozen=True)
class AttentionLimits:
    """What attention needs to add up the keys of a query in the same order in every pass."""

    query_multiple: int  # the queries of a kv head are padded to a multiple of this
    most_tokens: int  # a pass over more is not exact; never more than MAX_ROWS
    period: int  # a key may lie a multiple of this later
    grain: int  # keys that move together; the first is in a slot that is a multiple of this
    splits: tuple[int, ...]  # where sums end in a block; no key may move beyond one
    lengths: tuple[int, ...]  # the keys of the last block are padded to one of these

    def attention_mask(self, mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """Turn a mask of tokens (T, S) into one of queries and keys that need no more padding.

        It has the mask of the tokens for each of the `group` query heads that share a kv head, one
        below the other. Rows for added queries follow, which see everything, and columns for added
        keys, which only the added queries see. It is to be added to the scores: 0, or -inf.
        """
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


# --- Attention: the trials that find it out ---


@cache
def probe_attention(
    head_dim: int, group: int, dtype: torch.dtype, seed: int = 0
) -> AttentionLimits | None:
    """Find out the limits for heads of `head_dim` numbers, `group` of which share a kv head.

    Each probe asks whether results stay the same, to the bit, if one thing is different:

        probe_queries    a pass has fewer or more queries
        probe_period     the second half of the keys lies a period later
        probe_grain      the keys from any multiple of the grain on lie a period later
        probe_splits     only the last keys lie a period later
        probe_lengths    the block ends with the keys, where otherwise masked slots follow

    Returns None if the kernel works otherwise than described above, or if passes over two tokens
    would not be exact.
    """
    trial = Trial(head_dim, dtype, seed)
    # A pass over T tokens has group * T queries for a kv head.
    found = probe_queries(trial, group * MAX_ROWS)
    if found is None:
        return None
    query_multiple, most_queries = found
    most_tokens = min(MAX_ROWS, most_queries // group)
    trial = replace(trial, copies=query_multiple)
    period = probe_period(trial)
    if period is None or most_tokens < 2:
        return None
    return AttentionLimits(
        query_multiple=query_multiple,
        most_tokens=most_tokens,
        period=period,
        grain=probe_grain(trial, period),
        splits=probe_splits(trial, period),
        lengths=probe_lengths(trial, period),
    )


@dataclass(frozen=True)
class Trial:
    """Attention over numbers whose sums are rounding errors.

    Two calls with the same number of keys have the same keys, in the same order. So their results
    differ only if their sums have another order.
    """

    head_dim: int
    dtype: torch.dtype
    seed: int
    copies: int = 1  # T: how often each query is in a pass

    def attend(self, slots: Sequence[int], length: int = KEY_BLOCK) -> Tensor:
        """Attend to a block of `length` slots, with keys in these slots. The others are masked.

        Returns (B, T, D + 1): what the queries read and, because that is rounded to the dtype, also
        the logarithm of the sum of exp(score), which is in float32.
        """
        slots = list(slots)
        queries, kv = cancelling_numbers(len(slots), self.head_dim, self.dtype, self.seed)
        batch = len(queries)
        queries = queries.repeat(1, self.copies, 1).unsqueeze(1)  # (B, 1, T, D)
        block = torch.zeros(batch, 1, length, 2 * self.head_dim, dtype=self.dtype)
        block[:, 0, slots] = kv
        k, v = block.chunk(2, dim=-1)  # (B, 1, S, D)
        mask = torch.full((self.copies, length), -torch.inf, dtype=self.dtype)
        mask[:, slots] = 0.0  # it is added to the scores
        # This is what F.scaled_dot_product_attention calls on a CPU. It also returns the logarithm.
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_sum = kernel(queries, k, v, attn_mask=mask)
        out = out.squeeze(1).float()  # (B, T, D)
        return torch.cat([out, log_sum.view(batch, self.copies, 1)], dim=-1)

    def may_move(self, count: int, first: int, distance: int) -> bool:
        """Tell whether results stay the same if, of `count` keys in the first slots, those from
        slot `first` on lie `distance` slots later. With 128 keys, from 64 on, by 16:

            slot          0 ... 63    64 ... 79    80 ... 127    128 ... 143
            not moved     0 ... 63    64 ... 79    80 ... 127    (masked)
            moved         0 ... 63    (masked)     64 ... 111    112 ... 127
        """
        moved = [*range(first), *range(first + distance, count + distance)]
        return torch.equal(self.attend(moved), self.attend(range(count)))


def probe_queries(trial: Trial, most: int) -> tuple[int, int] | None:
    """Return the least multiple to which queries have to be padded, and up to how many queries, of
    `most`, that is enough. Returns None if there is no such multiple up to 32.

    Copies of a query have equal results, unless their number changes the order. On an AMD EPYC all
    numbers from 4 to 32 agree with each other, but 1, 2, 3 and 33, 34, 35 do not: a kernel takes 32
    queries at a time, and what remains is fewer than four. So the multiple is 4:

        queries     1   2   3   4   5  ...  31  32  33  34  35  36  37 ...
        agree       -   -   -   x   x        x   x   -   -   -   x   x
    """
    largest_multiple = 32
    keys = range(KEY_BLOCK)
    full = replace(trial, copies=largest_multiple).attend(keys)  # (B, T, D + 1)
    expected = full[:, :1]

    def agree(count: int) -> bool:
        results = replace(trial, copies=count).attend(keys)
        return bool((results == expected).all())

    for multiple in (1, 2, 4, 8, 16, largest_multiple):
        agreeing = 0
        while agreeing < most and agree(agreeing + multiple):
            agreeing += multiple
        if agreeing >= largest_multiple:
            return multiple, agreeing
    return None


# The next two probes move the second half of 128 keys by up to 64 slots, so up to slot 191. A split
# before that would look to them like lanes that do not repeat. On an AMD EPYC the first one is at
# slot 192.
KEYS_TO_MOVE = 128
PERIODS = (16, 32, 64)  # those tried; no CPU that was tried needs more than 32


def probe_period(trial: Trial) -> int | None:
    """Return the least of PERIODS by which keys may move, or None if there is none.

    With a period of 16 the keys from slot 64 on are tried in the slots from 80 on. With 16 lanes,
    or 8 or 4, each comes into its own lane again. With 32 lanes key 64 does not: slot 64 belongs to
    lane 0, and slot 80 to lane 16. The period may be a multiple of the lanes, which does no harm.
    """
    first = KEYS_TO_MOVE // 2
    for period in PERIODS:
        if trial.may_move(KEYS_TO_MOVE, first, period):
            return period
    return None


def probe_grain(trial: Trial, period: int) -> int:
    """Return the least number of neighbours that have to move together.

    If neighbours are added up in pairs, keys may move from slot 66 on, but not from slot 65 on: key
    64 would lose its neighbour. So a grain is found if keys may move from each of its multiples on.
    With a period of 16:

        slot              64  65  66  67 ...  80  81  82  83
        before            64  65  66  67
        moved from 66     64  65   -   -       -   -  66  67    (64 + 65), (66 + 67): the same
        moved from 65     64   -   -   -       -  65  66  67    (64), (65), (66 + 67)
    """
    first = KEYS_TO_MOVE // 2
    grain = 1
    while grain < period:
        starts = range(first, first + period, grain)
        if all(trial.may_move(KEYS_TO_MOVE, start, period) for start in starts):
            return grain
        grain *= 2
    return period


def probe_splits(trial: Trial, period: int) -> tuple[int, ...]:
    """Return after how many keys of a block a sum ends.

    If a sum does not end after n keys, the last of these keys may move. With a period of 32 and a
    split at 192, the last 32 of 160 keys may move from slot 128 to slot 160, but the last 32 of 192
    keys may not move from slot 160 to slot 192.

    With a single lane the first split is not found: there the last grain is added to all that came
    before it, whether the split lies before or after it.
    """
    splits = []
    for count in range(period, KEY_BLOCK, period):
        if not trial.may_move(count, count - period, period):
            splits.append(count)
    return *splits, KEY_BLOCK


def probe_lengths(trial: Trial, period: int) -> tuple[int, ...]:
    """Return the numbers of keys at which a block may end: its sums are the same as if masked slots
    followed, up to KEY_BLOCK."""
    lengths = []
    for count in range(period, KEY_BLOCK + 1, period):
        keys = range(count)
        if torch.equal(trial.attend(keys, length=count), trial.attend(keys)):
            lengths.append(count)
    return tuple(lengths)


# --- Attention: the numbers of a trial ---


@lru_cache(maxsize=1)  # most trials use the same numbers again
def cancelling_numbers(
    count: int, head_dim: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor]:
    """Return B = 16 queries (B, 1, D), and for each of them the `cancelling_keys` in another order
    (B, count, 2D)."""
    generator = Generator().manual_seed(seed)
    queries = torch.randn(16, 1, head_dim, generator=generator)
    # On an AMD EPYC each of the first two shows another order, and two in five of the others do.
    # So there are more of the others.
    queries[:2, :, -1] = 0.0
    queries[2:, :, -1] = head_dim**0.5
    kv = cancelling_keys(count, head_dim, generator).to(dtype)
    orders = torch.rand(len(queries), count, generator=generator).argsort(dim=1)
    return queries.to(dtype), kv[orders]


def cancelling_keys(count: int, head_dim: int, generator: Generator) -> Tensor:
    """Return keys and values, side by side (count, 2D), with which each of attention's two sums
    shows the order of its terms.

    The second half of the keys repeats the first, with negative values. The last number of a key is
    -17, and that of the first key 0. The score is query * key / sqrt(D). So four keys give these
    scores, where t and u are random:

        key                                   0        1        2        3
        value                                 v        w       -v       -w
        score, if a query ends in 0           0        t        0        t
        score, if a query ends in sqrt(D)     0      u-17     -17      u-17

    The sum of exp(score) * value is 0 for a query that ends in 0, but for rounding errors.

    The sum of exp(score) has no negative terms that could cancel. But for a query that ends in
    sqrt(D) one term is 1, and the others are about exp(-17), which is 4e-8. In float32 1 + 4e-8 is
    1, and 1 + (4e-8 + 4e-8) is 1.0000001. So it matters which terms meet the 1, and when.
    """
    half = count // 2
    k = torch.randn(half, head_dim, generator=generator)
    k[0] = 0.0
    k = k.repeat(2, 1)  # (count, D)
    k[1:, -1] = -17.0
    v = scattered(half, head_dim, generator)
    v = torch.cat([v, -v])  # (count, D)
    return torch.cat([k, v], dim=1)
