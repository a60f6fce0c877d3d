from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

from lowtide import errors
from lowtide.errors import BudgetTooSmall, LowtideError, ScheduleError

CLASSES = [
    found for _, found in inspect.getmembers(errors, inspect.isclass) if found.__module__ == errors.__name__
]
PARENTS = {
    "BudgetError": "LowtideError",
    "BudgetTooSmall": "BudgetError",
    "CaptureError": "LowtideError",
    "GraphBreak": "CaptureError",
    "NothingToTrain": "CaptureError",
    "ScheduleError": "LowtideError",
    "FormatError": "LowtideError",
    "PlanMismatch": "LowtideError",
    "OutOfTime": "LowtideError",
    "RanksDiffer": "LowtideError",
    "UnsupportedBackward": "LowtideError",
}


def too_small() -> BudgetTooSmall:
    return BudgetTooSmall("budget 6 B is too small", budget=6, smallest=7, parts={"parameters": 2})


def test_every_error_has_one_root() -> None:
    assert all(issubclass(found, LowtideError) for found in CLASSES)
    assert {
        found.__name__: found.__bases__[0].__name__ for found in CLASSES if found is not LowtideError
    } == PARENTS


def test_what_the_user_wrote_wrong_is_a_value_error_too() -> None:
    assert {found.__name__ for found in CLASSES if issubclass(found, ValueError)} == {
        "BudgetError",
        "BudgetTooSmall",
        "FormatError",
    }


def test_the_drawn_tree_names_every_error() -> None:
    drawn = re.findall(r"^    [│├└─ ]*([A-Z]\w+)", errors.__doc__ or "", flags=re.MULTILINE)
    assert sorted(drawn) == sorted(found.__name__ for found in CLASSES)


@pytest.mark.parametrize("again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_budget_too_small_survives_pickling(again: object) -> None:
    error = again(too_small())  # type: ignore[operator]
    assert type(error) is BudgetTooSmall
    assert str(error) == "budget 6 B is too small"
    assert (error.budget, error.smallest, error.parts) == (6, 7, {"parameters": 2})


def test_budget_too_small_keeps_its_own_parts() -> None:
    parts = {"parameters": 2}
    error = BudgetTooSmall("too small", budget=1, smallest=2, parts=parts)
    parts.clear()
    assert error.parts == {"parameters": 2}
    assert BudgetTooSmall("too small", budget=1, smallest=2).parts == {}


def test_schedule_error_names_its_step() -> None:
    error = ScheduleError("step 3: no", step=3)
    assert error.step == 3
    assert ScheduleError("no").step is None
    assert str(pickle.loads(pickle.dumps(error))) == "step 3: no"
    assert pickle.loads(pickle.dumps(error)).step == 3
