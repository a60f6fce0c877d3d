"""One schedule on all ranks of a step with collectives.

A collective that one rank runs and another does not never ends. So where a step has collectives its ranks
compare what they were asked and what they captured; the prices are the slowest rank's, the bytes beside the
step the most that any has; the first rank plans, and all run that schedule. Where they differ, every rank
raises `RanksDiffer` and says in what.

Parameters whose shards are not of one size give graphs that differ a little. Such ranks plan each by itself:
no collective is recomputed then, and all stay in the order of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from .. import errors
from .._torch import in_process_group, private
from ..capture.fx_nodes import tensors_of
from ..capture.op_signature import signature
from ..capture.rewrites.collectives import group_of, is_collective, operator_of, waited
from ..devices.memory import DeviceMemory
from ..errors import BudgetTooSmall, LowtideError, RanksDiffer
from ..plans.graph import Graph, Op, Value
from ..plans.planned_step import Plan, make_plan
from ..plans.schedule import Schedule
from ..prices.measured import collective_seconds
from ..stages import Priced
from .meeting import Meeting, shown

__all__ = ["Agreement", "agree"]


@dataclass(frozen=True)
class Agreement:
    """What the ranks of a step agreed on: its prices, and who plans.

    Where they plan `apart`, each has a graph of its own. `total` and `free` are the least memory of any.
    """

    meeting: Meeting
    priced: Priced
    apart: bool
    total: int | None
    free: int | None

    def memory(self, device: DeviceMemory) -> DeviceMemory:
        """The memory that every rank has."""
        if self.free is None:
            return replace(device, total=self.total)
        least = self.free
        return replace(device, total=self.total, free=lambda: least)

    def plan(self, make: Callable[[], Plan]) -> Plan:
        """The plan that the first rank makes; where ranks plan apart, that of each, if all have one."""
        return self.each_plan(make) if self.apart else self.one_plan(make)

    def one_plan(self, make: Callable[[], Plan]) -> Plan:
        made, trouble = _tried(make) if self.meeting.leads else (None, None)
        said = self.meeting.from_first(_written(made, trouble))
        if made is not None:
            return made
        _raise(trouble, said["error"])
        graph = self.priced.lifted.graph.replace(fixed=said["fixed"])
        plan = make_plan(
            graph,
            Schedule.from_dict(said["schedule"]),
            method=said["method"],
            budget=said["budget"],
            notes=tuple(said["notes"]),
        )
        sketched, trimmed = tuple(said["sketched"]), tuple(said["trimmed"])
        return replace(plan, smallest=said["smallest"], sketched=sketched, trimmed=trimmed)

    def each_plan(self, make: Callable[[], Plan]) -> Plan:
        made, trouble = _tried(make)
        heard = self.meeting.to_first(_failure(trouble))
        said = self.meeting.from_first(next((each for each in heard if each is not None), None))
        _raise(trouble, said)
        assert made is not None
        note = (
            f"the shards of the ranks {shown(self.meeting.ranks)} are not of one size: each plans by itself, "
            "and no all-gather is recomputed"
        )
        return replace(made, notes=(*made.notes, note))

    def any_rank(self, here: bool) -> bool:
        """Whether something is so on any rank."""
        return bool(self.meeting.from_first(any(self.meeting.to_first(here))))


def agree(priced: Priced, device: DeviceMemory) -> Agreement | None:
    """What the ranks of a step agree on; None where it has no collective, or nothing runs."""
    asked, trace = priced.captured.asked, priced.captured.trace
    calls = [node for node in trace.graph.nodes if node.op == "call_function" and is_collective(node)]
    runs = not asked.only_plan and asked.target is None and in_process_group()
    if not calls or not runs or torch.distributed.get_backend() == "fake":
        return None
    meeting = Meeting(_members(calls, trace.primals), asked.attempt)
    records = meeting.to_first(_record(priced, device, calls))
    said = meeting.from_first(_verdict(records, meeting.ranks))
    if said["differ"]:
        raise RanksDiffer(said["differ"])
    if said["apart"]:
        lifted = priced.lifted
        priced = replace(priced, lifted=replace(lifted, graph=_in_order(lifted.graph, calls)))
    else:
        priced = _slowest(priced, said, len(meeting.ranks))
        if asked.measured:
            priced = _measured(priced, meeting)
    return Agreement(meeting, priced, said["apart"], said["total"], said["free"])


def _members(calls: Sequence[fx.Node], primals: Sequence[fx.Node]) -> tuple[int, ...]:
    """The ranks that must run the same schedule: those of one group or mesh that has all others, else all."""
    world = tuple(range(torch.distributed.get_world_size()))
    names = {group_of(node) for node in calls}
    if None in names:
        return world
    groups = [set(torch.distributed.get_process_group_ranks(private("process_group")(n))) for n in names]
    every = {rank for group in groups for rank in group}
    around = [found for found in groups if found >= every]
    around = around or [found for found in _meshes(primals) if found >= every]
    # With two groups neither of which has the other, as the rows and columns of a mesh, a rank's own are not
    # all that depend on it.
    return min((tuple(sorted(found)) for found in around), key=len, default=world)


def _meshes(primals: Sequence[fx.Node]) -> list[set[int]]:
    """The ranks of the meshes that the step's DTensors are on."""
    objects = [getattr(node.meta.get("val"), "real_obj", None) for node in primals]
    meshes = [each for each in objects if isinstance(each, DeviceMesh)]
    with private("without_modes")():
        return [set(mesh.mesh.flatten().tolist()) for mesh in meshes]


def _record(priced: Priced, device: DeviceMemory, calls: Sequence[fx.Node]) -> dict[str, Any]:
    """What a rank says of its step: what must be the same, and what is reduced."""
    asked, graph = priced.captured.asked, priced.lifted.graph
    inputs, options = asked.inputs, asked.options
    named = list(zip(inputs.names, inputs.shapes, inputs.roles, strict=True))
    free = (
        device.free()
        if device.free is not None and options.budget and options.budget.word == "free"
        else None
    )
    return {
        "budget": None if options.budget is None else str(options.budget),
        "options": {
            **{name: getattr(options, name) for name in ("executor", "method", "prices", "differentiate")},
            "outside": options.outside,
            "plan": None if options.plan is None else options.plan.graph.fingerprint[:12],
            "headroom": asked.headroom,
        },
        "inputs": [f"{name} {shape}" for name, shape, role in named if role == "input"],
        "parameters": [f"{name} {shape}" for name, shape, role in named if role != "input"],
        "collectives": [_described(node) for node in calls],
        "shards": [_shapes(node) for node in priced.captured.trace.primals],
        "ops": [f"{op.target} at {op.where}" for op in graph.ops],
        "graph": graph.fingerprint,
        "seconds": [op.seconds for op in graph.ops],
        "workspace": [op.workspace for op in graph.ops],
        "fixed": graph.fixed,
        "boundary": graph.boundary,
        "total": device.total,
        "free": free,
    }


def _described(node: fx.Node) -> str:
    name = group_of(node)
    size = None if name is None else private("process_group")(name).size()
    return f"{operator_of(node)} of {_shapes(node)} over {size} ranks"


def _shapes(node: fx.Node) -> str:
    return " ".join(str(list(tensor.shape)) for tensor in tensors_of(node))


_MUST_AGREE = {
    "budget": "the budget",
    "options": "the options",
    "inputs": "the inputs of the step",
    "parameters": "the parameters",
    "collectives": "the collectives of the step",
}
"""What must be the same on all ranks, in words."""


def _verdict(records: list[dict[str, Any]], ranks: Sequence[int]) -> dict[str, Any]:
    """What the first rank makes of what all have said; on the others there is nothing to make."""
    if not records:
        return {}
    trouble = next((found for name in _MUST_AGREE if (found := _difference(name, records, ranks))), None)
    alike = len({record["graph"] for record in records}) == 1
    shards = len({str(record["shards"]) for record in records}) > 1
    if trouble is None and not alike and not shards:
        trouble = _difference("ops", records, ranks) or "the values of their steps differ in bytes"
    sizes = {name: [record[name] for record in records] for name in ("total", "free")}
    said: dict[str, Any] = {
        "differ": trouble and _told(trouble, ranks),
        "apart": not alike,
        **{name: None if None in each else min(each) for name, each in sizes.items()},
    }
    if alike:
        for name in ("seconds", "workspace"):
            said[name] = list(map(max, zip(*(record[name] for record in records), strict=True)))
        bands = {name: None for record in records for name in record["fixed"]}
        said["fixed"] = {name: max(record["fixed"].get(name, 0) for record in records) for name in bands}
        said["boundary"] = max(record["boundary"] for record in records)
    return said


def _difference(name: str, records: list[dict[str, Any]], ranks: Sequence[int]) -> str | None:
    """In what the ranks differ, and which; the first thing that they differ in."""
    first = records[0][name]
    others = [
        (rank, record[name]) for rank, record in zip(ranks, records, strict=True) if record[name] != first
    ]
    if not others:
        return None
    mine, theirs = _first_difference(first, others[0][1])
    which = [rank for rank, said in others if said == others[0][1]]
    words = _MUST_AGREE.get(name, "the ops of the step")
    one = "rank" if len(which) == 1 else "ranks"
    return f"they differ in {words}: {theirs} on {one} {shown(which)}, {mine} on rank {ranks[0]}"


def _first_difference(left: Any, right: Any) -> tuple[str, str]:
    """The first items of two lists, or entries of two tables, that differ."""
    if isinstance(left, dict):
        name = next(name for name in left if left[name] != right[name])
        return f"{name}={left[name]!r}", f"{name}={right[name]!r}"
    if isinstance(left, list):
        length = max(len(left), len(right))
        pairs = zip(*(each + ["nothing"] * (length - len(each)) for each in (left, right)), strict=True)
        return next((one, other) for one, other in pairs if one != other)
    return str(left), str(right)


def _told(trouble: str, ranks: Sequence[int]) -> str:
    return (
        f"the ranks {shown(ranks)} run one step with collectives and must run one schedule, but {trouble}. "
        "Call the same model on every rank with the same budget, options and shapes (pad the batches to one "
        "length, or drop the last one)"
    )


def _slowest(priced: Priced, said: dict[str, Any], ranks: int) -> Priced:
    """The step with the prices and the bytes beside it that are right for every rank."""
    lifted = priced.lifted
    costs = zip(lifted.graph.ops, said["seconds"], said["workspace"], strict=True)
    ops = tuple(replace(op, seconds=seconds, workspace=workspace) for op, seconds, workspace in costs)
    prices = f"{lifted.graph.prices}, the slowest of {ranks} ranks"
    graph = lifted.graph.replace(ops=ops, fixed=said["fixed"], boundary=said["boundary"], prices=prices)
    return replace(priced, lifted=replace(lifted, graph=graph))


def _measured(priced: Priced, meeting: Meeting) -> Priced:
    """The step with the seconds of its collectives, which all ranks run together now."""
    lifted, device = priced.lifted, priced.captured.trace.device
    nodes = {op.name: lifted.node_of[op.name] for op in lifted.graph.ops}
    nodes = {name: node for name, node in nodes.items() if node.target is waited}
    kinds = {signature(node): node for node in nodes.values()}
    found = [collective_seconds(node, device) for node in kinds.values()]
    heard = meeting.to_first(found)
    slowest = meeting.from_first([max(each) for each in zip(*heard, strict=True)])
    seconds = dict(zip(kinds, slowest, strict=True))

    def known(op: Op) -> Op:
        return replace(op, seconds=seconds[signature(nodes[op.name])]) if op.name in nodes else op

    graph = lifted.graph.replace(ops=tuple(map(known, lifted.graph.ops)))
    return replace(priced, lifted=replace(lifted, graph=graph))


def _in_order(graph: Graph, calls: Sequence[fx.Node]) -> Graph:
    """The graph in which collectives run once each, one after the other: a value without bytes leads on."""
    names = {node.name for node in calls}
    before: tuple[str, ...] = ()
    ops: list[Op] = []
    tokens: list[Value] = []
    for op in graph.ops:
        if op.name in names:
            token = Value(f"after.{op.name}", 0)
            tokens.append(token)
            op = replace(op, kind="pinned", reads=(*op.reads, *before), writes=(*op.writes, token.name))
            before = (token.name,)
        ops.append(op)
    return graph.replace(ops=tuple(ops), values=(*graph.values, *tokens))


def _tried(make: Callable[[], Plan]) -> tuple[Plan | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error


_SAID = ("method", "budget", "smallest", "notes", "sketched", "trimmed")
"""Of a plan, besides its schedule and what is beside the step."""


def _written(made: Plan | None, trouble: Exception | None) -> dict[str, Any]:
    said: dict[str, Any] = {"error": _failure(trouble)}
    if made is not None:
        said |= {name: getattr(made, name) for name in _SAID}
        said |= {"fixed": made.graph.fixed, "schedule": made.schedule.to_dict()}
    return said


def _failure(error: Exception | None) -> dict[str, Any] | None:
    if error is None:
        return None
    said: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
    if isinstance(error, BudgetTooSmall):
        said |= {"budget": error.budget, "smallest": error.smallest, "parts": error.parts}
    return said


def _raise(trouble: Exception | None, said: dict[str, Any] | None) -> None:
    """Raise the error of this rank, else that of another one as it was there."""
    if trouble is not None:
        raise trouble
    if said is None:
        return
    if said["kind"] == "BudgetTooSmall":
        raise BudgetTooSmall(
            said["message"], budget=said["budget"], smallest=said["smallest"], parts=said["parts"]
        )
    kind = getattr(errors, said["kind"], None)
    if isinstance(kind, type) and issubclass(kind, LowtideError):
        raise kind(said["message"])
    raise RanksDiffer(f"another rank could not plan this step: {said['kind']}: {said['message']}")
