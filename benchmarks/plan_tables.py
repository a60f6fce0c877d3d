"""The planners' results as Markdown, for the documents: no torch, the results alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from plan_results import BETWEEN, BOUND, SHARES, Pair, Row, Share, comparisons, gap, losses

__all__ = ["paper_table", "plan_tables", "plan_times_table"]

METHODS = {
    "auto": "auto",
    "quick": "quick look",
    "lower_sets": "lower sets",
    "lower_sets_approximate": "lower sets, approximate",
    "chain": "chain",
    "sequence": "sequence",
    "rotor": "rotor",
    "sqrt_segments": "Chen",
    "per_block": "per block",
    "torch_budget": "torch",
}
"""The methods and the heads of their columns."""

NETWORKS = {
    "pspnet": "PSPNet",
    "unet": "U-Net",
    "resnet50": "ResNet-50",
    "resnet152": "ResNet-152",
    "vgg19": "VGG-19",
    "densenet161": "DenseNet-161",
    "googlenet": "GoogLeNet",
    "vit_b16": "ViT-B/16",
    "gpt2_medium": "GPT-2 medium",
    "llama_1b": "Llama 1B",
    "bert_base": "BERT base",
    "t5_small": "T5 small",
    "mamba": "Mamba",
    "moe": "mixture of experts",
    "lstm200": "LSTM, 200 steps",
    "bert_base_hf": "BERT base, transformers",
    "t5_small_hf": "T5 small, transformers",
    "gpt_deep": "GPT, 208 layers",
}

Rows = dict[Pair, Row]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table with its first column to the left and the others to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def plan_tables(rows: Rows) -> str:
    """Smallest peaks, extra times at each budget, seconds: a table each, a line per graph."""
    parts = [
        summary(rows),
        "Smallest peak that is found, in percent of the vanilla peak, and the extra time there:",
        grid(rows, floor_cell),
    ]
    for share in SHARES:
        parts += [f"Extra time at {share} % of the vanilla peak:", extra_grid(rows, share)]
    parts += [
        "Extra time at budgets that are not round, `auto` / the best of the others:",
        between_grid(rows),
    ]
    return "\n\n".join([*parts, "Seconds of the processor for one plan, at 50 %:", grid(rows, seconds_cell)])


def extra_grid(rows: Rows, share: int) -> str:
    return grid(rows, lambda row: extra_cell(row, share), share=share)


def grid(rows: Rows, cell: Callable[[Row], str], *, share: int | None = None) -> str:
    """Graphs by methods; at a budget also the bound and how far `auto` is from it."""
    methods = {method: head for method, head in METHODS.items() if any(key[1] == method for key in rows)}
    head = ["graph", *methods.values(), *(("bound", "auto's gap") if share else ())]
    lines = []
    for name in dict.fromkeys(graph for graph, _ in rows):
        mine = [rows.get((name, method)) for method in methods]
        line = [NETWORKS[name], *("" if row is None else cell(row) for row in mine)]
        lines.append([*line, *bound_cells(rows, name, share)] if share else line)
    return table(head, lines)


def between_grid(rows: Rows) -> str:
    """A line for each graph that was asked for these budgets, a column per budget."""
    lines = []
    for name in dict.fromkeys(graph for graph, _ in rows):
        auto = rows.get((name, "auto"))
        if auto is not None and str(BETWEEN[0]) in auto.extra:
            others = [row for (graph, method), row in rows.items() if graph == name and method != "auto"]
            lines.append([NETWORKS[name], *(between_cell(auto, others, str(share)) for share in BETWEEN)])
    return table(["graph", *(f"{share} %" for share in BETWEEN)], lines)


def between_cell(auto: Row, others: Iterable[Row], share: str) -> str:
    fitting = [extra for row in others if isinstance(extra := row.extra.get(share), float)]
    return f"{percent(auto.extra.get(share))} / {percent(min(fitting, default=None))}"


def bound_cells(rows: Rows, name: str, share: int) -> tuple[str, str]:
    bound, auto = rows.get((name, BOUND)), rows.get((name, "auto"))
    found = None if auto is None else gap(auto, share)
    return extra_cell(bound, share) if bound else "", "" if found is None else f"{found:.1%}"


def floor_cell(row: Row) -> str:
    if row.floor is None or row.floor_extra is None:
        return missing(row)
    return f"{row.floor / row.vanilla:.0%} ({row.floor_extra:+.0%})"


def extra_cell(row: Row, share: int) -> str:
    return percent(row.extra[str(share)]) if str(share) in row.extra else missing(row)


def seconds_cell(row: Row) -> str:
    if row.seconds is None:
        return missing(row)
    return f"{row.seconds:.0f}" if row.seconds >= 10 else f"{row.seconds:.1f}"


def percent(extra: Share) -> str:
    return "-" if extra is None else extra if isinstance(extra, str) else f"{extra:+.1%}"


def missing(row: Row) -> str:
    return "-" if row.over is None else f"over {row.over} s"


def summary(rows: Rows) -> str:
    """In one sentence: how often `auto` is behind, and the median gap."""
    behind, compared = len(list(losses(rows.values()))), comparisons(rows.values())
    gaps = [known for row in rows.values() if row.method == "auto" and (known := gap(row, 50)) is not None]
    median = f"; its median gap to the bound at 50 % is {statistics.median(gaps):.1%}" if gaps else ""
    return f"`auto` is behind in {behind} of {compared} comparisons{median}."


def paper_table(rows: Rows, paper: dict[str, Any]) -> str:
    """Table 1 of Kusumoto et al. 2019 beside what `auto` does on the same networks."""
    head = [
        "network, batch",
        "paper: vanilla",
        "paper: Chen",
        "paper: best",
        "vanilla",
        "smallest peak",
        "extra time there",
        "extra time at the paper's best share",
        "extra time at 50 %",
    ]
    done = {name: rows[name, "auto"] for name in paper if (name, "auto") in rows}
    return table(head, [paper_line(row, paper[name]) for name, row in done.items()])


def paper_line(row: Row, paper: Any) -> list[str]:
    share = 100 - paper.best_saved
    return [
        f"{NETWORKS[row.graph]}, {paper.batch}",
        f"{paper.vanilla:.1f} GB",
        f"{paper.chen:.1f} GB ({100 - paper.chen_saved}%)",
        f"{paper.best:.1f} GB ({share}%)",
        f"{row.vanilla / 1e9:.1f} GB",
        missing(row) if row.floor is None else f"{row.floor / 1e9:.1f} GB ({row.floor / row.vanilla:.0%})",
        percent(row.floor_extra),
        f"{percent(row.extra.get(str(share)))} at {share}%",
        percent(row.extra.get("50")),
    ]


def plan_times_table(lines: list[dict[str, Any]]) -> str:
    """Seconds of `auto` against ops."""
    head = ["step", "ops", "seconds", "ms per op", "extra time at 50 %"]
    return table(head, [times_line(line) for line in lines])


def times_line(line: dict[str, Any]) -> list[str]:
    each = line["seconds"] / line["ops"] * 1e3
    return [line["kind"], f"{line['ops']:,}", f"{line['seconds']:.1f}", f"{each:.2f}", percent(line["extra"])]
