"""Room that is set aside for optimizer state, on the replayed allocator."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.devices.aside import Aside, plugs_for, spare_for
from lowtide.devices.caching_allocator import CachingAllocator

MIB = 2**20


def test_smaller_holes_are_plugged_and_larger_ones_left():
    holes = (6 * MIB, 0), (30 * MIB, 1), (200 * MIB, 2), (8 * MIB, 3), (MIB, 4)
    assert plugs_for([4 * MIB, 90 * MIB], holes) == [6 * MIB, 30 * MIB, 8 * MIB]
    assert plugs_for([4 * MIB], holes) == [6 * MIB, 8 * MIB]


def test_a_shared_segment_is_free_beside_room_of_both_kinds():
    assert spare_for([4 * MIB, 8 * MIB]) == spare_for([90 * MIB]) == spare_for([]) == []
    assert spare_for([4 * MIB, 90 * MIB]) == [20 * MIB]


def test_nothing_is_plugged_where_nothing_is_set_aside():
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(MIB))
    for state in [0], [MIB // 2, 0]:
        reserved = allocator.reserved
        Aside.of(allocator, state).fill(allocator)
        assert allocator.reserved == reserved


@settings(max_examples=100)
@given(
    st.lists(st.integers(10, 60), min_size=1, max_size=12),
    st.lists(st.integers(2, 80), min_size=1, max_size=8),
)
def test_state_with_segments_of_its_own_comes_to_lie_in_them(state, step):
    allocator = CachingAllocator()
    aside = Aside.of(allocator, [size * MIB for size in state])
    room = allocator.reserved
    blocks = [allocator.allocate(size * MIB) for size in step]
    for block in blocks[::2]:
        allocator.release(block)
    made = aside.fill(allocator)
    for block in blocks[1::2]:
        allocator.release(block)
    allocator.give_back()
    assert sum(block.size for block in made) == allocator.allocated <= allocator.reserved <= room
