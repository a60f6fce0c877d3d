"""A say in what torch.compile's front end does: at branches that it cannot decide, before it tries a call.

Its tracers have a table of instructions, and it tries calls with one function; both are replaced, by
functions that ask the present thread's first.
"""

from __future__ import annotations

import dis
import functools
import importlib
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..process_wide import Change, here
from .gradients_inside import let_leaves_be_inside, let_no_backward_be_inside
from .names import private
from .sizes import askers_noted
from .whole_operators import let_operators_be_whole

Answer = Callable[[str, Any], bool | None]
"""Which way a branch goes, of the module whose code branches and the node of the tensor; None: unknown."""

Look = Callable[[Any], None]
"""What sees, and may change, each call of a trace before it is tried on fake tensors."""


class _Looks(threading.local):
    """What this thread has to say to torch's front end while that captures for it."""

    answer: Answer | None = None
    present: Look | None = None


_looks = _Looks()


def _captures() -> bool:
    """Whether this thread captures a step whose branches are answered."""
    return _looks.answer is not None


class branches_answered(Change):  # noqa: N801  # reads as a verb where it is used
    """Let a function say which way a branch on a tensor goes where torch.compile, which cannot look, stops.

    The front end has a function for each of Python's instructions (`dispatch_table`, seen in 2.11-2.13).
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer

    def make(self) -> None:
        """Put other tables in the place of the front end's; a class may have that of the one above it."""
        _let_answer()
        let_leaves_be_inside(_captures)
        let_no_backward_be_inside(_captures)
        let_operators_be_whole(_captures)
        self.undone_by(functools.partial(setattr, _looks, "answer", _looks.answer))
        _looks.answer = self.answer
        for tracer, table in _tables(self.answer):
            self.undone_by(functools.partial(setattr, tracer, "dispatch_table", tracer.dispatch_table))
            tracer.dispatch_table = table


@functools.cache
def _let_answer() -> None:
    """Ask the present thread's function, if it has one, where a flag is brought to Python.

    All of `bool(x)`, `int(x)` and `x.item()` come to `TensorVariable.method_item` (seen in 2.13). Numbers
    other than flags stay symbols: each of their values would be another step.
    """
    traced = private("TracedTensor")
    item = traced.method_item

    def method_item(self: Any, tracer: Any, *args: Any, **kwargs: Any) -> Any:
        answer = _looks.answer
        if answer is not None and self.dtype == torch.bool and tracer.output.current_tracer.parent is None:
            said = answer(str(tracer.f_globals.get("__name__")), self.as_proxy().node)
            if said is not None:
                return private("TracedConstant").create(said)
        return item(self, tracer, *args, **kwargs)

    traced.method_item = method_item


def calls_looked_at(look: Look) -> AbstractContextManager[Any]:
    """Let a function see each call that this thread traces with torch.compile's front end."""
    _let_look()
    return here(_looks, present=look)


@functools.cache
def _let_look() -> None:
    """Ask the present thread's function, if it has one, where the front end tries a call.

    Once and for good, so that threads do not undo each other's (`get_fake_value`, seen in 2.13).
    """
    builder = importlib.import_module("torch._dynamo.variables.builder")
    tried = builder.get_fake_value

    def try_call(node: Any, tracer: Any, *args: Any, **kwargs: Any) -> Any:
        look = _looks.present
        whole = tracer.output.current_tracer.parent is None  # not a part that is traced by itself
        if look is not None and whole and node.op in ("call_function", "call_method"):
            look(node)
        with askers_noted(node, tracer):
            return tried(node, tracer, *args, **kwargs)

    builder.get_fake_value = try_call  # type: ignore[attr-defined]


@functools.cache
def _tables(answer: Answer) -> list[tuple[Any, list[Any]]]:
    """For each class of tracers the functions of its instructions, with branches that ask first."""
    found, tracers = [], [private("AnyTracer")]
    for tracer in tracers:
        tracers += tracer.__subclasses__()
        table = list(tracer.dispatch_table)
        for name, code in dis.opmap.items():
            if re.fullmatch(r"(POP_)?JUMP(_FORWARD|_BACKWARD)?_IF_(TRUE|FALSE)(_OR_POP)?", name):
                table[code] = _asking(table[code], name, answer)
        table[dis.opmap["STORE_ATTR"]] = _leaving_leaves(table[dis.opmap["STORE_ATTR"]])
        table[dis.opmap["UNARY_NOT"]] = _denying(table[dis.opmap["UNARY_NOT"]], answer)
        found.append((tracer, table))
    return found


def _leaving_leaves(store: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """The instruction that sets an attribute; `requires_grad = True` of what the step makes is left out.

    Models set it for checkpointing, so that a segment has an input with a gradient. Nobody outside gets hold
    of that gradient, and all others are what they are without it.
    """

    def handle(tracer: Any, instruction: Any) -> None:
        value, owner = tracer.stack[-2:]
        made = isinstance(owner, private("TracedTensor")) and owner.as_proxy().node.op != "placeholder"
        if instruction.argval != "requires_grad" or not made or not _is_true(value):
            store(tracer, instruction)
        else:
            tracer.popn(2)

    return handle


def _is_true(value: Any) -> bool:
    return isinstance(value, private("TracedConstant")) and value.as_python_constant() is True


def _denying(deny: Callable[[Any, Any], None], answer: Answer) -> Callable[[Any, Any], None]:
    """The instruction of `not`, with an answer in the place of a tensor."""

    def handle(tracer: Any, instruction: Any) -> None:
        node = _branched_on(tracer)
        said = None if node is None else answer(str(tracer.f_globals.get("__name__")), node)
        if said is None:
            deny(tracer, instruction)
        else:
            tracer.pop()
            tracer.push(private("TracedConstant").create(not said))

    return handle


def _asking(jump: Callable[[Any, Any], None], name: str, answer: Answer) -> Callable[[Any, Any], None]:
    """The instruction of a jump, with an answer in the place of a tensor that it depends on."""

    def handle(tracer: Any, instruction: Any) -> None:
        node = _branched_on(tracer)
        said = None if node is None else answer(str(tracer.f_globals.get("__name__")), node)
        if said is None:
            jump(tracer, instruction)
        elif not name.endswith("_OR_POP"):
            tracer.pop()
            tracer.push(private("TracedConstant").create(said))
            jump(tracer, instruction)
        elif said is ("_TRUE_" in name):  # of `a or b` and `a and b` the tensor itself is what comes out
            tracer.jump(instruction)
        else:
            tracer.pop()

    return handle


def _branched_on(tracer: Any) -> Any:
    """The node of the tensor that the next jump, or `not`, depends on; None for what is none."""
    value = tracer.stack[-1]
    if isinstance(value, private("NotYetTraced")):
        tensor = value.is_realized() or isinstance(value.peek_value(), torch.Tensor)
        value = value.realize() if tensor else value
    if not isinstance(value, private("TracedTensor")) or tracer.output.current_tracer.parent is not None:
        return None
    return value.as_proxy().node
