"""Branches of rehearsed code on fake tensors, answered by the real batch."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from lowtide.capture.conditions import OtherData
from lowtide.sharded.rehearsed_branches import RehearsedBranches
from lowtide.torch_state.dispatch_modes import in_place_of_operators


def rehearsed(code, batch):
    """What code returns that runs on a fake tensor in the place of a batch, and what that holds for."""
    branches = RehearsedBranches()

    def call(operator, args, kwargs):
        said = branches.answer(operator, args)
        if said is not None:
            return said
        result = operator(*args, **kwargs)
        branches.note(operator, args, kwargs, result)
        return result

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(batch)
        branches.give(fake, batch)
        with in_place_of_operators(call):
            found = code(fake)
    return found, branches.conditions()


def ways(words):
    first = bool((words > 3).all())
    return first, first or bool((torch.arange(4) == words.cumsum(-1)[0]).any())


def test_the_batch_answers_and_others_are_asked_the_same():
    found, conditions = rehearsed(ways, torch.tensor([[5, 1, 1, 1]]))
    assert found == (False, False)
    conditions.must_hold([torch.tensor([[6, 2, 0, 0]])])
    with pytest.raises(OtherData) as other:
        conditions.must_hold([torch.tensor([[4, 5, 6, 7]])])
    assert other.value.answers == (True,)  # what comes after it is of a road that is not taken


def test_what_is_made_of_nothing_is_no_condition():
    assert rehearsed(lambda words: bool(torch.arange(3).any()), torch.ones(1)) == (True, None)


def written_to(words):
    flags = words > 0
    part = flags[:, 1:]
    flags.zero_()
    return bool(part.all())


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(written_to, id="written to"),
        pytest.param(lambda words: bool((words / 2).sum() > 1), id="floating point"),
        pytest.param(lambda words: bool((torch.randint(9, (3,)) > 4).all()), id="random"),
        pytest.param(lambda words: words.sum().item(), id="a number"),
    ],
)
def test_what_is_not_known_is_not_answered(code):
    with pytest.raises(DataDependentOutputException):
        rehearsed(code, torch.tensor([[5, 1, 1, 1]]))
