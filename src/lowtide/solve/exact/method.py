"""The optimum of small graphs, over all orders of runs or by a mixed-integer linear programme.

Problem: of all schedules under a budget, find a fastest one and prove that there is no faster one.

Method: graphs of up to `FREE` ops are searched over all orders (see `search.any_order`), as far as the time
goes; most end within a second. For all others, and where that search does not end: the programme of `model`,
which is that of Checkmate (Jain et al. 2020) with the simulator's rules, solved by branch and bound with
HiGHS. The search starts from what `auto` finds, and ends there if `bound` proves that to be the fastest in
any order. The bytes of a row are divided by their greatest common divisor. What HiGHS hands back is replayed
by the simulator: if its seconds or its peak are not what HiGHS claims, that is an error and no result.

The programme's optimum is over schedules whose first runs are in program order or in the order of `auto`'s
plan, and in which an op runs at most once between two first runs. A bound for all orders is in `bound`.

Complexity: exponential at worst. On one core, graphs of about 60 ops take seconds.

Limits: needs `highspy` (`pip install "lowtide[exact]"`). When time runs out, the best schedule so far comes
back with `optimal` false; so does the start itself for graphs of more than some 200 ops, with what `bound`
proves. The same input gives the same plan as long as time does not run out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import LowtideError
from ...plans.graph import Graph
from ...plans.order import first_order, with_drops
from ...plans.patience import seconds_left
from ...plans.schedule import Run, Schedule
from ...plans.simulator import simulate
from ..auto import auto
from ..bound.tightest import bound_at_moments
from ..search.any_order import AnyOrder
from ..search.tape import Facts
from .model import Row, Stages, too_large

__all__ = ["Exact", "exact", "solve_exact"]

UNITS = 1000.0
"""Running everything once, in HiGHS's objective."""

TOLERANCE = 1e-6
"""How far HiGHS's seconds may be from the simulator's, as a share of running everything once."""

ROUNDING = 1e-9
"""How much of a sum of seconds may be due to rounding."""

FREE = 40
"""Ops of a graph that is searched over all orders; the search for larger ones seldom ends."""

WORK_PER_SECOND, MOST_WORK = 10_000_000, 200_000_000
"""What the search over all orders does in a second, and how much it may do: about a gigabyte of states."""

LARGEST = 1e12
"""The largest number of bytes in a row from which HiGHS still tells a single one; it refuses 1e15."""


@dataclass(frozen=True)
class Exact:
    """What was found and what was proven.

    `schedule` is the fastest schedule found under the budget (None: none was), `seconds` its time, or
    infinity. No schedule of the programme takes less than `bound` seconds; it is infinite when none fits.
    `optimal` says that the search is complete: `schedule` is a fastest one, or there is none. `any_order`
    says that this is about all orders of first runs, and not about those of the programme alone.
    """

    schedule: Schedule | None
    seconds: float
    bound: float
    optimal: bool
    any_order: bool = False


def exact(graph: Graph, budget: int, *, seconds_limit: float = 60.0) -> Schedule:
    """The fastest schedule under the budget, or the fastest of the smallest peak when none fits."""
    found = solve_exact(graph, budget, seconds_limit=seconds_limit)
    if found.schedule is not None:
        return found.schedule
    smallest = smallest_peak(graph, seconds_limit=seconds_limit)
    peak = simulate(graph, smallest).peak
    return solve_exact(graph, peak, seconds_limit=seconds_limit).schedule or smallest


def solve_exact(graph: Graph, budget: int, *, seconds_limit: float = 60.0) -> Exact:
    """The fastest schedule under the budget, with a proof as far as the time allows."""
    _need_highspy()
    start, bound = auto(graph, budget), bound_at_moments(graph, budget)
    timeline = simulate(graph, start)
    if bound == math.inf:
        return Exact(None, math.inf, math.inf, optimal=True, any_order=True)
    # Proven without the programme: what `auto` found is as fast as anything can be.
    if timeline.peak <= budget and timeline.seconds <= bound * (1 + ROUNDING):
        return Exact(start, timeline.seconds, timeline.seconds, optimal=True, any_order=True)
    if too_large(graph):
        fits = timeline.peak <= budget
        return Exact(start if fits else None, timeline.seconds if fits else math.inf, bound, optimal=False)
    free = _in_any_order(graph, budget, start, seconds_limit=seconds_limit)
    if free is not None and free.optimal:
        return free
    if free is not None:
        bound = max(bound, free.bound)
    found = [
        _branch_and_bound(Stages(graph, order), budget, start, seconds_limit=seconds_limit)
        for order in _orders(graph, start)
    ]
    best = min(found, key=lambda one: one.seconds)
    least = min(max(min(one.bound for one in found), bound), best.seconds)
    return replace(best, bound=least, optimal=all(one.optimal for one in found))


def _in_any_order(graph: Graph, budget: int, start: Schedule, *, seconds_limit: float) -> Exact | None:
    """What the search over all orders finds and proves, going on from a schedule; None if it is too large."""
    facts = Facts(graph)
    if len(graph.ops) > FREE or not AnyOrder.handles(facts):
        return None
    timeline = simulate(graph, start)
    fits, once = timeline.peak <= budget, timeline.seconds - timeline.again
    limit = timeline.again - ROUNDING * once if fits else math.inf
    work = int(min(seconds_limit * WORK_PER_SECOND, MOST_WORK))
    found = AnyOrder(facts).fastest(budget, limit=limit, work=work)
    best = facts.schedule(found.order) if found.order is not None else start if fits else None
    if best is None:
        bound = math.inf if found.complete else once + found.seconds
        return Exact(None, math.inf, bound, found.complete, any_order=True)
    timeline = simulate(graph, best)
    if timeline.peak > budget:
        raise LowtideError(f"a search under {budget} bytes found {timeline.peak}; the result is not used")
    bound = timeline.seconds if found.complete else min(once + found.seconds, timeline.seconds)
    return Exact(best, timeline.seconds, bound, found.complete, any_order=True)


def _orders(graph: Graph, schedule: Schedule) -> list[tuple[list[str], list[str]]]:
    """Program order, and the order of a schedule's first runs where that is another one."""
    forward, backward = first_order(graph)
    runs = dict.fromkeys(step.op for step in schedule.steps if isinstance(step, Run))
    early = set(forward)
    own = [name for name in runs if name in early], [name for name in runs if name not in early]
    return [(forward, backward)] if own == (forward, backward) else [(forward, backward), own]


def _branch_and_bound(stages: Stages, budget: int, start: Schedule, *, seconds_limit: float) -> Exact:
    """What HiGHS finds and proves, going on from a schedule if that fits."""
    graph, once = stages.graph, stages.once
    unit = once / UNITS or 1.0
    schedules = [start] if simulate(graph, start).peak <= budget else []
    columns = stages.choices(start) if schedules else None
    answer = _solve(stages, budget, unit, seconds_limit, columns)
    if answer.columns is not None:
        schedules.append(_checked(stages, answer, budget, once + answer.objective * unit))
    elif answer.complete and columns is not None:
        raise LowtideError(f"HiGHS says that nothing fits under {budget} bytes, but a schedule of auto does")
    best = min(schedules, key=lambda schedule: simulate(graph, schedule).seconds, default=None)
    seconds = math.inf if best is None else simulate(graph, best).seconds
    bound = seconds if answer.complete else min(once + answer.bound * unit, seconds)
    return Exact(best, seconds, bound, answer.complete)


def smallest_peak(graph: Graph, *, seconds_limit: float = 60.0) -> Schedule:
    """The schedule with the smallest peak that is found in the time, however long it takes to run."""
    _need_highspy()
    start = auto(graph, 0)
    if too_large(graph):
        return start
    stages = Stages(graph)
    unit = simulate(graph, start).peak / UNITS or 1.0
    answer = _solve(stages, None, unit, seconds_limit, stages.choices(start))
    schedules = [start]
    if answer.columns is not None:
        schedules.append(with_drops(graph, *stages.order(answer.columns)))
    return min(schedules, key=lambda schedule: _peak_then_seconds(graph, schedule))


def _peak_then_seconds(graph: Graph, schedule: Schedule) -> tuple[int, float]:
    timeline = simulate(graph, schedule)
    return timeline.peak, timeline.seconds


def _checked(stages: Stages, answer: _Answer, budget: int, claimed: float) -> Schedule:
    """The schedule of an answer, if the simulator sees in it what HiGHS sees."""
    assert answer.columns is not None
    schedule = with_drops(stages.graph, *stages.order(answer.columns))
    timeline = simulate(stages.graph, schedule)
    once = timeline.seconds - timeline.again
    if timeline.peak > budget or abs(timeline.seconds - claimed) > TOLERANCE * once:
        raise LowtideError(
            f"HiGHS claims {claimed} seconds under {budget} bytes, but its schedule takes {timeline.seconds} "
            f"seconds and {timeline.peak} bytes; the result is not used"
        )
    return schedule


@dataclass(frozen=True)
class _Answer:
    """HiGHS's columns (None: no solution), their objective, a bound on it, and whether the search ended."""

    columns: list[float] | None
    objective: float
    bound: float
    complete: bool


def _need_highspy() -> None:
    try:
        import highspy  # noqa: F401
    except ImportError:
        raise LowtideError(
            "method 'exact' needs the package highspy, which is not installed: "
            'pip install "lowtide[exact]". Without it, method "auto" plans and `lower_bound` bounds.'
        ) from None


def _solve(
    stages: Stages, budget: int | None, unit: float, seconds_limit: float, hint: dict[int, float] | None
) -> _Answer:
    """Solve for the least seconds in units under a budget, or without one for the least peak."""
    import highspy

    solver = highspy.Highs()
    for name, value in _options(min(seconds_limit, seconds_left())).items():
        solver.setOptionValue(name, value)
    programme = _programme(stages, budget, unit)
    if not programme.num_col_ and min(programme.row_upper_, default=0.0) >= 0:
        return _Answer([], 0.0, 0.0, complete=True)
    if not programme.num_col_:
        return _Answer(None, math.inf, math.inf, complete=True)
    # Coefficients this large lose digits in HiGHS's floats, and a proof with them proves nothing.
    if max(programme.a_matrix_.value_, default=0.0) > LARGEST:
        return _Answer(None, math.inf, 0.0, complete=False)
    solver.passModel(programme)
    if hint:
        solver.setSolution(len(hint), np.array(list(hint), np.int32), np.array(list(hint.values())))
    solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return _Answer(None, math.inf, math.inf, complete=True)
    if status not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit):
        raise LowtideError(f"HiGHS stopped with status {solver.modelStatusToString(status)!r}")
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return _Answer(
        list(solver.getSolution().col_value) if found else None,
        info.objective_function_value if found else math.inf,
        max(info.mip_dual_bound, 0.0),
        status == highspy.HighsModelStatus.kOptimal,
    )


def _options(seconds_limit: float) -> dict[str, Any]:
    return {
        "output_flag": False,
        "threads": 1,
        "time_limit": float(seconds_limit),
        "mip_rel_gap": 0.0,
        "mip_abs_gap": UNITS * TOLERANCE / 10,
        "mip_feasibility_tolerance": 1e-9,
        "primal_feasibility_tolerance": 1e-9,
    }


def _programme(stages: Stages, budget: int | None, unit: float) -> Any:
    """The programme in HiGHS's form; without a budget, a last column is the peak in bytes."""
    import highspy

    lp = highspy.HighsLp()
    columns = len(stages.seconds) + (budget is None)
    lp.num_col_, lp.num_row_ = columns, len(stages.rows)
    lp.col_lower_ = np.array([*stages.least, 0.0][:columns])
    upper, costs = np.ones(columns), np.array([*stages.seconds, 0.0][:columns]) / unit
    # Whole runs imply whole values, but HiGHS is several times faster when it is told so.
    kinds = [highspy.HighsVarType.kInteger] * columns
    if budget is None:
        upper[-1], kinds[-1], costs = math.inf, highspy.HighsVarType.kContinuous, np.zeros(columns)
        costs[-1] = 1.0
    lp.col_upper_, lp.col_cost_, lp.integrality_ = upper, costs, kinds
    rows = [_scaled(row, budget, unit, columns - 1) for row in stages.rows]
    lp.row_lower_ = np.full(len(rows), -math.inf)
    lp.row_upper_ = np.array([limit for _, limit in rows], float)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *(len(terms) for terms, _ in rows)])
    lp.a_matrix_.index_ = np.array([column for terms, _ in rows for column, _ in terms], np.int32)
    lp.a_matrix_.value_ = np.array([number for terms, _ in rows for _, number in terms], float)
    return lp


def _scaled(row: Row, budget: int | None, unit: float, peak: int) -> tuple[list[tuple[int, float]], float]:
    """A row's terms and limit; bytes are divided by what divides all of them, or by the peak's unit."""
    if not row.in_bytes:
        return [*row.terms], row.limit
    if budget is None:
        return [*((column, size / unit) for column, size in row.terms), (peak, -1)], row.limit / unit
    # Exact, since all are whole: allocators round to 512 bytes, so numbers get 512 times smaller.
    divisor = math.gcd(*(size for _, size in row.terms)) or 1
    return [(column, size // divisor) for column, size in row.terms], (budget + row.limit) // divisor
