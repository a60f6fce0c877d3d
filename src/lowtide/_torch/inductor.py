"""What Inductor generates, and when it makes a buffer of a value."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..process_wide import attributes
from .names import private


def generated_code(look: Callable[[str], None]) -> AbstractContextManager[None]:
    """Show the text of each graph that Inductor compiles, or has in its cache, before its kernels are loaded.

    By `GraphLowering.save_output_code`, seen in 2.11-2.13.
    """
    lowering = private("GraphLowering")
    before = lowering.save_output_code

    def save(text: str) -> None:
        if before is not None:
            before(text)
        look(text)

    return attributes(lowering, save_output_code=staticmethod(save))


def realized_where_asked() -> AbstractContextManager[None]:
    """Let Inductor realize no value on the CPU just because two nodes read it: the plan says which.

    It does so with exponentials, and with what is made of more than four values. A GPU's kernel keeps such a
    value to itself; the loops of the CPU's often differ in order, and then it is a buffer as large as
    an activation (`StorageBox.should_realize_on_reuse`, seen in 2.11-2.13).
    """
    box = private("StorageBox")
    before = box.should_realize_on_reuse

    def should_realize(value: Any, *args: Any, **facts: Any) -> bool:
        device = value.get_device()
        on_cpu = device is not None and device.type == "cpu"
        return not on_cpu and bool(before(value, *args, **facts))

    return attributes(box, should_realize_on_reuse=should_realize)


def generated_modules() -> list[Any]:
    """The code that Inductor generated and loaded so far (`PyCodeCache.modules`, seen in 2.11-2.13).

    That list is emptied with the caches; the modules keep their place among Python's own.
    """
    cache = sys.modules.get("torch._inductor.codecache")
    listed = [] if cache is None else cache.PyCodeCache.modules
    home = "torch._inductor.runtime.compile_tasks."
    return [*listed, *(module for name, module in list(sys.modules.items()) if name.startswith(home))]


def scheduler_pass() -> Any:
    """The class of passes over Inductor's nodes: new in 2.12, plain callables before."""
    module = importlib.import_module("torch._inductor.custom_graph_pass")
    return getattr(module, "CustomSchedulerPass", object)
