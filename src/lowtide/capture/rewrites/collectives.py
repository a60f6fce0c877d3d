"""Collectives: each with its wait as one op, so that nothing comes between the two.

torch's functional collectives return at once, and `wait_tensor` gives the same storage back when it is
filled. Until then the operator still holds what it reads: only the pair has bytes and seconds that a plan can
count on. What is merely moved between ranks (an all-gather of sharded parameters, say) is the same however
often it is moved, so it may be recomputed, as long as all ranks do so in the same order. A reduction runs
once: its sums need not come out in the same order again.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import fx

from ..._torch import holders, in_process_group, private, private_of

__all__ = [
    "group_of",
    "group_size",
    "is_all_reduce",
    "is_collective",
    "is_wait",
    "is_waiting",
    "join_waits",
    "moves_only",
    "operator_of",
    "share_waited",
    "waited",
]

_NAMESPACES = ("_c10d_functional", "c10d_functional", "_dtensor", "symm_mem")
_MOVES = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_to_all_single",
    "shard_dim_alltoall",
)
_IN_FLIGHT = ("_c10d_functional", "c10d_functional")


def waited(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """What a collective returns, when it is there and nobody else holds it any more."""
    wait = private("wait_tensor")
    read = [(tensor, holders(tensor)) for tensor in private("tree_leaves")(args) if _on_host(tensor)]
    # Autograd's part of these operators is in Python, and waits without letting other threads run Python: the
    # one that a collective waits for may want to, under a dispatch mode.
    with private("below_autograd")():
        result = operator(*args, **kwargs)
        made = [wait(each) for each in result] if isinstance(result, list | tuple) else wait(result)
    if read and not _held_for_good:
        _let_go([*read, *((tensor, _alone()) for tensor in private("tree_leaves")(made))])
    return made


_MOST_SECONDS = 2.0
"""How long a collective waits to be let go of; in 600 of them on a busy host 0.02 was the longest."""

_held_for_good: list[float] = []
"""Filled when somebody held on for longer, a profiler say: from then on nobody waits."""


@functools.cache
def _alone() -> tuple[int, int]:
    return holders(torch.empty(1))


def _on_host(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.device.type == "cpu"


def _let_go(tensors: list[tuple[torch.Tensor, tuple[int, int]]]) -> None:
    """Wait until the thread that ran a collective on the host has let go of its tensors.

    It does so a moment after it has said that they are filled: a value that a plan drops meanwhile would
    stay for as long.
    """
    start = time.perf_counter()
    for tensor, before in tensors:
        while any(now > then for now, then in zip(holders(tensor), before, strict=True)):
            if time.perf_counter() - start > _MOST_SECONDS:
                _held_for_good.append(_MOST_SECONDS)
                return
            time.sleep(0)


def operator_of(node: fx.Node) -> Any:
    """The operator that a node calls; of a collective with its wait, the collective."""
    return node.args[0] if node.target is waited else node.target


def is_collective(node: fx.Node) -> bool:
    """Whether ranks work together in a node; a wait is none."""
    return getattr(operator_of(node), "namespace", "") in _NAMESPACES and not is_wait(node)


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return is_waiting(node.target)


def is_waiting(operator: Any) -> bool:
    """Whether an operator waits for a collective."""
    return getattr(operator, "namespace", "") in _IN_FLIGHT and _name(operator) == "wait_tensor"


def moves_only(node: fx.Node) -> bool:
    """Whether a collective gives every rank the same bits however often it runs."""
    return is_collective(node) and _name(operator_of(node)) in _MOVES


def group_of(node: fx.Node) -> str | None:
    """The name of the process group that a collective runs in."""
    schema = private_of(operator_of(node), "schema")
    names = [argument.name for argument in schema.arguments]
    args = node.args[1:] if node.target is waited else node.args
    given = {**dict(zip(names, args, strict=False)), **node.kwargs}
    found = given.get("group_name")
    return found if isinstance(found, str) else None


def group_size(node: fx.Node) -> int:
    """How many ranks a collective runs on; all of them where its group is not known."""
    name = group_of(node)
    if name is not None:
        return int(private("process_group")(name).size())
    return torch.distributed.get_world_size() if in_process_group() else 1


def is_all_reduce(node: fx.Node) -> bool:
    """Whether a collective gives every rank the sum of all."""
    return _name(operator_of(node)).startswith("all_reduce")


def join_waits(graph: fx.Graph) -> None:
    """Write each collective with its waits as one node."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_collective(node) or node.target.namespace not in _IN_FLIGHT:
            continue
        results = [user for user in node.users if user.op == "call_function" and not is_wait(user)]
        waits = [wait for each in (node, *results) for wait in each.users if is_wait(wait)]
        if not waits:
            continue  # somebody waits outside of the step
        node.args, node.target = (node.target, *node.args), waited
        for wait in waits:
            wait.replace_all_uses_with(wait.args[0])  # type: ignore[arg-type]
            graph.erase_node(wait)


def share_waited(graph: fx.Graph) -> None:
    """Let the fake tensor of a wait be the one that it waits for: tracing makes another of it."""
    from .common import look_anew

    for node in graph.nodes:
        source: Any = node.args[0] if is_wait(node) else None
        if source is not None and isinstance(source.meta.get("val"), torch.Tensor):
            old, node.meta["val"] = node.meta["val"], source.meta["val"]
            for user in node.users:
                look_anew(user, old)


def _name(operator: Any) -> str:
    return str(private_of(operator, "schema").name).rpartition("::")[2] if _is_operator(operator) else ""


def _is_operator(operator: Any) -> bool:
    return isinstance(operator, private("OpOverload"))
