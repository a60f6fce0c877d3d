"""The public names with what they need, torch among it: `lowtide` loads them at the first use of one."""

from . import solve
from .api import cap, plan, plan_of, uncap
from .batch import LargestBatch, largest_batch
from .checkpoint_chain import CheckpointedChain, checkpoint_chain
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
from .frontier import Frontier, frontier
from .graph import Graph, Op, Value
from .measure import Measurement, measure
from .plan import Plan
from .schedule import Drop, Run, Schedule
from .sequences import Recurrent, ScanPlan, scan, scan_plan, while_scan
from .simulate import Timeline, simulate
from .sketching import Noise, noise, sketch, unsketch
from .verify import Verification, verify
from .watch import Watched, watch

__all__ = [
    "BudgetError",
    "BudgetTooSmall",
    "CaptureError",
    "CheckpointedChain",
    "Drop",
    "FormatError",
    "Frontier",
    "Graph",
    "GraphBreak",
    "LargestBatch",
    "LowtideError",
    "Measurement",
    "Noise",
    "NothingToTrain",
    "Op",
    "Plan",
    "PlanMismatch",
    "Recurrent",
    "Run",
    "ScanPlan",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "UnsupportedBackward",
    "Value",
    "Verification",
    "Watched",
    "cap",
    "checkpoint_chain",
    "frontier",
    "largest_batch",
    "measure",
    "noise",
    "plan",
    "plan_of",
    "scan",
    "scan_plan",
    "simulate",
    "sketch",
    "solve",
    "uncap",
    "unsketch",
    "verify",
    "watch",
    "while_scan",
]
