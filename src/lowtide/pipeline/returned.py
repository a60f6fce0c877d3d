"""What a step returns, and whether its caller still holds it when the backward begins.

`model(**batch).loss.backward()` lets go of the logits before the backward, and `out = model(**batch)` does
not. No plan can know which: it counts outputs as held, and when autograd calls the first backward the
storages are asked who holds them. What nobody held is planned for as let go from the next call on
(`plans/returning.py`); what is held after all is said, once, and counts as held for good, so that plans do
not swing. A budget that can only be kept where nobody holds the outputs is planned for so at once, and
a backward is refused, before anything of it is computed, where somebody does.

Limits: the eager executor, and steps of one graph that have no collectives; elsewhere outputs count as held.
So do numbers, such as the loss, and all outputs where the loss is outside of the step: it may hold as much as
they are for as long, as the result of `mse_loss` does (`outside_loss.py`).
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from .._torch import private, storage_key
from ..console.log import log
from ..errors import UnsupportedBackward
from ..options import Options
from ..plans.graph import Graph
from ..plans.planned_step import Plan
from ..plans.returning import let_go_of, letting_go, peak_while_held
from ..stages import Asked, Captured, Planned, Priced
from ..units import format_bytes

__all__ = ["Holds", "Returned", "every_place", "let_go", "observes", "places_let_go", "returned_by"]


EVERY: Collection[int] = range(sys.maxsize)
"""The places of all results."""


@dataclass(eq=False)
class Holds:
    """The places of results that a caller held when a backward began, and of those that nobody held.

    Of a loop that is `expected_to_let_go`, as the Trainer's, all is planned for so before it is seen.
    """

    held: set[int] = field(default_factory=set)
    free: set[int] = field(default_factory=set)
    expected_to_let_go: bool = False
    said: bool = False

    @property
    def seen(self) -> bool:
        """Whether a backward has begun."""
        return bool(self.held or self.free)

    @property
    def released(self) -> Collection[int] | None:
        """The places that were never seen held; None where nothing is known of them."""
        if self.seen:
            return frozenset(self.free - self.held)
        return EVERY if self.expected_to_let_go else None


def observes(options: Options) -> bool:
    """Whether it depends on the caller what a plan counts as held."""
    plain = options.executor == "eager" and not options.allow_breaks and options.plan is None
    return plain and options.outputs == "auto"


def every_place(captured: Captured) -> dict[int, str]:
    """The values that a caller may let go of, by their places among the results of the forward."""
    lifted, trace = captured.lifted, captured.trace
    if any(map(_is_wide, trace.expected)):
        return {}
    names = {p: lifted.value_of.get(node, "") for p, node in enumerate(trace.outputs) if _is_tensor(node)}
    outputs = {value.name for value in lifted.graph.values if value.kind == "output"}
    return {
        place: name for place, name in names.items() if name in outputs and _is_wide(lifted.root_of[name])
    }


def _is_tensor(node: Any) -> bool:
    tensor = node.meta["val"] if isinstance(node, fx.Node) else None
    return isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided


def _is_wide(node: fx.Node) -> bool:
    tensor = node.meta["val"]
    return isinstance(tensor, torch.Tensor) and tensor.numel() > 1


def places_let_go(asked: Asked, captured: Captured) -> Collection[int]:
    """The places of what this step's plan counts on to be let go of."""
    options, every = asked.options, every_place(captured)
    if asked.compiled or options.allow_breaks or options.outputs == "held":
        return ()
    if options.plan is not None:
        names = let_go_of(options.plan.graph)
        return [place for place, name in every.items() if name in names]
    return every if options.outputs == "free" else asked.released or ()


def let_go(priced: Priced, places: Collection[int]) -> Priced:
    """The step, planned for a caller who lets go of what is returned at these places."""
    every = every_place(priced.captured)
    held = {name for place, name in every.items() if place not in places}
    names = {name for place, name in every.items() if place in places} - held
    if not names:
        return priced
    return replace(priced, lifted=replace(priced.lifted, graph=letting_go(priced.lifted.graph, names)))


@dataclass(frozen=True)
class _Result:
    """A storage that a call returned; `saved` is how many hold it for the backward."""

    place: int
    storage: Any
    saved: int

    @property
    def is_held(self) -> bool:
        """Whether anybody holds it besides the step."""
        count = _counts()
        if not self.saved or count is None:
            return not self.storage.expired()
        return count(self.storage.cdata) > self.saved + _for_python(count)


@cache
def _counts() -> Callable[[int], int] | None:
    """What counts the holders of a storage; where torch has none, what is saved counts as held."""
    try:
        return private("storage_holders")  # type: ignore[no-any-return]
    except ImportError:
        return None


@cache
def _for_python(count: Callable[[int], int]) -> int:
    """How many more holders a storage has once Python has seen it."""
    tensor = torch.empty(0)  # no bytes, for a step may be under way that is measured
    storage = StorageWeakRef(tensor.untyped_storage())
    return count(storage.cdata) - 1


@dataclass(eq=False)
class Returned:
    """What a runner's calls return at places that its caller may let go of, and what its plan counts on.

    `strict` says that the plan was never made for a caller who holds them, `asked_for` that it was to be so.
    """

    plan: Plan
    names: dict[int, str]
    planned: frozenset[int]
    strict: bool
    asked_for: bool
    last: threading.local = field(default_factory=threading.local, repr=False)
    saved: dict[int, int] | None = None

    def noting(self, run: Callable[[list[Any]], Any], outputs: int) -> Callable[[list[Any]], Any]:
        """The forward's function; what it returns is noted for the backward of the same call."""

        def call(args: list[Any]) -> Any:
            results = run(args)
            self.last.results = self.noted(results, outputs)
            return results

        return call

    def noted(self, results: Sequence[Any], outputs: int) -> list[_Result]:
        if self.saved is None:
            kept = Counter(storage_key(item) for item in results[outputs:] if isinstance(item, torch.Tensor))
            self.saved = {place: kept[storage_key(results[place])] for place in self.names}
        return [
            _Result(place, StorageWeakRef(results[place].untyped_storage()), self.saved[place])
            for place in self.names
        ]

    def look(self, node: Any, holds: Holds, caller: str) -> None:
        """Look at what the last call returned when autograd calls its backward."""
        results, self.last.results = getattr(self.last, "results", ()), ()
        if results:
            node.register_prehook(lambda *_: self.begin_backward(results, holds, caller))

    def begin_backward(self, results: Sequence[_Result], holds: Holds, caller: str) -> None:
        held = {result.place for result in results if result.is_held}
        if unplanned := held & self.planned:
            self.tell(unplanned, holds, caller)
        holds.held |= held
        holds.free |= {result.place for result in results} - held

    def tell(self, places: Collection[int], holds: Holds, caller: str) -> None:
        """Say what the plan did not count on; refuse to go on where it was told that it could."""
        names = {self.names[place] for place in places}
        graph, budget = self.plan.graph, self.plan.budget
        size = format_bytes(sum(graph.value[name].bytes for name in names))
        peak = peak_while_held(graph, self.plan.schedule, names)
        what = (
            f"{size} that {caller} returned ({_where(graph, names)}) are still held when its backward begins"
        )
        if self.strict and budget is not None and peak > budget:
            raise UnsupportedBackward(
                f"{what}, and the budget of {format_bytes(budget)} can be kept only where nobody holds them: "
                f"this backward would take {format_bytes(peak)} ({peak} bytes). Let go of what is not needed "
                "before the backward, as in `loss = model(...).loss` or `del out`, or raise the budget"
            )
        if not holds.said:
            holds.said = True
            over = format_bytes(max(peak - self.plan.allocated, 0))
            then = "" if self.asked_for else ". They count as held from the next call on"
            why = ", since it was told so" if self.asked_for else ""
            log.warning(
                f"{what}, and the plan counts on their being let go of{why}: this step takes up to {over} "
                f"more than planned{then}"
            )


def returned_by(planned: Planned) -> Returned | None:
    """What is looked at around the calls of a planned step; None where nothing depends on its caller."""
    captured = planned.priced.captured
    names = every_place(captured)
    gone = let_go_of(planned.plan.graph)
    places = frozenset(place for place, name in names.items() if name in gone)
    if not names or not (places or observes(captured.asked.options)) or planned.any_rank is not bool:
        return None
    asked_for = not observes(captured.asked.options)
    return Returned(planned.plan, names, places, planned.only_if_free or asked_for, asked_for)


def _where(graph: Graph, names: Collection[str]) -> str:
    """The outputs by the ops that write them."""
    found = list(dict.fromkeys(graph.writer[name].where for name in sorted(names)))
    return found[0] if len(found) == 1 else f"{found[0]} and {len(found) - 1} more"
