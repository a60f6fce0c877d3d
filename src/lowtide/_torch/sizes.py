"""Sizes that are symbols: where they stand in a capture, which numbers they are, which tensors have them."""

from __future__ import annotations

import functools
import importlib
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import torch

from ..process_wide import Change
from .names import private

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""What stands for a number of which only an expression of the sizes is known."""


def expression(number: Any) -> Any:
    """The expression of the sizes that a symbolic number is (`node.expr`, seen in 2.11-2.13)."""
    return number.node.expr


def hint(number: Any) -> Any:
    """What a symbolic number is in the call that is traced, None where that is not known.

    By `node.hint`, seen in 2.11-2.13.
    """
    return number.node.hint


def with_numbers(number: Any, known: dict[Any, int]) -> Any:
    """A symbolic number where numbers stand for its symbols; None where one of them is not known."""
    sympy = importlib.import_module("sympy")  # torch has it loaded where there are symbols
    found = expression(number).xreplace({symbol: sympy.Integer(value) for symbol, value in known.items()})
    if found.free_symbols:
        return None
    kinds = ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool))
    return next(kind(found) for symbolic, kind in kinds if isinstance(number, symbolic))


_askers: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
"""Of the traces under way: the calls that made a trace take something for granted, by the guard's place."""


@contextmanager
def askers_noted(node: Any, tracer: Any) -> Iterator[None]:
    """Note for which guards a call that the front end tries has asked (`shape_env.guards`, in 2.11-2.13)."""
    environment = tracer.output.shape_env
    before = len(environment.guards)
    try:
        yield
    finally:
        for place in range(before, len(environment.guards)):
            _askers.setdefault(environment, {})[place] = called(node)


def called(node: Any) -> str:
    """The function or method that a node of a graph calls."""
    return str(getattr(node.target, "__name__", node.target))


def specialised_at() -> str:
    """Which call made a number of a size in the present trace, and on which line.

    By `ShapeEnv.guards`, each with a line of the user's code and one of torch's (seen in 2.11-2.13).
    """
    environment = private("TracingContext").get().fake_mode.shape_env
    equal = [(place, guard) for place, guard in enumerate(environment.guards) if guard.expr.is_Equality]
    if not equal:
        return "torch takes its sizes for numbers"
    # A bare symbol that is a number, before what says that a size is even, say.
    place, guard = min(equal, key=lambda found: not any(side.is_Symbol for side in found[1].expr.args))
    asker = _askers.get(environment, {}).get(place)
    taken = f"{asker} takes a size for a number" if asker else "a size is taken for a number"
    return f"{taken} at {_line(str(guard.sloc))}"


def _line(told: str) -> str:
    """A line of code as file:line and its text, from torch's way of putting it."""
    found = re.match(r"(.*?)\s+# (\S+):(\d+) in ", told)
    return f"{PurePath(found[2]).name}:{found[3]}: {found[1]}" if found else told


_SIZE_MARKS = (
    *(f"_dynamo_{kind}_indices" for kind in ("dynamic", "weak_dynamic", "unbacked")),
    "_has_dynamo_dim_marking",
)
"""Where `mark_dynamic`, `maybe_mark_dynamic` and `mark_unbacked` leave what they are told, on the tensor."""


def marked_sizes(tensor: Any) -> set[int]:
    """The dimensions of a tensor that are marked as changing (names seen in 2.11-2.13)."""
    return {dimension for name in _SIZE_MARKS[:-1] for dimension in vars(tensor).get(name, ())}


def has_marks(tensor: Any) -> bool:
    """Whether a tensor has marks of some kind, which the front end looks at before each call."""
    return any(name in vars(tensor) for name in _SIZE_MARKS)


class sizes_marked(Change):  # noqa: N801  # reads as a phrase where it is used
    """Let some dimensions of tensors be symbols where they are captured, and all others numbers.

    The marks of others go meanwhile: at each call the front end holds the marks that it finds against those
    that it captured with, and would capture anew.
    """

    def __init__(self, marks: list[tuple[torch.Tensor, set[int]]]) -> None:
        super().__init__()
        self.marks = marks

    def make(self) -> None:
        """Put these marks in the place of those that are there."""
        for tensor, dimensions in self.marks:
            held = vars(tensor)
            before = {name: held[name] for name in _SIZE_MARKS if name in held}
            self.undone_by(functools.partial(_put_marks, held, before))
            _put_marks(held, {_SIZE_MARKS[1]: dimensions} if dimensions else {})


def _put_marks(held: dict[str, Any], marks: dict[str, Any]) -> None:
    for name in _SIZE_MARKS:
        held.pop(name, None)
    held.update(marks)
