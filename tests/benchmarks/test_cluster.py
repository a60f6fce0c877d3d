"""The table of the cluster benchmark: made from its rows, and the one that the documents show."""

import json
from pathlib import Path

import pytest
import torch

import cluster

ROOT = Path(__file__).parents[2]


def results():
    lines = (ROOT / "benchmarks" / "results" / "cluster.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_documents_show_the_table_of_the_results():
    assert cluster.table(results()) in (ROOT / "docs" / "cluster.md").read_text()


def test_at_the_peak_of_checkpointing_every_block_the_plan_is_no_slower():
    by_tool = {(row["ranks"], row["tool"]): row for row in results() if row["tool"] != "lowtide"}
    for ranks in cluster.RANKS:
        plan, by_hand = by_tool[ranks, "lowtide at that peak"], by_tool[ranks, "checkpoint every block"]
        assert plan["peak"] <= by_hand["peak"]
        assert plan["seconds"] <= by_hand["seconds"]


@pytest.mark.slow
def test_one_layer_of_the_model_is_planned_for_all_ways():
    rows = list(cluster.rows(cluster.llama_8b(layers=2), 8))
    assert [row["tool"] for row in rows[:3]] == [
        "keep everything",
        "checkpoint every block",
        "lowtide at that peak",
    ]
    assert all(row["peak"] <= rows[0]["peak"] for row in rows)
    assert not torch.distributed.is_initialized()
