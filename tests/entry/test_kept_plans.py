"""How many plans are kept, that the memory of one that goes is given back, and that shapes in turn stay."""

import gc
import weakref

import pytest
import torch

import lowtide
from lowtide.entry.kept_plans import KeptPlans
from small_models import WithLoss, clear, mlp


def turns(most, keys):
    """What was made while some shapes came one after the other, what is kept then, and what was said."""
    said, made = [], []
    plans = KeptPlans(most, lambda line: said.append(line) if line not in said else None)
    for key in keys:
        if key not in plans:
            plans.make_room(key)
            plans[key] = key
            made.append(key)
        assert plans.use(key) == key
    return made, list(plans), said


def test_the_one_that_was_not_used_for_longest_goes():
    made, kept, said = turns(2, "abac")
    assert (made, kept) == (list("abc"), list("ac"))
    (line,) = said
    assert "more than 2 shapes were seen" in line


@pytest.mark.parametrize(("most", "shapes"), [(1, "ab"), (2, "abc"), (3, "abcdefg")])
def test_shapes_that_come_in_turn_are_made_twice_at_most(most, shapes):
    made, kept, said = turns(most, shapes * 5)
    assert set(kept) == set(shapes)
    assert max(map(made.count, shapes)) == 2
    assert len(said) == 2
    assert f"max_plans={most}" in said[1]


@pytest.mark.slow
def test_what_goes_is_given_back_and_a_cycle_of_shapes_is_planned_twice_at_most(caplog_lowtide):
    model = lowtide.cap(WithLoss(mlp()), "80%", max_plans=2, prices="roofline")
    capped = model._compiled_call_impl
    seen = {}
    for batch in (128, 160, 192):
        model(torch.randn(batch, 32)).backward()
        clear(model)
        entry = next(reversed(capped.entries.values()))
        (part,) = entry.parts
        seen[batch] = [weakref.ref(each) for each in (entry, part, part.plan, part.runner.run, entry.call)]
    del entry, part
    gc.collect()
    assert [ref() for ref in seen[128]] == [None] * 5
    assert None not in [ref() for batch in (160, 192) for ref in seen[batch]]
    planned = sum("planned: peak" in line for line in caplog_lowtide)
    assert planned == 3
    for _ in range(3):
        for batch in (128, 160, 192):
            model(torch.randn(batch, 32)).backward()
            clear(model)
    assert len(capped.entries) == 3
    assert sum("planned: peak" in line for line in caplog_lowtide) == planned + 1
    assert sum("shapes were seen" in line for line in caplog_lowtide) == 1
    assert sum("come back whose plans were let go" in line for line in caplog_lowtide) == 1
