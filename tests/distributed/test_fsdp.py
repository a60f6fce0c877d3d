"""`fully_shard` under one cap on two ranks: bits, bytes and words."""

import json

import pytest

from tried import tried

pytestmark = pytest.mark.slow

COMPARED = [
    *("frees_after_forward", "stays_after_forward", "bfloat16", "smallest", "everything_fits"),
    *("leaves_tensors_in_a_cache", "uneven_parts"),
    *("units_inside_of_sharded_modules", "frozen_and_prefetched", "two_calls_in_flight"),
    "padded_or_not",
]


@pytest.fixture(scope="module")
def found(of_two_ranks):
    """What each scenario found on each rank."""
    files = (of_two_ranks / "fsdp_scenarios").glob("*.json")
    return {path.stem: json.loads(path.read_text()) for path in files}


def on_each_rank(found, name):
    for one in found[name]:
        assert "raised" not in one, one["raised"]
        yield one


@tried(
    "FSDP2",
    "two ranks; `reshard_after_forward`, bf16 policy, accumulation, tied and frozen units, nested units",
)
@pytest.mark.parametrize("name", COMPARED)
def test_gradients_and_weights_are_bitwise_those_of_the_run_without_a_cap(found, name):
    for one in on_each_rank(found, name):
        assert one["same"]


@pytest.mark.parametrize("name", COMPARED)
def test_every_step_stays_under_the_budget(found, name):
    for one in on_each_rank(found, name):
        assert one["budget"] is None or max(one["peaks"]) <= one["budget"]


@pytest.mark.parametrize("name", [name for name in COMPARED if name != "two_calls_in_flight"])
def test_no_step_takes_more_than_predicted(found, name):
    for one in on_each_rank(found, name):
        assert one["peaks"][-1] <= one["predicted"]


def test_the_smallest_plan_takes_much_less_and_little_less_than_predicted(found):
    for one in on_each_rank(found, "smallest"):
        assert one["peaks"][-1] < 0.6 * one["uncapped"][-1]
        assert one["predicted"] < 1.15 * one["peaks"][-1]


def test_bands_name_what_fsdp_holds(found):
    for one in on_each_rank(found, "stays_after_forward"):
        assert {"sharded parameters", "unsharded parameters", "communication buffers"} <= set(one["bands"])
        assert sum(one["bands"].values()) < one["predicted"]


def test_state_that_is_announced_is_this_ranks_part(found):
    for one in on_each_rank(found, "announced_optimizer"):
        assert one["planned"] == [one["held"], one["held"]]


def test_units_that_are_alike_are_captured_once(found):
    """Once on fake tensors, once for the step that runs."""
    for one in on_each_rank(found, "announced_optimizer"):
        assert one["captures"] == 2


def test_a_budget_too_small_says_what_is_possible(found):
    for one in on_each_rank(found, "too_small_then_changed"):
        assert f"Try budget={one['least']}" in one["told"]
        assert sum(one["parts"].values()) == one["least"]
        assert "communication buffers" in one["told"]
        assert one["peak"] <= one["predicted"]


def test_a_model_is_as_it_was_once_it_is_not_capped(found):
    for one in on_each_rank(found, "too_small_then_changed"):
        assert one["as_before"]
        assert one["keys"]
        assert one["evaluates"]


def test_parameters_that_changed_before_the_backward_are_refused(found):
    for one in on_each_rank(found, "too_small_then_changed"):
        assert "norm.weight was written to in place" in one["refused"]


def test_calls_in_flight_that_do_not_fit_are_refused(found):
    for one in on_each_rank(found, "two_calls_in_flight"):
        assert "while the backward of" in one["told"]


def test_what_cannot_be_capped_is_refused_with_what_can(found):
    for one in on_each_rank(found, "refusals"):
        assert "fully_shard (FSDP2), can be capped" in one["fsdp1"]
        assert "on the blocks first" in one["no units"]
        assert '"eager"' in one["inductor"]
        assert "Shard the model, too" in one["no root"]
        assert "lowtide.cap(model.model, ...)" in one["inside"]
        assert "not one graph" in one["plan"]


def test_code_that_looks_at_values_is_named(found):
    for one in on_each_rank(found, "values_outside_of_units"):
        assert "`.item()`" in one["told"]
