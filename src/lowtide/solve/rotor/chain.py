"""A chain of stages with several ways to keep each, in plain numbers: what `rotor` plans, and its plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...errors import LowtideError

__all__ = ["UNITS", "Action", "ChainPlan", "Option", "Stage", "check_chain"]

UNITS = 500
"""How many units a memory is divided into, unless another number is asked for."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to keep a stage: the bytes that its backward will find, and what the two ways take.

    `saved` contains the output. The temporaries come on top of it; they are negative where a run does not
    need all of it. `stages` > 1 makes one block of this and the next stages: one forward, one backward.
    `closes` says that the output is not written: open only where the gradient of the output is there already.
    """

    saved: int
    forward: float = 1.0
    backward: float = 1.0
    forward_temp: int = 0
    backward_temp: int = 0
    stages: int = 1
    closes: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: the bytes of its output, the ways to keep it, and its forward when nothing is kept.

    `forward` and `temp` are seconds and temporary bytes of running without saving (by default those of the
    first option), `gradient` the bytes of the gradient of its output (by default as large as the output),
    `leaves` the bytes that its backward leaves behind for good.
    """

    output: int
    options: tuple[Option, ...]
    forward: float | None = None
    temp: int | None = None
    gradient: int | None = None
    leaves: int = 0


class Action(NamedTuple):
    """Run a stage keeping nothing (`forward`), run it keeping what an option saves, or run its backward."""

    verb: Literal["forward", "save", "backward"]
    stage: int
    option: int = 0


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """The seconds of the best plan under a memory, and its actions in order."""

    seconds: float
    actions: tuple[Action, ...]


def check_chain(stages: Sequence[Stage], memory: int, units: int) -> None:
    """Refuse a chain, a memory or a number of units that no table can be made of."""
    if memory < 0 or units < 1:
        raise LowtideError(f"memory {memory} and units {units}: expected memory >= 0 and units >= 1")
    for index, stage in enumerate(stages):
        if not stage.options:
            raise LowtideError(f"stage {index} has no option: give at least one way to keep it")
        if any(option.stages < 1 for option in stage.options):
            raise LowtideError(f"stage {index}: an option spans at least one stage")
        if all(index + option.stages > len(stages) for option in stage.options):
            raise LowtideError(f"stage {index}: every option reaches past the last stage")
