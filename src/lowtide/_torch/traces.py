"""What is read from a trace of torch.compile's front end, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import torch

from .names import private

F = TypeVar("F", bound=Callable[..., Any])


def outside_dynamo(function: F, reason: str | None = None) -> F:
    """A function at which torch.compile breaks its graph, instead of compiling what it does.

    The reason is what torch says where it may not break (`_torchdynamo_disable_msg`, seen in 2.11-2.13).
    """
    outside = private("disable_dynamo")(function)
    if reason is not None:
        outside._torchdynamo_disable, outside._torchdynamo_disable_msg = True, reason
    return outside  # type: ignore[no-any-return]


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch.compile calls and does not look into; cheaper to make than `outside_dynamo`."""
    return partial(_call_untraced(), function)


@cache
def _call_untraced() -> Callable[..., Any]:
    def call(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    return outside_dynamo(call)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def present_trace() -> int | None:
    """A number for the trace of torch.compile that is being made, None outside of one.

    None as well inside of a part that is traced by itself, as a checkpointed one is: what is traced there
    must not be remembered outside (`current_tracer.parent` seen in 2.11-2.13).
    """
    if private("TracingContext").try_get() is None:
        return None
    tracer = private("Tracer").current_tx().output.current_tracer
    return None if tracer.parent is not None else id(tracer)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def writes_traced() -> int:
    """How often tensors were written to in place in the present trace (`example_value` seen in 2.11-2.13)."""
    nodes = private("Tracer").current_tx().output.current_tracer.graph.nodes
    values = [node.meta.get("example_value") for node in nodes]
    return sum(value._version for value in values if isinstance(value, torch.Tensor))


def traced_input(node: Any) -> Any:
    """What a placeholder of a trace stands for in the call that is traced (`grapharg`, seen in 2.11-2.13)."""
    argument = node.meta.get("grapharg")
    return None if argument is None else argument.example


def traced_value(node: Any) -> Any:
    """The fake value of a node of a trace (`example_value`, seen in 2.11-2.13)."""
    return node.meta.get("example_value")


def met_in_capture(error: Exception) -> bool:
    """Whether torch.compile met an error while it captured, not while the step ran.

    It marks those, of whatever class (`innermost_user_frame_summary`, seen in 2.11-2.13).
    """
    return hasattr(error, "innermost_user_frame_summary")
