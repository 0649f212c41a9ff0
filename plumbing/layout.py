"""Slots for the nodes of a tree, so that its verification is exact, bit for bit.

app/exact.py verifies every tree in these slots. Attention adds up the keys that a token sees in the
order of their slots, their places in the cache. In a chain each drafted token lies in the slot that
it will have in the text. In a tree two tokens may be alternatives for the same slot, and only one
of them can have it. If the other token lay in an arbitrary slot, its key would be added up in a
different order than in the text, and the last bits would differ.

However, attention adds up in lanes, which repeat after a *period* of slots: see
plumbing/kernels.py. A key may therefore lie one or more periods later. The slots between are
masked, and the key is added to the same lane, after the same keys. Here is a tree after 34 tokens
of text, for an invented kernel whose period is 8. Nodes 1 and 2 follow the root, which is node 0,
and node 3 follows node 2:

    slot     0 ... 33   34 35 36 37 38 39 40 41 42 43 44
    holds    the text    0  1  .  .  .  .  .  .  .  2  3

Nodes 1 and 2 both have the position 35. Node 1 lies in slot 35, and node 2 a period later. Node 3
has the position 36. Slot 36 is free, but it lies before node 2, so node 3 also lies a period later.
Node 3 sees the text and slots 34, 43 and 44. If node 3 is accepted, the keys and values of slots 43
and 44 are moved to slots 35 and 36.

No key may move past a *split*, where the lanes are added up. A node that finds no fitting slot
before the next split is left out of the draft. In the example the next split is at slot 48.

On some CPUs keys can move only together with their neighbors. The last section adds this.
"""
from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from plumbing.kernels import AttentionLimits


@dataclass
class TreeLayout:
    """Where the nodes of a tree lie while it is verified, and what each node sees. The example has
    nodes [0, 1, 2, 3] and slots [34, 35, 43, 44]."""

    nodes: list[int]  # the nodes that have a slot
    slots: Tensor  # the slot of each of `nodes`
    mask: Tensor  # (nodes, slots), True where a node sees a slot
    copies: dict[int, int]  # empty, but for the last section

    def write(self, cache: Tensor, new: Tensor) -> None:
        """Write the nodes' keys and values (1, Hkv, T, 2D), and the copies, into one layer of a
        cache (1, Hkv, capacity, 2D). Tokens after the nodes are padding, and are left out."""
        cache.index_copy_(2, self.slots, new[:, :, :len(self.slots)])
        if self.copies:
            originals = list(self.copies.values())
            cache[:, :, list(self.copies)] = cache[:, :, originals]


def lay_out_tree(paths: list[list[int]], length: int, limits: AttentionLimits) -> TreeLayout:
    """Give the nodes of a tree their slots after a text of `length` tokens.

    paths: for each node, the nodes from the root to this node, both included (see `Draft` of
    moa.py). Parents must come before their children. Slots are given out in the order of the nodes
    and may run out, so likelier nodes should come before less likely ones.
    """
    start = length - length % limits.grain  # `length`, but for the last section
    find = find_slots if limits.grain == 1 else find_slots_in_grains
    # For each node: the slots of everything it sees from `start` on, its own slot last.
    seen = {0: list(range(start, length + 1))}
    taken = set(seen[0])
    for node in range(1, len(paths)):
        parent = paths[node][-2]
        if parent in seen and len(seen) < limits.most_tokens:
            slots = find(seen[parent], start, taken, limits)
            if slots is not None:
                seen[node] = slots
                taken.update(slots)
    return TreeLayout(
        nodes=list(seen),
        slots=torch.tensor([slots[-1] for slots in seen.values()]),
        mask=visible_slots(seen, start),
        copies=find_copies(seen, paths, range(start, length)),
    )


def find_slots(
    parent_sees: list[int], start: int, taken: Set[int], limits: AttentionLimits
) -> list[int] | None:
    """Return the slots of what a node sees from slot `start` on: those that its parent sees, and
    its own. Return None if no slot is left for it.

    In the example node 3 has the position 36, and its parent sees slots 34 and 43:

        shift 0    slot 36 is free, but lies before slot 43
        shift 8    slot 44 is free, and lies after slot 43: return [34, 43, 44]
    """
    position = start + len(parent_sees)
    for shift in shifts(position, limits):
        slot = position + shift
        if slot > parent_sees[-1] and slot not in taken:
            return [*parent_sees, slot]
    return None


def shifts(position: int, limits: AttentionLimits) -> range:
    """Return how far the key of a position may be moved: by periods, and not past a split."""
    return range(0, limits.next_split(position) - position, limits.period)


def visible_slots(seen: dict[int, list[int]], start: int) -> Tensor:
    """Return the mask of a layout: a node sees the text before `start`, and its slots in `seen`."""
    end = max(slots[-1] for slots in seen.values()) + 1
    mask = torch.zeros(len(seen), end, dtype=torch.bool)
    mask[:, :start] = True
    for row, slots in enumerate(seen.values()):
        mask[row, slots] = True
    return mask


# --- Grains ---
#
# On some CPUs attention adds up a *grain* of a few neighboring keys before their sum goes into a
# lane. Keys can then move only in whole grains: a node moves together with copies of the keys
# before it in its grain. With grains of four keys, slots 32 to 35 of the example are a grain.
# Copies of tokens 32 and 33 of the text and of node 0 move together with node 2. Node 3 begins a
# new grain, and sees slots 0 to 31 and 40 to 44:
#
#     slot     0 ... 31   32 33 34 35 36 37 38 39   40 41 42 43 44
#     holds    the text   32 33  0  1  .  .  .  .   32 33  0  2  3
#
# What a node sees in slots of its own choice thus begins at the grain of the root, at slot 32, and
# not at the root: this is `start`. The copies are {40: 32, 41: 33, 42: 34}.


def find_slots_in_grains(
    parent_sees: list[int], start: int, taken: Set[int], limits: AttentionLimits
) -> list[int] | None:
    """Return what `find_slots` returns, with grains of several keys. In the example:

        node 2     its parent sees slots 32 to 34, so its position is 35
        shift 0    slots 32 to 35 will not do: slot 35 is node 1's
        shift 8    slots 40 to 43 are free: return [40, 41, 42, 43]
    """
    position = start + len(parent_sees)
    grain_start = position - position % limits.grain
    before = parent_sees[:grain_start - start]  # the slots of earlier grains
    for shift in shifts(position, limits):
        grain = list(range(grain_start + shift, position + shift + 1))  # up to the node itself
        in_order = not before or before[-1] < grain[0]
        # Slots that the parent already uses for this grain are shared. Only new slots must be free.
        new = set(grain).difference(parent_sees)
        if in_order and taken.isdisjoint(new):
            return before + grain
    return None


def find_copies(
    seen: dict[int, list[int]], paths: list[list[int]], text: range
) -> dict[int, int]:
    """Return each slot that holds a copy, with the slot of its original. text: the slots of the
    text that are in `seen`."""
    copies = {}
    for node, slots in seen.items():
        originals = [*text, *[seen[ancestor][-1] for ancestor in paths[node]]]
        for slot, original in zip(slots, originals):
            if slot != original:
                copies[slot] = original
    return copies
