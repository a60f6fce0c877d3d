"""What a plan says beside its figures: what it counts on, and what would let it do better."""

from __future__ import annotations

from collections.abc import Iterator

from ..capture.trace import Trace
from ..devices.table import NODE, find_device
from ..planner.per_block import per_block_schedule
from ..plans.graph import Graph
from ..plans.keep_all import keep_all
from ..plans.planned_step import Plan
from ..plans.simulator import simulate
from ..stages import Asked
from ..units import format_bytes
from .returned import observes

__all__ = ["notes_on", "notes_on_ranks"]

WORTH_A_WORD = 0.05
"""Outputs beside the loss are spoken of from this share of the uncapped peak on."""


def notes_on(trace: Trace, graph: Graph, asked: Asked) -> Iterator[str]:
    """The notes of a plan for a captured step."""
    if (size := _returned_beside_loss(trace, graph)) > 0:
        yield f"the model returns {format_bytes(size)} beside its loss, which count as held {_until(asked)}"
    if "loss" in graph.fixed:
        yield (
            "the loss is computed outside of the captured step: the prediction sets bytes aside for it "
            "but does not know it (put it inside, or name its bytes with outside=)"
        )
    if asked.target is not None:
        yield (
            f"planned for {asked.target} from a trace on {trace.device}: attention and normalisation appear "
            "as they run here"
        )
    if asked.options.allow_breaks:
        yield "the step may have graph breaks: the promise covers each captured piece by itself"
    if asked.sketched is not None:
        yield asked.sketched.words
    if asked.split is not None and asked.options.split:
        yield asked.split.words
    if trace.updated:
        yield _on_updates(trace, graph, asked)


def _on_updates(trace: Trace, graph: Graph, asked: Asked) -> str:
    """What is updated inside of the backward, and what is not there afterwards."""
    used = {value for op in graph.ops if op.updates for value in op.reads}
    size = format_bytes(sum(graph.value[name].bytes for name in used))
    left = [place for place in sorted(asked.inputs.leaves) if place not in trace.updated]
    left = [place for place in left if trace.roles[place] == "parameter" and trace.gradients[place]]
    others = f"; {len(left)} others are left to optimizer.step()" if left else ""
    return (
        f"{len(trace.updated)} parameters are updated inside of the backward{others}: their {size} of "
        "gradients are never there at once, and .grad is None afterwards. Clipping by the norm of all "
        "gradients (clip_grad_norm_) finds none"
    )


def notes_on_ranks(plan: Plan, ranks: int, target: str | None) -> Iterator[str]:
    """What a plan for one rank of many counts on, and what is done by hand comes to on the same simulator."""
    device = find_device(target or "cpu")
    yield (
        f"the plan of one of {ranks} ranks that share parameters, gradients and optimizer state: collectives "
        f"are priced at {device.link / 1e9:.0f} GB/s between the {NODE} devices of a node and "
        f"{device.network / 1e9:.0f} GB/s per device between nodes, as if none overlapped with computing"
    )
    schedule = per_block_schedule(plan.graph)
    if schedule is not None:
        by_hand = simulate(plan.graph, schedule)
        yield (
            f"checkpointing every block, parameters gathered again: peak {format_bytes(by_hand.peak)}, "
            f"{by_hand.extra:+.1%} time on the same simulator"
        )


def _until(asked: Asked) -> str:
    """How long outputs count as held where they do, and what would change it."""
    if asked.only_plan and not asked.compiled:
        return 'until the backward ends; outputs="free" plans for a caller who lets go of them before it'
    if observes(asked.options):
        return "until the first backward shows who holds them"
    return "until the backward ends; cap a function that returns the loss alone, and the plan can use them"


def _returned_beside_loss(trace: Trace, graph: Graph) -> int:
    """The bytes of outputs where some get no gradient, if that is worth a word."""
    if len(trace.expected) == len(trace.tangents):
        return 0
    size = sum(value.bytes for value in graph.values if value.kind == "output")
    return size if size > WORTH_A_WORD * simulate(graph, keep_all(graph)).peak else 0
