"""The text that Inductor would generate for a graph, without its kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..process_wide import attributes
from .names import private

Strides = list[tuple[int, ...] | None]


class DraftedError(Exception):
    """Ends a compilation when its draft is there."""


def drafted(look: Callable[[str, Strides], None]) -> AbstractContextManager[None]:
    """Show the text of each graph that Inductor would have to compile, and end its compilation there.

    The draft's loops are empty; what allocates and frees buffers is what the whole text has. Made of lowering
    and scheduling, which are a fifth of the way to a text on the CPU; a graph from the cache is not drafted
    (`GraphLowering.codegen`, `SchedulerNode.codegen`, seen in 2.11-2.13). `look` is given the strides of what
    the graph returns, too.
    """
    lowering, node = private("GraphLowering"), private("SchedulerNode")
    codegen, kernels = lowering.codegen, private("AsyncCompile")

    def draft(graph: Any) -> Any:
        settings = {"cpp.simdlen": 1}  # loops over vectors are second ones for the same buffers
        no_workers = attributes(kernels, use_process_pool=staticmethod(lambda: False))
        with private("inductor_config").patch(settings), attributes(node, codegen=_declare), no_workers:
            text, *_ = codegen(graph)
        look(text.value, [_strides(item) for item in graph.graph_outputs])
        raise DraftedError

    return attributes(lowering, codegen=draft)


def _strides(item: Any) -> tuple[int, ...] | None:
    return tuple(int(step) for step in item.get_layout().stride) if item.has_tensor_output() else None


def _declare(node: Any, index_vars: Any) -> None:
    """Tell a kernel what a node reads and writes, as the code of its loop would."""
    kernel, graph = private("inductor_now").kernel, private("inductor_now").graph
    stored = kernel.cse.store_cache
    for dep in node.read_writes.reads:
        if dep.name in kernel.cse.invalidated_stores:
            kernel.must_keep_buffers.add(dep.name)
        if dep.name not in stored:
            kernel.args.input(dep.name)
    for dep in node.read_writes.writes:
        kernel.store_buffer_names.add(dep.name)
        if getattr(dep, "mode", None) != "atomic_add":
            stored[dep.name] = dep.name
        if dep.name not in graph.removed_buffers:
            kernel.args.output(dep.name)


def report_strides(strides: Strides) -> None:
    """Tell AOTAutograd the strides of what a forward returns, as its compilation would."""
    context = private("TracingContext").try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides.extend(strides)
