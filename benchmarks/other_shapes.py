"""What a plan loses that comes of another shape's search, against a search of its own.

    python benchmarks/other_shapes.py    # writes results/other_shapes.jsonl

Steps of GPT-2, Llama, BERT and a CNN at several sizes. The ladder that a search finds for one size is put on
each other one (`solve.search.carry`), for several budgets, beside what a search of that size finds. From
these lines come the two constants of `planner/other_shapes.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import lowtide
from changing_shapes import Convolutions
from commit import commit
from lowtide.plans.graph import Graph
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate
from lowtide.solve.auto import ladder_of
from lowtide.solve.search.carry import carry

RESULTS = Path(__file__).parent / "results" / "other_shapes.jsonl"
LENGTHS, ROWS = (16, 40, 57, 63, 64, 128, 200), (3, 8, 16, 31, 32)
FROM = {"gpt2": (64, 16, 200), "llama": (64, 200), "bert": (64, 16, 200), "cnn": (32,)}
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35)


def build(name: str) -> torch.nn.Module:
    import transformers

    if name == "cnn":
        return Convolutions()
    if name == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=500, **sizes))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "vocab_size": 500, "max_position_embeddings": 256}
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **sizes))
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))


def graphs(name: str) -> dict[int, Graph]:
    """The step's graph at each size."""
    torch.manual_seed(0)
    model, found = build(name).train(), {}
    for size in ROWS if name == "cnn" else LENGTHS:
        if name == "cnn":
            batch = {"pixels": torch.randn(size, 3, 32, 32)}
        else:
            ids = torch.randint(0, 500, (8, size))
            labels = torch.arange(8) % 2 if name == "bert" else ids
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        found[size] = lowtide.plan(model, kwargs=batch).graph
    return found


def bytes_to_save_on(graph: Graph) -> int:
    return sum(value.bytes for value in graph.values if value.droppable)


def rows(name: str) -> Iterator[dict[str, Any]]:
    """A line for each size, budget and size whose plans are put on it."""
    known = graphs(name)
    for size, graph in known.items():
        ladder, top = ladder_of(graph), simulate(graph, keep_all(graph)).peak
        for base in FROM[name]:
            if base == size or graph.structure != known[base].structure:
                continue
            orders = [rung.order for rung in ladder_of(known[base])]
            ratio = bytes_to_save_on(graph) / bytes_to_save_on(known[base])
            for share in SHARES:
                pair = (
                    ladder.best(int(share * top)),
                    carry(graph, orders, int(share * top)).best(int(share * top)),
                )
                searched, carried = (each and each.seconds / graph.seconds - 1 for each in pair)
                yield {
                    "model": name,
                    "size": size,
                    "from": base,
                    "ratio": round(ratio, 3),
                    "share": share,
                    "searched": searched,
                    "carried": carried,
                    "commit": commit(),
                }


def summary(found: list[dict[str, Any]], what: str) -> str:
    lost = sorted((1 + row["carried"]) / (1 + row["searched"]) - 1 for row in found)
    if not lost:
        return f"{what}: none"
    return f"{what}: {len(lost)} plans, median {lost[len(lost) // 2]:+.2%}, worst {lost[-1]:+.2%}"


def main() -> None:
    logging.getLogger("lowtide").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found = [row for name in FROM for row in rows(name)]
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in found))
    both = [row for row in found if row["searched"] is not None and row["carried"] is not None]
    near = [row for row in both if 0.8 <= row["ratio"] <= 1.25]
    print(summary([row for row in both if row["carried"] <= 0.15], "at most 15 % extra time"))
    print(summary([row for row in near if row["carried"] > 0.15], "more, from a size within a quarter"))
    far = [row for row in both if row not in near]
    print(summary([row for row in far if row["carried"] > 0.15], "more, from other sizes"))
    print(
        "a search fits and the carried plans do not:",
        sum(r["searched"] is not None for r in found) - len(both),
    )


if __name__ == "__main__":
    main()
