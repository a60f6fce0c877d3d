"""A search of less effort, for tests that follow plans and do not judge how good or how low they are.

The planner of a small step takes longer than its capture: it looks for seconds and bytes to win. Here every
phase of `auto` runs as it does for users, with fewer edits and seeds. What is tested of a plan stays: the
simulator accepts it, it is lowered and run, its bits and bytes are compared. How low a short search goes
depends on the prices; those of `steady_prices` are the same in each run and on each machine, busy or not, so
that a test that reaches its budget once reaches it always.
"""

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from unittest import mock

from lowtide.planner import kept_ladders
from lowtide.solve.bound import cut_orders
from lowtide.solve.search import search, seeds
from lowtide.solve.sequence import method, steps

MOST_LADDERS = 1000
"""The same graph has the same ladder: a run of the tests keeps those that it found."""

_short_ladders = {}
_whole_effort = search.effort_for


def _short_effort(ops, native):
    """On the steps of a few dozen ops that most tests have, these edits find the smallest peak."""
    whole = _whole_effort(ops, native)
    edits = whole.edits // (4 if ops <= 100 else 10)
    sinks, work = min(whole.sinks, 2), whole.work // 50
    few = replace(whole, edits=edits, fine=24, sweeps=min(whole.sweeps, 1), between=0, sinks=sinks, work=work)
    if ops <= 100:
        return few
    return replace(few, step=2 * whole.step, exponents=min(whole.exponents, 2), grafts=1)


@contextmanager
def short_search():
    """Look for plans with less effort; those of a whole search are remembered apart from them."""
    auto = sys.modules["lowtide.solve.auto"]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(search, "effort_for", _short_effort))
        stack.enter_context(mock.patch.object(search, "MOST_STEPS", 20_000))
        # the tables of the dynamic programme over many blocks take the longest
        stack.enter_context(mock.patch.object(seeds, "DENSITIES", ((40, 12), (seeds.MOST_OPS, 0))))
        stack.enter_context(mock.patch.object(seeds, "MOST_RUNS", seeds.MOST_RUNS // 10))
        stack.enter_context(mock.patch.object(method, "FINEST_RUNS", method.FINEST_RUNS // 20))
        stack.enter_context(mock.patch.object(method, "OTHER_RUNS", method.OTHER_RUNS // 20))
        # and after them the sequences over many cuts, and the smallest cuts at many prices
        stack.enter_context(mock.patch.object(steps, "_variety", return_value=6))
        stack.enter_context(mock.patch.object(cut_orders, "CUTS", 10))
        stack.enter_context(mock.patch.object(auto, "_remembered", _short_ladders))
        stack.enter_context(mock.patch.object(auto, "_MOST_REMEMBERED", MOST_LADDERS))
        stack.enter_context(mock.patch.object(kept_ladders, "FOLDER", "short"))
        yield


@contextmanager
def steady_prices():
    """Ops are run and measured as they are for users; then the seconds of the roofline stand for theirs."""
    from lowtide.devices.table import find_device
    from lowtide.prices import measured

    price = measured._price

    @cache  # asked for each op, and found by the words of its name
    def known(device):
        return find_device(measured.describe_known(device))

    def steady(prices, node, device, **options):
        found = price(prices, node, device, **options)
        if found.seconds is None:
            return found
        return replace(found, seconds=measured.roofline_seconds(node, known(device)))

    with (
        mock.patch.object(measured, "_price", steady),
        mock.patch.object(measured, "_bandwidth", lambda prices, device: known(device).bandwidth),
    ):
        yield
