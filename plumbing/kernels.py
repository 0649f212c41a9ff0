"""How much padding makes the passes of a CPU bit-identical, and greedy text exact.

app/packed.py and app/exact.py ask this module for the rows, queries and keys to add to a pass. A
reader of the paper may skip it. Speculative decoding promises that greedy text is the target's own,
and in exact arithmetic it is: a token has the same logits in a pass over that token alone and in a
pass over a whole draft. A computer, however, rounds each partial sum, so the value of a sum depends
on its order:

    (1e8 + 1) - 1e8 = 0        in float32, which rounds 1e8 + 1 to 1e8
    (1e8 - 1e8) + 1 = 1

A kernel, the code that multiplies two matrices or attends, chooses its order by the shapes that it
is given. For example, let a linear layer have 1536 inputs, in float32 on an AMD EPYC. The same row
of inputs gives one output as

    -16.507423      in a pass over this row alone
    -16.507454      in a pass over this row and 31 others

Such a difference grows from layer to layer, and once in a while it makes a different token the
likeliest one. The remedy is padding, which gives every pass a shape with the same order:

    linear layers   If a pass has few rows (tokens), rows are added. Their results are dropped.
    attention       If a pass has few queries, queries are added. Their results are dropped. Masked
                    keys are added as well. A masked key has weight 0 and changes no sum.

How much padding is needed depends on the processor and on the version of PyTorch, and is documented
nowhere. `probe_rows` and `probe_attention` therefore find it out by trial, once per shape in each
process. If two passes give bit-identical results, they are taken to add up in the same order. This
is evidence, not proof, which is why tests/test_exact.py also compares whole answers.

With ordinary numbers, two different orders often round to the same result. The trials therefore use
numbers that cancel, wherever terms can be negative: 1e8 + 1 - 1e8 - 1 is 0, but float32 gets -1 if
it adds from left to right. Such a sum consists of rounding errors alone, and a different order
gives different errors.

A tree of drafted tokens needs one more thing: see plumbing/layout.py.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from plumbing.onednn import packed_product, reorder_weight

# The trials try passes over up to 32 rows, so an exact pass has at most 32 tokens: the newest token
# and 31 drafted ones. On an Intel Xeon with AMX a product of 33 rows adds up in a different order
# from a product of 32.
MAX_ROWS = 32
# An exact pass has at least four rows, even where fewer would be exact. On an AMD EPYC and on an
# Intel Xeon with AMX a product of four rows was faster than a product of one: for one row oneDNN
# reads the weights more slowly.
MIN_ROWS = 4
KEY_BLOCK = 512  # keys that PyTorch's attention on a CPU reads at a time


def scattered(rows: int, columns: int, generator: Generator) -> Tensor:
    """Return random numbers of many magnitudes, so that even sums of bfloat16 are rounded."""
    magnitudes = torch.randint(-10, 11, (rows, columns), generator=generator)
    return torch.randn(rows, columns, generator=generator) * 2.0**magnitudes


# --- Linear layers ---


@cache
def probe_rows(outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> int | None:
    """Return the `min_rows` that make `packed_product` exact, with a weight of this shape.

    It is the least number n, from MIN_ROWS up, for which passes over n, n + 1, ..., MAX_ROWS equal
    rows give every row the same result. Return None if not even the rows of a pass over MAX_ROWS
    agree with each other.

    At most 4,096 outputs are tried, of the 49,152 of an LM head. We assume that the number of
    outputs does not matter, because each output is a sum of its own, over the inputs.
    """
    generator = Generator().manual_seed(seed)
    # The sums cancel: for each term w x there is a term -w x. The second half of w is the first
    # half negated, and the second half of x is the first half again.
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


# --- Attention: the order of its sums ---
#
# For each query attention adds up exp(score), by which softmax divides, and exp(score) * value over
# all keys. PyTorch's kernel does so for a block of KEY_BLOCK keys at a time, and adds up the blocks
# one after the other. Within a block the kernel behaves as if it dealt the keys out to *lanes*, one
# key to each lane in turn. Each lane is a sum of its own, and at every *split* the lanes are added
# up. Here are the slots (places in the cache) of 24 keys, for an invented kernel with 4 lanes, a
# split after 12 keys and blocks of 24 keys:
#
#     lane     0   1   2   3
#
#     slot     0   1   2   3
#              4   5   6   7
#              8   9  10  11
#             --------------   a split: the four lanes are added up, and start again at 0
#             12  13  14  15
#             16  17  18  19
#             20  21  22  23
#             --------------   a split, and the end of the block
#
# A masked key adds 0 to its lane. If slot 5 is masked, its key may therefore lie in slot 9 instead:
# slot 9 belongs to the same lane, and the key before it in this lane is still the key of slot 1.
#
# The probes below find out the properties of a kernel, one after the other: how many queries it
# takes at a time, then its lanes, its grains and its splits. Each repeats the rows of this drawing
# that it is about. `AttentionLimits`, after the probes, holds what they found.


# --- Attention: trials ---


def canceling_values(count: int, head_dim: int, generator: Generator) -> Tensor:
    """Return keys and values, side by side (count, 2D), with which the sum of exp(score) * value
    cancels.

    The second half of the keys repeats the first half, with negated values. With four keys:

        key       0      1      2      3
        score     t      u      t      u
        value     v      w     -v     -w
    """
    half = count // 2
    k = torch.randn(half, head_dim, generator=generator).repeat(2, 1)  # (count, D)
    v = scattered(half, head_dim, generator)
    v = torch.cat([v, -v])  # (count, D)
    return torch.cat([k, v], dim=1)


def one_large_weight(count: int, head_dim: int, generator: Generator) -> Tensor:
    """Return keys and values, side by side (count, 2D), with which the sum of exp(score) shows the
    order of its terms, for queries that end in sqrt(D).

    This sum has no negative terms that could cancel. Instead, one term is 1 and the others are
    about exp(-17), which is 4e-8. In float32 1 + 4e-8 is 1, but 1 + (4e-8 + 4e-8) is 1.0000001, so
    it matters which terms are added to the 1, and when.

    Scores are query * key / sqrt(D). Every key except key 0 ends in -17, which adds -17 to the
    score of a query that ends in sqrt(D). With four keys, where t, u and v are random:

        key       0      1      2      3
        score     0    t-17   u-17   v-17

    The values are 0, because they play no part in this sum.
    """
    k = torch.randn(count, head_dim, generator=generator)
    k[:, -1] = -17.0
    k[0] = 0.0
    return F.pad(k, (0, head_dim))


@lru_cache(maxsize=1)  # most trials use the same numbers again
def trial_numbers(
    count: int, head_dim: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor]:
    """Return B = 16 queries (B, 1, D) and, for each query, `count` keys and values, side by side
    (B, count, 2D).

    The first two queries have the keys of `canceling_values`, and the others have those of
    `one_large_weight`. Each query has its keys in a different random order.
    """
    generator = Generator().manual_seed(seed)
    # On an AMD EPYC each of the first two queries reveals a split that keys were moved past. Only
    # two in five of the others reveal a period that is too short, so there are more of these.
    first = 2
    queries = torch.randn(16, 1, head_dim, generator=generator)
    queries[first:, :, -1] = head_dim**0.5
    orders = torch.rand(len(queries), count, generator=generator).argsort(dim=1)
    canceling = canceling_values(count, head_dim, generator)[orders[:first]]
    one_large = one_large_weight(count, head_dim, generator)[orders[first:]]
    kv = torch.cat([canceling, one_large])  # (B, count, 2D)
    return queries.to(dtype), kv.to(dtype)


@dataclass(frozen=True)
class Trial:
    """Attention over `trial_numbers`.

    Two calls with the same number of keys have the same keys, in the same order. Their results
    therefore differ only if their sums have different orders.
    """

    head_dim: int
    dtype: torch.dtype
    seed: int
    copies: int  # T: how many times each query is in a pass

    def attend(self, slots: Sequence[int], length: int = KEY_BLOCK) -> Tensor:
        """Attend to a block of `length` slots, with keys in these slots. The others are masked.

        Return (B, T, D + 1). For each query the first D numbers are attention's result, rounded to
        the dtype. The last number is the logarithm of the sum of exp(score), in float32, which may
        show a difference that was rounded away in the result.
        """
        slots = list(slots)
        queries, kv = trial_numbers(len(slots), self.head_dim, self.dtype, self.seed)
        batch = len(queries)
        queries = queries.repeat(1, self.copies, 1).unsqueeze(1)  # (B, 1, T, D)
        block = torch.zeros(batch, 1, length, 2 * self.head_dim, dtype=self.dtype)
        block[:, 0, slots] = kv
        k, v = block.chunk(2, dim=-1)  # (B, 1, S, D)
        mask = torch.full((self.copies, length), -torch.inf, dtype=self.dtype)
        mask[:, slots] = 0.0  # the mask is added to the scores
        # F.scaled_dot_product_attention calls this function on a CPU, and drops the logarithm.
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_sum = kernel(queries, k, v, attn_mask=mask)
        out = out.squeeze(1).float()  # (B, T, D)
        return torch.cat([out, log_sum.view(batch, self.copies, 1)], dim=-1)

    def may_move(self, count: int, first: int, distance: int) -> bool:
        """Put `count` keys in the first slots, and move the keys from slot `first` on to slots that
        are `distance` later. Return whether the results stay the same. With 128 keys, of which the
        keys from slot 64 on move by 16:

            slot          0 ... 63    64 ... 79    80 ... 127    128 ... 143
            not moved     0 ... 63    64 ... 79    80 ... 127    (masked)
            moved         0 ... 63    (masked)     64 ... 111    112 ... 127
        """
        moved = [*range(first), *range(first + distance, count + distance)]
        return torch.equal(self.attend(moved), self.attend(range(count)))


# --- Attention: probes ---

QUERY_MULTIPLES = (1, 2, 4, 8, 16, 32)  # the multiples that are tried


def probe_queries(
    head_dim: int, dtype: torch.dtype, seed: int, most: int
) -> tuple[int, int] | None:
    """Find the multiple to which queries have to be padded.

    Copies of a query have equal results, unless the number of copies changes the order. On an AMD
    EPYC all numbers from 4 to 32 agree with each other, but 1, 2, 3 and 33, 34, 35 do not: a kernel
    takes 32 queries at a time, and here fewer than four are left over. The multiple is therefore 4:

        queries     1   2   3   4   5  ...  31  32  33  34  35  36  37 ...
        agree       -   -   -   x   x        x   x   -   -   -   x   x

    Return the multiple, and the largest number of queries up to which all its multiples agree. (No
    pass has more than `most` queries, so larger numbers are not tried.) Return None if none of
    QUERY_MULTIPLES will do.
    """
    largest = QUERY_MULTIPLES[-1]
    keys = range(KEY_BLOCK)
    full = Trial(head_dim, dtype, seed, copies=largest).attend(keys)  # (B, T, D + 1)
    expected = full[:, :1]

    def agree(count: int) -> bool:
        """Return whether the results of `count` copies of a query are the expected ones."""
        results = Trial(head_dim, dtype, seed, copies=count).attend(keys)
        return bool((results == expected).all())

    for multiple in QUERY_MULTIPLES:
        agreeing = 0
        while agreeing < most and agree(agreeing + multiple):
            agreeing += multiple
        if agreeing >= largest:
            return multiple, agreeing
    return None


# `probe_period` and `probe_grain` move the second half of 128 keys by up to 64 slots, that is, as
# far as slot 191. A split before slot 192 would look like lanes that never repeat. On an AMD EPYC
# the first split is at slot 192.
KEYS_TO_MOVE = 128
PERIODS = (16, 32, 64)  # the periods that are tried; no CPU so far needed more than 32


def probe_period(trial: Trial) -> int | None:
    """Return the *period* of the lanes: if a key moves a period later, it stays in its lane.

        lane     0   1   2   3
        slot     4   5   6   7
                 8   9  10  11

    In the drawing 4 is a period: the key of slot 5 may move to slot 9. 2 is none: slot 7 belongs to
    another lane. Any multiple of the number of lanes is a period. Return the least one of PERIODS,
    or None if none of these is a period. In the trial for a period of 16 the keys from slot 64 on
    move to the slots from 80 on.
    """
    first = KEYS_TO_MOVE // 2
    for period in PERIODS:
        if trial.may_move(KEYS_TO_MOVE, first, period):
            return period
    return None


def probe_grain(trial: Trial, period: int) -> int:
    """Return the *grain*: the least number of neighboring keys that have to move together.

    A kernel may first add up a few neighboring keys, and then add their sum to a lane. In the
    drawing a grain is a single key, and so it was on an AMD EPYC. With grains of two keys the rows
    would be:

        lane       0       1       2       3
        slot     0   1   2   3   4   5   6   7
                 8   9  10  11  12  13  14  15

    There keys may move from slot 2 on, by a period of 8: the pair of 2 and 3 comes to slots 10 and
    11. They may not move from slot 3 on, because the key of slot 2 would lose its neighbor. In
    general, a number is a multiple of the grain if keys may move from each of its multiples on.

    On an Intel Xeon with AMX a grain is 32 keys in bfloat16: according to Intel's manual the
    instruction TDPBF16PS sums the products of a whole tile, up to 32 keys, before it adds them to
    the earlier sum.
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
    """Return the *splits*: the numbers of keys in a block after which the lanes are added up.

        lane     0   1   2   3
        slot     4   5   6   7
                 8   9  10  11
                --------------   a split
                12  13  14  15

    No key may move past a split. If there is no split after n keys, the last of these keys may move
    a period later: in the drawing the last 4 of 8 keys may move to slots 8 to 11. The last 4 of 12
    keys may not move to slots 12 to 15, so a split is at 12.

    If a grain is as long as the period, which leaves a single lane, the first split is not found:
    the last grain is added to the sum of all keys before it, whether the split lies before or after
    this grain. A tree that reaches past such a split might not be exact.
    """
    splits = []
    for count in range(period, KEY_BLOCK, period):
        if not trial.may_move(count, count - period, period):
            splits.append(count)
    return *splits, KEY_BLOCK


def probe_lengths(trial: Trial, period: int) -> tuple[int, ...]:
    """Return the *lengths* to which the last block of a cache may be padded.

        slot     0   1   2   3
                 4   5   6   7
                --------------   a split that a block of 24 keys does not have
                 8   9  10  11
                12  13  14  15   the end of a block of 16 keys

    A block that is not full may be split elsewhere than a full one, as here. At the lengths that
    are returned it is not: its sums are the same as if masked slots followed, up to KEY_BLOCK.
    """
    lengths = []
    for count in range(period, KEY_BLOCK + 1, period):
        keys = range(count)
        if torch.equal(trial.attend(keys, length=count), trial.attend(keys)):
            lengths.append(count)
    return tuple(lengths)


# --- Attention: limits ---


@dataclass(frozen=True)
class AttentionLimits:
    """What attention needs to add up the keys of a query in the same order in every pass.

    On an AMD EPYC in bfloat16, for heads of 64 numbers, three of which share a kv head, these are:

        AttentionLimits(
            query_multiple=4,
            most_tokens=32,
            period=32,
            grain=1,
            splits=(192, 384, 512),
            lengths=(32, 64, 96, 128, 160, 192, 384, 416, 448, 480, 512),
        )

    There a pass over 5 tokens has 15 queries for a kv head, and is padded to 16. A last block of
    200 keys is padded to 384, because blocks of 224 to 352 keys are split elsewhere.
    """

    query_multiple: int  # the queries for a kv head are padded to a multiple of this number
    most_tokens: int  # a pass over more tokens is not exact; never more than MAX_ROWS
    period: int  # a key may lie this many slots later, or a multiple
    grain: int  # keys that move together; the first one's slot is a multiple of this number
    splits: tuple[int, ...]  # slots of a block where the lanes are added up; no key moves past one
    lengths: tuple[int, ...]  # the keys of the last block are padded to one of these numbers

    def attention_mask(self, mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """Turn a mask of tokens (T, S) into one of queries and keys that need no more padding.

        The rows of the tokens are repeated for each of the `group` query heads that share a kv
        head. Below them are rows for added queries, which see everything. On the right are columns
        for added keys, which only the added queries see. The result is 0 where a query sees a key,
        otherwise -inf, and is to be added to the scores.
        """
        mask = torch.cat([mask] * group)  # (group T, S)
        queries, keys = mask.shape
        mask = F.pad(mask, (0, self.padded(keys) - keys), value=False)
        mask = F.pad(mask, (0, 0, 0, -queries % self.query_multiple), value=True)
        return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)

    def padded(self, length: int) -> int:
        """Return how many keys attention must be given for `length` keys."""
        last = length % KEY_BLOCK  # the number of keys in the last block, if it is not full
        if last == 0:
            return length
        padded_last = min(size for size in self.lengths if size >= last)
        return length - last + padded_last

    def next_split(self, slot: int) -> int:
        """Return the first split after this slot."""
        place = slot % KEY_BLOCK  # the slot's place in its block
        split = min(split for split in self.splits if split > place)
        return slot - place + split


@cache
def probe_attention(
    head_dim: int, group: int, dtype: torch.dtype, seed: int = 0
) -> AttentionLimits | None:
    """Find the limits for heads of `head_dim` numbers, `group` of which share a kv head.

    Each probe asks whether results stay bit-identical if one thing is changed:

        probe_queries    a pass has fewer or more queries
        probe_period     the second half of the keys lies a period later
        probe_grain      the keys from any multiple of the grain on lie a period later
        probe_splits     only the last keys lie a period later
        probe_lengths    no masked slots follow the keys

    Return None if the kernel does not work as described above, if this PyTorch lacks it, or if
    passes over two tokens would not be exact.
    """
    try:
        # A pass over T tokens has group * T queries for each kv head.
        found = probe_queries(head_dim, dtype, seed, most=group * MAX_ROWS)
    except (RuntimeError, AttributeError, TypeError):  # the kernel is private, and may change
        return None
    if found is None:
        return None
    query_multiple, most_queries = found
    most_tokens = min(MAX_ROWS, most_queries // group)
    # The other probes are about keys, and need a number of queries that does not change the order.
    trial = Trial(head_dim, dtype, seed, copies=query_multiple)
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
