"""torch's CUDA caching allocator on paper: cases by hand, and a slow second model of the same rules."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.devices.allocator_settings import AllocatorSettings, read_settings
from lowtide.devices.caching_allocator import CachingAllocator, NoRoomError, Segment
from naive_allocator import MIB, UNIT, NaiveAllocator


def told(story, conf="", *, limit=None, segments=()):
    """MiB allocated and reserved after "a12 b3 -a": a of 12 MiB is made, then b, and a goes."""
    limit = None if limit is None else int(limit * MIB)
    allocator = CachingAllocator(segments, read_settings(conf), limit=limit)
    blocks = {}
    for word in story.split():
        if word[0] == "-":
            allocator.release(blocks.pop(word[1]))
        else:
            blocks[word[0]] = allocator.allocate(int(float(word[1:]) * MIB))
    return allocator.allocated / MIB, allocator.reserved / MIB


@pytest.mark.parametrize(
    ("story", "allocated", "reserved"),
    [
        ("a0.5", 0.5, 2),
        ("a0.0001", 512 / MIB, 2),
        ("a1 b1 c1", 3, 4),
        ("a1.5", 1.5, 20),
        ("a9 b9", 18, 20),
        ("a9.5 b10.5", 20, 20),
        ("a11", 12, 12),  # up to 1 MiB more comes with it
        ("a13", 14, 14),
        ("a13 -a b12", 12, 14),
        ("a100 -a b30 c70", 100, 100),
        ("a100 -a b30 c71", 102, 172),
        ("a30 b30 -a -b c60", 60, 120),  # segments do not merge
        ("a60 -a b30 c30 -b -c d60", 60, 60),  # blocks of one do
        ("a0.5 -a b1.5", 1.5, 22),  # each pool has its own
    ],
)
def test_cases_by_hand(story, allocated, reserved):
    assert told(story) == (allocated, reserved)


def test_of_equal_blocks_the_lowest_address_is_taken():
    """Both segments are free; the first is split, so that the second can still serve 40 MiB."""
    assert told("a40 b40 -b -a c20 d40")[1] == 80
    assert told("a20 b40 c40 -c -b d20 -a e20 f40")[1] == 100


def test_whole_segments_go_back_where_the_limit_is_reached():
    assert told("a40 b40 -a c60 ", limit=100) == (100, 100)
    with pytest.raises(NoRoomError, match="reserved"):
        told("a40 b20 -a c1.5 d60", limit=100)  # c holds the segment of a
    assert told("a40 -a b0.5 c60", limit=62)[1] == 62


EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize(
    ("story", "allocated", "reserved"),
    [
        ("a30", 30, 40),
        ("a30 b30", 60, 60),
        ("a30 b30 -a -b c60", 60, 60),
        ("a30 -a b70", 70, 80),  # it grows where a was
        ("a30 b10.5 -a c29.5 d0.5", 40.5, 62),
        ("a30 b30 -a c1.5 d28.5", 60, 60),
        ("a20 b20 c20 -a -c d15", 35, 60),  # the hole first: the end could still grow
    ],
)
def test_expandable_segments_by_hand(story, allocated, reserved):
    assert told(story, EXPANDABLE) == (allocated, reserved)


def test_pages_that_are_free_go_back_where_the_limit_is_reached():
    assert told("a50 b10 -a c60", EXPANDABLE, limit=100) == (70, 80)
    with pytest.raises(NoRoomError):
        told("a50 b10 -a c61", EXPANDABLE, limit=79)


def test_blocks_over_the_largest_split_serve_large_requests_alone():
    conf = "max_split_size_mb:100"
    assert told("a200 -a b50", conf) == (50, 250)
    assert told("a200 -a b190", conf) == (200, 200)
    assert told("a200 -a b150", conf) == (150, 350)
    assert told("a200 -a b150", conf + ",max_non_split_rounding_mb:60") == (200, 200)
    assert told("a200 -a b150", conf, limit=300) == (150, 150)


def test_settings_are_read_as_torch_writes_them():
    read = read_settings(
        "roundup_power2_divisions:[256:1, 512:2,1024:4,>:8], max_split_size_mb:64,backend:native"
    )
    assert read.divisions == (1,) * 9 + (2, 4) + (8,) * 5
    assert (read.most_split, read.expandable, read.native) == (64 * MIB, False, True)
    assert read_settings("") == read_settings("pinned_use_background_threads:True") == AllocatorSettings()
    assert read_settings("roundup_power2_divisions:4").divisions == (4,) * 16
    assert not read_settings("backend:cudaMallocAsync").native


def test_requests_are_rounded_as_the_settings_say():
    four = read_settings("roundup_power2_divisions:4")
    assert [four.rounded(size) for size in (1, 512, 1200, 2048, 2049, 5 * MIB, 5 * MIB + 1)] == [
        *(512, 512, 1536, 2048, 2560, 5 * MIB, 6 * MIB),
    ]
    mixed = read_settings("roundup_power2_divisions:[2:1,>:2]")
    assert [mixed.rounded(size) for size in (3 * MIB + 1, 5 * MIB)] == [3 * MIB + 512, 6 * MIB]


def test_what_segments_hold_is_where_it_starts():
    present = Segment(1 << 30, ((8 * MIB, False), (12 * MIB, True)))
    assert told("a10", segments=[present]) == (18, 20)
    assert told("a11.5", segments=[present]) == (20, 20)
    assert told("a13", segments=[present]) == (22, 34)
    grown = Segment(1 << 30, ((8 * MIB, False), (12 * MIB, True)), expandable=True)
    assert told("a30", EXPANDABLE, segments=[grown]) == (38, 40)


small = st.integers(1, 2 * MIB)
large = st.integers(MIB, 60 * MIB)
requests = st.lists(st.tuples(small | large, st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=40)
settings_of_users = st.builds(
    AllocatorSettings,
    most_split=st.sampled_from([None, 20 * MIB, 32 * MIB]),
    slack=st.sampled_from([20 * MIB, 30 * MIB]),
    divisions=st.sampled_from([(0,) * 16, (4,) * 16, (1, 1, 8) + (2,) * 13]),
    expandable=st.booleans(),
)


@settings(max_examples=150)
@given(requests, settings_of_users, st.none() | st.integers(40 * MIB, 200 * MIB))
def test_agrees_with_a_second_model(stream, configured, limit):
    """Request by request: the bytes of each block, all that is allocated, all that is reserved."""
    fast, slow = CachingAllocator((), configured, limit=limit), NaiveAllocator(configured, limit)
    blocks = {}
    for owner, (size, drops, which) in enumerate(stream, 1):
        try:
            blocks[owner] = fast.allocate(size)
        except NoRoomError:
            assert not slow.allocate(owner, size)
        else:
            assert slow.allocate(owner, size)
            assert blocks[owner].size == slow.held(owner)
        for _ in range(min(drops, len(blocks))):
            gone = list(blocks)[which % len(blocks)]
            fast.release(blocks.pop(gone))
            slow.release(gone)
        assert (fast.allocated, fast.reserved) == (slow.allocated, slow.reserved)
    assert all(block.address % UNIT == 0 for block in blocks.values())
