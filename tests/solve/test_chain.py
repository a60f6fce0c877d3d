"""Checkpoints of chains against all subsets, laws against their definitions, and the graph form."""

import re
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import chain as equal_steps
from graphs import cnn, random_graph, transformer
from lowtide.errors import BudgetTooSmall, LowtideError
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order, with_drops
from lowtide.plans.schedule import Run
from lowtide.plans.simulator import simulate
from lowtide.solve.chain import Checkpoints, Measured, chain, chain_orders, checkpoints, peak_of
from lowtide.solve.chain.laws import find_law
from lowtide.solve.chain.measures import StageLaw, kept_cuts, segment_actions
from lowtide.solve.chain.search import linear, long_end, quadratic
from lowtide.solve.chain_stages import find_stages


def paper(d, i, j):
    return sum(d[i + 1 : j]) + max(d[i:j]) + d[j]


def pytorch(d, i, j):
    return max(sum(d[i + 1 : k]) + d[k] + d[k - 1] for k in range(i + 1, j + 1))


def measured(d, law, i, j):
    def keeps(layer):
        return d[layer] + law.extra[layer - 1]

    return max(sum(map(keeps, range(i + 1, k))) + law.work[k - 1] for k in range(i + 1, j + 1))


def remade(d, i, j):
    """As pytorch, but the output of j is made again too: not monotone."""
    return max(pytorch(d, i, j), sum(d[i + 1 : j]) + 2 * d[j])


def models(d, rng):
    """Each law as `checkpoints` takes it, with its definition."""
    law = Measured(
        extra=tuple(rng.randint(-size, 5) for size in d[1:]), work=tuple(rng.randint(0, 20) for _ in d[1:])
    )
    yield "paper", lambda i, j: paper(d, i, j)
    yield "pytorch", lambda i, j: pytorch(d, i, j)
    yield law, lambda i, j: measured(d, law, i, j)
    yield (lambda i, j: remade(d, i, j)), lambda i, j: remade(d, i, j)


def subsets(n):
    for count in range(max(n - 1, 1)):
        for inner in combinations(range(1, n - 1), count):
            yield tuple(sorted({0, *inner, n - 1}))


def swept(d, kept, upper):
    peak = sum(d[i] for i in kept)
    for place, (i, j) in enumerate(pairwise(kept)):
        peak = max(peak, sum(d[k] for k in kept[: place + 1]) + upper(i, j))
    return peak


def total(d, kept):
    return sum(d[i] for i in kept) + max((sum(d[i + 1 : j]) for i, j in pairwise(kept)), default=0)


def chains(count, longest=9, seed=0, largest=9):
    rng = Random(seed)
    for _ in range(count):
        yield [rng.randint(0, largest) for _ in range(rng.randint(1, longest))], rng


def test_total_is_the_least_of_all_subsets_and_keeps_most():
    for d, _ in chains(400, longest=10):
        best, kept = min((total(d, kept), -sum(d[i] for i in kept)) for kept in subsets(len(d)))
        found = checkpoints(d, "total", "cubic")
        assert (found.peak, -sum(d[i] for i in found.indices)) == (best, kept)
        assert total(d, found.indices) == found.peak == peak_of(d, found.indices, "total")


@pytest.mark.slow
def test_swept_is_the_least_of_all_subsets_under_every_law():
    for d, rng in chains(250):
        for model, upper in models(d, rng):
            least = min(swept(d, kept, upper) for kept in subsets(len(d)))
            found = checkpoints(d, "swept", "quadratic", model=model)
            assert found.peak == least == swept(d, found.indices, upper)
            assert peak_of(d, found.indices, "swept", model=model) == least
            if not callable(model):
                assert checkpoints(d, "swept", "linear", model=model) == found


@pytest.mark.parametrize("longest", [8, 60])
def test_linear_equals_quadratic(longest):
    for d, rng in chains(1500 if longest == 8 else 300, longest=longest, seed=longest, largest=30):
        for model in (model for model, _ in models(d, rng) if not callable(model)):
            law = find_law(d, model)
            assert linear(d, law) == quadratic(d, law)


def test_ties_fall_to_less_that_runs_again():
    """Nothing can be added to what is kept without raising the peak."""
    for d, rng in chains(150):
        for model, upper in models(d, rng):
            found = checkpoints(d, "swept", "quadratic", model=model)
            for more in range(len(d)):
                if more not in found.indices:
                    assert swept(d, sorted({*found.indices, more}), upper) > found.peak


def test_a_larger_budget_is_kept_and_never_keeps_less():
    for d, rng in chains(150):
        for model, upper in models(d, rng):
            least = checkpoints(d, "swept", "quadratic", model=model)
            for budget in range(least.peak, least.peak + 12, 3):
                found = checkpoints(d, "swept", "quadratic", model=model, budget=budget)
                assert swept(d, found.indices, upper) == found.peak <= budget
            everything = sum(d) + max(upper(i, i + 1) for i in range(len(d) - 1)) if len(d) > 1 else d[0]
            assert checkpoints(d, "swept", model=model, budget=everything).indices == tuple(range(len(d)))


@pytest.mark.slow
def test_the_long_end_is_the_longest_of_all_subsets():
    for d, rng in chains(150):
        for model, upper in models(d, rng):
            least = checkpoints(d, "swept", "quadratic", model=model).peak
            for budget in (least, least + 4):
                kept = long_end(d, find_law(d, model), budget)
                assert swept(d, kept, upper) <= budget
                fitting = [other for other in subsets(len(d)) if swept(d, other, upper) <= budget]
                assert kept[-2:-1] == min(other[-2:-1] for other in fitting)


def test_equal_layers_take_about_the_root():
    assert checkpoints([1] * 101, "total").peak == 20
    assert checkpoints([1] * 100, "swept", model="pytorch").peak == 16
    by_hand = checkpoints([4, 9, 2, 9, 2, 9, 1], "swept", model="pytorch")
    assert by_hand == Checkpoints((0, 2, 4, 5, 6), 27)
    assert by_hand.segments == ((0, 2), (2, 4), (4, 5), (5, 6))


@pytest.mark.slow
def test_a_million_layers():
    sizes = np.random.default_rng(0).integers(1, 1000, 1_000_000)
    found = checkpoints(sizes, "swept", "linear", model="pytorch")
    assert found.peak < sizes.sum() / 1000
    assert found.indices[0] == 0
    assert found.indices[-1] == 999_999


def test_linear_refuses_a_law_that_is_not_monotone():
    d = [1, 9, 1, 1]
    with pytest.raises(LowtideError, match=r"U\(0, 1\) = 18 and U\(0, 2\) = 13; use method='quadratic'"):
        checkpoints(d, "swept", "linear", model=lambda i, j: sum(d[i + 1 : j]) + 2 * d[j] + (j > i + 1) * 2)
    d = [Random(1).randint(1, 9) for _ in range(100)]
    with pytest.raises(LowtideError, match="set `monotone = True` on the law if it is"):
        checkpoints(d, "swept", "linear", model=lambda i, j: pytorch(d, i, j))

    class Says:
        monotone = True

        def __call__(self, i, j):
            return 100 - j

    with pytest.raises(LowtideError, match=r"at its end: U\(0, 1\) = 99 and U\(0, 2\) = 98; use method="):
        checkpoints(d, "swept", "linear", model=Says())
    with pytest.raises(LowtideError, match=r"grows at its start: U\(1, 2\) = 3 and U\(0, 2\) = 2"):
        checkpoints([1, 1, 1], "swept", "linear", model=lambda i, j: j + i)


def test_linear_refuses_a_law_that_falls_where_it_was_not_looked_at():
    """Some pairs of a long chain are looked at: of the others, those that the answer depends on."""
    d = [1] * 100

    class MostlyMonotone:
        monotone = True

        def __call__(self, i, j):
            return 60 if (i, j) == (89, 93) else pytorch(d, i, j)

    with pytest.raises(LowtideError, match=r"at its end: U\(89, 93\) = 60 and U\(89, 94\) = 6; use method"):
        checkpoints(d, "swept", "linear", model=MostlyMonotone())
    assert checkpoints(d, "swept", "quadratic", model=MostlyMonotone()).peak < 60


def test_linear_takes_a_users_law_that_is_monotone():
    class Law:
        monotone = True

        def __call__(self, i, j):
            return pytorch(d, i, j)

    for d in ([3, 1, 4, 1, 5], [Random(2).randint(1, 9) for _ in range(90)]):
        for method in ("linear", "quadratic", None):
            assert checkpoints(d, "swept", method, model=Law()) == checkpoints(d, "swept", model="pytorch")


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([],), {}, "sizes is empty"),
        ((None,), {}, "sizes is None; expected a list of whole numbers"),
        ((7,), {}, "sizes is 7; expected a list"),
        (([1, 2], "swept"), {"budget": "9"}, "budget is '9'; expected a whole number"),
        (([1, -1],), {}, r"sizes\[1\] is -1"),
        (([1, 2.5],), {}, r"sizes\[1\] is 2.5; expected a whole number"),
        (([1, "2"],), {}, r"sizes\[1\] is '2'"),
        (([1, None],), {}, r"sizes\[1\] is None"),
        (([2**60, 1],), {}, "cannot be planned"),
        (([1, 2], "both"), {}, "objective 'both' is not known; choose 'total' or 'swept'"),
        (([1, 2], "total", "linear"), {}, "no 'linear' algorithm for objective 'total'; choose cubic"),
        (([1, 2], "swept", "cubic"), {}, "objective 'swept'; choose linear or quadratic"),
        (([1, 2], "total"), {"model": "pytorch"}, "belong to objective='swept'"),
        (([1, 2], "swept"), {"model": "jax"}, "model 'jax' is not known; choose 'paper', 'pytorch'"),
        (([1, 2], "swept"), {"model": 7}, "model 7 is no law"),
        (([1, 2], "swept"), {"model": Measured((1, 2), (1,))}, "2 extra and 1 work sizes; .* has 1 layers"),
        (([1, 2], "swept"), {"model": Measured((-3,), (1,))}, "keeps less than nothing"),
    ],
)
def test_misuse_is_answered_with_what_is_possible(arguments, options, message):
    with pytest.raises(LowtideError, match=message):
        checkpoints(*arguments, **options)


def test_a_budget_below_the_least_peak_names_it():
    with pytest.raises(BudgetTooSmall, match="try budget >= 27") as caught:
        checkpoints([4, 9, 2, 9, 2, 9, 1], "swept", model="pytorch", budget=26)
    assert (caught.value.budget, caught.value.smallest) == (26, 27)


@pytest.mark.parametrize("indices", [(), (0, 1), (1, 2), (0, 2, 1), (0, 0, 2)])
def test_a_peak_is_asked_for_with_both_ends(indices):
    with pytest.raises(LowtideError, match="must rise from 0 to 2"):
        peak_of([1, 2, 3], indices)


def test_a_peak_is_asked_for_with_a_list_of_whole_numbers():
    assert peak_of(iter([1, 2, 3]), np.array([0, 2])) == peak_of([1, 2, 3], [0, 2])
    for indices in (None, 2):
        with pytest.raises(LowtideError, match=f"indices is {indices}; expected a list of whole numbers"):
            peak_of([1, 2, 3], indices)
    with pytest.raises(LowtideError, match=r"indices\[1\] is 2.0; expected a whole number"):
        peak_of([1, 2, 3], [0, 2.0])
    with pytest.raises(LowtideError, match="sizes is None"):
        peak_of(None, [0])


GRAPHS = {"cnn": cnn(8), "transformer": transformer(4), "steps": equal_steps(40)}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_the_graph_form_fits_where_it_can_and_is_fastest_of_its_candidates(name):
    graph = GRAPHS[name]
    top = simulate(graph, keep_all(graph)).peak
    assert chain(graph, top) == keep_all(graph)
    least = simulate(graph, chain(graph, 0)).peak
    assert least < 0.7 * top
    judged = [simulate(graph, with_drops(graph, *order)) for order in chain_orders(graph)]
    for budget in range(least, top, max((top - least) // 5, 1)):
        found = simulate(graph, chain(graph, budget))
        assert found.peak <= budget
        assert found.seconds == min(each.seconds for each in judged if each.peak <= budget)


def test_equal_steps_have_the_peak_that_the_law_of_stages_says():
    graph = equal_steps(60)
    always = sum(value.bytes for value in graph.values if value.kind in ("input", "output", "tangent"))
    stages = find_stages(graph)
    cuts = kept_cuts(stages, 6)
    assert len(cuts) >= 5
    for kept in cuts:
        schedule = with_drops(graph, *stages.order(segment_actions(kept)))
        peak = peak_of(stages.crossing, kept, "swept", model=StageLaw(stages))
        assert simulate(graph, schedule).peak == peak + always


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 25), st.floats(0.2, 1.1))
def test_every_schedule_is_accepted_and_never_above_keeping_all(seed, n, share):
    graph = random_graph(seed, n)
    top = simulate(graph, keep_all(graph))
    schedule = chain(graph, int(top.peak * share))
    found = simulate(graph, schedule)
    assert found.peak <= top.peak
    runs = Counter(step.op for step in schedule.steps if isinstance(step, Run))
    assert all(runs[op.name] == 1 for op in graph.ops if op.kind == "pinned")
    assert all(runs[op.name] <= 2 for op in graph.ops)
    assert schedule == chain(graph, int(top.peak * share))


def test_graphs_with_nothing_in_them():
    empty = equal_steps(1).replace(ops=(), values=())
    assert simulate(empty, chain(empty, 0)).peak == 0
    forward_only = equal_steps(5)
    forward_only = forward_only.replace(ops=forward_only.ops[:5], values=forward_only.values[:7])
    assert next(chain_orders(forward_only)) == first_order(forward_only)
    chain(forward_only, 0)


def test_code_of_the_page_runs():
    page = (Path(__file__).parent.parent.parent / "docs" / "methods" / "chain.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "chain.md", "exec"), {})
