"""Lowtide inside training tools: one callback each.

In: a trainer of another library, and a budget.
Out: its training step under a cap.
Imports: console/, entry/, measuring/, pipeline/, plans/, report/.

A tool is imported with its callback, at the first use of `lowtide.integrations.lightning`.
"""

import importlib
from typing import Any

_TOOLS = ("lightning",)


def __getattr__(name: str) -> Any:
    if name not in _TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
