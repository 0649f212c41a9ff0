"""Slots for the nodes of a tree, so that it is verified exactly, to the bit.

Attention adds up the keys that a token sees by their slots, their places in the cache. In a chain
each drafted token lies in the slot that it will have in the text. In a tree two tokens may be
alternatives for the same slot, and only one of them can have it. If the other lay just anywhere,
its keys would be added up in another order than in the text, and the last bits would differ.

But attention adds up in lanes, which repeat after a *period* of slots: see plumbing/kernels.py. So
a key may lie one or more periods later. What lies between is masked, and the key goes into the same
lane, after the same keys. Here is a tree after 34 tokens of text, as if the period were 8. Nodes 1
and 2 follow the root, which is node 0, and node 3 follows node 2:

    slot     0 ... 33   34 35 36 37 38 39 40 41 42 43 44
    holds    the text    0  1  .  .  .  .  .  .  .  2  3

Nodes 1 and 2 both have the position 35. Node 1 lies in slot 35, and node 2 a period later. Node 3
has the position 36. Slot 36 is free, but it lies before node 2. So node 3 lies a period later, too,
and sees the text and slots 34, 43 and 44. If it is accepted, slots 43 and 44 are moved to 35 and
36.

No key may move beyond a *split*, where the lanes are added up. A node for which no slot before the
next split is right is left out of the draft.

The rest is only for a *grain* of more than one key. Some kernels add up a few neighbours first, for
example four, and these can only move together. Then a node moves with copies of the tokens before
it in its grain. In the example slots 32 to 35 are one grain, so with node 2 go copies of tokens 32
and 33 of the text and of node 0. Node 3 begins a new grain after it, and sees slots 0 to 31 and 40
to 44:

    slot     0 ... 31   32 33 34 35 36 37 38 39   40 41 42 43 44
    holds    the text   32 33  0  1  .  .  .  .   32 33  0  2  3
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plumbing.kernels import AttentionLimits

NodePath = list[int]  # the nodes from the root to the one at hand, both included


@dataclass
class TreeLayout:
    """Where the nodes of a tree lie while it is verified, and what each of them sees.

    For the example above, with a grain of 1 and, where that differs, of 4:

        nodes      [0, 1, 2, 3]
        slots      [34, 35, 43, 44]
        positions  [34, 35, 35, 36]
        copies     {}                           {40: 32, 41: 33, 42: 34}
    """

    nodes: list[int]  # those that have a slot; the next three fields are of these, in order
    slots: Tensor
    positions: Tensor
    mask: Tensor  # (nodes, slots), True where a node sees a slot
    copies: dict[int, int]  # slots that hold a copy, and the slot of which each is one

    def write(self, cache: Tensor, new: Tensor) -> None:
        """Write keys and values of the nodes (1, Hkv, T, 2D), and what has to be copied, into a
        layer's cache (1, Hkv, capacity, 2D). Tokens after the nodes are padding, and left out."""
        cache.index_copy_(2, self.slots, new[:, :, :len(self.slots)])
        if self.copies:
            originals = list(self.copies.values())
            cache[:, :, list(self.copies)] = cache[:, :, originals]


def lay_out_tree(paths: list[NodePath], length: int, limits: AttentionLimits) -> TreeLayout:
    """Give the nodes of a tree their slots after a text of `length` tokens.

    paths: of all nodes (see `Draft` of moa.py). Parents come before their children and, as the last
    nodes may find no slot, likelier nodes before others.
    """
    # The tokens of the text from here on share a grain with the root. With a grain of 1: none.
    start = length - length % limits.grain
    # By node: the slots of all that it sees from `start` on, in the order of the text. The last one
    # is the node's own.
    seen = {0: list(range(start, length + 1))}
    taken = set(seen[0])
    for node in range(1, len(paths)):
        parent = paths[node][-2]
        if parent not in seen or len(seen) == limits.most_tokens:
            continue
        slots = find_slots(seen[parent], start, taken, limits)
        if slots is not None:
            seen[node] = slots
            taken.update(slots)
    slot_of = {node: slots[-1] for node, slots in seen.items()}
    return TreeLayout(
        nodes=list(seen),
        slots=torch.tensor(list(slot_of.values())),
        positions=torch.tensor([length + len(paths[node]) - 1 for node in seen]),
        mask=visible_slots(seen, start),
        copies=copied_slots(seen, slot_of, paths, range(start, length)),
    )


def find_slots(
    parent_sees: list[int], start: int, taken: set[int], limits: AttentionLimits
) -> list[int] | None:
    """Return the slots of all that a node sees from slot `start` on, its own slot last, or None if
    it finds no slot. parent_sees: the same of its parent.

    Node 3 of the example, with a grain of 1:

        start, parent_sees    34 and [34, 43], of nodes 0 and 2
        position              36, and the next split is at 192
        shift 0               slot 36 is free, but lies before slot 43
        shift 8               slot 44 is free and lies after slot 43: return [34, 43, 44]

    Node 2, with a grain of 4:

        start, parent_sees    32 and [32, 33, 34], of tokens 32 and 33 and of node 0
        position              35, in the grain that begins at slot 32
        shift 0               of slots 32 to 35 the last is node 1's
        shift 8               slots 40 to 43 are free: return [40, 41, 42, 43]
    """
    position = start + len(parent_sees)
    # The node moves with what is before it in its grain. With a grain of 1 it moves alone.
    grain_start = position - position % limits.grain
    unmoved = parent_sees[:grain_start - start]
    room = limits.next_split(position) - position
    for shift in range(0, room, limits.period):
        moved = list(range(grain_start + shift, position + shift + 1))
        # In the text a grain lies after the one before it. In a lane that is the order of the sum.
        in_order = not unmoved or unmoved[-1] < moved[0]
        # Where the parent is in the same grain, the node may join it in a slot after it.
        new = set(moved).difference(parent_sees)
        if in_order and taken.isdisjoint(new):
            return unmoved + moved
    return None


def visible_slots(seen: dict[int, list[int]], start: int) -> Tensor:
    """Return the mask of a layout: a node sees the text before `start`, and its slots in `seen`."""
    end = max(slots[-1] for slots in seen.values()) + 1
    mask = torch.zeros(len(seen), end, dtype=torch.bool)
    mask[:, :start] = True
    for row, slots in enumerate(seen.values()):
        mask[row, slots] = True
    return mask


def copied_slots(
    seen: dict[int, list[int]], slot_of: dict[int, int], paths: list[NodePath], text: range
) -> dict[int, int]:
    """Return the copies of a layout. `text` is the tokens that share a grain with the root.

    With a grain of 1 there are none: every node sees its ancestors in their own slots.
    """
    copies = {}
    for node, slots in seen.items():
        originals = [*text, *(slot_of[ancestor] for ancestor in paths[node])]
        for slot, original in zip(slots, originals):
            if slot != original:
                copies[slot] = original
    return copies
