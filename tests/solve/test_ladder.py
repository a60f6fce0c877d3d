"""The ladder keeps what is undominated, and answers with the fastest that fits."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lowtide.solve.search.ladder import Ladder, Rung

plans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40)


def ladder_of(pairs) -> Ladder:
    ladder = Ladder()
    for peak, seconds in pairs:
        ladder.add(Rung(peak, float(seconds), np.array([peak, seconds], dtype=np.int32)))
    return ladder


@given(plans, st.integers(-1, 31))
def test_the_best_rung_is_the_fastest_plan_that_fits(pairs, budget):
    best = ladder_of(pairs).best(budget)
    fitting = [seconds for peak, seconds in pairs if peak <= budget]
    assert (best.seconds if best else None) == (min(fitting) if fitting else None)
    assert best is None or best.peak <= budget


@given(plans)
def test_rungs_rise_in_peak_and_fall_in_seconds(pairs):
    ladder = ladder_of(pairs)
    assert [rung.peak for rung in ladder] == sorted({rung.peak for rung in ladder})
    assert [rung.seconds for rung in ladder] == sorted({rung.seconds for rung in ladder}, reverse=True)
    assert len(ladder) == len(ladder.peaks)
    assert all((rung.peak, rung.seconds) == tuple(rung.order) for rung in ladder)
