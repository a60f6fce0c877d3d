"""A search of less effort, for tests that follow plans and do not judge how good or how low they are.

The planner of a small step takes longer than its capture: it looks for seconds and bytes to win. Here every
phase of `auto` runs as it does for users, with fewer edits and seeds. What is tested of a plan stays: the
simulator accepts it, it is lowered and run, its bits and bytes are compared. How low it goes depends on
measured prices more than with a whole search: a test that counts on a budget being reached has that one.
"""

import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

from lowtide.solve.search import search, seeds

_whole_effort = search.effort_for


def _short_effort(ops, native):
    whole = _whole_effort(ops, native)
    return replace(whole, edits=whole.edits // 10, fine=24, sweeps=min(whole.sweeps, 1))


@contextmanager
def short_search():
    """Look for plans with less effort; none of them is remembered afterwards."""
    remembered = sys.modules["lowtide.solve.auto"]._remembered
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(search, "effort_for", _short_effort))
        stack.enter_context(mock.patch.object(search, "MOST_STEPS", 100_000))
        # the tables of the dynamic programme over many blocks take the longest
        stack.enter_context(mock.patch.object(seeds, "DENSITIES", ((40, 12), (seeds.MOST_OPS, 0))))
        stack.enter_context(mock.patch.object(seeds, "MOST_RUNS", seeds.MOST_RUNS // 10))
        stack.enter_context(mock.patch.dict(remembered, clear=True))
        yield
