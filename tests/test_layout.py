"""Where the nodes of a tree lie in the cache, and what they see there."""
from dataclasses import replace

import torch

from plumbing.kernels import AttentionLimits
from plumbing.layout import TreeLayout, lay_out_tree

# The root 0 has the children 1 and 2, and 3 follows 2.
PATHS = [[0], [0, 1], [0, 2], [0, 2, 3]]
PERIOD = 8
LIMITS = AttentionLimits(
    query_multiple=1,
    most_tokens=32,
    period=PERIOD,
    grain=1,
    splits=(192, 384, 512),
    lengths=(192, 512),
)
GRAINS_OF_FOUR = replace(LIMITS, grain=4)


def lay_out(length: int, limits: AttentionLimits = LIMITS, paths=PATHS) -> TreeLayout:
    return lay_out_tree(paths, length, limits)


def held_by(layout: TreeLayout, length: int) -> list[int]:
    """Return what each slot holds after a text of this length and a tree are written: 100 + i
    stands for token i of the text, and i for node i."""
    cache = torch.zeros(1, 1, 600, 1)
    cache[0, 0, :length, 0] = 100 + torch.arange(length)
    padding = [99, 99]  # tokens that only pad a pass
    new = torch.tensor(layout.nodes + padding, dtype=torch.float32)
    layout.write(cache, new.view(1, 1, -1, 1))
    return cache.flatten().int().tolist()


def seen_by(layout: TreeLayout, row: int) -> list[int]:
    return [slot for slot, seen in enumerate(layout.mask[row].tolist()) if seen]


def test_a_node_whose_slot_is_taken_lies_a_period_later_and_its_children_after_it():
    layout = lay_out(34)
    assert layout.slots.tolist() == [34, 35, 43, 44]
    assert seen_by(layout, 3) == [*range(35), 43, 44]
    assert layout.copies == {}
    held = held_by(layout, 34)
    assert [held[slot] for slot in layout.slots.tolist()] == [0, 1, 2, 3]
    assert 99 not in held


def test_what_lies_before_a_moved_node_in_its_grain_is_copied_along():
    layout = lay_out(34, GRAINS_OF_FOUR)
    held = held_by(layout, 34)
    assert held[32:36] == [132, 133, 0, 1]
    assert held[40:45] == [132, 133, 0, 2, 3]
    assert layout.copies == {40: 32, 41: 33, 42: 34}
    assert seen_by(layout, 3) == [*range(32), *range(40, 45)]
    assert layout.slots.tolist() == [34, 35, 43, 44]


def test_every_node_sees_the_text_and_its_path_in_lanes_and_in_the_order_of_positions():
    paths = [[0], [0, 1], [0, 2], [0, 3], [0, 1, 4], [0, 1, 5], [0, 2, 6], [0, 2, 6, 7], [0, 3, 8]]
    for limits in (LIMITS, GRAINS_OF_FOUR):
        for length in range(20, 60):
            layout = lay_out(length, limits, paths)
            assert layout.nodes == list(range(9))
            held = held_by(layout, length)
            for row, path in enumerate(paths):
                slots = seen_by(layout, row)
                text = [100 + i for i in range(length)]
                assert [held[slot] for slot in slots] == text + path
                assert [slot % PERIOD for slot in slots] == [i % PERIOD for i in range(len(slots))]
                # Tokens that share a grain in the text also share a grain here.
                for i, (slot, after) in enumerate(zip(slots, slots[1:])):
                    assert after == slot + 1 or (i + 1) % limits.grain == 0


def test_nodes_without_a_place_before_the_next_split_are_left_out():
    assert lay_out(170).nodes == [0, 1, 2, 3]
    assert lay_out(182).nodes == [0, 1, 2]  # node 3 would lie in slot 192
    assert lay_out(183).nodes == [0, 1]
    other_order = [[0], [0, 1], [0, 1, 2], [0, 3]]
    assert lay_out(183, paths=other_order).nodes == [0, 1, 2]
    assert lay_out(190).nodes == [0, 1]
    assert lay_out(191).nodes == [0, 1, 2, 3]  # after the split all slots are free


def test_a_draft_of_too_many_tokens_is_cut():
    chain = [list(range(n)) for n in range(1, 41)]
    layout = lay_out(100, paths=chain)
    assert layout.nodes == list(range(32))
    assert layout.slots.tolist() == list(range(100, 132))
