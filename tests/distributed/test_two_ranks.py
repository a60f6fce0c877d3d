"""Two ranks with gloo on the CPU: every scenario of `two_ranks.py`, as both of them saw it."""

import json

import pytest

from tried import tried

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(of_two_ranks):
    """What each rank saw, by scenario."""
    return [json.loads((of_two_ranks / "two_ranks" / f"{rank}.json").read_text()) for rank in (0, 1)]


def seen(ranks, scenario):
    found = [rank[scenario] for rank in ranks]
    for each in found:
        assert "raised" not in (each or {}), each["raised"]
    return found


CAPPED = (
    *("tensor_parallel", "dtensor_loss", "sharded_parameters", "measured_prices", "accumulation"),
    "uneven_shards",
)


@tried(
    "DTensor",
    "two ranks; tensor parallel, parameters gathered in the graph, a DTensor as the loss, accumulation",
)
@pytest.mark.parametrize("scenario", CAPPED)
def test_weights_losses_and_optimizer_state_keep_their_bits(ranks, scenario):
    assert all(each["same"] for each in seen(ranks, scenario))


@pytest.mark.parametrize("scenario", CAPPED)
def test_the_measured_peak_is_the_planned_one_under_the_budget(ranks, scenario):
    for each in seen(ranks, scenario):
        assert each["peak"] == each["planned"] <= each["budget"] < each["uncapped"]


@pytest.mark.parametrize("scenario", CAPPED)
def test_parameters_stay_dtensors_and_state_counts_by_its_local_part(ranks, scenario):
    for each in seen(ranks, scenario):
        assert each["dtensors"] > 0
        assert 0 < each["optimizer"] < each["planned"] / 2


@pytest.mark.parametrize("scenario", [name for name in CAPPED if name != "uneven_shards"])
def test_all_ranks_run_one_schedule_by_one_price_list(ranks, scenario):
    first, second = seen(ranks, scenario)
    assert first["schedule"] == second["schedule"]
    assert first["seconds"] == second["seconds"]
    assert "the slowest of 2 ranks" in first["prices"]


def test_parameters_are_gathered_again_where_that_pays(ranks):
    for each in seen(ranks, "sharded_parameters"):
        assert each["gathers"] == 20
        assert each["gathered again"] > 0


def test_uneven_shards_are_planned_apart_without_a_second_gather(ranks):
    for each in seen(ranks, "uneven_shards"):
        assert each["gathered again"] == 0
        assert any("not of one size" in note for note in each["notes"])


def test_the_backend_of_torch_compile_plans_for_all_ranks_too(ranks):
    assert all(each["same"] for each in seen(ranks, "compiled"))


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("other_budget", "the budget: 79% on rank 1, 80% on rank 0"),
        ("other_shape", "argument 0 float32[49, 16] on rank 1, argument 0 float32[48, 16] on rank 0"),
        ("other_graph", "aten.sin.default"),
        ("fewer_collectives", "on rank 1"),
    ],
)
def test_ranks_that_differ_raise_on_every_rank_and_say_in_what(ranks, scenario, words):
    for each in seen(ranks, scenario):
        assert each["kind"] == "RanksDiffer"
        assert words in each["said"]


def test_a_rank_that_fails_makes_the_others_raise(ranks):
    waiting, failed = seen(ranks, "one_fails")
    assert waiting["kind"] == "RanksDiffer"
    assert "rank 1 failed" in waiting["said"]
    assert "no data on this rank" in failed["said"]


def test_a_budget_that_is_too_small_is_refused_on_every_rank(ranks):
    first, second = seen(ranks, "too_small")
    assert first["kind"] == second["kind"] == "BudgetTooSmall"
    assert first["said"] == second["said"]


def test_a_rank_that_does_not_come_is_an_error_not_a_hang(ranks):
    waiting, _ = seen(ranks, "one_does_not_come")
    assert waiting["kind"] == "RanksDiffer"
    assert "rank 1 did not come" in waiting["said"]
