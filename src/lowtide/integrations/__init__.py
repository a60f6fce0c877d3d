"""Lowtide inside training tools: one callback each.

In: a budget, and the tool's own trainer.
Out: its training steps capped, its log and folder told.
Imports: console/, entry/, measuring/, pipeline/, plans/, report/.

A tool is imported with its callback, at the first use of `lowtide.integrations.transformers`, say.
"""

from importlib import import_module
from types import ModuleType

_TOOLS = ("lightning", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name not in _TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
