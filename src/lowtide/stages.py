"""The stages of a step: each is frozen, and made from the one before by a function of `pipeline/way_down.py`.

    Asked  ->  Captured  ->  Priced  ->  Planned  ->  Lowered  ->  Runner

A second round (a compiled step came out too large, a sketch was chosen, a kernel returned other strides than
were foretold) starts from another `Asked` and makes new stages; nothing is written into an old one. Executors
and the choice of sketches are handed stages and give stages back. In a debugger each prints as one line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import fx

from .capture.deferred_output import Deferral
from .capture.lift import Lifted
from .capture.step_inputs import StepInputs
from .capture.trace import Trace
from .errors import NothingToTrain
from .lowering.changed_inputs import Watch
from .lowering.hand_over import Groups
from .options import Options
from .plans.graph import Graph
from .plans.planned_step import Plan
from .plans.schedule import Schedule
from .torch_state.autocast_state import State
from .units import format_bytes

__all__ = ["Asked", "Captured", "Lowered", "Planned", "Priced", "Runner", "Sketched", "Split"]


@dataclass(frozen=True)
class Sketched:
    """The layers of a step that keep a sketch of their input, and those that keep some rows in its place.

    `whole` is the uncapped peak of the step with neither; `saved` are the bytes that they take less, `words`
    what a plan says of them.
    """

    layers: tuple[str, ...]
    exact: tuple[str, ...]
    saved: int
    whole: int
    words: str


@dataclass(frozen=True)
class Split:
    """The regions of a step that run in chunks of rows: each by the name of its first product, and how many.

    `whole` is the uncapped peak of the step without chunks, `words` what a plan says of them.
    """

    chosen: tuple[tuple[str, int], ...]
    whole: int
    words: str


@dataclass(frozen=True)
class Asked:
    """What is asked for, and what is known of a step before it is captured.

    `target` names an absent device to plan for; `only_plan` stops before anything runs. `autocast` is the
    state that the backward is traced for, `called_in` the one around the call. `beside` are the bytes that
    are set aside for calls in flight, `headroom` bytes of the budget that an earlier round showed to be
    needed besides the plan, and `sketched` what an earlier round chose; `split` is what this round chose to
    run in chunks. `released` are the places of results that the caller was seen to let go of, None where
    nothing is known of that. `attempt` is what all ranks of a process group call this planning. `search`
    stands in for the method "auto": the caller's own, which remembers its other shapes. `piece` is what is
    known of a piece of a step that has others (`pipeline/pieces.py`).
    """

    options: Options
    inputs: StepInputs = field(default_factory=StepInputs)
    target: str | None = None
    only_plan: bool = False
    autocast: State = ()
    called_in: State = ()
    beside: int = 0
    headroom: int = 0
    sketched: Sketched | None = None
    released: Collection[int] | None = None
    split: Split | None = None
    attempt: str = ""
    search: Callable[[Graph, int], Schedule] | None = None
    piece: Any = None

    def __repr__(self) -> str:
        where = f" for {self.target}" if self.target else ""
        return (
            f"Asked({self.options.budget} by {self.options.executor}{where}, {len(self.inputs.roles)} inputs)"
        )

    @property
    def compiled(self) -> bool:
        """Whether the step is compiled into fused kernels."""
        return self.options.executor == "inductor"

    @property
    def measured(self) -> bool:
        """Whether ops run on the device while the step is planned."""
        return self.options.prices == "measured" and self.target is None

    @property
    def differentiate(self) -> str:
        """A scalar that a graph break hands on need not be a loss."""
        return "all" if self.options.allow_breaks else self.options.differentiate

    def refuse_inference(self) -> None:
        """A step without a backward has nothing to plan; a piece between graph breaks may have none."""
        if self.only_plan or not self.options.allow_breaks:
            raise NothingToTrain(
                "no output of the step depends on a parameter or input that requires a gradient: there is no "
                "backward to plan. Is every parameter frozen, or the result detached? "
                "Call it under torch.no_grad() or in eval mode to run it plainly."
            )


@dataclass(frozen=True, repr=False)
class Captured:
    """A step as torch traced it, lifted to a graph without prices.

    `constants` are the tensors that the trace refers to by name; `channels_last` says that the compiler will
    hold images so, `casts_inside` that some operators cast what they multiply themselves; `places` are those
    of the step's inputs that primals stand for (`StepInputs.places`).
    """

    asked: Asked
    trace: Trace
    lifted: Lifted
    constants: Mapping[str, Any]
    casts_inside: bool
    channels_last: bool
    places: Sequence[tuple[int, tuple[str, ...]] | None] = ()

    def __repr__(self) -> str:
        return f"Captured({_size(self.lifted)} on {self.trace.device})"

    @property
    def expected(self) -> tuple[bool, ...]:
        """For each gradient of an output, whether the plan counts on it to come."""
        return tuple(node in self.trace.expected for node in self.trace.tangents)


@dataclass(frozen=True, repr=False)
class Priced:
    """A step with seconds and workspaces, and with what else is on the device in bands of its graph.

    `counted` are the bytes of each optimizer's state that are among the bands.
    """

    captured: Captured
    lifted: Lifted
    counted: Mapping[Any, int]

    def __repr__(self) -> str:
        return f"Priced({_size(self.lifted)}, {self.lifted.graph.prices})"


@dataclass(frozen=True, repr=False)
class Planned:
    """A step with the plan that it will follow; `any_rank` asks all that do whether something is so.

    `only_if_free` says that there is none for a caller who holds what the step returns.
    """

    priced: Priced
    plan: Plan
    any_rank: Callable[[bool], bool] = bool
    only_if_free: bool = False

    def __repr__(self) -> str:
        budget = "no budget" if self.plan.budget is None else f"under {format_bytes(self.plan.budget)}"
        return f"Planned({format_bytes(self.plan.peak)} {budget}, +{self.plan.extra:.1%})"


@dataclass(frozen=True, repr=False)
class Lowered:
    """A planned step as the pair of fx graphs that does what its schedule says.

    `watch` looks at the inputs that may not change before the backward; `groups` are the inputs whose
    gradients the backward hands over on its way.
    """

    planned: Planned
    forward: fx.GraphModule
    backward: fx.GraphModule
    watch: Watch
    groups: Groups = ()

    def __repr__(self) -> str:
        forward, backward = (len(module.graph.nodes) for module in (self.forward, self.backward))
        return f"Lowered({forward} nodes in the forward, {backward} in the backward)"

    @property
    def captured(self) -> Captured:
        """The stage of the capture that it comes from."""
        return self.planned.priced.captured

    def runner(self, run: Callable[..., Any], plan: Plan, returned: LooksAtResults | None = None) -> Runner:
        """The last stage, without the graphs: they are not needed once their functions are made."""
        return Runner(
            run,
            plan,
            self.captured.asked.inputs,
            returned=returned,
            counted=self.planned.priced.counted,
            watch=self.watch,
            groups=self.groups,
            updated=self.captured.trace.updated,
            casts_inside=self.captured.casts_inside,
            deferred=self.deferred,
        )

    @property
    def deferred(self) -> tuple[tuple[Deferral, tuple[int, ...]], ...]:
        """The results that are computed when somebody reads them, with the inputs that they need."""
        places = self.captured.places
        return tuple(
            (each, tuple(places[primal][0] for primal in each.reads))  # type: ignore[index]
            for each in self.captured.trace.deferred
        )


class LooksAtResults(Protocol):
    """Looks at what the last call returned, when autograd calls the backward of that call."""

    def look(self, node: Any, holds: Any, caller: str) -> None:
        """Register for autograd's node; what is found goes to what is known of the caller."""


def _as_it_is(args: Sequence[Any]) -> Runner | None:
    return None


@dataclass(frozen=True, repr=False)
class Runner:
    """The function of a step and what is looked at around its calls.

    `plan` is None where no gradient passes. `returned` looks at who holds what a call has returned. `renew`
    is asked before each call for the runner of another round, where the calls before have shown that there
    must be one; else it gives None. `updated` are the inputs that an optimizer updates inside of the
    backward, `deferred` the results that are computed when somebody reads them, each with the places of the
    inputs that it needs.
    """

    run: Callable[..., Any]
    plan: Plan | None
    inputs: StepInputs
    returned: LooksAtResults | None = None
    counted: Mapping[Any, int] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    groups: Groups = ()
    updated: tuple[int, ...] = ()
    casts_inside: bool = False
    renew: Renew = _as_it_is
    deferred: tuple[tuple[Deferral, tuple[int, ...]], ...] = ()

    def __repr__(self) -> str:
        return f"Runner({'nothing to plan' if self.plan is None else format_bytes(self.plan.peak)})"


Renew = Callable[[Sequence[Any]], Runner | None]


def _size(lifted: Lifted) -> str:
    forward = sum(op.phase == "forward" for op in lifted.graph.ops)
    return f"{forward} ops in the forward, {len(lifted.graph.ops) - forward} in the backward"
