"""Lowtide: any PyTorch training step under a byte cap, with the same gradients bit for bit.

import lowtide
lowtide.cap(model, "8GiB")
loss = model(x, y); loss.backward()
"""

from .api import cap, plan, plan_of, uncap
from .errors import (
    BudgetError,
    BudgetTooSmall,
    CaptureError,
    FormatError,
    GraphBreak,
    LowtideError,
    NothingToTrain,
    PlanMismatch,
    ScheduleError,
    UnsupportedBackward,
)
from .graph import Graph, Op, Value
from .measure import Measurement, measure
from .plan import Plan
from .schedule import Drop, Run, Schedule
from .simulate import Timeline, simulate
from .verify import Verification, verify

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "BudgetTooSmall",
    "CaptureError",
    "Drop",
    "FormatError",
    "Graph",
    "GraphBreak",
    "LowtideError",
    "Measurement",
    "NothingToTrain",
    "Op",
    "Plan",
    "PlanMismatch",
    "Run",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "UnsupportedBackward",
    "Value",
    "Verification",
    "cap",
    "measure",
    "plan",
    "plan_of",
    "simulate",
    "uncap",
    "verify",
]
