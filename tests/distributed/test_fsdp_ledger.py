"""What FSDP holds, event by event, on groups of round sizes."""

from lowtide.sharded.fsdp_ledger import Group, Ledger

SIZES = {"whole": 100, "gather": 100, "gradients": 100, "scatter": 100, "kept": 50, "summed": 100}


def run(groups, **options):
    """One step over all groups, the last of which is the root: the most that was noted, and the ledger."""
    noted = []
    ledger = Ledger(groups, noted.append, **options)
    root = len(groups) - 1
    ledger.enter_forward(root)
    for index in range(root):
        ledger.enter_forward(index)
        ledger.exit_forward(index)
    ledger.exit_forward(root)
    after_forward = ledger.now
    ledger.enter_backward(root)
    for index in reversed(range(root)):
        ledger.enter_backward(index)
        ledger.exit_backward(index)
    ledger.exit_backward(root, gradients=0)
    return max(noted), after_forward, ledger


def groups(units, **facts):
    root = Group("root", frees=False, whole=10, gather=10, scatter=10, kept=5)
    return [*(Group(f"unit {n}", **{**SIZES, **facts}) for n in range(units)), root]


def test_freed_parameters_are_gone_after_the_forward():
    _, after, _ = run(groups(3))
    assert after == 10


def test_parameters_that_stay_are_there_after_the_forward():
    _, after, _ = run(groups(3, frees=False))
    assert after == 310


def test_two_buffers_meet_in_the_forward():
    noted = []
    ledger = Ledger(groups(2), noted.append)
    for index in (2, 0):
        ledger.enter_forward(index)
    ledger.exit_forward(0)
    noted.clear()
    ledger.enter_forward(1)
    # The buffer of the first stays until the second is gathered; then there are the second's two.
    assert max(noted) == 10 + 100 + 100


def test_the_group_before_is_gathered_ahead_of_its_backward():
    ledger = Ledger(groups(2), lambda _: None)
    for index in (2, 0, 1):
        ledger.enter_forward(index)
        if index != 2:
            ledger.exit_forward(index)
    ledger.exit_forward(2)
    ledger.enter_backward(2)
    assert ledger.buffers == 100
    ledger.enter_backward(1)
    assert ledger.unsharded == 110
    assert ledger.buffers == 100


def test_gradients_of_this_rank_are_left():
    *_, ledger = run(groups(3))
    assert ledger.gradients == 3 * 50 + 5


def test_gradients_that_are_there_are_added_to():
    *_, ledger = run([*groups(3, has_gradients=True)[:-1], Group("root", kept=5, has_gradients=True)])
    assert ledger.gradients == 0


def test_whole_gradients_stay_while_they_are_not_synchronised():
    *_, ledger = run(groups(3, reduces=False))
    assert ledger.gradients == 3 * 100 + 5


def test_a_cast_and_scratch_count_where_they_are():
    plain, *_ = run(groups(1))
    cast, *_ = run(groups(1, scratch=1000))
    assert cast - plain >= 1000 - 100
