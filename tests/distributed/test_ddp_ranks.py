"""Two ranks under DDP: on each the weights of the plain loop, and the peak that its plan says."""

import json

import pytest

from tried import tried

SCENARIOS = ("plain", "bucket views", "no_sync", "views, no_sync", "capped behind the wrapper")
UNLIKE = "other shapes on each rank"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(of_two_ranks):
    return [json.loads((of_two_ranks / "ddp_ranks" / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@tried(
    "DistributedDataParallel",
    "two ranks; `gradient_as_bucket_view`, `no_sync`; cap before and after wrapping",
)
@tried("DistributedDataParallel", "batches of other shapes on each rank")
@pytest.mark.parametrize("scenario", [*SCENARIOS, UNLIKE])
def test_each_rank_trains_as_without_a_cap(ranks, scenario):
    for rank in ranks:
        found = rank[scenario]
        assert found["same"]
        assert found["measured"] <= found["predicted"] < found["uncapped"]
    assert ranks[0][scenario]["sum"] == ranks[1][scenario]["sum"]


def test_ranks_with_other_shapes_have_plans_of_their_own(ranks):
    assert ranks[0][UNLIKE]["predicted"] > ranks[1][UNLIKE]["predicted"]
