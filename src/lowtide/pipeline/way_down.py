"""The way down: from AOTAutograd's joint graph to a lowered pair, one stage after the other.

At the partitioner's place in torch's pipeline stands `lowered`: capture, price, plan, lower. Each function
here makes one stage of `stages.py` from the one before, and goes into the rooms of that stage alone.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from .._torch import frees_tangents, private
from ..capture.in_place import with_places
from ..capture.known_kernels import KnownKernels
from ..capture.lift import Lifted, lift
from ..capture.rewrites.collectives import is_collective
from ..capture.torch_errors import OnlyPlanned
from ..capture.trace import Manner, Trace, device_of, make_trace
from ..capture.untouched import with_tangents_that_come, without_untouched
from ..console.log import under_way
from ..console.stage_seconds import timed
from ..devices.baseline import State, fixed_bands, states
from ..devices.memory import DeviceMemory, memory_of
from ..devices.table import find_device
from ..errors import BudgetTooSmall, LowtideError
from ..fusion.fused_graph import fuse
from ..lowering.changed_inputs import Watch, Watched
from ..lowering.lower import lower
from ..lowering.rereads import read_otherwise
from ..planner.arenas import allocated_alone
from ..planner.budgets import resolve
from ..planner.follow import follow, refuse_if_too_large
from ..planner.too_small import with_split
from ..planner.under_budget import plan_graph, settled, uncapped_peak
from ..plans.planned_step import Plan
from ..prices.measured import Kernels
from ..prices.pricing import price
from ..prices.updates import Owned, Tried, with_workspaces
from ..ranks.agreement import agree
from ..run.inductor.images import hand_over_channels_last, prefers_channels_last
from ..sketching.choose import choose
from ..sketching.marks import has_marks
from ..sketching.replace import MarkedStep
from ..splitting.choose import choose as choose_split
from ..splitting.choose import possible_with_split
from ..stages import Asked, Captured, Lowered, Planned, Priced
from ..torch_state.autocast_state import under_autocast
from .in_flight import BAND
from .optimizer_steps import seen, seen_for
from .outside_loss import OutsideLoss, outside_loss
from .plan_notes import notes_on
from .returned import every_place, let_go, observes, places_let_go
from .stepping import refuse_without_updates, stepping_optimizers

__all__ = [
    "can_be_planned_again",
    "capture_step",
    "lower_step",
    "lowered",
    "lowered_again",
    "plan_step",
    "price_step",
]


def lowered(asked: Asked, joint: fx.GraphModule, forward_outputs: int) -> Lowered:
    """All the way down. Where a plan is all that is wanted it is raised, to end the capture."""
    planned = _planned(asked, joint, forward_outputs)
    if asked.only_plan:
        raise OnlyPlanned(planned.plan)
    return lower_step(planned)


def can_be_planned_again(captured: Captured) -> bool:
    """Whether another plan may start from this stage: no choice of an earlier round is in it."""
    return captured.asked.sketched is None and captured.asked.split is None


def lowered_again(asked: Asked, captured: Captured) -> Lowered:
    """The way down of another plan, from where what is asked now makes a difference."""
    return lower_step(_plan_or_hint(replace(captured, asked=asked)))


def _planned(asked: Asked, joint: fx.GraphModule, forward_outputs: int) -> Planned:
    def priced(asked: Asked, joint: fx.GraphModule) -> Priced:
        return price_step(capture_step(asked, joint, forward_outputs))

    if has_marks(joint.graph):
        asked = replace(asked, piece=None)  # which layers keep a sketch is chosen for each piece by itself
        if asked.options.split:
            raise LowtideError(
                "split= and layers that may keep a sketch are not planned together: leave split= out, or "
                "lowtide.unsketch(model) first"
            )
        marked = MarkedStep(joint, compiled=asked.compiled)
        return choose(asked, marked, price=priced, limits=Limits(), plan=plan_step)
    captured = capture_step(asked, joint, forward_outputs)
    if asked.options.split or (asked.options.plan is not None and asked.options.plan.split):
        if any(map(is_collective, captured.trace.graph.nodes)):
            raise LowtideError(
                "split= is not there yet for steps with collectives, whose ranks must choose alike: leave it "
                "out"
            )
        return choose_split(
            asked, captured, capture=recaptured, price=price_step, limits=Limits(), plan=plan_step
        )
    return _plan_or_hint(captured)


def _plan_or_hint(captured: Captured) -> Planned:
    """The plan of a step; where the budget is too small, the error says what split=True would do."""
    try:
        return plan_step(price_step(captured))
    except BudgetTooSmall as error:
        asked = captured.asked
        if asked.compiled or asked.headroom or asked.options.plan is not None:
            raise
        found = possible_with_split(asked, captured, capture=recaptured, price=price_step, limits=Limits())
        if found is None or found >= error.smallest:
            raise
        raise with_split(error, found) from None


@timed("rewrites and lift")
def capture_step(asked: Asked, joint: fx.GraphModule, forward_outputs: int) -> Captured:
    """The joint graph, rewritten so that it can be planned, and lifted to a graph."""
    target = find_device(asked.target) if asked.target else None
    channels_last = asked.compiled and prefers_channels_last(joint, target)
    here = not asked.compiled and target is None  # another device, and a compiler, have other kernels
    measured = partial(Kernels, device_of(joint.graph)) if asked.measured else None
    manner = Manner(
        differentiate=asked.differentiate,
        backward_autocast=asked.autocast,
        compiled=asked.compiled,
        channels_last=channels_last,
        kernels=KnownKernels(measured) if here else None,
        absent=asked.piece.absent if asked.piece is not None else frozenset(),
    )
    trace = make_trace(joint, asked.inputs, manner, forward_outputs=forward_outputs)
    if asked.options.step_in_backward and not trace.updated:
        refuse_without_updates(len(asked.inputs.accumulating))
    asked.inputs.widen(trace.primals)
    names = [str(node.target) for node in joint.graph.find_nodes(op="get_attr")]
    return Captured(
        asked,
        trace,
        _lifted(asked, trace),
        constants={name: getattr(joint, name) for name in names},
        casts_inside=bool(joint.graph.find_nodes(op="call_function", target=under_autocast)),
        channels_last=channels_last and trace.device.type == "cuda",
        places=asked.inputs.places(trace.primals),
    )


def _lifted(asked: Asked, trace: Trace) -> Lifted:
    target = find_device(asked.target) if asked.target else None
    lifted = lift(trace, target)
    if not asked.compiled:  # a compiler decides itself what it overwrites
        lifted = with_places(lifted, target.type if target else trace.device.type)
    graph = with_tangents_that_come(lifted.graph, trace)
    # before torch 2.13 compiled code checks the sizes of all of its arguments, and so touches them
    passed_over = not asked.compiled or frees_tangents()
    if passed_over and target is None and trace.device.type == "cpu":
        graph = without_untouched(graph, trace, lifted.value_of, also=asked.inputs.looked_at(trace.primals))
    return replace(lifted, graph=graph)


def recaptured(asked: Asked, captured: Captured, trace: Trace) -> Captured:
    """A captured step with another trace of it."""
    return replace(captured, asked=asked, trace=trace, lifted=_lifted(asked, trace))


@timed("prices")
def price_step(captured: Captured) -> Priced:
    """The graph of what runs, fused where the step is compiled, with prices and with bands beside it."""
    under_way("pricing this step")
    asked, device = captured.asked, captured.trace.device
    lifted = fuse(captured.trace, captured.lifted) if asked.compiled else captured.lifted
    lifted = price(
        lifted,
        device,
        prices=asked.options.prices,
        target=asked.target,
        channels_last=captured.channels_last,
    )
    lifted = with_workspaces(lifted, _owners(asked), _where_tried(asked, device))
    present = asked.target is None and not asked.only_plan
    if present and device.type == "cuda":
        _warm_up(device)
    others = [optimizer for _, optimizer in seen_for(asked.inputs.trained, device)] if present else []
    counted = states(asked.options.optimizer, others, device)
    outside = outside_loss(asked, captured.trace, captured.lifted.value_of, lifted.graph)
    bands = {
        **fixed_bands(lifted.graph, device, counted, present=present, in_flight=asked.beside),
        **_bands(captured, outside),
    }
    graph = lifted.graph.replace(fixed=bands, boundary=outside.boundary)
    return Priced(captured, replace(lifted, graph=graph), _by_optimizer(counted))


def _owners(asked: Asked) -> dict[int, Owned]:
    """The optimizer and its group of each leaf that is updated inside of the backward."""
    owned = {
        id(parameter): Owned(optimizer, group)
        for optimizer in stepping_optimizers(asked.options)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    leaves = zip(sorted(asked.inputs.leaves), asked.inputs.trained, strict=True)
    some = next(iter(owned.values()), None)  # of a model on the meta device others stand for parameters
    found = {place: owned.get(id(ref()), some) for place, ref in leaves if place in asked.inputs.stepped}
    return {place: owner for place, owner in found.items() if owner is not None}


def _where_tried(asked: Asked, device: torch.device) -> Tried:
    """Where to try an update: for a device that is not here, on the CPU."""
    target = find_device(asked.target) if asked.target else None
    return Tried(device, device.type) if target is None else Tried(torch.device("cpu"), target.type)


def _bands(captured: Captured, outside: OutsideLoss) -> dict[str, int]:
    """Bytes beside the step that the way it is called brings along."""
    asked, device = captured.asked, captured.trace.device
    found = {BAND: asked.beside, "loss": outside.all_along}
    if asked.compiled and asked.inputs.accumulating and device.type == "cpu":
        found["present gradients"] = sum(asked.inputs.present_gradients())  # autograd adds to them
    elif asked.inputs.wrapped and device.type == "cpu":  # and to DTensors in any case
        found["present gradients"] = sum(asked.inputs.present_wrapped_gradients())
    return {name: size for name, size in found.items() if size}


def _by_optimizer(counted: list[State]) -> dict[object, int]:
    return {seen(state.optimizer): state.held + state.coming for state in counted}


@timed("search")
def plan_step(priced: Priced) -> Planned:
    """The plan under the budget, or the one that was handed in; with collectives, the same on all ranks."""
    under_way("planning this step")
    device = _memory(priced)
    agreed = agree(priced, device)
    if agreed is None:
        return _planned_for_caller(priced, device)
    device = replace(device, replays=False)  # ranks hold different segments, and must choose alike
    plan = agreed.plan(lambda: _plan(agreed.priced, agreed.memory(device)))
    notes = (*plan.notes, *allocated_alone(device, "ranks hold different memory, and plan alike"))
    return Planned(agreed.priced, replace(plan, notes=notes), agreed.any_rank)


def _planned_for_caller(priced: Priced, device: DeviceMemory) -> Planned:
    """The plan for what the caller holds, as far as that is known.

    Where nothing is known, and the budget can only be kept if nobody holds anything, it is planned so.
    """
    asked = priced.captured.asked
    known = let_go(priced, places_let_go(asked, priced.captured))
    try:
        return Planned(known, _plan(known, device))
    except BudgetTooSmall as error:
        every = every_place(priced.captured)
        size = sum(priced.lifted.graph.value[name].bytes for name in set(every.values()))
        unsure = asked.released is None and asked.sketched is None and observes(asked.options)
        if not unsure or asked.only_plan or error.smallest - size > error.budget:
            raise
        free = let_go(priced, every)
        try:
            return Planned(free, _plan(free, device), only_if_free=True)
        except BudgetTooSmall as other:
            error.add_note(f"where nobody holds what the step returns, it is {other.smallest} bytes")
            raise error from None


def _plan(priced: Priced, device: DeviceMemory) -> Plan:
    """The plan of a priced step, judged here where it was handed in."""
    asked, graph = priced.captured.asked, priced.lifted.graph
    whole = _exact_peak(asked)
    handed_in, budget = asked.options.plan, asked.options.budget
    if handed_in is not None and not asked.headroom:
        followed = follow(handed_in, graph, budget, device=device, whole=whole)
        if not asked.compiled or asked.only_plan:  # what is compiled is judged by its buffers
            refuse_if_too_large(followed, budget)
        return followed
    if asked.piece is not None and handed_in is None:
        return asked.piece.first_plan(graph, asked.options, device)  # type: ignore[no-any-return]
    made = plan_graph(
        graph,
        handed_in.budget if handed_in is not None and budget is None else budget,
        method=asked.options.method,
        device=device,
        whole=whole,
        headroom=asked.headroom,
        notes=(*notes_on(priced.captured.trace, graph, asked), *allocated_alone(device, "")),
        planning_seconds=asked.options.planning_seconds,
        search=asked.search,
    )
    if asked.split is not None:
        return replace(made, split=asked.split.chosen)
    if asked.sketched is None:
        return made
    return replace(made, sketched=asked.sketched.layers, trimmed=asked.sketched.exact)


def _memory(priced: Priced) -> DeviceMemory:
    """The device's memory; what generated code asks of it are other requests than the graph's ops make."""
    asked, graph = priced.captured.asked, priced.lifted.graph
    return replace(memory_of(graph, asked.target), replays=not asked.compiled)


class Limits:
    """What the budget says of a priced step, for the choice of sketches."""

    def byte_limit(self, priced: Priced) -> int | None:
        """The bytes that it may take; None where the smallest peak is asked for."""
        asked = priced.captured.asked
        if asked.options.budget is None:
            return sys.maxsize
        graph = priced.lifted.graph
        device = _memory(priced)  # on CUDA this looks at every free block
        budget = settled(asked.options.budget, graph, device)
        size = resolve(budget, _exact_peak(asked) or uncapped_peak(graph, device), device)
        return None if size is None else size - asked.headroom

    def settled(self, priced: Priced) -> Asked:
        """What was asked, with the bytes of the knee of this step: other choices are held against these."""
        asked, graph = priced.captured.asked, priced.lifted.graph
        if asked.options.budget is None:
            return asked
        budget = settled(asked.options.budget, graph, _memory(priced))
        return replace(asked, options=replace(asked.options, budget=budget))

    def uncapped_peak(self, priced: Priced) -> int:
        """The peak of keeping everything of it."""
        return uncapped_peak(priced.lifted.graph, _memory(priced))


def _exact_peak(asked: Asked) -> int | None:
    """The peak that a share is of where it is not this graph's: with sketches or chunks, the plain step's."""
    if asked.split is not None and asked.split.chosen:
        return asked.split.whole
    return asked.sketched.whole if asked.sketched is not None and asked.sketched.saved else None


@timed("lowering")
def lower_step(planned: Planned) -> Lowered:
    """The pair of graphs that does what the schedule says."""
    captured, lifted = planned.priced.captured, planned.priced.lifted
    pair = lower(captured.trace, lifted, planned.plan.schedule)
    watch = _watched(planned, pair.backward)
    if captured.asked.compiled:
        hand_over_channels_last(pair.forward, len(captured.trace.outputs))
    return Lowered(planned, pair.forward, pair.backward, watch, pair.groups)


def _watched(planned: Planned, backward: fx.GraphModule) -> Watch:
    """The inputs that may not change before the backward.

    Where torch merged some, it is not known which are read; autograd counts the versions of all.
    """
    captured = planned.priced.captured
    trace, inputs = captured.trace, captured.asked.inputs
    if not captured.places:
        held = [sum(sizes.values()) for sizes in inputs.storages]
        return Watch([Watched(at, name, again=False) for at, name in enumerate(inputs.names) if held[at]])
    read = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    again = read_otherwise(trace, planned.priced.lifted, planned.plan.schedule)
    return Watch(
        [
            Watched.of(at, inputs.names[at[0]], node.meta["val"], again=node in again)
            for at, node in zip(captured.places, trace.primals, strict=True)
            if at is not None and isinstance(node.meta["val"], torch.Tensor)
            if node.name in read or node in again
        ]
    )


def _warm_up(device: torch.device) -> None:
    """Let cuBLAS take its workspaces, in this thread and in autograd's, before memory is read.

    While torch captures a step, tensors are fake and autograd has no thread of its own, unless asked for.
    """
    real, threads = private("without_modes")(), torch.autograd.set_multithreading_enabled(True)
    with real, threads, torch.enable_grad():
        for dtype in (torch.float32, torch.bfloat16):
            weight = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
            result = torch.addmm(weight[0], torch.mm(weight, weight), weight)
            result.register_hook(_as_if_again)
            result.sum().backward()
    torch.cuda.synchronize(device)


def _as_if_again(gradient: torch.Tensor) -> None:
    """What a backward that recomputes a linear layer runs in autograd's thread: cuBLASLt has a workspace."""
    torch.addmm(gradient[0], gradient, gradient)
