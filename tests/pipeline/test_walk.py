"""The way down: each room is entered once, in the order of the picture."""

import lowtide
from walk import capped_step, walk_of


def test_each_room_is_entered_once_on_the_way_down():
    lowtide.cap  # noqa: B018  # imports are no part of the walk
    walk = walk_of(capped_step("eager"))
    rooms = walk.way_down()
    assert rooms == ["sketching", "capture", "prices", "devices", "ranks", "planner", "lowering", "run"]
