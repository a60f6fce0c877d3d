"""The table of models: made of rows, one of which is made here."""

import pytest
import torch
from torch import nn

import models
import models_in_pieces
import models_table


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x):
        y = self.layers(x)
        if (y > 0).all():
            return y.sum()
        return y.square().sum()


def named(row, **more):
    return {"library": "timm", "version": "1.0", "model": "small", **row, **more}


def test_a_row_of_a_model_that_trains_and_of_one_that_is_refused():
    x = torch.randn(3, 4)
    trains = models.row(lambda: (nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), {"input": x[:1]}))
    refused = models.row(lambda: (Small(), {"x": x}))
    assert trains["captured"]
    assert trains["bitwise"]
    assert trains["predicted"] == trains["measured"] <= trains["uncapped"]
    assert not refused["captured"]
    lines = models_table.table([named(trains), named(refused, model="asking")], "timm").splitlines()
    assert lines[0] == "With timm 1.0:"
    assert lines[4].startswith("| small | yes | yes | yes |")
    assert lines[5] == "| asking | no: a branch on what it computes | | | |"
    assert "| timm | 2 | 1 (50%) | 1 | 1 |" in models_table.summary([named(trains), named(refused)])


def test_what_is_not_as_foretold_shows():
    row = {"captured": True, "bitwise": False, "cap_changed_nothing": True, "seconds": 1.0}
    line = models_table.table([named(row, predicted=100, measured=110)], "timm").splitlines()[-1]
    assert line == "| small | yes | to rounding, by the capture | +10.0% | 1.0 |"
    line = models_table.table(
        [named(row | {"cap_changed_nothing": False}, predicted=100, measured=100)], "timm"
    ).splitlines()[-1]
    assert line == "| small | yes | NO | yes | 1.0 |"


def test_of_a_model_in_pieces_the_table_says_what_is_outside():
    row = {"model": "small", "pieces": 3, "between": 10, "uncapped": 100, "predicted": 90, "measured": 90}
    row |= {"cap_changed_nothing": True, "outside": ["modeling_small.py:12", "inspect.py:241"]}
    line = models_table.in_pieces([row]).splitlines()[-1]
    outside = "`modeling_small.py:12`, matching of boxes, by SciPy"
    assert line == f"| small | 3 | {outside} | 10.0% of the uncapped peak | yes | yes |"


@pytest.mark.slow
def test_a_row_of_a_model_in_pieces():
    x = torch.randn(3, 4)
    made = models_in_pieces.row(lambda: (Small(), {"x": x}))
    assert made["pieces"] == 2
    assert made["outside"][0].startswith("test_models")
    assert made["cap_changed_nothing"]
    assert made["predicted"] == made["measured"]
