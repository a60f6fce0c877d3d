"""Capture: from a model and a batch to a planned, runnable step.

torch.compile's front end hands the whole step (or, with graph breaks, a piece of it) to `Piece`, which sends
it through AOTAutograd. At the partitioner's place in that pipeline stands the road of the design: trace,
lift, price, solve, lower. What AOTAutograd runs afterwards are the two functions of the eager executor, or of
Inductor, in whose own pipeline the partitioner has the same place.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from .._torch import eager_kernels, first_run_unwatched, frees_tangents, keeping_draws, private
from ..capture.lift import Lifted, lift
from ..capture.rewrites.autocast import mark_regions
from ..capture.rewrites.random_draws import lay_out_calls
from ..capture.step_inputs import StepInputs
from ..capture.trace import Trace, device_of, make_trace
from ..devices.allocator import rounded
from ..devices.baseline import fixed_bands, states
from ..devices.optimizers import state_bytes
from ..devices.table import find_device
from ..errors import NothingToTrain
from ..fusion.fused_graph import fuse
from ..lowering.lower import Pair, lower
from ..lowering.rereads import read_otherwise
from ..options import Options, limit
from ..planner.follow import follow, refuse_if_too_large
from ..planner.under_budget import device_blocks, device_memory, plan_graph, resolve
from ..plans.graph import Graph, Value
from ..plans.keep_all import keep_all
from ..plans.planned_step import Plan
from ..plans.simulator import simulate
from ..prices.known_kernels import KnownKernels
from ..prices.pricing import price
from ..run.backward import Backward
from ..run.changed_inputs import Watch, Watched
from ..run.eager import compile_graph
from ..run.eager_step import EagerStep
from ..run.first_run import Misfits, checked
from ..run.inductor.images import hand_over_channels_last, prefers_channels_last
from ..sketching.choose import Sketches, choose
from ..sketching.marks import has_marks
from ..sketching.replace import MarkedStep
from ..torch_state.autocast_state import State, as_torch_reads_it, under_autocast
from .in_flight import BAND, Call, Caller, keep_account, refuse_if_over
from .optimizer_steps import Seen, seen, seen_for
from .plan_notes import notes_on

__all__ = ["Captured", "Piece", "capturing"]


_NUMBER = 4
"""Bytes of a loss in single precision."""

capturing = threading.RLock()
"""Held while a step is captured: one capture at a time in the process."""


class Captured(Exception):  # noqa: N818  # not an error: it ends a capture that must not run
    """Raised through torch's compiler when a plan was all that was wanted."""


@dataclass
class Piece:
    """One captured graph: a whole step, or what lies between two graph breaks.

    `target` names an absent device to plan for; `only_plan` stops before anything runs; `sketches` are
    those that were chosen, where there was a choice. `autocast` is the state that the backward is traced for,
    `beside` the bytes that are set aside for calls in flight.
    """

    options: Options
    target: str | None = None
    only_plan: bool = False
    caller: Caller = field(default_factory=Caller)
    autocast: State = ()
    beside: int = 0
    plan: Plan | None = None
    given: StepInputs = field(default_factory=StepInputs)
    constants: dict[str, Any] = field(default_factory=dict)
    trace: Trace | None = None
    lifted: Lifted | None = None
    expected: tuple[bool, ...] = ()
    tangents: list[torch.Tensor] = field(default_factory=list)
    headroom: int = 0
    casts_inside: bool = False
    sketches: Sketches | None = None
    counted: dict[Seen, int] = field(default_factory=dict)
    misfits: Misfits = field(default_factory=lambda: Misfits.on("cpu"))
    watch: Watch = field(default_factory=Watch)

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The function that runs this piece; it takes and gives what the module does."""
        if not torch.is_grad_enabled():
            return module.forward
        self.given = StepInputs.of(module, inputs)
        mark_regions(module.graph)
        if self.compiled:
            from ..run.inductor.step import CompiledStep

            return self.followed(CompiledStep(self, module, inputs))
        lay_out_calls(module)
        return self.followed(EagerStep(self, module, inputs))

    def compile_eagerly(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The step as AOTAutograd puts it together from the two functions of the eager executor."""
        choices = {"donated_buffer": False, **self.choices}
        with capturing, private("functorch_config").patch(choices), eager_kernels(), keeping_draws():
            run = private("aot_module_simplified")(
                module,
                list(inputs),
                fw_compiler=self.compile_forward,
                bw_compiler=self.compile_backward,
                inference_compiler=self.compile_inference,
                partition_fn=self.partition,
                keep_inference_input_mutations=True,
            )
        self.trace = None
        return run  # type: ignore[no-any-return]

    @property
    def choices(self) -> dict[str, Any]:
        """What AOTAutograd is told of this step."""
        return {"backward_pass_autocast": as_torch_reads_it(self.autocast)}

    def followed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its calls kept account of, and its inputs looked at, until their backward."""

        def call(*args: Any) -> Any:
            if not self.options.allow_breaks:
                refuse_if_over(self.caller, self.plan)
            with first_run_unwatched() if self.casts_inside else nullcontext():
                results = run(*args)
            node = backward_node(results, args)
            if node is not None:
                node.set_materialize_grads(False)  # the backward sees which gradients do not come
                self.follow_up(node, args)
            return results

        return call

    def follow_up(self, node: Any, args: Sequence[Any]) -> None:
        """What is looked at when autograd calls the backward of one call."""
        check = self.watch.after_forward(args)
        if check is not None:
            node.register_prehook(check)
        if self.plan is not None and not self.options.allow_breaks:  # pieces of one call are one
            keep_account(node, Call(self.caller, self.plan, self.autocast, limit(self.options, self.plan)))

    def partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Stands where AOTAutograd asks for a forward and a backward graph."""
        if has_marks(joint.graph):
            marked = MarkedStep(joint, compiled=self.compiled)
            self.become(choose(self, marked, num_fwd_outputs))
        else:
            self.take(joint, num_fwd_outputs)
            self.make_plan()
        if self.only_plan:
            raise Captured
        assert self.trace is not None
        assert self.lifted is not None
        assert self.plan is not None
        pair: Pair = lower(self.trace, self.lifted, self.plan.schedule)
        self.watch = self.watched(pair.backward)
        if self.compiled:
            hand_over_channels_last(pair.forward, len(self.trace.outputs))
        return pair.forward, pair.backward

    def watched(self, backward: fx.GraphModule) -> Watch:
        """The inputs that may not change before the backward.

        Where torch merged some, it is not known which are read; autograd counts the versions of all.
        """
        assert self.trace is not None
        assert self.lifted is not None
        assert self.plan is not None
        names = self.given.names
        tokens = len(self.trace.primals) - len(names)
        if tokens < 0:
            sizes = self.given.storages
            every = [Watched(place, name, again=False) for place, name in enumerate(names) if sizes[place]]
            return Watch(every)
        read = {node.name for node in backward.graph.find_nodes(op="placeholder")}
        again = read_otherwise(self.trace, self.lifted, self.plan.schedule)
        return Watch(
            [
                Watched.of(place, names[place], node.meta["val"], again=node in again)
                for place, node in enumerate(self.trace.primals[tokens:])
                if node.name in read or node in again
            ]
        )

    def become(self, other: Piece) -> None:
        """Be as a copy of this piece that was taken and planned."""
        vars(self).update(vars(other))

    def take(self, joint: fx.GraphModule, forward_outputs: int) -> None:
        """Trace a joint graph, lift it and price it."""
        target = find_device(self.target) if self.target else None
        channels_last = self.compiled and prefers_channels_last(joint, target)
        here = not self.compiled and target is None  # another device, and a compiler, have other kernels
        kernels = KnownKernels(device_of(joint.graph), measured=self.measured) if here else None
        self.trace = make_trace(
            joint,
            forward_outputs=forward_outputs,
            roles=self.given.roles,
            differentiate=self.differentiate,
            accumulating=self.given.accumulating,
            leaves=self.given.leaves,
            weights=self.given.cast_once,
            backward_autocast=self.autocast,
            compiled=self.compiled,
            channels_last=channels_last,
            look=kernels,
        )
        if kernels is not None:
            kernels.save()
        self.given.widen(self.trace.primals)
        self.casts_inside = bool(joint.graph.find_nodes(op="call_function", target=under_autocast))
        names = [str(node.target) for node in joint.graph.find_nodes(op="get_attr")]
        self.constants = {name: getattr(joint, name) for name in names}
        self.misfits.tracker.device = self.trace.device
        self.channels_last = channels_last and self.trace.device.type == "cuda"
        self.expected = tuple(node in self.trace.expected for node in self.trace.tangents)
        self.tangents = [node.meta["val"] for node in self.trace.tangents]
        lifted = lift(self.trace, target)
        lifted = replace(lifted, graph=_with_tangents_that_come(lifted.graph, self.trace))
        # before torch 2.13 compiled code checks the sizes of all of its arguments, and so touches them
        passed_over = not self.compiled or frees_tangents()
        if passed_over and target is None and self.trace.device.type == "cpu":
            lifted = replace(lifted, graph=_without_untouched(lifted.graph, self.trace, lifted.value_of))
        self.lifted = self.priced(fuse(self.trace, lifted) if self.compiled else lifted)

    @property
    def measured(self) -> bool:
        """Whether ops run on the device while the step is planned."""
        return self.options.prices == "measured" and self.target is None

    @property
    def compiled(self) -> bool:
        """Whether the step is compiled into fused kernels."""
        return self.options.executor == "inductor"

    @property
    def differentiate(self) -> str:
        """A scalar that a graph break hands on need not be a loss."""
        return "all" if self.options.allow_breaks else self.options.differentiate

    def priced(self, lifted: Lifted) -> Lifted:
        assert self.trace is not None
        device = self.trace.device
        lifted = price(
            lifted,
            device,
            prices=self.options.prices,
            target=self.target,
            channels_last=self.channels_last,
        )
        present = self.target is None and not self.only_plan
        if present and device.type == "cuda":
            _warm_up(device)
        others = [optimizer for _, optimizer in seen_for(self.given.trained, device)] if present else []
        counted = states(self.options.optimizer, others, device)
        self.counted = {seen(state.optimizer): state.held + state.coming for state in counted}
        bands = fixed_bands(lifted.graph, device, counted, present=present, in_flight=self.beside)
        if self.beside:
            bands[BAND] = self.beside
        outside = self.outside(lifted.graph)
        if outside and isinstance(self.options.outside, str):
            bands["loss"] = 2 * rounded(_NUMBER, device)  # itself and its gradient, until the backward ends
        if self.compiled and self.given.accumulating and device.type == "cpu":
            bands["present gradients"] = sum(self.given.present_gradients())  # autograd adds to them
        return replace(lifted, graph=lifted.graph.replace(fixed=bands, boundary=outside))

    def outside(self, graph: Graph) -> int:
        """Bytes for a loss outside of the step: as asked, or what cross-entropy over the outputs needs."""
        assert self.trace is not None
        if not isinstance(self.options.outside, str):
            return self.options.outside
        wide = {node.name for node in self.trace.expected if node.meta["val"].numel() > 1}
        held = sum(v.bytes for v in graph.values if v.kind == "tangent" and v.name in wide)
        return 0 if self.options.allow_breaks else 2 * held

    def uncounted_state(self) -> int:
        """The bytes of optimizer state that are there now and that the plan does not count."""
        if self.plan is None:
            return 0
        device, total = torch.device(self.plan.graph.device), 0
        for one, optimizer in seen_for(self.given.trained, device):
            before = self.counted.get(one, one.at_first if device.type == "cuda" else 0)
            total += max(0, state_bytes(optimizer, device) - before)
        return total

    def make_plan(self) -> Plan:
        """Plan the step that was taken."""
        assert self.trace is not None
        assert self.lifted is not None
        free = device_blocks(self.trace.device, self.target)
        given, budget = self.options.plan, self.options.budget
        if given is not None and not self.headroom:
            self.plan = follow(given, self.lifted.graph, budget, memory=self.memory(), free=free)
            if not self.compiled or self.only_plan:  # what is compiled is judged by its buffers
                refuse_if_too_large(self.plan, budget)
            return self.plan
        made = plan_graph(
            self.lifted.graph,
            given.budget if given is not None and budget is None else budget,
            method=self.options.method,
            memory=self.memory(),
            free=free,
            headroom=self.headroom,
            notes=tuple(notes_on(self.trace, self.lifted.graph, self.options, self.target, self.sketches)),
        )
        if self.sketches is not None:
            made = replace(made, sketched=self.sketches.layers, trimmed=self.sketches.exact)
        self.plan = made
        return self.plan

    def room(self) -> int | None:
        """The bytes that the step may take; None where the smallest peak is asked for."""
        assert self.lifted is not None
        graph, budget = self.lifted.graph, self.options.budget
        if budget is None:
            return sys.maxsize
        if budget.word == "min":
            return None
        return resolve(budget, graph, simulate(graph, keep_all(graph)).peak, self.memory()) - self.headroom

    def memory(self) -> int | None:
        """What a share of a budget is of, besides the uncapped peak of this very graph."""
        assert self.trace is not None
        found = device_memory(self.trace.device, self.target)
        if found is None and self.sketches is not None and self.sketches.saved:
            budget = self.options.budget
            if budget is not None and budget.share is not None:
                return self.sketches.whole  # with a sketch, too, a share is one of the exact step
        return found

    def compile_forward(self, module: fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        return checked(self.with_constants(module), "forward", self.misfits)

    def compile_backward(self, module: fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        return Backward(self.with_constants(module), self.expected, self.misfits).boxed()

    def with_constants(self, module: fx.GraphModule) -> fx.GraphModule:
        """The module with the captured constants themselves: AOTAutograd hands over copies."""
        for node in module.graph.find_nodes(op="get_attr"):
            setattr(module, str(node.target), self.constants[str(node.target)])
        return module

    def compile_inference(self, module: fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        self.refuse_inference()
        return compile_graph(module, "forward")

    def refuse_inference(self) -> None:
        """A step without a backward has nothing to plan; a piece between graph breaks may have none."""
        if self.only_plan or not self.options.allow_breaks:
            raise NothingToTrain(
                "no output of the step depends on a parameter or input that requires a gradient: there is no "
                "backward to plan. Is every parameter frozen, or the result detached? "
                "Call it under torch.no_grad() or in eval mode to run it plainly."
            )


def _with_tangents_that_come(graph: Graph, trace: Trace) -> Graph:
    """The graph where tangents that do not come take nothing, and some are held until the backward ends.

    `loss.backward()` itself holds the gradient of a scalar; before torch 2.13 the engine holds all of them.
    """
    every = not frees_tangents()
    held = {node.name: every or node.meta["val"].numel() == 1 for node in trace.expected}

    def known(value: Value) -> Value:
        if value.kind != "tangent":
            return value
        come = value.name in held
        return replace(value, bytes=value.bytes if come else 0, held=come and held[value.name])

    return graph.replace(values=tuple(map(known, graph.values)))


def _without_untouched(graph: Graph, trace: Trace, value_of: dict[fx.Node, str]) -> Graph:
    """The graph where inputs that the step never touches take nothing, as in what is measured on the CPU.

    A mask that a causal hint makes needless is one, and so are the weights of a head whose output is not in
    the loss. A GPU's allocator holds them whoever reads them.
    """
    results = {value_of.get(node) for node in (*trace.outputs, *trace.gradients) if isinstance(node, fx.Node)}
    touched = results | {name for op in graph.ops for name in op.reads}

    def known(value: Value) -> Value:
        untouched = value.kind in ("parameter", "buffer", "input") and value.name not in touched
        return replace(value, bytes=0) if untouched else value

    return graph.replace(values=tuple(map(known, graph.values)))


def backward_node(results: Any, args: Sequence[Any]) -> Any:
    """Autograd's node for the step; None where no result needs a gradient.

    From a result that is a view of an input one gets to the node of what made that input, which is another.
    """
    for result in results if isinstance(results, list | tuple) else [results]:
        node: Any = result.grad_fn if isinstance(result, torch.Tensor) else None
        for _ in range(4):
            if hasattr(node, "set_materialize_grads"):
                if not any(isinstance(arg, torch.Tensor) and arg.grad_fn is node for arg in args):
                    return node
                break
            node = node.next_functions[0][0] if node is not None and node.next_functions else None
    return None


def _warm_up(device: torch.device) -> None:
    """Let cuBLAS take its workspaces, in this thread and in autograd's, before memory is read.

    While torch captures a step, tensors are fake and autograd has no thread of its own, unless asked for.
    """
    real, threads = private("without_modes")(), torch.autograd.set_multithreading_enabled(True)
    with real, threads, torch.enable_grad():
        for dtype in (torch.float32, torch.bfloat16):
            weight = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
            torch.addmm(weight[0], torch.mm(weight, weight), weight).sum().backward()
    torch.cuda.synchronize(device)
