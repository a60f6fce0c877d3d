"""The clock of the set-up's stages, and its lines."""

import setup_times


def test_a_stage_inside_of_another_is_booked_alone():
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    clock = setup_times.Clock(lambda: next(now))
    with clock.stage("aot"), clock.stage("search"):
        pass
    assert clock.seconds["dynamo"] == 1.0
    assert clock.seconds["aot"] == 2.0 + 4.0
    assert clock.seconds["search"] == 3.0


def test_a_function_is_timed_and_gives_what_it_gave():
    now = iter([0.0, 1.0, 3.0])
    watch = setup_times.Watch(lambda: next(now))
    assert watch.around(lambda x, y=0: x + y, "prices")(1, y=2) == 3
    assert watch.clock.seconds["prices"] == 2.0


def test_a_line_has_every_stage():
    stages = dict.fromkeys((*setup_times.STAGES, "total"), 1.0)
    row = {"model": "vit", "ops": 498, "process": 1, "cap": 1, "stages": stages, "eager": 0.04}
    assert all(name in setup_times.line(row) for name in stages)
