"""Windows: how a tree of drafted tokens is verified exactly, to the bit.

See plumbing/kernels.py first: why the same sum has two values. Attention adds up a token's keys by
their slots in the cache: those in slots 0, 16, 32, ... may go into one partial sum, those in 1, 17,
33, ... into another. In a chain a drafted token has the slot that it will have in the text. In a
tree its ancestors lie anywhere, so their terms would go into other partial sums, and the result
would be rounded in another way.

So each path of the tree, from the root to a leaf, gets a *window* of the cache, which holds what
the text would hold there: the text's tail, from the last multiple of a unit on, then the path.
Here are the windows of two paths after 34 tokens, as if the unit were 8. Nodes 1 and 2 both follow
the root, 0:

    slot     0 ... 31   32 33 34 35 36 37 38 39   40 41 42 43 44 45 46 47
    holds    the text   32 33  0  1  .  .  .  .   32 33  0  2  .  .  .  .

The first window is where the text itself goes on. Node 2 sees slots 0 to 31 and 40 to 43. If it is
accepted, slots 42 and 43 move to 34 and 35. The root lies in both windows, and what is computed of
it is the same there. Where a node has several windows, it looks at the last.

In code, `source` says what the slots from 32 on get. It numbers the tail and the tree together:
0 and 1 are tokens 32 and 33, and 2, 3 and 4 are the nodes 0, 1 and 2. So for the example it is
0 1 2 3 . . . . 0 1 2 4 . . . .

A tree is given as the paths to all of its nodes, of which each is the list of nodes from the root
to the one at hand (see `Draft` of moa.py).
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plumbing.kernels import AttentionLimits

NodePath = list[int]  # from the root to a node


@dataclass
class Windows:
    """The windows that a cache has while a tree is verified, and what each node sees of it."""

    length: int  # of the text
    base: int  # the slot where the first window begins
    source: Tensor  # what each slot from the base on gets: a number in the tail and tree together
    starts: list[int]  # of each node: the slot where its window begins, the last if it has several
    positions: Tensor  # of the nodes
    mask: Tensor  # (nodes, slots)

    def fill(self, slots: Tensor, new: Tensor) -> int:
        """Write keys and values of the tree's nodes (1, Hkv, nodes, 2D) into all their windows.
        slots: a layer's, (1, Hkv, capacity, 2D). Returns where the last window ends."""
        tail = slots[:, :, self.base:self.length]
        end = self.base + len(self.source)
        slots[:, :, self.base:end] = torch.cat([tail, new], dim=2).index_select(2, self.source)
        return end

    def slots_of(self, path: NodePath) -> list[int]:
        """Return where the nodes of this path lie together, as numbers of slots after the text."""
        # The window of the last node holds all of them, in order, after the tail.
        first = self.starts[path[-1]] - self.base
        return list(range(first, first + len(path)))


def open_windows(paths: list[NodePath], length: int, unit: int) -> Windows:
    """Give each path to a leaf its window, after a text of `length` tokens."""
    tail = length % unit
    base = length - tail
    source: list[int] = []
    starts = [0] * len(paths)
    for path in paths_to_leaves(paths):
        for node in path:
            starts[node] = base + len(source)
        source += range(tail)
        source += [tail + node for node in path]
        source += [0] * (-len(source) % unit)  # nobody sees these
    first = torch.tensor(starts).unsqueeze(1)  # (nodes, 1)
    depths = torch.tensor([len(path) - 1 for path in paths])
    last = first + tail + depths.unsqueeze(1)
    slots = torch.arange(base + len(source))
    in_window = (slots >= first) & (slots <= last)  # up to the node itself
    mask = in_window | (slots < base)
    return Windows(length, base, torch.tensor(source), starts, length + depths, mask)


def fitting_nodes(paths: list[NodePath], length: int, limits: AttentionLimits) -> list[int]:
    """Return the nodes that can be verified exactly in one pass, in order: all, or those of the
    likelier paths.

    The terms of a window must go into the same partial sums as the text's. So all windows have to
    end before the next split. Only the first may cross it: it lies where the text will, and the
    text crosses it in the same place.
    """
    tail = length % limits.unit
    end = length - tail  # of the windows so far
    split = limits.next_split(end)
    kept: set[int] = set()
    for path in paths_to_leaves(paths):
        path = path[:limits.most_tokens]
        nodes = kept.union(path)
        size = tail + len(path)
        end_with_path = end + size + -size % limits.unit
        is_first = not kept
        if is_first or (end_with_path <= split and len(nodes) <= limits.most_tokens):
            kept = nodes
            end = end_with_path
    return sorted(kept)


def paths_to_leaves(paths: list[NodePath]) -> list[NodePath]:
    """Return the paths to nodes without children. Drafters add likelier children first, so the
    first of these paths follows the likeliest child of each node."""
    parents = {path[-2] for path in paths if len(path) > 1}
    return sorted(path for path in paths if path[-1] not in parents)
