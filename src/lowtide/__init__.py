"""Lowtide: any PyTorch training step under a byte cap, with the same gradients bit for bit.

import lowtide
lowtide.cap(model, "8GiB")
loss = model(x, y); loss.backward()

The first use of a public name loads them all. Until then `import lowtide` is cheap: the command line answers
what needs no torch without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import integrations as integrations
    from .public import *

__version__ = "0.1.0"

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
    "OutOfTime",
    "Plan",
    "PlanMismatch",
    "RanksDiffer",
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


def __getattr__(name: str) -> Any:
    if name == "integrations":
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import public

    globals().update({each: getattr(public, each) for each in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
