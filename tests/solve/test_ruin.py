"""Ruin and repair: where its turns go, and that it improves what descents have left."""

import pytest

from graphs import cnn, random_graph, transformer
from lowtide.solve.search import ruin
from lowtide.solve.search.search import Search

pytestmark = pytest.mark.whole_search


def descended(graph):
    """A search that has only made its first descents."""
    search = Search(graph)
    for base in search.bases:
        search.join(search.down(base))
    return search


def seconds_at(search, budgets):
    return [search.ladder.best(budget).seconds for budget in budgets]


def test_budgets_get_better_plans_than_descents_find():
    search = descended(random_graph(0, 20))
    least = search.ladder[0].peak
    budgets = [least + (search.top - least) * share // 10 for share in range(1, 6)]
    before = seconds_at(search, budgets)
    for budget in budgets:
        ruin.improve_at(search, budget)
    after = seconds_at(search, budgets)
    assert all(new <= old for new, old in zip(after, before, strict=True))
    assert any(new < old * (1 - 1e-9) for new, old in zip(after, before, strict=True))


def test_the_same_graph_gets_the_same_ladder():
    first, second = descended(transformer(1)), descended(transformer(1))
    for search in first, second:
        ruin.improve(search)
    assert list(first.ladder) == list(second.ladder)


def test_turns_go_to_where_they_help(monkeypatch):
    search, turns = descended(cnn(2)), []
    hard = search.targets[-1]

    def mend(search, target, chance):
        turns.append(target)
        return 1000, target == hard

    monkeypatch.setattr(ruin, "_mend", mend)
    ruin.improve(search)
    assert set(turns) == set(search.targets)
    assert turns.count(hard) > 4 * max(turns.count(target) for target in search.targets if target != hard)


def test_larger_plans_are_the_ones_right_above():
    ladder = descended(cnn(2)).ladder
    least = ladder[0].peak
    assert ladder.above(least) == ladder.rungs[1:]
    assert ladder.above(least - 1) == ladder.rungs
    assert ladder.above(ladder[len(ladder) - 1].peak) == []
