"""A schedule: the steps of the forward and of the backward. The only thing a solver returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import FormatError
from ..files.plain_text import plain
from . import json_format

__all__ = ["Drop", "Run", "Schedule", "Step"]

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Run:
    """Run an op, for the first time or to recompute what it writes.

    >>> import lowtide
    >>> lowtide.Run("mm_3")
    Run(op='mm_3')
    """

    op: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Free a value.

    >>> import lowtide
    >>> lowtide.Drop("y")
    Drop(value='y')
    """

    value: str


Step: TypeAlias = Run | Drop


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the forward does and what the backward does, step by step.

    `in_place` says whether a run puts what it writes in the place of a value that its op takes and that is
    dropped right after it.

    >>> from lowtide import Drop, Run, Schedule
    >>> schedule = Schedule((Run("up"), Drop("x")), (Run("up"), Run("up_backward")))
    >>> [step.op for step in schedule.steps if isinstance(step, Run)]
    ['up', 'up', 'up_backward']
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    in_place: bool = True

    def __str__(self) -> str:
        runs = [step.op for step in self.steps if isinstance(step, Run)]
        again = len(runs) - len(set(runs))
        return (
            f"Schedule: {len(self.forward)} forward and {len(self.backward)} backward steps; "
            f"{len(runs)} runs, {again} of them recomputations"
        )

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps in order."""
        return self.forward + self.backward

    def to_dict(self) -> dict[str, Any]:
        """The plain form: each step is ["run", op] or ["drop", value]."""
        return {
            "lowtide": "schedule",
            "version": FORMAT_VERSION,
            **({} if self.in_place else {"in_place": False}),
            "forward": _plain(self.forward),
            "backward": _plain(self.backward),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Schedule:
        """The schedule of a plain form; raises `FormatError` naming the field that is wrong."""
        json_format.check_header(data, "schedule", FORMAT_VERSION, ("in_place", "forward", "backward"))
        in_place = json_format.read_flag(data, "in_place", True)
        return cls(_read(data, "forward"), _read(data, "backward"), in_place)

    def to_json(self) -> str:
        """The schedule as JSON text."""
        return json_format.dump(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """The schedule of a JSON text."""
        return cls.from_dict(json_format.parse(text, "schedule"))


def _plain(steps: Iterable[Step]) -> list[list[str]]:
    return [["run", step.op] if isinstance(step, Run) else ["drop", step.value] for step in steps]


def _read(data: dict[str, Any], name: str) -> tuple[Step, ...]:
    steps: list[Step] = []
    for index, item in enumerate(json_format.read_items(data, name)):
        match item:
            case ["run", str(op)]:
                steps.append(Run(plain(op)))
            case ["drop", str(value)]:
                steps.append(Drop(plain(value)))
            case _:
                found = json_format.say(item)
                raise FormatError(f'{name}[{index}]: expected ["run", op] or ["drop", value], found {found}')
    return tuple(steps)
