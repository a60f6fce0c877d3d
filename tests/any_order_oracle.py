"""The exact optimum of tiny graphs over all orders of runs, by Dijkstra; and such graphs."""

from __future__ import annotations

import heapq
from itertools import count
from random import Random

from graphs import Step, with_takes
from lowtide.plans.graph import GIVEN_KINDS, VALUE_KINDS, Graph, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate


def best_in_any_order(graph: Graph, budget: int) -> float | None:
    """The least seconds of any schedule under the budget, or None when there is none.

    Dijkstra over (whether the backward began, ops that ran, values that are there), sets as bits. An op does
    not run while all it writes is there. Saved random states are not modelled: use graphs without them.
    """
    bit = {value.name: 1 << index for index, value in enumerate(graph.values)}
    ran_bit = {op.name: 1 << index for index, op in enumerate(graph.ops)}
    kinds = {k: sum(bit[v.name] for v in graph.values if v.kind == k) for k in VALUE_KINDS}
    given = sum(kinds[kind] for kind in GIVEN_KINDS)
    loose = [(bit[v.name], v.bytes) for v in graph.values if v.droppable]
    pinned = sum(ran_bit[op.name] for op in graph.ops if op.kind == "pinned")
    size = {name: value.bytes for name, value in graph.value.items()}
    ops = [
        (op, ran_bit[op.name], sum(bit[n] for n in op.reads), [(bit[n], size[n]) for n in op.writes])
        for op in graph.ops
    ]
    tangents = sum(v.bytes for v in graph.values if v.kind == "tangent")
    base = graph.fixed_bytes + sum(v.bytes for v in graph.values if v.kind in GIVEN_KINDS)
    ties = count()
    heap = [(0.0, next(ties), (False, 0, given), base)]
    seen = set()
    while heap:
        seconds, _, state, level = heapq.heappop(heap)
        if state in seen:
            continue
        seen.add(state)
        backward, ran, there = state
        if backward and not kinds["gradient"] & ~there and not pinned & ~ran:
            return seconds
        moves = [(0.0, (backward, ran, there & ~b), level - n) for b, n in loose if there & b]
        if not backward and not kinds["output"] & ~there and level + graph.boundary + tangents <= budget:
            moves.append((0.0, (True, ran, there | kinds["tangent"]), level + tangents))
        for op, done, reads, writes in ops:
            barred = (op.phase == "backward" and not backward) or (op.kind == "pinned" and ran & done)
            fresh = [(b, n) for b, n in writes if not there & b]
            need = level + op.workspace + sum(n for _, n in writes)
            if barred or reads & ~there or (writes and not fresh):
                continue
            after, now = level + sum(n for _, n in fresh), there | sum(b for b, _ in fresh)
            if need <= budget:
                moves.append((op.seconds, (backward, ran | done, now), after))
            for name in op.takes:
                if need - size[name] <= budget:
                    left = now & ~bit[name]
                    moves.append((op.seconds, (backward, ran | done, left), after - size[name]))
        for cost, new, bytes_then in moves:
            if new not in seen:
                heapq.heappush(heap, (seconds + cost, next(ties), new, bytes_then))
    return None


def tiny_graph(seed: int) -> Graph:
    """A few ops of all kinds but random ones, with a narrow end: there is something to run again."""
    rng = Random(seed)
    step = Step()
    pool = [step.value("x", rng.randint(0, 2), "input")]
    for i in range(rng.randint(3, 4)):
        reads = list(dict.fromkeys([pool[-1], rng.choice(pool)]))
        if i == 0 or rng.random() < 0.2:
            reads.append(step.value(f"w{i}", rng.randint(0, 1), "parameter"))
        kind = rng.choice(["pure"] * 7 + ["pinned"])
        sizes = [rng.randint(1, 5), *([rng.randint(0, 2)] if rng.random() < 0.25 else [])]
        more = {"kind": kind, "workspace": rng.choice([0, 0, 0, 1])}
        writes = step.op(f"f{i}", reads, sizes, rng.choice([0.0, 1.0, 2.0, 5.0]), **more)
        pool.append(writes[0])
        if rng.random() < 0.1:
            step.values[-1] = Value(writes[-1], sizes[-1], "activation", held=True)
    (last,) = step.op("loss", [pool[-1]], [1], 1.0)
    needs = {op.name: [n for n in (*op.reads, *op.writes) if rng.random() < 0.5] for op in step.ops}
    graph = step.graph(last, needs=needs)
    return graph.replace(fixed={"other": rng.randint(0, 3)}, boundary=rng.choice([0, 0, 1]))


def tiny_cases(count):
    """Seeds, tiny graphs, budgets below their peaks, and the least seconds in any order, if any fits."""
    for seed in range(count):
        graph = with_takes(tiny_graph(seed), seed) if seed % 2 else tiny_graph(seed)
        top = simulate(graph, keep_all(graph)).peak
        for share in (95, 88, 80, 72):
            budget = top * share // 100
            yield seed, graph, budget, best_in_any_order(graph, budget)
