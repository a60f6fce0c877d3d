"""Make the tables of the documents from the committed results, so that no figure is typed by hand.

python benchmarks/tables.py            # writes them
python benchmarks/tables.py --check    # exit status 1 where a document is not up to date
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import headtohead_table
import models_table
import plan_results
import sequences_results
import sketch_glue_results
import sketch_memory_results
from plan_tables import paper_table, plan_tables, plan_times_table

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    "README.md",
    "docs/changing-shapes.md",
    "docs/checks.md",
    "docs/exactness.md",
    "docs/head-to-head.md",
    "docs/how-it-works.md",
    "docs/limits.md",
    "docs/models.md",
    "docs/sequences.md",
    "docs/sketch.md",
    "docs/training-tools.md",
)
MODELS = {
    "transformers": "transformers",
    "timm": "timm",
    "diffusers": "diffusers",
    "graphs": "torch_geometric",
}
NAMES = {
    "gpt": "GPT, 12 layers, d=1024, 16 x 1024 tokens, bf16",
    "resnet50": "ResNet-50, batch 96",
    "resnet152": "ResNet-152, batch 48",
    "vgg19": "VGG-19, batch 64",
    "densenet161": "DenseNet-161, batch 32",
}


def read(name: str) -> list[dict[str, Any]]:
    lines = (ROOT / "benchmarks" / "results" / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


def mib(size: float) -> str:
    return f"{size / 2**20:,.0f}"


def tool(row: dict[str, Any]) -> str:
    if row["tool"] != "lowtide":
        return {"eager": "PyTorch", "checkpoint": "torch.utils.checkpoint per block"}[row["tool"]]
    share = row["share"]
    return "Lowtide, " + {"above": "cap above the peak", "min": "smallest peak"}.get(share, f"cap at {share}")


def exactness(short: bool) -> str:
    rows = read("exactness-h200.jsonl")
    head = (
        "| step | tool | predicted peak, MiB | measured peak, MiB | step time | loss, gradients | buffers |"
    )
    lines = [head, "|---|---|---|---|---|---|---|"]
    for network, name in NAMES.items():
        mine = [row for row in rows if row["network"] == network]
        base = mine[0]
        for row in mine:
            if short and (network not in ("gpt", "resnet50") or row.get("share") == "80%"):
                continue
            lines.append(exactness_line(row, base, name))
    return "\n".join(lines)


def exactness_line(row: dict[str, Any], base: dict[str, Any], name: str) -> str:
    if "error" in row:
        text = f"refused: the smallest peak is {mib(row['smallest'])}"
        return f"| {name} | {tool(row)} | {text} | | | | |"
    predicted = mib(row["predicted_peak"]) if "predicted_peak" in row else ""
    slower = "" if row is base else f" ({row['seconds'] / base['seconds'] - 1:+.1%})"
    repeatable = base["gradients"] == "identical"
    gradients = row["gradients"] if repeatable else "PyTorch's own differ from run to run"
    cells = [name, tool(row), predicted, mib(row["measured_peak"]), f"{row['seconds'] * 1e3:.1f} ms{slower}"]
    return f"| {' | '.join([*cells, gradients, row['buffers']])} |"


def paper() -> str:
    from corpus import PAPER  # it imports torch, which takes seconds and which the other tables do without

    return paper_table(plan_results.read(), PAPER)


def sequences_rows() -> list[dict[str, Any]]:
    files = sorted(sequences_results.RESULTS.glob("sequences-*.jsonl"))
    return [row for file in files for row in sequences_results.read(file)]


def ddp_overlap() -> str:
    """The shares of the backward at which buckets left, on a GPU."""
    rows = [row for row in read("ddp_overlap.jsonl") if row["ranks"] == 1]
    lines = [
        "| tool | `gradient_as_bucket_view` | share of the backward when each bucket left |",
        "|---|---|---|",
    ]
    for row in rows:
        shares = " ".join(f"{share:.2f}" for share in row["buckets"])
        lines.append(f"| {row['tool']} | {row['views']} | {shares} |")
    return "\n".join(lines)


def call_checks() -> str:
    """The newest row of each check on each device."""
    found = {(row["check"], row["device"]): row for row in read("call_checks.jsonl") if "check" in row}
    devices = list(dict.fromkeys(device for _, device in found))
    lines = [f"| looked at | when | {' | '.join(f'{name}, µs' for name in devices)} |"]
    lines.append("|---|---|" + "---:|" * len(devices))
    for check, when in dict.fromkeys((row["check"], row["when"]) for row in found.values()):
        rows = (found.get((check, device)) for device in devices)
        costs = ["-" if row is None else f"{row['microseconds']:.1f}" for row in rows]
        lines.append(f"| {check} | {when} | {' | '.join(costs)} |")
    return "\n".join(lines)


def changing_shapes() -> str:
    """The newest row of each way to train on each folder's lengths."""
    rows = [row for row in read("changing_shapes.jsonl") if row["what"] == "epoch"]
    found = {(row["lengths"], row["way"], row["label"]): row for row in rows if row["way"] != "plain"}
    lines = [
        "| lengths | shapes | steps | way | the steps, s | other, s | slowest step, s | memory, MiB more |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    labels = ("before", "after", "one capture")
    for (lengths, way, label), row in sorted(
        found.items(), key=lambda item: (item[0][0], labels.index(item[0][2]), item[0][1])
    ):
        name = f"{way}, {label}" if way == "lowtide" else way
        counts = f"{row['shapes']} | {row['steps']} | {name} | {row['training']:.1f} | {row['other']:.1f}"
        lines.append(f"| {lengths} | {counts} | {row['slowest_step']:.1f} | {row['memory_mib']:.0f} |")
    return "\n".join(lines)


def changing_shapes_exact() -> str:
    """For each model how many of its steps of random sizes were as they should be."""
    rows = [row for row in read("changing_shapes.jsonl") if row["what"] == "exact"]
    lines = [
        "| model | budget | shapes | recomputing | same bits | measured peak = predicted | within budget |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in {row["model"]: row for row in rows}.values():
        names = ("shapes", "recomputing", "same_bits", "measured_is_predicted", "within_budget")
        lines.append(f"| {row['model']} | {row['budget']} | {' | '.join(str(row[name]) for name in names)} |")
    return "\n".join(lines)


def hard_limit() -> str:
    """What came of a loop in a process that may reserve its budget and not a byte more."""
    lines = [
        "| step | executor | budget | MiB | outcome | allocated | foretold | reserved | extra time |",
        "|---|---|---|---:|---|---:|---:|---:|---:|",
    ]
    for row in read("hard_limit-h200.jsonl"):
        words = row["model"], row["executor"], row["asked"], f"{row['budget'] >> 20:,}", row["outcome"]
        kept = row["outcome"] == "ok"
        sizes = [row.get(name) if kept else None for name in ("allocated", "plan_reserved", "reserved")]
        told = (f"{size >> 20:,}" if size else "-" for size in sizes)
        extra = format(row["extra"], "+.1%") if kept else "-"
        lines.append(f"| {' | '.join((*words, *told, extra))} |")
    return "\n".join(lines)


def random_modules() -> str:
    """What came of random modules at each budget: of each hundred the newest row."""
    rows = list({(row["seed"], row["first"]): row for row in read("random_modules.jsonl")}.values())
    names = ("equal", "rounded", "WRONG", "refused")
    words = "same bits, predicted = measured", "to rounding, listed", "otherwise", "below the smallest peak"
    lines = [f"| budget | modules | {' | '.join(words)} |", "|---|---:|---:|---:|---:|---:|"]
    for budget in ("100%", "50%", "halfway", "min"):
        counts = [sum(row[budget].get(name, 0) for row in rows) for name in names]
        lines.append(f"| {budget} | {sum(counts)} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "call_checks": call_checks,
    "changing_shapes": changing_shapes,
    "changing_shapes_exact": changing_shapes_exact,
    "ddp_overlap": ddp_overlap,
    "exactness": lambda: exactness(short=True),
    "exactness-all": lambda: exactness(short=False),
    "hard_limit": hard_limit,
    "headtohead": lambda: headtohead_table.table(read("headtohead-h200.jsonl")),
    "headtohead-verdict": lambda: headtohead_table.verdict_table(read("headtohead-h200.jsonl")),
    "models": lambda: models_table.summary(read("models.jsonl")),
    **{
        f"models-{name}": lambda library=library: models_table.table(read("models.jsonl"), library)
        for name, library in MODELS.items()
    },
    "models-in-pieces": lambda: models_table.in_pieces(read("models_in_pieces.jsonl")),
    "paper": paper,
    "plan_times": lambda: plan_times_table(read("plan_times.jsonl")),
    "plans": lambda: plan_tables(plan_results.read()),
    "random_modules": random_modules,
    "sequences": lambda: sequences_results.table(sequences_rows()),
    "sketch_glue": lambda: sketch_glue_results.table(
        sketch_glue_results.read(sketch_glue_results.RESULTS / "sketch_glue-h200.jsonl")
    ),
    "sketch_memory": lambda: sketch_memory_results.tables(
        sketch_memory_results.read(sketch_memory_results.RESULTS / "sketch_memory-h200.jsonl").values()
    ),
}


def fill(text: str) -> str:
    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}"

    return re.sub(r"(<!-- table: ([\w-]+) -->)\n.*?(<!-- end -->)", table, text, flags=re.DOTALL)


def main() -> int:
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        old = path.read_text()
        new = fill(old)
        if new != old and "--check" in sys.argv:
            stale.append(name)
        elif new != old:
            path.write_text(new)
    if stale:
        print(f"not up to date: {', '.join(stale)}; run python benchmarks/tables.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
