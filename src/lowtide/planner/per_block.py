"""Checkpointing every block, as people do by hand with `torch.utils.checkpoint`, as a schedule.

The blocks are the members of module lists (`blocks.0`, `net.4`, `layer.11`) at the outermost level at which a
list has two of them or more; all such lists of that level count, as an encoder's and a decoder's. A member
with a single op (a convolution between blocks, say) is no block. What enters a block is kept, and so is what
the rest of the forward reads of it. What lies inside is dropped; right before the backward first needs some
of it, the block is recomputed, from its first op to the last whose result its own backward reads: all of
them, also what was kept (a final ReLU), the last block too, each block once. Nothing else is recomputed, and
an op that may run only once does not.

Ops belong to a block by their module path. Where the backward's ops have none, a block's own backward is
known only by its reading what lies inside.

A few passes over the ops: O(ops + reads + writes).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from ..errors import LowtideError
from ..plans.graph import Graph
from ..plans.order import first_order, with_drops
from ..plans.schedule import Schedule

__all__ = ["find_blocks", "per_block_schedule"]


def per_block_schedule(graph: Graph, *, pattern: str | None = None) -> Schedule | None:
    r"""The schedule in which each block is recomputed before its backward; None where there are no blocks.

    `pattern` is a regular expression for the beginning of a module path, as in `net\.\d+`: what it matches of
    an op's path is the name of its block.
    """
    forward, backward = first_order(graph)
    blocks = find_blocks(graph, pattern=pattern)
    if not blocks:
        return None
    block_of = {name: block for block, names in blocks.items() for name in names}
    inside = _inside(graph, forward, block_of)
    needs = [_needs(graph, name, block_of, inside) for name in backward]
    needed = set().union(*needs)
    order: list[str] = []
    done: set[str] = set()
    for name, values in zip(backward, needs, strict=True):
        for block in dict.fromkeys(block_of[graph.writer[value].name] for value in sorted(values)):
            order.extend(_again(graph, blocks[block], needed) if block not in done else ())
            done.add(block)
        order.append(name)
    return replace(with_drops(graph, forward, order), in_place=graph.plain_in_place)


def find_blocks(graph: Graph, *, pattern: str | None = None) -> dict[str, list[str]]:
    """The forward's ops of each block, in order, by the block's module path; those that may run twice."""
    forward = [graph.op[name] for name in first_order(graph)[0]]
    paths = {op.name: op.module for op in forward if op.kind != "pinned"}
    if pattern is not None:
        return _matching(paths, pattern)
    members: dict[str, list[str]] = defaultdict(list)
    for name, path in paths.items():
        for member in _members(path):
            members[member].append(name)
    lists: dict[str, list[str]] = defaultdict(list)
    for member, names in members.items():
        if len(names) > 1:
            lists[member.rpartition(".")[0]].append(member)
    repeated = {path: found for path, found in lists.items() if len(found) > 1}
    level = min(map(_depth, repeated), default=0)
    outermost = [found for path, found in repeated.items() if _depth(path) == level]
    return {member: members[member] for found in outermost for member in found}


def _matching(paths: dict[str, str], pattern: str) -> dict[str, list[str]]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise LowtideError(f"the pattern {pattern!r} is no regular expression: {error}") from error
    blocks: dict[str, list[str]] = defaultdict(list)
    for name, path in paths.items():
        if match := expression.match(path):
            blocks[match.group()].append(name)
    return dict(blocks)


def _members(path: str) -> Iterator[str]:
    """The members of lists that a module path goes through: `a.0` and `a.0.b.1` of `a.0.b.1.c`."""
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            yield ".".join(parts[: index + 1])


def _depth(path: str) -> int:
    """How many lists a list lies in."""
    return sum(part.isdigit() for part in path.split("."))


def _inside(graph: Graph, forward: list[str], block_of: dict[str, str]) -> dict[str, str]:
    """The block of each value that is dropped: written in it, and read by no forward op outside of it."""
    inside = {
        value: block
        for name, block in block_of.items()
        for value in graph.op[name].writes
        if graph.value[value].droppable
    }
    for name in forward:
        for value in graph.op[name].reads:
            if value in inside and inside[value] != block_of.get(name):
                del inside[value]
    return inside


def _needs(graph: Graph, name: str, block_of: dict[str, str], inside: dict[str, str]) -> set[str]:
    """What an op of the backward waits for: of its own block all that it reads, of others the inside."""
    op = graph.op[name]
    needs = set(inside.keys() & op.reads)
    for value in op.reads:
        writer = graph.writer.get(value)
        block = block_of.get(writer.name) if writer else None
        if block is not None and f"{op.module}.".startswith(f"{block}.") and graph.value[value].droppable:
            needs.add(value)
    return needs


def _again(graph: Graph, ops: list[str], needed: set[str]) -> list[str]:
    """The ops of a block up to the last that writes something needed."""
    last = max(index for index, name in enumerate(ops) if needed.intersection(graph.op[name].writes))
    return ops[: last + 1]
