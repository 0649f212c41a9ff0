"""Where the tokens of a tree lie in the cache, so that it is verified exactly, to the bit.

See plumbing/kernels.py first: why the same sum has two values. Attention adds up a token's keys by
their slots in the cache. In a chain a drafted token has the slot that it will have in the text. In
a tree two tokens may want the same slot, and if one lies anywhere else, the keys of those after it
are added up in another order.

But a key may lie a *unit* of slots later, or several: then it goes into the same lane in the same
place, as what lies between is masked. Here is a tree after 34 tokens of text, as if the unit were
8. Nodes 1 and 2 both follow the root, 0, and node 3 follows node 2:

    slot     0 ... 33   34 35 36 37 38 39 40 41 42 43 44
    holds    the text    0  1  .  .  .  .  .  .  .  2  3

Nodes 1 and 2 have the position 35. Node 1 lies there, node 2 a unit later, and node 3, which has
the position 36, after node 2. Node 3 sees slots 0 to 34, 43 and 44. If it is accepted, slots 43 and
44 move to 35 and 36.

Where the *grain* is more than one key, what lies before a moved token in its grain is copied along
with it. If it were 4, the example would be this (token 32 of the text begins a grain), and node 3
would see slots 0 to 31 and 40 to 44:

    slot     0 ... 31   32 33 34 35 36 37 38 39   40 41 42 43 44
    holds    the text   32 33  0  1  .  .  .  .   32 33  0  2  3

All this has to be before the next *split*, where the lanes begin again. Tokens that have no place
are left out of the draft. (With trees of the default size that was one in seven, on an AMD EPYC in
bfloat16. It shortens what a cycle brings by some 5%.)

A tree is given as the paths to all of its nodes, of which each is the list of nodes from the root
to the one at hand (see `Draft` of moa.py).
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plumbing.kernels import KEY_BLOCK, AttentionLimits

NodePath = list[int]  # from the root to a node


@dataclass
class TreeLayout:
    """Where the nodes of a tree lie while it is verified, and what each of them sees."""

    nodes: list[int]  # those that have a place, in order; the next three fields are of these
    slots: list[int]  # where each node lies
    positions: Tensor
    mask: Tensor  # (nodes, slots)
    # Copies that share a grain with a moved node: (from, to).
    copied_text: list[tuple[int, int]]  # slots
    written: Tensor  # slots that get keys and values of nodes
    holds: Tensor  # of which node each: an index into `nodes`

    def copy_text(self, cache: Tensor) -> None:
        """Copy what is needed of the text within a cache of all layers (..., capacity, 2D)."""
        for source, slot in self.copied_text:
            cache[..., slot, :] = cache[..., source, :]

    def write(self, cache: Tensor, new: Tensor) -> None:
        """Write keys and values of the nodes (1, Hkv, nodes, 2D) into a layer's cache (1, Hkv,
        capacity, 2D)."""
        cache.index_copy_(2, self.written, new.index_select(2, self.holds))


def lay_out_tree(paths: list[NodePath], length: int, limits: AttentionLimits) -> TreeLayout:
    """Give each node its slot after a text of `length` tokens, as long as there are places. The
    nodes are in the order of their importance, and parents come first."""
    base = length - length % limits.grain
    # By node: the slots that it sees from the base on, by position; the last is its own.
    seen = {0: list(range(base, length + 1))}
    taken = set(seen[0])
    for node in range(1, len(paths)):
        parent = paths[node][-2]
        if parent in seen and len(seen) < limits.most_tokens:
            found = find_slots(seen[parent], base, taken, limits)
            if found is not None:
                seen[node] = found
                taken.update(found)
    return describe_layout(seen, paths, length, base)


def find_slots(
    before: list[int], base: int, taken: set[int], limits: AttentionLimits
) -> list[int] | None:
    """Find slots for a node: what it sees from the base on, its own slot last. before: what its
    parent sees. None: there is no place."""
    position = base + len(before)
    after_parent = before[-1] + 1
    if after_parent not in taken and limits.same_sum(after_parent, position):
        return before + [after_parent]
    # The node and what stands before it in its grain move together.
    first = position - position % limits.grain
    kept = before[:first - base]
    for shift in range(limits.unit, KEY_BLOCK, limits.unit):
        moved = range(first + shift, position + shift + 1)
        if not limits.same_sum(moved[-1], position):
            return None
        in_order = not kept or moved[0] > kept[-1]  # as in the text, also in a lane
        if in_order and taken.isdisjoint(moved):
            return kept + list(moved)
    return None


def describe_layout(
    seen: dict[int, list[int]], paths: list[NodePath], length: int, base: int
) -> TreeLayout:
    """Turn what each node sees into lists and tensors."""
    nodes = sorted(seen)
    end = max(slots[-1] for slots in seen.values()) + 1
    mask = torch.zeros(len(nodes), end, dtype=torch.bool)
    mask[:, :base] = True
    copied = {}  # slot: the slot of the text that it is a copy of
    held = {}  # slot: the node that it holds
    for row, node in enumerate(nodes):
        mask[row, seen[node]] = True
        of_text = length - base  # so many of what it sees from the base on; the others are nodes
        for source, slot in enumerate(seen[node][:of_text], start=base):
            if slot != source:
                copied[slot] = source
        held.update(zip(seen[node][of_text:], paths[node]))
    return TreeLayout(
        nodes=nodes,
        slots=[seen[node][-1] for node in nodes],
        positions=torch.tensor([length + len(paths[node]) - 1 for node in nodes]),
        mask=mask,
        copied_text=[(source, slot) for slot, source in copied.items()],
        written=torch.tensor(list(held)),
        holds=torch.tensor([nodes.index(node) for node in held.values()]),
    )
