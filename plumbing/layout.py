"""Slots for the nodes of a tree, so that its verification is exact, bit for bit.

Attention adds up the keys that a token sees in the order of their slots, their places in the cache.
In a chain each drafted token lies in the slot that it will have in the text. In a tree two tokens
may be alternatives for the same slot, and only one of them can have it. If the other token lay in
an arbitrary slot, its key would be added up in a different order than in the text, and the last
bits would differ.

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

On some CPUs keys can move only in *grains* of a few neighbors, which are added up before their sum
goes into a lane. A node then moves together with copies of the keys before it in its grain. With
grains of four, slots 32 to 35 of the example are one grain. Copies of tokens 32 and 33 of the text
and of node 0 move together with node 2. Node 3 begins a new grain, and sees slots 0 to 31 and 40 to
44:

    slot     0 ... 31   32 33 34 35 36 37 38 39   40 41 42 43 44
    holds    the text   32 33  0  1  .  .  .  .   32 33  0  2  3

The functions below know only grains. With a grain of one key, as in the first drawing, there is
nothing to copy.
"""
from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from plumbing.kernels import AttentionLimits


@dataclass
class TreeLayout:
    """Where the nodes of a tree lie while it is verified, and what each node sees.

    For the example above:

        grain      1                            4
        nodes      [0, 1, 2, 3]                 [0, 1, 2, 3]
        slots      [34, 35, 43, 44]             [34, 35, 43, 44]
        positions  [34, 35, 35, 36]             [34, 35, 35, 36]
        copies     {}                           {40: 32, 41: 33, 42: 34}
    """

    nodes: list[int]  # the nodes that have a slot
    slots: Tensor  # the slot of each of `nodes`
    positions: Tensor  # the position of each of `nodes`
    mask: Tensor  # (nodes, slots), True where a node sees a slot
    copies: dict[int, int]  # from each slot that holds a copy to the slot of the original

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
    start = length - length % limits.grain  # where the root's grain begins, perhaps in the text
    # For each node: the slots of everything it sees from `start` on, in the order of the text. The
    # last one is the node's own slot.
    seen = {0: list(range(start, length + 1))}
    # For each of these slots: the slot of its original, which is the slot itself if it is no copy.
    originals = {slot: slot for slot in seen[0]}
    for node in range(1, len(paths)):
        parent = paths[node][-2]
        if parent not in seen or len(seen) == limits.most_tokens:
            continue
        slots = find_slots(seen[parent], start, originals.keys(), limits)
        if slots is None:
            continue
        seen[node] = slots
        # The node sees what its parent sees, in the same slots or in copies, and then itself.
        own = slots[-1]
        for slot, parent_slot in zip(slots, seen[parent]):
            originals[slot] = originals[parent_slot]
        originals[own] = own
    return TreeLayout(
        nodes=list(seen),
        slots=torch.tensor([slots[-1] for slots in seen.values()]),
        positions=torch.tensor([length + len(paths[node]) - 1 for node in seen]),
        mask=visible_slots(seen, start),
        copies={slot: original for slot, original in originals.items() if slot != original},
    )


def find_slots(
    parent_sees: list[int], start: int, taken: Set[int], limits: AttentionLimits
) -> list[int] | None:
    """Return the slots of everything that a node sees from slot `start` on, its own slot last.
    Return None if the node finds no slot.

    parent_sees: the slots of everything that its parent sees from `start` on.

    Node 2 of the example, with grains of four:

        start, parent_sees    32 and [32, 33, 34], which hold tokens 32 and 33 and node 0
        position              35, in the grain that begins at slot 32
        shift 0               slots 32 to 35 will not do: slot 35 is node 1's
        shift 8               slots 40 to 43 are free: return [40, 41, 42, 43]

    Node 3, which begins a new grain:

        start, parent_sees    32 and [40, 41, 42, 43]
        position              36, and the next split is at 48
        shift 0               slot 36 is free, but lies before slot 43
        shift 8               slot 44 is free, and lies after slot 43: return [40, 41, 42, 43, 44]
    """
    position = start + len(parent_sees)
    grain_start = position - position % limits.grain
    before = parent_sees[:grain_start - start]  # the slots of earlier grains
    room = limits.next_split(position) - position
    for shift in range(0, room, limits.period):
        grain = list(range(grain_start + shift, position + shift + 1))  # up to the node itself
        # Lanes are added up in the order of slots, so this grain must come after the earlier ones.
        in_order = not before or before[-1] < grain[0]
        # Slots that the parent already uses for this grain are shared. Only new slots must be free.
        new = set(grain).difference(parent_sees)
        if in_order and taken.isdisjoint(new):
            return before + grain
    return None


def visible_slots(seen: dict[int, list[int]], start: int) -> Tensor:
    """Return the mask of a layout: a node sees the text before `start`, and its slots in `seen`."""
    end = max(slots[-1] for slots in seen.values()) + 1
    mask = torch.zeros(len(seen), end, dtype=torch.bool)
    mask[:, :start] = True
    for row, slots in enumerate(seen.values()):
        mask[row, slots] = True
    return mask
