"""Lowtide: any PyTorch training step under a byte cap, with the same gradients bit for bit.

import lowtide
lowtide.cap(model, "8GiB")
loss = model(x, y); loss.backward()

The first use of a public name loads them all. Until then `import lowtide` is cheap: the command line answers
what needs no torch without it.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


class _Unloaded(ModuleType):
    """The package before its public names are there.

    An import of the module `lowtide.plan` alone must not leave it where the function `lowtide.plan` belongs.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import public

    sys.modules[__name__].__class__ = ModuleType
    globals().update({each: getattr(public, each) for each in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Unloaded
